"""The buffers at the peak of a compiled program, with their origins: XLA's buffer assignment, read together with its HLO module.

The first half finds the origin of one value: the user's lines and the layer (`place`), the parameters that it copies (`origin`), the loop that XLA
made it for (`made`). The second half, from `read` on, takes the buffers apart, and asks for the origin of each. The totals come from
``memory_analysis()``; captured constants, which no total counts reliably, from the buffer assignment. jaxlib's own ``peak_memory_in_bytes`` leaves
the temporaries out on CPU and is never used.
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pytest_nnxcheck.compat.staging import serialized_buffer_assignment, serialized_hlo_module
from pytest_nnxcheck.core.catalogue import CALL_FIRST, STYLES
from pytest_nnxcheck.core.errors import CheckError
from pytest_nnxcheck.core.nesting import Layer
from pytest_nnxcheck.core.peak import Buffer, Live, Memory, Order, Part, Split
from pytest_nnxcheck.core.text import near
from pytest_nnxcheck.xla import hlo
from pytest_nnxcheck.xla.hlo import Frame, Instruction, Module, Position, Shape, reached
from pytest_nnxcheck.xla.live_ranges import Held, LiveRanges
from pytest_nnxcheck.xla.reuse import reused

__tracebackhide__ = True  # pytest shows the frames of the user, not these

_LAYER = re.compile(rf"(?P<transform>{CALL_FIRST})\b|(?P<styled>\w+?)_(?P<style>{'|'.join(STYLES)})\b")

_JIT = re.compile(r"jit\(([^()]+)\)")

PLUMBING = frozenset({"parameter", "tuple", "get-tuple-element", "bitcast", "fusion", "call", "constant"})
"""Opcodes that move no bytes, and explain nothing."""

CARRYING = frozenset({"tuple", "bitcast", "copy", "optimization-barrier"})
"""Opcodes between an inserted copy and the loop it is for."""

BACKWARD = "transpose("
"""The part of an operation's name that says that a backward pass makes it."""

MARK = "marked.<locals>.root"
"""The name of the frame at which every stack inside the program of a jit ends: see `transforms.compose.marked`."""

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
class MadeOf:
    """The parameters of the program that a value is made of."""

    parameters: frozenset[int]
    copied: bool
    """True if it is made by copies only. A copy may go through wider floats: XLA for the CPU copies floats of 16 bits so."""
    cast: bool
    """True if it is made of one parameter by such moves and a change of dtype."""
    through: frozenset[Position]
    """The values on the way."""
    operations: tuple[str, ...] = ()
    """The opcodes on the shortest way from a parameter, each once."""


def origin(module: Module, position: Position) -> MadeOf:
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
    moved = copied
    copied = copied and all(_keeps(module, after, parameter) for parameter in parameters.values())
    cast = moved and len(parameters) == 1 and module.shape(position).dtype != module.shape(*parameters.values()).dtype
    operations = _operations(module, after, parameters[min(parameters)]) if copied and parameters else ()
    return MadeOf(frozenset(parameters), copied, cast, frozenset(after), operations)


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
    fed = reached(start, lambda op: module.users.get(op.id, ()) if op is start or op.opcode in CARRYING else ())
    around = reached(start, lambda op: module.callers.get(op.computation, ()))
    return next((op for op in itertools.chain(fed, around) if op.opcode == "while"), None)


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


def on_the_host(totals: Any) -> int:
    """The bytes of a program for a chip that lie in the memory of its host. jax before 0.4.34 has no such totals."""
    held = sum(getattr(totals, f"host_{part}_size_in_bytes", 0) for part in ("argument", "output", "temp"))
    return int(held - getattr(totals, "host_alias_size_in_bytes", 0))


def read(compiled: Any, subject: str | None = None, *, gpu: bool = False, on_host: Collection[int] = ()) -> Memory:
    """Read the memory of a program that ``lowered.compile()`` returned, of any compiler. Raises `CheckError` if the backend gives no totals.

    ``subject`` is the label of a program that the plugin staged: see `subject.subject.labelled`. ``gpu`` is
    true for a program that was compiled for one; ``on_host`` are the numbers of its arguments that lie in the memory of the host.
    """
    totals = _totals(compiled)
    sizes, module = _sizes(totals), serialized_hlo_module(compiled)
    if module is None:
        return Memory(*sizes, constants=0)
    try:
        reader = _Reader(Module.read(module, subject))
        held = tuple(reader.held(*serialized_buffer_assignment(totals), on_host))
        held = tuple(reused(reader.ranges, held)) if gpu else held
        order = Order(len(reader.ranges.when), tuple(reader.ranges.loops), tuple(piece.live for piece in held))
        peak = order.peak
        live = [reader.buffer(piece, peak) for piece in held if piece.live.start <= peak <= piece.live.end]
        buffers = sorted((*live, *reader.fused_constants()), key=lambda buffer: -buffer.bytes)
    except Exception:  # noqa: BLE001 - these formats are XLA's own: if they drift we lose the names, not the user's test
        return Memory(*sizes, constants=0)
    constants = sum(buffer.bytes for buffer in buffers if buffer.kind == "constant")
    return Memory(*sizes, constants=constants, buffers=tuple(buffers), order=order)


def split_of(compiled: Any) -> Split:
    """The totals of a compiled program, without its constants. Raises `CheckError` if the backend gives none."""
    return Split(*_sizes(_totals(compiled)), constants=0)


def _totals(compiled: Any) -> Any:
    totals = compiled.memory_analysis()
    if totals is None:
        raise CheckError("this backend gives no memory analysis: leave 'memory' out of the invariants or run on CPU")
    return totals


def _sizes(totals: Any) -> tuple[int, int, int, int]:
    """Arguments, outputs, temporaries and aliased bytes, the first fields of a `Split`."""
    return (
        totals.argument_size_in_bytes,
        totals.output_size_in_bytes,
        totals.temp_size_in_bytes,
        totals.alias_size_in_bytes,
    )


FEWER = 8
"""A result that has this many times the elements of its operand is a broadcast, not a copy."""


class _Reader:
    """Reader of one module, which names its buffers."""

    def __init__(self, module: Module) -> None:
        self.module = module
        self.ranges = LiveRanges(module)
        self.results = frozenset(self.ranges.results)

    def held(self, assignment: bytes | None, wrapped: bool, on_host: Collection[int]) -> Iterator[Held]:
        """Everything that the program holds at some time, but for arguments ``on_host``. A tuple is a table of pointers, and nothing here.

        The compiler of the CPU gives its assignment of buffers, which says what lies in the same bytes; ``wrapped``, it is part of another
        message. Of other compilers there are the values that must share a buffer, as large as their layout.
        """
        if assignment:
            message = hlo.fields(assignment)
            yield from self._assigned(hlo.fields(hlo.raw(message, 3)) if wrapped else message)
            return
        arguments = {self.ranges.buffer((op.id, ())) for op in self.ranges.parameters.values()}
        elsewhere = {self.ranges.buffer((self.ranges.parameters[number].id, ())) for number in on_host}
        results = set(map(self.ranges.buffer, self.results))
        for buffer, values in self.ranges.made.items():
            if buffer in elsewhere and buffer not in results:
                continue
            # An output on the chip that took the place of an argument on the host has a buffer of its own on the device.
            kind = "argument" if buffer in arguments - elsewhere else "output" if buffer in results else "temporary"
            if self.module.instructions[values[0][0]].opcode == "constant":
                kind = "constant"
            size, when = max(self.module.shape(value).room for value in values), self.ranges.when
            for piece in self.ranges.pieces[buffer] if kind == "temporary" else ():
                made = tuple(value for value in values if piece.start <= when[value[0]] <= piece.end)
                if size and self.module.shape(made[0]).dtype not in ("tuple", "token"):
                    yield Held(Live(size, kind, piece.start, piece.end), made)
            if kind != "temporary":
                yield from self._pieces(kind, size, values)

    def _assigned(self, assignment: hlo.Message) -> Iterator[Held]:
        """The contents of the allocations of a ``BufferAssignmentProto``, without those on the threads' stacks. Raises `MalformedProto` or `LookupError`."""
        values = {
            hlo.number(buffer, 1): (hlo.number(place, 4), hlo.numbers(place, 3))
            for buffer in hlo.messages(assignment, 1)
            for place in hlo.messages(buffer, 3)
        }
        if not values:
            raise hlo.MalformedProto("a buffer assignment without buffers")
        # In this order: a donated parameter that an output takes over is an argument.
        flags = {5: "argument", 12: "constant", 7: "output"}
        for allocation in hlo.messages(assignment, 3):
            kind = next((kind for field, kind in flags.items() if hlo.number(allocation, field)), "temporary")
            if kind == "argument":
                parameter = self.ranges.parameters[hlo.number(allocation, 6)]
                yield from self._pieces(kind, hlo.number(allocation, 2), [(parameter.id, ())])
            elif not hlo.number(allocation, 3):
                # The memory of an output is set aside as a whole: what lies in it before is part of it.
                whole = (0, hlo.number(allocation, 2)) if kind == "output" else None
                slots = defaultdict[tuple[int, int], list[Position]](list)
                for slot in hlo.messages(allocation, 9):
                    slots[whole or (hlo.number(slot, 2), hlo.number(slot, 3))].append(values[hlo.number(slot, 1)])
                for (_, size), shared in slots.items():
                    yield from self._pieces(kind, size, shared)

    def _pieces(self, kind: str, size: int, values: Iterable[Position]) -> Iterator[Held]:
        """The times in which values are alive in the same bytes: those that overlap are one."""
        ranges = [(*found, value) for value in values if (found := self._range(kind, value)) is not None]
        together = list[Position]()
        begin = until = -1
        for start, end, value in sorted(ranges, key=lambda each: each[:2]):
            if together and start > until:
                yield Held(Live(size, kind, begin, until), tuple(together))
                together = []
            begin, until = (start, end) if not together else (begin, max(until, end))
            together.append(value)
        if together and size:
            yield Held(Live(size, kind, begin, until), tuple(together))

    def _range(self, kind: str, value: Position) -> tuple[int, int] | None:
        if self.module.shape(value).dtype in ("tuple", "token"):
            return None
        if kind != "temporary":  # set aside before the program begins
            return 0, len(self.ranges.when)
        found = self.ranges.range_of(value)
        return None if found is None else (found.start, found.end)

    def fused_constants(self) -> Iterator[Buffer]:
        """Constants that XLA wrote into a fusion, where no allocation counts them; a single number is part of the code."""
        every = self.module.instructions.values()
        fused = {computation for op in every if op.opcode == "fusion" for computation in op.called}
        for op in every:
            if op.opcode == "constant" and op.computation in fused:
                shape = self.module.shape((op.id, ()))
                if shape.elements > 1:
                    yield Buffer(shape.size, str(shape), "constant", "constant")

    def buffer(self, held: Held, peak: int) -> Buffer:
        """One buffer that is alive at the peak, named by the value in it that explains most: a copy of a whole parameter, or one with a line."""
        values, size, kind = held.values, held.live.bytes, held.live.kind
        if kind == "argument":
            op = self.module.instructions[values[0][0]]
            shape = str(self.module.shape(values[0]))
            return Buffer(size, shape, kind, "parameter", parameters=(op.parameter,), live=held.live)
        if kind == "output":
            values = tuple(value for value in values if value in self.results) or values
        origin_of = {value: origin(self.module, value) for value in values}
        named = [self._named(value, size, kind, origin_of) for value in values]
        chosen = max(
            named, key=lambda buffer: (buffer.whole, not buffer.inserted, buffer.stack != (), buffer.layer != "")
        )
        large = [value for value in values if 2 * self.module.shape(value).size > size]
        broadcast = bool(large) and all(map(self._is_broadcast, large))
        if kind != "temporary":
            return replace(chosen, live=held.live, broadcast=broadcast)
        now = self._at(held.values, peak)
        casts = [origin_of[value].parameters for value in now if origin_of[value].cast]
        parameters = tuple(casts[0]) if casts else chosen.parameters
        part = self._part(now, origin_of)
        return replace(chosen, live=held.live, broadcast=broadcast, part=part, parameters=parameters)

    def _is_broadcast(self, value: Position) -> bool:
        """True if a value repeats far fewer elements, and computes nothing."""
        instruction = self.module.instructions[value[0]]
        for _ in self.module.instructions:
            match instruction.opcode:
                case "fusion" | "call":
                    instruction = self.module.instructions[self.module.roots[instruction.called[0]]]
                case "bitcast":
                    instruction = self.module.instructions[instruction.operands[0]]
                case _:
                    break
        if instruction.opcode != "broadcast":
            return False
        repeated = self.module.shape((instruction.operands[0], ()))
        return repeated.elements * FEWER <= self.module.shape(value).elements

    def _named(self, value: Position, size: int, kind: str, origin_of: dict[Position, MadeOf]) -> Buffer:
        shape, instruction = self.module.shape(value), self.module.instructions[value[0]]
        parameters = self._copied(value, origin_of)
        maker, inserted = made(self.module, instruction)
        stack, layer = place(self.module, maker)
        return Buffer(
            bytes=size,
            shape=str(shape),
            kind=kind,
            operation=self.module.operation(instruction),
            stack=stack,
            parameters=parameters,
            whole=bool(parameters) and shape.elements == self._elements(parameters),
            through=origin_of[value].operations if parameters else (),
            layer=layer,
            inserted=inserted,
        )

    def _at(self, values: Sequence[Position], now: int) -> list[Position]:
        """Give the values of a buffer that share its memory with the last one made before a time."""
        made_before = [value for value in values if self.ranges.when.get(value[0], 0) <= now] or values
        last = max(made_before, key=lambda value: self.ranges.when.get(value[0], 0))
        return [value for value in values if self.ranges.buffer(value) == self.ranges.buffer(last)]

    def _part(self, values: Iterable[Position], origin_of: dict[Position, MadeOf]) -> Part:
        """The part of a buffer in a training step or a loop. jax from 0.7 on names the operations of a backward pass, ``transpose(jvp(f))``."""
        if any(origin_of[value].cast for value in values):
            return "casts"
        computed = [value for value in values if not origin_of[value].copied]
        types = {(shape.dtype, shape.dimensions) for shape in map(self._shape, self.ranges.parameters)}
        for value in computed:
            shape, (maker, _) = self.module.shape(value), made(self.module, self.module.instructions[value[0]])
            if BACKWARD in self.module.name(maker):
                return "gradients" if (shape.dtype, shape.dimensions) in types else ""
        readers = (self.module.name(op) for value in computed for op in self.ranges.readers(value))
        return "saved for the backward pass" if any(BACKWARD in name for name in readers) else ""

    def _copied(self, value: Position, origin_of: dict[Position, MadeOf]) -> tuple[int, ...]:
        """The parameters that a value is a copy of, in their dtype; none if that is ambiguous."""
        here, shape = origin_of[value], self.module.shape(value)
        parameters = tuple(sorted(here.parameters))
        # A value with fewer elements than its parameters together is one of them, or parts of several: nothing says which.
        if not here.copied or (len(parameters) > 1 and shape.elements != self._elements(parameters)):
            return ()
        # Slices of one parameter, joined: a reorder.
        if len(parameters) == 1 and "concatenate" in here.operations:
            return ()
        # A later value in the slot updates this one by a computation: the slot is no copy.
        if any(value in other.through and not other.copied for other in origin_of.values()):
            return ()
        return parameters if all(self._shape(parameter).dtype == shape.dtype for parameter in parameters) else ()

    def _shape(self, parameter: int) -> Shape:
        return self.module.shape((self.ranges.parameters[parameter].id, ()))

    def _elements(self, parameters: tuple[int, ...]) -> int:
        return sum(self._shape(parameter).elements for parameter in parameters)
