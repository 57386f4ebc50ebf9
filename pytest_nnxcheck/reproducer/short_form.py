"""The short program to paste, where one invariant broke in one plain call: it looks for that very finding."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pytest_nnxcheck import compat
from pytest_nnxcheck.core.evidence import FLOOR, Evidence
from pytest_nnxcheck.core.nesting import Nesting
from pytest_nnxcheck.core.outcome import Outcome, Violation
from pytest_nnxcheck.core.settings import Settings
from pytest_nnxcheck.invariants.donation import SHOWN
from pytest_nnxcheck.invariants.successors import successors
from pytest_nnxcheck.reproducer import nesting_text
from pytest_nnxcheck.reproducer.own_source import extract, place, renamed
from pytest_nnxcheck.reproducer.runtime.long_form import compiled_of, first_of
from pytest_nnxcheck.reproducer.runtime.short_form import (
    captures_little,
    keeps_donated_buffers,
    leaves_no_tracers,
    peak_is_within,
    plain_call,
)
from pytest_nnxcheck.subject.profile import UNKNOWN, Profile
from pytest_nnxcheck.subject.subject import Subject
from pytest_nnxcheck.transforms.compose import donated_inputs, output_shapes
from pytest_nnxcheck.transforms.layer import LENGTH, Plan, stack

GIVEN = (place(Plan), (Plan.__module__, "Program"))
"""What a short program has in another form: `TYPES`."""
TYPES = "Plan, Program = types.SimpleNamespace, Callable[..., Any]"
"""What stands for the class of the plans, of which the program writes what its layers read, and for the type of what is inside a layer."""
IMPORTS = ("import types", "from collections.abc import Callable", "from typing import Any")


@dataclass(frozen=True)
class Form:
    """What stands around the user's test in a program: import lines, the layers, the nesting, and what runs and checks it."""

    imports: tuple[str, ...]
    layers: tuple[str, ...]
    nesting: tuple[str, ...]
    support: tuple[str, ...]
    between: str
    """The blank lines between two parts."""


@dataclass(frozen=True)
class Plain:
    """What a short program says of a call.

    ``names`` are those of its graph nodes, ``leaves`` the numbers of the state's leaves before and after it, ``inputs`` the names of its
    arrays, ``donated`` the numbers of those that are donated, ``returned`` the numbers of the outputs that are their new values. ``values``
    are the attributes of each layer's plan as text.
    """

    names: tuple[str, ...]
    leaves: Mapping[str, tuple[int, int | None]]
    inputs: tuple[str, ...]
    donated: tuple[int, ...]
    returned: Mapping[int, int]
    state_bytes: int
    values: tuple[Mapping[str, str], ...]


def plain_facts(subject: Subject, profile: Profile, nesting: Nesting, settings: Settings) -> Plain | None:
    """What a short program says of a call; `None` where it needs the long one. Of a call that no trace takes the output counts as plain: it raises."""
    unusual = profile.added or profile.dropped or profile.devices > 1 or compat.mode_flags() != (True, True)
    holding = any(layer.row.starts_empty for layer in nesting.layers)
    if unusual or subject.abstract or not subject.plain or not (profile.plain or profile is UNKNOWN):
        return None
    if nesting_text.places(nesting) or any(map(nesting_text.is_registered, nesting.layers)):
        return None
    if holding and any(map(compat.is_key, profile.out)):
        return None
    left = [path for path in profile.state_paths if path not in profile.removed]
    after = {path: number for number, path in enumerate(left)}
    return Plain(
        names=subject.names,
        leaves={subject.path(path): (number, after.get(path)) for number, path in enumerate(profile.state_paths)},
        inputs=subject.input_names,
        donated=donated_inputs(subject, nesting, settings.donate),
        returned=successors(subject, profile, settings.donate),
        state_bytes=profile.state_bytes,
        values=tuple(plan_values(subject, profile, nesting)),
    )


def plan_values(subject: Subject, profile: Profile, nesting: Nesting) -> Any:
    """What the plan of each layer says, as text, but for its ``jit``."""
    for number, (layer, axes) in enumerate(zip(nesting.layers, nesting_text.inside(nesting), strict=True)):
        holds = layer.row.starts_empty
        shapes = output_shapes(nesting.layers[number + 1 :], profile, subject.inputs) if holds else ()
        yield {
            "changed": among(profile.changed),
            "written": among(profile.changed | profile.restored),
            "parameters": among(profile.parameters),
            "graph_updates": "True",
            "length": str(LENGTH),
            "subject": "call",
            "unchanged": "lambda state: contextlib.nullcontext()",
            "element": f"lambda leaf: leaf[{(0,) * axes!r}]",
            "empty": f"lambda: {zeros(shapes)}",
        }


def among(paths: frozenset[Any]) -> str:
    """A filter for these paths."""
    if not paths:
        return "lambda path, _: False"
    return f"lambda path, _: tuple(path) in {{{', '.join(sorted(map(repr, paths)))}}}"


def zeros(shapes: Any) -> str:
    """Arrays of zeros as text."""
    if isinstance(shapes, tuple):
        return f"({', '.join(map(zeros, shapes))}{',' * (len(shapes) == 1)})"
    return f"jnp.zeros({tuple(shapes.shape)}, {str(shapes.dtype)!r})"


# --- what the program looks for


@dataclass(frozen=True)
class Check:
    """How a program runs the nesting and looks for a finding: the function of `runtime.short_form` that looks, and the lines.

    The jit of the outermost layer ``donates`` as the plugin's does, or ``compiles`` a program that the lines measure.
    """

    function: Callable[..., Any]
    lines: tuple[str, ...]
    donates: bool = False
    compiles: bool = False


RUN = "nesting(program)(state, *inputs)"


def check_of(outcome: Outcome | None, plain: Plain, copied: tuple[int, int]) -> Check | None:
    """The check of what broke; `None` where a short program cannot look for it. ``copied`` are the bytes of copies of the state, and the peak."""
    if outcome is None or outcome.evidence is None or len(outcome.violations) != 1:
        return None
    (violation,) = outcome.violations
    match violation.invariant:
        case "tracers" if outcome.evidence.leaks:
            leaked = "".join(f", ({leak.path!a}, {leak.type!a})" for leak in outcome.evidence.leaks[:SHOWN])
            return Check(leaves_no_tracers, (f"output = leaves_no_tracers(lambda: {RUN}{leaked})",))
        case "donation":
            return check_of_donation(violation, plain)
        case "memory":
            return check_of_memory(outcome, outcome.evidence, plain, copied)
    return None


def check_of_donation(violation: Violation, plain: Plain) -> Check | None:
    """Leaves that lost their buffer, where the violation names nothing else."""
    lost = [finding.path for finding in violation.findings if finding.kind == "lost buffer"]
    if len(lost) < len(violation.findings) or not {*lost} <= {*plain.leaves, *plain.inputs}:
        return None
    leaves = {name: plain.leaves[name] for name in lost if name in plain.leaves}
    numbers = {name: plain.inputs.index(name) for name in lost if name not in leaves}
    inputs = {name: (number, plain.returned.get(number)) for name, number in numbers.items()}
    arguments = f"nesting(program), state, inputs, {leaves!r}, {inputs!r}"
    return Check(keeps_donated_buffers, (f"output = keeps_donated_buffers({arguments})",), donates=True)


def check_of_memory(outcome: Outcome, known: Evidence, plain: Plain, copied: tuple[int, int]) -> Check | None:
    """A peak over its budget, copies of the state, or what the call captures."""
    over = outcome.peak is not None and outcome.budget is not None and outcome.peak > outcome.budget
    if over or copied[0]:
        more = f", state={plain.state_bytes}, copied={copied[0]}, seen={copied[1]}" if copied[0] else ""
        lines = (f"output = {RUN}", f"peak_is_within(COMPILED[-1], {outcome.budget}{more})")
        return Check(peak_is_within, lines, donates=True, compiles=True)
    if known.captured:
        return Check(
            captures_little, (f"captures_little(program, state, inputs, {FLOOR})", f"output = {RUN}"), donates=True
        )
    return None


# --- the text

WRAPPER = """def nnx_wrap(subject):
    def wrapped(*args, **kwargs):
        program, state, inputs, rebuild = plain_call(subject, args, kwargs, {names!r})
        {lines}
        return rebuild({output})

    return wrapped"""


def short_form(
    nesting: Nesting, plain: Plain, check: Check, *, donates_state: bool, taken: frozenset[str] = frozenset()
) -> Form:
    """The text of a short program; ``taken`` are names that mean something else in it."""
    layers = tuple(name for name in nesting_text.layers_of(nesting) if name not in GIVEN)
    axes, output = nesting_text.axes(nesting), nesting_text.un_nested(nesting, "output")
    definitions: list[Callable[..., Any]] = [plain_call, check.function]
    definitions += [compiled_of, compat.staged] if check.compiles else []
    definitions += [stack] if axes else []
    definitions += [first_of] if "first_of(" in output else []
    needed = extract((*layers, *map(place, definitions)), taken, given=GIVEN)
    ran = extract(layers, taken, given=GIVEN).definitions
    texts = [text for place, text in needed.definitions.items() if place in ran]
    jit = root_jit(nesting, plain, check, donates_state=donates_state)
    plans = ",\n        ".join(plans_text(texts, plain, jit))
    nested = f"def nesting(call):\n    plans = [{plans}]\n    return {nesting_text.composed(nesting)}"
    lines = "\n        ".join(["inputs = stack(inputs)"] * axes + [*check.lines])
    wrapper = WRAPPER.format(names=plain.names, lines=lines, output=output)
    return Form(
        imports=(*IMPORTS, *(["import contextlib"] if "contextlib." in nested else []), *needed.imports.values()),
        layers=(renamed(TYPES, needed.aliases), *texts),
        nesting=(renamed(nested, needed.aliases),),
        support=(
            *(text for place, text in needed.definitions.items() if place not in ran),
            *(["COMPILED = []"] if check.compiles else []),
            renamed(wrapper, needed.aliases),
        ),
        between="\n\n",
    )


def root_jit(nesting: Nesting, plain: Plain, check: Check, *, donates_state: bool) -> str:
    """The ``jit`` of the outermost layer."""
    states = nesting_text.root_of(nesting) or 0
    donated = (*((0,) if states and donates_state else ()), *(states + number for number in plain.donated))
    options = f"keep_unused=True, donate_argnums={donated!r}" if donated and check.donates else "keep_unused=True"
    if check.compiles:
        show = "lambda compiled, *_: COMPILED.append(compiled)"
        return f"lambda wrapper, f: staged(wrapper, f, compiled_of, {show}, abstract=False, {options})"
    return f"lambda wrapper, f: wrapper(f, {options})"


def plans_text(layers: list[str], plain: Plain, jit: str) -> list[str]:
    """The plans: of each what the text of the layers reads."""
    read = dict.fromkeys(name for text in layers for name in re.findall(r"\bplan\.(\w+)", text))
    jits = [jit, *["lambda wrapper, f: wrapper(f)"] * len(plain.values)]
    every = [dict(values, jit=own) for values, own in zip(plain.values, jits, strict=False)]
    return [f"Plan({', '.join(f'{name}={values[name]}' for name in read)})" for values in every]
