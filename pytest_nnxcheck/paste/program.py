"""The text of a program: the user's test, the layers that ran, what looks for the finding, and the line that calls.

In the place of ``nnx_wrap`` the test gets a function that takes its arguments apart, as `bind` took them apart for the check: where each node and each
array is among them is known, and written out. It runs the layers around a call of the test's own subject, and looks. `slicer` copies all other lines
from source that exists: that of the user, of the layers, and of `looks`. The plugin writes the program before the nesting runs, so that a killed process
leaves it behind. A file that cannot be written never loses a run: it is said once, and the run goes on.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import os
import platform
import re
import shlex
import textwrap
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import flax
import jax
import jaxlib
from jax.tree_util import keystr, tree_leaves_with_path

from pytest_nnxcheck import wheels
from pytest_nnxcheck.compat import arrays, flax_modes, graph
from pytest_nnxcheck.compat.targets import effort_options, machine_of, options_for, topology
from pytest_nnxcheck.core.catalogue import CALL_FIRST, REGISTERED
from pytest_nnxcheck.core.chips import parse_target
from pytest_nnxcheck.core.nesting import Nesting
from pytest_nnxcheck.core.on_target import OnTarget
from pytest_nnxcheck.core.outcome import BodyFinished, BodyStarted, FindingOnTarget, Moment, Outcome
from pytest_nnxcheck.core.settings import Settings
from pytest_nnxcheck.core.text import lay_out, near_to
from pytest_nnxcheck.devices import FLAG
from pytest_nnxcheck.engine.example import CallStarted
from pytest_nnxcheck.paste import looks, usage
from pytest_nnxcheck.paste.slicer import Slice, bound_in, globals_in, read, source_of
from pytest_nnxcheck.paste.usage import STAND_IN, Usage, one_line
from pytest_nnxcheck.reporting.report import Report, found_rows, headline, replay
from pytest_nnxcheck.subject import abstract_arrays, subject
from pytest_nnxcheck.subject.plain_objects import Bare, Opened
from pytest_nnxcheck.subject.profile import UNKNOWN, Profile
from pytest_nnxcheck.subject.subject import Nodes, Source, Subject
from pytest_nnxcheck.transforms import layers
from pytest_nnxcheck.transforms.compose import Root, donated_inputs, layer_name, output_shapes

STAND_IN_TEXT = """def {}(subject, *args, kwargs=None, **settings):
    return nnx_wrap(subject)(*args, **(kwargs or {{}}))"""
"""``check`` or ``assert_invariants``, as the user's own code calls it."""
USUAL = {
    "jax_enable_x64": False,
    "jax_default_prng_impl": "threefry2x32",
    "jax_debug_nans": False,
    "jax_numpy_rank_promotion": "allow",
}
SOURCES = (looks, layers, subject, abstract_arrays, flax_modes, graph)
"""The modules of ours whose functions the lines of a program call."""


def compose(
    call: PastedCall, others: str, usage: Usage, test: Report, path: str, outcome: Outcome | None = None
) -> str:
    """The whole program of a call of a test; it looks for the outcome, where that is known. Raises `NoSource`.

    Calls of the test whose number is ``others``, such as ``< 2``, are made without the nesting.
    """
    look = looks_of(outcome, call) if outcome is not None else Looks()
    copied = usage.slice
    texts = wrapped_text(call, copied, look, others)
    names = globals_in(texts)
    for module in SOURCES:
        copied.take(module, sorted(names))
        names -= read(module).bound.keys()  # a later one may import another function of that name
    user, ours = copied.chunks(ours=False), [*copied.chunks(ours=True), texts]
    taken = {name for text in (*copied.imports, *user, *usage.setup) for name in bound_in(text)} - {"nnx_wrap"}
    own = "\n\n".join(ours)
    imports = {"import jax", "import jax.numpy as jnp", "from flax import nnx", *copied.imports}
    imports |= {f"import {name}" for name in ("contextlib", "types") if name in globals_in(own)}
    if any(taken & bound_in(text) for text in ours):  # names of ours that the user's code has too
        indented = textwrap.indent(own, "    ")
        own = f"def with_own_names():\n{indented}\n\n    return nnx_wrap\n\nnnx_wrap = with_own_names()"
    missing = "{} = None  # needs pytest: write it anew where the test uses it"
    head = header(call.nesting, test, path, outcome, look.on)
    parts = [
        "\n".join(f"# {one_line(line)}".rstrip() for line in head.splitlines()),
        "from __future__ import annotations" if copied.future else "",
        "\n".join(environment([*copied.folders], look.on)),
        "\n".join(
            [
                *sorted(line for line in imports if not line.startswith("from")),
                *answers(look.on),
                *sorted(line for line in imports if line.startswith("from")),
            ]
        ),
        # The settings of jax that change what a program computes.
        "\n".join(
            f"jax.config.update({name!r}, {getattr(jax.config, name)!r})"
            for name, usual in USUAL.items()
            if getattr(jax.config, name) != usual
        ),
        *((STAND_IN_TEXT if name in STAND_IN else missing).format(name) for name in copied.missing),
        section("the test", "\n\n".join(user)),
        section("the layers that ran around it, and what looks for the finding", own),
        section("the call", "\n".join(ending(call, usage))),
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


def section(title: str, text: str) -> str:
    return f"# {f'--- {title} ':-<116}\n{text}"


def header(nesting: Nesting, test: Report, path: str, outcome: Outcome | None, on: OnTarget | None) -> str:
    """The header of a program: its finding in the words of the message, the versions, and the command that runs it."""
    rows = [("nesting", str(nesting)), *(found_rows(outcome) if outcome is not None else ())]
    versions = [f"{module.__name__} {module.__version__}" for module in (jax, jaxlib, flax)]
    machine = f"Python {platform.python_version()}, {platform.platform()}, {jax.default_backend()}"
    rows.append(("versions", f"{', '.join(versions)}, {machine}; it does not need the plugin"))
    if on is not None:
        rows.append(("needs", f"the wheel {on.wheel}, which compiles for {on.target}, and none of its devices"))
    if path:
        rows.append(("program", f"python {shlex.quote(path)}"))
    head = headline(outcome) if outcome is not None else "nnx: written before the nesting ran"
    return lay_out(head, test.test_id, [*rows, ("replay", replay(test, nesting))])


def environment(folders: list[str], on: OnTarget | None) -> Iterator[str]:
    """The lines that run before jax is imported: simulated devices, the platform, the variables of a target's compiler, the folders of the user's modules."""
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


def answers(on: OnTarget | None) -> Iterator[str]:
    """The lines that give the user's code the answers of a target, if it asks jax what it runs on: what it imports by name comes after them."""
    if on is None or not on.answered:
        return
    machine = machine_of(parse_target(on.target))
    device = {"platform": machine.platform, "device_kind": machine.devices[0].device_kind}
    yield f"# The code asks jax what it runs on, and gets the answers of {on.target}."
    yield f"jax.default_backend = lambda: {machine.platform!r}"
    yield f"jax.devices = jax.local_devices = lambda *_, **__: [type('Device', (), {device})()] * {len(machine.devices)}"
    yield f"jax.device_count = jax.local_device_count = lambda *_, **__: {len(machine.devices)}"


def ending(call: PastedCall, usage: Usage) -> Iterator[str]:
    """The arguments, then the call, in the mode of flax that the nesting ran in."""
    yield from usage.setup
    graph_mode, updates = call.flags
    if not (graph_mode and updates):
        yield f"with nnx.set_graph_mode({graph_mode}), nnx.set_graph_updates({updates}):\n    {usage.call}"
    else:
        yield usage.call
    yield f'print("passed:", {str(call.nesting)!a})'


# --- the looks


@dataclass
class Looks:
    """The lines with which a program looks for what was found, by their moment, each with the plugin's words."""

    on: OnTarget | None = None
    """The target that it compiles for: the first, where the CPU shows nothing."""
    runs: bool = True
    """False if the target alone can lower the program."""
    lines: dict[Moment, dict[str, str]] = field(default_factory=dict)

    def at(self, moment: Moment) -> dict[str, str]:
        """The lines of a moment."""
        return self.lines.setdefault(moment, {})

    @property
    def compiles(self) -> bool:
        return any("executable" in line for line in self.at("after"))

    def __bool__(self) -> bool:
        return bool(self.at("first") or self.at("after") or self.at("search"))


def looks_of(outcome: Outcome, call: PastedCall) -> Looks:
    """The looks of a program; none where the nesting raised an exception of the user's code, and for findings that the plugin alone can see."""
    every = [(each, finding) for each in outcome.violations for finding in each.findings if any(finding.look(call))]
    there = [finding.on for _, finding in every if isinstance(finding, FindingOnTarget)]
    on = there[0] if len(there) == len(every) > 0 else None
    found, kinds = Looks(on, runs=on is None or outcome.peak is not None), set[type]()
    for violation, finding in every:
        looks = [*finding.look(call)]
        # The first finding of each kind is enough, but for tracers: a search ends where it finds one of their types.
        known = type(finding) in kinds and "search" not in dict(looks)
        if known or (finding.on if isinstance(finding, FindingOnTarget) else None) != found.on:
            continue
        kinds.add(type(finding))
        rows = violation.details if violation.invariant == "donation" else ()  # a row a leaf
        words = ", ".join(ascii(text) for text in (violation.summary, *(text for _, text in rows)))
        for moment, text in looks:
            line = f"broken({violation.invariant!r}, {text}, {words})" if moment in ("first", "after") else text
            found.at(moment)[line] = violation.summary
    if found.compiles:
        made = "(lowered := STAGED[-1][0].lower()).compile(), lowered"
        if found.on is not None:
            target, effort = parse_target(found.on.target), effort_options(found.on.effort)
            made = f"on_target({topology(target)}, {effort}, {options_for(target.chip)}, *STAGED[-1])"
        found.lines["after"] = {f"executable, lowered = {made}": "", **found.at("after")}
    return found


# --- the call


def wrapped_text(call: PastedCall, copied: Slice, look: Looks, others: str = "") -> str:
    """Write the function that the test gets in the place of ``nnx_wrap``: it takes a call apart, runs it under the layers, and looks. What that needs is copied."""
    nested, output, abstract = "program", "output", call.subject.abstract
    for index in reversed(range(len(call.nesting.layers))):
        nested = layer_text(call, index, nested, look, copied)
    for each in call.nesting.layers:  # the call's own output in that of the nesting
        if each.transform == CALL_FIRST or each.row.pair == "gradients":
            output += "[1]" if each.transform == CALL_FIRST else "[0]"
        elif each.row.axis:
            output = f"jax.eval_shape(first, {output})" if abstract else f"first({output})"
    run = f"staged(nnx.jit, {nested}, types_of)" if abstract and call.root.style is None else nested
    run += "(state, *inputs)"
    if searched := look.at("search"):
        run = f"run_for_tracers(lambda: {run}, {set(searched)!r}, {next(iter(searched.values()))!a})"
    taken, short = apart(call)
    lines = [
        *taken,
        *look.at("first"),
        *ready(call, look),
        *look.at("before"),
        f"output = {run}",
        *look.at("after"),
    ]
    if call.plain:
        lines.append(f"return {output}[0]" if short else f"return jax.tree.unflatten(made[0], {output})")
    else:
        # The call alone makes the rest of its output. The nesting ran on a copy of the state, so that it still is as it was.
        lines.append(f"return {output}" if abstract else f"return {call.function}(*args, **kwargs)")
    if others:
        # Those before held, so that they do under the layers what they do without.
        made = "abstractly(subject, *args, **kwargs)" if abstract else "subject(*args, **kwargs)"
        lines.insert(0, f"if next(CALLS) {others}: return {made}")
    body = textwrap.indent("\n".join(lines), " " * 8)
    count = "CALLS = iter(range(10**6))\n\n" if others else ""  # an import less
    return f"{count}def nnx_wrap(subject):\n    def wrapped(*args, **kwargs):\n{body}\n    return wrapped"


def ready(call: PastedCall, look: Looks) -> Iterator[str]:
    """The lines that give the run arrays of its own, with the axes of the layers, on the mesh of a layer."""
    around, abstract = call.nesting.layers, call.subject.abstract
    if call.subject.in_refs:
        yield "state = with_refs(state, ref=True)"
    elif not (abstract or look.at("in place")) and not call.profile.state.references:
        if not call.plain:
            yield "state = nnx.clone(state)"
        if not call.plain or call.root.style is not None:
            yield "nnx.update(state, jax.tree.map(jnp.copy, nnx.state(state)))"
    if not abstract and (not call.plain or donated_inputs(call.subject, call.nesting, call.settings.donate)):
        yield "inputs = [*map(jnp.array, inputs)]"
    elif abstract and arrays.active_mesh() is not None:
        yield "nnx.update(state, abstract_state(nnx.state(state)))"
    stacked = "jax.eval_shape(stack, inputs)" if abstract else "[jnp.stack([leaf, leaf]) for leaf in inputs]"
    yield from [f"inputs = {stacked}" for layer in around if layer.row.axis]
    if call.root.takes_state and any(layer.row.on_mesh for layer in around):
        yield from ("nnx.update(state, on_mesh(nnx.state(state)))", "inputs = on_mesh(inputs)")


# --- layers


def layer_text(call: PastedCall, index: int, inner: str, look: Looks, copied: Slice) -> str:
    """A layer around an inner program: its function, which is copied, and a plan with the fields that it reads. Raises `NoSource`."""
    layer = call.nesting.layers[index]
    if (own := REGISTERED.get((layer.transform, layer.style))) is not None:
        made = f"{copied.take_function(inspect.unwrap(own.function))}({inner})"
        return f"lambda state, *inputs: {made}(state, *inputs)"  # made anew for each trace
    name = layer_name(layer, in_refs=bool(call.profile.state.references))
    copied.take(layers, [name])
    words, plan = read_of_plan(name), plan_of(call, index, look)
    given = ", ".join(f"{word}={getattr(plan, word)}" for word in words)
    return f"{name}({inner}, {f'types.SimpleNamespace({given})' if words else None})"


@functools.cache
def read_of_plan(name: str) -> list[str]:
    """The fields that the function of a layer reads of its plan, itself or in a function that it calls."""
    return sorted(set(re.findall(r"\bplan\.(\w+)", source_of(layers, name))))


def plan_of(call: PastedCall, index: int, look: Looks) -> SimpleNamespace:
    """The fields of a layer's `Plan`, each as text."""
    profile, inner = call.profile, call.nesting.layers[index + 1 :]
    return SimpleNamespace(
        changed=among(profile.state.changed - profile.state.references),
        written=among(profile.state.written),
        subject="program",
        element=f"lambda leaf: leaf[{(0,) * sum(bool(layer.row.axis) for layer in inner)!r}]",
        empty=f"lambda: {zeros(output_shapes(inner, profile, call.subject.inputs))}",
        parameters=among(profile.training.parameters),
        jit=f"lambda wrapper, f: {'wrapper(f)' if index else jit_text(call, look)}",
        unchanged="lambda state: contextlib.nullcontext()",
        graph_updates=call.flags[1],
        length=layers.LENGTH,
    )


def jit_text(call: PastedCall, look: Looks) -> str:
    """The jit of the outermost layer: it donates, and is lowered before it runs where a look asks for the program."""
    abstract, donated = call.subject.abstract, call.root.donated_arguments
    options = ", keep_unused=True" + (f", donate_argnums={donated}" if donated else "")
    if abstract or look.compiles:
        return f"staged(wrapper, f{', types_of' if abstract or not look.runs else ''}{options})"
    return f"wrapper(f{options})"


def among(paths: frozenset[Any]) -> str:
    """A filter for these paths."""
    listed = ", ".join(sorted(map(repr, paths)))
    return f"lambda path, _: tuple(path) in {{{listed}}}" if paths else "lambda path, _: False"


def zeros(shapes: Any) -> str:
    """Arrays of zeros as text; of keys some."""
    if isinstance(shapes, tuple):
        return f"({', '.join(map(zeros, shapes))}{',' * (len(shapes) == 1)})"
    if graph.is_key(shapes):
        kinds = ("threefry2x32", "rbg", "unsafe_rbg")
        kind = next(kind for kind in kinds if jax.random.key(0, impl=kind).dtype == shapes.dtype)
        return f"jax.random.split(jax.random.key(0, impl={kind!r}), {tuple(shapes.shape)})"
    device = ""
    if (placed := arrays.in_type(shapes)) is not None:
        spec = f"jax.sharding.PartitionSpec({', '.join(map(repr, placed.spec))})"
        device = f", device=jax.sharding.NamedSharding(jax.sharding.get_abstract_mesh(), {spec})"
    return f"jnp.zeros({tuple(shapes.shape)}, {str(shapes.dtype)!r}{device})"


# --- the arguments of a call

UNWRAPPED = {
    "partial": "function, args, kwargs = {0}.func, (*{0}.args, *args), {{**{0}.keywords, **kwargs}}",
    "cached partial": "function, args = (lambda f, held: (f, (*held, *args)))(*cached_partial({0}))",
    "method": "function, args = {0}.__func__, ({0}.__self__, *args)",
    "object": "function, args = type({0}).__call__, ({0}, *args)",
}
"""The line that puts what a callable holds among the arguments of the function behind it."""


@dataclass(frozen=True)
class PastedCall:
    """One call under a nesting, and what is known of it."""

    subject: Subject
    profile: Profile
    nesting: Nesting
    settings: Settings
    flags: tuple[bool, bool]
    """The flags of flax's mode: its graph, and graph updates."""

    @property
    def root(self) -> Root:
        """The outermost jit."""
        return Root(self.subject, self.profile, self.nesting, self.settings.donate)

    @property
    def plain(self) -> bool:
        """True if the output is made of arrays alone, as far as is known."""
        return self.profile is UNKNOWN or self.profile.output.plain

    @property
    def function(self) -> str:
        """The name of the function that the program calls."""
        return "function" if self.subject.unwrapped else "subject"

    @property
    def references(self) -> frozenset[str]:
        """The leaves that are references."""
        return frozenset(map(self.subject.path, self.profile.state.references))

    def keys(self, path: str) -> str:
        """The keys that lead to a leaf, as arguments; empty where it is not in the state."""
        for name, label in sorted(self.subject.labels.items(), key=lambda item: len(item[1]), reverse=True):
            rest = path.removeprefix(label)
            if path.startswith(label) and rest[:1] in ("", ".", "["):
                steps = [repr(word) if word else key for word, key in re.findall(r"\.(\w+)|\[('[^']*'|[^\]]*)\]", rest)]
                return ", ".join([*([repr(name)] if isinstance(self.subject.state, Nodes) else []), *steps])
        return ""

    def value(self, path: str, state: str = "state") -> str:
        """The expression for a leaf or an input by its path; empty for what is neither."""
        if path in self.subject.input_names:
            return f"inputs[{self.subject.input_names.index(path)}]"
        return f"value_at({state}, {keys})" if (keys := self.keys(path)) else ""


Leaf = tuple[str, Any, list[Any]]
"""A leaf of the arguments: its place, itself, and its sources."""


def apart(call: PastedCall) -> tuple[list[str], bool]:  # noqa: C901 - one case a kind of argument
    """Write the lines that take a call apart: its state, its inputs, and a program of these, which calls the test's own subject on its own arguments.

    Says also whether that program is a line: each node and array is an argument of its own, and the output is one array.
    """
    subject, output = call.subject, call.profile.output
    single, rest = not isinstance(subject.state, Nodes), iter(subject.sources)
    nodes, inputs = dict[str, str](), dict[int, str]()
    fields, leaves, behind = list[str](), list[Leaf](), list[list[Leaf]]()

    def file(tree: Any, place: str, leaves: list[Leaf]) -> None:
        """File the leaves of an argument. The fields of an opened object come behind all arguments."""
        for path, leaf in tree_leaves_with_path(tree, is_leaf=is_part):
            here = place + keystr(path)
            parts = leaf.values if isinstance(leaf, Bare) else () if isinstance(leaf, Opened) else (leaf,)
            leaves.append((here, leaf, [next(rest) for _ in parts]))
            for (kind, name), value in zip(leaf.fields, leaf.values, strict=True) if isinstance(leaf, Opened) else ():
                fields.append(f"({here}, {name!r}, {kind == 'item'})")
                behind.append([])
                file(value, f"{here}[{name!r}]" if kind == "item" else f"{here}.{name}", behind[-1])

    def put(place: str, leaf: Any, sources: list[Any]) -> str:
        """File the place of a leaf; the expression for it in the program, which has nodes and arrays of its own."""
        match sources:
            case [Source(node=str(name))]:
                nodes.setdefault(name, place)
                return "state" if single else f"state.{name}"
            case [Source(input=int(number)), *_] if isinstance(leaf, Bare):
                inputs[number] = f"*jax.tree.leaves({place})"
                return f"jax.tree.unflatten(jax.tree.structure({place}), inputs[{number}:{number + len(sources)}])"
            case [Source(input=int(number))]:
                inputs[number] = place
                return f"inputs[{number}]"
        return place

    args, kwargs = subject.arguments
    words = {f"args[{number}]": "" for number in range(len(args))}
    words |= {f"kwargs[{name!r}]": f"{name}=" for name in sorted(kwargs)}  # in the order in which jax takes them apart
    for place, value in zip(words, [*args, *(kwargs[name] for name in sorted(kwargs))], strict=True):
        file(value, place, leaves)
    alone = not fields and all(place in words for place, *_ in leaves)
    every = [*leaves, *(leaf for own in behind for leaf in own)]
    texts = [put(leaf[0] if alone else f"leaves[{number}]", *leaf[1:]) for number, leaf in enumerate(every)]
    known = dict(zip([place for place, *_ in every], texts, strict=True))
    given = ", ".join(word + known.get(place, place) for place, word in words.items()) if alone else "*args, **kwargs"
    held = ", [read_field(*field) for field in fields]" if fields else ""
    state = (
        nodes[subject.names[0]] if single else f"Nodes({{{', '.join(f'{name!r}: {nodes[name]}' for name in nodes)}}})"
    )
    listed = f"[{', '.join(place for _, place in sorted(inputs.items())) or '0.0'}]"
    lines = [
        *(UNWRAPPED[kind].format("function" if number else "subject") for number, kind in enumerate(subject.unwrapped)),
        f"fields = [{', '.join(fields)}]" if fields else "",
        "" if alone else f"leaves, tree = jax.tree.flatten((args, kwargs{held}), is_leaf=is_node)",
        f"state, inputs = {state}, {listed if subject.abstract else f'[*map(jnp.asarray, {listed})]'}",
    ]
    if alone and output.plain and output.names == ("",):
        return [*filter(None, lines), f"program = lambda state, *inputs: ({call.function}({given}),)"], True
    body = body_of(call, given)
    if fields:
        body = ["with filled(fields, *values):", *(f"    {line}" for line in body)]
    if not alone:
        body.insert(0, f"args, kwargs, *values = jax.tree.unflatten(tree, [{', '.join(texts)}])")
    lines.append("\ndef program(state, *inputs):\n" + textwrap.indent("\n".join(body), "    ") + "\n")
    return [*filter(None, ["made = []" if call.plain else "", *lines])], False


def body_of(call: PastedCall, given: str) -> list[str]:
    """Write the call itself, and its arrays: of an output that holds more than these by their names in it."""
    output = call.profile.output
    made, parts = "made[:] = [jax.tree.structure(output)]", dict.fromkeys(f"output{name}" for name in output.names)
    arrays_made = [made, "return arrays_of(output)"] if call.plain else [f"return arrays_of({', '.join(parts)})"]
    return [f"output = {call.function}({given})", *arrays_made]


def is_part(value: Any) -> bool:
    """True if a program takes a value as a whole."""
    return isinstance(value, Opened | Bare) or graph.is_graph_node(value)


# --- the files: a draft of each call before it runs, and a file for each nesting that broke

LONGEST = 60
"""Characters of a name in a file name, before its hash: file systems take 255 of a name, and Windows 260 of a path."""
KEPT = ("violated", "failed")


class ProgramWarning(UserWarning):
    """A program to paste could not be written."""


def file_name(text: str) -> str:
    """A name that every file system takes, and that no other text has: ``test_model.py-test_x-1f0c22ab``."""
    plain = re.sub(r"[^A-Za-z0-9_.]+", "-", text).strip("-.")
    return f"{plain[-LONGEST:].lstrip('-.')}-{hashlib.blake2b(os.fsencode(ascii(text)), digest_size=4).hexdigest()}"


@dataclass
class Programs:
    """The programs of one run."""

    test: Report
    """A report of the test without outcomes: its name, and how to run it."""
    usage_of: Callable[[Any], Usage]
    """Returns the way in which the body of an example, or the caller of a check, makes its calls."""
    folder: Callable[[], Path] | None = None
    """Returns the folder of the files; without one they are kept as text alone."""
    near: Path | None = None
    """The folder that their paths are shown relative to."""
    place: tuple[str, int] = ("<check>", 1)
    """The user's file and line, where warnings are shown."""
    texts: dict[Nesting, str] = field(default_factory=dict)
    """The programs of the nestings that broke."""
    _body: Any = None
    _call: PastedCall | None = None
    """The present call of the body."""
    _earlier: int = 0
    """The number of calls before it, and before those in a row that are written in the same way."""
    _alike: int = 0
    """The number of these."""
    _drafted: bool = False
    _problem: str = ""

    def listen(self, event: object) -> None:
        """Write the program of each call before it runs: the call may take the process with it."""
        if isinstance(event, BodyStarted):
            self._body, self._call, self._earlier, self._alike, self._drafted = event.body, None, 0, 0, False
        elif isinstance(event, CallStarted):
            with self._harmless():
                self._draft(event)
        elif isinstance(event, BodyFinished):
            with self._harmless():
                self._finish(event.outcomes)

    def with_program(self, outcome: Outcome) -> Outcome:
        """The outcome of a nesting with its program, which now looks for what broke."""
        call, broken = self._call, [violation.invariant for violation in outcome.violations]
        if outcome.verdict not in KEPT or outcome.program or not (call or self._problem):
            return outcome
        with self._harmless():
            if call is not None:
                if broken and not looks_of(outcome, call):
                    none = f"none: no program can look for {' and '.join(broken)} without the plugin"
                    return replace(outcome, program=none)
                path = self._path(str(outcome.nesting))
                self.texts[outcome.nesting] = self._write(call, path, outcome)
                return replace(outcome, program=self._shown(path))
        return replace(outcome, program=f"not written: {self._problem}")

    def _draft(self, event: CallStarted) -> None:
        """A call is about to run under a nesting; without a profile, it is about to be traced for it."""
        call = PastedCall(
            event.subject, event.profile or UNKNOWN, event.nesting, event.settings, flax_modes.mode_flags()
        )
        last, self._call = self._call, call
        if last is not None and last.subject is not call.subject:
            if wrapped_text(call, Slice(), Looks()) == wrapped_text(last, Slice(), Looks()):
                self._alike += 1
                return
            self._earlier, self._alike = self._earlier + self._alike + 1, 0
        if self.folder is not None:
            self._write(call, self._path("running"))

    def _finish(self, outcomes: Mapping[Nesting, Outcome]) -> None:
        """The body has ended: its draft goes, and a program of its nesting that has nothing to show."""
        names = ["running"] if self._drafted else []
        if self._call and ((nesting := self._call.nesting) not in outcomes or outcomes[nesting].verdict not in KEPT):
            self.texts.pop(nesting, None)
            names += [str(nesting)] * self._drafted
        self._body, self._call, self._drafted = None, None, False
        for path in filter(None, map(self._path, names)):
            path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # where another program is in it
                path.parent.rmdir()

    def _path(self, name: str) -> Path | None:
        return self.folder and self.folder() / file_name(self.test.test_id) / f"{file_name(name)}.py"

    def _shown(self, path: Path | None) -> str:
        """The path as the user types it, from the folder that paths are shown relative to."""
        if path is None or self.near is None:
            return str(path or "")
        return near_to((str(self.near),), str(path))

    def _write(self, call: PastedCall, path: Path | None, outcome: Outcome | None = None) -> str:
        """Write the program of a call, into a file if there are files."""
        self._drafted = True
        others = f"< {self._earlier}" * bool(self._earlier)
        if outcome is not None:
            others = f"not in range({self._earlier}, {self._earlier + self._alike + 1})"
        text = compose(call, others, self.usage_of(self._body), self.test, self._shown(path), outcome)
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(text.encode("utf-8", "backslashreplace"))
        return text

    @contextlib.contextmanager
    def _harmless(self) -> Iterator[None]:
        """Nothing that goes wrong here may cost the run: it is said once."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - the user's code and file system may do anything
            if not self._problem:
                self._problem = one_line(f"{type(error).__name__}: {error}")
                text = f"the programs to paste of {one_line(self.test.test_id)} cannot be written ({self._problem})"
                with contextlib.suppress(ProgramWarning):
                    warnings.warn_explicit(ProgramWarning(text), None, *self.place)


# --- the programs of a check outside of pytest


def of_check(frame: FrameType | None, subject: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Programs:
    """The programs of a `check`, as text: nobody said where files could go."""
    name = getattr(subject, "__qualname__", None) or type(subject).__qualname__
    test = Report((), Settings(), test_id=f"check({name})")
    place = (frame.f_code.co_filename, frame.f_lineno) if frame is not None else Programs.place
    return Programs(test, lambda _body: usage.of_check(frame, subject, args, kwargs), place=place)
