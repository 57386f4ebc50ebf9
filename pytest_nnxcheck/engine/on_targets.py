"""One program on each target: lowered from the trace that is there, compiled, and read. Nothing runs there, and nothing of the user's runs again.

What is read is kept, in the process and between runs. jax's own cache cannot read a program for a chip that is not there, so the facts are
kept, not the program: 200 bytes, for a second of compiling.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pytest_nnxcheck import atomic_file, compat, wheels
from pytest_nnxcheck.compat import compile_cache, targets
from pytest_nnxcheck.compat.compilation import Staged
from pytest_nnxcheck.compat.shared_programs import canonical
from pytest_nnxcheck.core.chips import Target, parse_target
from pytest_nnxcheck.core.evidence import OnTarget, Split, least_copy
from pytest_nnxcheck.inspection.hlo import aliases
from pytest_nnxcheck.jaxprs.copies import TracedProgram, copies_in

__tracebackhide__ = True  # pytest shows the frames of the user, not these

NEAR = 0.8
"""Of the limit: from here on the compiler of a TPU is asked again with its default effort. On a slice its fast one may count less, or refuse what fits."""
QUICK, DEFAULT = "O0", "default"
_ENVIRONMENT = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
"""What else decides how a program is compiled."""


@dataclass(frozen=True, slots=True)
class TargetFacts:
    """Facts of one program, bytes a device; without totals where the compiler gives none, or ``refused`` the program for its size."""

    split: Split | None = None
    peak: int | None = None
    """What the compiler counts against the memory: jax's ``peak_memory_in_bytes`` on a TPU, from jax 0.7.2 on, else the sum of the totals."""
    unpadded: int | None = None
    aliased: tuple[int, ...] | None = None
    """The numbers of the parameters whose buffer an output takes; `None` where the compiler does not tell."""
    refused: str = ""

    @classmethod
    def of(cls, target: Target, compiled: Any) -> TargetFacts:
        """Read a program that was compiled for a target."""
        module = compat.serialized_hlo_module(compiled)
        aliased = None if module is None else tuple(sorted(set(aliases(module).values())))
        totals = compiled.memory_analysis()
        if totals is None:
            return cls(aliased=aliased)
        split = Split(
            totals.argument_size_in_bytes,
            totals.output_size_in_bytes,
            totals.temp_size_in_bytes,
            totals.alias_size_in_bytes,
            0,
        )
        if target.chip.gpu is not None:
            return cls(split, split.peak, None, aliased)
        heap = getattr(totals, "peak_memory_in_bytes", 0) or None
        unpadded = (getattr(totals, "peak_unpadded_heap_bytes", 0) or None) if heap else None
        return cls(split, heap or split.peak, unpadded, aliased)


@dataclass(slots=True)
class FactsOfTargets:
    """The facts of the programs of one test, by the text of the program and what else decides them; ``folder`` keeps them for the next run."""

    known: dict[str, TargetFacts] = field(default_factory=dict)

    def facts(self, target: Target, lowered: Any, effort: str, folder: Path | None) -> TargetFacts:
        """The facts of a lowered program. Raises `LeftOut`."""
        environment = [os.environ.get(name, "") for name in _ENVIRONMENT]
        versions = [version("jax"), version("jaxlib"), wheels.versions(target.chip.compiler)]
        text = "\n".join([canonical(lowered.as_text()), str(target), effort, *versions, *environment])
        key = hashlib.sha256(text.encode()).hexdigest()
        if key not in self.known:
            path = None if folder is None else folder / f"{key}-target.json"
            self.known[key] = _kept(path, lambda: _compiled(target, lowered, effort))
        return self.known[key]


def _compiled(target: Target, lowered: Any, effort: str) -> TargetFacts:
    try:
        return TargetFacts.of(target, targets.compiled_for(target, lowered, effort=effort))
    except targets.DoesNotFit as error:
        return TargetFacts(refused=str(error))


def _kept(path: Path | None, compute: Callable[[], TargetFacts]) -> TargetFacts:
    """The facts in a file, computed and written where it is not there or cannot be read."""
    if path is not None:
        with contextlib.suppress(OSError, ValueError, TypeError):
            return _read(json.loads(path.read_text(encoding="utf-8")))
    facts = compute()
    if path is not None:
        with contextlib.suppress(OSError):  # a folder that cannot be written costs a compile, never a test
            atomic_file.write(path, json.dumps(asdict(facts)))
    return facts


def _read(value: dict[str, Any]) -> TargetFacts:
    split, aliased = value.pop("split"), value.pop("aliased")
    return TargetFacts(
        split=None if split is None else Split(**split), aliased=None if aliased is None else (*aliased,), **value
    )


# --- a program on each target


@dataclass(frozen=True, slots=True)
class Donated:
    """The leaves that a program donates, by their numbers: their names, and those whose buffer no output of the CPU's program takes."""

    names: dict[int, str]
    lost: frozenset[int]


@dataclass(frozen=True, slots=True)
class OnTargets:
    """Compiles the programs of one call for targets."""

    words: tuple[str, ...]
    """The targets, as they were named."""
    facts: FactsOfTargets
    state: int
    """Bytes of one copy of the state."""
    with_copies: bool
    """Whether copies of the state are looked for."""

    def all(self, staged: Staged, program: TracedProgram, donated: Donated) -> tuple[OnTarget, ...]:
        """A program, as it was staged and traced, on each target. Raises `CheckError` where a named slice has another size."""
        return tuple(self._one(parse_target(word), staged, program, donated) for word in self.words)

    def _one(self, named: Target, staged: Staged, program: TracedProgram, donated: Donated) -> OnTarget:
        started = time.perf_counter()
        said = OnTarget(str(named), wheel=wheels.versions(named.chip.compiler), state=self.state)
        try:
            mesh = targets.mesh_of(program.arguments)
            target = targets.target_of(named, mesh)
            said = replace(self._compiled(target, mesh, staged, program, donated), wheel=said.wheel)
        except targets.LeftOut as error:
            said = replace(said, left_out=str(error))
        return replace(said, seconds=time.perf_counter() - started)

    def _compiled(
        self, target: Target, mesh: Any, staged: Staged, program: TracedProgram, donated: Donated
    ) -> OnTarget:
        limit, share = targets.limit_of(target.chip)

        def lower(jitted: Any, arguments: Sequence[Any]) -> Any:
            return targets.lowered_for(target, mesh, jitted, arguments, program.donated)

        lowered = lower(staged.jitted, staged.arguments)

        def copies(facts: TargetFacts, effort: str) -> int:
            def split_of(jitted: Any) -> Split | None:
                return self._facts(target, lower(jitted, program.arguments), effort).split

            if not self.with_copies or facts.split is None:
                return 0
            return copies_in(program, facts.split, self.state, split_of).bytes

        facts = self._facts(target, lowered, QUICK)
        copied = copies(facts, QUICK)
        copies_count, effort = copied >= least_copy(self.state), QUICK
        if target.chip.gpu is None and (facts.refused or (facts.peak or 0) > NEAR * limit or copies_count):
            effort = DEFAULT
            # Lowered anew: jax keeps what it compiled of a lowered program, whatever the effort.
            facts = self._facts(target, lower(staged.jitted, staged.arguments), effort)
            # Where there is room the default effort spends memory on speed, on bfloat16 twins of weights say: it tells whether copies remain,
            # and not how many there are.
            copied = copied if copies_count and copies(facts, effort) >= least_copy(self.state) else 0
        gone = set() if facts.aliased is None else donated.names.keys() - {*facts.aliased}
        return OnTarget(
            target=str(target),
            limit=limit,
            share=share,
            fits=not facts.refused and (target.chip.gpu is None or (facts.peak or 0) <= limit),
            peak=facts.peak,
            split=facts.split,
            unpadded=facts.unpadded,
            copies=copied,
            state=self.state if self.with_copies and facts.split else 0,
            donated=0 if facts.aliased is None else len(donated.names),
            lost=tuple(donated.names[number] for number in sorted(gone - donated.lost)),
            lost_too=len(gone & donated.lost),
            refused=facts.refused,
            effort=effort if target.chip.gpu is None else DEFAULT,
        )

    def _facts(self, target: Target, lowered: Any, effort: str) -> TargetFacts:
        return self.facts.facts(target, lowered, effort, compile_cache.folder_of_compiles())
