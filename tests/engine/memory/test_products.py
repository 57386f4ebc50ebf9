"""What one product may take on a GPU, of programs as XLA writes them: a workspace, and the arrays that a kernel of Triton computes on the way."""

from __future__ import annotations

import pytest
from test_wire_format import instruction, message

from pytest_nnxcheck.xla import hlo, products

WORKSPACE, ARRAY = 1000, 16
"""Any workspace; the bytes of an array of `instruction`."""
P, Q = instruction(1, "parameter"), instruction(2, "parameter", parameter=1)
FUSION = instruction(90, "fusion", (1, 2), called=(2,))


def room_of(*instructions, root, fused=True):
    """That of a program whose fusion, or whose entry, has these instructions."""
    body = message(f2=[P, Q, *instructions], f5=2 if fused else 1, f6=root)
    entry = message(f2=[FUSION], f5=1, f6=90) if fused else b""
    module = hlo.Module.read(message(f3=[entry, body] if fused else [body], f6=1))
    return products.beside_peak(module, WORKSPACE)


DOT = instruction(9, "dot", (1, 2))
BODIES = {
    "of arrays": ((DOT,), 9, 0),
    "of an array in another layout": ((instruction(3, "transpose", (1,)), instruction(9, "dot", (3, 2))), 9, 0),
    "in another layout": ((DOT, instruction(10, "bitcast", (9,))), 10, 0),
    "of what it computes": ((instruction(3, "negate", (1,)), instruction(9, "dot", (3, 2))), 9, 1),
    "of two that it computes": (
        (instruction(3, "negate", (1,)), instruction(4, "convert", (2,)), instruction(9, "dot", (3, 4))),
        9,
        2,
    ),
    "with a bias": ((DOT, instruction(10, "add", (9, 2))), 10, 1),
}


@pytest.mark.parametrize("body, root, arrays", BODIES.values(), ids=BODIES)
def test_a_product_takes_a_workspace_and_the_arrays_that_its_kernel_computes(body, root, arrays):
    assert room_of(*body, root=root) == WORKSPACE + arrays * ARRAY


def test_a_product_that_is_not_fused_has_whole_arrays():
    body = (instruction(3, "negate", (1,)), instruction(9, "dot", (3, 2)), instruction(10, "add", (9, 2)))
    assert room_of(*body, root=10, fused=False) == WORKSPACE


CALLS = {"__cublas$lt$matmul": WORKSPACE, "__cublas$triangularSolve": 0, "__cudnn$convForward": 0}


@pytest.mark.parametrize("function, room", CALLS.items())
def test_of_what_is_called_only_a_product_of_cublas_takes_a_workspace(function, room):
    call = instruction(9, "custom-call", (1, 2)) + message(f28=function.encode())
    assert room_of(call, root=9, fused=False) == room


def test_the_workspace_that_a_program_has_already_is_not_counted_again():
    number, array = hlo.DTYPES.index, {"f3": [4], "f5": message(f1=[0])}
    results = [message(f2=number(dtype), **array) for dtype in ("float32", "int8")]
    shape = message(f2=number("tuple"), f4=results)
    call = message(f2=b"custom-call", f3=shape, f35=9, f36=[1, 2], f28=b"__cublas$gemm")
    assert room_of(call, root=9, fused=False) == WORKSPACE - 4


def test_without_a_product_there_is_nothing_and_without_a_program_nothing_is_known():
    assert room_of(instruction(9, "add", (1, 2)), root=9) == 0
    assert products.beside_peak(None, WORKSPACE) is None
    assert room_of(instruction(9, "dot", (1, 77)), root=9) is None  # the operand is missing
