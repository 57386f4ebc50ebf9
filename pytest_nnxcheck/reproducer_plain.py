"""The short program to paste, where one invariant broke in one plain call: it looks for that very finding."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pytest_nnxcheck import compat
from pytest_nnxcheck.evidence import FLOOR
from pytest_nnxcheck.invariants.donation import SHOWN
from pytest_nnxcheck.nesting import Nesting
from pytest_nnxcheck.profile import UNKNOWN, Profile
from pytest_nnxcheck.program import STACKED, donated_inputs, output_shapes
from pytest_nnxcheck.returned import successors
from pytest_nnxcheck.settings import Settings
from pytest_nnxcheck.subject import Subject
from pytest_nnxcheck.transforms import LENGTH
from pytest_nnxcheck.verdicts import Outcome

IMPORTS = ("import types", "from collections.abc import Callable", "from typing import Any", "import jax.numpy as jnp")
TYPES = "Plan, Program = types.SimpleNamespace, Callable[..., Any]"
"""What stands for the class of the plans, of which the program writes what its layers read, and for the type of what is inside a layer."""


@dataclass(frozen=True)
class Plain:
    """What a short program says of a call: names of the graph nodes, the state's leaves with their numbers before and after, names of the inputs, and the values of
    the plans, by the number of the layer where each has its own.
    """

    names: tuple[str, ...]
    leaves: Mapping[str, tuple[int, int | None]]
    inputs: tuple[str, ...]
    donated: tuple[int, ...]
    returned: Mapping[int, int]
    values: Mapping[str, str]
    state_bytes: int
    inside: tuple[int, ...]
    empty: Mapping[int, str]


def plain_facts(subject: Subject, profile: Profile, nesting: Nesting, settings: Settings) -> Plain | None:
    """What a short program says of a call; `None` where it needs the long one."""
    usual = not (profile.added or profile.dropped) and compat.mode_flags() == (True, True)
    if subject.abstract or subject.opened or not usual or not (profile.plain or profile is UNKNOWN):
        return None
    left = {
        path: number for number, path in enumerate(path for path in profile.state_paths if path not in profile.removed)
    }
    stacked = [layer.transform in STACKED for layer in nesting.layers]
    written = profile.changed | profile.restored
    return Plain(
        names=subject.names,
        leaves={subject.path(path): (number, left.get(path)) for number, path in enumerate(profile.state_paths)},
        inputs=subject.input_names,
        donated=donated_inputs(subject, nesting, settings.donate),
        returned=successors(subject, profile, settings.donate),
        values={
            "changed": among(profile.changed),
            "written": among(written),
            "parameters": among(profile.parameters),
            "graph_updates": str(compat.mode_flags()[1]),
            "length": str(LENGTH),
            "subject": "call",
            "unchanged": "lambda state: contextlib.nullcontext()",
        },
        state_bytes=profile.state_bytes,
        inside=tuple(sum(stacked[number + 1 :]) for number in range(len(stacked))),
        empty={
            number: f"lambda: {zeros(output_shapes(nesting.layers[number + 1 :], profile, subject.inputs))}"
            for number in range(len(stacked))
        },
    )


def among(paths: frozenset[Any]) -> str:
    """A filter for these paths."""
    if not paths:
        return "lambda path, _: False"
    return f"lambda path, _: tuple(path) in {{{', '.join(sorted(map(repr, paths)))}}}"


def zeros(shapes: Any) -> str:
    """Arrays of zeros as text; an empty text in place of keys."""
    if isinstance(shapes, tuple):
        return f"({', '.join(map(zeros, shapes))}{',' * (len(shapes) == 1)})"
    return "" if compat.is_key(shapes) else f"jnp.zeros({tuple(shapes.shape)}, {str(shapes.dtype)!r})"


def finding(outcome: Outcome | None, plain: Plain | None, copied: tuple[int, int]) -> str:
    """The check of what broke, as the last line of the wrapper: empty where a short program cannot look for it."""
    if outcome is None or plain is None or outcome.evidence is None or len(outcome.violations) != 1:
        return ""
    (violation,), known = outcome.violations, outcome.evidence
    run = "nesting(program)(state, *inputs)"
    if violation.invariant == "tracers" and known.leaks:
        leaked = "".join(f", ({leak.path!a}, {leak.type!a})" for leak in known.leaks[:SHOWN])
        return f"output = leaves_no_tracers(lambda: {run}{leaked})"
    if violation.invariant == "donation":
        rows = 1 + sum(bool(label) for label, _ in violation.details)
        if rows != min(len(known.moves), SHOWN):
            return ""
        lost = [move.path for move in known.moves]
        leaves = {name: plain.leaves[name] for name in lost if name in plain.leaves}
        numbers = {name: plain.inputs.index(name) for name in lost if name in plain.inputs}
        if len(leaves) + len(numbers) != len(lost):
            return ""
        outputs = {name: (number, plain.returned.get(number)) for name, number in numbers.items()}
        return f"output = keeps_donated_buffers(nesting(program), state, inputs, {leaves!r}, {outputs!r})"
    over = outcome.peak is not None and outcome.budget is not None and outcome.peak > outcome.budget
    if violation.invariant == "memory" and (over or copied[0]):
        more = f", state={plain.state_bytes}, copied={copied[0]}, seen={copied[1]}" if copied[0] else ""
        return f"output = {run}\n        peak_is_within(COMPILED[0], {outcome.budget}{more})"
    if violation.invariant == "memory" and known.captured:
        return f"captures_little(program, state, inputs, {FLOOR})\n        output = {run}"
    return ""


def checker(check: str) -> str:
    """The function that a check calls."""
    return str(re.findall(r"(\w+)\(", check.replace("nesting(program)(", ""))[0])


def root_jit(nesting: Nesting, plain: Plain, *, donates: bool, compiles: bool) -> str:
    """The ``jit`` of the outermost layer."""
    style = nesting.layers[0].style if nesting.layers else ""
    states = {"argument": 1, "functional": 2}.get(style, 0)
    donated = (*((0,) if states and donates else ()), *(states + number for number in plain.donated))
    options = f"keep_unused=True, donate_argnums={donated!r}" if donated else "keep_unused=True"
    if compiles:
        show = "lambda compiled, *_: COMPILED.append(compiled)"
        return f"lambda wrapper, f: staged(wrapper, f, compiled_of, {show}, abstract=False, {options})"
    return f"lambda wrapper, f: wrapper(f, {options})"


def plan(number: int, used: list[str], plain: Plain, jit: str) -> str:
    """One plan: what the layers read of it."""
    values = {
        **plain.values,
        "element": f"lambda leaf: leaf[{(0,) * plain.inside[number]!r}]",
        "empty": plain.empty[number],
        "jit": jit if number == 0 else "lambda wrapper, f: wrapper(f)",
    }
    return f"Plan({', '.join(f'{name}={values[name]}' for name in used)})"


def read_of_plans(layers: list[str]) -> list[str]:
    """The attributes that the text of layers reads of a plan."""
    return list(dict.fromkeys(name for text in layers for name in re.findall(r"\bplan\.(\w+)", text)))


NESTING = """def nesting(call):
    plans = [{plans}]
    return {composed}
"""

WRAPPER = """def nnx_wrap(subject):
    def wrapped(*args, **kwargs):
        program, state, inputs, rebuild = plain_call(subject, args, kwargs, {names!r})
{stacked}        {check}
        return rebuild({un_nested})

    return wrapped"""
