"""One program on each target: lowered from the trace that is there, compiled, and read. Nothing runs there, and nothing of the user's runs again."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from pytest_nnxcheck import wheels
from pytest_nnxcheck.compat import compile_cache, targets
from pytest_nnxcheck.compat.compilation import Staged
from pytest_nnxcheck.core.chips import Target, parse_target
from pytest_nnxcheck.core.evidence import OnTarget, Split, least_copy
from pytest_nnxcheck.inspection.target_facts import FactsOfTargets, TargetFacts
from pytest_nnxcheck.jaxprs.copies import TracedProgram, copies_in

__tracebackhide__ = True  # pytest shows the frames of the user, not these

NEAR = 0.8
"""Of the limit: from here on the compiler of a TPU is asked again with its default effort. On a slice its fast one may count less, or refuse what fits."""
QUICK, DEFAULT = "O0", "default"


def is_unsure(refused: str, peak: int | None, limit: int, copies: int, state: int) -> bool:
    """Whether what the fast effort of a TPU's compiler says is asked again."""
    return bool(refused) or (peak or 0) > NEAR * limit or copies >= least_copy(state)


def effort_of(on: OnTarget) -> str:
    """The effort that what is said of a program comes from."""
    return DEFAULT if is_unsure(on.refused, on.peak, on.limit, on.copies, on.state) else QUICK


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
        unsure = is_unsure(facts.refused, facts.peak, limit, copied, self.state)
        if target.chip.gpu is None and unsure:
            # Lowered anew: jax keeps what it compiled of a lowered program, whatever the effort.
            facts = self._facts(target, lower(staged.jitted, staged.arguments), DEFAULT)
            copied = copies(facts, DEFAULT)
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
            state=self.state,
            donated=0 if facts.aliased is None else len(donated.names),
            lost=tuple(donated.names[number] for number in sorted(gone - donated.lost)),
            lost_too=len(gone & donated.lost),
            refused=facts.refused,
        )

    def _facts(self, target: Target, lowered: Any, effort: str) -> TargetFacts:
        return self.facts.facts(target, lowered, effort, compile_cache.folder_of_compiles())
