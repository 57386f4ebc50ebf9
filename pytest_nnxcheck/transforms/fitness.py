"""Reject the layers that cannot take a call before anything runs, each with its reason."""

from __future__ import annotations

from dataclasses import replace

import jax

from pytest_nnxcheck.compat import graph
from pytest_nnxcheck.compat.arrays import is_in_ref
from pytest_nnxcheck.core.facts import Path
from pytest_nnxcheck.core.nesting import Layer, Misfit, MisfitKind, Nesting, impossible
from pytest_nnxcheck.subject.profile import Profile
from pytest_nnxcheck.subject.subject import Subject


def unfit(subject: Subject, profile: Profile, nesting: Nesting) -> Misfit | None:
    """Why a layer of the nesting cannot take the subject, whatever its code does."""
    misfits = ((layer, cannot(layer, subject, profile)) for layer in nesting.layers)
    return impossible(nesting) or next((replace(misfit, layer=layer) for layer, misfit in misfits if misfit), None)


def cannot(layer: Layer, subject: Subject, profile: Profile) -> Misfit | None:
    """Why a layer cannot take the subject; `None` if it can."""

    def of_leaf(kind: MisfitKind, path: Path, *types: str) -> Misfit:
        return Misfit(kind, subject.path(path), types=types, branches=layer.row.branches)

    if layer.row.keeps_types and not layer.captures and profile.retyped:
        kind: MisfitKind = "retyped, twice" if layer.row.pair == "first call" else "retyped"
        return of_leaf(kind, *profile.retyped[0])
    carries = (layer.row.loop or layer.row.branches) and not layer.captures
    # A functional layer carries what the call writes, and no more.
    relabelled = (leaf for leaf in profile.relabelled if layer.style == "argument" or leaf[0] in profile.changed)
    if carries and (leaf := next(relabelled, None)):
        return of_leaf("relabelled", *leaf)
    if layer.style == "argument" and layer.row.loop and (reference := first_reference(subject, profile)):
        return Misfit("reference carried", reference)
    if layer.style == "argument" and layer.row.fixes_state and profile.added:
        return of_leaf("added", profile.added[0])
    if layer.style == "argument" and layer.row.loop and profile.removed:
        return of_leaf("removed", profile.removed[0])
    if profile.replaced and str(layer) in graph.layers_that_keep_variables():
        return of_leaf("replaced", profile.replaced[0])
    if profile.restructured and str(layer) in graph.loops_that_compare():
        return Misfit("attributes set")
    if layer.row.on_mesh and (parted := spread(subject)):
        return Misfit("sharded leaf", parted)
    return None


def first_reference(subject: Subject, profile: Profile) -> str:
    """The path of a leaf that is a reference under the nesting; empty if none is."""
    if not (subject.in_refs or profile.in_references):
        return ""
    leaves = graph.raw_leaves(subject.state)
    return next((subject.path(path) for path, value in leaves if subject.in_refs or is_in_ref(value)), "")


def spread(subject: Subject) -> str:
    """The path of an array that lies on several devices in parts; empty if there is none."""
    leaves = [(subject.path(path), value) for path, value in graph.raw_leaves(subject.state)]
    for path, leaf in [*leaves, *zip(subject.input_names, subject.inputs, strict=False)]:
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, jax.sharding.Sharding) and not sharding.is_fully_replicated:
            return path
    return ""
