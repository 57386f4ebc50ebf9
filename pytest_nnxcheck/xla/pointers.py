"""The memory of the arrays of a state: buffer pointers shard by shard, shared buffers, and views of others."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from pytest_nnxcheck.compat import graph
from pytest_nnxcheck.compat.arrays import array_type, byte_bounds, is_held_ref, pointers_of_ref
from pytest_nnxcheck.core.facts import InnerDonation, Leaf

__tracebackhide__ = True  # pytest shows the frames of the user, not these


def read_leaf(path: str, array: Any) -> Leaf:
    sharding = getattr(array, "sharding", None)
    return Leaf(
        path, array_type(array), sharding if isinstance(sharding, jax.sharding.Sharding) else None, pointers(array)
    )


def pointers(array: Any) -> tuple[int, ...]:
    """Device pointers of the addressable shards; none for host values, deleted and empty arrays."""
    # `is_deleted` does not prove that a buffer was reused: jax reports aligned NumPy weights deleted although the pointer moved.
    if is_held_ref(array):
        return pointers_of_ref(array)
    if not isinstance(array, jax.Array) or isinstance(array, jax.core.Tracer) or array.size == 0 or array.is_deleted():
        return ()
    if graph.is_key(array):
        array = jax.random.key_data(array)
    # An array whose computation failed, for want of memory say, has no pointer: asking for it aborts the process, waiting for it raises.
    array.block_until_ready()
    return tuple(shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards)


def is_deleted(array: Any) -> bool:
    """True if an array was donated and cannot be read any more; never for host values and tracers."""
    return isinstance(array, jax.Array) and not isinstance(array, jax.core.Tracer) and array.is_deleted()


def inner_donation(handed: Mapping[str, Any], left: Mapping[str, Any], returned: Iterable[Any]) -> InnerDonation:
    """The arrays that a call donated inside: ``handed`` are those that it was called with, ``left`` those of the state after it, by name."""
    # The call ran on a copy whose leaves share nothing: a deleted array names the leaf that was donated.
    owner = {id(array): name for name, array in handed.items() if is_deleted(array)}
    outputs = set(map(id, returned))
    holders = [(name, owner.get(id(array), name)) for name, array in left.items()]
    return InnerDonation(
        consumed=frozenset(owner.values()),
        kept=frozenset(name for name, array in handed.items() if left.get(name) is array or id(array) in outputs),
        orphans=tuple((name, other) for name, other in holders if name != other),
    )


def shared_buffers(leaves: Iterable[Leaf]) -> tuple[tuple[str, str], ...]:
    """Pairs of leaves in one buffer. XLA refuses to donate it twice, and names flat argument numbers only."""
    first: dict[int, str] = {}
    pairs = []
    for leaf in leaves:
        other = next((first[pointer] for pointer in leaf.pointers if pointer in first), None)
        if other is not None:
            pairs.append((other, leaf.path))
        for pointer in leaf.pointers:
            first.setdefault(pointer, leaf.path)
    return tuple(pairs)


def foreign_views(leaves: Iterable[tuple[str, Any]], arrays: Iterable[tuple[str, Any]]) -> tuple[tuple[str, str], ...]:
    """(holder, leaf) of arrays of NumPy, and of other arrays of jax (DLPack), that overlap the bytes of a leaf."""
    leaves, arrays = list(leaves), list(arrays)
    if not arrays:
        return ()
    own = {id(array) for _, array in leaves}
    spans = sorted((*span, path) for path, array in leaves for span in byte_ranges(array))
    starts, ends = [start for start, _, _ in spans], [end for _, end, _ in spans]
    return tuple(
        (holder, path)
        for holder, array in arrays
        if id(array) not in own
        for start, end in byte_ranges(array)
        # Leaves lie beside one another, or in the same bytes: their ends are in order as well.
        for _, _, path in spans[bisect_right(ends, start) : bisect_left(starts, end)]
    )


def is_numpys_own(array: Any) -> bool:
    """True if the memory of a NumPy array is NumPy's, a file's or bytes', and not that of a jax array, which gives a buffer or a capsule.

    A Variable may lie in such memory: `jnp.asarray` on the CPU up to jax 0.6, and `jax.device_put` on all versions, take it over if the
    first element is at a multiple of 64 bytes.
    """
    if not isinstance(array, np.ndarray):
        return False
    base: Any = array
    while isinstance(base, np.ndarray):
        base = np.ndarray.base.__get__(base)
    return type(base).__name__ not in ("memoryview", "PyCapsule")


def byte_ranges(array: Any) -> list[tuple[int, int]]:
    """Half-open address ranges of an array on this host."""
    if isinstance(array, np.ndarray):
        start, end = byte_bounds(array)
        return [(start, end)] if end > start else []
    addresses = () if is_held_ref(array) else pointers(array)
    if not addresses or any(device.platform != "cpu" for device in array.devices()):
        return []
    if graph.is_key(array):
        array = jax.random.key_data(array)
    return [
        (pointer, pointer + shard.data.nbytes)
        for pointer, shard in zip(addresses, array.addressable_shards, strict=True)
    ]


Span = tuple[int, int, str]
"""Half-open range of addresses, and the file that is mapped there."""

MAPS = Path("/proc/self/maps")

_FIELDS = 6


def in_mapped_files(pointers: Iterable[tuple[str, int]], spans: list[Span]) -> list[tuple[str, str]]:
    """(name, file) of the pointers that lie in memory-mapped files, as weights of a checkpoint may; ``spans`` are sorted.

    A donated program marks such an array deleted and puts the new value elsewhere, on all versions: see `is_numpys_own`. The check runs a
    copy, which does not show it. An address shows a mapped file; memory of NumPy on the heap looks like any other.
    """
    starts = [start for start, _, _ in spans]
    mapped = []
    for name, pointer in pointers:
        at = bisect_right(starts, pointer) - 1
        if at >= 0 and pointer < spans[at][1]:
            mapped.append((name, spans[at][2]))
    return mapped


def spans_of_process() -> list[Span]:
    """The files that this process has mapped, by address; none if the system does not say. Linux does."""
    try:
        text = MAPS.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return []
    return sorted(span for line in text.splitlines() if (span := _span(line)) is not None)


def _span(line: str) -> Span | None:
    """``start-end permissions offset device inode path``: a file has an inode, and no device file is one of weights."""
    parts = line.split(maxsplit=_FIELDS - 1)
    if len(parts) < _FIELDS or parts[4] == "0" or parts[5].startswith("/dev/"):
        return None
    start, _, end = parts[0].partition("-")
    return int(start, 16), int(end, 16), parts[5]
