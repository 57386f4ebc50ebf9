"""What makes up the peak of a compiled program: totals, names, lines, and which buffers are copies of the state."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reports
from checking import source
from flax import nnx
from healthy import FLAX
from hypothesis import example, given
from hypothesis import strategies as st
from jax import lax

from pytest_nnxcheck import compat
from pytest_nnxcheck.core.errors import CheckError
from pytest_nnxcheck.inspection import buffers, hlo, origins, protobuf
from pytest_nnxcheck.inspection.buffers import read, state_copies

STATE = 0
P = jnp.ones((64, 128))
X = jnp.ones((128,))


def compile_(function, *args, donate=(), options=None):
    with compat.judged_compiles():
        return jax.jit(function, donate_argnums=donate, keep_unused=True).lower(*args).compile(compiler_options=options)


def memory_of(function, *args, donate=()):
    return read(compile_(function, *args, donate=donate))


def functional(model, calls=1):
    """``run(state, x)`` that merges the model and calls it, and the state: flat parameter numbers are those of the leaves."""
    graphdef, state = nnx.split(model)

    def run(state, x):
        merged = nnx.merge(graphdef, state)
        for _ in range(calls):
            x = merged(x)
        return x

    return run, state


def nbytes(state):
    return sum(leaf.nbytes for leaf in jax.tree.leaves(state))


# Totals


@pytest.mark.parametrize("donate, times", [((), 4.0), ((0,), 2.0)], ids=["kept", "donated"])
def test_ten_convolutions_hold_four_inputs_and_two_where_it_is_donated(donate, times):
    (x,) = reports.inputs_926()
    memory = memory_of(reports.ten_convolutions, x, donate=donate)
    assert round(memory.peak / x.nbytes, 3) == times
    assert sum(buffer.bytes == x.nbytes for buffer in memory.buffers) == times
    temporaries = {b.operation for b in memory.buffers if b.kind == "temporary" and b.bytes == x.nbytes}
    assert temporaries <= {"convolution", "conv_general_dilated"}


@pytest.mark.parametrize("shape", [(64, 128), (1, 4096), (300, 128)])
def test_captured_constants_are_counted_exactly(shape):
    """With one row jax 0.12 writes the constant into a fusion, and no allocation counts it."""
    weights = np.random.default_rng(0).random(shape, np.float32)
    memory = memory_of(lambda x: jnp.asarray(weights) @ x, jnp.ones(shape[1]))
    passed = memory_of(lambda weights, x: weights @ x, weights, jnp.ones(shape[1]))
    assert memory.constants == weights.nbytes
    assert passed.constants == 0
    assert memory.peak == passed.peak
    assert [buffer.bytes for buffer in memory.buffers if buffer.kind == "constant"] == [weights.nbytes]


def test_peak_is_the_sum_without_what_is_aliased():
    memory = memory_of(lambda p, x: (p + x, x.sum()), P, X, donate=(0,))
    assert memory.named
    assert memory.aliased == P.nbytes
    assert memory.peak == memory.arguments + memory.outputs + memory.temporaries + memory.constants - P.nbytes


def scans(calls):
    run, state = functional(reports.ScanOverRemat(nnx.Rngs(0)), calls)
    return run, state, *reports.inputs_scan_over_remat()


def attention():
    model = nnx.MultiHeadAttention(4, 64, decode=False, rngs=nnx.Rngs(0))
    return *functional(model), jnp.ones((2, 16, 64))


def gradient():
    run, state = functional(nnx.Linear(64, 64, rngs=nnx.Rngs(0)), calls=3)
    return jax.grad(lambda state, x: (run(state, x) ** 2).mean()), state, jnp.ones((16, 64))


PROGRAMS = {
    "one scan": lambda: scans(1),
    "three scans": lambda: scans(3),
    "attention": attention,
    "gradient": gradient,
    "convolutions": lambda: (reports.ten_convolutions, *reports.inputs_926()),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_buffers_cover_the_totals(name):
    memory = memory_of(*PROGRAMS[name]())
    of = {kind: sum(b.bytes for b in memory.buffers if b.kind == kind) for kind in ("argument", "output", "temporary")}
    assert of["argument"] == memory.arguments
    assert 0.97 * memory.outputs <= of["output"] <= memory.outputs
    assert 0.97 * memory.temporaries <= of["temporary"] <= memory.temporaries
    assert list(memory.buffers) == sorted(memory.buffers, key=lambda buffer: -buffer.bytes)


# Names and lines


def two_products(p, x):
    q = p @ p.T
    return q @ (p + x)


def test_a_buffer_has_the_shape_and_the_line_of_the_user():
    memory = memory_of(two_products, P, X)
    lines = [f"{__file__}:{two_products.__code__.co_firstlineno + n}" for n in (1, 2)]
    found = [(b.shape, b.kind, source(b)) for b in memory.buffers if b.shape in {"float32[64,64]", "float32[64,128]"}]
    assert ("float32[64,64]", "temporary", lines[0]) in found
    assert ("float32[64,128]", "output", lines[1]) in found
    assert ("float32[64,128]", "argument", "") in found
    assert [buffer.parameter for buffer in memory.buffers if buffer.kind == "argument"] == [0, 1]


class Doubled(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(128, 256, rngs=rngs)

    def __call__(self, x):
        return self.linear(x)


def test_the_line_is_the_users_not_that_of_flax():
    run, state = functional(Doubled(nnx.Rngs(0)))
    memory = memory_of(run, state, jnp.ones((32, 128)))
    call = f"{__file__}:{Doubled.__call__.__code__.co_firstlineno + 1}"
    assert call in {source(buffer) for buffer in memory.buffers if buffer.kind in {"temporary", "output"}}
    assert not any("flax" in source(buffer) for buffer in memory.buffers)


def test_a_copy_that_xla_inserts_has_no_line():
    memory = memory_of(lambda p, x: (p, x + 1), P, X)
    (copy,) = [buffer for buffer in memory.buffers if buffer.whole]
    assert (copy.operation, source(copy)) == ("copy", "")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int8", "uint32", "bool", "complex64", "float8_e4m3fn"])
def test_dtypes_are_named_as_in_jax(dtype):
    memory = memory_of(lambda x: x, jnp.zeros((3, 5), dtype))
    assert memory.buffers[0].shape == f"{dtype}[3,5]"


# Copies of the state


def in_a_loop(p, x):
    """The state is carried through a loop that leaves it alone."""

    def body(carry):
        step, p, x = carry
        return step + 1, p, jnp.tanh(p.T @ (p @ x))

    return lax.while_loop(lambda carry: carry[0] < 3, body, (0, p, x))[1:]


def stacked_again(p, x):
    """A scan hands every slice back unchanged, and the stack that it makes is used afterwards."""
    x, again = lax.scan(lambda x, row: (jnp.tanh(x + row), row), x, p)
    return lax.scan(lambda x, row: (jnp.tanh(x + row), None), x, again)[0], again


COPIES = {
    "returned": lambda p, x: (p, x + 1),
    "behind a barrier": lambda p, x: (lax.optimization_barrier(p), x + 1),
    "carried by a loop and returned": in_a_loop,
    "reshaped": lambda p, x: (p.reshape(128, 64), x + 1),
    "in both branches": lambda p, x: lax.cond(x[0] > 0, lambda p: p, lambda p: p, p),
    "stacked again by a scan": stacked_again,
}


@pytest.mark.parametrize("name", COPIES)
def test_whole_copies_of_a_parameter_are_found(name):
    memory = memory_of(COPIES[name], P, X)
    (copy,) = state_copies(memory, {STATE})
    assert (copy.bytes, copy.parameter, copy.kind) == (P.nbytes, STATE, "output")
    assert state_copies(memory, {1, 2, 3}) == ()


@pytest.mark.parametrize("name", ["returned", "behind a barrier", "carried by a loop and returned"])
def test_a_donated_parameter_that_is_returned_is_no_copy(name):
    memory = memory_of(COPIES[name], P, X, donate=(0,))
    assert memory.named
    assert memory.aliased == P.nbytes
    assert state_copies(memory, {STATE}) == ()


def scanned(step):
    """The sum of a state that a scan carries and changes: the copy it starts from is what the changes are written to."""

    def program(p, x):
        return lax.scan(lambda p, i: (step(p, x, i), None), p, jnp.arange(3))[0].sum()

    return program


def factored(p, x):
    """LAPACK wants columns first: XLA turns the matrix by an instruction that it calls a copy."""
    return lax.linalg.qr(p, full_matrices=False)[1]


def one_row_over_and_over(p, x):
    return jnp.broadcast_to(lax.dynamic_index_in_dim(p, x[0].astype(int)), p.shape)


NO_COPIES = {
    "factored": factored,
    "one row over and over": one_row_over_and_over,
    "transposed": lambda p, x: p.T,
    "transposed and flattened": lambda p, x: p.T.reshape(64, 128),
    "reversed": lambda p, x: p[::-1],
    "converted": lambda p, x: p.astype(jnp.bfloat16),
    "converted and back": lambda p, x: p.astype(jnp.bfloat16).astype(jnp.float32),
    "scaled": lambda p, x: p * 2,
    "a row written": lambda p, x: p.at[3].set(x),
    "one branch changes it": lambda p, x: lax.cond(x[0] > 0, lambda p: p, lambda p: p * 2, p),
    "doubled along an axis": lambda p, x: jnp.stack([p, p]),
    "mapped": lambda p, x: jax.vmap(lambda i: (p, x * i))(jnp.arange(2.0)),
    "half of it": lambda p, x: p[:32],
    "read by a loop": lambda p, x: in_a_loop(p, x)[1],
    "updated in a scan": scanned(lambda p, x, i: p - jnp.sin(p * i)),
    "a row updated in a scan": scanned(lambda p, x, i: lax.dynamic_update_slice(p, p.sum(0)[None] * x, (i, 0))),
}


@pytest.mark.parametrize("name", NO_COPIES)
def test_what_is_computed_from_a_parameter_is_no_copy(name):
    memory = memory_of(NO_COPIES[name], P, X)
    assert memory.named
    assert state_copies(memory, {STATE}) == ()


def test_two_parameters_that_change_places_are_no_copies():
    memory = memory_of(lambda p, q: lax.fori_loop(0, 3, lambda i, pair: (pair[1], pair[0]), (p, q)), P, P + 1)
    assert memory.temporaries >= 2 * P.nbytes
    assert state_copies(memory, {0, 1}) == ()


def test_optimization_level_zero_gives_the_same_copies():
    run, state = functional(reports.ScanOverRemat(nnx.Rngs(0)), calls=3)
    (x,) = reports.inputs_scan_over_remat()
    fast = read(compile_(run, state, x, options={"xla_backend_optimization_level": 0}))
    assert state_copies(fast, {0}) == state_copies(memory_of(run, state, x), {0})


def test_a_part_of_a_parameter_is_named_and_is_not_whole():
    run, state = functional(reports.ScanOverRemat(nnx.Rngs(0), how="functional"))
    memory = memory_of(run, state, *reports.inputs_scan_over_remat())
    (part,) = [buffer for buffer in memory.buffers if buffer.shape == "float32[128,128]"]
    assert (part.parameter, part.whole) == (0, False)


@pytest.mark.parametrize("calls", [1, 2, 4])
def test_a_scan_over_remat_copies_its_stack_for_every_further_call(calls):
    # jax keeps the stack of whoever traced the same update of a slice first; within the plugin's programs that is seen through.
    jax.clear_caches()
    run, state = functional(reports.ScanOverRemat(nnx.Rngs(0)), calls)
    memory = memory_of(run, state, *reports.inputs_scan_over_remat())
    copies = state_copies(memory, {0})
    assert [(copy.shape, copy.bytes) for copy in copies] == [("float32[8,128,128]", nbytes(state))] * (calls - 1)
    assert {source(copy).rpartition(":")[0] for copy in copies} <= {reports.__file__}
    assert round(memory.peak / nbytes(state), 1) == calls + 0.1


@pytest.mark.parametrize("how", reports.cures())
def test_the_cures_of_a_scan_over_remat_copy_nothing(how):
    run, state = functional(reports.ScanOverRemat(nnx.Rngs(0), how), calls=2)
    memory = memory_of(run, state, *reports.inputs_scan_over_remat())
    assert memory.named
    assert state_copies(memory, {0}) == ()
    assert round(memory.peak / nbytes(state), 1) == 1.1


@pytest.mark.skipif(FLAX >= (0, 10, 7), reason="newer flax rejects the program of google/flax#4871")
@pytest.mark.parametrize("call_first, times", [(True, 1.0), (False, 0.0)], ids=["call first", "scan only"])
def test_the_report_4871_holds_its_stack_twice(call_first, times):
    model = reports.report_4871(nnx.Rngs(0))
    state = nnx.state(model)
    with compat.judged_compiles():
        memory = read(reports.run_4871(model, call_first, loops=2).lower(state, 0.0).compile())
    assert round(memory.temporaries / nbytes(state), 1) == times
    copies = state_copies(memory, {0})
    assert [copy.shape for copy in copies] == ["float32[50,200,200]"] * round(times)


def test_nnx_jit_without_donation_returns_a_copy_of_all_state():
    model = nnx.Linear(64, 128, rngs=nnx.Rngs(0))

    @jax.jit
    def plain(state, x):
        return nnx.merge(nnx.split(model)[0], state)(x), state

    with compat.judged_compiles():
        memory = read(plain.lower(nnx.state(model), jnp.ones((4, 64))).compile())
    assert sum(copy.bytes for copy in state_copies(memory, {0, 1})) == nbytes(nnx.state(model))


# The wire format


def encoded(number):
    head, rest = number & 0x7F, number >> 7
    return bytes([head | 0x80]) + encoded(rest) if rest else bytes([head])


def field(number, value):
    if isinstance(value, int):
        return encoded(number << 3) + encoded(value)
    return encoded(number << 3 | 2) + encoded(len(value)) + value


def message(**values):
    """A message from ``f1=..., f2=[...]``."""
    pairs = ((int(name[1:]), value) for name, value in values.items())
    return b"".join(field(n, one) for n, many in pairs for one in (many if isinstance(many, list) else [many]))


NUMBERS = st.integers(0, 2**64 - 1)
FIELDS = st.tuples(st.integers(1, 2**29 - 1), NUMBERS | st.binary(max_size=200))


@given(st.lists(FIELDS, max_size=20))
def test_fields_are_read_as_they_were_written(written):
    expected = {}
    for number, value in written:
        expected.setdefault(number, []).append(value)
    assert protobuf.fields(b"".join(field(number, value) for number, value in written)) == expected


@given(st.lists(NUMBERS), st.lists(NUMBERS))
def test_repeated_numbers_are_read_packed_or_not(packed, single):
    data = field(7, b"".join(map(encoded, packed))) + b"".join(field(7, value) for value in single)
    assert protobuf.numbers(protobuf.fields(data), 7) == (*packed, *single)


def test_fixed_width_numbers_are_stepped_over():
    data = encoded(1 << 3 | 1) + b"\xff" * 8 + encoded(2 << 3 | 5) + b"\xff" * 4 + field(3, 4)
    assert protobuf.fields(data)[3] == [4]


@given(st.binary(max_size=60))
@example(b"\x08")
@example(b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01")
@example(b"\xff" * 12)
@example(b"\x0b\x00")
def test_garbage_is_a_message_or_malformed(data):
    try:
        found = protobuf.fields(data)
    except protobuf.MalformedProto:
        return
    assert sum(map(len, found.values())) <= len(data)


# Drift of the formats


class Totals:
    """The totals of a program that jaxlib gives, and the figure that must not be used."""

    argument_size_in_bytes = 7
    output_size_in_bytes = 5
    temp_size_in_bytes = 3
    alias_size_in_bytes = 2

    def __init__(self, assignment=None):
        if assignment is not None:
            self.serialized_buffer_assignment_proto = assignment

    @property
    def peak_memory_in_bytes(self):
        raise AssertionError("leaves the temporaries out")


def compiled(assignment=None, module=None):
    """Stands in for what ``lowered.compile()`` returns, with these protos."""
    proto = SimpleNamespace(as_serialized_hlo_module_proto=lambda: module)
    executable = SimpleNamespace(hlo_modules=lambda: [proto])
    return SimpleNamespace(memory_analysis=lambda: Totals(assignment), runtime_executable=lambda: executable)


@pytest.fixture(scope="module")
def protos():
    real = compile_(stacked_again, P, X)
    assignment, wrapped = compat.serialized_buffer_assignment(real)
    if wrapped:
        assignment = bytes(protobuf.raw(protobuf.fields(assignment), 3))
    return assignment, compat.serialized_hlo_module(real)


def test_the_protos_alone_give_the_names(protos):
    memory = read(compiled(*protos))
    assert memory.named
    assert memory.buffers == memory_of(stacked_again, P, X).buffers
    assert memory.peak == 13 + memory.constants


def test_without_the_protos_there_are_totals(protos):
    for each in (compiled(), compiled(b"", b""), compiled(protos[0]), compiled(None, protos[1])):
        memory = read(each)
        assert (memory.named, memory.buffers, memory.peak) == (False, (), 13)


def test_an_executable_without_modules_gives_totals(protos):
    each = compiled(*protos)
    del each.runtime_executable
    assert read(each).named is False


def test_a_backend_without_totals_is_an_error_not_a_zero():
    with pytest.raises(CheckError, match="gives no memory analysis"):
        read(SimpleNamespace(memory_analysis=lambda: None))


def test_fields_that_are_not_known_change_nothing(protos):
    unknown = field(1000, b"something new") + field(1001, 3)
    assert read(compiled(*(proto + unknown for proto in protos))) == read(compiled(*protos))


@given(st.binary(max_size=200), st.binary(max_size=200))
def test_garbage_never_raises(assignment, module):
    assert read(compiled(assignment, module)).arguments == 7


@given(data=st.data(), which=st.sampled_from([0, 1]))
def test_damaged_protos_never_raise(protos, data, which):
    damaged = bytearray(protos[which])
    for at in data.draw(st.lists(st.integers(0, len(damaged) - 1), min_size=1, max_size=5)):
        damaged[at] = data.draw(st.integers(0, 255))
    end = data.draw(st.integers(0, len(damaged)) | st.just(len(damaged)))
    both = [bytes(damaged[:end]) if which == at else proto for at, proto in enumerate(protos)]
    memory = read(compiled(*both))
    assert memory.arguments == 7
    assert memory.named or memory.buffers == ()


def instruction(number, opcode, operands=(), called=(), parameter=0):
    shape = message(f2=11, f3=[4], f5=message(f1=[0]))
    return message(f2=opcode.encode(), f3=shape, f9=parameter, f35=number, f36=list(operands), f38=list(called))


def module_of(*instructions, root):
    return hlo.Module.read(message(f3=message(f2=list(instructions), f5=1, f6=root), f6=1))


@pytest.mark.parametrize(
    "opcode", ["copy", "while", "fusion", "call", "conditional", "dynamic-update-slice", "bitcast"]
)
def test_an_instruction_made_of_itself_ends(opcode):
    module = module_of(
        instruction(1, "parameter", parameter=3), instruction(2, opcode, operands=(2, 1), called=(1,)), root=2
    )
    assert origins.origin(module, (2, ())).parameters <= {3}
    assert module.operation(module.instructions[2]) == opcode
    assert buffers._defined(module, (2, ()))[0] == 2


def test_a_chain_of_copies_ends_at_its_parameter():
    chain = [instruction(n, "copy", operands=(n - 1,)) for n in range(2, 5000)]
    module = module_of(instruction(1, "parameter", parameter=3), *chain, root=4999)
    found = origins.origin(module, (4999, ()))
    assert (found.parameters, found.copied) == ({3}, True)
