"""Whether the un-nested call can be differentiated at all: one abstract evaluation, without the layers of any nesting."""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx

from pytest_nnxcheck.compat import flax_modes
from pytest_nnxcheck.core.errors import Unfit
from pytest_nnxcheck.core.nesting import Misfit
from pytest_nnxcheck.core.text import first_line
from pytest_nnxcheck.subject.profile import Profile
from pytest_nnxcheck.subject.subject import Subject
from pytest_nnxcheck.transforms.gradients import inexact, summed
from pytest_nnxcheck.transforms.layer import rebuild

__tracebackhide__ = True  # pytest shows the frames of the user, not these


def cannot(subject: Subject, profile: Profile, *, by_inputs: bool) -> Misfit | None:
    """Why the call has no gradient by its parameters, or by its inputs; `None` where it has one."""
    if by_inputs and not inexact(subject.inputs):
        return Misfit("no float input")
    if not by_inputs and not profile.parameters:
        return Misfit("no parameter")
    try:
        with subject.undone(subject.state):
            evaluate(subject, profile, by_inputs=by_inputs)
    except Unfit as error:
        return error.misfit
    except jax.errors.UnexpectedTracerError:
        return None  # what differentiating leaves behind is a leak, which the nestings tell
    except Exception as error:  # noqa: BLE001 - the user's code may raise anything
        return Misfit("no derivative", other=first_line(error))
    return None


def evaluate(subject: Subject, profile: Profile, *, by_inputs: bool) -> None:
    """The abstract gradient of the call. Raises what jax or the user's code raises."""
    graphdef, *states = flax_modes.split(
        subject.fresh() if subject.abstract else subject.state, lambda path, _: tuple(path) in profile.parameters, ...
    )

    def loss(parameters: Any, rest: Any, *inputs: Any) -> Any:
        return summed(subject.program(nnx.merge(graphdef, rebuild(parameters), rebuild(rest)), *inputs))

    by = tuple(number + len(states) for number in inexact(subject.inputs)) if by_inputs else 0
    jax.eval_shape(jax.grad(loss, argnums=by), *states, *subject.inputs)
