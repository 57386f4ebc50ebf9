"""Try one transform alone on a call: whether it has a gradient, and which leaves a ``vmap`` must map."""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx

from pytest_nnxcheck.compat import flax_modes
from pytest_nnxcheck.compat.arrays import value_of
from pytest_nnxcheck.core.errors import Unfit
from pytest_nnxcheck.core.facts import Path
from pytest_nnxcheck.core.nesting import Misfit
from pytest_nnxcheck.core.text import first_line
from pytest_nnxcheck.subject.profile import Profile
from pytest_nnxcheck.subject.subject import Subject, numbered, on_arrays
from pytest_nnxcheck.transforms.compose import stack
from pytest_nnxcheck.transforms.layers import inexact, rebuild, summed

__tracebackhide__ = True  # pytest shows the frames of the user, not these


def no_gradient(subject: Subject, profile: Profile, *, by_inputs: bool) -> Misfit | None:
    """The reason why the call has no gradient by its parameters, or by its inputs; `None` where it has one."""
    if by_inputs and not inexact(subject.inputs):
        return Misfit("no float input")
    if not by_inputs and not profile.training.parameters:
        return Misfit("no parameter")

    def gradient(module: Any, *inputs: Any) -> Any:
        graphdef, *states = flax_modes.split(module, lambda path, _: tuple(path) in profile.training.parameters, ...)

        def loss(parameters: Any, rest: Any, *inputs: Any) -> Any:
            return summed(subject.program(nnx.merge(graphdef, rebuild(parameters), rebuild(rest)), *inputs))

        by = tuple(number + len(states) for number in inexact(inputs)) if by_inputs else 0
        return jax.grad(loss, argnums=by)(*states, *inputs)

    function, arguments = on_arrays(gradient, subject)
    try:
        jax.eval_shape(function, *arguments)
    except Unfit as error:
        return error.misfit
    except jax.errors.UnexpectedTracerError:
        return None  # differentiating leaked a tracer, which the nestings report
    except Exception as error:  # noqa: BLE001 - the user's code may raise anything
        return Misfit("no derivative", other=first_line(error))
    return None


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
