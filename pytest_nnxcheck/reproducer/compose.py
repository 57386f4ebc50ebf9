"""The program to paste: a file that runs one nesting of one test, and checks it, with jax and flax alone.

It is put together from text that exists: the layers that ran (`transforms`), the short forms of what the plugin does around
them (`runtime`), and the user's own test (`user_source`). It is written before the nesting runs, so that a process that is killed leaves it
behind, and removed where there is nothing to show.
"""

from __future__ import annotations

import platform
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import flax
import jax
import jaxlib

from pytest_nnxcheck.compat.arrays import describe
from pytest_nnxcheck.core.devices import FLAG
from pytest_nnxcheck.core.nesting import Nesting
from pytest_nnxcheck.core.outcome import Outcome
from pytest_nnxcheck.core.settings import Settings
from pytest_nnxcheck.engine.parity import other_draws
from pytest_nnxcheck.engine.reference import MEANINGS, meaning_of
from pytest_nnxcheck.invariants.successors import successors
from pytest_nnxcheck.reporting.report import headline
from pytest_nnxcheck.reproducer.calls_of_test import FILL_IN, Usage, one_line
from pytest_nnxcheck.reproducer.nesting_text import (
    axes,
    composed,
    inside,
    is_registered,
    layer_name,
    layers_of,
    meaning_text,
    places,
    primal_text,
    root_of,
    un_nested,
)
from pytest_nnxcheck.reproducer.own_source import extract, import_lines, place, renamed
from pytest_nnxcheck.reproducer.runtime import long_form as runtime
from pytest_nnxcheck.reproducer.runtime.abstract import run_abstract
from pytest_nnxcheck.reproducer.runtime.checks import (
    Rule,
    donated_buffers_are_kept,
    memory_is_within,
    no_tracers_remain,
)
from pytest_nnxcheck.reproducer.runtime.parity import nothing_is_dropped_inside, same_as_un_nested
from pytest_nnxcheck.reproducer.runtime.taken_apart import take_apart
from pytest_nnxcheck.reproducer.short_form import Form, Plain, check_of, plain_facts, short_form
from pytest_nnxcheck.subject.profile import Profile
from pytest_nnxcheck.subject.subject import Subject
from pytest_nnxcheck.transforms.compose import baseline_for, donated_inputs, kept, maps_written, output_shapes
from pytest_nnxcheck.transforms.mapping import on_mesh

SHOWN = 6
STAND_INS = {
    "check": "def check(subject, *args, kwargs=None, **settings):\n    return nnx_wrap(subject)(*args, **(kwargs or {}))",
    "assert_invariants": "def assert_invariants(subject, *args, kwargs=None, **settings):\n    nnx_wrap(subject)(*args, **(kwargs or {}))",
}
"""What the user's own code takes from pytest and from this package, in a few lines."""
USUAL = {
    "jax_enable_x64": False,
    "jax_default_prng_impl": "threefry2x32",
    "jax_debug_nans": False,
    "jax_numpy_rank_promotion": "allow",
}


@dataclass(frozen=True)
class Facts:
    """What the program says of one call: the text of its facts, and where the short form takes it, what that says."""

    text: str
    abstract: bool
    plain: Plain | None = None


@dataclass(frozen=True)
class Spec:
    """One program: the nesting, how it is checked, the facts of its calls, the user's code, and the verdict where it is known."""

    nesting: Nesting
    settings: Settings
    calls: tuple[Facts, ...]
    title: str
    replay: str
    path: str
    flags: tuple[bool, bool] = (True, True)
    """Graph, and graph updates, of the mode of flax that the nesting ran in."""
    outcome: Outcome | None = None

    @property
    def abstract(self) -> bool:
        return any(call.abstract for call in self.calls)


def facts_of(subject: Subject, profile: Profile, nesting: Nesting, settings: Settings) -> Facts:
    """The facts of a call as text."""
    parts = []
    if profile.changed:
        parts.append(f"changed={paths(profile.changed)}")
    if profile.restored and maps_written(nesting):
        parts.append(f"restored={paths(profile.restored)}")
    if profile.parameters and any(layer.row.pair == "gradients" for layer in nesting.layers):
        parts.append(f"parameters={paths(profile.parameters)}")
    shapes = {
        number: shapes_text(output_shapes(nesting.layers[number + 1 :], profile, subject.inputs))
        for number, layer in enumerate(nesting.layers)
        if layer.row.starts_empty
    }
    if shapes:
        parts.append(f"shapes={{{', '.join(f'{number}: {text}' for number, text in shapes.items())}}}")
    if donated := donated_inputs(subject, nesting, settings.donate):
        parts.append(f"donated={donated!r}")
        if returned := successors(subject, profile, settings.donate):
            parts.append(f"returned={tuple(returned.items())!r}")
    if profile.dropped and "donation" in settings.invariants:
        parts.append(f"updated={tuple(map(subject.path, profile.dropped))!r}")
    if "parity" in settings.invariants and other_draws(subject, nesting):
        parts.append("drawn=True")
    if subject.owner:
        parts.append(f"owner={subject.owner!r}")
    return Facts(f"Facts({', '.join(parts)})", subject.abstract, plain_facts(subject, profile, nesting, settings))


def paths(found: Any) -> str:
    return f"frozenset({{{', '.join(sorted(map(repr, found)))}}})"


def shapes_text(shapes: Any) -> str:
    if isinstance(shapes, tuple):
        return f"({', '.join(map(shapes_text, shapes))}{',' * (len(shapes) == 1)})"
    return f"shape({describe(shapes)!r})"


# --- the text


def compose(spec: Spec, usage: Usage) -> str:
    """The whole program."""
    taken = usage.names | {*usage.missing}
    form = form_of(spec, taken)
    stand_ins = [STAND_INS.get(name, f"{name} = {FILL_IN}  # needs pytest: write it anew") for name in usage.missing]
    holes = [*usage.holes, *(name for name in usage.missing if name not in STAND_INS)]
    needed = {"import jax", "import jax.numpy as jnp", "from flax import nnx", *(["import sys"] if holes else [])}
    imports = import_lines({*form.imports, *usage.imports, *needed})
    parts = [
        "\n".join(f"# {one_line(line)}".rstrip() for line in header(spec)),
        "from __future__ import annotations" if usage.future else "",
        "\n".join(environment(usage)),
        "\n".join([*imports, *configuration()]),
        f"{FILL_IN} = ..." if holes else "",
        *stand_ins,
        title("the test"),
        *usage.chunks,
        title("the layers that ran around it"),
        *form.layers,
        *form.nesting,
        title("how a call is taken apart, run and checked; nothing here is about the test"),
        *form.support,
        main(spec, usage, holes),
    ]
    return form.between.join(part for part in parts if part) + "\n"


def form_of(spec: Spec, taken: frozenset[str]) -> Form:
    """The short form where one invariant broke in one plain call, else the long one."""
    known = spec.calls[0].plain if len(spec.calls) == 1 else None
    check = check_of(spec.outcome, known, copies(spec.outcome)) if known is not None else None
    if known is None or check is None:
        return long_form(spec, taken)
    return short_form(spec.nesting, known, check, donates_state=spec.settings.donate != "none", taken=taken)


def long_form(spec: Spec, taken: frozenset[str]) -> Form:
    """The form for every call and every finding."""
    needed = extract(tuple(wanted(spec)), taken)
    ran = extract(tuple(layers_of(spec.nesting)), taken).definitions
    return Form(
        imports=tuple(needed.imports.values()),
        layers=tuple(text for place, text in needed.definitions.items() if place in ran),
        nesting=(
            title(f"the nesting: {spec.nesting}"),
            renamed(f"def nesting(call, plans):\n    return {composed(spec.nesting)}", needed.aliases),
        ),
        support=(
            *(text for place, text in needed.definitions.items() if place not in ran),
            renamed(checked_text(spec), needed.aliases),
        ),
        between="\n\n\n",
    )


def title(text: str) -> str:
    return f"# {f'--- {one_line(text)} ':-<116}"


def header(spec: Spec) -> list[str]:
    """What the program shows, with which versions, and how to run it."""
    outcome = spec.outcome
    lines = [
        headline(outcome) if outcome else f"nesting: {spec.nesting} (written before it ran)",
        f"test: {spec.title}",
    ]
    if outcome is not None:
        lines += [f"nesting: {spec.nesting}", *([f"{outcome.verdict}: {outcome.reason}"] if outcome.reason else [])]
        for violation in outcome.violations:
            lines += [f"{violation.invariant}: {violation.summary}"]
            lines += [f"    {label:<10}  {text}" for label, text in violation.details]
            lines += [f"    hint        {violation.hint}"] if violation.hint else []
    versions = [f"{module.__name__} {module.__version__}" for module in (jax, jaxlib, flax)]
    machine = f"Python {platform.python_version()}, {platform.platform()}, {jax.default_backend()}"
    lines += [f"versions: {', '.join(versions)}, {machine}"]
    lines += [f"run:    python {shlex.quote(spec.path)}"] if spec.path else []
    return [*lines, f"replay: {spec.replay}", "It needs jax and flax only."]


def environment(usage: Usage) -> list[str]:
    """What must be set before jax is imported: simulated devices, the platform, where the user's modules are."""
    lines = []
    if jax.default_backend() == "cpu":
        lines.append('os.environ.setdefault("JAX_PLATFORMS", "cpu")')
        if (count := jax.device_count()) > 1:
            lines.append(f'os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " {FLAG}={count}"')
            lines.append(f'os.environ["JAX_NUM_CPU_DEVICES"] = "{count}"')
    lines += [f"sys.path[:0] = {[*usage.folders]!a}"] if usage.folders else []
    return ["import os", *(["import sys"] if usage.folders else []), "", *lines]


def configuration() -> list[str]:
    """The settings of jax that change what a program computes, where they are not the usual ones."""
    changed = {name: getattr(jax.config, name) for name, usual in USUAL.items() if getattr(jax.config, name) != usual}
    return ["", *(f"jax.config.update({name!r}, {value!r})" for name, value in changed.items())] if changed else []


def wanted(spec: Spec) -> list[tuple[str, str]]:
    """The definitions that the program is made of: (room, name)."""
    checked = checks(spec)
    definitions: list[Callable[..., Any]] = [runtime.Facts, runtime.Setup]
    definitions += [run_abstract if spec.abstract else runtime.run, take_apart, runtime.finish]
    definitions += [runtime.shape] if any("shape(" in call.text for call in spec.calls) else []
    definitions += [runtime.registered] if any(map(is_registered, spec.nesting.layers)) else []
    definitions += [runtime.first_of] if "first_of(" in un_nested(spec.nesting) else []
    definitions += [on_mesh] if places(spec.nesting) else []
    definitions += [check for check in CHECKS if check.__name__ in checked]
    if "same_as_un_nested" in checked:
        definitions += [MEANINGS[name] for name in meaning_of(spec.nesting)]
    names = [*layers_of(spec.nesting), *map(place, definitions)]
    if "memory_is_within" in checked:
        names += [place(Rule), *map(layer_name, baseline_for(spec.nesting).layers)]
    return names


CHECKS = (
    no_tracers_remain,
    memory_is_within,
    donated_buffers_are_kept,
    same_as_un_nested,
    nothing_is_dropped_inside,
)
"""The checks, in the order in which they are made."""


def checks(spec: Spec) -> list[str]:
    """The checks of the invariants that the nesting broke; none before it has run, and where it raised what the user's code raises."""
    broken = {each.invariant for each in spec.outcome.violations} if spec.outcome is not None else set()
    return [
        *(["no_tracers_remain"] if "tracers" in broken else []),
        *(["memory_is_within"] if "memory" in broken else []),
        *(["donated_buffers_are_kept"] if "donation" in broken else []),
        *(["same_as_un_nested" if spec.nesting.layers else "nothing_is_dropped_inside"] if "parity" in broken else []),
    ]


def setup_text(nesting: Nesting, spec: Spec, nest: str) -> str:
    """What is known of a nesting."""
    donate = spec.settings.donate
    lines = [
        f"runs={'run_abstract' if spec.abstract else 'run'}",
        f"nest={nest}",
        f"un_nest=lambda out: {un_nested(nesting)}",
        f"inside={inside(nesting)}",
    ]
    lines += [f"axes={axes(nesting)}", f"root={root_of(nesting)}", f"donate={donate!r}"]
    lines += ["place=on_mesh"] if places(nesting) else []
    return "Setup(\n" + "".join(f"    {each},\n" for each in lines) + ")"


WRAPPER = """
def nnx_wrap(subject):
    def wrapped(*args, **kwargs):
        facts = CALLS[min(len(MADE), len(CALLS) - 1)]
        MADE.append(subject)
        ran = NESTING.runs(take_apart(subject, args, kwargs, facts.owner), facts, NESTING)
{checks}        if ran.error is not None:
            raise ran.error
        return finish(ran)

    return wrapped
"""


def checked_text(spec: Spec) -> str:
    """The nesting, what is known of the calls, and the function that stands for the fixture."""
    asked = checks(spec)
    lines = [f"NESTING = {setup_text(spec.nesting, spec, 'nesting')}"]
    if "memory_is_within" in asked:
        bare = baseline_for(spec.nesting)
        nest = f"lambda call, plans: {composed(bare)}"
        lines += [f"UN_NESTED = {setup_text(bare, spec, nest)}", f"RULE = {rule(spec)}"]
    calls = [call.text for call in spec.calls] or ["Facts()"]
    lines += ["CALLS = [\n" + "".join(f"    {text},\n" for text in calls) + "]", "MADE = []", ""]
    more = {"memory_is_within": ", RULE", "no_tracers_remain": "".join(f", {path!a}" for path in dropped(spec.outcome))}
    more["same_as_un_nested"] = f", lambda call: {meaning_text(spec.nesting)}, lambda out: {primal_text(spec.nesting)}"
    called = "".join(f"        {name}(ran{more.get(name, '')})\n" for name in asked)
    return "\n".join([*lines, WRAPPER.format(checks=called)]).rstrip()


def dropped(outcome: Outcome | None) -> tuple[str, ...]:
    """Where the tracers of a violation were: those that died with a module inside can be seen while the nesting runs only."""
    violated = outcome is not None and any(each.invariant == "tracers" for each in outcome.violations)
    found = outcome.evidence if outcome is not None and violated else None
    return tuple(leak.path for leak in found.leaks[:SHOWN]) if found else ()


def rule(spec: Spec) -> str:
    """The rule of memory; the copies of the state are those that the plugin found, if the verdict is known."""
    budget = spec.settings.memory_budget
    bound = None if budget is None else budget.bytes if budget.bytes is not None else float(budget.factor or 0)
    captures = not any(layer.captures for layer in spec.nesting.layers)
    parts = [f"un_nested=UN_NESTED, kept={kept(spec.nesting)}, budget={bound!r}, captures={captures}"]
    copied, peak = copies(spec.outcome)
    return f"Rule({', '.join([*parts, *([f'copied={copied}', f'found={peak}'] if copied else [])])})"


def copies(outcome: Outcome | None) -> tuple[int, int]:
    """Bytes of the state's copies in a peak that broke the rule for them, and the peak."""
    found = outcome.evidence if outcome else None
    if outcome is None or found is None or found.split is None:
        return 0, 0
    findings = [finding for violation in outcome.violations for finding in violation.findings]
    if all(finding.kind != "state copied" for finding in findings):
        return 0, 0
    return sum(buffer.bytes for buffer in found.buffers if buffer.whole and buffer.name), found.split.peak


def main(spec: Spec, usage: Usage, holes: list[str]) -> str:
    """The lines at the end: what the arguments are, then the call, in the mode of flax that the nesting ran in."""
    lines = [title("the call"), *usage.setup]
    if holes:
        lines += [
            f"left = [name for name in {holes!r} if globals()[name] is {FILL_IN}]",
            "if left:",
            "    sys.exit(f\"fill in {', '.join(left)}: what the test had there could not be written\")",
        ]
    graph, updates = spec.flags
    if (graph, updates) != (True, True):
        lines.append(f"with nnx.set_graph_mode({graph}), nnx.set_graph_updates({updates}):\n    {usage.call}")
    else:
        lines.append(usage.call)
    return "\n".join([*lines, f'print("held:", {str(spec.nesting)!a})'])
