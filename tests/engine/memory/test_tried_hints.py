"""The plugin makes the change of a hint on memory itself where it can: the message has both peaks, or no such hint."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import pytest
from bugs import ScanOverRemat, call_twice, inputs_926, inputs_scan_over_remat, nnx_scanned, ten_convolutions
from checking import call, flat, full, hint, near, slow
from flax import nnx
from healthy import node_list, numbers, rngs
from memory_evidence import shown
from probes import remat_takes_graph_updates

from pytest_nnxcheck import Nesting, Outcome, Report, Violation, check
from pytest_nnxcheck.core.facts import Evidence
from pytest_nnxcheck.core.on_target import OnTarget
from pytest_nnxcheck.core.settings import Settings
from pytest_nnxcheck.invariants.memory import DoesNotFit
from pytest_nnxcheck.reporting import violations
from pytest_nnxcheck.runner import cures

X = inputs_scan_over_remat()
needs_graph_updates = pytest.mark.skipif(
    not remat_takes_graph_updates(), reason="nnx.remat takes graph_updates from flax 0.12.6 on"
)
OFF = "scan writes back, remat"


def jitted(subject: Any, *args: Any, **settings: Any) -> Report:
    return check(subject, *args, nesting="jit", **settings)


def tried(message: object) -> list[str]:
    """The peaks that the hints of a message name."""
    return re.findall(r"\(tried: peak (.*?)\)", flat(str(message)))


# --- a scan over nnx.remat


def test_the_hint_on_a_scan_over_remat_has_the_peak_with_its_cure():
    """The peak is that of the model which is written as the hint says."""
    off = remat_takes_graph_updates()
    found = jitted(call_twice, ScanOverRemat(rngs()), *X)
    cured = jitted(call_twice, ScanOverRemat(rngs(), "no_graph_updates" if off else "functional"), *X)
    assert cured.ok
    before, after = (shown(report.outcomes[-1].peak) for report in (found, cured))
    assert hint(OFF if off else "scan writes back, checkpoint") in flat(str(found))
    assert tried(found) == [f"{before} -> {after}"]
    assert tried(cured) == []


class MadeBefore(ScanOverRemat):
    """The same, with a function that `nnx.remat` made when the model was made."""

    def __init__(self, rngs):
        super().__init__(rngs)
        self.block = nnx.remat(lambda block, x: block(x))

    def __call__(self, x):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def forward(x, layer):
            return self.block(layer, x)

        return forward(x, self.layers)


@pytest.mark.slow
def test_a_hint_whose_change_the_plugin_cannot_make_stays_as_it_is():
    found = jitted(call_twice, MadeBefore(rngs()), *X)
    if remat_takes_graph_updates():
        assert hint(OFF) in flat(str(found))
        assert tried(found) == []


class HandsBack(ScanOverRemat):
    """A `jax.checkpoint` of its own hands the parameters out of its scan, and `nnx.remat` is used elsewhere."""

    def __init__(self, rngs, *, back=True):
        super().__init__(rngs)
        self.back = back
        self.head = nnx.Linear(128, 128, rngs=rngs)

    def __call__(self, x):
        graphdef, state = nnx.split(self.layers)

        @jax.checkpoint
        def step(x, state):
            return nnx.merge(graphdef, state)(x), state if self.back else None

        x, state = jax.lax.scan(step, x, state)
        if self.back:
            nnx.update(self.layers, state)
        return nnx.remat(lambda head, x: head(x))(self.head, x)


@pytest.mark.slow
@needs_graph_updates
def test_a_hint_that_was_tried_and_did_not_help_is_not_shown():
    """The next best one is: the scan without what it hands back was compiled to measure the copies."""
    found = jitted(call_twice, HandsBack(rngs()), *X)
    assert "graph_updates=False" not in str(found)
    assert hint("scan writes back, checkpoint") in flat(str(found))
    assert tried(found) == [
        f"{shown(found.outcomes[-1].peak)} -> {shown(jitted(call_twice, HandsBack(rngs(), back=False), *X).outcomes[-1].peak)}"
    ]
    # Before it was tried the hint was another one.
    assert call(call_twice, HandsBack(rngs()), *X, nesting="jit").outcome.violations[0].hint == hint(OFF)


kept_jit = nnx.jit(lambda model, x: nnx_scanned("remat", model.layers, x))


@pytest.mark.slow
@needs_graph_updates
def test_what_was_tried_changes_nothing_for_later_tests():
    """A jit that the user's code keeps has no trace of the cure."""
    for _ in range(2):
        found = jitted(lambda model, x: kept_jit(model, kept_jit(model, x)), ScanOverRemat(rngs()), *X)
        assert len(tried(found)) == 1, found
    assert nnx.remat.__kwdefaults__["graph_updates"] is None


IN_BODY = """
import pytest
from test_tried_hints import MadeBefore, X, rngs

@pytest.mark.nnx_invariants(transforms="jit", styles="argument", max_examples=0)
def test_two_calls(nnx_wrap):
    nnx_wrap(lambda model, x: model(model(x)))(MadeBefore(rngs()), *X)
"""


@pytest.mark.slow
@needs_graph_updates
def test_a_model_that_the_test_makes_is_made_with_the_cure(pytester, inner_args):
    pytester.makepyfile(test_it=IN_BODY)
    pytester.syspathinsert(Path(__file__).parent)
    result = pytester.runpytest_inprocess(*inner_args)
    result.assert_outcomes(failed=1)
    assert len(tried(result.stdout.str().partition("short test summary")[0])) == 1


def test_nothing_is_tried_for_a_test_that_passes(monkeypatch):
    def fail(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(cures, "measured", fail)
    assert jitted(call_twice, ScanOverRemat(rngs(), "functional"), *X).ok


# --- donation


def budgeted(subject: Any, *args: Any, **settings: Any) -> Report:
    return check(subject, *args, transforms="jit", styles="argument", max_depth=1, max_examples=0, **settings)


def test_a_peak_that_donation_lowers():
    (x,) = inputs_926()
    for times, said in ((3, "1.0 MiB -> 512.0 KiB"), (1, "1.0 MiB -> 512.0 KiB, which is not enough")):
        found = budgeted(ten_convolutions, x, memory_budget=times * x.nbytes)
        text = flat(str(found))
        assert "donate x as well: donate='state,x' here, and nnx.jit(f, donate_argnames=...) in your own code" in text
        assert tried(found) == [said]
    assert budgeted(ten_convolutions, x, memory_budget=3 * x.nbytes, donate="state,x").ok


@pytest.mark.slow
def test_a_donation_that_does_not_help_is_not_shown():
    """The output has the type of the input, and is made beside it whatever is donated: the input is read again afterwards."""

    def read_again(x):
        y = x[::-1] * 2
        return y + x.sum()

    found = budgeted(read_again, numbers((256, 256)), memory_budget="1KiB")
    assert found.outcomes[-1].evidence.reusable == ("x",)
    told = tried(found)
    helps = jitted(read_again, numbers((256, 256)), donate="all").outcomes[-1].peak < found.outcomes[-1].peak
    assert bool(told) == helps


# --- the layers of a gradient under a remat


class Block(nnx.Module):
    """``[batch, 64] -> [batch, 64]``, four times as wide inside."""

    def __init__(self, rngs):
        self.up = nnx.Linear(64, 256, rngs=rngs)
        self.down = nnx.Linear(256, 64, rngs=rngs)

    def __call__(self, x, sign=1, *, gelu=True):
        return x + sign * self.down(nnx.gelu(self.up(x)) if gelu else self.up(x))


class Layered(nnx.Module):
    """Blocks one after the other, each plain or under a remat."""

    def __init__(self, remat):
        self.remat, self.blocks = remat, node_list(Block(rngs()) for _ in range(4))

    def __call__(self, x):
        for block in self.blocks:
            x = (
                nnx.remat(lambda block, x: block(x), **OFF_BY_ARGUMENT)(block, x)
                if self.remat
                else block(x, 1, gelu=True)
            )
        return x


class InTrunk(nnx.Module):
    """The same inside of a module that is there once."""

    def __init__(self, remat):
        self.trunk = Layered(remat)

    def __call__(self, x):
        return self.trunk(x)


class Scanned(nnx.Module):
    """The same as a scan."""

    def __init__(self, remat):
        self.remat = remat
        self.blocks = nnx.split_rngs(splits=4)(nnx.vmap(Block, in_axes=0, out_axes=0))(rngs())

    def __call__(self, x):
        graphdef, state = nnx.split(self.blocks)

        def step(x, state):
            return nnx.merge(graphdef, state)(x), None

        return jax.lax.scan(jax.checkpoint(step, prevent_cse=False) if self.remat else step, x, state)[0]


OFF_BY_ARGUMENT: dict[str, Any] = {"graph_updates": False} if remat_takes_graph_updates() else {}
OF_BLOCK = "put Block.__call__ under nnx.remat(f"
PUT = {Layered: OF_BLOCK, InTrunk: OF_BLOCK, Scanned: f"put the body of the scan at {near(__file__)}:"}


def gradient(model, x):
    return nnx.grad(lambda model: (model(x) ** 2).mean())(model)


def forward(model, x):
    return (model(x) ** 2).mean()


@pytest.mark.parametrize("make", [Layered, *slow(InTrunk, Scanned)])
def test_the_layers_of_a_gradient_are_put_under_a_remat(make):
    """The peak is that of the model that has them there."""
    x = numbers((512, 64))
    found, cured = (jitted(gradient, make(remat), x, memory_budget="1MiB") for remat in (False, True))
    before, after = (report.outcomes[-1].peak for report in (found, cured))
    if after < before:  # jax before 0.7 puts nothing between the layers that XLA would not see through
        assert PUT[make] in flat(str(found))
        assert tried(found) == [f"{shown(before)} -> {shown(after)}, which is not enough"]
    else:
        assert tried(found) == []
    # Under a remat already: nothing is gained.
    assert "nnx.remat" not in str(cured)
    assert Block.__call__.__qualname__ == "Block.__call__"
    assert not hasattr(Block.__call__, "__wrapped__")


@pytest.mark.slow
def test_a_budget_that_a_remat_keeps():
    x, most = numbers((512, 64)), jitted(gradient, Scanned(remat=True), numbers((512, 64))).outcomes[-1].peak
    found = jitted(gradient, Scanned(remat=False), x, memory_budget=most)
    (said,) = tried(found)
    assert said.endswith(f"-> {shown(most)}")
    assert jitted(gradient, Scanned(remat=True), x, memory_budget=most).ok


@pytest.mark.slow
def test_a_multiple_is_one_of_the_peak_that_is_expected_with_the_cure():
    x = numbers((512, 64))
    assert not jitted(gradient, Scanned(remat=True), x, memory_budget="0.5x").ok
    (said,) = tried(jitted(gradient, Scanned(remat=False), x, memory_budget="0.5x"))
    assert said.endswith(", which is not enough")


@pytest.mark.slow
@pytest.mark.parametrize("make", [Layered, *full(Scanned)])
def test_without_a_gradient_no_remat_is_tried(make, monkeypatch):
    monkeypatch.setattr(cures, "remat", lambda *_: cures.Hint("tried"))
    assert "hint        tried" in str(jitted(gradient, make(remat=False), numbers((4, 64)), memory_budget="1KiB"))
    assert "hint        tried" not in str(jitted(forward, make(remat=False), numbers((4, 64)), memory_budget="1KiB"))


# --- what helps

OVER = Outcome(
    Nesting.parse("jit"),
    "violated",
    (Violation("memory", "over the budget"),),
    peak=1000,
    evidence=Evidence(reusable=("x", "cache['k']", "cache['v']")),
)
RESULTS = {
    "the nesting holds": (replace(OVER, verdict="held", violations=(), peak=990), " (tried: peak 1000 B -> 990 B)"),
    "less, and still over": (replace(OVER, peak=950), " (tried: peak 1000 B -> 950 B, which is not enough)"),
    "hardly less, and still over": (replace(OVER, peak=951), None),
    "no less": (replace(OVER, verdict="held", violations=()), None),
    "something else breaks": (replace(OVER, violations=(Violation("donation", "lost"),), peak=8), None),
    "it raises": (replace(OVER, verdict="failed", violations=(), peak=8), None),
    "no call": (None, None),
}


def on_v5e(peak: int, *, fits: bool) -> Outcome:
    """A call with a gradient, of 1000 bytes on the CPU."""
    on = OnTarget("v5e", limit=3000, peak=peak, fits=fits)
    violation = Violation("memory", findings=(DoesNotFit(on=on, layers=()),))
    verdict: Any = "held" if fits else "violated"
    return Outcome(OVER.nesting, verdict, (violation,) * (not fits), peak=1000, evidence=Evidence(targets=(on,)))


@pytest.mark.parametrize("after, said", [(2000, " (tried: peak 3.9 KiB -> 2.0 KiB)"), (4000, "")])
def test_the_peak_of_a_target_is_the_one_to_lower(after, said):
    """The general hint stays where a remat does not help."""

    def try_out(_: Settings) -> Outcome:
        jax.lax.scan(lambda carry, _: (carry, None), 0.0, None, length=2)
        return on_v5e(after, fits=after < 3000)

    (before,) = violations.worded(on_v5e(4000, fits=False)).violations
    found = cures.measured(
        Outcome(OVER.nesting, "violated", (before,), evidence=on_v5e(4000, fits=False).evidence), Settings(), try_out
    )
    (hint_after,) = (violation.hint for violation in found.violations)
    assert hint_after.endswith(said)
    assert hint_after.startswith("put the body of the scan at " if said else before.hint)
    assert before.hint.startswith("make the batch smaller, wrap the layers in nnx.remat")


@pytest.mark.parametrize("result, said", RESULTS.values(), ids=RESULTS)
def test_what_helps(result, said):
    asked: list[str] = []

    def try_out(settings: Settings) -> Outcome | None:
        asked.append(settings.donate)
        return result

    found = cures.measured(OVER, Settings(), try_out)
    assert asked == ["state,x,cache"]
    assert found.violations[0].hint.endswith(said or "")
    assert bool(found.violations[0].hint) == bool(said)


def test_a_donation_is_tried_only_where_an_input_can_be_reused():
    asked: list[Settings] = []
    nothing = replace(OVER, evidence=Evidence())
    assert cures.measured(nothing, Settings(), asked.append) == nothing  # type: ignore[arg-type]
    assert asked == []
