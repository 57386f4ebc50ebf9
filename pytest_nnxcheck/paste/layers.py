"""One call under a nesting as text: the layers around it, and the function that takes it apart, runs it and looks."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import jax

from pytest_nnxcheck.compat import arrays, graph
from pytest_nnxcheck.core.catalogue import CALL_FIRST, REGISTERED
from pytest_nnxcheck.paste.call import Call
from pytest_nnxcheck.paste.findings import Looks
from pytest_nnxcheck.paste.slicer import Slice
from pytest_nnxcheck.subject.profile import UNKNOWN
from pytest_nnxcheck.transforms import layers
from pytest_nnxcheck.transforms.compose import donated_inputs, layer_name, output_shapes
from pytest_nnxcheck.transforms.layers import LENGTH


def call_text(call: Call, copied: Slice, looks: Looks, number: str = "") -> str:
    """Two functions: one puts the layers around a call, one takes it apart, runs it and looks. What those need is copied."""
    layers = "call"
    for index in reversed(range(len(call.nesting.layers))):
        layers = layer_text(call, index, layers, looks, copied)
    run, output = f"nesting{number}(program)", un_nested(call)
    if call.subject.abstract and call.root.style is None:
        run = f"staged(nnx.jit, {run}, types_of)"
    run += "(state, *inputs)"
    if looks.search:
        run = f"run_for_tracers(lambda: {run}, {set(looks.search)!r}, {next(iter(looks.search.values()))!a})"
    lines = [
        apart(call),
        *looks.first,
        *ready(call, looks),
        *looks.before,
        f"output = {run}",
        *looks.after,
        f"return {output}[0]" if call.whole else f"return rebuild({output})",
    ]
    given = "state, *inputs" if call.whole else "*args, **kwargs"
    given = given if call.whole.startswith("state") else f"subject, {given}"
    body = "\n".join(f"    {line}" for line in lines)
    return f"def nesting{number}(call):\n    return {layers}\n\ndef wrapped{number}({given}):\n{body}"


def apart(call: Call) -> str:
    """The line that takes a call apart."""
    subject, profile = call.subject, call.profile
    if call.whole:
        return f"program = lambda state, *inputs: ({call.whole},)"
    given = "unwrapped(subject, args, kwargs)" if subject.partial else "(subject, args, kwargs)"
    pack = "arrays_of" if profile.output.plain or (profile is UNKNOWN and call.nesting.layers) else "parts_of"
    if call.opened:
        given, pack = f"opened({given})", "emptied"
    return f"program, state, inputs, rebuild = take_apart({given}, {subject.names!r}, {pack})"


def ready(call: Call, looks: Looks) -> Iterator[str]:
    """The lines that give the run arrays of its own, with the axes of the layers, on the mesh of a layer."""
    layers, abstract = call.nesting.layers, call.subject.abstract
    if call.subject.in_refs:
        yield "state = with_refs(state, ref=True)"
    elif not abstract and looks.own_arrays and call.root.style is not None and not call.profile.state.references:
        yield "nnx.update(state, jax.tree.map(jnp.copy, nnx.state(state)))"
    if not abstract and (not call.whole or donated_inputs(call.subject, call.nesting, call.settings.donate)):
        yield "inputs = [*map(jnp.array, inputs)]"
    elif abstract and arrays.active_mesh() is not None:
        yield "nnx.update(state, abstract_state(nnx.state(state)))"
    stacked = "jax.eval_shape(stack, inputs)" if abstract else "[jnp.stack([leaf, leaf]) for leaf in inputs]"
    yield from [f"inputs = {stacked}" for layer in layers if layer.row.axis]
    if call.root.takes_state and any(layer.row.on_mesh for layer in layers):
        yield from ("nnx.update(state, on_mesh(nnx.state(state)))", "inputs = on_mesh(inputs)")


def un_nested(call: Call) -> str:
    """The expression for the call's own output in that of the nesting."""
    text = "output"
    for layer in call.nesting.layers:
        if layer.transform == CALL_FIRST or layer.row.pair == "gradients":
            text += "[1]" if layer.transform == CALL_FIRST else "[0]"
        elif layer.row.axis:
            text = f"jax.eval_shape(first, {text})" if call.subject.abstract else f"first({text})"
    return text


# --- layers


def layer_text(call: Call, index: int, inner: str, looks: Looks, copied: Slice) -> str:
    """A layer around an inner program: its function, which is copied, and a plan with the fields that it reads. Raises `NoSource`."""
    layer = call.nesting.layers[index]
    if (own := REGISTERED.get((layer.transform, layer.style))) is not None:
        made = f"{copied.take_function(inspect.unwrap(own.function))}({inner})"
        return f"lambda state, *inputs: {made}(state, *inputs)"  # made anew for each trace
    name = layer_name(layer, in_refs=bool(call.profile.state.references))
    copied.take(layers, [name])
    words, plan = read_of_plan(name), plan_of(call, index, looks)
    given = ", ".join(f"{word}={getattr(plan, word)}" for word in words)
    return f"{name}({inner}, {f'types.SimpleNamespace({given})' if words else None})"


@functools.cache
def read_of_plan(name: str) -> list[str]:
    """The fields that the function of a layer reads of its plan, itself or in a function that it calls."""
    alone = Slice()
    alone.take(layers, [name])
    return sorted(set(re.findall(r"\bplan\.(\w+)", "\n".join(alone.chunks(ours=True)))))


def plan_of(call: Call, index: int, looks: Looks) -> SimpleNamespace:
    """The fields of a layer's `Plan`, each as text."""
    profile, inner = call.profile, call.nesting.layers[index + 1 :]
    return SimpleNamespace(
        changed=among(profile.state.changed - profile.state.references),
        written=among(profile.state.written),
        subject="call",
        element=f"lambda leaf: leaf[{(0,) * sum(bool(layer.row.axis) for layer in inner)!r}]",
        empty=f"lambda: {zeros(output_shapes(inner, profile, call.subject.inputs))}",
        parameters=among(profile.training.parameters),
        jit=f"lambda wrapper, f: {'wrapper(f)' if index else jit_text(call, looks)}",
        unchanged="lambda state: contextlib.nullcontext()",
        graph_updates=call.flags[1],
        length=LENGTH,
    )


def jit_text(call: Call, looks: Looks) -> str:
    """The jit of the outermost layer: it donates, and is lowered before it runs where a look asks for the program."""
    abstract, donated = call.subject.abstract, call.root.donated_arguments
    options = ", keep_unused=True" + (f", donate_argnums={donated}" if donated else "")
    if abstract or looks.compiles:
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
