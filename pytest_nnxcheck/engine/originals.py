"""The user's own objects, looked at before a call is checked on copies of them."""

from __future__ import annotations

import jax
import numpy as np

from pytest_nnxcheck import compat
from pytest_nnxcheck.compat.arrays import describe
from pytest_nnxcheck.core.errors import CheckError
from pytest_nnxcheck.core.settings import Settings
from pytest_nnxcheck.core.text import some
from pytest_nnxcheck.engine.session import Session
from pytest_nnxcheck.inspection.pointers import (
    byte_ranges,
    foreign_views,
    in_mapped_files,
    read_leaf,
    shared_buffers,
    spans_of_process,
)
from pytest_nnxcheck.inspection.visit import MOST_OBJECTS
from pytest_nnxcheck.inspection.walk import walk
from pytest_nnxcheck.invariants.case import Originals
from pytest_nnxcheck.subject.subject import Subject

__tracebackhide__ = True  # pytest shows the frames of the user, not these


def look_at_originals(subject: Subject, settings: Settings, session: Session) -> Originals:
    """Facts of the user's own objects. Raises `CheckError` where they hold tracers or deleted arrays already."""
    inputs = list(zip(subject.input_names, subject.inputs, strict=False))
    seen = walk([*subject.roots(subject.state), *inputs])
    if seen.tracers:
        paths = ", ".join(found.path for found in seen.tracers[:3])
        raise CheckError(
            f"{subject.name} holds tracers before the call, in {paths}: an earlier transform left them there, or the call is "
            "made inside one. Build the module in the test and call it there, outside of any transform: nnx_wrap applies them"
        )
    if not seen.complete:
        session.note(
            f"tracers looked for in part: {subject.name} reaches more than {MOST_OBJECTS:,} objects, or one that cannot be read"
        )
    leaves = [(subject.path(path), value) for path, value in compat.raw_leaves(subject.state)]
    computed = session.values.computed
    for path, array in [*leaves, *seen.arrays]:
        if isinstance(array, jax.Array) and computed(array) and array.is_deleted():
            raise CheckError(
                f"{path} is deleted before the call: an earlier step donated it. Build the module inside the test"
            )
    session.places.append(seen.places)
    if "donation" in settings.invariants and settings.donate != "none":
        tell_mapped(subject, session)
    leaves = [leaf for leaf in leaves if computed(leaf[1])]
    inputs = [leaf for leaf in inputs if computed(leaf[1])]
    views = [
        (path, array) for path, array in seen.arrays if isinstance(array, jax.Array | np.ndarray) and computed(array)
    ]
    shared = shared_buffers([read_leaf(*leaf) for leaf in [*leaves, *inputs]])
    pinned = [
        (subject.path(path), f"{compat.variable_kind(variable)} {describe(compat.variable_value(variable))}")
        for path, variable in compat.variables(subject.state)
        if compat.is_pinned(variable)
    ]
    return Originals(shared, foreign_views(leaves, views), tuple(pinned))


def tell_mapped(subject: Subject, session: Session) -> None:
    """Note, once for a subject, the leaves that lie in a mapped file: a copy is checked, which does not."""
    if subject.label in session.looked_up:
        return
    session.looked_up.add(subject.label)
    leaves = [(subject.path(path), value) for path, value in compat.raw_leaves(subject.state)]
    leaves = [leaf for leaf in leaves if session.values.computed(leaf[1])]
    starts = [(path, start) for path, array in leaves for start, _ in byte_ranges(array)]
    found = in_mapped_files(starts, spans_of_process() if starts else [])
    if found:
        paths, files = zip(*found, strict=True)
        session.note(
            f"{some(paths)} of {subject.name} {'lies' if len(found) == 1 else 'lie'} in a memory-mapped file ({files[0]}): XLA cannot reuse a buffer of NumPy's, so that the first donated"
            " step keeps both; write jnp.array(value) where it is loaded"
        )
