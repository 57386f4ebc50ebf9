"""The text of a program: the user's test, the layers that ran, what looks for the finding, and the line that calls.

In the place of ``nnx_wrap`` the test gets a function that takes its arguments apart, as `bind` took them apart for the check: where each node and each
array is among them is known, and written out. It runs the layers around a call of the test's own subject, and looks. `slicer` copies all other lines
from source that exists: that of the user, of the layers, and of `looks`. The plugin writes the program before the nesting runs, so that a killed process
leaves it behind.
"""

from __future__ import annotations

import functools
import inspect
import platform
import re
import shlex
import textwrap
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import flax
import jax
import jaxlib

from pytest_nnxcheck import wheels
from pytest_nnxcheck.compat import arrays, flax_modes, graph
from pytest_nnxcheck.core.catalogue import CALL_FIRST, REGISTERED
from pytest_nnxcheck.core.chips import parse_target
from pytest_nnxcheck.core.nesting import Nesting
from pytest_nnxcheck.core.outcome import Outcome
from pytest_nnxcheck.core.peak import OnTarget
from pytest_nnxcheck.core.text import lay_out
from pytest_nnxcheck.devices import FLAG
from pytest_nnxcheck.paste import findings, looks
from pytest_nnxcheck.paste.call import Call
from pytest_nnxcheck.paste.slicer import Slice, bound_in, globals_in, read, source_of
from pytest_nnxcheck.paste.usage import STAND_IN, Usage, one_line
from pytest_nnxcheck.reporting.report import Report, found_rows, headline, replay
from pytest_nnxcheck.subject import abstract_arrays, subject
from pytest_nnxcheck.transforms import layers
from pytest_nnxcheck.transforms.compose import donated_inputs, layer_name, output_shapes

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


def compose(call: Call, earlier: int, usage: Usage, test: Report, path: str, outcome: Outcome | None = None) -> str:
    """The whole program of a call that a test makes after ``earlier`` ones, which held; it looks for the outcome, where that is known. Raises `NoSource`."""
    look = findings.looks_of(outcome, call) if outcome is not None else findings.Looks()
    copied = usage.slice
    texts = wrapped_text(call, copied, look, earlier)
    names = globals_in(texts)
    for module in SOURCES:
        copied.take(module, sorted(names))
        names -= read(module).bound.keys()  # a later one may import another function of that name
    user, ours = copied.chunks(ours=False), [*copied.chunks(ours=True), texts]
    taken = {name for text in (*copied.imports, *user, *usage.setup) for name in bound_in(text)} - {"nnx_wrap"}
    own = "\n\n".join(ours)
    imports = {"import jax", "import jax.numpy as jnp", "from flax import nnx", *copied.imports}
    imports |= {f"import {name}" for name in ("contextlib", "itertools", "types") if name in globals_in(own)}
    if any(taken & bound_in(text) for text in ours):  # names of ours that the user's code has too
        indented = textwrap.indent(own, "    ")
        own = f"def with_own_names():\n{indented}\n\n    return nnx_wrap\n\nnnx_wrap = with_own_names()"
    missing = "{} = None  # needs pytest: write it anew where the test uses it"
    head = header(call.nesting, test, path, outcome, look.on)
    parts = [
        "\n".join(f"# {one_line(line)}".rstrip() for line in head.splitlines()),
        "from __future__ import annotations" if copied.future else "",
        "\n".join(environment([*copied.folders], look.on)),
        "\n".join(sorted(imports, key=lambda line: (line.startswith("from"), line))),
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


def ending(call: Call, usage: Usage) -> Iterator[str]:
    """The arguments, then the call, in the mode of flax that the nesting ran in."""
    yield from usage.setup
    graph_mode, updates = call.flags
    if not (graph_mode and updates):
        yield f"with nnx.set_graph_mode({graph_mode}), nnx.set_graph_updates({updates}):\n    {usage.call}"
    else:
        yield usage.call
    yield f'print("passed:", {str(call.nesting)!a})'


# --- the call


def wrapped_text(call: Call, copied: Slice, look: findings.Looks, earlier: int = 0) -> str:
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
    if look.search:
        run = f"run_for_tracers(lambda: {run}, {set(look.search)!r}, {next(iter(look.search.values()))!a})"
    lines = [
        *call.apart(),
        *look.first,
        *ready(call, look),
        *look.before,
        f"output = {run}",
        *look.after,
    ]
    if call.short:
        lines.append(f"return {output}[0]")
    elif call.plain:
        lines.append(f"return jax.tree.unflatten(made[0], {output})")
    else:
        # The call alone makes the rest of its output. The nesting ran on a copy of the state, so that it still is as it was.
        lines.append(f"return {output}" if abstract else f"return {call.function}(*args, **kwargs)")
    if earlier:
        # They held, so that they do under the layers what they do without.
        made = "abstractly(subject, *args, **kwargs)" if abstract else "subject(*args, **kwargs)"
        lines[:0] = [f"if next(CALLS) < {earlier}:\n    return {made}"]
    body = textwrap.indent("\n".join(lines), " " * 8)
    count = "CALLS = itertools.count()\n\n" if earlier else ""
    return f"{count}def nnx_wrap(subject):\n    def wrapped(*args, **kwargs):\n{body}\n    return wrapped"


def ready(call: Call, look: findings.Looks) -> Iterator[str]:
    """The lines that give the run arrays of its own, with the axes of the layers, on the mesh of a layer."""
    around, abstract = call.nesting.layers, call.subject.abstract
    if call.subject.in_refs:
        yield "state = with_refs(state, ref=True)"
    elif not abstract and look.own_arrays and not call.profile.state.references:
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


def layer_text(call: Call, index: int, inner: str, look: findings.Looks, copied: Slice) -> str:
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


def plan_of(call: Call, index: int, look: findings.Looks) -> SimpleNamespace:
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


def jit_text(call: Call, look: findings.Looks) -> str:
    """The jit of the outermost layer: it donates, and is lowered before it runs where a look asks for the program."""
    abstract, donated = call.subject.abstract, call.root.donated_arguments
    options = ", keep_unused=True" + (f", donate_argnums={donated}" if donated else "")
    if abstract or look.compiles:
        return f"staged(wrapper, f{', types_of' if abstract else ''}{options})"
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
