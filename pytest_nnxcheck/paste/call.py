"""One call under a nesting as text: the layers around it, and the looks for what was found in it."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax

from pytest_nnxcheck import compat
from pytest_nnxcheck.compat import targets
from pytest_nnxcheck.core import outcome as found
from pytest_nnxcheck.core.catalogue import CALL_FIRST, REGISTERED, row_of
from pytest_nnxcheck.core.chips import parse_target
from pytest_nnxcheck.core.evidence import FLOOR, OnTarget, Split
from pytest_nnxcheck.core.nesting import Layer, Nesting
from pytest_nnxcheck.core.outcome import Finding, FindingOnTarget, Outcome, Violation
from pytest_nnxcheck.core.settings import Settings
from pytest_nnxcheck.engine.reference import MEANINGS, meaning_of
from pytest_nnxcheck.paste.slicer import Slice
from pytest_nnxcheck.subject.plain_objects import fields_by_class
from pytest_nnxcheck.subject.profile import UNKNOWN, Profile
from pytest_nnxcheck.subject.subject import Nodes, Subject
from pytest_nnxcheck.transforms.compose import donated_inputs, home, output_shapes
from pytest_nnxcheck.transforms.layer import LENGTH

ASSERTED = frozenset(("tracers", "memory", "donation", "parity"))
"""The invariants that a program can look for without the plugin."""
GIVEN = {
    (False, False): "(subject, args, kwargs)",
    (False, True): "(subject.__func__, (subject.__self__, *args), kwargs)",
    (True, False): "unwrapped(subject, args, kwargs)",
}
"""How the function of a subject is written with all of its arguments: of a plain one, a method, a partial."""
REPEATED = found.TracerLeft | found.StateTouched
"""Of other findings the first of a kind is enough to know it by."""


@dataclass(frozen=True)
class Call:
    """What is known of one call under a nesting."""

    names: tuple[str, ...]
    """Of its graph nodes."""
    labels: Mapping[str, tuple[Any, ...]]
    """The user's words for those, with the keys that lead to each: none where the call has one module alone."""
    inputs: tuple[str, ...]
    donated: tuple[int, ...]
    """The numbers of the inputs that are donated."""
    plans: tuple[Mapping[str, str], ...]
    """What each layer must know, as text."""
    plain: bool
    """Whether jax alone takes the output apart."""
    given: str
    """The function, and all of its arguments: a method or a partial holds some of them."""
    opened: Mapping[str, Any]
    """Classes of which jax knows nothing, with their fields that hold state."""
    abstract: bool
    subject: str
    """Of a call of one module with arrays alone, that gives one array: how the module is called. Nothing needs to be taken apart."""

    @classmethod
    def of(cls, subject: Subject, profile: Profile, nesting: Nesting, settings: Settings) -> Call:
        several = isinstance(subject.state, Nodes)
        return cls(
            names=subject.names,
            labels={label: (name,) if several else () for name, label in subject.labels.items()},
            inputs=subject.input_names,
            donated=donated_inputs(subject, nesting, settings.donate),
            plans=tuple(plans_of(subject, profile, nesting)),
            plain=profile.plain or (profile is UNKNOWN and bool(nesting.layers)),
            given=GIVEN[subject.partial, subject.method],
            opened=fields_by_class([value for _, value in subject.opened]) | dict(profile.opened),
            abstract=subject.abstract,
            subject=whole(subject, profile),
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


def whole(subject: Subject, profile: Profile) -> str:
    """How a call of one module with arrays alone is written, whose output is one array; empty for any other."""
    labels, given = [*subject.labels.values(), *subject.input_names], inspect.signature(subject.function).parameters
    arrays_alone = subject.plain and not (
        subject.partial or subject.method or subject.static or isinstance(subject.state, Nodes)
    )
    if not arrays_alone or not subject.input_names or profile.out_names != ("",) or not profile.plain:
        return ""
    if getattr(subject.function, "__qualname__", "") == f"{type(subject.state).__qualname__}.__call__":
        return "type(subject).__call__" if [*given][1 : len(labels)] == labels[1:] else ""
    return "subject" if [*given][: len(labels)] == labels else ""


def plans_of(subject: Subject, profile: Profile, nesting: Nesting) -> Iterator[Mapping[str, str]]:
    """What each layer may read of its plan, but for its ``jit``."""
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
    listed = ", ".join(sorted(map(repr, paths)))
    return f"lambda path, _: tuple(path) in {{{listed}}}" if paths else "lambda path, _: False"


def zeros(shapes: Any) -> str:
    """Arrays of zeros as text; of keys some."""
    if isinstance(shapes, tuple):
        return f"({', '.join(map(zeros, shapes))}{',' * (len(shapes) == 1)})"
    if compat.is_key(shapes):
        kinds = ("threefry2x32", "rbg", "unsafe_rbg")
        kind = next(kind for kind in kinds if jax.random.key(0, impl=kind).dtype == shapes.dtype)
        return f"jax.random.split(jax.random.key(0, impl={kind!r}), {tuple(shapes.shape)})"
    device = ""
    if (sharding := compat.in_type(shapes)) is not None:
        spec = f"jax.sharding.PartitionSpec({', '.join(map(repr, sharding.spec))})"
        device = f", device=jax.sharding.NamedSharding(jax.sharding.get_abstract_mesh(), {spec})"
    return f"jnp.zeros({tuple(shapes.shape)}, {str(shapes.dtype)!r}{device})"


# --- the looks


def can_look_for(violation: Violation) -> bool:
    """Whether a program can look for a violation without the plugin, which alone knows where the un-nested call wastes memory."""
    wasted = [isinstance(finding, found.MemoryWasted) for finding in violation.findings]
    return violation.invariant in ASSERTED and not (wasted and all(wasted))


def judged_on(outcome: Outcome | None) -> OnTarget | None:
    """The first target of which a program has to show something: where the CPU shows nothing."""
    violations = outcome.violations if outcome is not None else ()
    every = [each for violation in violations if violation.invariant in ASSERTED for each in violation.findings]
    on = [finding.on for finding in every if isinstance(finding, FindingOnTarget)]
    return on[0] if on and len(on) == len(every) else None


@dataclass
class Looks:
    """What a program looks for: lines at what the call is handed, before and after it runs."""

    first: dict[str, None] = field(default_factory=dict)
    before: dict[str, None] = field(default_factory=dict)
    after: dict[str, None] = field(default_factory=dict)
    search: dict[str, None] = field(default_factory=dict)
    """Types of tracers to look for when it has run."""
    untouched: dict[str, None] = field(default_factory=dict)
    """Leaves that no ``eval_shape`` may change."""
    broken: dict[str, str] = field(default_factory=dict)
    """What the plugin said, by invariant."""
    own_arrays: bool = True
    """Whether the run gets arrays of its own: not where something looks into the buffers of the user's."""

    @property
    def compiles(self) -> bool:
        return any("COMPILED" in line for line in self.after)

    @property
    def donates(self) -> bool:
        return not self.broken or bool(self.broken.keys() & {"memory", "donation"})


def looks_of(outcome: Outcome | None, nesting: Nesting, call: Call) -> Looks:
    """What a program looks for; nothing before the nesting has run, and where it raised what the user's code raises."""
    looks = Looks()
    if on := judged_on(outcome):
        target = parse_target(on.target)
        how = f"{targets.topology(target)}, {targets.effort_options(on.effort)}, {targets.options_for(target.chip)}"
        looks.after[f"program, there = on_target({how}, COMPILED[-1])"] = None
    for violation in outcome.violations if outcome is not None else ():
        seen = set[type[Finding]]()
        rows = violation.details if violation.invariant == "donation" else ()  # a row a leaf
        looks.broken[violation.invariant] = violation.summary
        words = ", ".join(ascii(text) for text in (violation.summary, *(text for _, text in rows)))
        for finding in violation.findings:
            looks.own_arrays &= not isinstance(finding, found.ViewedBuffer)
            if isinstance(finding, FindingOnTarget) == (on is not None) and type(finding) not in seen:
                seen |= set() if isinstance(finding, REPEATED) else {type(finding)}
                for when, text in look_for(finding, nesting, call):
                    says = f"broken({violation.invariant!r}, {text}, {words})"
                    getattr(looks, when)[says if when in ("first", "after") else text] = None
    return looks


def look_for(finding: Finding, nesting: Nesting, call: Call) -> Iterator[tuple[str, str]]:  # noqa: C901, PLR0912 - one case a kind
    """When a program looks for a finding, and the expression that is true where it is there."""
    keys, value = call.keys(finding.path), call.value(finding.path)
    match finding:
        case found.TracerLeft(leak=leak):
            yield ("first", f"any_tracers({{{leak.type!r}}})") if leak.before else ("search", leak.type)
        case found.MadeInEndedTrace():
            yield "first", f"refuses_writes(state, {keys})"
        case found.StateTouched() if keys:
            yield "untouched", f"({keys},)"
        case found.PeakOverBudget(figures=figures):
            yield "after", over(figures.split, figures.bound.budget)
        case found.StateCopied(figures=figures, bytes=size):
            yield "after", over(figures.split, figures.split.peak - size // 2)
        case found.ConstantsCaptured():
            yield "first", f"captured_bytes(program, state, inputs) >= {FLOOR}"
        case found.SharedBuffer(other=other) if value and call.value(other):
            yield "first", f"is_shared({value}, state, inputs)"
        case found.SharedBuffer() | found.Orphaned():
            yield "after", "any_deleted()"
        case found.LostBuffer() if call.abstract:
            yield "after", "lost_by_program(*COMPILED[-1][:2])"
        case found.LostBuffer() | found.ViewedBuffer():
            kind = repr(str(finding.type)) if isinstance(finding, found.LostBuffer) else f"describe({value})"
            yield (
                "before",
                f"donated = places({', '.join(['state', *(f'inputs[{number}]' for number in call.donated)])})",
            )
            yield "after", f"is_lost(donated, {kind}, state, output)"
        case found.UpdateDropped() if call.abstract:
            yield "first", f"is_handed_on(program, state, inputs, {keys})"
        case found.UpdateDropped():
            yield "before", f"old = copied({value})"
            yield "after", f"not differs(old, {value}, 0)"
        case found.ValueDiffers(size=size):
            eager = f"({meaning_text(nesting)})(eager, *inputs)"
            yield "before", "call, eager = program, nnx.clone(state)"
            yield "before", "nnx.update(eager, copied(nnx.state(eager)))"
            yield (
                "before",
                f"wanted = {eager}" if nesting.layers else f"with jax.disable_jit():\n        wanted = {eager}",
            )
            if value:
                yield "before", f"wanted = copied({call.value(finding.path, 'eager')})"
            yield "after", f"differs(wanted, {value or primal_text(nesting)}, {min(size / 2, 1e300)!r})"
        case found.DoesNotFit(on=on):
            yield "after", f"peak_on_target(program, {bool(parse_target(on.target).chip.gpu)}) > {on.limit}"
        case found.OverBudgetOnTarget(on=on, bound=bound):
            yield "after", f"peak_on_target(program, {bool(parse_target(on.target).chip.gpu)}) > {bound.budget}"
        case found.CopiedOnTarget(on=on) if on.split is not None:
            yield "after", f"peak(program) > {on.split.peak - on.copies // 2}"
        case found.LostOnTarget():
            yield "after", "lost_by_program(program, there)"


def over(split: Split, most: int) -> str:
    """Whether the peak is over so many bytes. Constants are counted where they matter: XLA has them in no total."""
    matter = split.peak - split.constants <= most
    return f"peak(COMPILED[-1][0]){' + constant_bytes(COMPILED[-1][0])' if matter else ''} > {most}"


# --- a nesting


def meaning_text(nesting: Nesting) -> str:
    """The eager calls that a nesting means."""
    text, axes = "call", 0
    for name in reversed(meaning_of(nesting)):
        text = f"{MEANINGS[name].__name__}({text}, call, {axes})"
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


def layer_text(layer: Layer, inner: str, values: Mapping[str, str], ours: Slice) -> str:
    """A layer around an inner program: its function, which is copied, and a plan of what that reads."""
    if (own := REGISTERED.get((layer.transform, layer.style))) is not None:
        return f"registered({getattr(own.function, '__name__', layer.transform)}, {inner})"
    name = layer.transform if layer.transform == CALL_FIRST else f"{layer.transform}_{layer.style}"
    ours.take(home(name), [name])
    words = read_of_plan(name)
    plan = f"types.SimpleNamespace({', '.join(f'{word}={values[word]}' for word in words)})"
    return f"{name}({inner}, {plan if words else None})"


@functools.cache
def read_of_plan(name: str) -> list[str]:
    """What the function of a layer reads of its plan, itself or in a function that it calls."""
    alone = Slice()
    alone.take(home(name), [name])
    return sorted(set(re.findall(r"\bplan\.(\w+)", "\n".join(alone.chunks(ours=True)))))


def call_text(name: str, outcome: Outcome | None, nesting: Nesting, settings: Settings, call: Call, ours: Slice) -> str:
    """The function that puts the layers around a call, and the one that takes it apart, runs it and looks."""
    looks, states, layers = looks_of(outcome, nesting, call), states_of(nesting), "call"
    tracers, nested = ascii(looks.broken.get("tracers", "")), name.replace("wrapped", "nesting")
    touched = f"untouched(state, {tracers}, {', '.join(looks.untouched)})"
    unchanged = f"lambda state: {touched if looks.untouched else 'contextlib.nullcontext()'}"
    for number, layer in reversed([*enumerate(nesting.layers)]):
        jit = jit_text(call, settings, looks, states) if states is not None and not number else "wrapper(f)"
        plan = dict(call.plans[number], unchanged=unchanged, jit=f"lambda wrapper, f: {jit}")
        layers = layer_text(layer, layers, plan, ours)
    run = f"{nested}(program)(state, *inputs)"
    if call.abstract and states is None:
        run = f"traced({nested}(program), state, inputs)"
    if looks.search:
        run = f"run_for_tracers(lambda: {run}, {set(looks.search)!r}, {tracers})"
    output = un_nested(nesting, call.abstract)
    lines = [
        *apart(call),
        *looks.first,
        *ready(call, nesting, looks),
        *looks.before,
        f"output = {run}",
        *looks.after,
        f"return {output}[0]" if call.subject else f"return rebuild({output})",
    ]
    given = {"subject": "state, *inputs", "": "*args, **kwargs"}.get(call.subject, "*inputs")
    body = "\n".join(f"    {line}" for line in lines)
    return f"def {nested}(call):\n    return {layers}\n\ndef {name}(subject, {given}):\n{body}"


def jit_text(call: Call, settings: Settings, looks: Looks, states: int) -> str:
    """The jit of the outermost layer: it donates, and is compiled before it runs where a look asks for the program."""
    donated = [*([0] if states and settings.donate != "none" else []), *(states + number for number in call.donated)]
    options = ", keep_unused=True" + (f", donate_argnums={(*donated,)}" if donated and looks.donates else "")
    if call.abstract or looks.compiles:
        return f"compiled(wrapper, f, {'leave' if call.abstract else None}{options})"
    return f"wrapper(f{options})"


def ready(call: Call, nesting: Nesting, looks: Looks) -> Iterator[str]:
    """The lines that give the run arrays of its own, with the axes of the layers, on the mesh of a layer."""
    states = states_of(nesting)
    if not call.abstract and looks.donates and looks.own_arrays and states is not None:
        yield "nnx.update(state, jax.tree.map(jnp.copy, nnx.state(state)))"
    if not call.abstract and (not call.subject or call.donated):
        yield "inputs = [*map(jnp.array, inputs)]"
    elif call.abstract and compat.active_mesh() is not None:
        yield "nnx.update(state, abstract_state(nnx.state(state)))"
    yield from ["inputs = [*map(with_axis, inputs)]" for layer in nesting.layers if layer.row.axis]
    if states and any(layer.row.on_mesh for layer in nesting.layers):
        yield from ("nnx.update(state, on_mesh(nnx.state(state)))", "inputs = on_mesh(inputs)")


def apart(call: Call) -> Iterator[str]:
    """The lines that take a call apart."""
    if call.subject:
        yield from [] if call.subject == "subject" else ["state = subject"]
        yield f"program = lambda state, *inputs: ({call.subject}(state, *inputs),)"
        return
    given = f"opened({call.given})" if call.opened else call.given
    nodes, join = "[state]", "lambda state: state"
    if () not in call.labels.values():
        nodes = f"[{', '.join(f'state.{name}' for name in call.names)}]"
        join = f"lambda {', '.join(call.names)}: Nodes({', '.join(f'{name}={name}' for name in call.names)})"
    pack = "emptied" if call.opened else "arrays_of" if call.plain else "parts_of"
    yield f"program, state, inputs, rebuild = take_apart({given}, lambda state: {nodes}, {join}, {pack})"
