"""Where the arrays of a state lie: buffer pointers shard by shard, shared buffers, and views of others."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import jax
import numpy as np

from pytest_nnxcheck import compat
from pytest_nnxcheck.profile import describe


@dataclass(frozen=True, slots=True)
class Leaf:
    """One array of the state: type as ``float32[8,64]``, sharding as text, one pointer a shard; empty for a host value."""

    path: str
    type: str
    sharding: str
    pointers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Move:
    """A donated leaf before the program and after it; ``after`` is None where nothing came back under its path."""

    before: Leaf
    after: Leaf | None


def read_leaf(path: str, array: Any) -> Leaf:
    return Leaf(path, describe(array), str(getattr(array, "sharding", "")), pointers(array))


def pointers(array: Any) -> tuple[int, ...]:
    """Device pointers of the addressable shards; none for host values, deleted and empty arrays.

    Compared, never trusted to `is_deleted`: aligned NumPy weights are reported deleted although the pointer moved.
    """
    if not isinstance(array, jax.Array) or isinstance(array, jax.core.Tracer) or array.size == 0 or array.is_deleted():
        return ()
    if compat.is_key(array):
        array = jax.random.key_data(array)
    return tuple(shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards)


def shared_buffers(leaves: Iterable[Leaf]) -> tuple[tuple[str, str], ...]:
    """Pairs of leaves in one buffer: XLA refuses to donate it twice, and names flat argument numbers only."""
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
    """(holder, leaf) for NumPy arrays, and for other jax arrays (DLPack), that overlap the bytes of a leaf."""
    leaves = list(leaves)
    own = {id(array) for _, array in leaves}
    spans = [(*span, path, True) for path, array in leaves for span in byte_ranges(array)]
    spans += [(*span, path, False) for path, array in arrays if id(array) not in own for span in byte_ranges(array)]
    spans.sort(key=lambda span: span[:2])
    pairs = []
    for (_, end, path, is_leaf), (start, _, other, other_is_leaf) in pairwise(spans):
        if start < end and is_leaf != other_is_leaf:
            pairs.append((other, path) if is_leaf else (path, other))
    return tuple(pairs)


def byte_ranges(array: Any) -> list[tuple[int, int]]:
    """Half-open address ranges of an array on this host."""
    if isinstance(array, np.ndarray):
        start, end = compat.byte_bounds(array)
        return [(start, end)] if end > start else []
    found = pointers(array)
    if not found or any(device.platform != "cpu" for device in array.devices()):
        return []
    if compat.is_key(array):
        array = jax.random.key_data(array)
    return [
        (pointer, pointer + shard.data.nbytes) for pointer, shard in zip(found, array.addressable_shards, strict=True)
    ]
