"""What a layer cannot take, whatever the subject's own code does: a rejection with its reason, before anything runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax

from pytest_nnxcheck import compat
from pytest_nnxcheck.compat.arrays import describe
from pytest_nnxcheck.core.nesting import Layer, Misfit, MisfitKind, Nesting, impossible
from pytest_nnxcheck.core.observation import Path
from pytest_nnxcheck.subject.profile import Profile
from pytest_nnxcheck.subject.subject import Subject


def unfit(subject: Subject, profile: Profile, nesting: Nesting) -> Misfit | None:
    """Why a layer of the nesting cannot take the subject, whatever its code does."""
    misfits = ((layer, cannot(layer, subject, profile)) for layer in nesting.layers)
    return impossible(nesting) or next((replace(misfit, layer=layer) for layer, misfit in misfits if misfit), None)


def cannot(layer: Layer, subject: Subject, profile: Profile) -> Misfit | None:
    """Why a layer cannot take the subject; `None` if it can."""
    if layer.row.iterates and (misfit := cannot_feed_back(subject, profile)):
        return misfit

    def of_leaf(kind: MisfitKind, path: Path, *types: str) -> Misfit:
        return Misfit(kind, subject.path(path), types=types, branches=layer.row.branches)

    if (layer.row.loop or layer.row.branches) and not layer.captures and profile.retyped:
        return of_leaf("retyped", *profile.retyped[0])
    if layer.style == "argument" and layer.row.fixes_state and profile.added:
        return of_leaf("added", profile.added[0])
    if layer.style == "argument" and layer.row.loop and profile.removed:
        return of_leaf("removed", profile.removed[0])
    if profile.replaced and str(layer) in compat.layers_that_keep_variables():
        return of_leaf("replaced", profile.replaced[0])
    if profile.restructured and str(layer) in compat.loops_that_compare():
        return Misfit("attributes set")
    if layer.row.on_mesh and (parted := spread(subject)):
        return Misfit("sharded leaf", parted)
    return None


def cannot_feed_back(subject: Subject, profile: Profile) -> Misfit | None:
    """Why the output of the call cannot be its first inputs; `None` where it can, or where a dtype alone differs: jax tells that."""
    if not profile.out:
        return Misfit("no output")
    # A call without inputs is handed one that has no name.
    if len(profile.out) > len(subject.input_names):
        return Misfit("more outputs", str(len(profile.out)), str(len(subject.input_names)))
    for name, given, out_name, out in zip(
        subject.input_names, subject.inputs, profile.out_names, profile.out, strict=False
    ):
        if given.shape != out.shape:
            return Misfit("output of another type", out_name, name, (describe(out), describe(given)))
        cut, other = axes_of(out), axes_of(given)
        if cut != other:
            return Misfit("output sharded otherwise", out_name, name, (str(cut), str(other)))
    return None


def axes_of(array: Any) -> tuple[Any, ...]:
    """The mesh axes that each axis of an array is cut by in its type: `None` for an axis that is whole."""
    sharding = compat.in_type(array)
    spec = () if sharding is None else tuple(sharding.spec)
    return (*spec, *(None,) * (len(array.shape) - len(spec)))


def spread(subject: Subject) -> str:
    """The path of an array that lies on several devices in parts; empty if there is none."""
    leaves = [(subject.path(path), value) for path, value in compat.raw_leaves(subject.state)]
    for path, leaf in [*leaves, *zip(subject.input_names, subject.inputs, strict=False)]:
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, jax.sharding.Sharding) and not sharding.is_fully_replicated:
            return path
    return ""
