"""Reject the layers that cannot take a call before anything runs, each with its reason."""

from __future__ import annotations

from dataclasses import replace

import jax

from pytest_nnxcheck.compat import graph
from pytest_nnxcheck.core.facts import Path
from pytest_nnxcheck.core.nesting import Layer, Misfit, MisfitKind, Nesting, impossible
from pytest_nnxcheck.subject.profile import Profile
from pytest_nnxcheck.subject.subject import Subject


def unfit(subject: Subject, profile: Profile, nesting: Nesting) -> Misfit | None:
    """The reason why a layer of the nesting cannot take the subject, whatever its code does; `None` if all can."""
    misfits = ((layer, cannot(layer, subject, profile)) for layer in nesting.layers)
    return impossible(nesting) or next((replace(misfit, layer=layer) for layer, misfit in misfits if misfit), None)


def cannot(layer: Layer, subject: Subject, profile: Profile) -> Misfit | None:
    """The reason why a layer cannot take the subject; `None` if it can."""

    def of_leaf(kind: MisfitKind, path: Path, *types: str) -> Misfit:
        return Misfit(kind, subject.path(path), types=types, branches=layer.row.branches)

    state = profile.state
    if layer.row.keeps_types and not layer.captures and state.retyped:
        first = state.retyped[0]
        kind: MisfitKind = "retyped, twice" if layer.row.pair == "first call" else "retyped"
        return of_leaf(kind, first.path, first.before, first.after)
    carries = (layer.row.loop or layer.row.branches) and not layer.captures
    # A functional layer carries what the call writes, and no more.
    relabelled = (leaf for leaf in state.relabelled if layer.style == "argument" or leaf[0] in state.changed)
    if carries and (leaf := next(relabelled, None)):
        return of_leaf("relabelled", *leaf)
    if layer.style == "argument" and layer.row.loop and state.references:
        return of_leaf("reference carried", min(state.references, key=str))
    if layer.style == "argument" and layer.row.fixes_state and state.added:
        return of_leaf("added", state.added[0])
    if layer.style == "argument" and layer.row.loop and state.removed:
        return of_leaf("removed", state.removed[0])
    if state.replaced and str(layer) in graph.layers_that_keep_variables():
        return of_leaf("replaced", state.replaced[0])
    if state.restructured and str(layer) in graph.loops_that_compare():
        return Misfit("attributes set")
    if layer.row.on_mesh and (parted := spread(subject)):
        return Misfit("sharded leaf", parted)
    return None


def spread(subject: Subject) -> str:
    """The path of an array that lies on several devices in parts; empty if there is none."""
    leaves = [(subject.path(path), value) for path, value in graph.raw_leaves(subject.state)]
    for path, leaf in [*leaves, *zip(subject.input_names, subject.inputs, strict=False)]:
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, jax.sharding.Sharding) and not sharding.is_fully_replicated:
            return path
    return ""
