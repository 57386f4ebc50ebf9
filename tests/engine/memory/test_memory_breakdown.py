"""Where the bytes of a peak are: by line, with the copy and the operations it went through, beside the un-nested program."""

from __future__ import annotations

import dataclasses
import inspect
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reports
from checking import broken, call, source, text
from flax import nnx
from healthy import FLAX, numbers
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

from pytest_nnxcheck import compat
from pytest_nnxcheck.core.evidence import Captured, Evidence, Growth, Held, Place, Split
from pytest_nnxcheck.engine.evidence import added, places
from pytest_nnxcheck.inspection import buffers
from pytest_nnxcheck.reporting import memory_breakdown

KiB, MiB = 1024, 1024 * 1024


def line(function, fragment):
    """``path:line`` of the line of a function that holds this text."""
    lines, start = inspect.getsourcelines(function)
    (number,) = [start + number for number, each in enumerate(lines) if fragment in each]
    return f"{inspect.getsourcefile(function)}:{number}"


def rows(found, label):
    return [row for violation in found.outcome.violations for name, row in violation.details if name == label]


def told(found):
    """The evidence of a call, which must be plain data."""
    known = found.outcome.evidence
    assert json.loads(json.dumps(dataclasses.asdict(known)))["split"]["temporaries"] == known.split.temporaries
    return known


# The rows, from evidence that is made by hand

COPY = Held(
    bytes=8 * MiB,
    shape="float32[8,512,512]",
    kind="temporary",
    operation="dynamic_update_slice",
    stack=("model.py:12", "model.py:20", "test.py:5"),
    name="model.kernel",
    whole=True,
    through=("while", "dynamic-slice", "dynamic-update-slice"),
    added=True,
)
KNOWN = Evidence(
    split=Split(arguments=8 * MiB, outputs=2 * KiB, temporaries=17 * MiB, aliased=0, constants=0),
    un_nested=Split(arguments=8 * MiB, outputs=2 * KiB, temporaries=9 * MiB, aliased=0, constants=0),
    buffers=(
        COPY,
        dataclasses.replace(COPY, added=False),
        Held(MiB, "float32[512,512]", "temporary", "copy", ("model.py:30",), inserted=True),
        Held(2 * KiB, "float32[512]", "output", "copy", inserted=True),
    ),
    places=(
        Place("model.py:12", ("model.py:20", "test.py:5"), False, 2, 16 * MiB, 0, 0, 8 * MiB),
        Place("model.py:30", (), True, 1, MiB, 0, 0, 0),
        Place("", (), True, 1, 0, 2 * KiB, 0, 2 * KiB),
    ),
)


def test_the_story_of_a_copy():
    assert memory_breakdown.rows(KNOWN) == (
        ("un-nested", "17.0 MiB; the nesting adds 8.0 MiB: temporaries +8.0 MiB"),
        (
            "line",
            "model.py:12 (called from model.py:20, test.py:5)   16.0 MiB, 94 % of the temporaries; un-nested 8.0 MiB",
        ),
        (
            "buffer",
            (
                "2 x 8.0 MiB temporary float32[8,512,512] dynamic_update_slice   copy of model.kernel"
                " by while, dynamic-slice, dynamic-update-slice   1 added by the nesting"
            ),
        ),
        ("line", "model.py:30   1.0 MiB, 6 % of the temporaries; not in the un-nested program"),
        ("buffer", "1.0 MiB temporary float32[512,512] copy   inserted by XLA for this loop"),
    )


def test_a_program_that_is_the_un_nested_one_says_so():
    same = dataclasses.replace(KNOWN, un_nested=KNOWN.split)
    found = memory_breakdown.rows(same)
    assert found[0] == ("un-nested", "25.0 MiB: the nesting adds nothing to the peak")
    assert not any("un-nested" in row for _, row in found[1:])


@pytest.mark.parametrize(
    "place, heading",
    [
        (Place("", (), True, 1, 0, MiB, 0, 0), "inserted by XLA, no line"),
        (Place("", (), False, 1, MiB, 0, 0, 0), "no line of yours"),
        (Place("", (), False, 1, 0, 0, MiB, 0), "captured constants"),
        (Place("scan[closure]", (), False, 1, MiB, 0, 0, 0), "the layer scan[closure] of the nesting"),
        (Place("a.py:1", tuple("bcde"), False, 1, MiB, 0, 0, 0), "a.py:1 (called from b, c, d, ...)"),
    ],
)
def test_a_place_says_what_is_known_of_it(place, heading):
    assert memory_breakdown.heading(place) == heading


def test_what_no_line_is_shown_of_is_summed_up():
    every = tuple(Place(f"m.py:{n}", (), False, 1, MiB, 0, 0, 0) for n in range(10))
    found = memory_breakdown.rows(Evidence(split=Split(0, 0, 10 * MiB, 0, 0), places=every))
    assert [label for label, _ in found] == ["line", "line", "line", ""]
    assert found[-1][1] == "7.0 MiB more in 7 other places"


def test_a_jaxlib_that_names_no_buffer_is_told():
    found = memory_breakdown.rows(Evidence(split=Split(1, 1, MiB, 0, 0)))
    assert found == (("line", "unknown: this jaxlib does not name the buffers"),)
    assert memory_breakdown.rows(Evidence()) == ()


def test_what_a_step_adds_is_told_with_its_parts():
    known = Evidence(split=Split(0, 0, 0, 0, 0), growth=Growth("scan", 2, Split(KiB, 3 * KiB, 0, 0, 0)))
    assert memory_breakdown.rows(known) == (
        (
            "growth",
            "each further step of scan adds 4.0 KiB: outputs +3.0 KiB, arguments +1.0 KiB   (from 2 and 4 steps)",
        ),
    )
    none = dataclasses.replace(known, growth=Growth("vmap[functional]", 2, Split(0, 0, 0, 0, 0)))
    assert memory_breakdown.rows(none)[0][1].startswith(
        "each further element of vmap[functional] adds nothing to the peak"
    )


def test_a_captured_array_is_told_with_its_line_or_without():
    named = Captured(MiB, "float32[512,512]", "m.py:3", "table (closure of f)")
    nameless = Captured(MiB, "float32[512,512]")
    known = Evidence(split=Split(0, 0, 0, 0, 2 * MiB), captured=(named, nameless))
    assert [row for label, row in memory_breakdown.rows(known) if label == "captured"] == [
        "float32[512,512] 1.0 MiB   table (closure of f)   used at m.py:3",
        "float32[512,512] 1.0 MiB   (no line)",
    ]
    small = dataclasses.replace(known, captured=(dataclasses.replace(named, bytes=64 * KiB - 1),))
    assert not any(label == "captured" for label, _ in memory_breakdown.rows(small))


HELD = st.builds(
    Held,
    bytes=st.integers(1, 2**40),
    shape=st.sampled_from(["float32[8]", "float32[2,4]"]),
    kind=st.sampled_from(["temporary", "output", "constant"]),
    operation=st.sampled_from(["copy", "dot"]),
    stack=st.lists(st.sampled_from(["a.py:1", "a.py:2", "b.py:1"]), max_size=3, unique=True).map(tuple),
    name=st.sampled_from(["", "model.kernel"]),
    whole=st.booleans(),
    layer=st.sampled_from(["", "scan"]),
    inserted=st.booleans(),
)
SEVERAL = st.lists(HELD, max_size=30).map(tuple)


@given(after=SEVERAL, before=SEVERAL)
def test_places_are_a_partition_of_the_buffers(after, before):
    found = places(after, before)
    sums = {
        kind: sum(each.bytes for each in after if each.kind == kind) for kind in ("temporary", "output", "constant")
    }
    assert sum(place.temporaries for place in found) == sums["temporary"]
    assert sum(place.outputs for place in found) == sums["output"]
    assert sum(place.constants for place in found) == sums["constant"]
    assert sum(place.count for place in found) == len(after)
    assert sum(place.un_nested for place in found) <= sum(each.bytes for each in before)
    assert list(found) == sorted(found, key=lambda place: -place.bytes)
    for each in after:
        (home,) = [place for place in found if memory_breakdown.belongs(each, place)]
        assert set(home.outer) <= set(each.stack) or each.bytes < 0.05 * home.bytes


@given(after=SEVERAL, before=SEVERAL)
def test_a_story_is_short_and_its_shares_add_up(after, before):
    split = Split(
        0, *(sum(each.bytes for each in after if each.kind == kind) for kind in ("output", "temporary")), 0, 0
    )
    known = Evidence(split=split, un_nested=Split(0, 0, 0, 0, 0), buffers=after[:10], places=places(after, before))
    found = memory_breakdown.rows(known)
    assert len(found) <= 9
    assert all(len(label) <= 11 and "\n" not in row for label, row in found)
    shares = [int(row.partition(" % of the temporaries")[0].split()[-1]) for _, row in found if "% of the temp" in row]
    assert sum(shares) <= 100 + len(shares)


@given(after=SEVERAL, before=SEVERAL)
def test_added_are_the_buffers_that_have_no_partner(after, before):
    def keys(held):
        return [(each.place, each.shape, each.name) for each in held]

    found = added(after, before)
    assert keys(found) == keys(after)
    for key in set(keys(after)):
        marked = sum(each.added for each in found if (each.place, each.shape, each.name) == key)
        assert marked == max(0, keys(after).count(key) - keys(before).count(key))


# google/flax#4871: at least 95 % of the temporaries are the copy, and the user's scan line


def attributed(found, name, where):
    """The share of the temporaries that are copies of a leaf, and the share that was made at a line."""
    known = told(found)
    copies = sum(each.bytes for each in known.buffers if each.kind == "temporary" and each.whole and each.name == name)
    at = sum(place.temporaries for place in known.places if place.line == where)
    return copies / known.split.temporaries, at / known.split.temporaries


SCAN_4871 = line(reports.Report4871.__call__, "return through(")


@pytest.mark.skipif(FLAX >= (0, 10, 7), reason="flax 0.10.2 copies in silence, later versions refuse")
@pytest.mark.parametrize("nesting", ["jit[functional] > call_first > scan[jax_closure]"])
def test_4871_is_told_by_the_copy_and_the_line_of_the_scan(nesting):
    found = call(reports.report_4871(nnx.Rngs(0)), 0.0, nesting=nesting)
    assert min(attributed(found, "model.blocks.param", SCAN_4871)) >= 0.95
    (where, *_), (buffer, *_) = rows(found, "line"), rows(found, "buffer")
    assert where.startswith(f"{SCAN_4871} ")
    assert "100 % of the temporaries" in where
    assert "copy of model.blocks.param by while, dynamic-slice, dynamic-update-slice" in buffer
    shown = (Path(__file__).parents[3] / "docs" / "memory.md").read_text()
    for label, (row, *_) in {label: rows(found, label) for label in ("un-nested", "line", "buffer")}.items():
        assert f"{label:<11} {row}".replace(f"{Path(reports.__file__).parent}/", "") in shown


@pytest.mark.skipif(FLAX >= (0, 10, 7), reason="flax 0.10.2 copies in silence, later versions refuse")
def test_4871_own_run_is_told_by_the_copy_and_the_line_of_the_scan():
    model = reports.report_4871(nnx.Rngs(0))
    graphdef, state = nnx.split(model)

    def run(state, x):
        merged = nnx.merge(graphdef, state)
        return lax.scan(lambda x, _: (merged(x), None), merged(x), None, length=200)[0]

    found = call(run, state, 0.0, nesting="jit", memory_budget="1.5x", transforms="jit")
    known = told(found)
    assert known.places[0].temporaries >= 0.95 * known.split.temporaries
    assert known.places[0].line == SCAN_4871
    assert known.places[0].outer[-1:] == (line(run, "lax.scan"),) or known.places[0].outer == ()
    assert "blocks" in known.buffers[0].name
    assert known.buffers[0].whole


class Stacked(nnx.Module):
    """The program of google/flax#4871 in the form in which it lives on: each layer rematerialized inside the scan."""

    def __init__(self, rngs, depth=40, width=64):
        @nnx.split_rngs(splits=depth)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def make_block(rngs):
            return reports.Matrix(width, rngs)

        self.blocks = make_block(rngs)

    def __call__(self, x):
        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        def through(block, x):
            return nnx.remat(reports.call_block)(block, x)

        return through(self.blocks, x)


SCAN = line(Stacked.__call__, "return through(")


def two_calls(model, x):
    return model(model(x))


@pytest.mark.parametrize("nesting", ["jit", "jit[functional]", "jit > call_first"])
def test_the_live_form_of_4871_is_told_by_the_copy_and_the_line_of_the_scan(nesting):
    found = call(two_calls, Stacked(nnx.Rngs(0)), numbers((64,)), nesting=nesting)
    assert broken(found) == ["memory"]
    assert min(attributed(found, "model.blocks.param", SCAN)) >= 0.95
    assert rows(found, "line")[0].startswith(f"{SCAN} (called from {line(two_calls, 'return')}")
    assert "copy of model.blocks.param by while, dynamic-slice, dynamic-update-slice" in rows(found, "buffer")[0]


def carries_its_stack(model, x):
    """A plain scan of jax whose carry holds the stacked parameters, which each step writes back, and which are used afterwards."""
    graphdef, state = nnx.split(model.blocks)
    steps = jax.tree.leaves(state)[0].shape[0]

    def step(carry, i):
        x, state = carry
        block = jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, i, keepdims=False), state)
        x = nnx.merge(graphdef, block)(x)
        back = jax.tree.map(lambda leaf, one: lax.dynamic_update_index_in_dim(leaf, one, i, 0), state, block)
        return (x, back), None

    (x, state), _ = lax.scan(step, (x, state), jnp.arange(steps))
    return x + jax.tree.leaves(state)[0][-1].sum(0)


def test_a_carry_that_holds_the_stack_is_told_by_the_copy_and_the_loop():
    model = Stacked(nnx.Rngs(0))
    found = call(carries_its_stack, model, numbers((64,)), nesting="jit[functional]", memory_budget="0.1x")
    known = told(found)
    loop = line(carries_its_stack, "lax.scan(step")
    copies = [each for each in known.buffers if each.whole and each.name == "model.blocks.param"]
    assert sum(each.bytes for each in copies) >= 0.95 * known.split.temporaries
    assert {each.stack[-1] for each in copies} == {loop}
    lines = {loop, line(carries_its_stack, "dynamic_update_index_in_dim")}
    assert sum(place.temporaries for place in known.places if place.line in lines) >= 0.95 * known.split.temporaries


# What the nesting added


def test_the_same_line_is_held_against_the_un_nested_program():
    found = call(two_calls, Stacked(nnx.Rngs(0)), numbers((64,)), nesting="jit")
    known = told(found)
    size = 40 * 64 * 64 * 4
    assert [(each.added, each.bytes) for each in known.buffers if each.whole] == [(False, size), (True, size)]
    # The un-nested program holds one copy of all layers, and what a step takes out of it.
    assert size < known.places[0].un_nested < 1.1 * size
    assert "1 added by the nesting" in rows(found, "buffer")[0]
    assert f"un-nested {memory_breakdown.format_bytes(known.places[0].un_nested)}" in rows(found, "line")[0]


def test_what_a_generated_layer_made_is_told_by_the_layer():
    found = call(nnx.Linear(64, 64, rngs=nnx.Rngs(0)), jnp.ones((64, 64)), nesting="jit > scan > vmap", memory_budget=1)
    assert {place.line for place in told(found).places if place.bytes > KiB} == {"scan", "vmap"}
    assert rows(found, "line")[0].startswith("the layer scan of the nesting   ")
    assert "not in the un-nested program" in rows(found, "line")[0]


def test_the_un_nested_program_adds_nothing():
    found = call(nnx.Linear(64, 64, rngs=nnx.Rngs(0)), jnp.ones((64, 64)), nesting="jit[functional]", memory_budget=1)
    (row,) = rows(found, "un-nested")
    assert row.endswith(": the nesting adds nothing to the peak")


def test_a_message_is_read_within_a_minute():
    found = call(two_calls, Stacked(nnx.Rngs(0)), numbers((64,)), nesting="jit > call_first > scan")
    (violation,) = found.outcome.violations
    assert len(violation.details) <= 13
    assert [label for label, _ in violation.details if label][:4] == ["peak", "budget", "expected", "un-nested"]


# Lines


def doubled(x, y):
    return lax.scan(lambda c, row: (c, row * 2), 0, x)[1] @ y


def tripled(x, y):
    return lax.scan(lambda c, row: (c, row * 3), 0, x)[1] @ y


def both(x, y):
    return doubled(x, y) @ tripled(x, y)


def test_lines_are_those_of_the_program_and_not_of_another_that_jax_traced_before():
    """Both scans update slices of one shape: jax 0.10 traces that update once, and keeps the line of the first."""
    x, y = numbers((96, 80)), numbers((80, 96))
    for subject in (doubled, tripled, doubled):
        found = call(subject, x, y, nesting="jit", memory_budget=1)
        lines = {each.place for each in told(found).buffers if each.kind == "temporary" and each.bytes == x.nbytes}
        assert lines == {line(subject, "lax.scan")}


def test_two_loops_of_a_program_keep_their_lines():
    found = call(both, numbers((96, 80)), numbers((80, 96)), nesting="jit", memory_budget=1)
    lines = {each.place for each in told(found).buffers if each.operation.startswith("dynamic")}
    assert lines <= {line(doubled, "lax.scan"), line(tripled, "lax.scan")}
    stacks = {each.stack for each in told(found).buffers if each.place == line(tripled, "lax.scan")}
    assert stacks <= {(line(tripled, "lax.scan"), line(both, "return"))}


@jax.jit
def own_jit(x):
    return jnp.sin(x) * x


def activated(x, y):
    return own_jit(x @ y), jax.nn.silu(x)


def test_a_line_of_a_call_outside_of_the_program_is_not_told():
    """What is jitted on its own is traced here first, and older versions keep no other stack of it."""
    x, y = numbers((72, 56)), numbers((56, 72))
    own_jit(x @ y)
    jax.nn.silu(x)
    found = call(activated, x, y, nesting="jit", memory_budget=1)
    stacks = {each.shape: each.stack for each in told(found).buffers if each.kind == "output"}
    ours, own = line(activated, "return"), line(own_jit.__wrapped__, "return")
    if jax.__version_info__ >= (0, 10):
        assert stacks == {"float32[72,72]": (own, ours), "float32[72,56]": (ours,)}
    else:
        assert stacks == {"float32[72,72]": (own,), "float32[72,56]": ()}


def swished(x):
    return jax.nn.silu(x)


def silenced(x):
    return jax.nn.silu(x)


def test_a_line_of_another_subject_is_not_told():
    x = numbers((88, 40))
    for subject in (swished, silenced):
        found = call(subject, x, nesting="jit", memory_budget=1)
        (out,) = [each for each in told(found).buffers if each.kind == "output"]
        kept = subject is swished or jax.__version_info__ >= (0, 10)
        assert out.stack == ((line(subject, "return"),) if kept else ())


def deep(x, depth=30):
    return deep(x, depth - 1) if depth else jnp.sin(x @ x) @ x


def entered(x):
    return deep(x)


def test_the_whole_stack_of_the_user_is_kept():
    """jax itself keeps ten frames on older versions."""
    found = call(entered, numbers((64, 64)), nesting="jit", memory_budget=1)
    stack = next(each.stack for each in told(found).buffers if each.operation in {"sin", "dot", "dot_general"})
    recursion = line(deep, "return").rpartition(":")[0]
    assert stack == (f"{recursion}:{deep.__code__.co_firstlineno + 1}", line(entered, "return deep"))


def running_sum(p, x):
    last, sums = lax.scan(lambda p, step: (p + step, p.sum()), p, x)
    return last.sum() + p.sum() + sums.sum()


def test_a_copy_that_xla_inserts_for_a_loop_has_the_line_of_the_loop():
    found = call(running_sum, jnp.ones((64, 128)), jnp.ones(5), nesting="jit", memory_budget=1)
    copies = [each for each in told(found).buffers if each.inserted and each.bytes == 64 * 128 * 4]
    assert copies
    assert {each.operation for each in copies} == {"copy"}
    assert {each.place for each in copies} == {line(running_sum, "lax.scan")}
    assert any(row.endswith("inserted by XLA for this loop") for row in rows(found, "buffer"))


def test_a_copy_that_xla_inserts_for_no_loop_has_none():
    found = call(lambda p: (p, p.sum()), jnp.ones((64, 128)), nesting="jit", memory_budget=1)
    copy = told(found).buffers[0]
    assert (copy.operation, copy.place, copy.inserted) == ("copy", "", True)
    assert rows(found, "line")[0].startswith("inserted by XLA, no line   32.0 KiB")
    assert "copy of p by copy" in rows(found, "buffer")[0]


def test_a_program_of_plain_jax_has_its_lines_too():
    with compat.judged_compiles():
        compiled = jax.jit(running_sum).lower(jnp.ones((64, 128)), jnp.ones(5)).compile()
    found = buffers.read(compiled)
    lines = {source(each) for each in found.buffers if each.kind == "temporary" and each.bytes >= KiB}
    assert lines == {line(running_sum, "lax.scan")}


# Captured constants

TABLE = numbers((256, 80))
ARRAY = np.random.default_rng(0).random((256, 96), np.float32)


def uses_a_global(x):
    y = x + 1
    return y @ TABLE


def uses_numpy(x):
    return jnp.asarray(ARRAY).T @ x.T


def inside_a_jit(x):
    @jax.jit
    def inner(x):
        return x @ TABLE

    return inner(x)


def closure():
    mine = numbers((256, 72))

    def uses_a_closure(x):
        return x @ mine

    return uses_a_closure


def nowhere(x):
    return x @ jnp.asarray(np.ones((256, 64), np.float32) * 0.5)


@pytest.mark.parametrize(
    "subject, fragment, name",
    [
        (uses_a_global, "y @ TABLE", "TABLE"),
        (uses_numpy, "jnp.asarray(ARRAY)", "ARRAY"),
        (inside_a_jit, "x @ TABLE", "TABLE"),
        (closure(), "x @ mine", "mine (closure of closure.<locals>.uses_a_closure)"),
        (nowhere, "x @ jnp.asarray", ""),
    ],
    ids=["global", "numpy", "inside a jit", "closure", "nowhere"],
)
def test_a_captured_array_has_the_line_that_uses_it_and_its_name(subject, fragment, name):
    found = call(subject, jnp.ones((4, 256)), nesting="jit")
    (one,) = told(found).captured
    assert (one.name, one.line) == (name, line(subject, fragment))
    assert rows(found, "captured") == [
        f"{one.type} {memory_breakdown.format_bytes(one.bytes)}"
        + (f"   {name}" if name else "")
        + f"   used at {one.line}",
    ]


# Growth: what a further step adds, against programs of plain jax of other lengths


def call_of(x):
    return jnp.tanh(x @ x.T) @ x


X = numbers((32, 96))


def plain(how, length):
    """The peak of a program of plain jax with so many steps, or elements."""
    xs = jnp.stack([X] * length)
    programs = {
        "scan": lambda xs: lax.scan(lambda carry, x: (carry, call_of(x)), None, xs)[1],
        "vmap": jax.vmap(call_of),
        "fori_loop": lambda x: lax.fori_loop(0, length, lambda _, carry: (carry[0], call_of(carry[0])), (x, x))[1],
    }
    programs["while_loop"] = programs["fori_loop"]
    with compat.judged_compiles():
        compiled = jax.jit(programs[how]).lower(X if "loop" in how else xs).compile(compat.compiler_options())
    return buffers.read(compiled).peak


@pytest.mark.parametrize("style", ["argument", "functional", "jax_closure"])
@pytest.mark.parametrize("how", ["scan", "vmap", "while_loop", "fori_loop"])
def test_what_a_step_adds_is_what_it_adds_at_other_lengths(how, style, example):
    nesting = f"jit[functional] > {how}" + (f"[{style}]" if style != "argument" else "")
    found = call(call_of, X, nesting=nesting, memory_budget=1, example=example)
    growth = told(found).growth
    assert growth is not None, text(found)
    assert growth.per_step.peak * 8 == plain(how, 16) - plain(how, 8)
    assert (growth.layer, growth.steps) == (nesting.rpartition(" > ")[2], 2)
    assert len(rows(found, "growth")) == 1


def test_a_step_that_grows_the_state_of_a_mapped_axis_counts_it():
    found = call(nnx.BatchNorm(128, rngs=nnx.Rngs(0)), numbers((16, 128)), nesting="jit > vmap", memory_budget=1)
    assert told(found).growth.per_step.arguments == 16 * 128 * 4
    assert told(found).growth.per_step.temporaries >= 2 * 128 * 4


@pytest.mark.parametrize("nesting", ["jit", "jit > remat", "jit > scan > vmap"])
def test_without_one_loop_there_is_no_growth(nesting):
    found = call(call_of, X, nesting=nesting, memory_budget="0.1x")
    assert broken(found) == ["memory"]
    assert told(found).growth is None


def test_growth_is_measured_only_where_memory_is_violated():
    assert told(call(call_of, X, nesting="jit > scan")).growth is None


def test_the_growth_is_measured_without_running_the_call():
    ran = []

    def counts(x):
        jax.debug.callback(lambda: ran.append(1))
        return x * 2

    found = call(counts, X, nesting="jit > scan", memory_budget=1)
    jax.effects_barrier()
    assert told(found).growth is not None
    # Two steps of the nesting, one call of the un-nested jit.
    assert len(ran) <= 3


def test_growth_of_an_abstract_call():
    abstract = jax.ShapeDtypeStruct(X.shape, X.dtype)
    found = call(call_of, abstract, nesting="jit > scan", memory_budget=1)
    assert told(found).growth.per_step.peak * 8 == plain("scan", 16) - plain("scan", 8)
