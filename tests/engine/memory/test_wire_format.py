"""What XLA writes of a program is read from its bytes: the wire format, and formats that have changed, or are damaged."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from compiling import P, X, compile_, memory_of, stacked_again
from hypothesis import example, given
from hypothesis import strategies as st

from pytest_nnxcheck import CheckError
from pytest_nnxcheck.compat import staging
from pytest_nnxcheck.xla import buffers, hlo
from pytest_nnxcheck.xla.buffers import read
from pytest_nnxcheck.xla.live_ranges import LiveRanges

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
    assert hlo.fields(b"".join(field(number, value) for number, value in written)) == expected


@given(st.lists(NUMBERS), st.lists(NUMBERS))
def test_repeated_numbers_are_read_packed_or_not(packed, single):
    data = field(7, b"".join(map(encoded, packed))) + b"".join(field(7, value) for value in single)
    assert hlo.numbers(hlo.fields(data), 7) == (*packed, *single)


@given(st.binary(max_size=60))
@example(b"\x08")
@example(b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01")
@example(b"\xff" * 12)
@example(b"\x0b\x00")
def test_garbage_is_a_message_or_malformed(data):
    try:
        found = hlo.fields(data)
    except hlo.MalformedProto:
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
    assignment, wrapped = staging.serialized_buffer_assignment(real.memory_analysis())
    if wrapped:
        assignment = bytes(hlo.raw(hlo.fields(assignment), 3))
    return assignment, staging.serialized_hlo_module(real)


def test_without_the_protos_there_are_totals(protos):
    for each in (compiled(), compiled(b"", b""), compiled(protos[0])):
        memory = read(each)
        assert (memory.named, memory.buffers, memory.peak) == (False, (), 13)


def test_the_program_alone_gives_the_buffers(protos):
    """No compiler but that of the CPU gives an assignment."""
    both, alone = read(compiled(*protos)), read(compiled(None, protos[1]))
    assert max(alone.order.totals()) == max(both.order.totals())
    large = [
        {(buffer.kind, buffer.shape, buffer.whole) for buffer in memory.buffers if buffer.bytes >= P.nbytes}
        for memory in (both, alone)
    ]
    assert large[0] == large[1]


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


def instruction(number, opcode, operands=(), called=(), parameter=0, dtype="float32"):
    shape = message(f2=hlo.DTYPES.index(dtype), f3=[4], f5=message(f1=[0]))
    return message(f2=opcode.encode(), f3=shape, f9=parameter, f35=number, f36=list(operands), f38=list(called))


def module_of(*instructions, root, order=()):
    """A program of one computation; ``order`` is its schedule."""
    schedule = message(f1=message(f1=1, f2=message(f1=list(order)))) if order else b""
    return hlo.Module.read(message(f3=message(f2=list(instructions), f5=1, f6=root), f6=1, f7=schedule))


@pytest.mark.parametrize(
    "opcode", ["copy", "while", "fusion", "call", "conditional", "dynamic-update-slice", "bitcast"]
)
def test_an_instruction_made_of_itself_ends(opcode):
    module = module_of(
        instruction(1, "parameter", parameter=3), instruction(2, opcode, operands=(2, 1), called=(1,)), root=2
    )
    assert buffers.origin(module, (2, ())).parameters <= {3}
    assert module.operation(module.instructions[2]) == opcode
    assert LiveRanges(module).origin((2, ()))[0] == 2


@pytest.mark.parametrize(
    "of_parameter, between, copied",
    [
        ("bfloat16", "float32", True),
        ("float16", "float32", True),
        ("float32", "bfloat16", False),
        ("float16", "bfloat16", False),
        ("bfloat16", "int32", False),
    ],
)
def test_a_copy_goes_through_wider_floats_and_back(of_parameter, between, copied):
    module = module_of(
        instruction(1, "parameter", dtype=of_parameter),
        instruction(2, "convert", operands=(1,), dtype=between),
        instruction(3, "convert", operands=(2,), dtype=of_parameter),
        root=3,
    )
    assert buffers.origin(module, (3, ())).copied == copied


def test_the_protos_alone_give_the_names(protos):
    memory = read(compiled(*protos))
    assert memory.named
    assert memory.buffers == memory_of(stacked_again, P, X).buffers
    assert memory.peak == 13 + memory.constants


def test_a_backend_without_totals_is_an_error_not_a_zero():
    with pytest.raises(CheckError, match="gives no memory analysis"):
        read(SimpleNamespace(memory_analysis=lambda: None))


def test_a_chain_of_copies_ends_at_its_parameter():
    chain = [instruction(n, "copy", operands=(n - 1,)) for n in range(2, 5000)]
    module = module_of(instruction(1, "parameter", parameter=3), *chain, root=4999)
    found = buffers.origin(module, (4999, ()))
    assert (found.parameters, found.copied) == ({3}, True)
