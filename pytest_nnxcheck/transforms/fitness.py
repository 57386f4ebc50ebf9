"""What a layer cannot take, whatever the subject's own code does: a rejection with its reason, before anything runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax

from pytest_nnxcheck import compat
from pytest_nnxcheck.compat.arrays import describe
from pytest_nnxcheck.core.nesting import Layer, Nesting, impossible
from pytest_nnxcheck.subject.profile import Profile
from pytest_nnxcheck.subject.subject import Subject


@dataclass(frozen=True, slots=True)
class Misfit:
    """Why a layer cannot take the subject: ``layer`` is the subject of the sentence, empty where the nesting as a whole is."""

    layer: str
    reason: str

    def __str__(self) -> str:
        return f"{self.layer} {self.reason}".lstrip()


def unfit(subject: Subject, profile: Profile, nesting: Nesting) -> Misfit | None:
    """Why a layer of the nesting cannot take the subject, whatever its code does."""
    if reason := impossible(nesting):
        return Misfit("", reason)
    return next((Misfit(str(layer), why) for layer in nesting.layers if (why := cannot(layer, subject, profile))), None)


def cannot(layer: Layer, subject: Subject, profile: Profile) -> str:
    """Why a layer cannot take the subject; empty if it can."""
    if layer.row.iterates and (reason := cannot_feed_back(subject, profile)):
        return reason
    if (layer.row.loop or layer.row.branches) and not layer.captures and profile.retyped:
        path, before, after = profile.retyped[0]
        keeps = "a carry keeps its types" if layer.row.loop else "its branches return the same types"
        return f"{doing(layer)}, and {keeps}: the call makes {subject.path(path)}, which is {before}, a {after}"
    if layer.style == "argument" and layer.row.fixes_state and profile.added:
        return f"{doing(layer)}, and the call adds {subject.path(profile.added[0])} to it"
    if layer.style == "argument" and layer.row.loop and profile.removed:
        return f"{doing(layer)}, and the call takes {subject.path(profile.removed[0])} out of it"
    if profile.replaced and str(layer) in compat.layers_that_keep_variables():
        replaced = subject.path(profile.replaced[0])
        return f"{doing(layer)}, and the call puts a new Variable in place of {replaced}, where it could assign to its value"
    if profile.restructured and str(layer) in compat.loops_that_compare():
        return "compares the modules before and after a step, and the call sets attributes that are no arrays"
    if layer.row.on_mesh and (parted := spread(subject)):
        return f"puts the state whole on each device, and {parted} is sharded over several"
    return ""


def cannot_feed_back(subject: Subject, profile: Profile) -> str:
    """Why the output of the call cannot be its first inputs; empty where it can, or where a dtype alone differs: jax tells that."""
    if not profile.out:
        return "feeds the output back, and the call returns no array"
    if len(profile.out) > len(subject.inputs):
        counts = f"{len(profile.out)} arrays, and takes {len(subject.inputs)}"
        return f"feeds the output back, and the call returns {counts}"
    for name, given, out_name, out in zip(
        subject.input_names, subject.inputs, profile.out_names, profile.out, strict=False
    ):
        if given.shape != out.shape:
            return f"feeds the output back, and output{out_name} is {describe(out)}, where {name} is {describe(given)}"
        cut, other = axes_of(out), axes_of(given)
        if cut != other:
            return (
                f"feeds the output back, and output{out_name} is sharded as {cut} in its type, where {name} is {other}"
            )
    return ""


def axes_of(array: Any) -> tuple[Any, ...]:
    """The mesh axes that each axis of an array is cut by in its type: `None` for an axis that is whole."""
    sharding = compat.in_type(array)
    spec = () if sharding is None else tuple(sharding.spec)
    return (*spec, *(None,) * (len(array.shape) - len(spec)))


def doing(layer: Layer) -> str:
    return "hands on the state where it skips the call" if layer.row.branches else "carries the state"


def spread(subject: Subject) -> str:
    """The path of an array that lies on several devices in parts; empty if there is none."""
    leaves = [(subject.path(path), value) for path, value in compat.raw_leaves(subject.state)]
    for path, leaf in [*leaves, *zip(subject.input_names, subject.inputs, strict=False)]:
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, jax.sharding.Sharding) and not sharding.is_fully_replicated:
            return path
    return ""
