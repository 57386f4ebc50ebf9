"""Whether the un-nested call can be differentiated at all: one abstract evaluation, without the layers of any nesting."""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx

from pytest_nnxcheck import compat
from pytest_nnxcheck.core.errors import Unfit
from pytest_nnxcheck.core.text import first_line
from pytest_nnxcheck.subject.profile import Profile
from pytest_nnxcheck.subject.subject import Subject
from pytest_nnxcheck.transforms.gradients import inexact, summed
from pytest_nnxcheck.transforms.layer import rebuild

__tracebackhide__ = True  # pytest shows the frames of the user, not these


def cannot(subject: Subject, profile: Profile, *, by_inputs: bool) -> str:
    """Why the call has no gradient by its parameters, or by its inputs; empty where it has one."""
    if by_inputs and not inexact(subject.inputs):
        return (
            "the call takes no floating point array, and with the module captured grad differentiates by nothing else"
        )
    if not by_inputs and not profile.parameters:
        return "the state holds no floating point nnx.Param to differentiate by"
    try:
        with subject.leaks_undone(subject.state):
            evaluate(subject, profile, by_inputs=by_inputs)
    except Unfit as error:
        return str(error)
    except jax.errors.UnexpectedTracerError:
        return ""  # what differentiating leaves behind is a leak, which the nestings tell
    except Exception as error:  # noqa: BLE001 - the user's code may raise anything
        return f"the call cannot be differentiated: {first_line(error)}"
    return ""


def evaluate(subject: Subject, profile: Profile, *, by_inputs: bool) -> None:
    """The abstract gradient of the call. Raises what jax or the user's code raises."""
    graphdef, *states = compat.split(
        subject.fresh() if subject.abstract else subject.state, lambda path, _: tuple(path) in profile.parameters, ...
    )

    def loss(parameters: Any, rest: Any, *inputs: Any) -> Any:
        return summed(subject.program(nnx.merge(graphdef, rebuild(parameters), rebuild(rest)), *inputs))

    by = tuple(number + len(states) for number in inexact(subject.inputs)) if by_inputs else 0
    jax.eval_shape(jax.grad(loss, argnums=by), *states, *subject.inputs)
