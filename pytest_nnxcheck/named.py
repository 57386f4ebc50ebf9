"""Checks of classes and functions that the command line names, where no test is written: ``pytest --nnx-check package.models:Block``.

The command line is read first, as text: `read_all`. Then each name is looked up, and pytest collects a marked test of it, whose two lines of source are
written as a user would: the first builds the subject, the second calls it. Tracebacks and the program to paste show these lines.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import functools
import importlib
import inspect
import linecache
import math
import os
import pkgutil
import re
import sys
import traceback
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MethodType, ModuleType, TracebackType
from typing import TYPE_CHECKING, Any

import pytest

from pytest_nnxcheck.core.errors import CheckError, InvariantViolation, SettingError
from pytest_nnxcheck.core.setting_values import MOST_DEVICES
from pytest_nnxcheck.core.settings import CHECK_ID, MARKER, flag
from pytest_nnxcheck.core.text import DTYPES, Unreadable, meant, one_of, some
from pytest_nnxcheck.paste.slicer import globals_in, source_of

if TYPE_CHECKING:
    from pytest_nnxcheck.paste.usage import Usage

__tracebackhide__ = True  # pytest shows the frames of the user, not these

Prepare = Callable[[pytest.Function, type[Exception]], None]
"""Reads the settings of an item. Raises the given error for settings that cannot be read."""
IMPORTS = {"jax": "import jax", "jnp": "import jax.numpy as jnp", "nnx": "from flax import nnx"}
"""Names that an expression may use beside those of its module."""


# --- the notation of the command line

_ROUND = str.maketrans("[]", "()")
_NOTATION = "write f32[8,64], i32[8], key, a plain value such as 3 or True, or name=f32[8,64]; with ';' between several"


@dataclass(frozen=True, slots=True)
class Input:
    """One input, as text."""

    written: str
    name: str = ""
    """The parameter that takes it; empty for the next one."""
    dtype: str = ""
    """The long name, or ``key``; empty for a plain value, which is ``written`` in Python."""
    shape: tuple[int, ...] = ()

    @property
    def spelled(self) -> str:
        """The input as one types it."""
        return f"{self.name}={self.written}" if self.name else self.written

    @property
    def expression(self) -> str:
        """The code that makes it: random numbers, zeros for integers (an index that any table has), and True for a mask."""
        if not self.dtype:
            return self.written
        if self.dtype == "key":
            return f"jax.random.split(jax.random.key(0), {self.shape})" if self.shape else "jax.random.key(0)"
        if self.dtype.startswith(("float", "bfloat", "complex")):
            return f"jax.random.normal(jax.random.key(0), {self.shape}, {self.dtype!r})"
        return f"jnp.{'ones' if self.dtype == 'bool' else 'zeros'}({self.shape}, {self.dtype!r})"


@dataclass(frozen=True, slots=True)
class Named:
    """One check: what ``--nnx-check`` names, with the options that belong to it."""

    module: str
    path: str
    """The name in the module: ``Block``, or ``Block.decode``."""
    inputs: tuple[Input, ...] = ()
    build: str = ""
    """An expression for the object, in the words of the module; empty where its constructor is called."""
    abstract: bool = False
    mesh: tuple[tuple[str, int], ...] = ()
    """The axes of a mesh and their sizes."""
    problem: str = ""
    """Why it cannot be read, where it cannot: then the other fields hold what was typed."""

    @property
    def name(self) -> str:
        return ":".join(filter(None, [self.module, self.path]))

    @property
    def spelled(self) -> str:
        """The inputs as one types them."""
        return ";".join(each.spelled for each in self.inputs)

    @property
    def label(self) -> str:
        """The end of its id, with all that the check is made of. Shapes are in round brackets: square ones hold parameters in the ids of pytest."""
        inputs = [each.spelled.translate(_ROUND) if each.dtype else each.spelled for each in self.inputs]
        mesh = f"mesh {self.axes}" if self.mesh else ""
        text = ";".join(filter(None, [self.build, "abstract" if self.abstract else "", mesh, *inputs]))
        return self.name + (f"({text})" if text else "")

    @property
    def axes(self) -> str:
        """The axes of the mesh as one types them."""
        return ",".join(f"{name}={size}" for name, size in self.mesh)

    @property
    def devices(self) -> int:
        """The devices of its mesh; 1 without one."""
        return math.prod(size for _, size in self.mesh)

    @property
    def options(self) -> list[str]:
        """The options, the name itself aside, as one types them."""
        inputs = [flag("inputs"), self.spelled] if self.inputs else []
        build = [flag("build"), self.build] if self.build else []
        mesh = [flag("mesh"), self.axes] if self.mesh else []
        return [*inputs, *build, *([flag("abstract")] if self.abstract else []), *mesh]

    def over(self, common: Named) -> Named:
        """The same check, with the options that are common to all checks where it has none of its own."""
        if self.problem:
            return self
        inputs, build = self.inputs or common.inputs, self.build or common.build
        abstract, mesh = self.abstract or common.abstract, self.mesh or common.mesh
        return replace(self, inputs=inputs, build=build, abstract=abstract, mesh=mesh)

    def error(self, text: str) -> CheckError:
        """An error with the option that is to blame."""
        return CheckError(f"option {flag('check')} {self.name}: {text}")


def read_all(typed: Iterable[tuple[str, str]], ids: Iterable[str]) -> tuple[Named, ...]:
    """The checks of a command line: ``typed`` are its options in their order, ``ids`` the ids among its arguments.

    An option belongs to the ``--nnx-check`` before it; one before the first belongs to all that have none of their own. Of several checks one that
    cannot be read keeps its problem, and fails as a test. Raises `SettingError` where no check can be read, or not what is common to all.
    """
    common, own = Named("", ""), list[Named]()
    for option, text in typed:
        if option == flag("check"):
            own.append(_read_or_keep(text))
        elif own:
            try:
                own[-1] = _with_option(own[-1], option, text)
            except SettingError as error:
                kept = (*own[-1].inputs, Input(text.translate(_ROUND)))
                own[-1] = replace(own[-1], inputs=kept, problem=own[-1].problem or str(error))
        else:
            common = _with_option(common, option, text)
    own += map(_read_or_keep, ids)
    if not own:
        raise SettingError(f"option {next(iter(typed))[0]} needs a check: add {flag('check')} package.module:Name")
    if all(each.problem for each in own):
        raise SettingError(own[0].problem)
    return tuple(dict.fromkeys(each.over(common) for each in own))


def _with_option(named: Named, option: str, text: str) -> Named:
    """The check with one more of its options. Raises `SettingError`."""
    origin = f"option {option}"
    if option == flag("inputs"):
        return replace(named, inputs=(*named.inputs, *(_input(part, origin) for part in _parts(text))))
    if option == flag("mesh"):
        return replace(named, mesh=_mesh(text, origin))
    return replace(named, build=_expression(text, origin)) if option == flag("build") else replace(named, abstract=True)


def _read_or_keep(text: str) -> Named:
    """Read a name, or a label; one that cannot be read is kept with its problem."""
    try:
        return _read(text)
    except SettingError as error:
        return Named("", text.strip(), problem=str(error))


def _read(text: str) -> Named:
    """Read a name, or a label. Raises `SettingError`."""
    origin = f"option {flag('check')}"
    name, bracket, rest = text.strip().partition("(")
    module, colon, path = name.partition(":")
    if path.startswith(":") or "/" in name or module.endswith(".py"):
        guess = re.sub(r"\.py$", "", module).strip("./").replace("/", ".")
        raise SettingError(
            f"{origin}: {text!r} is a file, write its module: {guess or 'module'}:{path.strip(':') or 'Name'}"
        )
    if not all(part.isidentifier() for part in (*module.split("."), *(path.split(".") if colon else ()))):
        write = "write package.module:Name, or package.module:Class.method"
        raise SettingError(f"{origin}: {text!r} is not a module and a name, {write}")
    if bracket and not rest.endswith(")"):
        raise SettingError(
            f"{origin}: {text!r} has no ')' at its end, write {name} with {flag('inputs')} or {flag('build')}"
        )
    parts = _parts(rest[:-1])
    own = [part for part in parts if part == "abstract" or part.startswith("mesh ")]
    parts = [part for part in parts if part not in own]
    build = _expression(parts.pop(0), origin) if parts and not _is_input(parts[0]) else ""
    mesh = next((_mesh(part.removeprefix("mesh "), origin) for part in own if part != "abstract"), ())
    return Named(module, path, tuple(_input(part, origin) for part in parts), build, "abstract" in own, mesh)


def _expression(text: str, origin: str) -> str:
    """One line of Python. Raises `SettingError`."""
    try:
        return ast.unparse(ast.parse(text.strip(), mode="eval"))
    except (SyntaxError, ValueError) as error:
        raise SettingError(
            f"{origin}: {text!r} is not an expression of Python ({error.args[0]}), write Block(64, rngs=nnx.Rngs(0)) for example"
        ) from None


def _mesh(text: str, origin: str) -> tuple[tuple[str, int], ...]:
    """Read ``data=4,model=2``. Raises `SettingError`."""
    axes = [re.fullmatch(r"\s*([A-Za-z_]\w*)\s*=\s*([1-9]\d*)\s*", part, re.ASCII) for part in text.split(",")]
    found = {axis[1]: int(axis[2]) for axis in axes if axis}
    if len(found) < len(axes):
        raise SettingError(
            f"{origin}: cannot read the mesh {text!r}, write each axis once, with its size: data=4,model=2"
        )
    if (devices := math.prod(found.values())) > MOST_DEVICES:
        raise SettingError(f"{origin}: a mesh {text} has {devices} devices, at most {MOST_DEVICES} can be simulated")
    return tuple(found.items())


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(";") if part.strip()]


def _is_input(text: str) -> bool:
    try:
        return bool(_input(text, ""))
    except SettingError:
        return False


def _input(text: str, origin: str) -> Input:
    """Read ``f32[8,64]``, ``key``, a plain value, or one of these behind ``name=``. Raises `SettingError`."""
    named = re.fullmatch(r"([A-Za-z_]\w*)\s*=\s*(.+)", text)
    name, value = named.groups() if named else ("", text)
    array = re.fullmatch(r"([a-z]\w*)\s*[\[(]([^\])]*)[\])]", value)
    if array is None and value != "key":
        try:
            return Input(repr(ast.literal_eval(value)), name)
        except (SyntaxError, ValueError):
            raise SettingError(f"{origin}: cannot read the input {text!r}, {_NOTATION}") from None
    word, sizes = array.groups() if array else ("key", "")
    try:
        dtype = DTYPES.get(word) or one_of("dtype", word, dict.fromkeys([*DTYPES, *DTYPES.values(), "key"]))
    except Unreadable as error:
        raise SettingError(f"{origin}: {text!r} has an {error}") from None
    if not re.fullmatch(r"(\s*\d+\s*(,\s*\d+\s*)*,?)?\s*", sizes, re.ASCII):
        raise SettingError(f"{origin}: {text!r} needs a shape of numbers from 0 on, {_NOTATION}")
    shape = tuple(map(int, re.findall(r"\d+", sizes)))
    return Input(f"{word}[{','.join(map(str, shape))}]" if array else word, name, dtype, shape)


# --- what is named, and its test


@dataclass(frozen=True, slots=True)
class Written:
    """The test of a check, as two lines of source: one builds the subject and its inputs, one calls."""

    named: Named
    builder: Any
    """The class, or the function, that builds what is checked."""
    method: str
    """The method to check of the object that a class builds; empty for its ``__call__``."""
    names: tuple[str, ...]
    """The names that it takes from the module."""
    case: str
    """An expression for the subject and its inputs."""
    call: str

    @classmethod
    def of(cls, named: Named) -> Written:
        """Import what is named, and write its test. Raises `CheckError`, or the exception of the user's module as it is imported."""
        if named.problem:
            raise CheckError(named.problem)
        if not named.path:
            raise named.error(
                f"it has no function {CHECKS}..., write {named.module}:Name, or {named.module}:Class.method"
            )
        builder, path, method = find(named)
        is_class = isinstance(builder, type)
        is_case = bool(named.build) and isinstance(ast.parse(named.build, mode="eval").body, ast.Tuple | ast.List)
        alone = bool(named.inputs) or (is_class and not is_case)
        case = named.build or built_by(named, builder, path, alone=alone)
        if is_class:
            refuse_inputs(named, builder, path, method or "__call__", alone=alone)
        names = sorted(globals_in(case) - vars(builtins).keys() - IMPORTS.keys())
        for name in names:
            _attribute(named, sys.modules[named.module], name, flag("build"))
        given = "*inputs"
        if alone:
            ordered = sorted(named.inputs, key=lambda each: each.name != "")
            case = ", ".join([case, *(each.expression for each in ordered)]) + "," * (not ordered)
            words = [f"{each.name}=" * bool(each.name) + f"inputs[{number}]" for number, each in enumerate(ordered)]
            given = ", ".join(words) if any(each.name for each in ordered) else given
        return cls(
            named, builder, method, tuple(names), case, f"nnx_wrap(subject{'.' * bool(method)}{method})({given})"
        )

    @property
    def made(self) -> str:
        """The line that builds."""
        return f"subject, *inputs = {f'shapes_of(lambda: ({self.case}))' if self.named.abstract else self.case}"

    def test(self) -> Callable[[Any], None]:
        """The test as a function. What it runs is its source, which pytest finds by the name of the file."""
        file, lines = f"<{CHECK_ID} {self.named.label}>", [f"{line}\n" for line in (self.made, self.call)]
        linecache.cache[file] = (sum(map(len, lines)), None, lines, file)
        case, call = compile(self.case, file, "eval"), compile(f"\n{self.call}", file, "eval")

        def test(nnx_wrap: Any) -> None:
            scope = {name: getattr(sys.modules[self.named.module], name) for name in self.names}
            exec("\n".join(IMPORTS.values()), scope)  # noqa: S102 - three imports

            def made() -> Any:
                return self.accept(eval(case, scope))  # noqa: S307 - it is made of what the user typed

            with under_mesh(self.named.mesh):
                subject, *inputs = shapes_of(made) if self.named.abstract else made()
                eval(call, scope | {"nnx_wrap": nnx_wrap, "subject": subject, "inputs": inputs})  # noqa: S307 - the same

        return test

    def accept(self, built: Any) -> Any:
        """Return what the user's code has built. Raises `CheckError` for what cannot be checked."""
        gives, write = (f"{flag('build')} gives", "write") if self.named.build else ("it returns", "return")
        advice = f"{write} (subject, *inputs), or the model alone and its inputs by {flag('inputs')}"
        if not isinstance(built, tuple | list) or not built:
            raise self.named.error(f"{gives} {shown(built)}: {advice}")
        if not self.method and not callable(built[0]):
            raise self.named.error(f"{gives} {shown(built[0])} as the subject, which cannot be called: {advice}")
        if self.named.abstract and (inspect.ismethod(built[0]) or isinstance(built[0], functools.partial)):
            raise self.named.error(
                f"with {flag('abstract')} {write} a module, or a function that takes its modules as arguments"
            )
        return built

    def usage(self) -> Usage:
        """The user's part of a program to paste."""
        from pytest_nnxcheck.paste.usage import Usage

        usage = Usage(call=self.call)
        for name in self.names:
            usage.slice.take_from(sys.modules[self.named.module], name)
        if self.named.abstract:
            usage.setup[source_of(sys.modules[__name__], "shapes_of")] = None
        if self.named.mesh:
            from pytest_nnxcheck.compat.arrays import context_of_mesh

            usage.setup[f"({context_of_mesh(self.named.mesh)}).__enter__()"] = None
        usage.setup[self.made] = None
        return usage


def under_mesh(axes: Sequence[tuple[str, int]]) -> contextlib.AbstractContextManager[object]:
    """The context of a mesh with these axes; nothing changes without any."""
    if not axes:
        return contextlib.nullcontext()
    import jax

    from pytest_nnxcheck.compat.arrays import context_of_mesh

    context: contextlib.AbstractContextManager[object] = eval(context_of_mesh(axes), {"jax": jax})  # noqa: S307 - the line of a program to paste
    return context


def shown(value: Any) -> str:
    return f"{'an empty' if isinstance(value, tuple | list) and not value else 'a value of type'} {type(value).__qualname__}"


def shapes_of(case: Any) -> list[Any]:
    """Return what ``case()`` returns, with shapes in place of its arrays: none is allocated. Functions and plain values stay as they are."""
    import jax
    from flax import nnx

    fixed = {}

    def is_fixed(leaf: Any) -> bool:
        return isinstance(leaf, bool | int | float | str) or (callable(leaf) and not isinstance(leaf, nnx.Module))

    def arrays() -> Any:
        values = dict(enumerate(case()))
        fixed.update({number: value for number, value in values.items() if all(map(is_fixed, jax.tree.leaves(value)))})
        return {number: value for number, value in values.items() if number not in fixed}

    values = {**nnx.eval_shape(arrays), **fixed}
    return [values[number] for number in sorted(values)]


CHECKS = "check_"
"""The start of the names of the functions that are checked where a module alone is named."""


def whole(named: Named) -> Sequence[Named]:
    """The checks of a module that is named alone; else the one check, also where the module has none, or cannot be imported."""
    if named.path or named.problem:
        return (named,)
    try:
        module = _import(named)
    except Exception:  # noqa: BLE001 - it is imported again, where its exception counts
        return (named,)
    names = [name for name, value in vars(module).items() if name.startswith(CHECKS) and inspect.isfunction(value)]
    return [replace(named, path=name) for name in names] or (named,)


def find(named: Named) -> tuple[Any, str, str]:
    """Import the module, and look up what builds the subject, its name, and the method of the subject. Raises `CheckError`, or what the module raises."""
    holder: Any = _import(named)
    *outer, last = named.path.split(".")
    for word in outer:
        holder = _attribute(named, holder, word)
    value = _attribute(named, holder, last)
    of_class = isinstance(inspect.getattr_static(holder, last), staticmethod | classmethod)
    if isinstance(holder, type) and inspect.isroutine(value) and not of_class:
        return holder, ".".join(outer), last
    if not (isinstance(value, type) or inspect.isroutine(value)):
        advice = "name a class, or write a function that returns (subject, *inputs)"
        raise named.error(f"{named.path} is {shown(value)}: {advice}")
    return value, named.path, ""


def _import(named: Named) -> ModuleType:
    """Import the module that is named. Raises `CheckError` where there is none."""
    try:
        return importlib.import_module(named.module)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if missing != named.module and not named.module.startswith(f"{missing}."):
            raise  # by the module, which is there
    parent, _, last = missing.rpartition(".")
    # Of the modules at top level those of this folder: the others are those of other people.
    folders = getattr(sys.modules.get(parent), "__path__", []) if parent else [str(Path.cwd())]
    near = _near(last, [each.name for each in pkgutil.iter_modules(folders)], every=parent != "")
    raise named.error(f"there is no module {missing}, here or installed{near}")


def _attribute(named: Named, holder: Any, name: str, option: str = "") -> Any:
    """A name of a module or a class. Raises `CheckError`, which blames the option."""
    try:
        return getattr(holder, name)
    except AttributeError:
        text = f"{holder.__name__} has no {name!r}{_near(name, vars(holder))}"
        raise (CheckError(f"option {option}: {text}") if option else named.error(text)) from None


def _near(name: str, there: Iterable[str], *, every: bool = True) -> str:
    """The end of a message: the nearest name, or those that are there."""
    public = sorted(word for word in there if not word.startswith("_"))
    if hint := meant(name, public):
        return f", {hint}"
    return f"; it has {some(public, 8)}" if every and public else ""


def built_by(named: Named, builder: Any, path: str, *, alone: bool) -> str:
    """The call of a builder that asks for ``rngs`` alone, or for nothing. Raises `CheckError`."""
    # The metaclass of flax hides the parameters of a class. Bound, its `__init__` has those that a caller gives.
    constructor = MethodType(builder.__init__, builder) if isinstance(builder, type) else builder  # type: ignore[misc]
    parameters = _parameters(constructor)
    needed = [each.name for each in parameters if each.default is each.empty]
    rngs = ["rngs=nnx.Rngs(0)"] * any(each.name == "rngs" for each in parameters)
    if asked := [name for name in needed if name != "rngs"]:
        given = f"{path}({', '.join([*(f'{name}=...' for name in asked), *rngs])})"
        case = f"({', '.join([path, *needed])})"
        advice = f"'{given}'" if alone else f"'{case}', or '{given}' if it returns (subject, *inputs)"
        raise named.error(f"{path} asks for {', '.join(asked)}: write {flag('build')} {advice}")
    return f"{path}({', '.join(rngs)})"


def refuse_inputs(named: Named, cls: type, path: str, method: str, *, alone: bool) -> None:
    """Refuse an object of a class that cannot be called, or not with the inputs. Raises `CheckError`."""
    function = next((vars(base)[method] for base in cls.__mro__ if method in vars(base)), None)
    if function is None:
        methods = [name for name, value in vars(cls).items() if inspect.isfunction(value) and name[0] != "_"]
        example = f"; name a method, as {named.name}.{methods[0]}" if methods else ", and no public method of its own"
        raise named.error(f"a {path} has no {method}{_near(method, methods)}{example}")
    by_name = {each.name: each for each in named.inputs if each.name}
    with contextlib.suppress(ValueError):  # of code without a signature
        try:
            if alone:
                inspect.signature(function).bind(cls, *(each for each in named.inputs if not each.name), **by_name)
        except TypeError as error:
            asked = ", ".join(each.name for each in _parameters(function)[1:]) or "nothing"
            given = (
                f"{flag('inputs')} has {named.spelled}"
                if by_name or named.inputs
                else f"write {flag('inputs')} 'f32[8,64]', say"
            )
            raise named.error(f"{path}.{method} takes {asked}; {given} ({error})") from None


def _parameters(function: Any) -> list[inspect.Parameter]:
    """The parameters that a caller may name; none for code without a signature."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # code without a signature
        return []
    return [each for each in parameters if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]


# --- its collection by pytest


def labels(args: Iterable[str]) -> dict[str, str]:
    """The arguments of pytest that are ids of checks, with the labels that these end in."""
    return {arg: match[1] for arg in args if (match := re.search(rf"(?:^|[/\\]){CHECK_ID}::(.+)", arg))}


def devices_of_meshes(typed: Sequence[tuple[str, str]], args: Iterable[str]) -> int:
    """The devices of the largest mesh that a command line names; 1 without one. Raises `SettingError`."""
    ids = labels(args).values()
    return max(each.devices for each in read_all(typed, ids)) if typed or ids else 1


def register(
    config: pytest.Config, typed: Sequence[tuple[str, str]], prepare: Prepare, known: Callable[[], Mapping[str, str]]
) -> None:
    """Collect the checks that a command line names, where it names some. ``known`` gives the inputs of calls that a suite made. Raises `SettingError`."""
    ids = labels(config.args)
    if not typed and not ids:
        return
    checks = read_all(typed, ids.values())
    # Where no file is named, the files that pytest would find alone are not run.
    named = config.args_source is config.ArgsSource.ARGS
    config.args[:] = [arg for arg in config.args if named and arg not in ids]
    folder = str(config.invocation_params.dir)
    if folder not in sys.path:  # as with ``python -m pytest``
        sys.path.insert(0, folder)
        config.add_cleanup(lambda: sys.path.remove(folder))
    config.pluginmanager.register(Collection(checks, prepare, known), "nnxcheck_named")


class Collection:
    """Adds the checks to what a session collects."""

    def __init__(self, checks: Sequence[Named], prepare: Prepare, known: Callable[[], Mapping[str, str]]) -> None:
        self.checks, self.prepare, self.known = checks, prepare, known
        self.lines: list[str] = []
        """Sentences on inputs that nobody typed."""

    @pytest.hookimpl
    def pytest_report_collectionfinish(self) -> list[str]:
        """Say which inputs come from the calls of a suite."""
        return self.lines

    def with_inputs(self, named: Named) -> Named:
        """The check with the inputs of a call that a test of this project made, where none are given."""
        text = self.known().get(named.name, "") if not named.inputs and not named.problem else ""
        if not text:
            return named
        try:
            inputs = tuple(_input(part, "the cache of pytest") for part in _parts(text))
        except SettingError:  # a module, or a tree, which nobody can type
            return named
        self.lines.append(f"{CHECK_ID}: {named.name} gets {text}, as a test of this project called it")
        return replace(named, inputs=inputs)

    # Outermost, and first in the list: behind a file with a failure ``--lf`` leaves them out.
    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_make_collect_report(
        self, collector: pytest.Collector
    ) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
        """Put the checks before the files."""
        report = yield
        if isinstance(collector, pytest.Session) and report.passed:
            # In the folder whose conftest.py counts.
            folder = collector.config.invocation_params.dir
            node = NamedModule.from_parent(collector, path=folder, name=CHECK_ID, nodeid=CHECK_ID)
            node.obj, node.collection = ModuleType(CHECK_ID), self
            report.result = [node, *(report.result or ())]
        return report


class NamedModule(pytest.Module):
    """The collector of the checks. A module, since fixtures of that scope need one."""

    collection: Collection

    def collect(self) -> Iterable[pytest.Item]:
        """Make a test of each check; one that cannot be made, or whose module raises as it is imported, fails as a test. Raises `CollectError`."""
        __tracebackhide__ = True
        for named in self.collection.checks:
            yield from map(self._item, whole(self.collection.with_inputs(named)))

    def _item(self, named: Named) -> pytest.Item:
        written, problem = None, None
        try:
            written = Written.of(named)
        except Exception as error:  # noqa: BLE001 - of a check, or of the user's module: the others run all the same
            error.__traceback__ = users_part(error.__traceback__)
            no_line = error.__traceback__ is None  # of the module ran, as with a syntax error
            text = "".join(traceback.format_exception_only(error)).rstrip()
            problem = CheckError(text) if no_line and not isinstance(error, CheckError) else error
        # Where pytest looks for the function of an item.
        needed = {"devices": named.devices} if named.mesh else {}
        setattr(self.obj, named.label, getattr(pytest.mark, MARKER)(**needed)(written.test() if written else never))
        item: NamedItem = NamedItem.from_parent(self, name=named.label)
        item.named, item.written, item.problem = named, written, problem
        self.collection.prepare(item, self.CollectError)
        return item


def never(nnx_wrap: Any) -> None:
    """Do nothing: the test of a check that cannot be made."""


def users_part(frames: TracebackType | None) -> TracebackType | None:
    """The frames of an import from the user's module on."""
    ours = (__file__, str(Path(importlib.__file__).parent), "<frozen importlib")
    while frames is not None and frames.tb_frame.f_code.co_filename.startswith(ours):
        frames = frames.tb_next
    return frames


class NamedItem(pytest.Function):
    """The test of one check."""

    named: Named
    written: Written | None
    """Its test; `None` where there is none."""
    problem: Exception | None
    """The reason why there is none."""

    @property
    def nnx_typed(self) -> tuple[str, list[str]]:
        """The argument of pytest that selects it, and the options that belong to that."""
        return f"{flag('check')}={self.named.name}", self.named.options

    @property
    def nnx_usage(self) -> Usage | None:
        """The user's part of a program to paste."""
        return self.written.usage() if self.written else None

    def reportinfo(self) -> tuple[os.PathLike[str] | str, int | None, str]:
        """The file and line of the named class or function. Not the end of the id: pytest would write its dots as colons."""
        builder: Any = self.written.builder if self.written else None
        try:
            place = inspect.getsourcefile(builder) or "", inspect.getsourcelines(builder)[1] - 1
        except (OSError, TypeError):  # code without a source
            place = getattr(sys.modules.get(self.named.module), "__file__", None) or str(self.path), 0
        return (*place, f"{CHECK_ID} {self.name}")

    def runtest(self) -> None:
        """Run the test. An exception that the call raises without any nesting gets a note with the arguments, and one that asks for a mesh the option for it."""
        from pytest_nnxcheck.compat import refusals

        __tracebackhide__ = True
        if self.problem is not None:
            raise self.problem
        try:
            super().runtest()
        except (CheckError, InvariantViolation):
            raise
        except Exception as error:
            nested = any(note.lstrip().startswith("nesting ") for note in getattr(error, "__notes__", ()))
            if self.named.inputs and not nested:
                error.add_note(f"{CHECK_ID}: the call got {self.named.spelled}, from option {flag('inputs')}")
            if refusals.asks_for_mesh(error) and not self.named.mesh:
                error.add_note(f"{CHECK_ID}: {flag('mesh')} data=4,model=2 makes the model and the call under a mesh")
            raise

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException]) -> object:  # type: ignore[override]
        """One line for a check that cannot be made."""
        return str(excinfo.value) if type(excinfo.value) is CheckError else super().repr_failure(excinfo)
