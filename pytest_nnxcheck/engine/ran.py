"""A call that ran under its nesting: what every invariant is handed."""

from __future__ import annotations

from dataclasses import dataclass

from pytest_nnxcheck.core.catalogue import GRAD, JIT
from pytest_nnxcheck.core.facts import Observation
from pytest_nnxcheck.core.nesting import Layer, Nesting
from pytest_nnxcheck.core.peak import Bound, Memory
from pytest_nnxcheck.engine.example import Call
from pytest_nnxcheck.engine.observe import How, observe
from pytest_nnxcheck.engine.reference import Reference
from pytest_nnxcheck.subject.profile import UNKNOWN, Profile
from pytest_nnxcheck.transforms.bound import bound

__tracebackhide__ = True  # pytest shows the frames of the user, not these


@dataclass(frozen=True, slots=True)
class Ran:
    """A call that ran under its nesting."""

    call: Call
    observation: Observation
    reference: Reference | None = None
    """The results of the same calls without the nesting, or of an un-nested call without its jits. `None` where no invariant compares values."""

    @property
    def profile(self) -> Profile:
        """The facts of the un-nested call."""
        return self.call.profile

    @property
    def baseline(self) -> Nesting | None:
        """The un-nested program that its memory is compared with: a jit over split and merge, which returns only the state that the call changes, or that of its
        gradient. `None` un-nested, and where no trace takes the call.
        """
        layers = self.call.nesting.layers
        if not layers or self.profile is UNKNOWN:
            return None
        grads = [layer for layer in layers if layer.row.pair == "gradients"][-1:]
        inside = (Layer(GRAD, "jax_closure" if layer.captures else "functional") for layer in grads)
        return Nesting((Layer(JIT, "functional"), *inside))

    @property
    def measured(self) -> bool:
        """True if a program was compiled and ran to its end."""
        return self.observation.memory is not None and self.observation.error is None

    @property
    def bound(self) -> Bound | None:
        """The most bytes that the program of the nesting may take; `None` where none was measured."""
        baseline = self.un_nested_memory
        budget = self.call.settings.memory_budget
        return bound(self.observation, self.call.profile, baseline, budget) if baseline else None

    @property
    def un_nested_memory(self) -> Memory | None:
        """The memory of the un-nested call under a jit, or of its gradient where the nesting takes one.

        Nothing where the program of the nesting was not measured, or where the un-nested one does not run.
        """
        call, baseline, donate = self.call, self.baseline, self.call.settings.donate
        if not self.measured or baseline is None:
            return None
        if baseline.layers == self.observation.nesting.layers:
            return self.observation.memory

        def memory() -> Memory | None:
            seen = observe(call, baseline, How(earlier=self.observation.earlier))
            seen.keep()
            return seen.memory

        return call.tried("un-nested memory", memory, donate, baseline)
