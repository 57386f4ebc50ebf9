"""Values as source text: what reads back as the same value, and what stands for one that cannot be written."""

from __future__ import annotations

import dataclasses
import enum
import math
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

MOST_ELEMENTS = 64
"""Larger arrays are written as `jnp.ones` of their shape."""
DEEPEST = 6


class NotLiteral(Exception):
    """A value that no text of a few lines stands for."""


@dataclass
class Literals:
    """Writes values; ``named`` are the definitions that the texts refer to: (module, name)."""

    named: set[tuple[str, str]] = field(default_factory=set)
    stand_ins: bool = False
    """Whether some text has the shape of its value only."""

    def write(self, value: Any, depth: int = DEEPEST) -> str:
        """The text of a value. Raises `NotLiteral`."""
        if value is None or value is ... or type(value) in (bool, int, str, bytes, range):
            return ascii(value) if type(value) is str and not value.isprintable() else repr(value)
        if type(value) in (float, complex):
            return repr(value) if math.isfinite(abs(value)) else f"{type(value).__name__}({str(value)!r})"
        if depth == 0:
            raise NotLiteral
        if (text := self._container(value, depth - 1)) is not None:
            return text
        if isinstance(value, PurePath) and str(value).isprintable():
            return f"__import__('pathlib').Path({str(value)!r})"
        if isinstance(value, enum.Enum):
            return f"{self._reference(type(value))}[{value.name!r}]"
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return self._dataclass(value, depth - 1)
        return self._array(value) or self._reference(value)

    def _container(self, value: Any, depth: int) -> str | None:
        def items(values: Iterable[Any]) -> list[str]:
            return [self.write(item, depth) for item in values]

        kind = type(value)
        if kind is list:
            return f"[{', '.join(items(value))}]"
        if kind is tuple:
            return f"({', '.join(items(value))}{',' * (len(value) == 1)})"
        if kind in (set, frozenset):
            return f"{kind.__name__}([{', '.join(sorted(items(value)))}])"
        if kind is dict:
            pairs = zip(items(value.keys()), items(value.values()), strict=True)
            return f"{{{', '.join(f'{key}: {item}' for key, item in pairs)}}}"
        if kind is slice:
            return f"slice({', '.join(items([value.start, value.stop, value.step]))})"
        return None

    def _dataclass(self, value: Any, depth: int) -> str:
        fields = [member for member in dataclasses.fields(value) if member.init]
        if any(not hasattr(value, member.name) for member in fields):
            raise NotLiteral
        arguments = [f"{member.name}={self.write(getattr(value, member.name), depth)}" for member in fields]
        return f"{self._reference(type(value))}({', '.join(arguments)})"

    def _reference(self, value: Any) -> str:
        """A class or function by its name in its module. Raises `NotLiteral` where it has none."""
        module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
        if not isinstance(module, str) or not isinstance(name, str):
            raise NotLiteral
        named: Any = sys.modules.get(module)
        for part in name.split("."):
            named = getattr(named, part, None)
        if named is not value:
            raise NotLiteral
        if module != "builtins":
            self.named.add((module, name.partition(".")[0]))
        return name

    def _array(self, value: Any) -> str | None:
        import jax
        import numpy as np

        sharding = getattr(value, "sharding", None)
        if sharding is not None and len(sharding.device_set) > 1:
            raise NotLiteral
        if isinstance(value, jax.ShapeDtypeStruct):
            return f"jax.ShapeDtypeStruct({value.shape!r}, {dtype_text(value.dtype)})"
        if isinstance(value, np.dtype):
            return f"np.dtype({value.name!r})"
        if isinstance(value, np.generic):
            return f"np.dtype({value.dtype.name!r}).type({self.write(value.item())})"
        if not isinstance(value, jax.Array | np.ndarray) or isinstance(value, jax.core.Tracer):
            return None
        if isinstance(value, jax.Array) and (value.is_deleted() or not value.is_fully_addressable):
            raise NotLiteral
        return self._values(value)

    def _values(self, value: Any) -> str:
        import jax
        import jax.numpy as jnp
        import numpy as np

        if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            data = self._values(np.asarray(jax.random.key_data(value)))
            return f"jax.random.wrap_key_data({data}, impl={key_kind(value.dtype)!r})"
        home = "jnp" if isinstance(value, jax.Array) else "np"
        plain = np.asarray(value)
        if plain.dtype == object:
            raise NotLiteral
        kind = repr(plain.dtype.name)
        if plain.size and home == "jnp" and (plain == plain.flat[0]).all() and plain.flat[0] in (0, 1):
            return f"jnp.{'ones' if plain.flat[0] else 'zeros'}({plain.shape!r}, {kind})"
        if plain.size <= MOST_ELEMENTS and plain.size:
            return f"{home}.array({self.write(plain.tolist(), DEEPEST)}, {kind})"
        self.stand_ins = self.stand_ins or bool(plain.size)
        return f"{home}.ones({plain.shape!r}, {kind})"


def dtype_text(dtype: Any) -> str:
    """A dtype as text; that of keys has no name that numpy knows."""
    name = getattr(dtype, "name", str(dtype))
    return f"jax.random.key(0, impl={key_kind(dtype)!r}).dtype" if name.startswith("key<") else repr(name)


def key_kind(dtype: Any) -> str:
    """The name by which `jax.random.key` makes keys of a dtype. Raises `NotLiteral`."""
    import jax

    for kind in ("threefry2x32", "rbg", "unsafe_rbg"):
        if jax.random.key(0, impl=kind).dtype == dtype:
            return kind
    raise NotLiteral
