"""The transforms and the invariants: one row each. Every other table of them is a query of these rows.

To add a transform: a row here, its functions in `transforms`, a hint in `core.notes`. To add an invariant: one file in `invariants`, which begins
with its row.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

STYLES = ("argument", "functional", "closure", "jax_closure")
"""The ways in which a layer gets the module, plainest first."""
HANDED = STYLES[:2]
"""The styles that hand the module over; the others capture it."""

REF = "ref"

MODES = ("current", "graph", "graph_no_updates", "tree", REF)
"""The modes of flax, plainest first; ``current`` is the one that flax is set to, and is not written; ``ref`` is tree mode with the Variables in references."""

Axis = Literal["", "steps", "elements", "calls"]
Loop = Literal["", "counted", "uncounted"]
Pair = Literal["", "first call", "gradients"]
Meaning = Literal["", "carry", "map", "repeat", "call first"]


class Transform(NamedTuple):
    """One transform. A row with a name and nothing else wraps the call, and does no more."""

    name: str
    styles: tuple[str, ...] = STYLES
    default: bool = False
    """Nestings have it where ``transforms`` names no others."""
    means: Meaning = ""
    """The eager calls that it means."""
    axis: Axis = ""
    """The things that the leading axis of its inputs and outputs counts."""
    loop: Loop = ""
    """It carries the state from step to step. jax differentiates only a loop whose steps are counted beforehand."""
    branches: bool = False
    """It makes the call or skips it, and hands the unchanged state on then."""
    pair: Pair = ""
    """The value that it returns beside the output of the call."""
    adds_state: bool = True
    """As an argument layer it takes a call that adds state; no loop and no branch does."""
    excludes_itself: str = ""
    """Why it is not put inside itself."""
    compiles: bool = False
    """As the outermost layer it makes a program, which is judged for memory and donation."""
    runs_nothing: bool = False
    """It only traces."""
    idle: bool = False
    """If nothing is differentiated, XLA compiles the same program with it and without."""
    on_mesh: bool = False
    """State and inputs lie on all devices."""

    @property
    def fixes_state(self) -> bool:
        """True if, as an argument layer, it cannot take a call that adds state."""
        return self.carries or not self.adds_state

    @property
    def carries(self) -> bool:
        """True if it hands the state on as it is: in a carry, or beside a branch that skips the call."""
        return bool(self.loop) or self.branches


JIT, REMAT, GRAD, CALL_FIRST = "jit", "remat", "grad", "call_first"

ROWS = (
    Transform(JIT, default=True, compiles=True),
    Transform(REMAT, default=True, idle=True),
    Transform("scan", default=True, means="carry", axis="steps", loop="counted"),
    Transform("vmap", default=True, means="map", axis="elements", adds_state=False),
    Transform("while_loop", default=True, means="repeat", loop="uncounted"),
    Transform("eval_shape", default=True, runs_nothing=True, idle=True),
    # It calls the subject once before the inner program, in the same trace; how it gets the module is no question.
    Transform(CALL_FIRST, styles=STYLES[:1], means="call first", axis="calls", pair="first call"),
    Transform("fori_loop", means="repeat", loop="counted"),
    Transform("cond", branches=True),
    Transform("switch", branches=True),
    Transform(
        GRAD,
        pair="gradients",
        excludes_itself="grad inside grad differentiates twice, which is not what this layer is for",
    ),
    # jax refuses a custom rule whose function captures what is differentiated.
    Transform("custom_vjp", styles=STYLES[:2], adds_state=False),
    Transform(
        "shard_map",
        on_mesh=True,
        excludes_itself="shard_map cannot map the axis of its mesh again, inside a shard_map over it",
    ),
)
"""All transforms, plainest first: hypothesis shrinks towards earlier rows."""

CATALOGUE = {row.name: row for row in ROWS}

TRANSFORMS = tuple(row.name for row in ROWS if row.default)
"""The transforms of the default, plainest first."""

FURTHER = tuple(row.name for row in ROWS if not row.default and row.name != CALL_FIRST)
"""Transforms that are in a nesting only where ``transforms`` names them."""


LEAST_SEVERE = 1000
"""The severity of the user's own invariants."""


class InvariantRow(NamedTuple):
    """One invariant."""

    name: str
    order: int = 0
    """The place among the built-in ones in which it is judged, and named in documents."""
    severity: int = LEAST_SEVERE
    """A failure is named after the invariant that broke with the smallest number."""
    default: bool = False
    """It is asserted where ``invariants`` names no others."""
    compiled: bool = False
    """It is about compiled programs: asserted where the outermost layer is a jit."""
    targeted: bool = False
    """The compilers of targets judge it as well."""
    values: bool = False
    """It is about values, which a trace does not have; asserted where all other invariants hold."""
    runs: bool = False
    """It needs a run: not asserted of an abstract call."""
    error: str = "InvariantViolation"
    """The class of `core.errors` that a test fails with."""
    function: Callable[[Any], Iterable[Any]] | None = None
    """The function of an invariant of the user's own."""
    place: str = ""
    """``file:line`` of that function."""


def _built_in(folder: Path) -> Iterator[InvariantRow]:
    """The row of each file of a folder that has one, read from its text: to import the file would import jax, in every run of pytest.

    Raises `ImportError` for a row that cannot be read, and where there is none: without its invariants the plugin would let everything pass.
    """
    found = False
    for path in folder.glob("*.py"):
        text = path.read_text("utf-8")
        row = re.search(r"^ROW = (InvariantRow\(.*?\))$", text, re.DOTALL | re.MULTILINE)
        if row is not None:
            found = True
            call = ast.parse(row[1], mode="eval").body
            assert isinstance(call, ast.Call)
            yield InvariantRow(path.stem, **{str(each.arg): ast.literal_eval(each.value) for each in call.keywords})
        elif re.search(r"^ROW\b", text, re.MULTILINE):
            raise ImportError(f"{path}: write ROW = InvariantRow({path.stem!r}, ...), with literal values alone")
    if not found:
        raise ImportError(
            f"{folder} holds no source of an invariant: install pytest-nnxcheck as files, not in an archive"
        )


INVARIANT_ROWS = tuple(sorted(_built_in(Path(__file__).parents[1] / "invariants"), key=lambda row: row.order))
"""All built-in invariants, in the order in which they are judged."""

INVARIANTS = tuple(row.name for row in INVARIANT_ROWS if row.default)
"""The invariants that are asserted by default."""

TARGETED = frozenset(row.name for row in INVARIANT_ROWS if row.targeted)
"""The invariants that the compilers of targets judge as well."""

OWN_INVARIANTS: dict[str, InvariantRow] = {}
"""The user's own invariants, by name."""


def forget_own_later() -> Callable[[], None]:
    """Remember the user's own invariants of now; the function that is returned drops all later ones."""
    before = dict(OWN_INVARIANTS)

    def forget() -> None:
        OWN_INVARIANTS.clear()
        OWN_INVARIANTS.update(before)

    return forget


def invariant_rows() -> tuple[InvariantRow, ...]:
    """All invariants, the user's own last."""
    return (*INVARIANT_ROWS, *OWN_INVARIANTS.values())


def invariant_names() -> tuple[str, ...]:
    """Every word that an invariant can be named with."""
    return tuple(row.name for row in invariant_rows())


def default_invariants(handed: Iterable[str] = ()) -> tuple[str, ...]:
    """The invariants that are asserted where none is named, with those that were ``handed`` in for the test."""
    also = {*handed}
    return tuple(row.name for row in invariant_rows() if row.default or row.name in also)


def rows_of(names: Iterable[str]) -> tuple[InvariantRow, ...]:
    """The rows of the invariants that are named, in the order in which they are judged."""
    asked = {*names}
    return tuple(row for row in invariant_rows() if row.name in asked)


def severity(invariant: str) -> int:
    """The severity of an invariant by its name."""
    return next((row.severity for row in invariant_rows() if row.name == invariant), LEAST_SEVERE)


class Registered(NamedTuple):
    """A transform of the user's own in one style."""

    function: Callable[[Callable[..., Any]], Callable[..., Any]]
    """``function(f)`` gives a layer."""
    place: str
    """``file:line`` of its definition."""


REGISTERED: dict[tuple[str, str], Registered] = {}
"""The user's own transforms, by name and style."""


def layer_names() -> tuple[str, ...]:
    """Every word that a layer can be written with, plainest first."""
    return (*CATALOGUE, *dict.fromkeys(transform for transform, _ in REGISTERED))


def styles_of(transform: str) -> tuple[str, ...]:
    """The styles that a transform has, plainest first."""
    if transform in CATALOGUE:
        return CATALOGUE[transform].styles
    return tuple(style for style in STYLES if (transform, style) in REGISTERED)


def row_of(transform: str) -> Transform:
    """The row of a transform; one of the user's own has a row with its name and nothing else."""
    return CATALOGUE.get(transform) or Transform(transform)
