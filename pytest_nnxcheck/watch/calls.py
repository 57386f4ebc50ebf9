"""The distinct calls that a suite makes of its models: of a module, of one of its public methods, of what `nnx.jit` returned, of a function that takes modules.

A call counts if no trace is under way and it is inside no other such call. Two calls are one if they have the same code, structure, types and static
arguments: numbers and shapes tell them apart only where all shapes are asked for.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import operator
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType
from typing import Any

from pytest_nnxcheck.compat.owner import Owner, of_frame
from pytest_nnxcheck.core.settings import CALL_ID
from pytest_nnxcheck.core.text import DTYPES, first_line
from pytest_nnxcheck.walk.raw_access import class_dict, class_name, mro
from pytest_nnxcheck.watch import leftovers

MOST_MISSES = 64
"""The calls of a function without a module among its arguments after which it is taken for one that never gets any."""
_MOST_TEXT = 40
"""Characters of a static argument in the name of a call."""
_NO_CALL = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
_ENDS = ("pytest_pyfunc_call", "pytest_fixture_setup", "runtest", "pytest_runtest_call")
"""Functions of pytest that call the user's: further out no frame is a call of the test."""
_ROUND = str.maketrans("[]", "()")
_SHORT = {long: short for short, long in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class SuiteCall:
    """A call that is about to be made."""

    subject: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: str
    """The name of its function, as ``package.models:Block.decode``."""
    inputs: tuple[str, ...]
    """Its arguments beside the module: ``f32[8,64]`` and ``train=False``."""
    caller: FrameType
    """The user's frame that makes it."""
    jitted: bool
    code: CodeType
    key: tuple[Any, ...]
    """Calls with equal keys are one."""

    @property
    def text(self) -> str:
        """The call as one writes it."""
        return f"{self.target.replace(':', '.')}({', '.join(self.inputs)})"

    @property
    def name(self) -> str:
        """The id of its item. Shapes are in round brackets: square ones hold parameters in the ids of pytest."""
        return f"{CALL_ID}::{self.text.translate(_ROUND)}"

    @property
    def digest(self) -> str:
        """A few letters that tell it from another call with the same name, the same in every process."""
        structure = [part for part in self.key if part is not self.code]  # a code has its address in its text
        return hashlib.sha256(repr(structure).encode()).hexdigest()[:6]


@dataclass(slots=True)
class Recorder:
    """Finds the calls among all functions that start, and hands each distinct one on before it is made."""

    found: Callable[[SuiteCall, bool], None]
    """Takes each call once a test, and whether it is the first of its kind."""
    all_shapes: bool = False
    seen: set[tuple[Any, ...]] = field(default_factory=set)
    eager: set[CodeType] = field(default_factory=set)
    """The code of calls that read values: the calls inside of them count."""
    busy: bool = False
    """True while a call is looked at: what that starts is none of the test's."""
    faults: list[str] = field(default_factory=list)
    """Sentences on what was not looked at."""
    codes: frozenset[CodeType] = frozenset()
    """The code of the test that runs."""
    instance: object = None
    _misses: dict[CodeType, int] = field(default_factory=dict)
    _quick: dict[Any, tuple[weakref.ref[Any], ...]] = field(default_factory=dict)
    """Calls of this test by what is there without work, each with its objects: a loop makes one a thousand times. An object that is gone leaves its id to another."""

    def of(self, functions: Iterable[FunctionType], instance: object) -> None:
        """Record the calls of another test."""
        self.codes, self.instance = frozenset(function.__code__ for function in functions), instance
        self._quick.clear()

    def look_again(self) -> None:
        """Look at the next call of the same objects, whose structure may be another one."""
        self._quick.clear()

    def started(self, frame: FrameType) -> bool:
        """Hear of the start of a function. Returns False for code that is called by no test, as a call of a model."""
        code, whose = frame.f_code, writer(frame)
        is_jit = whose == "flax" and code.co_name in ("__call__", "update_context_manager_wrapper")
        if not (is_jit or (whose == "user" and may_be_called(code))):
            return False
        nnx = sys.modules.get("flax.nnx")
        if self.busy or code in self.codes or getattr(nnx, "Module", None) is None:  # while flax is being imported
            return True
        self.busy = True
        try:
            return self._look(frame, is_jit=is_jit)
        except Exception as error:  # noqa: BLE001 - it would end the user's call
            self.faults.append(
                f"{code.co_qualname} was not looked at, by a fault of pytest-nnxcheck: {type(error).__name__}: {error}"
            )
            return False
        finally:
            self.busy = False

    def _look(self, frame: FrameType, *, is_jit: bool) -> bool:
        from pytest_nnxcheck.compat import graph, jits

        code, given = frame.f_code, handed(frame)
        first = given[0] if given else None
        jitted = jits.called_jit(frame) if is_jit else None
        if jitted is None and not any(map(is_module, given[:1] if is_jit else given)):
            self._misses[code] = self._misses.get(code, 0) + 1
            return self._misses[code] < MOST_MISSES
        objects: list[Any] = []
        quick = (code, *(quickly(value, objects) for value in (jitted, *given)))
        known = (ref() for ref in self._quick.get(quick, ()))
        is_known = quick in self._quick and all(map(operator.is_, known, objects))
        if is_known or graph.is_tracing() or first is self.instance is not None or self._is_inside(frame):
            return True
        with contextlib.suppress(TypeError):  # of an object that has no weak references
            self._quick[quick] = tuple(map(weakref.ref, objects))
        if any(issubclass(type(value), mock_types()) for value in given):
            return True
        for call in self._made(frame, jitted):
            is_first = call.key not in self.seen
            self.seen.add(call.key)
            self.found(call, is_first)
        return True

    def _is_inside(self, frame: FrameType) -> bool:
        """True if a frame further out is such a call, the constructor of a module, or ours."""
        from pytest_nnxcheck.compat import jits

        for outer in leftovers.callers(frame):
            code = outer.f_code
            if code in self.codes or code.co_name in _ENDS:
                return False
            whose, given = writer(outer), handed(outer)
            of_test = bool(given) and given[0] is self.instance is not None
            is_call = whose == "user" and code not in self.eager and not of_test
            if whose == "ours" or (is_call and any(map(is_module, given))):
                return True
            if whose == "flax" and (jits.called_jit(outer) is not None or (given and is_module(given[0]))):
                return True
        return True

    def _made(self, frame: FrameType, jitted: Any) -> Iterator[SuiteCall]:
        """The call that a frame is; none where what was called cannot be named."""
        from pytest_nnxcheck.compat import jits
        from pytest_nnxcheck.core.errors import CheckError

        code = frame.f_code
        args, kwargs = arguments(frame)
        if jitted is not None and code.co_name == "__call__":
            args = args[1:]
        subject: Any = jitted
        owner = args[0] if jitted is None and args and is_module(args[0]) else None
        name = None if owner is None else method_name(type(owner), code)
        if name == "" or "__captures__" in getattr(owner, "__dict__", ()):
            return  # by `super()`, or for the values that `nnx.capture` keeps
        if name is not None:
            args = args[1:]
            subject = owner if name == "__call__" else getattr(owner, name)
            target = f"{type(owner).__module__}:{class_name(type(owner))}" + f".{name}" * (name != "__call__")
        elif jitted is None and frame.f_back is not None and of_frame(frame.f_back) in ("jax", "flax"):
            return  # a callback that flax calls, such as that of `nnx.recursive_map`
        else:
            subject = subject if jitted is not None else jits.function_of(frame)
            function = jits.function_in(subject)
            path = str(getattr(function, "__qualname__", type(function).__qualname__))
            target = f"{getattr(function, '__module__', '')}:{path.replace('.<locals>', '').removesuffix('.__call__')}"
        caller = next(leftovers.of_user(frame.f_back), None)
        if subject is None or caller is None:
            return
        if jitted is None:
            args, kwargs = as_written(subject, args, kwargs)
        spelled = (*map(spell, args), *(f"{name}={spell(value)}" for name, value in kwargs.items()))
        try:
            key = (*key_of(subject, tuple(args), kwargs, all_shapes=self.all_shapes),)
        except CheckError as error:  # nothing that a transform can take
            self.faults.append(f"{target} was not checked: {first_line(error)}")
            return
        yield SuiteCall(
            subject, tuple(args), kwargs, target, spelled, caller, jitted is not None, code, (target, code, *key)
        )


def quickly(value: Any, objects: list[Any]) -> Any:
    """Tell a value from others without work; the ``objects`` that are known by their ids are added."""
    if is_array(value):
        return type(value), value.shape
    if type(value) in (tuple, list, dict):
        items = value.items() if type(value) is dict else value
        return type(value), tuple(quickly(item, objects) for item in items)
    if value is None or type(value) in (bool, int, float, str):
        return type(value), value
    objects.append(value)
    return id(value)


def writer(frame: FrameType) -> Owner:
    """The owner of the code of a frame; what a decorator generated, as beartype does, is of no file of the user's."""
    return "python" if frame.f_code.co_filename.startswith("<") else of_frame(frame)


def is_array(value: object) -> bool:
    """True for an array or its shape, by its type: an `nnx.Rngs` has every attribute that it is asked for."""
    import jax

    from pytest_nnxcheck.compat import arrays

    return arrays.is_array(value) or isinstance(value, jax.ShapeDtypeStruct)


def may_be_called(code: CodeType) -> bool:
    """True for a plain function with arguments and a public name, or ``__call__``."""
    takes = code.co_argcount or code.co_kwonlyargcount or code.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS)
    is_public = code.co_name == "__call__" or not code.co_name.startswith(("_", "<"))
    return bool(takes and is_public and not code.co_flags & _NO_CALL)


def is_module(value: object) -> bool:
    """True for a module of nnx, by its type: `isinstance` asks a lazy object for its class."""
    return any(base is sys.modules["flax.nnx"].Module for base in mro(type(value)))


def mock_types() -> tuple[type, ...]:
    mock = sys.modules.get("unittest.mock")
    return () if mock is None else (mock.NonCallableMock,)


def handed(frame: FrameType) -> list[Any]:
    """The values of the arguments of a frame that begins; its variables may have others later."""
    args, kwargs = arguments(frame)
    return [*args, *kwargs.values()]


def arguments(frame: FrameType) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of a frame, by position and by name."""
    code, values = frame.f_code, frame.f_locals
    names, end = code.co_varnames, code.co_argcount + code.co_kwonlyargcount
    args = [values[name] for name in names[: code.co_argcount] if name in values]
    kwargs = {name: values[name] for name in names[code.co_argcount : end] if name in values}
    if code.co_flags & inspect.CO_VARARGS:
        args += values.get(names[end], ())
        end += 1
    if code.co_flags & inspect.CO_VARKEYWORDS:
        kwargs |= values.get(names[end], {})
    return args, kwargs


def as_written(function: Any, args: list[Any], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """The arguments as the caller most likely wrote them: those with a default by their names, and only where they have another value."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # code without a signature
        return args, kwargs
    defaults = {name: each.default for name, each in parameters.items()}
    own = [*parameters.values()]
    if len(args) <= len(own):
        needed = sum(each.default is each.empty or each.kind is each.POSITIONAL_ONLY for each in own[: len(args)])
        kwargs = {**{each.name: value for each, value in zip(own[needed:], args[needed:], strict=False)}, **kwargs}
        args = args[:needed]
    return args, {
        name: value for name, value in kwargs.items() if defaults.get(name, inspect.Parameter.empty) is not value
    }


def method_name(cls: type, code: CodeType) -> str | None:
    """The method of a class that some code is of, or that a decorator made of it; empty for one that is overridden, `None` for none."""
    names = dict.fromkeys(name for base in mro(cls) for name in class_dict(base))
    found = next((name for name in names if code in codes_of(inspect.getattr_static(cls, name, None))), None)
    overridden = found is None and any(
        code in codes_of(value) for base in mro(cls) for value in class_dict(base).values()
    )
    return "" if overridden else found


def codes_of(value: Any) -> tuple[Any, ...]:
    """The code of a function, and of the function that it wraps."""
    if not callable(value) or isinstance(value, type):
        return ()
    with contextlib.suppress(ValueError):  # of a wrapper that wraps itself
        return getattr(value, "__code__", None), getattr(inspect.unwrap(value), "__code__", None)
    return ()


def spell(value: Any) -> str:
    """An argument in the name of a call: ``f32[8,64]``, the class of an object, a plain value; a tree by its leaves."""
    if is_array(value):
        return f"{_SHORT.get(str(value.dtype), str(value.dtype))}[{','.join(map(str, value.shape))}]"
    if value is None or type(value) in (bool, int, float, str):
        text = repr(value)
        return text if len(text) <= _MOST_TEXT else f"{text[:_MOST_TEXT]}..."
    if type(value) in (tuple, list):
        return f"({', '.join(map(spell, value))})"
    if type(value) is dict:
        return f"{{{', '.join(f'{key}: {spell(item)}' for key, item in value.items())}}}"
    return kind_name(value).rpartition(".")[2]


def kind_name(value: object) -> str:
    """The name of a function or a class, else that of the class of an object."""
    is_named = issubclass(type(value), (type, FunctionType, BuiltinFunctionType))
    return str(value.__qualname__) if is_named else class_name(type(value))  # type: ignore[attr-defined]


def key_of(subject: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, all_shapes: bool) -> Iterator[Any]:
    """The structure, types and static arguments of a call; without ``all_shapes`` the number of axes in place of a shape, and no numbers. Raises `CheckError`."""
    from pytest_nnxcheck.compat import graph
    from pytest_nnxcheck.subject.subject import bind

    def kind(value: Any) -> Any:
        if is_array(value):
            return str(value.dtype), tuple(value.shape) if all_shapes else len(value.shape)
        if value is None or type(value) in (bool, str) or (all_shapes and type(value) in (int, float)):
            return value
        return kind_name(value)

    bound = bind(subject, args, kwargs)
    yield tuple(
        (path, graph.variable_kind(each), kind(graph.variable_value(each)))
        for path, each in graph.variables(bound.state)
    )
    # flax hands attributes back from a jit in another order.
    yield tuple(sorted(((path, kind(value)) for path, value in graph.attributes(bound.state)), key=repr))
    yield tuple(map(kind, bound.inputs))
    yield tuple((name, kind(value)) for name, value in bound.static)
