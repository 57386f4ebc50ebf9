"""What could not be done is said: a walk that ended early, a place that could not be put back; weights in a mapped file."""

from __future__ import annotations

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from pytest_nnxcheck import check
from pytest_nnxcheck.walk import visit
from pytest_nnxcheck.xla import pointers as pointers_module
from pytest_nnxcheck.xla.pointers import foreign_views, in_mapped_files, spans_of_process

X = jnp.ones((2, 4))
FEW = {"transforms": "jit", "styles": "argument", "max_examples": 0}
BOX = np.array([None], dtype=object).view()
BOX.flags.writeable = False
NAMES = np.array(["cat", "dog"], dtype=object)
NAMES.flags.writeable = False

linux = pytest.mark.skipif(sys.platform != "linux", reason="other systems do not say which files are mapped where")


def linear():
    return nnx.Linear(4, 4, rngs=nnx.Rngs(0))


def test_a_walk_that_ended_early_is_a_note(monkeypatch):
    monkeypatch.setattr(visit, "MOST_OBJECTS", 5)
    report = check(linear(), X, **FEW)
    (note,) = [note for note in report.notes if note.startswith("tracers looked for in part: Linear reaches more than")]
    assert note.endswith("objects, or one that cannot be read")


def test_a_place_that_could_not_be_put_back_is_a_note():
    def writes(model, x):
        BOX.base[0] = "seen"
        return model(x)

    report = check(writes, linear(), X, **FEW)
    (note,) = [note for note in report.notes if "put back" in note]
    assert "BOX" in note
    assert note.endswith("could not be put back: the next nesting meets what this one wrote there")


def test_a_place_that_is_read_only_and_was_not_written_is_none():
    """Names of classes, say, that came out of a file."""

    def reads(model, x):
        return model(x) * len(NAMES)

    assert check(reads, linear(), X, **FEW).notes == ()


def loaded(path, how):
    """A layer whose kernel comes out of a memory-mapped checkpoint."""
    np.save(path, np.ones((64, 64), np.float32))
    layer = nnx.Linear(64, 64, rngs=nnx.Rngs(0))
    layer.kernel = nnx.Param(how(np.load(path, mmap_mode="r")))
    return layer


@linux
def test_weights_in_a_memory_mapped_file_are_a_note(tmp_path):
    """`jax.device_put` hands out the memory of the file: told once, since a donated step keeps both and nothing is wrong with it."""
    report = check(loaded(tmp_path / "w.npy", jax.device_put), jnp.ones((2, 64)), **FEW)
    assert report.ok
    (note,) = report.notes
    assert note == (
        f"model.kernel of Linear lies in a memory-mapped file ({tmp_path}/w.npy): XLA cannot reuse a buffer of NumPy's, so that the first"
        " donated step keeps both; write jnp.array(value) where it is loaded"
    )
    assert check(loaded(tmp_path / "w.npy", jnp.array), jnp.ones((2, 64)), **FEW).notes == ()
    assert check(loaded(tmp_path / "v.npy", jax.device_put), jnp.ones((2, 64)), **FEW, donate="none").notes == ()


class Table:
    """Zeros of NumPy at a multiple of 64 bytes, which jax takes over as they are."""

    def __init__(self):
        memory = np.zeros(64 * 64 + 16, np.float32)
        start = -memory.ctypes.data % 64 // memory.itemsize
        self.rows = memory[start : start + 64 * 64].reshape(64, 64)


def from_table(how):
    layer = nnx.Linear(64, 64, rngs=nnx.Rngs(0))
    layer.table = Table()
    layer.kernel = nnx.Param(how(layer.table.rows))
    return layer


def test_weights_in_the_memory_of_an_array_of_numpy_are_a_note():
    """Whether jax copies it depends on where it happens to lie: what is no violation in the next run is none in this one."""
    report = check(from_table(jax.device_put), jnp.ones((2, 64)), **FEW)
    assert report.ok
    (note,) = report.notes
    assert note == (
        "model.kernel lies in the memory of model.table.rows, an array of NumPy: XLA cannot reuse it, so that the first donated step keeps both;"
        " write jnp.array(value), which copies, where it is made"
    )
    assert check(from_table(jnp.array), jnp.ones((2, 64)), **FEW).notes == ()


def test_every_leaf_that_an_array_overlaps_is_told():
    """Not its neighbour alone: a buffer may hold all weights, and a small view lie between."""
    memory = np.zeros(100, np.float32)
    leaves = [(name, memory[start : start + 20]) for name, start in {"a": 10, "b": 30, "c": 60}.items()]
    arrays = {
        "all": memory,
        "inside": memory[32:34],
        "between": memory[52:58],
        "end": memory[78:80],
        "none": memory[80:],
    }
    told = foreign_views(leaves, [*arrays.items(), *leaves])
    assert told == (("all", "a"), ("all", "b"), ("all", "c"), ("inside", "b"), ("end", "c"))


def test_an_address_is_in_the_file_that_is_mapped_there():
    spans = [(16, 32, "a"), (32, 40, "b"), (64, 80, "c")]
    pointers = {"before": 15, "first": 16, "last": 31, "next": 32, "gap": 40, "inside": 70, "end": 80}
    assert in_mapped_files(pointers.items(), spans) == [("first", "a"), ("last", "a"), ("next", "b"), ("inside", "c")]


def test_anonymous_memory_and_devices_are_no_files(tmp_path, monkeypatch):
    maps = tmp_path / "maps"
    maps.write_text(
        "7f00-7f10 r--p 00000000 08:01 2229082                    /data/my weights.npy\n"
        "7f10-7f20 rw-p 00000000 00:00 0\n"
        "7f20-7f30 rw-p 00000000 00:00 0                          [heap]\n"
        "7f30-7f40 rw-s 00000000 00:05 77                         /dev/nvidia0\n"
    )
    monkeypatch.setattr(pointers_module, "MAPS", maps)
    assert spans_of_process() == [(0x7F00, 0x7F10, "/data/my weights.npy")]
    monkeypatch.setattr(pointers_module, "MAPS", tmp_path / "nowhere")
    assert spans_of_process() == []
