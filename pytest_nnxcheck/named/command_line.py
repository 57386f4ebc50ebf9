"""The checks that a command line asks for by name, and the notation of their inputs. No jax in it, and no pytest."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from pytest_nnxcheck.core.errors import CheckError, SettingError
from pytest_nnxcheck.core.settings import flag
from pytest_nnxcheck.core.text import Unreadable, one_of

_DTYPES = {
    **{f"f{bits}": f"float{bits}" for bits in (16, 32, 64)},
    **{
        f"{letter}{bits}": f"{name}{bits}" for letter, name in (("i", "int"), ("u", "uint")) for bits in (8, 16, 32, 64)
    },
    "bf16": "bfloat16",
    "c64": "complex64",
    "bool": "bool",
}
"""The short name of a dtype, as jax prints it, and the long one, which may be written too."""
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

    def expression(self, *, abstract: bool) -> str:
        """The code that makes it: random numbers, zeros for integers (an index that any table has), and True for a mask."""
        if not self.dtype:
            value = self.written
        elif self.dtype == "key":
            split = f"jax.random.split(jax.random.key(0), {self.shape})" if self.shape else "jax.random.key(0)"
            value = f"jax.eval_shape(lambda: {split})" if abstract else split
        elif abstract:
            value = f"jax.ShapeDtypeStruct({self.shape}, {self.dtype!r})"
        elif self.dtype.startswith(("float", "bfloat", "complex")):
            value = f"jax.random.normal(jax.random.key(0), {self.shape}, {self.dtype!r})"
        else:
            value = f"jnp.{'ones' if self.dtype == 'bool' else 'zeros'}({self.shape}, {self.dtype!r})"
        return f"{self.name}={value}" if self.name else value


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

    @property
    def name(self) -> str:
        return f"{self.module}:{self.path}"

    @property
    def spelled(self) -> str:
        """The inputs as one types them."""
        return ";".join(each.spelled for each in self.inputs)

    @property
    def label(self) -> str:
        """The end of its id, with all that the check is made of. Shapes are in round brackets: square ones hold parameters in the ids of pytest."""
        inputs = [each.spelled.translate(_ROUND) if each.dtype else each.spelled for each in self.inputs]
        text = ";".join(filter(None, [self.build, "abstract" if self.abstract else "", *inputs]))
        return self.name + (f"({text})" if text else "")

    @property
    def options(self) -> list[str]:
        """The options, the name itself aside, as one types them."""
        inputs = [flag("inputs"), self.spelled] if self.inputs else []
        build = [flag("build"), self.build] if self.build else []
        return [*inputs, *build, *([flag("abstract")] if self.abstract else [])]

    def over(self, common: Named) -> Named:
        """The same check, with the options that are common to all checks where it has none of its own."""
        inputs, build = self.inputs or common.inputs, self.build or common.build
        return replace(self, inputs=inputs, build=build, abstract=self.abstract or common.abstract)

    def error(self, text: str) -> CheckError:
        """An error with the option that is to blame."""
        return CheckError(f"option {flag('check')} {self.name}: {text}")


def read_all(typed: Iterable[tuple[str, str]], ids: Iterable[str]) -> tuple[Named, ...]:
    """The checks of a command line: ``typed`` are its options in their order, ``ids`` the ids among its arguments.

    An option belongs to the ``--nnx-check`` before it; one before the first belongs to all that have none of their own. Raises `SettingError`.
    """
    checks = [Named("", "")]
    for option, text in typed:
        origin, last = f"option {option}", checks[-1]
        if option == flag("check"):
            checks.append(_read(text))
        elif option == flag("inputs"):
            checks[-1] = replace(last, inputs=(*last.inputs, *(_input(part, origin) for part in _parts(text))))
        elif option == flag("build"):
            checks[-1] = replace(last, build=_expression(text, origin))
        else:
            checks[-1] = replace(last, abstract=True)
    common, *own = [*checks, *map(_read, ids)]
    if not own:
        raise SettingError(f"option {next(iter(typed))[0]} needs a check: add {flag('check')} package.module:Name")
    return tuple(dict.fromkeys(each.over(common) for each in own))


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
    problem = "is not a module and a name" if colon else "has no colon"
    if not colon or not all(part.isidentifier() for part in (*module.split("."), *path.split("."))):
        raise SettingError(f"{origin}: {text!r} {problem}, write package.module:Name, or package.module:Class.method")
    if bracket and not rest.endswith(")"):
        raise SettingError(
            f"{origin}: {text!r} has no ')' at its end, write {name} with {flag('inputs')} or {flag('build')}"
        )
    parts, build, abstract = _parts(rest[:-1]), "", False
    if parts and parts[0] != "abstract" and not _is_input(parts[0]):
        build = _expression(parts.pop(0), origin)
    if parts[:1] == ["abstract"]:
        abstract = bool(parts.pop(0))
    return Named(module, path, tuple(_input(part, origin) for part in parts), build, abstract)


def _expression(text: str, origin: str) -> str:
    """One line of Python. Raises `SettingError`."""
    try:
        return ast.unparse(ast.parse(text.strip(), mode="eval"))
    except (SyntaxError, ValueError) as error:
        raise SettingError(
            f"{origin}: {text!r} is not an expression of Python ({error.args[0]}), write Block(64, rngs=nnx.Rngs(0)) for example"
        ) from None


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
        dtype = _DTYPES.get(word) or one_of("dtype", word, dict.fromkeys([*_DTYPES, *_DTYPES.values(), "key"]))
    except Unreadable as error:
        raise SettingError(f"{origin}: {text!r} has an {error}") from None
    if not re.fullmatch(r"(\s*\d+\s*(,\s*\d+\s*)*,?)?\s*", sizes, re.ASCII):
        raise SettingError(f"{origin}: {text!r} needs a shape of numbers from 0 on, {_NOTATION}")
    shape = tuple(map(int, re.findall(r"\d+", sizes)))
    return Input(f"{word}[{','.join(map(str, shape))}]" if array else word, name, dtype, shape)
