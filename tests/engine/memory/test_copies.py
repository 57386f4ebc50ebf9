"""Copies of the state: what a program no longer holds when nothing is handed back unchanged."""

from __future__ import annotations

import bugs
import optax
import pytest
from checking import broken, call, text
from flax import nnx
from healthy import FLAX, assign, numbers
from rewritten_leaves import REWRITTEN
from wild_training import make_optimizer, step_on_squares

from pytest_nnxcheck.compat import staging


def copies(found):
    """How many copies of the state a message tells of; none where the nesting holds."""
    told = [finding for violation in found.outcome.violations for finding in violation.findings]
    return sum(finding.bytes / finding.figures.state for finding in told)


@pytest.mark.slow
@pytest.mark.parametrize(
    "nesting, once, twice",
    [
        ("jit", 1, 2),
        ("jit[functional]", 0, 1),
        *((f"jit > {transform}", 1, 2) for transform in ("remat", "scan", "vmap", "while_loop")),
    ],
)
def test_scan_over_remat_copies_its_stack_for_every_further_call(nesting, once, twice):
    (x,) = bugs.inputs_scan_over_remat()
    one = call(bugs.ScanOverRemat(nnx.Rngs(0)), x, nesting=nesting)
    assert copies(one) == pytest.approx(once, abs=0.01)
    two = call(bugs.call_twice, bugs.ScanOverRemat(nnx.Rngs(0)), x, nesting=nesting)
    assert copies(two) == pytest.approx(twice, abs=0.01)
    assert f"the program holds {twice}.00 extra copies of its state" in text(two)


@pytest.mark.slow
@pytest.mark.skipif(FLAX < (0, 12), reason="XLA of older jax keeps one stack in a training step")
@pytest.mark.parametrize("nesting", ["jit", "jit > grad"])
def test_a_training_step_with_adam_copies_a_third_of_its_state(nesting):
    """The parameters; the moments are the other two thirds."""

    def step(how):
        model = bugs.ScanOverRemat(nnx.Rngs(0), how)
        optimizer = make_optimizer(model, optax.adam(1e-3))
        return call(step_on_squares, model, optimizer, *bugs.inputs_scan_over_remat(), nesting=nesting)

    found = step("remat")
    assert copies(found) == pytest.approx(1 / 3, abs=0.01)
    assert "the program holds 0.33 extra copies of its state" in text(found)
    assert "graph_updates=False" in found.outcome.violations[0].hint
    assert step("no_graph_updates").outcome.verdict == "held"


@pytest.mark.slow
@pytest.mark.parametrize("how", bugs.cures())
def test_its_cures_copy_nothing_where_the_loop_is_differentiated(how):
    found = call(
        bugs.call_twice, bugs.ScanOverRemat(nnx.Rngs(0), how), *bugs.inputs_scan_over_remat(), nesting="jit > grad"
    )
    assert found.outcome.verdict == "held", text(found)


def test_a_call_in_functional_style_is_measured_by_what_it_is_handed():
    graphdef, state = nnx.split(bugs.ScanOverRemat(nnx.Rngs(0)))
    (x,) = bugs.inputs_scan_over_remat()
    found = call(lambda state, x: bugs.call_twice(nnx.merge(graphdef, state), x), state, x, nesting="jit")
    assert copies(found) == pytest.approx(1, abs=0.01)
    graphdef, state = nnx.split(bugs.ScanOverRemat(nnx.Rngs(0), "functional"))
    cured = call(lambda state, x: bugs.call_twice(nnx.merge(graphdef, state), x), state, x, nesting="jit")
    assert cured.outcome.verdict == "held", text(cured)


# What the call computes anew is no copy, whatever XLA needs for it


BESIDE_JIT = ("jit > scan", "jit > grad > remat")
"""Each of the rows under both, but for those that differ in how the old value is read again."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, nesting",
    [
        *((name, "jit") for name in REWRITTEN),
        *(
            pytest.param(name, nesting, marks=pytest.mark.full if "read again" in name else pytest.mark.slow)
            for name in REWRITTEN
            for nesting in BESIDE_JIT
        ),
    ],
)
def test_a_leaf_that_is_rewritten_is_not_copied(name, nesting):
    make, args = REWRITTEN[name]
    found = call(make(), *args, nesting=nesting)
    assert found.outcome.verdict in ("held", "rejected"), text(found)
    assert not any("copies" in note for note in found.outcome.notes)


# Outputs that are state


def test_state_that_is_returned_beside_its_module_is_a_copy():
    layer, x = nnx.Linear(256, 256, rngs=nnx.Rngs(0)), numbers((2, 256))
    found = call(lambda layer, x: (layer(x), nnx.state(layer)), layer, x, nesting="jit")
    assert broken(found) == ["memory"], text(found)
    assert copies(found) == pytest.approx(1)
    assert "leave the state out of what the call returns: its caller has it in" in found.outcome.violations[0].hint
    assert call(lambda layer, x: layer(x), layer, x, nesting="jit").outcome.verdict == "held"


def test_an_input_that_is_returned_beside_the_state_that_takes_it_is_no_copy_of_the_state():
    class Keeps(nnx.Linear):
        def __call__(self, x):
            assign(self.kernel, x)
            return x, x @ x

    found = call(Keeps(256, 256, rngs=nnx.Rngs(0)), numbers((256, 256)), nesting="jit", donate="all")
    assert "memory" not in broken(found), text(found)


def test_state_that_is_not_donated_has_to_be_an_output_of_its_own():
    layer, x = nnx.Linear(256, 256, rngs=nnx.Rngs(0)), numbers((2, 256))
    found = call(lambda layer, x: (layer(x), nnx.state(layer)), layer, x, nesting="jit", donate="none")
    assert found.outcome.verdict == "held", text(found)


# What it costs


def compiled_again(monkeypatch, subject, *args, nesting="jit"):
    """How many programs are compiled to look for copies under one nesting."""
    jitted = []
    real = staging.jitted_jaxpr
    monkeypatch.setattr(
        staging, "jitted_jaxpr", lambda *given, **options: jitted.append(given) or real(*given, **options)
    )
    call(subject, *args, nesting=nesting)
    return len(jitted)


@pytest.mark.slow
def test_a_program_is_compiled_again_only_where_there_is_room_for_copies(monkeypatch):
    large = numbers((512, 256))
    layer = lambda: nnx.Linear(256, 256, rngs=nnx.Rngs(0))  # noqa: E731
    assert compiled_again(monkeypatch, layer(), large) == 0  # hands nothing back
    stack = lambda: (bugs.ScanOverRemat(nnx.Rngs(0), depth=32, width=64), numbers((4, 64)))  # noqa: E731
    assert compiled_again(monkeypatch, *stack(), nesting="jit[functional]") == 0  # XLA drops what nobody reads
    assert compiled_again(monkeypatch, *stack()) == 1
