"""Buffers and captured constants have the user's line that made or used them, and no other."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checking import broken, call, flat, hint, line, text
from flax import nnx
from healthy import numbers, rngs
from jax import lax
from memory_evidence import KiB, rows, told

from pytest_nnxcheck import check

# Lines


def doubled(x, y):
    return lax.scan(lambda c, row: (c, row * 2), 0, x)[1] @ y


def tripled(x, y):
    return lax.scan(lambda c, row: (c, row * 3), 0, x)[1] @ y


@pytest.mark.slow
def test_lines_are_those_of_the_program_and_not_of_another_that_jax_traced_before():
    """Both scans update slices of one shape: jax 0.10 traces that update once, and keeps the line of the first."""
    x, y = numbers((96, 80)), numbers((80, 96))
    for subject in (doubled, tripled, doubled):
        found = call(subject, x, y, nesting="jit", memory_budget=1)
        lines = {each.place for each in told(found).buffers if each.kind == "temporary" and each.bytes == x.nbytes}
        assert lines == {line(subject, "lax.scan")}


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
    assert "copy of p (XLA: copy)" in rows(found, "buffer")[0]


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
    return x @ jnp.asarray(np.eye(256, 64, dtype=np.float32))


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
        f"{one.type} {one.bytes / KiB:.1f} KiB" + (f"   {name}" if name else "") + f"   used at {one.line}"
    ]


@pytest.mark.parametrize("fill, captures", [(np.zeros, False), (np.ones, False), (np.arange, True)])
def test_an_array_of_one_value_is_no_constant_of_the_program(fill, captures):
    """XLA keeps the value, and makes the array where it is used."""
    found = call(lambda x: x + jnp.asarray(fill(1 << 15).astype(np.float32)).sum(), jnp.ones(8), nesting="jit")
    assert broken(found) == ["memory"] * captures


@pytest.mark.parametrize("uses", [lambda x, table: x @ table, lambda x, table: x + table[x[0].astype(int)].sum(0)])
@pytest.mark.parametrize("equal", [True, False], ids=["equal elements", "others"])
def test_what_is_captured_is_in_the_peak_or_it_is_told_what_xla_keeps(uses, equal):
    """Of an array of equal elements XLA keeps one: the constants of the program are then fewer than the call captures."""
    table = jnp.ones((256, 256)) if equal else numbers((256, 256))
    found = call(lambda x: uses(x, table), jnp.ones((2, 256)), nesting="jit")
    constants = told(found).split.constants
    assert (constants >= 256 * KiB) == (not equal)
    summary, kept = "the call captures 256.0 KiB of constants", f"XLA keeps {constants} B of that in this program"
    assert found.outcome.violations[0].summary == (f"{summary}; {kept}" if equal else summary)
    details = [row for label, row in found.outcome.violations[0].details]
    assert any(row.startswith(f"{kept}: of equal elements it stores one") for row in details) == equal
    assert any(f"constants {constants} B" in row for row in details) == equal
    assert found.outcome.evidence.captured[0].bytes == 256 * KiB


POSITIONS = numbers((5000, 4))


def halved(x, table):
    return jax.jit(lambda x, table: x + table[:2] / 2)(x, table)


def in_a_loop(x, table):
    return jax.lax.scan(lambda x, _: (x + table[:2], None), x, None, length=3)[0]


def along_a_loop(x, table):
    return jax.lax.scan(lambda x, row: (x + row, None), x, table)[0]


def moved_on(x, table):
    def body(step):
        (number, x) = step
        return number + 1, x + jax.lax.dynamic_slice(table, (number, 0), (2, 4))

    return jax.lax.fori_loop(0, 3, lambda _, step: body(step), (0, x))[1]


def in_a_branch(x, table):
    return jax.lax.cond(x.sum() > 0, lambda x: x + table[:2], lambda x: x - table[2:4], x)


def until(x, table):
    return jax.lax.while_loop(lambda x: x.sum() < table[4, 0], lambda x: x + table[:2], x)


@pytest.mark.parametrize(
    "uses, rows",
    [
        (lambda x, table: x + table[:2], 2),
        (in_a_branch, 4),
        (until, 2.25),
        (lambda x, table: x + table[None, 1:3], 2),
        (lambda x, table: x + table[-1], 1),
        (lambda x, table: x + table.astype(jnp.bfloat16)[None, :2], 2),
        (lambda x, table: x + jnp.asarray(np.asarray(table))[:2], 2),
        (lambda x, table: x + table[:2] + table[2:4], 4),
        (halved, 2),
        (in_a_loop, 2),
        (jax.checkpoint(halved), 2),
        (lambda x, table: x + table[:2] + table.sum(), 5000),
        (lambda x, table: x + table[x.sum().astype(int)], 5000),
        (lambda x, table: (x, table), 5000),
        (along_a_loop, 5000),
        (moved_on, 5000),
    ],
)
def test_of_a_captured_array_that_is_cut_the_slices_count(uses, rows):
    """A table of positions is cut to the length of the text: XLA keeps the slices."""
    found = call(lambda x: uses(x, POSITIONS), jnp.ones((2, 4)), nesting="jit")
    (table,) = told(found).captured
    assert table.bytes == rows * 16
    assert broken(found) == ["memory"] * (rows == 5000), text(found)


def test_equal_arrays_of_three_closures_are_told_by_their_names():
    def rope():
        table = jnp.arange(20_000.0).reshape(5000, 4)
        return lambda x, step: x * table[step]

    ropes = [rope(), rope(), rope()]

    def adds(x, step):
        for rotate in ropes:
            x = rotate(x, step)
        return x

    found = call(adds, jnp.ones((2, 4)), jnp.int32(0), nesting="jit")
    assert "the call captures 234.4 KiB of constants" in text(found)
    first, second = rows(found, "captured")
    assert first.startswith("float32[5000,4] 78.1 KiB   ropes[0] (closure of")
    assert second.startswith("float32[5000,4] 78.1 KiB   ropes[1] (closure of")
    assert "hand the captured arrays" in text(found)


class Causal(nnx.Module):
    """Attention of one head with a causal mask, which ``lower`` makes in the call, or which a Variable keeps."""

    def __init__(self, lower=None, kept=None):
        self.project = nnx.Linear(16, 16, rngs=rngs())
        self.lower = lower
        self.mask = None if kept is None else nnx.Variable(kept)

    def __call__(self, x):
        q = self.project(x)
        mask = self.lower(x.shape[1]) if self.lower else self.mask[...]
        return jax.nn.softmax(jnp.where(mask, q @ q.swapaxes(1, 2), -1e9)) @ q


def numpy_lower(size):
    return np.tril(np.ones((size, size), bool))


def jnp_lower(size):
    return jnp.tril(jnp.ones((size, size), bool))


SEQUENCE = (1, 384, 16)


@pytest.mark.slow
def test_a_mask_that_numpy_makes_in_the_call_is_kept_nowhere():
    report = check(Causal(numpy_lower), jnp.ones(SEQUENCE), transforms="jit", sweep="singles", max_examples=0)
    assert report.violations[0].hint == hint("constant of the call")
    assert "the call captures 144.0 KiB of constants" in flat(str(report))
    # In a closure no constants are judged: it is no way out.
    assert not re.search("^  passes ", str(report), re.MULTILINE)


@pytest.mark.parametrize("cured", [Causal(jnp_lower), Causal(kept=jnp_lower(384))], ids=["jnp", "Variable"])
def test_what_numpy_makes_in_the_call_is_made_with_jnp_or_kept(cured):
    assert check(cured, jnp.ones(SEQUENCE), nesting="jit").ok


def test_equal_arrays_that_have_no_name_share_a_row_with_their_number():
    def adds(x, step):
        for _ in range(3):
            x = x * jnp.asarray(np.arange(20_000.0, dtype=np.float32).reshape(5000, 4))[step]
        return x

    found = call(adds, jnp.ones((2, 4)), jnp.int32(0), nesting="jit")
    assert "the call captures 234.4 KiB of constants" in text(found)
    (row,) = rows(found, "captured")
    assert row.startswith("3 x float32[5000,4] 78.1 KiB")
