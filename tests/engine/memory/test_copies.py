"""Copies of the state: what a program no longer holds when nothing is handed back unchanged."""

from __future__ import annotations

import bugs
import jax
import jax.numpy as jnp
import optax
import pytest
from checking import broken, call, full, hint, text
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
    cure, *_ = bugs.cures()
    assert ("graph_updates=False" in found.outcome.violations[0].hint) == (cure == "no_graph_updates")
    assert step(cure).outcome.verdict == "held"


@pytest.mark.slow
@pytest.mark.parametrize("how", bugs.cures())
def test_its_cures_copy_nothing_where_the_loop_is_differentiated(how):
    found = call(
        bugs.call_twice, bugs.ScanOverRemat(nnx.Rngs(0), how), *bugs.inputs_scan_over_remat(), nesting="jit > grad"
    )
    assert found.outcome.verdict == "held", text(found)


@pytest.mark.slow
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
"""Every row under both each night, a quarter of them in CI: what the rows differ in is seen under the jit already."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, nesting",
    [
        *((name, "jit") for name in REWRITTEN),
        *(
            pytest.param(name, nesting, marks=pytest.mark.full if (number + place) % 4 else pytest.mark.slow)
            for number, name in enumerate(REWRITTEN)
            for place, nesting in enumerate(BESIDE_JIT)
        ),
    ],
)
def test_a_leaf_that_is_rewritten_is_not_copied(name, nesting):
    make, args = REWRITTEN[name]
    found = call(make(), *args, nesting=nesting)
    assert found.outcome.verdict in ("held", "rejected"), text(found)
    assert not any("copies" in note for note in found.outcome.notes)


# Copies at any size: a whole leaf that is there twice counts from 4 KiB on


@pytest.mark.slow
@pytest.mark.parametrize("width, layers, copied", [(32, 2, 2), (16, 8, 2), (16, 2, 0)])
def test_two_narrow_layers_show_the_copies_of_a_scan_over_remat(width, layers, copied):
    model, x = bugs.ScanOverRemat(nnx.Rngs(0), "remat", layers, width), numbers((4, width))
    found = call(bugs.call_twice, model, x, nesting="jit")
    assert copies(found) == pytest.approx(copied, abs=0.01), text(found)
    assert ("copy of model.layers.kernel" in text(found)) == bool(copied)
    cured = bugs.ScanOverRemat(nnx.Rngs(0), bugs.cures()[0], layers, width)
    assert call(bugs.call_twice, cured, x, nesting="jit").outcome.verdict == "held"


@pytest.mark.slow
def test_narrow_state_that_is_returned_beside_its_module_is_a_copy():
    for width, kinds in ((32, ["memory"]), (31, [])):  # 4 KiB of kernel, and less with its bias
        layer, x = nnx.Linear(width, width, use_bias=False, rngs=nnx.Rngs(0)), numbers((2, width))
        found = call(lambda layer, x: (layer(x), nnx.state(layer)), layer, x, nesting="jit")
        assert broken(found) == kinds, text(found)


# Outputs that are state


def test_state_that_is_returned_beside_its_module_is_a_copy():
    layer, x = nnx.Linear(256, 256, rngs=nnx.Rngs(0)), numbers((2, 256))
    found = call(lambda layer, x: (layer(x), nnx.state(layer)), layer, x, nesting="jit")
    assert broken(found) == ["memory"], text(found)
    assert copies(found) == pytest.approx(1)
    assert found.outcome.violations[0].hint == hint("returned")
    assert call(lambda layer, x: layer(x), layer, x, nesting="jit").outcome.verdict == "held"


def decayed(model):
    """Updates the parameters."""
    nnx.update(model, jax.tree.map(lambda leaf: leaf * 0.9, nnx.state(model, nnx.Param)))
    return model


def returned(model):
    """The parameters as a step may hand them out: in another tree, of another object, by another operation."""
    state = nnx.state(model, nnx.Param)
    yield "state", lambda: state
    yield "leaf", lambda: model.kernel[...]
    yield "clone", lambda: nnx.clone(model)
    yield "copied", lambda: jax.tree.map(jnp.copy, state)
    yield "times one", lambda: jax.tree.map(lambda leaf: 1.0 * leaf, state)
    yield "plus zero", lambda: jax.tree.map(lambda leaf: leaf + 0, state)


OTHER = {
    "the module": lambda model: model,
    "numbers": lambda model: jax.tree.map(jnp.linalg.norm, nnx.state(model)),
    "in another type": lambda model: jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), nnx.state(model)),
    "another value": lambda model: jax.tree.map(lambda leaf: leaf * 0.5, nnx.state(model)),
    "twice what is no state": lambda model: [model.kernel[...] @ model.kernel[...]] * 2,
}
"""What a step may return of its new parameters that is none of them."""


@pytest.mark.parametrize("nesting", ["jit", "jit[functional]", *full("jit > remat")])
@pytest.mark.parametrize("name", ["state", "leaf", "copied", "times one", "plus zero", *full("clone")])
def test_new_state_that_is_returned_beside_its_module_is_a_copy(name, nesting):
    def step(model, x):
        y = decayed(model)(x)
        return y, dict(returned(model))[name]()

    found = call(step, nnx.Linear(256, 256, rngs=nnx.Rngs(0)), numbers((2, 256)), nesting=nesting)
    assert broken(found) == ["memory"], text(found)
    assert copies(found) == pytest.approx(1, abs=0.01)
    assert "leave the state out of what the call returns" in found.outcome.violations[0].hint


@pytest.mark.parametrize("nesting", ["jit", *full("jit[functional]", "jit > remat", "jit > while_loop")])
@pytest.mark.parametrize("name", OTHER)
def test_what_a_step_returns_that_is_no_new_state_is_no_copy(name, nesting):
    def step(model, x):
        y = decayed(model)(x)
        return y, OTHER[name](model)

    found = call(step, nnx.Linear(256, 256, rngs=nnx.Rngs(0)), numbers((2, 256)), nesting=nesting)
    assert found.outcome.verdict == "held", text(found)


def test_parameters_that_are_all_that_a_step_returns_are_a_copy_and_the_result_of_a_forward_call_is_none():
    class Cell(nnx.Module):
        def __init__(self):
            self.linear, self.h = nnx.Linear(256, 256, rngs=nnx.Rngs(0)), nnx.Variable(numbers((64, 256)))

        def __call__(self, x):
            h = self.linear(self.h[...]) + x
            assign(self.h, h)
            return h

    found = call(lambda model: decayed(model).kernel[...], nnx.Linear(256, 256, rngs=nnx.Rngs(0)), nesting="jit")
    assert copies(found) == pytest.approx(1, abs=0.01), text(found)
    assert call(Cell(), numbers((64, 256)), nesting="jit").outcome.verdict == "held"
    beside = call(lambda cell, x: (x, cell(x)), Cell(), numbers((64, 256)), nesting="jit")
    assert copies(beside) == pytest.approx(0.2, abs=0.01), text(beside)


def test_two_leaves_that_get_one_value_are_no_copy():
    """The network and its target: each has a buffer of its own, before and after."""

    class Both(nnx.Module):
        def __init__(self):
            self.q, self.target = (nnx.Linear(256, 256, rngs=nnx.Rngs(0)) for _ in range(2))

        def __call__(self, x):
            nnx.update(self.target, nnx.state(self.q))
            return self.target(x)

    for nesting in ("jit", "jit[functional]"):
        found = call(Both(), numbers((2, 256)), nesting=nesting)
        assert found.outcome.verdict == "held", text(found)


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
