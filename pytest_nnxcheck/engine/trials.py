"""Try one layer alone on a call: whether it can take the call at all, and which leaves a ``vmap`` must map; and the call alone, on shared arrays, and with numbers as constants.

A layer cannot take a call if tracing that layer alone raises out of the code of jax or flax, where the call alone traces, and no tracer leaked. It is asked
after a nesting that has the layer raised, so that a call which every layer takes is traced once and no more.
"""

from __future__ import annotations

import functools
import re
from dataclasses import replace
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from pytest_nnxcheck.compat import flax_modes, graph, refusals
from pytest_nnxcheck.compat.arrays import value_of
from pytest_nnxcheck.compat.compile_cache import to_the_end
from pytest_nnxcheck.compat.frames import raised_by_library
from pytest_nnxcheck.core.catalogue import CATALOGUE
from pytest_nnxcheck.core.facts import Path
from pytest_nnxcheck.core.nesting import Layer, Misfit, MisfitKind, Nesting, impossible
from pytest_nnxcheck.core.text import first_line
from pytest_nnxcheck.engine.example import Call, Example
from pytest_nnxcheck.engine.observe import TRACED, observe
from pytest_nnxcheck.subject.subject import Subject, copy_leaf, numbered
from pytest_nnxcheck.transforms.compose import stack
from pytest_nnxcheck.transforms.layers import inexact
from pytest_nnxcheck.xla.pointers import read_leaf

__tracebackhide__ = True  # pytest shows the frames of the user, not these


def misfit_of(call: Call) -> Misfit | None:
    """The reason why a layer of the nesting cannot take the call, as far as it is known before the nesting runs; `None` if none is."""
    if misfit := impossible(call.nesting):
        return misfit
    for layer in call.nesting.layers:
        if misfit := without_a_trial(layer, call) or call.known.found.get(("refused", layer)):
            return misfit
    return None


def without_a_trial(layer: Layer, call: Call) -> Misfit | None:
    """The reason why a layer takes no such call, or shows nothing of it: a reference in a carry, no gradient, a sharded leaf put whole on each device."""
    if layer.style == "argument" and layer.row.loop and (references := call.profile.state.references):
        first = min(references, key=str)
        return Misfit("reference carried", call.subject.path(first), layer=layer)
    if layer.row.pair == "gradients" and layer.captures and not inexact(call.subject.inputs):
        return Misfit("no float input")
    if layer.row.pair == "gradients" and not (layer.captures or call.profile.training.parameters):
        return Misfit("no parameter")
    return sharded_leaf(layer, call) if layer.row.on_mesh else None


def sharded_leaf(layer: Layer, call: Call) -> Misfit | None:
    """The first leaf of a call that is cut over devices; `None` if each device has all of them whole."""
    leaves = [(call.subject.path(path), value) for path, value in graph.raw_leaves(call.subject.state)]
    for path, leaf in [*leaves, *zip(call.subject.input_names, call.subject.inputs, strict=False)]:
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, jax.sharding.Sharding) and not sharding.is_fully_replicated:
            return Misfit("sharded leaf", path, layer=layer)
    return None


def refusing(call: Call, error: Exception) -> Misfit | None:
    """The reason why a layer of a nesting that raised cannot take the call; `None` if all of them can, and for what is the user's own code.

    Each layer is tried once for all nestings, alone and traced.
    """
    if not raised_by_library(error):
        return None
    # A jit takes whatever the un-nested call, which is traced as in one, does; an own transform that raises is a bug of its author.
    tried = [
        layer
        for layer in call.nesting.layers
        if layer.transform in CATALOGUE and not (layer.row.compiles or layer.row.runs_nothing or layer.row.on_mesh)
    ]
    misfits = (call.tried("refused", functools.partial(refused, call, layer), layer) for layer in tried)
    return next(filter(None, misfits), None)


def refused(call: Call, layer: Layer) -> Misfit | None:
    """The reason why jax or flax refuses a layer of the call, traced alone: by what the call does where that is known, else in their words."""
    # What comes out has no use: it is no stand-in that the body was handed.
    seen = observe(replace(call, example=Example(call.memo)), Nesting((layer,), call.nesting.mode), TRACED)
    error = seen.error
    leaks = seen.leaks or seen.dropped or call.profile.state.poisoned
    if error is None or leaks or not raised_by_library(error):
        return None
    # These too are raised out of jax or flax, at a fault of the user's code: a tracer that it kept, a value that it asks for, a captured module.
    captures = layer.captures and refusals.is_refusal(error)
    if captures or refusals.is_tracer_error(error) or refusals.asks_for_value(error) or is_users(error.__cause__):
        return None
    if misfit := named(layer, call):
        return replace(misfit, layer=layer)
    if layer.row.pair == "gradients":
        return Misfit("no derivative", other=first_line(error))
    by = f"flax {flax.__version__}" if refusals.is_of_flax(error) else f"jax {jax.__version__}"
    # Jax names the line of the function that it was handed, which is the layer's.
    return Misfit("refused", by, re.sub(r"\S*/pytest_nnxcheck/\S*", "the layer", first_line(error)))


def is_users(cause: BaseException | None) -> bool:
    """True if the exception that made flax raise another is of the user's code, of an ``__eq__`` say that flax calls."""
    return cause is not None and cause.__traceback__ is not None and not raised_by_library(cause)


def named(layer: Layer, call: Call) -> Misfit | None:
    """The thing that the call does and a layer of this kind refuses; `None` if nothing of it is known."""
    row, state, argument = layer.row, call.profile.state, layer.style == "argument"
    if layer.captures:
        return None
    known: list[tuple[MisfitKind, Path, tuple[str, ...]]] = []
    if row.pair == "first call":
        known += [("retyped, twice", leaf.path, (leaf.before, leaf.after)) for leaf in state.retyped]
    if row.carries:
        known += [("retyped", leaf.path, (leaf.before, leaf.after)) for leaf in state.retyped]
        # A functional layer carries what the call writes, and no more.
        known += [("relabelled", leaf, (*how,)) for leaf, *how in state.relabelled if argument or leaf in state.changed]
    if argument and row.fixes_state:
        known += [("added", leaf, ()) for leaf in state.added]
    if argument and row.carries:
        known += [("removed", leaf, ()) for leaf in state.removed]
        known += [("replaced", leaf, ()) for leaf in state.replaced]
    for kind, leaf, types in known:
        return Misfit(kind, call.subject.path(leaf), types=types, branches=row.branches)
    return Misfit("attributes set") if argument and row.carries and state.restructured else None


def restored_leaves(subject: Subject, changed: frozenset[Path]) -> frozenset[Path]:
    """The leaves that the call writes and gives their value back, where they come out of a `jax.vmap` with an axis that they did not go in with.

    A spectral norm that writes the normalized kernel and puts the old one back: the update of a mapped value is mapped. The call is
    made a few times, halving the leaves; none where the call cannot be mapped at all.
    """
    graphdef, before = flax_modes.split(subject.fresh() if subject.abstract else subject.state)
    before = jax.tree.map(value_of, before)
    keys = [key for key, _ in numbered(before)]
    leaves, treedef = jax.tree.flatten(before)

    def maps(mapped: frozenset[Path], handed_on: list[Path]) -> bool:
        """True if the call can be mapped over these leaves and its inputs, and hands the others on without an axis."""

        def call(leaves: list[Any], *inputs: Any) -> list[Any]:
            module = nnx.merge(graphdef, jax.tree.unflatten(treedef, leaves))
            subject.program(module, *inputs)
            after = dict(numbered(flax_modes.state(module)))
            return [after.get(key) for key in keys if key[0] in handed_on]

        axes = [0 if path in mapped else None for path, _ in keys]
        handed = [stack(leaf) if axis == 0 else leaf for leaf, axis in zip(leaves, axes, strict=True)]
        mapped_call = jax.vmap(call, in_axes=(axes, *(0 for _ in subject.inputs)), out_axes=None)
        arguments = (handed, *map(stack, subject.inputs))
        try:
            # Inside a trace jax may give an update of a mapped value no axis, as it does outside of one.
            jax.eval_shape(mapped_call, *arguments) if subject.abstract else mapped_call(*arguments)
        except Exception:  # noqa: BLE001 - the user's code may raise anything, and raises it again where it is nested
            return False
        return True

    def batched(paths: list[Path]) -> list[Path]:
        if maps(changed, paths):
            return []
        half = len(paths) // 2
        return batched(paths[:half]) + batched(paths[half:]) if half else paths

    rest = [path for path in dict.fromkeys(path for path, _ in keys) if path not in changed]
    return frozenset(batched(rest)) if maps(changed, []) else frozenset()


def numbers_asked_for(call: Call) -> tuple[str, ...]:
    """The Variables that hold a number whose value the call asks for, and leaves as it is: the call traces with these as constants, and without one of them it does not.

    None where it asks for other values as well.
    """
    subject = call.subject
    if subject.abstract:
        return ()
    graphdef, before = flax_modes.split(subject.state)
    keys = [key for key, _ in numbered(before)]
    leaves, treedef = jax.tree.flatten(before)
    numbers = [place for place, leaf in enumerate(leaves) if is_number(leaf)]

    def traces(constant: list[int]) -> bool:
        """True if the call can be traced with these leaves as they are, and changes none of them."""
        kept: list[bool] = []

        def traced(handed: dict[int, Any], *inputs: Any) -> None:
            given = [handed.get(place, leaf) for place, leaf in enumerate(leaves)]
            module = nnx.merge(graphdef, jax.tree.unflatten(treedef, given))
            subject.program(module, *inputs)
            after = dict(numbered(flax_modes.state(module)))
            kept.extend(after.get(keys[place]) is leaves[place] for place in constant)

        handed = {place: leaf for place, leaf in enumerate(leaves) if place not in constant}
        try:
            jax.eval_shape(traced, handed, *subject.inputs)
        except Exception:  # noqa: BLE001 - the user's code may raise anything, and did
            return False
        return all(kept)

    if not numbers or not traces(numbers):
        return ()
    asked = [place for place in numbers if not traces([other for other in numbers if other != place])]
    return tuple(subject.path(keys[place][0]) for place in asked)


def is_number(leaf: Any) -> bool:
    """True for a number of Python or NumPy, and for an array that holds one integer or truth value."""
    if isinstance(leaf, bool | int | float | np.generic):
        return True
    # The dtype of a random key is none of NumPy's.
    return (
        isinstance(leaf, jax.Array)
        and leaf.shape == ()
        and any(jnp.issubdtype(leaf.dtype, kind) for kind in (jnp.integer, jnp.bool_))
    )


def raised_as_shared(call: Call) -> str:
    """The exception, in one line, that the un-nested call raises on arrays that are shared as the user's own are; empty where it ends.

    Every other run has copies that share nothing.
    """
    subject, copies = call.subject.for_run(), dict[Any, Any]()

    def copy(leaf: Any) -> Any:
        read = read_leaf("", leaf)
        if not read.pointers:
            return copy_leaf(leaf)
        key = read.type, read.pointers
        return copies[key] if key in copies else copies.setdefault(key, copy_leaf(leaf))

    state = subject.fresh(copy)
    _, error = to_the_end(subject.program, state, tuple(map(copy, subject.inputs)))
    return first_line(error) if error else ""
