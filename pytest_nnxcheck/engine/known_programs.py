"""Facts of compiled programs that an earlier run found out, by the text of the programs: a second run compiles nothing that it knows.

They are a few kilobytes of plain data: the memory, and which outputs take over which arguments. They say nothing of a program that calls Python code,
whose text lacks the code. The text has no lines, so that moved code is known code: its lines are those of the present text.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import platform
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path

import jax

from pytest_nnxcheck import wheels
from pytest_nnxcheck.compat import staging
from pytest_nnxcheck.compat.compile_cache import Compiled, folder_of_compiles
from pytest_nnxcheck.compat.owner import of_file
from pytest_nnxcheck.core.on_target import without_lists
from pytest_nnxcheck.core.peak import Buffer, Live, Memory, Order, Split
from pytest_nnxcheck.kept import Folder, Kept
from pytest_nnxcheck.xla import buffers
from pytest_nnxcheck.xla.hlo import aliases

__tracebackhide__ = True  # pytest shows the frames of the user, not these

FORM = 1
"""The form of a file, and of what is read of a program: a file of another form is read by nobody."""

_ENVIRONMENT = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
"""Environment variables that also decide how a program is compiled."""


@dataclass(frozen=True, slots=True)
class ProgramFacts:
    """The facts of one compiled program."""

    memory: Memory
    """Its buffers name no arguments yet."""
    aliases: Mapping[int, int] | None
    """The argument whose buffer each output takes over, by their numbers; `None` where the compiler does not tell."""
    lines: tuple[str, ...] = ()
    """The user's places in the program's text, ``path:line``, in its order."""

    def at(self, lines: Sequence[str]) -> ProgramFacts | None:
        """The facts of the same program whose operations are at other ``lines``; `None` if they cannot be paired."""
        if {*lines} == {
            *self.lines
        }:  # jax may have cached parts of the trace: where a text names a line first says nothing then
            return self
        moved = dict(zip(self.lines, lines, strict=False))
        if len(lines) != len(self.lines) or any(moved[old] != new for old, new in zip(self.lines, lines, strict=True)):
            return None

        def at_home(buffer: Buffer) -> Buffer:
            return replace(buffer, stack=tuple(moved.get(line, line) for line in buffer.stack))

        memory = replace(self.memory, buffers=tuple(map(at_home, self.memory.buffers)))
        return replace(self, memory=memory, lines=tuple(lines))

    def to_bytes(self) -> bytes:
        """The facts as JSON, with the live ranges as plain lists, and packed: there are thousands."""
        memory = self.memory
        order = memory.order and [memory.order.length, memory.order.loops, [*map(astuple, memory.order.held)]]
        rows = [
            {**asdict(replace(each, live=None)), "live": each.live and astuple(each.live)} for each in memory.buffers
        ]
        pairs = None if self.aliases is None else [*self.aliases.items()]
        return zlib.compress(json.dumps([FORM, memory.parts, rows, order, pairs, self.lines]).encode())

    @classmethod
    def of_bytes(cls, packed: bytes) -> ProgramFacts:
        """Read them. Raises `LookupError`, `TypeError` or `ValueError`."""
        form, parts, rows, order, pairs, lines = without_lists(json.loads(zlib.decompress(packed)))
        if form != FORM:
            raise ValueError(form)
        held = tuple(Buffer(**{**row, "live": row["live"] and Live(*row["live"])}) for row in rows)
        known = order and Order(order[0], order[1], tuple(Live(*live) for live in order[2]))
        return cls(Memory(**parts, buffers=held, order=known), None if pairs is None else dict(pairs), lines)


_PLACE = re.compile(r'loc\("([^"]+)":(\d+)')


def lines_of(compiled: Compiled) -> tuple[str, ...]:
    """The user's places in the text of a program, ``path:line``, in its order: MLIR writes each once."""
    text = compiled.lowered.compiler_ir().operation.get_asm(enable_debug_info=True)
    # The same program comes of several nestings, by other lines of jax, flax and ours.
    return tuple(f"{path}:{line}" for path, line in _PLACE.findall(text) if of_file(path) in ("user", "installed"))


@dataclass(frozen=True, slots=True)
class KnownProgram:
    """A program whose facts are known."""

    facts: ProgramFacts
    earlier: bool
    """True if an earlier run found them out, and nothing was compiled."""


def facts_of(compiled: Compiled, subject: str, *, earlier: bool) -> KnownProgram:
    """The facts of a program of ``subject``: those of an ``earlier`` run where they will do; else the program is compiled and read. Raises what XLA raises."""
    found: KnownProgram | None = compiled.read.get(subject)
    if found is None and earlier and (folder := _folder(compiled)) is not None:
        kept = folder.get(_key(compiled, subject))
        if (moved := kept and kept.at(lines_of(compiled))) is not None:
            found = KnownProgram(moved, earlier=True)
    if found is None or (found.earlier and not earlier):
        memory = buffers.read(compiled.program, subject=subject)
        found = KnownProgram(ProgramFacts(memory, aliases(compiled.program)), earlier=False)
    compiled.read[subject] = found
    return found


def keep(compiled: Compiled, subject: str) -> None:
    """Keep the facts of a program for later runs. A file that cannot be written costs a compile, never a test."""
    found, folder = compiled.read.get(subject), _folder(compiled)
    if found is not None and not found.earlier and folder is not None and not found.facts.lines:
        facts = replace(found.facts, lines=lines_of(compiled))
        compiled.read[subject] = replace(found, facts=facts)
        with contextlib.suppress(OSError):
            folder.put(_key(compiled, subject), facts)


def _folder(compiled: Compiled) -> Folder[ProgramFacts] | None:
    path = _path(compiled)
    return None if path is None else Folder(path, "-program", ProgramFacts.to_bytes, ProgramFacts.of_bytes)


def _path(compiled: Compiled) -> Path | None:
    """The folder of what is known; `None` for a program that nothing is kept of: the text does not name the chip of a GPU."""
    return folder_of_compiles() if compiled.key and jax.default_backend() == "cpu" else None


def split_of(compiled: Compiled) -> Split:
    """The totals of a program, without its constants. Raises what XLA raises."""
    path = _path(compiled)
    folder = None if path is None else Folder(path, "-split", _split_to_bytes, _split_of_bytes)
    splits: Kept[Split] = compiled.read.setdefault("split", Kept())
    return splits.recall(_key(compiled), lambda: buffers.split_of(compiled.program), folder)


def _split_to_bytes(split: Split) -> bytes:
    return json.dumps(split.parts).encode()


def _split_of_bytes(text: bytes) -> Split:
    return Split(**json.loads(text))


def _key(compiled: Compiled, subject: str = "") -> str:
    """The key of a file: the text of the program, the name of its subject without the line, and all that decides what the CPU's compiler makes of it."""
    name = subject.partition(" at ")[0]
    return key_of(compiled.key, name, staging.settings_of_compiles(), str(staging.compiler_options()), *_processor())


def key_of(*parts: str) -> str:
    """The key of what is known of a program, by its text and what else there is: also the versions, and the environment of the compilers."""
    environment = (os.environ.get(name, "") for name in _ENVIRONMENT)
    return hashlib.sha256("\n".join([*parts, *_versions(), *environment]).encode()).hexdigest()


@functools.cache
def _versions() -> tuple[str, ...]:
    return tuple(map(wheels.version, ("pytest-nnxcheck", "jax", "jaxlib")))


@functools.cache
def _processor() -> tuple[str, ...]:
    """The processor that programs are compiled for."""
    features = platform.processor()
    with contextlib.suppress(OSError), Path("/proc/cpuinfo").open() as lines:
        features = next((line for line in lines if line.startswith(("flags", "Features"))), features)
    return platform.machine(), features
