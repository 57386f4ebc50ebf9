"""What measured figures depend on beside the code: versions, platform and devices."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class Stamp:
    """What the figures depend on, beside the code: ``devices`` is the number of simulated ones, 1 if there are none."""

    jax: str
    jaxlib: str
    flax: str
    platform: str
    device: str
    devices: str = "1"

    def differences(self, other: Stamp) -> str:
        """``jax 0.5.3 -> 0.6.2, flax 0.10.2 -> 0.10.7``; empty where nothing differs."""
        pairs = [(each.name, getattr(self, each.name), getattr(other, each.name)) for each in fields(self)]
        return ", ".join(f"{name} {before} -> {after}" for name, before, after in pairs if before != after)
