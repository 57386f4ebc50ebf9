"""The origin of a value in a compiled program: the user's lines, the layer, the parameters it copies, the loop it is for."""

from __future__ import annotations

import itertools
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from pytest_nnxcheck.core.catalogue import CALL_FIRST, STYLES
from pytest_nnxcheck.core.nesting import Layer
from pytest_nnxcheck.core.text import near
from pytest_nnxcheck.xla.hlo import Frame, Instruction, Module, Position

__tracebackhide__ = True  # pytest shows the frames of the user, not these

_LAYER = re.compile(rf"(?P<transform>{CALL_FIRST})\b|(?P<styled>\w+?)_(?P<style>{'|'.join(STYLES)})\b")

_JIT = re.compile(r"jit\(([^()]+)\)")

PLUMBING = frozenset({"parameter", "tuple", "get-tuple-element", "bitcast", "fusion", "call", "constant"})
"""Opcodes that move no bytes, and explain nothing."""

CARRYING = frozenset({"tuple", "bitcast", "copy", "optimization-barrier"})
"""Opcodes between an inserted copy and the loop it is for."""

MARK = "marked.<locals>.root"
"""The name of the frame at which every stack inside the program of a jit ends: see `transforms.root.marked`."""

PROGRAM = "program of "
"""The beginning of the names of frames of a subject's own program: see `subject.subject.labelled`."""


def place(module: Module, instruction: Instruction) -> tuple[tuple[str, ...], str]:
    """``path:line`` of the user's frames that made an instruction, innermost first, each once; or the generated layer that made it, as text of a nesting."""
    stack = frames(module, instruction)
    inside = list(itertools.takewhile(lambda frame: frame.owner != "ours", stack))
    if inside:  # frames further out than those of the plugin are of the test, which called it
        return tuple(dict.fromkeys(near(f"{frame.path}:{frame.line}") for frame in inside)), ""
    layers = itertools.takewhile(lambda frame: frame.owner == "ours", stack)
    match = next(filter(None, (_LAYER.match(frame.function) for frame in layers)), None)
    return (), str(Layer(match["transform"] or match["styled"], match["style"] or STYLES[0])) if match else ""


def frames(module: Module, instruction: Instruction) -> list[Frame]:
    """The frames of the user and of this plugin that made an instruction, innermost first.

    jax caches the trace of a function that is jitted on its own (the update of a slice in a scan, `jax.nn.silu`) with the stack of its first
    call, in whatever program that was. From jax 0.10 on there is a stack of the equation, one of the jit or loop around it, and so on: of each
    stack, the frames that lie inside of the next one are taken. Before, there is one stack. If it is of another program, only its frames
    inside of the jit are taken.
    """
    stacks: list[list[Frame]] = [[]]
    for frame in module.frames_of(instruction):
        if frame.owner == "ours" and frame.function == MARK:
            stacks.append([])
        elif frame.owner in ("user", "installed", "ours"):
            stacks[-1].append(frame)
    if len(stacks) == 1 or not any(stacks[1:-1]):
        return stacks[0] if _here(stacks[0], module.subject) else _named(stacks[0], module.name(instruction))
    *stacks, _ = stacks
    inside = [_inside(inner, outer) for inner, outer in itertools.pairwise(stacks)]
    return [frame for part in (*inside, stacks[-1]) for frame in part]


def _here(stack: list[Frame], subject: str | None) -> bool:
    """True if a stack goes through this subject or a layer. Always true in a program that the plugin did not stage."""
    first = next((frame.function for frame in stack if frame.owner == "ours"), "")
    return subject is None or first == subject or (first != "" and not first.startswith(PROGRAM))


def _named(stack: list[Frame], name: str) -> list[Frame]:
    """The frames of a stack from elsewhere that lie inside the jits of an operation's name, ``jit(f)/jit(main)/jit(g)/sin``."""
    jits = _JIT.findall(name)[1:]
    users = list(itertools.takewhile(lambda frame: frame.owner != "ours", stack))
    last = max((number for number, frame in enumerate(users) if frame.function.rpartition(".")[2] in jits), default=-1)
    return users[: last + 1]


def _inside(inner: list[Frame], outer: list[Frame]) -> list[Frame]:
    """The frames of a stack that lie inside the call whose stack is the outer one."""
    if inner[len(inner) - len(outer) :] == outer:
        return inner[: len(inner) - len(outer)]
    same = [(frame.path, frame.function) == (outer[0].path, outer[0].function) for frame in inner] if outer else []
    return inner[: same.index(True)] if any(same) else []


@dataclass(frozen=True, slots=True)
class Origin:
    """The parameters of the program that a value is made of."""

    parameters: frozenset[int]
    copied: bool
    """True if it is made by copies only. A copy may go through wider floats: XLA for the CPU copies floats of 16 bits so."""
    through: frozenset[Position]
    """The values on the way."""
    operations: tuple[str, ...] = ()
    """The opcodes on the shortest way from a parameter, each once."""


def origin(module: Module, position: Position) -> Origin:
    """Follow a value back through copies to the entry parameters. Loops end: no value is visited twice."""
    parameters: dict[int, Position] = {}
    copied, after, ahead = True, {position: position}, deque([position])
    while ahead:
        at = ahead.popleft()
        instruction = module.instructions[at[0]]
        if instruction.opcode == "parameter" and instruction.computation == module.entry:
            parameters.setdefault(instruction.parameter, at)
            continue
        before = _copied_from(module, instruction, at[1])
        copied = copied and before is not None
        for source in before or ():
            if source not in after:
                after[source] = at
                ahead.append(source)
    copied = copied and all(_keeps(module, after, parameter) for parameter in parameters.values())
    operations = _operations(module, after, parameters[min(parameters)]) if copied and parameters else ()
    return Origin(frozenset(parameters), copied, frozenset(after), operations)


def _keeps(module: Module, values: Iterable[Position], parameter: Position) -> bool:
    """True if every dtype on the way from a parameter holds all values of the parameter's dtype."""
    of_parameter = module.shape(parameter)
    types = {shape.dtype: shape for shape in map(module.shape, values)}
    return all(shape.dtype == of_parameter.dtype or shape.bits > of_parameter.bits for shape in types.values())


def _operations(module: Module, after: dict[Position, Position], at: Position) -> tuple[str, ...]:
    """The opcodes that move bytes, each once, on the way from a value to the one that the search began with; entering the body of a loop is a ``while``."""
    opcodes: dict[str, None] = {}
    while after[at] != at:
        at = after[at]
        instruction = module.instructions[at[0]]
        callers = module.callers.get(instruction.computation, ())
        enters = instruction.opcode == "parameter" and any(caller.opcode == "while" for caller in callers)
        opcodes["while" if enters else instruction.opcode] = None
    return tuple(opcode for opcode in opcodes if opcode not in PLUMBING)


def made(module: Module, instruction: Instruction) -> tuple[Instruction, bool]:
    """(instruction whose lines explain this one, whether XLA inserted this one): itself, or the loop that XLA inserted it for."""
    if instruction.opcode == "constant" or module.frames_of(instruction):
        return instruction, False
    owner = instruction if instruction.opcode == "while" else loop(module, instruction)
    if owner is None or module.frames_of(owner):
        return owner or instruction, True
    # A loop that XLA has rewritten has no lines. Its counter has those of the loop, and the fewest frames in the body.
    return module.plainest_of(owner.called[0]) or owner, True


def loop(module: Module, start: Instruction) -> Instruction | None:
    """The ``while`` that XLA inserted an instruction for: the one that it feeds, or else the one whose body it is in."""
    fed = _reached(start, lambda op: module.users.get(op.id, ()) if op is start or op.opcode in CARRYING else ())
    around = _reached(start, lambda op: module.callers.get(op.computation, ()))
    return next((op for op in itertools.chain(fed, around) if op.opcode == "while"), None)


def _reached(start: Instruction, steps: Callable[[Instruction], Iterable[Instruction]]) -> Iterator[Instruction]:
    """The instructions that steps from one lead to, nearest first, each once."""
    ahead, seen = deque([start]), {start.id}
    while ahead:
        for op in steps(ahead.popleft()):
            if op.id not in seen:
                seen.add(op.id)
                ahead.append(op)
                yield op


COPIED = {
    "bitcast": 1,
    "reshape": 1,
    "dynamic-slice": 1,
    "optimization-barrier": 1,
    "dynamic-update-slice": 2,
    "concatenate": None,
}
"""The number of operands, from the first, whose elements an instruction copies; `None` is all. The others are indices."""


def _copied_from(module: Module, instruction: Instruction, index: tuple[int, ...]) -> Iterable[Position] | None:
    """The values that a value is a copy of: none for a constant; `None` if the value is computed here."""
    operands = instruction.operands
    match instruction.opcode:
        case "tuple":
            return [(operands[index[0]], index[1:])]
        case "get-tuple-element":
            return [(operands[0], (instruction.tuple_index, *index))]
        case opcode if opcode in COPIED:
            return [(operand, index) for operand in operands[: COPIED[opcode]]]
        case "copy" | "broadcast" | "convert":
            return _same_elements(module, instruction)
        case "while":
            return [(operands[0], index), (module.roots[instruction.called[0]], index)]
        case "fusion" | "call" | "conditional":
            return [(module.roots[computation], index) for computation in instruction.called]
        case "parameter":
            return _passed(module, instruction, index)
        case "constant":
            return []
    return None


def _same_elements(module: Module, instruction: Instruction) -> Iterable[Position] | None:
    """The operand of a copy, convert or broadcast, if its elements come out as they are; `None` otherwise."""
    operand = (instruction.operands[0], ())
    before, after = module.shape(operand), module.shape((instruction.id, ()))
    match instruction.opcode:
        case "copy":  # one that changes the layout is a transpose
            same = before.order == after.order
        case "convert":  # `_keeps` looks for a loss of precision on the whole way
            same = "float" in before.dtype and "float" in after.dtype
        case _:  # a broadcast of one number, or of axes of length one
            same = before.elements in (1, after.elements)
    return [operand] if same else None


def _passed(module: Module, parameter: Instruction, index: tuple[int, ...]) -> Iterable[Position] | None:
    """The values that the callers of a computation pass to one of its parameters; `None` if one of them is no known kind of call."""
    arguments: list[Position] = []
    for caller in module.callers.get(parameter.computation, ()):
        match caller.opcode:
            case "while":
                arguments += [(caller.operands[0], index), (module.roots[caller.called[0]], index)]
            case "fusion" | "call":
                arguments.append((caller.operands[parameter.parameter], index))
            case "conditional":
                branches = zip(caller.operands[1:], caller.called, strict=False)
                arguments += [(given, index) for given, branch in branches if branch == parameter.computation]
            case _:
                return None
    return arguments or None
