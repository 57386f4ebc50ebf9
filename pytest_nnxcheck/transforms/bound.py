"""The expected peak of a nesting, and its bound: bytes a device."""

from __future__ import annotations

import itertools
from dataclasses import replace

from pytest_nnxcheck.compat.arrays import nbytes
from pytest_nnxcheck.core.facts import Observation
from pytest_nnxcheck.core.nesting import Nesting
from pytest_nnxcheck.core.peak import DEFAULT_FACTOR, Bound, Memory, default_budget
from pytest_nnxcheck.core.setting_values import Budget
from pytest_nnxcheck.core.text import format_bytes
from pytest_nnxcheck.subject.profile import Profile
from pytest_nnxcheck.transforms.compose import maps_written
from pytest_nnxcheck.transforms.layers import LENGTH


def expected_peak(profile: Profile, baseline: Memory, nesting: Nesting) -> int:
    """``R + (s-1)(i+o) + s(T+i+o+c)``: the un-nested program, and for each element of the axes one more call.

    R is resident (arguments + outputs - aliased) and T temporary bytes of the un-nested jit, i and o its input and output
    bytes, c the bytes of state that the call changes, s the product of the axes. Calibrated on 48 healthy models. Under ``vmap`` c counts
    what the call writes and restores too, where it has to be mapped.

    Under ``grad`` the un-nested program is that of the gradient, o counts the gradients, and the steps of a differentiated loop
    multiply the second s: each leaves behind what the backward pass needs of it.
    """
    elements = factor(nesting)
    resident = baseline.arguments + baseline.outputs - baseline.aliased + baseline.constants
    output = profile.output.bytes + gradient_bytes(nesting, profile)
    if profile.devices > 1:
        output = max(baseline.outputs - profile.state.changed_bytes, 0)
    call = profile.input_bytes + output
    written = profile.state.changed_bytes + (profile.state.restored_bytes if maps_written(nesting) else 0)
    return resident + (elements - 1) * call + kept(nesting) * (baseline.temporaries + call + written)


def factor(nesting: Nesting) -> int:
    """The factor s of the expected peak: the product of the nesting's axes."""
    return int(LENGTH ** sum(bool(layer.row.axis) for layer in nesting.layers))


def kept(nesting: Nesting) -> int:
    """The number of calls that keep their temporaries at once: one for each element of the axes, and for each step of a differentiated loop.

    A ``fori_loop`` inside a ``grad`` saves what the backward pass needs of every step; a scan has its axis anyway.
    """
    differentiated = itertools.dropwhile(lambda row: row.pair != "gradients", (layer.row for layer in nesting.layers))
    saved = sum(row.loop == "counted" and not row.axis for row in differentiated)
    return int(factor(nesting) * LENGTH**saved)


def gradient_bytes(nesting: Nesting, profile: Profile) -> int:
    """Bytes of the gradients that one call returns: those of the parameters, or of the inputs where the module is captured."""
    sizes = {True: profile.input_bytes, False: sum(map(nbytes, profile.training.gradients))}
    return sum(sizes[layer.captures] for layer in nesting.layers if layer.row.pair == "gradients")


def shared_broadcasts(observation: Observation, baseline: Memory) -> int:
    """Bytes of the broadcasts that two calls in one program share: XLA makes them once, where it fuses those of one call away."""
    if observation.memory is None or not any(layer.row.pair == "first call" for layer in observation.nesting.layers):
        return 0
    return max(broadcasts(observation.memory) - broadcasts(baseline), 0)


def broadcasts(memory: Memory) -> int:
    return sum(buffer.bytes for buffer in memory.buffers if buffer.broadcast)


def whole_constants(observation: Observation, profile: Profile, baseline: Memory) -> int:
    """Bytes of the constants that a generated closure makes of a sharded module: jax keeps a constant whole on every device."""
    if observation.memory is None or profile.devices == 1 or not observation.nesting.captures:
        return 0
    captured = max(observation.memory.constants - baseline.constants, 0)
    return min(captured, profile.devices * profile.state.bytes)


def bound(observation: Observation, profile: Profile, baseline: Memory, budget: Budget | None) -> Bound:
    """The bound of a nesting: the user's budget, else the default, twice the expected peak plus 64 KiB.

    Bytes bound the plain call under its jit. They cannot bound what our own layers make larger: XLA may fuse the plain call in place, so that it has no temporaries,
    where a mapped or looped one needs two. So a nesting is over a budget in bytes only where it is over the default as well.
    """
    nesting = observation.nesting
    shared = shared_broadcasts(observation, baseline) + whole_constants(observation, profile, baseline)
    expected = expected_peak(profile, baseline, nesting) + shared
    by_default = Bound(expected, default_budget(expected), multiple=f"{DEFAULT_FACTOR}x", default=budget is None)
    if budget is None:
        return by_default
    if budget.factor is not None:
        return Bound(expected, round(budget.factor * expected), multiple=str(budget))
    size = budget.bytes or 0
    asked = budget.written or format_bytes(size)
    if len(nesting) > 1 and by_default.budget > size:
        return replace(by_default, asked=asked)
    return Bound(expected, size, asked=asked)
