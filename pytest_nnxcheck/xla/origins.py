"""Where a value of a compiled program comes from: the user's lines, the layer, the parameters it copies, the loop it is for."""

from __future__ import annotations

import functools
import itertools
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any

from pytest_nnxcheck.compat.primitives import REMATS
from pytest_nnxcheck.compat.variables import is_library_file
from pytest_nnxcheck.core.catalogue import CALL_FIRST, STYLES
from pytest_nnxcheck.core.nesting import Layer
from pytest_nnxcheck.core.text import near
from pytest_nnxcheck.xla.hlo import Frame, Instruction, Module, Position

__tracebackhide__ = True  # pytest shows the frames of the user, not these

OWN = str(Path(__file__).parents[1])
"""The frames of this plugin: what lies further out called it, and made nothing of the program."""

_LAYER = re.compile(rf"(?P<transform>{CALL_FIRST})\b|(?P<styled>\w+?)_(?P<style>{'|'.join(STYLES)})\b")

_JIT = re.compile(r"jit\(([^()]+)\)")

PLUMBING = frozenset({"parameter", "tuple", "get-tuple-element", "bitcast", "fusion", "call", "constant"})
"""Opcodes that move no bytes: a value has a buffer, and an operation worth telling, elsewhere."""

BARRIERS = REMATS | {"optimization_barrier"}
"""What jax calls the barrier of a remat, and one that is written."""

CARRYING = frozenset({"tuple", "bitcast", "copy", "optimization-barrier"})
"""Opcodes between an inserted copy and the loop it is for."""

MARK = "marked.<locals>.root"
PROGRAM = "program of "


def marked(f: Callable[..., Any]) -> Callable[..., Any]:
    """The function that the jit of a program traces: its frame is the end of every stack inside the program."""

    @functools.wraps(f)
    def root(*args: Any) -> Any:
        return f(*args)

    return root


def labelled(program: Callable[..., Any], function: Any) -> None:
    """Give the program of a subject's function a name of its own, which its frames are known by."""
    code = getattr(function, "__code__", None)
    where = f"{code.co_filename}:{code.co_firstlineno}" if code else repr(type(function))
    name = f"{PROGRAM}{getattr(function, '__qualname__', '')} at {where}"
    program.__code__ = renamed(program.__code__, name)


@functools.lru_cache(maxsize=256)
def renamed(code: CodeType, name: str) -> CodeType:
    """The same code under another name: one object a name, since older jax keeps locations by code, which is compared without its qualified name."""
    return code.replace(co_name=name, co_qualname=name)


def stack(module: Module, instruction: Instruction) -> tuple[str, ...]:
    """``path:line`` of the user's frames, innermost first, each once; empty where XLA, or a layer, inserted the instruction.

    Frames further out than the plugin's are those of the test, which called it.
    """
    inside = itertools.takewhile(lambda frame: not frame.path.startswith(OWN), frames(module, instruction))
    return tuple(dict.fromkeys(near(f"{frame.path}:{frame.line}") for frame in inside))


def layer(module: Module, instruction: Instruction) -> str:
    """The generated layer that made an instruction, as a nesting has it; empty where a line of the user lies further in."""
    inside = itertools.takewhile(lambda frame: frame.path.startswith(OWN), frames(module, instruction))
    match = next(filter(None, (_LAYER.match(frame.function) for frame in inside)), None)
    return str(Layer(match["transform"] or match["styled"], match["style"] or STYLES[0])) if match else ""


def frames(module: Module, instruction: Instruction) -> list[Frame]:
    """The frames of the user and of this plugin that made an instruction, innermost first.

    jax keeps the trace of a function that is jitted on its own (the update of a slice in a scan, `jax.nn.silu`), and with it the stack of the first
    call, of whatever program that was. From jax 0.10 on there is one stack after the other, of the equation, of the jit or loop that it is in, and
    so on: each is held against the next one out. Before, there is one stack, which may not be of this program. Where a stack does not go
    through the call, only what lies inside the jit is taken.
    """
    key = instruction.metadata
    if key not in module.stacks:
        module.stacks[key] = _frames(module, instruction)
    return module.stacks[key]


def _frames(module: Module, instruction: Instruction) -> list[Frame]:
    stacks: list[list[Frame]] = [[]]
    for frame in module.frames_of(instruction):
        if frame.path.startswith(OWN) and frame.function == MARK:
            stacks.append([])
        elif not is_library_file(frame.path) or frame.path.startswith(OWN):
            stacks[-1].append(frame)
    if len(stacks) == 1 or not any(stacks[1:-1]):
        return stacks[0] if _here(stacks[0], module.subject) else _named(stacks[0], module.name(instruction))
    *stacks, _ = stacks
    inside = [_inside(inner, outer) for inner, outer in itertools.pairwise(stacks)]
    return [frame for part in (*inside, stacks[-1]) for frame in part]


def _here(stack: list[Frame], subject: str | None) -> bool:
    """Whether a stack is of this subject, or of a layer; that of a program which the plugin did not stage is."""
    first = next((frame.function for frame in stack if frame.path.startswith(OWN)), "")
    return subject is None or first == subject or (first != "" and not first.startswith(PROGRAM))


def _named(stack: list[Frame], name: str) -> list[Frame]:
    """The frames of a stack from elsewhere that lie inside the jits of an operation's name, ``jit(f)/jit(main)/jit(g)/sin``."""
    jits = _JIT.findall(name)[1:]
    users = list(itertools.takewhile(lambda frame: not frame.path.startswith(OWN), stack))
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
    """What a value is made of: the entry parameters it reaches, whether by copies only, and the values on the way.

    A copy may go through wider floats and back, as XLA for the CPU makes one of 16 bit floats. ``operations`` are the opcodes on the shortest
    way, from the parameter to the value, each once.
    """

    parameters: frozenset[int]
    copied: bool
    through: frozenset[Position]
    operations: tuple[str, ...] = ()


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
    way = _way(after, parameters[min(parameters)]) if copied and parameters else ()
    return Origin(frozenset(parameters), copied, frozenset(after), tuple(_operations(module, way)))


def _keeps(module: Module, values: Iterable[Position], parameter: Position) -> bool:
    """Whether no value on the way from a parameter is of a type that has not room for all of the parameter's."""
    of_parameter = module.shape(parameter)
    types = {shape.dtype: shape for shape in map(module.shape, values)}
    return all(shape.dtype == of_parameter.dtype or shape.bits > of_parameter.bits for shape in types.values())


def _callers(module: Module, computation: int) -> Iterator[Instruction]:
    """The instructions that call a computation, and those that call theirs, nearest first."""
    seen: set[int] = set()
    ahead = deque([computation])
    while ahead:
        for caller in module.callers.get(ahead.popleft(), ()):
            if caller.id not in seen:
                seen.add(caller.id)
                ahead.append(caller.computation)
                yield caller


def _way(after: dict[Position, Position], at: Position) -> Iterator[Position]:
    """The values from one on to the value that the search began with."""
    while after[at] != at:
        at = after[at]
        yield at


def _operations(module: Module, way: Iterable[Position]) -> Iterator[str]:
    """The opcodes on a way that move bytes, each once; a step into the body of a loop is its ``while``."""
    seen: set[str] = set()
    for number, _ in way:
        instruction = module.instructions[number]
        opcode = instruction.opcode
        if opcode == "parameter" and any(
            caller.opcode == "while" for caller in module.callers.get(instruction.computation, ())
        ):
            opcode = "while"
        if opcode not in seen | PLUMBING:
            seen.add(opcode)
            yield opcode


def made(module: Module, users: dict[int, list[Instruction]], instruction: Instruction) -> tuple[Instruction, bool]:
    """The instruction whose lines tell of one: itself, or that of the loop that XLA inserted it for; and whether XLA inserted it.

    A loop that XLA has rewritten has no lines left: then what its body has with the fewest frames, such as its counter, stands for it. What XLA
    copies at the barrier of a remat has the name and the lines of that.
    """
    if instruction.opcode == "constant" or module.frames_of(instruction):
        at_barrier = module.name(instruction).rpartition("/")[2] in BARRIERS
        return instruction, instruction.opcode == "copy" and at_barrier
    owner = instruction if instruction.opcode == "while" else loop(module, users, instruction)
    if owner is None or module.frames_of(owner):
        return owner or instruction, True
    return module.plainest_of(owner.called[0]) or owner, True


def loop(module: Module, users: dict[int, list[Instruction]], start: Instruction) -> Instruction | None:
    """The ``while`` that an instruction without a line of its own was inserted for: the one that it feeds, or that it is in the body of."""
    ahead, seen = deque([start]), {start.id}
    while ahead:
        for user in users.get(ahead.popleft().id, ()):
            if user.opcode == "while":
                return user
            if user.opcode in CARRYING and user.id not in seen:
                seen.add(user.id)
                ahead.append(user)
    return next((caller for caller in _callers(module, start.computation) if caller.opcode == "while"), None)


COPIED = {
    "bitcast": 1,
    "reshape": 1,
    "dynamic-slice": 1,
    "optimization-barrier": 1,
    "dynamic-update-slice": 2,
    "concatenate": None,
}
"""Of how many operands, the first, an instruction copies the elements, `None` being all; the others are indices."""


def _copied_from(module: Module, instruction: Instruction, index: tuple[int, ...]) -> Iterable[Position] | None:
    """The values that a value is a copy of; none for a constant fill, `None` for a value that is computed here."""
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
    """A copy that changes the layout is a transpose; a broadcast copies one number, or adds axes of length one; what a convert may lose `_keeps` tells."""
    operand = (instruction.operands[0], ())
    before, after = module.shape(operand), module.shape((instruction.id, ()))
    match instruction.opcode:
        case "copy":
            same = before.order == after.order
        case "convert":
            same = "float" in before.dtype and "float" in after.dtype
        case _:
            same = before.elements in (1, after.elements)
    return [operand] if same else None


def _passed(module: Module, parameter: Instruction, index: tuple[int, ...]) -> Iterable[Position] | None:
    """What the callers of a computation hand to one of its parameters."""
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
