"""What could not be done is said: a walk that ended early, a place that could not be put back."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from flax import nnx

from pytest_nnxcheck import check, walk

X = jnp.ones((2, 4))
FEW = {"transforms": "jit,scan", "styles": "argument", "max_examples": 0}
BOX = np.array([None], dtype=object)


def linear():
    return nnx.Linear(4, 4, rngs=nnx.Rngs(0))


def test_a_walk_that_ended_early_is_a_note(monkeypatch):
    monkeypatch.setattr(walk, "MOST_OBJECTS", 5)
    report = check(linear(), X, **FEW)
    (note,) = [note for note in report.notes if note.startswith("tracers looked for in part: Linear reaches more than")]
    assert note.endswith("objects, or one that cannot be read")


def test_a_place_that_could_not_be_put_back_is_a_note():
    def seals(model, x):
        if BOX.flags.writeable:
            BOX[0] = "seen"
            BOX.flags.writeable = False
        return model(x)

    report = check(seals, linear(), X, **FEW)
    (note,) = [note for note in report.notes if "put back" in note]
    assert "BOX" in note
    assert note.endswith("could not be put back: what a nesting left there is met by the next")


def test_otherwise_there_is_none():
    assert check(linear(), X, **FEW).notes == ()
