"""The text of a program: the user's test, the layers that ran, what looks for the finding, and the line that calls.

All but a few lines is source that exists: `slicer` copies it. It is written before the nesting runs, so that a process that is killed leaves it behind.
"""

from __future__ import annotations

import ast
import platform
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import flax
import jax
import jaxlib

from pytest_nnxcheck import compat, wheels
from pytest_nnxcheck.compat import targets
from pytest_nnxcheck.core.catalogue import CALL_FIRST, REGISTERED, row_of
from pytest_nnxcheck.core.chips import parse_target
from pytest_nnxcheck.core.evidence import FLOOR, OnTarget
from pytest_nnxcheck.core.nesting import Layer, Nesting
from pytest_nnxcheck.core.outcome import (
    ConstantsCaptured,
    CopiedOnTarget,
    DoesNotFit,
    Finding,
    FindingOnTarget,
    LostBuffer,
    LostOnTarget,
    MadeInEndedTrace,
    MemoryWasted,
    Orphaned,
    Outcome,
    OverBudgetOnTarget,
    PeakOverBudget,
    SharedBuffer,
    StateCopied,
    StateTouched,
    TracerLeft,
    UpdateDropped,
    ValueDiffers,
    ViewedBuffer,
    Violation,
)
from pytest_nnxcheck.core.settings import Settings
from pytest_nnxcheck.devices import FLAG
from pytest_nnxcheck.engine import reference
from pytest_nnxcheck.paste import looks, runtime
from pytest_nnxcheck.paste.slicer import Slice, bound_by, globals_in
from pytest_nnxcheck.paste.usage import FILL_IN, Usage, one_line
from pytest_nnxcheck.reporting.report import headline
from pytest_nnxcheck.subject import abstract_arrays
from pytest_nnxcheck.subject.plain_objects import fields_by_class
from pytest_nnxcheck.subject.profile import UNKNOWN, Profile
from pytest_nnxcheck.subject.subject import Nodes, Subject
from pytest_nnxcheck.transforms import layer as layer_module
from pytest_nnxcheck.transforms import mapping
from pytest_nnxcheck.transforms.compose import donated_inputs, home, output_shapes
from pytest_nnxcheck.transforms.layer import LENGTH

ASSERTED = frozenset(("tracers", "memory", "donation", "parity"))
"""The invariants that a program can look for without the plugin."""
STAND_INS = {
    name: f"def {name}(subject, *args, kwargs=None, **settings):\n    return nnx_wrap(subject)(*args, **(kwargs or {{}}))"
    for name in ("check", "assert_invariants")
}
"""What the user's own code takes from this package, in two lines."""
USUAL = {
    "jax_enable_x64": False,
    "jax_default_prng_impl": "threefry2x32",
    "jax_debug_nans": False,
    "jax_numpy_rank_promotion": "allow",
}
SOURCES = (looks, runtime, layer_module, mapping, reference, abstract_arrays)
"""Where the names of ours that a program's own lines use are defined."""


# --- what is known of a call


@dataclass(frozen=True)
class Call:
    """What is known of one call under a nesting.

    ``names`` are those of its graph nodes, ``single`` says that it has one alone, ``labels`` are the user's words for them with the keys that lead
    to each; ``inputs`` names its arrays. ``donated`` are the numbers of those that are donated, ``plans`` what each layer must know, as text.
    Its output is ``plain`` where jax alone takes that apart. ``partial``: arguments are in a partial or a method. ``opened`` are classes of which jax knows nothing.
    """

    names: tuple[str, ...]
    single: bool
    labels: Mapping[str, tuple[Any, ...]]
    inputs: tuple[str, ...]
    donated: tuple[int, ...]
    plans: tuple[Mapping[str, str], ...]
    plain: bool
    partial: bool
    opened: Mapping[str, Any]
    abstract: bool

    @classmethod
    def of(cls, subject: Subject, profile: Profile, nesting: Nesting, settings: Settings) -> Call:
        several = isinstance(subject.state, Nodes)
        opened = fields_by_class([value for _, value in subject.opened]) | dict(profile.opened)
        return cls(
            names=subject.names,
            single=not several,
            labels={label: (name,) if several else () for name, label in subject.labels.items()},
            inputs=subject.input_names,
            donated=donated_inputs(subject, nesting, settings.donate),
            plans=tuple(plans_of(subject, profile, nesting)),
            plain=profile.plain or (profile is UNKNOWN and bool(nesting.layers)),
            partial=subject.partial,
            opened=opened,
            abstract=subject.abstract,
        )

    def keys(self, path: str) -> str:
        """The keys that lead to a leaf, as arguments; empty where it is not in the state."""
        for label in sorted(self.labels, key=len, reverse=True):
            rest = path.removeprefix(label)
            if path.startswith(label) and rest[:1] in ("", ".", "["):
                steps = [repr(name) if name else key for name, key in re.findall(r"\.(\w+)|\[('[^']*'|[^\]]*)\]", rest)]
                return ", ".join([*map(repr, self.labels[label]), *steps])
        return ""

    def value(self, path: str, state: str = "state") -> str:
        """The expression for a leaf or an input by its path; empty for what is neither."""
        if path in self.inputs:
            return f"inputs[{self.inputs.index(path)}]"
        return f"value_at({state}, {keys})" if (keys := self.keys(path)) else ""

    def values(self, findings: list[Any], state: str = "state") -> str:
        return ", ".join(filter(None, (self.value(finding.path, state) for finding in findings)))


def plans_of(subject: Subject, profile: Profile, nesting: Nesting) -> Iterator[Mapping[str, str]]:
    """What each layer reads of its plan, as text, but for its ``jit``."""
    for number in range(len(nesting.layers)):
        inner = nesting.layers[number + 1 :]
        axes = sum(bool(layer.row.axis) for layer in inner)
        yield {
            "changed": among(profile.changed),
            "written": among(profile.changed | profile.restored),
            "parameters": among(profile.parameters),
            "graph_updates": str(compat.mode_flags()[1]),
            "length": str(LENGTH),
            "subject": "call",
            "element": f"lambda leaf: leaf[{(0,) * axes!r}]",
            "empty": f"lambda: {zeros(output_shapes(inner, profile, subject.inputs))}",
        }


def among(paths: frozenset[Any]) -> str:
    """A filter for these paths."""
    return (
        f"lambda path, _: tuple(path) in {{{', '.join(sorted(map(repr, paths)))}}}"
        if paths
        else "lambda path, _: False"
    )


def zeros(shapes: Any) -> str:
    """Arrays of zeros as text; of keys some."""
    if isinstance(shapes, tuple):
        return f"({', '.join(map(zeros, shapes))}{',' * (len(shapes) == 1)})"
    if compat.is_key(shapes):
        kind = next(
            kind for kind in ("threefry2x32", "rbg", "unsafe_rbg") if jax.random.key(0, impl=kind).dtype == shapes.dtype
        )
        return f"jax.random.split(jax.random.key(0, impl={kind!r}), {tuple(shapes.shape)})"
    sharding = compat.in_type(shapes)
    if sharding is None:
        return f"jnp.zeros({tuple(shapes.shape)}, {str(shapes.dtype)!r})"
    spec = ", ".join(map(repr, sharding.spec))
    device = f"jax.sharding.NamedSharding(jax.sharding.get_abstract_mesh(), jax.sharding.PartitionSpec({spec}))"
    return f"jnp.zeros({tuple(shapes.shape)}, {str(shapes.dtype)!r}, device={device})"


# --- what a program looks for


@dataclass
class Asked:
    """Lines of looks at what the call is handed, and before and after the run, and how it runs: it is searched for tracers of these ``kinds``, its jit donates, or is compiled before."""

    first: list[str] = field(default_factory=list)
    before: list[str] = field(default_factory=list)
    after: list[str] = field(default_factory=list)
    search: str = ""
    untouched: str = "lambda state: contextlib.nullcontext()"
    donates: bool = True
    copies: bool = True
    compiles: bool = False

    def look(self, lines: list[str], violation: Violation, found: str) -> None:
        lines.append(f"broken({violation.invariant!r}, {found}, {violation.summary!a})")


def can_look_for(violation: Violation) -> bool:
    """Whether a program can look for a violation without the plugin, which alone knows where the un-nested call wastes memory."""
    wasted = [isinstance(finding, MemoryWasted) for finding in violation.findings]
    return violation.invariant in ASSERTED and not (wasted and all(wasted))


def judged_on(outcome: Outcome | None) -> OnTarget | None:
    """The first target of which a program has to show something: where the CPU shows nothing."""
    violations = outcome.violations if outcome is not None else ()
    found = [each for violation in violations if violation.invariant in ASSERTED for each in violation.findings]
    on = [finding.on for finding in found if isinstance(finding, FindingOnTarget)]
    return on[0] if on and len(on) == len(found) else None


def asked_of(outcome: Outcome | None, nesting: Nesting, call: Call) -> Asked:
    """What a program looks for; nothing before the nesting has run, and where it raised what the user's code raises."""
    asked, on = Asked(), judged_on(outcome)
    violations = outcome.violations if outcome is not None else ()
    if on is not None:
        asked.compiles = True
        where = targets.topology(target := parse_target(on.target))
        options = targets.options_for(target.chip)
        asked.after.append(
            f"program, there = on_target({where}, {targets.effort_options(on.effort)}, {options}, COMPILED[-1])"
        )
    elif violations:
        asked.donates = any(violation.invariant in ("donation", "memory") for violation in violations)
    for violation in violations:
        kinds: dict[type[Finding], list[Any]] = {}
        for finding in violation.findings:
            kinds.setdefault(type(finding), []).append(finding)
        if on is not None:
            of_target(asked, violation, on, call)
        elif violation.invariant == "tracers":
            of_tracers(asked, violation, kinds, outcome, call)
        elif violation.invariant == "memory":
            of_memory(asked, violation, kinds)
        elif violation.invariant == "donation":
            of_donation(asked, violation, kinds, call)
        elif violation.invariant == "parity" and ValueDiffers in kinds:
            of_parity(asked, violation, kinds[ValueDiffers], nesting, call)
    return asked


def of_target(asked: Asked, violation: Violation, on: OnTarget, call: Call) -> None:
    gpu = bool(parse_target(on.target).chip.gpu)
    for finding in violation.findings:
        match finding:
            case DoesNotFit() if finding.on == on:
                asked.look(asked.after, violation, f"peak_on_target(program, {gpu}) > {on.limit}")
            case OverBudgetOnTarget(bound=bound) if finding.on == on:
                asked.look(asked.after, violation, f"peak_on_target(program, {gpu}) > {bound.budget}")
            case CopiedOnTarget() if finding.on == on and on.split is not None:
                asked.look(asked.after, violation, f"peak(program) > {on.split.peak - on.copies // 2}")
            case LostOnTarget() if finding.on == on:
                asked.look(asked.after, violation, "lost_by_program(program, there)")


def of_tracers(
    asked: Asked, violation: Violation, kinds: Mapping[type[Finding], list[Any]], outcome: Outcome | None, call: Call
) -> None:
    """Tracers that are left, Variables that cannot be written, leaves that an ``eval_shape`` changed."""
    early = {finding.leak.type for finding in kinds.get(TracerLeft, ()) if finding.leak.before}
    late = (
        {leak.type for leak in outcome.evidence.leaks}
        if outcome is not None and outcome.evidence is not None
        else set()
    )
    if early:
        asked.look(asked.first, violation, f"any_tracers({early!r})")
    elif late:
        asked.search = f"{late!r}, {violation.summary!a}"
    for finding in kinds.get(MadeInEndedTrace, ())[:1]:
        asked.look(asked.first, violation, f"refuses_writes(state, {call.keys(finding.path)})")
    if touched := [keys for finding in kinds.get(StateTouched, ()) if (keys := call.keys(finding.path))]:
        words = ", ".join(f"({keys},): {violation.summary!a}" for keys in touched)
        asked.untouched = f"lambda state: untouched(state, {{{words}}})"


def of_memory(asked: Asked, violation: Violation, kinds: Mapping[type[Finding], list[Any]]) -> None:
    """A peak over its budget, copies of the state, what the call captures."""
    program = "COMPILED[-1][0]"
    asked.compiles = any(isinstance(finding, PeakOverBudget | StateCopied) for finding in violation.findings)
    for finding in violation.findings:
        if isinstance(finding, PeakOverBudget | StateCopied):
            split = finding.figures.split
            most = finding.figures.bound.budget
            if isinstance(finding, StateCopied):
                most = split.peak - finding.bytes // 2
            figure = f"peak({program})" + (
                f" + constant_bytes({program})" if split.peak - split.constants <= most else ""
            )
            asked.look(asked.after, violation, f"{figure} > {most}")
        elif isinstance(finding, ConstantsCaptured):
            asked.look(asked.first, violation, f"captured_bytes(program, state, inputs) >= {FLOOR}")


def of_donation(asked: Asked, violation: Violation, kinds: Mapping[type[Finding], list[Any]], call: Call) -> None:
    """Leaves that share a buffer, that lost theirs, or of which a copy is updated."""
    for finding in kinds.get(SharedBuffer, ()):
        if (value := call.value(finding.path)) and call.value(finding.other):
            asked.look(asked.first, violation, f"is_shared({value}, state, inputs)")
        else:
            asked.look(asked.after, violation, "any_deleted()")
    if Orphaned in kinds:
        asked.look(asked.after, violation, "any_deleted()")
    lost = kinds.get(LostBuffer, [])
    if lost and call.abstract:
        asked.compiles = True
        asked.look(asked.after, violation, "lost_by_program(*COMPILED[-1][:2])")
    elif lost or ViewedBuffer in kinds:
        asked.copies = ViewedBuffer not in kinds
        types = [repr(str(finding.type)) for finding in lost]
        types += [
            f"describe({value})" for finding in kinds.get(ViewedBuffer, ()) if (value := call.value(finding.path))
        ]
        inputs = "".join(f", inputs[{number}]" for number in call.donated)
        asked.before.append(f"donated, types = places(state{inputs}), {{{', '.join(dict.fromkeys(types))}}}")
        asked.look(asked.after, violation, "is_lost(donated, types, state, output)")
    if dropped := kinds.get(UpdateDropped):
        if call.abstract:
            asked.look(asked.first, violation, f"is_handed_on(program, state, inputs, {call.keys(dropped[0].path)})")
        else:
            asked.before.append(f"old = copied([{call.values(dropped)}])")
            asked.look(asked.after, violation, f"not differs(old, [{call.values(dropped)}], 0)")


def of_parity(asked: Asked, violation: Violation, differ: list[ValueDiffers], nesting: Nesting, call: Call) -> None:
    """Values that are others than those of the same calls without the nesting, or without the call's own jits."""
    eager = f"({meaning_text(nesting)})(eager, *copied(inputs))"
    asked.before += [
        "call, eager = program, nnx.clone(state)",
        "nnx.update(eager, copied(nnx.state(eager)))",
        f"wanted = {eager}" if nesting.layers else f"with jax.disable_jit():\n            wanted = {eager}",
    ]
    for finding in differ[:1]:
        want, have = call.value(finding.path, "eager") or "wanted", call.value(finding.path) or primal_text(nesting)
        asked.look(asked.after, violation, f"differs({want}, {have}, {min(finding.size / 2, 1e300)!r})")


# --- a nesting as text


def meaning_text(nesting: Nesting) -> str:
    """The eager calls that a nesting means."""
    text, axes = "call", 0
    for name in reversed(reference.meaning_of(nesting)):
        text = f"{reference.MEANINGS[name].__name__}({text}, call, {axes})"
        axes += bool(row_of(name).axis)
    return text


def primal_text(nesting: Nesting, out: str = "output", start: int = 0) -> str:
    """The expression for an output without gradients."""
    for number, layer in enumerate(nesting.layers[start:], start):
        if layer.transform == CALL_FIRST:
            return f"({out}[0], {primal_text(nesting, f'{out}[1]', number + 1)})"
        out = f"{out}[0]" if layer.row.pair == "gradients" else out
    return out


def un_nested(nesting: Nesting, abstract: bool) -> str:
    """The expression for the call's own output in that of the nesting."""
    text = "output"
    for layer in nesting.layers:
        if layer.transform == CALL_FIRST or layer.row.pair == "gradients":
            text += "[1]" if layer.transform == CALL_FIRST else "[0]"
        elif layer.row.axis:
            text = f"jax.eval_shape(first, {text})" if abstract else f"first({text})"
    return text


def states_of(nesting: Nesting) -> int | None:
    """How many arguments of the outermost jit are state; None where the outermost layer is no jit."""
    layers = nesting.layers
    return {"argument": 1, "functional": 2}.get(layers[0].style, 0) if layers and layers[0].row.compiles else None


def layer_text(layer: Layer, ours: Slice) -> tuple[str, set[str]]:
    """The name of a layer's function, which is copied, and what it reads of its plan; nothing for one of the user's own."""
    if (own := REGISTERED.get((layer.transform, layer.style))) is not None:
        return str(getattr(own.function, "__name__", layer.transform)), set()
    name = layer.transform if layer.transform == CALL_FIRST else f"{layer.transform}_{layer.style}"
    alone = Slice()
    for each in (alone, ours):
        each.take(home(name), [name])
    return name, set(re.findall(r"\bplan\.(\w+)", "\n".join(alone.chunks(ours=True))))


def call_text(number: int, nesting: Nesting, settings: Settings, call: Call, asked: Asked, ours: Slice) -> str:
    """The function that puts the layers around a call, and the one that runs the call and looks."""
    states, lines = states_of(nesting), [f"def nesting_{number}(call):"]
    donated = (0,) if states and settings.donate != "none" else ()
    donated += tuple((states or 0) + each for each in call.donated)
    options = ", keep_unused=True" + (f", donate_argnums={donated}" if donated and asked.donates else "")
    jit = f"lambda wrapper, f: wrapper(f{options})"
    if asked.compiles or call.abstract:
        jit = f"lambda wrapper, f: compiled(wrapper, f, {'leave' if call.abstract else 'run'}{options})"
    f = "call"
    for index, layer in reversed([*enumerate(nesting.layers)]):
        name, words = layer_text(layer, ours)
        plain = "lambda wrapper, f: wrapper(f)"
        values = {
            **call.plans[index],
            "jit": jit if states is not None and not index else plain,
            "unchanged": asked.untouched,
        }
        plan = ", ".join(f"{word}={values[word]}" for word in sorted(words))
        made = f"{name}({f}, types.SimpleNamespace({plan}))" if words else f"{name}({f}, None)"
        lines.append(
            f"    f = {made if (layer.transform, layer.style) not in REGISTERED else f'registered({name}, {f})'}"
        )
        f = "f"
    lines += [f"    return {f}", "", f"def call_{number}(subject, /, *args, **kwargs):"]
    return "\n".join([*lines, *(f"    {line}" for line in call_lines(number, nesting, call, asked))])


def call_lines(number: int, nesting: Nesting, call: Call, asked: Asked) -> Iterator[str]:
    """The lines that take a call apart, run it, and look."""
    given = "unwrapped(subject, args, kwargs)" if call.partial else "(subject, args, kwargs)"
    names = ", ".join(call.names)
    nodes = "[state]" if call.single else f"[{', '.join(f'state.{name}' for name in call.names)}]"
    join = (
        "lambda state: state"
        if call.single
        else f"lambda {names}: Nodes({', '.join(f'{name}={name}' for name in call.names)})"
    )
    pack = "emptied" if call.opened else "arrays_of" if call.plain else "parts_of"
    given = f"opened({given})" if call.opened else given
    yield f"program, state, inputs, rebuild = take_apart({given}, lambda state: {nodes}, {join}, {pack})"
    yield from asked.first
    concrete = not call.abstract
    if concrete and asked.donates and asked.copies and states_of(nesting) is not None:
        yield "nnx.update(state, copied(nnx.state(state)))"
    if concrete:
        yield "inputs = [jnp.array(array) for array in inputs]"
    elif compat.active_mesh() is not None:
        yield "nnx.update(state, abstract_state(nnx.state(state)))"
    if axes := sum(bool(layer.row.axis) for layer in nesting.layers):
        yield from ["inputs = [with_axis(array) for array in inputs]"] * axes
    if states_of(nesting) and any(layer.row.on_mesh for layer in nesting.layers):
        yield from ("nnx.update(state, on_mesh(nnx.state(state)))", "inputs = on_mesh(inputs)")
    yield from asked.before
    run = f"nesting_{number}(program)(state, *inputs)"
    if call.abstract and states_of(nesting) is None:
        run = f"traced(nesting_{number}(program), state, inputs)"
    yield f"output = {f'run_for_tracers(lambda: {run}, {asked.search})' if asked.search else run}"
    yield from asked.after
    yield f"return rebuild({un_nested(nesting, call.abstract)})"


# --- the whole program


@dataclass(frozen=True)
class Spec:
    """One program: the nesting, how it is checked, its calls, and the verdict where it is known; ``flags`` are those of flax's mode."""

    nesting: Nesting
    settings: Settings
    calls: tuple[Call, ...]
    title: str
    replay: str
    path: str
    flags: tuple[bool, bool] = (True, True)
    outcome: Outcome | None = None


NO_CALL = Call((), False, {}, (), (), (), True, False, {}, False)


def compose(spec: Spec, usage: Usage) -> str:
    """The whole program."""
    ours, calls = Slice(), spec.calls or (NO_CALL,)
    texts = [
        call_text(
            number,
            spec.nesting,
            spec.settings,
            call,
            asked_of(spec.outcome, spec.nesting, call) if call is calls[-1] else Asked(),
            ours,
        )
        for number, call in enumerate(calls, 1)
    ]
    first = f"itertools.chain([{', '.join(f'call_{number}' for number in range(1, len(calls)))}], itertools.repeat(call_{len(calls)}))"
    texts.append(
        "def nnx_wrap(subject):\n    return functools.partial(call_1, subject)"
        if len(calls) == 1
        else f"CALLS = {first}\n\ndef nnx_wrap(subject):\n    return lambda *args, **kwargs: next(CALLS)(subject, *args, **kwargs)"
    )
    layers = ours.chunks(ours=True)
    needed = globals_in("\n".join(texts))
    for module in SOURCES:
        ours.take(
            module,
            sorted(
                needed
                & vars(module).keys()
                & {
                    name
                    for name, value in vars(module).items()
                    if getattr(value, "__module__", module.__name__) == module.__name__
                }
            ),
        )
    opened = {name: fields for call in calls for name, fields in call.opened.items()}
    support = [
        text if text != "OPENED = {}" else f"OPENED = {opened!r}"
        for text in ours.chunks(ours=True)
        if text not in layers
    ]
    own = "\n\n".join([*layers, *texts, *support])
    own = renamed(own, bound_in([*usage.slice.imports, *usage.slice.chunks(ours=False), *usage.setup]))
    stand_ins = [
        STAND_INS.get(name, f"{name} = None  # needs pytest: write it anew where the test uses it")
        for name in usage.slice.missing
    ]
    holes = [*usage.holes]
    standard = [f"import {name}" for name in ("contextlib", "functools", "itertools", "types") if name in needed]
    imports = dict.fromkeys(["import sys"] if holes else [], None) | usage.slice.imports | ours.imports
    parts = [
        "\n".join(f"# {one_line(line)}".rstrip() for line in header(spec)),
        "from __future__ import annotations" if usage.slice.future else "",
        "\n".join(environment([*usage.slice.folders], judged_on(spec.outcome))),
        "\n".join(
            sorted(
                {*standard, *imports, "import jax", "import jax.numpy as jnp", "from flax import nnx"},
                key=lambda line: (line.startswith("from"), line),
            )
        ),
        "\n".join(
            f"jax.config.update({name!r}, {value!r})"
            for name, usual in USUAL.items()
            if (value := getattr(jax.config, name)) != usual
        ),
        f"{FILL_IN} = ..." if holes else "",
        *stand_ins,
        section("the test", "\n\n".join(usage.slice.chunks(ours=False))),
        section("the layers that ran around it, and what looks for the finding", own),
        section("the call", "\n".join(ending(spec, usage, holes))),
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


def section(title: str, text: str) -> str:
    return f"# {f'--- {title} ':-<116}\n{text}"


def bound_in(texts: list[str]) -> set[str]:
    return {name for text in texts for statement in ast.parse(text).body for name in bound_by(statement)}


def renamed(text: str, taken: set[str]) -> str:
    """Our part of a program, with other names for what the user's part binds as well."""
    clash = (bound_in([text]) & taken) - {"nnx_wrap"}
    if not clash:
        return text
    tree = ast.parse(text)
    for node in ast.walk(tree):
        for part in () if isinstance(node, ast.keyword) else ("id", "name", "arg"):
            if getattr(node, part, None) in clash:
                setattr(node, part, f"{getattr(node, part)}_")
    return ast.unparse(tree)


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
    lines += [f"versions: {', '.join(versions)}, {machine}; it does not need the plugin"]
    if on := judged_on(outcome):
        lines += [f"needs the wheel {on.wheel}, which compiles for {on.target}, and none of its devices"]
    return [*lines, *([f"run:    python {shlex.quote(spec.path)}"] if spec.path else []), f"replay: {spec.replay}"]


def environment(folders: list[str], on: OnTarget | None) -> Iterator[str]:
    """What must be set before jax is imported: simulated devices, the platform, what the compiler of a target needs, where the user's modules are."""
    yield f"import {'os, sys' if folders else 'os'}"
    if on is not None:
        needed = wheels.WITHOUT_GPU if parse_target(on.target).chip.gpu else wheels.WITHOUT_TPU
        yield f"os.environ |= { ({**needed, wheels.LOG_LEVEL: '3'})!r}"
    if jax.default_backend() == "cpu":
        yield 'os.environ.setdefault("JAX_PLATFORMS", "cpu")'
        if (count := jax.device_count()) > 1:
            flags = f'os.environ.get("XLA_FLAGS", "") + " {FLAG}={count}"'
            yield f'os.environ |= {{"XLA_FLAGS": {flags}, "JAX_NUM_CPU_DEVICES": "{count}"}}'
    if folders:
        yield f"sys.path[:0] = {folders!a}"


def ending(spec: Spec, usage: Usage, holes: list[str]) -> Iterator[str]:
    """What the arguments are, then the call, in the mode of flax that the nesting ran in."""
    yield from usage.setup
    if holes:
        yield f"left = [name for name in {holes!r} if globals()[name] is {FILL_IN}]"
        yield "if left:\n    sys.exit(f\"fill in {', '.join(left)}: what the test had there could not be written\")"
    graph, updates = spec.flags
    if spec.flags != (True, True):
        yield f"with nnx.set_graph_mode({graph}), nnx.set_graph_updates({updates}):\n    {usage.call}"
    else:
        yield usage.call
    yield f'print("held:", {str(spec.nesting)!a})'
