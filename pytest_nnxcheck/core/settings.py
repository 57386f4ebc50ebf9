"""The one table of settings: what each may be, where it may be given, its default, its help and where the documents explain it.

A row of the scope ``check`` is a field of `Settings`. One of the scope ``run`` is for a run as a whole. One of the scope ``named`` names what is
checked. The marker's signature, the ``--nnx-*`` options, the ``nnx_*`` ini names and the sections of docs/settings.md come from `TABLE`. Nothing
here imports pytest, hypothesis, jax or flax.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from pytest_nnxcheck.core import setting_values as kinds
from pytest_nnxcheck.core.catalogue import (
    FURTHER,
    INVARIANTS,
    MODES,
    STYLES,
    TRANSFORMS,
    default_invariants,
    invariant_names,
    layer_names,
    rows_of,
)
from pytest_nnxcheck.core.errors import SettingError
from pytest_nnxcheck.core.setting_values import Budget, Kind
from pytest_nnxcheck.core.text import Unreadable, one_of

if TYPE_CHECKING:
    from pytest_nnxcheck.core.expected_failures import ExpectedFailure
    from pytest_nnxcheck.core.nesting import Nesting

MARKER = "nnx_invariants"

CHECK_ID = "nnx-check"
"""The start of the id of a check by name: ``nnx-check::package.models:Block``."""

CALL_ID = "nnx-call"
"""The start of the id of a call that a suite makes: ``nnx-call::package.models.Block.decode(f32(8,64))``."""

SWEEPS = ("pairs", "chains", "short", "singles", "probes")
"""The sweeps, the longest first: each contains those behind it."""

EFFORTS: dict[str, dict[str, Any]] = {
    "quick": {"sweep": "short", "max_examples": 0},
    "default": {"sweep": "chains", "max_examples": 3},
    "thorough": {"sweep": "pairs", "max_examples": 20},
}
"""The settings that an effort sets."""

Scope = Literal["check", "run", "named"]
SettingPlace = Literal["marker", "command line", "ini file"]
EVERYWHERE: tuple[SettingPlace, ...] = ("marker", "command line", "ini file")


class Row(NamedTuple):
    """One setting."""

    default: Any
    """Any value that the kind parses."""
    kind: Kind
    help: str
    section: str
    """The page of the documents that explains it, or a heading of one."""
    scope: Scope = "check"
    places: tuple[SettingPlace, ...] = EVERYWHERE
    """The places where it may be given."""
    selects_nestings: bool = False
    """It chooses nestings, and so has no effect where one nesting is replayed."""
    narrows: bool = False
    """With it a run may have fewer nestings than without."""
    of: str = ""
    """The setting without which this flag has no effect."""


def _check(default: Any, kind: Kind, text: str, section: str, **more: Any) -> Any:
    return field(default=default, metadata={"row": Row(default, kind, text, section, **more)})


def _select(default: Any, kind: Kind, text: str, section: str, **more: Any) -> Any:
    return _check(default, kind, text, section, **{"selects_nestings": True, "narrows": True, **more})


def _run(default: Any, kind: Kind, text: str, section: str, of: str = "") -> Row:
    return Row(default, kind, text, section, "run", EVERYWHERE[1:] if kind.metavar else EVERYWHERE[1:2], of=of)


def _named(kind: Kind, text: str) -> Row:
    return Row(None, kind, text, "no_test_file.md", "named", EVERYWHERE[1:2])


def _flag_of_baseline(text: str) -> Row:
    return _run("off", kinds.FLAG, text, "baseline.md", of="baseline")


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of a check: invariants, nestings, bounds."""

    invariants: tuple[str, ...] = _check(
        INVARIANTS,
        kinds.words(invariant_names),
        "what to check: tracers (none leaks), updates (what is written reaches the state), memory (the peak stays within its budget), donation (donated"
        " buffers are reused), parity, finite, recompilation, and your own",
        "invariants.md",
    )
    transforms: tuple[str, ...] = _select(
        TRANSFORMS,
        kinds.words(layer_names),
        f"the transforms of the nestings: {', '.join(TRANSFORMS)}; the list replaces these, and may also have {', '.join(FURTHER)}, call_first"
        " and those of register_transform",
        "nestings.md#further-transforms",
    )
    styles: tuple[str, ...] = _select(
        STYLES,
        kinds.words(lambda: STYLES),
        "how a transform gets the module: argument (of nnx.jit, for example), functional (jax.jit over nnx.split), closure (the function under nnx.jit"
        " captures it), jax_closure (the function under jax.jit captures it)",
        "nestings.md#nestings",
    )
    modes: tuple[str, ...] = _check(
        MODES[:1],
        kinds.words(lambda: MODES),
        "modes of flax in which every nesting runs: current (the one that flax is set to); flax 0.12.7 or newer also has graph, graph_no_updates (graph with"
        " graph_updates=False), tree, and ref (tree, with the Variables of the model in jax.Ref)",
        "modes.md",
        narrows=True,
    )
    max_depth: int = _select(
        3,
        kinds.whole_number(1),
        "the most transforms in one nesting, 1 or more, without the jit that the plugin puts around some nestings",
        "nestings.md#how-much-is-run",
    )
    effort: str = _select(
        "default",
        kinds.choice(*EFFORTS),
        "how many nestings to run: quick (each transform alone, and under jit), default (also each pair of transforms under jit) or thorough (also each"
        " pair without jit, and 20 random nestings); it sets sweep and max_examples, unless you give those",
        "nestings.md#how-much-is-run",
    )
    max_examples: int = _select(
        EFFORTS["default"]["max_examples"],
        kinds.whole_number(0),
        "the number of random nestings that hypothesis draws after the sweep",
        "nestings.md#how-much-is-run",
    )
    sweep: str = _select(
        EFFORTS["default"]["sweep"],
        kinds.choice(*SWEEPS),
        "the nestings that always run, before the random ones: probes (the un-nested call, and a few others), singles (also each"
        " transform alone, in each style), short (also each transform under jit), chains (also each pair of transforms under jit) or pairs"
        " (also each pair without jit)",
        "nestings.md#how-much-is-run",
    )
    shortcuts: str = _select(
        "on",
        kinds.SWITCH,
        "on: a nesting without a jit around it is only traced, unless the trace leaks or the test reads a value; off: every nesting is executed",
        "nestings.md#what-is-run-and-what-is-traced",
        narrows=False,
    )
    all: str = _select(
        "off",
        kinds.FLAG,
        "run the whole sweep; without this option the plugin skips most of it once a nesting has failed",
        "nestings.md#nestings",
        narrows=False,
    )
    memory_budget: Budget | None = _check(  # noqa: RUF009 - it makes a field
        None,
        kinds.optional(kinds.BUDGET),
        "the most memory that a program may take at its peak: bytes (512MiB, 1.5GB; KB=1000, KiB=1024), which bound the plain call under its jit, or a"
        " multiple of the expected peak (3x); with this option, extra copies of the state do not fail (default: 2x + 64 KiB, and extra copies fail)",
        "memory.md#a-budget-in-bytes",
    )
    memory_advice: str = _check(
        "note",
        kinds.choice("note", "fail"),
        "what to do if the un-nested call takes more memory than it needs: note (advice with -v and in reports) or fail (the test fails)",
        "memory.md#advice",
    )
    target: tuple[str, ...] = _check(
        (),
        kinds.TARGETS,
        "accelerators to compile for as well, none of them has to be present: v4, v5e, v5p, v6e, v7x, a100-40, a100,"
        " h100, h200, b200, or several of one kind, v5e:4x4, 2*v5e:16x16 (two slices), h100:8",
        "targets.md",
    )
    target_strict: str = _check(
        "off",
        kinds.FLAG,
        "fail a test if a target that it names judged none of its programs; without this option its last line says so",
        "targets.md#what-is-left-out",
    )
    donate: str = _check(
        "state",
        kinds.DONATED,
        "the arguments that the outermost jit donates: state, all (the inputs too), none, or state and the names of further arguments"
        " (state,opt_state)",
        "subjects.md#what-is-state",
    )
    on_rejection: str = _check(
        "report",
        kinds.choice("report", "fail"),
        "what to do with a nesting that flax refuses: report (show it) or fail",
        "nestings.md#rejected-or-failed",
    )
    devices: int | None = _check(
        None,
        kinds.optional(kinds.whole_number(1, kinds.MOST_DEVICES)),
        "the number of devices that a test needs; if it is given on the command line or in the ini file, jax also simulates that many CPU devices",
        "sharded.md#several-devices",
    )
    on_too_few_devices: str = _check(
        "skip",
        kinds.choice("skip", "fail"),
        "what to do with a test that needs more devices than there are: skip or fail",
        "sharded.md#several-devices",
    )
    expected_failures: tuple[ExpectedFailure, ...] = _check(
        (),
        kinds.FAILURES,
        "a file of known failures: a report, or TOML with a table for each test, {invariant or nesting: reason}; in the marker such a table as a dict;"
        " a test fails if a known failure no longer happens",
        "expected_failures.md",
    )
    nesting: Nesting | None = _select(  # noqa: RUF009 - it makes a field
        None,
        kinds.optional(kinds.NESTING),
        "run this nesting and no other: 'jit > scan[closure]'",
        "tutorial.md#run-one-nesting-again",
        places=("command line",),
    )

    @property
    def asserts_donation(self) -> bool:
        """True if donation is asserted, of a program that donates something."""
        return "donation" in self.invariants and self.donate != "none"

    @property
    def compares_values(self) -> bool:
        """True if an invariant is asked for that compares the values with those of the same calls without the nesting."""
        return any(row.values and row.function is None for row in rows_of(self.invariants))

    @property
    def chosen_modes(self) -> tuple[str, ...]:
        """The modes that a test runs in: a replayed nesting may name its own."""
        nesting = self.nesting
        return self.modes if nesting is None or nesting.mode == MODES[0] else (nesting.mode,)


TABLE: dict[str, Row] = {entry.name: entry.metadata["row"] for entry in fields(Settings)} | {
    "baseline": _run(
        None,
        kinds.optional(kinds.PATH),
        "a file with the peak memory of every nesting, to compare this run with",
        "baseline.md",
    ),
    "memory_tolerance": _run(
        "5%",
        kinds.PERCENTAGE,
        "how much a peak may grow over the baseline before the test fails; 0% allows nothing",
        "baseline.md",
    ),
    "baseline_update": _flag_of_baseline("write the baseline anew from this run, if all its tests passed"),
    "baseline_update_new_only": _flag_of_baseline("add new tests and nestings to the baseline, and compare the rest"),
    "baseline_any_stamp": _flag_of_baseline("compare even if other versions or another device made the baseline"),
    "report": _run(
        (),
        kinds.REPORT_PATHS,
        "write the verdict, peak and cause of every nesting to a file: .json, .html (a page to look at) or .md (for a pull request)",
        "ci.md#reports",
    ),
    "watch": _run(
        "off",
        kinds.WATCH,
        "look at unmarked tests; --nnx-watch or =fail: a test that leaves a tracer in a model fails; =report: it is only listed; =calls: each"
        " distinct call that the tests make of a model is checked too, as a test of its own; =list: these calls are listed, and not checked; =off: no look",
        "watch.md",
    ),
    "watch_seconds": _run(
        120,
        kinds.whole_number(0),
        "the seconds that --nnx-watch=calls may spend on checks, in each process",
        "watch.md#check-the-calls-of-a-suite",
    ),
    "watch_shapes": _run(
        "one",
        kinds.choice("one", "all"),
        "one: --nnx-watch=calls checks a call with the first shapes and numbers that it meets; all: with each",
        "watch.md#check-the-calls-of-a-suite",
    ),
    "check": _named(
        kinds.TEXT._replace(metavar="MODULE:NAME", is_repeated=True),
        "check without a test file: a class or method, package.models:Block.decode, or a function that returns what to check and its inputs,"
        " package.steps:make_step",
    ),
    "inputs": _named(
        kinds.TEXT._replace(metavar="INPUTS", is_repeated=True),
        "inputs for the --nnx-check before this option: f32[8,64], i32[8], key, a plain value, or name=f32[8,64]; write ';' between several",
    ),
    "build": _named(
        kinds.TEXT._replace(metavar="EXPRESSION"),
        "for the --nnx-check before this option: a Python expression that builds the object, Block(64, rngs=nnx.Rngs(0)); it may use all names of"
        " that Python module",
    ),
    "abstract": _named(
        kinds.FLAG,
        "for the --nnx-check before this option: build shapes alone; a model of any size is traced and compiled, and nothing is allocated",
    ),
    "mesh": _named(
        kinds.TEXT._replace(metavar="AXES"),
        "for the --nnx-check before this option: build and call under a mesh with these axes, data=4,model=2; jax simulates its CPU devices",
    ),
    "profile": _run(
        None,
        kinds.TEXT._replace(metavar="NAME"),
        "a named set of settings, the table [tool.pytest-nnxcheck.profiles.NAME] in pyproject.toml; it wins over the ini file; the marker and the command"
        " line win over it",
        "settings.md#profiles",
    ),
    "no_cache": _run(
        "off",
        kinds.FLAG,
        "compile every program anew, and keep nothing of it in pytest's cache",
        "speed.md#how-to-make-a-suite-faster",
    ),
}
DEFAULTS = Settings()


def names(scope: Scope | None = None, place: SettingPlace | None = None) -> tuple[str, ...]:
    """The settings of a scope, or of all, that may be given in a place, or in any."""
    rows = TABLE.items()
    return tuple(name for name, row in rows if scope in (None, row.scope) and {place} <= {None, *row.places})


def parse_given(
    given: Mapping[str, object], origin: Callable[[str], str], place: SettingPlace | None = None
) -> dict[str, Any]:
    """Read the settings of a check that one source gives; ``origin(name)`` words the source for an error.

    Raises `SettingError` that starts with the origin.
    """
    valid = names("check", place)
    parsed = {}
    for name, value in given.items():
        refuse_misplaced(name, value, valid, origin(name))
        try:
            parsed[name] = TABLE[name].kind.parse(name, value)
        except Unreadable as error:
            raise SettingError(f"{origin(name)}: {error}") from None
    return parsed


def refuse_misplaced(name: str, value: object, valid: Collection[str], origin: str) -> None:
    """Refuse a setting that is not one of the ``valid`` ones of its source. Raises `SettingError` that starts with the origin."""
    if name in TABLE and name not in valid:
        places = " or the ".join(TABLE[name].places)
        raise SettingError(f"{origin}: {name}={value!r} is for the {places}, {flag(name)}")
    try:
        one_of("setting", name, valid)
    except Unreadable as error:
        raise SettingError(f"{origin}: {error}") from None


def lay_over(*sources: Mapping[str, Any]) -> dict[str, Any]:
    """One source of several, the weakest first. An effort takes back what weaker ones say of the sweep and the draws."""
    merged: dict[str, Any] = {}
    for source in sources:
        merged.update({**EFFORTS.get(source.get("effort", ""), {}), **source})
    return merged


def merge(*sources: Mapping[str, Any]) -> Settings:
    """Settings from parsed sources, the weakest first: a later one wins field by field, and expected failures add up."""
    merged = lay_over({"invariants": default_invariants()}, *sources)
    entries = [source["expected_failures"] for source in sources if "expected_failures" in source]
    if entries:
        from pytest_nnxcheck.core import expected_failures

        merged["expected_failures"] = expected_failures.add_up(*entries)
    return Settings(**merged)


def show(value: object) -> str:
    """A setting's value as one writes it on the command line."""
    if value is None or value == ():
        return "none"
    return ",".join(value) if isinstance(value, tuple) else str(value)


def flag(name: str) -> str:
    """The command line option of a setting."""
    return f"--nnx-{name.replace('_', '-')}"


def marker_line() -> str:
    """The text of ``pytest --markers``, in lines of 100 characters at most."""
    settings = ", ".join(f"{name}={TABLE[name].default!r}" for name in names(place="marker"))
    lines = (
        f"{MARKER}(SETTING=VALUE, ...): run the test under nestings of jax transforms.",
        "Checked of what the fixture nnx_wrap wraps: no tracer leaks, what is written reaches the state,",
        "the peak memory is within its budget, donated buffers are reused.",
        "The settings, each with its default; pytest --help explains them:",
        *textwrap.wrap(settings, 95, break_long_words=False, break_on_hyphens=False),
    )
    return "\n    ".join(lines)
