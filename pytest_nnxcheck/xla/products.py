"""The memory that a matrix product may take on a GPU, beside the peak that its compiler gives without the device.

Without a device the compiler takes a kernel of Triton for a product. On the device it may take one of cuBLAS, which needs a workspace, and reads and writes
whole arrays only: operands and results that the kernel of Triton computes on the way become buffers. One product runs at a time.

On an H200 (jax 0.11.2) no peak of 44 programs was higher by more than that and the buffers of `engine.host_memory`.
"""

from __future__ import annotations

from collections.abc import Iterator

from pytest_nnxcheck.xla.hlo import Instruction, MalformedProto, Module, leaves

__tracebackhide__ = True  # pytest shows the frames of the user, not these

_SAME = frozenset({"bitcast", "reshape", "transpose", "copy"})
"""Opcodes that hand an array on; cuBLAS takes it in another layout too."""
_CUBLAS = (b"__cublas$gemm", b"__cublas$lt$matmul")
"""The products that are calls of cuBLAS before the device is there. It has other functions too, as that for triangular systems."""


def beside_peak(module: Module | None, workspace: int) -> int | None:
    """The most bytes of one product in a compiled program, with the ``workspace`` of cuBLAS; 0 without products, `None` where the program is not known."""
    try:
        return None if module is None else max(_rooms(module, workspace), default=0)
    except (MalformedProto, LookupError):
        return None


def _rooms(module: Module, workspace: int) -> Iterator[int]:
    """The bytes of each product."""
    for op in module.instructions.values():
        if op.opcode == "dot":
            fused = any(caller.opcode == "fusion" for caller in module.callers[op.computation])
            yield workspace + (sum(_on_the_way(module, op)) if fused else 0)
        elif op.opcode == "custom-call" and op.detail.startswith(_CUBLAS):
            *_, last = leaves(op.shape)  # the workspace that the program has already, unless the result is alone
            yield max(workspace - (module.shape((op.id, last)).size if last else 0), 0)


def _on_the_way(module: Module, product: Instruction) -> Iterator[int]:
    """The bytes of the operands that the kernel of a product computes, and of the result if the kernel computes with it."""
    operands = [module.instructions[id_] for id_ in product.operands]
    yield from (_size(module, operand) for operand in operands if _source(module, operand).opcode != "parameter")
    if _source(module, module.instructions[module.roots[product.computation]]) is not product:
        yield _size(module, product)


def _source(module: Module, op: Instruction) -> Instruction:
    """The instruction whose array another one hands on."""
    while op.opcode in _SAME:
        op = module.instructions[op.operands[0]]
    return op


def _size(module: Module, op: Instruction) -> int:
    return module.shape((op.id, ())).size
