"""Invariants of your own: their description, their registration, and the hook of pytest that hands them in.

Nothing here imports jax, flax, hypothesis or pytest.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pytest_nnxcheck.core.catalogue import INVARIANT_ROWS, OWN_INVARIANTS, InvariantRow, layer_names
from pytest_nnxcheck.core.errors import CheckError
from pytest_nnxcheck.core.text import first_line, near, place_of

if TYPE_CHECKING:
    import pytest

    # Late, as in `core.expected_failures`: these dataclasses take a tenth of the time that loading the plugin does.
    from pytest_nnxcheck.core.facts import NestedCall
    from pytest_nnxcheck.core.outcome import Breach

_WORD = re.compile(r"[A-Za-z_]\w*")
HOOK = "pytest_nnx_invariants"


@dataclass(frozen=True, slots=True)
class Invariant:
    """An invariant of your own: a name, a function, and options that say when the plugin calls the function."""

    name: str
    """The word that ``invariants`` names it by."""
    function: Callable[[NestedCall], Iterable[Breach]]
    """``function(call)`` yields a `Breach` for each thing that is broken, and nothing if the invariant holds."""
    default: bool = False
    """If true, tests below the conftest.py that registers it assert it, unless they name other invariants; if false, only where it is named."""
    compiled: bool = False
    """If true, it is asserted only where the outermost layer is a jit, so that the call has ``memory`` and ``compiled``."""
    values: bool = False
    """If true, it may read values: every nesting runs, none is only traced, and abstract calls are not judged."""


def register_invariant(invariant: Invariant) -> None:
    """Register an invariant of your own, so that ``invariants`` can name it. All later checks assert it if its ``default`` is true.

    Call this above the `check`. In pytest, return your invariants from the hook ``pytest_nnx_invariants`` instead. Raises `CheckError` if
    the invariant cannot be used.
    """
    add(invariant, default=_checked(invariant).default)


def add(invariant: Invariant, *, default: bool) -> None:
    """Let settings name an invariant. Raises `CheckError` where another one has its name."""
    place = place_of(invariant.function)
    earlier = OWN_INVARIANTS.get(invariant.name)
    if earlier is not None and earlier.place != place:
        raise CheckError(
            f"the invariant {invariant.name!r} is handed in twice, from {near(earlier.place)} and from {near(place)}: give one of them"
            " another name"
        )
    default = default or (earlier is not None and earlier.default)
    OWN_INVARIANTS[invariant.name] = InvariantRow(
        invariant.name,
        default=default,
        compiled=invariant.compiled,
        values=invariant.values,
        runs=invariant.values,
        function=invariant.function,
        place=place,
    )


def handed_in(hook: Any, config: pytest.Config) -> tuple[str, ...]:
    """Add the invariants that the implementations of the hook hand in. Returns the names of those on by default. Raises `CheckError`."""
    places = [near(place_of(implementation.function)) for implementation in hook.get_hookimpls()]
    who = f"{HOOK} ({', '.join(places)})"
    try:
        invariants = [_checked(invariant, who) for given in hook(config=config) for invariant in _listed(given, who)]
    except CheckError:
        raise
    except Exception as error:  # noqa: BLE001 - the user's code may raise anything
        raise CheckError(f"{who} raised {first_line(error)}") from None
    for invariant in invariants:
        add(invariant, default=False)
    return tuple(invariant.name for invariant in invariants if invariant.default)


def _listed(given: object, who: str) -> list[object]:
    if isinstance(given, str | Invariant) or not isinstance(given, Iterable):
        raise CheckError(f"{who} returned {given!r:.80}, write a list: [Invariant('name', function)]")
    return [*given]


def _checked(invariant: object, who: str = "register_invariant") -> Invariant:
    """Return the invariant if it can be used. Raises `CheckError`."""
    if not isinstance(invariant, Invariant):
        raise CheckError(f"{who} got {invariant!r:.80}, write pytest_nnxcheck.Invariant('name', function)")
    name: object = invariant.name
    function: object = invariant.function
    if not callable(function):
        raise CheckError(
            f"{who}: the function of the invariant {name!r} is {function!r:.60}, write a function of a call"
        )
    if not isinstance(name, str) or not _WORD.fullmatch(name):
        raise CheckError(f"{who}: {name!r} is no name of an invariant, write a word such as 'parameters_are_float32'")
    taken = {"an invariant": [row.name for row in INVARIANT_ROWS], "a transform": layer_names()}
    for what, words in taken.items():
        if name in words:
            raise CheckError(f"{who}: {name!r} is the name of {what} already, write another one")
    return invariant
