"""The test of a check by name: source that is run as a module, so that tracebacks and the program to paste show it as they show any other test."""

from __future__ import annotations

import ast
import builtins
import functools
import hashlib
import importlib
import inspect
import linecache
import pkgutil
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

from pytest_nnxcheck.core.errors import CheckError
from pytest_nnxcheck.core.settings import CHECK_ID, flag
from pytest_nnxcheck.core.text import meant, some
from pytest_nnxcheck.named.command_line import Named
from pytest_nnxcheck.paste.slicer import globals_in

_IMPORTS = {"jax": "import jax", "jnp": "import jax.numpy as jnp", "nnx": "from flax import nnx"}
_GUARD = "nnx_guard"
"""The function that looks at what the user's code has built, while the test runs. The source that pytest shows has no call of it."""

_SHAPES_OF = '''

def shapes_of(case):
    """What ``case()`` returns, with shapes in place of its arrays: none is allocated."""
    fixed = {}

    def arrays():
        values = dict(enumerate(case()))
        for number, value in values.items():
            function = callable(value) and not isinstance(value, nnx.Module)
            if function or isinstance(value, (bool, int, float, str, type(None))):
                fixed[number] = value
        return {number: value for number, value in values.items() if number not in fixed}

    values = {**nnx.eval_shape(arrays), **fixed}
    return [values[number] for number in sorted(values)]
'''


@dataclass(frozen=True, slots=True)
class Found:
    """The builder and method that a name means."""

    builder: Any
    """The class, or the function, that builds what is checked."""
    path: str
    """The name of the builder in its module."""
    method: str = ""
    """The method to check of the object that a class builds; empty for its ``__call__``."""


def test_of(named: Named) -> tuple[Callable[..., None], tuple[str, int]]:
    """The test of a check, and the file and line of the named class or function. Raises `CheckError`, or the exception of the user's module as it is imported."""
    found = find(named)
    shown = source(named, found)
    module = ModuleType(f"nnx_check_{hashlib.blake2b(named.label.encode(), digest_size=4).hexdigest()}")
    module.__file__ = f"<{CHECK_ID} {named.label}>"
    linecache.cache[module.__file__] = (len(shown), None, shown.splitlines(keepends=True), module.__file__)
    sys.modules[module.__name__] = module
    vars(module)[_GUARD] = _guard(named, found)
    exec(compile(_guarded(shown, named), module.__file__, "exec"), vars(module))  # noqa: S102 - it is made of what the user typed
    return vars(module)[_test_name(found)], _place(named, found)


def _place(named: Named, found: Found) -> tuple[str, int]:
    try:
        return inspect.getsourcefile(found.builder) or "", inspect.getsourcelines(found.builder)[1] - 1
    except (OSError, TypeError):  # code without a source
        return getattr(sys.modules[named.module], "__file__", None) or "", 0


# --- the source


def _guarded(text: str, named: Named) -> ast.Module:
    """The module, with the guard around what the first statement of its test builds."""
    tree = ast.parse(text)
    first: Any = tree.body[-1].body[0]  # type: ignore[attr-defined]
    holder, name = (first.value.args[0], "body") if named.abstract else (first, "value")
    built = getattr(holder, name)
    call = ast.Call(ast.Name(_GUARD, ast.Load()), [built], [])
    setattr(holder, name, ast.copy_location(call, built))
    # The frames between the test and the user's code. A lambda has no variables but its arguments.
    if named.abstract:
        holder.args = ast.parse("lambda __tracebackhide__=True: 0", mode="eval").body.args  # type: ignore[attr-defined]
    for function in (node for helper in tree.body[:-1] for node in ast.walk(helper)):
        if isinstance(function, ast.FunctionDef):
            function.body[:0] = ast.parse("__tracebackhide__ = True").body
    return ast.fix_missing_locations(tree)


def source(named: Named, found: Found) -> str:
    """The text of the module. Raises `CheckError` for a builder that cannot be called."""
    built = named.build or _call(named, found)
    if isinstance(found.builder, type):
        _refuse_inputs(named, found)
    names = globals_in(built) - vars(builtins).keys()
    if _is_one(named, found):
        variable = next(word for word in ("model", "subject", "built") if word not in names)
        called = f"{variable}.{found.method}" if found.method else variable
        inputs = ", ".join(each.expression(abstract=named.abstract) for each in named.inputs)
        lines = [
            f"{variable} = nnx.eval_shape(lambda: {built})" if named.abstract else f"{variable} = {built}",
            f"nnx_wrap({called})({inputs})",
        ]
    else:
        case = f"shapes_of(lambda: {built})" if named.abstract else built
        called = f"subject.{found.method}" if found.method else "subject"
        lines = [f"subject, *inputs = {case}", f"nnx_wrap({called})(*inputs)"]
    helper = _SHAPES_OF if "shapes_of" in lines[0] else ""
    text = f"{helper}\n\ndef {_test_name(found)}(nnx_wrap):\n" + "".join(f"    {line}\n" for line in lines)
    own, module = sorted(names - _IMPORTS.keys()), sys.modules[named.module]
    for name in own:
        if not hasattr(module, name):
            raise CheckError(f"option {flag('build')}: {named.module} has no {name!r}{_near(name, vars(module))}")
    imports = [line for name, line in _IMPORTS.items() if name in globals_in(text)]
    imports += [f"from {named.module} import {', '.join(own)}"] if own else []
    return "\n".join([*imports, text])


def _test_name(found: Found) -> str:
    return f"test_{found.path.replace('.', '_')}"


def _is_one(named: Named, found: Found) -> bool:
    """True if the subject alone is built, and its inputs are those of the command line."""
    return bool(named.inputs) or (isinstance(found.builder, type) and not _is_case(named.build))


def _is_case(build: str) -> bool:
    """True if an expression is written as ``(subject, *inputs)``."""
    return bool(build) and isinstance(ast.parse(build, mode="eval").body, ast.Tuple | ast.List)


def _call(named: Named, found: Found) -> str:
    """The call of a builder that asks for ``rngs`` alone, or for nothing. Raises `CheckError`."""
    is_class = isinstance(found.builder, type)
    parameters = _parameters(found.builder.__init__)[1:] if is_class else _parameters(found.builder)
    asked = [each.name for each in parameters if each.default is each.empty and each.name != "rngs"]
    rngs = "rngs=nnx.Rngs(0)" if "rngs" in [each.name for each in parameters] else ""
    if asked:
        given = ", ".join([*(f"{name}=..." for name in asked), *filter(None, [rngs])])
        advice = f"write {flag('build')} '{found.path}({given})'"
        if not _is_one(named, found):
            case = ", ".join([found.path, *(each.name for each in parameters if each.default is each.empty)])
            advice = f"write {flag('build')} '({case})', or '{found.path}({given})' if it returns (subject, *inputs)"
        raise named.error(f"{found.path} asks for {', '.join(asked)}: {advice}")
    return f"{found.path}({rngs})"


def _parameters(function: Any) -> list[inspect.Parameter]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # code without a signature
        return []
    return [each for each in parameters if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]


# --- what is named


def find(named: Named) -> Found:
    """Import the module, and look the name up. Raises `CheckError`, or what the module raises."""
    holder: Any = _import(named)
    *outer, last = named.path.split(".")
    for word in outer:
        holder = _attribute(named, holder, word)
    value = _attribute(named, holder, last)
    if isinstance(value, type):
        return Found(value, named.path)
    of_class = isinstance(inspect.getattr_static(holder, last), staticmethod | classmethod)
    if isinstance(holder, type) and callable(value) and not of_class:
        return Found(holder, ".".join(outer), last)
    from flax import nnx

    if not callable(value) or isinstance(value, nnx.Module):
        kind = f"a value of type {type(value).__qualname__}"
        raise named.error(f"{named.path} is {kind}: name a class, or write a function that returns (subject, *inputs)")
    return Found(value, named.path)


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


def users_part(frames: TracebackType | None) -> TracebackType | None:
    """The frames of an import from the user's module on."""
    ours = (str(Path(__file__).parent), str(Path(importlib.__file__).parent), "<frozen importlib")
    while frames is not None and frames.tb_frame.f_code.co_filename.startswith(ours):
        frames = frames.tb_next
    return frames


def _attribute(named: Named, holder: Any, name: str) -> Any:
    try:
        return getattr(holder, name)
    except AttributeError:
        raise named.error(f"{holder.__name__} has no {name!r}{_near(name, vars(holder))}") from None


def _near(name: str, there: Iterable[str], *, every: bool = True) -> str:
    """The end of a message: the nearest name, or those that are there."""
    public = sorted(word for word in there if not word.startswith("_"))
    if hint := meant(name, public):
        return f", {hint}"
    return f"; it has {some(public, 8)}" if every and public else ""


def _refuse_inputs(named: Named, found: Found) -> None:
    """Refuse an object that cannot be called, or not with the inputs. Raises `CheckError`."""
    method = found.method or "__call__"
    function = next((vars(base)[method] for base in found.builder.__mro__ if method in vars(base)), None)
    if function is None:
        there = vars(found.builder).items()
        methods = [name for name, value in there if inspect.isfunction(value) and not name.startswith("_")]
        example = f"; name a method, as {named.name}.{methods[0]}" if methods else ", and no public method of its own"
        raise named.error(f"a {found.path} has no {method}{_near(method, methods)}{example}")
    if not _is_one(named, found):
        return
    try:
        positional = [each for each in named.inputs if not each.name]
        inspect.signature(function).bind(found, *positional, **{each.name: each for each in named.inputs if each.name})
    except TypeError as error:
        asked = ", ".join(each.name for each in _parameters(function)[1:]) or "nothing"
        given = f"{flag('inputs')} has {named.spelled}" if named.inputs else f"write {flag('inputs')} 'f32[8,64]', say"
        raise named.error(f"{found.path}.{method} takes {asked}; {given} ({error})") from None
    except ValueError:
        return  # code without a signature


# --- what the user's code builds


def _guard(named: Named, found: Found) -> Callable[[Any], Any]:
    """A function that returns what it gets. Raises `CheckError` for what cannot be checked."""

    def guard(built: Any) -> Any:
        kind = f"a value of type {type(built).__qualname__}"
        gives, write = (f"{flag('build')} gives", "write") if named.build else ("it returns", "return")
        advice = f"{write} (subject, *inputs), or give the inputs of a model by {flag('inputs')}"
        if _is_one(named, found):
            if not callable(built) and not found.method:
                raise named.error(
                    f"{gives} {kind}, which cannot be called: with {flag('inputs')} {write} the model alone"
                )
        elif not isinstance(built, tuple | list):
            raise named.error(f"{gives} {kind}: {advice}")
        elif not built or not (found.method or callable(built[0])):
            raise named.error(f"the first value that {gives} cannot be called: {advice}")
        elif named.abstract and (inspect.ismethod(built[0]) or isinstance(built[0], functools.partial)):
            raise named.error(
                f"with {flag('abstract')} {write} a module, or a function that takes its modules as arguments"
            )
        return built

    return guard
