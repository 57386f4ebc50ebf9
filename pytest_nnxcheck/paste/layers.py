"""One call under a nesting as text: the layers around it, and the function that takes it apart, runs it and looks."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping

from pytest_nnxcheck.compat import sharding
from pytest_nnxcheck.core.catalogue import CALL_FIRST, REGISTERED
from pytest_nnxcheck.core.nesting import Layer, Nesting
from pytest_nnxcheck.core.outcome import Outcome
from pytest_nnxcheck.core.settings import Settings
from pytest_nnxcheck.paste.call import Call
from pytest_nnxcheck.paste.findings import Looks, looks_of
from pytest_nnxcheck.paste.slicer import Slice
from pytest_nnxcheck.transforms.compose import home


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
    elif call.abstract and sharding.active_mesh() is not None:
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
