"""Programs that lower to the same text are compiled once: a jit, and the same jit over an ``eval_shape`` or an idle ``remat``, say."""

from __future__ import annotations

import re
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

from pytest_nnxcheck.compat.compilation import compiler_options
from pytest_nnxcheck.compat.compile_cache import judged_compiles

__tracebackhide__ = True  # pytest shows the frames of the user, not these

_FUNCTION = re.compile(r"func\.func (?:public |private )?@([\w.$-]+)")
_NAMES = re.compile(r'module @\S+ |jax\.result_info = "[^"]*"(?:, )?')


def canonical(text: str) -> str:
    """The text of a StableHLO module without the names that jax gives: of the module, its results and its functions."""
    text = _NAMES.sub("", text)
    numbers = {name: str(number) for number, name in enumerate(dict.fromkeys(_FUNCTION.findall(text)))}
    return re.sub(r"@([\w.$-]+)", lambda match: f"@{numbers.get(match[1], match[1])}", text)


def beside_text(lowered: Any) -> Hashable | None:
    """What differs between programs of the same text: devices, weak types, kinds of keys, constants that are handed in.

    `None` for a program that calls Python code: the text names a callback by its primitive, from jax 0.6 on without an address. With
    ``jax_use_simplified_jaxpr_constants`` a captured array is an argument of the program, which keeps it alive, so that its id stays its own.
    No public way: ``in_avals`` and ``out_info`` lack the devices, and ``out_info`` the weak types. Tried on all versions.
    """
    try:
        arguments = lowered._lowering.compile_args
        if arguments["keepalive"] or arguments["host_callbacks"]:
            return None
        types = (
            tuple(arguments[name]) for name in ("global_in_avals", "global_out_avals", "in_shardings", "out_shardings")
        )
        constants = tuple(map(id, getattr(lowered._lowering, "const_args", None) or ()))
        beside = (*types, arguments.get("device_assignment"), constants)
        hash(beside)
    except (AttributeError, KeyError, TypeError):
        return None
    return beside


@dataclass(frozen=True, slots=True)
class Compiled:
    """The compiled program of a lowered one."""

    program: Any
    shared: bool
    """It was compiled for another lowered program of the same text, and has the lines of that one."""
    lowered: Any
    read: dict[Any, Any] = field(default_factory=dict)
    """What was read of the program, for all that share it."""

    def __call__(self, *args: Any) -> Any:
        """Run it on the arguments of the program that was lowered. Raises what jax raises."""
        if not self.shared:
            return self.program(*args)
        import jax

        positional, keywords = jax.tree.unflatten(self.program.in_tree, jax.tree.leaves((args, {})))
        return jax.tree.unflatten(self.lowered.out_tree, jax.tree.leaves(self.program(*positional, **keywords)))


@dataclass(slots=True)
class SharedPrograms:
    """The compiled programs of one test, by their text and what it leaves out. All versions: what ``as_text`` prints has no locations."""

    known: dict[tuple[str, Hashable], Compiled] = field(default_factory=dict)
    on: bool = True

    def compiled(self, lowered: Any, *, alone: bool = False) -> Compiled:
        """The compiled program of a lowered one; ``alone`` compiles it anew. Raises what XLA raises."""
        beside = None if alone or not self.on else beside_text(lowered)
        if beside is None:
            with judged_compiles():
                program = lowered.compile(compiler_options=compiler_options())
            return Compiled(program, shared=False, lowered=lowered)
        key = (canonical(lowered.as_text()), beside)
        if key in self.known:
            known = self.known[key]
            return Compiled(known.program, shared=True, lowered=lowered, read=known.read)
        self.known[key] = self.compiled(lowered, alone=True)
        return self.known[key]

    def program(self, lowered: Any) -> Any:
        """The program alone, to read it."""
        return self.compiled(lowered).program
