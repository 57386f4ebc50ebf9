"""The sizes of a model."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Config:
    vocabulary: int = 64
    width: int = 64
    heads: int = 4
    depth: int = 4
    dropout: float = 0.1

    @property
    def head_width(self) -> int:
        return self.width // self.heads
