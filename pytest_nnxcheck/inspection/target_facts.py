"""What the compiler of a target says of one program, kept in the process and between runs.

jax's own cache cannot read a program for a chip that is not there, so the facts are kept, not the program: 200 bytes, for a second of compiling.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pytest_nnxcheck import atomic_file, compat, wheels
from pytest_nnxcheck.compat import targets
from pytest_nnxcheck.compat.shared_programs import canonical
from pytest_nnxcheck.core.chips import Target
from pytest_nnxcheck.core.evidence import Split
from pytest_nnxcheck.inspection.hlo import aliases

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
