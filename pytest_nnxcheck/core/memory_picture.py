"""The picture of a program's memory: live bytes over program order, and the largest buffers at the peak as bars. Plain data, and its SVG.

The SVG needs no script and no font, takes the colours of the page that it is in, and is readable from 390 pixels on.
"""

from __future__ import annotations

import html
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pytest_nnxcheck.core.peak import Memory
from pytest_nnxcheck.core.text import format_bytes

KINDS = ("argument", "output", "temporary")
"""The kinds of buffers, from the bottom of the picture to the top."""

COLUMNS = 160
"""Columns that a picture has at most: more than a screen of 390 pixels shows."""

BARS = 10
"""Buffers that are shown as bars: the largest at the peak that are no arguments."""

LEAST, MOST = 0.9, 1.1
"""The share of the compiler's peak between which the live bytes have to lie: outside of it a picture would mislead."""

NAMED = 0.01
"""The share of the peak from which on a buffer is a bar, and bytes that no buffer explains are named."""


@dataclass(frozen=True, slots=True)
class Bar:
    """One buffer, while it is alive."""

    bytes: int
    kind: str
    start: int
    end: int
    text: str
    """Its type, what it is, and the user's line."""


@dataclass(frozen=True, slots=True)
class Picture:
    """Live bytes over the instructions of a program."""

    length: int
    """The number of instructions; a loop is one of its steps."""
    peak_at: int
    """The instruction at which the most bytes are alive."""
    total: int
    """The peak that the compiler says, in bytes a device, without constants."""
    live: int
    """The most bytes that are alive at once."""
    loops: tuple[tuple[int, int], ...]
    """The first and the last instruction of each loop's step."""
    columns: tuple[tuple[int, ...], ...]
    """Bytes by kind, in the order of `KINDS`, where each of so many equal parts of the program holds most."""
    bars: tuple[Bar, ...]

    @classmethod
    def of(cls, memory: Memory, peak: int | None = None) -> Picture | None:
        """The picture of a program; `None` where its buffers are not known, or do not add up to about what the compiler says.

        That is ``peak``, or else the sum of the compiler's totals.
        """
        order, total = memory.order, peak or memory.peak - memory.constants
        if order is None or total <= 0:
            return None
        sums, kinds = order.totals(), [order.totals(kind) for kind in KINDS]
        if not LEAST <= max(sums) / total <= MOST:
            return None
        count = min(len(sums), COLUMNS)
        parts = (range(at * len(sums) // count, (at + 1) * len(sums) // count) for at in range(count))
        fullest = [max(part, key=sums.__getitem__) for part in parts]
        bars = tuple(
            Bar(buffer.bytes, buffer.kind, buffer.live.start, buffer.live.end, buffer.label)
            for buffer in memory.made
            if buffer.live is not None and buffer.kind in KINDS and buffer.bytes >= NAMED * total
        )
        columns = tuple(tuple(kind[at] for kind in kinds) for at in fullest)
        return cls(order.length, order.peak, total, max(sums), order.loops, columns, bars[:BARS])

    @classmethod
    def of_json(cls, found: dict[str, Any]) -> Picture:
        """Make it of what JSON read, with a tuple in place of each list. Raises `LookupError` or `TypeError`."""
        return cls(**{**found, "bars": tuple(Bar(**bar) for bar in found["bars"])})

    def svg(self, bound: int | None = None, named: str = "budget") -> str:
        """Draw it, with a line for a bound in bytes, if that is near enough to be seen."""
        return "\n".join(_Drawing(self, bound, named).lines())


WIDTH, HEIGHT, TOP, ROW, LETTER = 480, 170, 44, 32, 6.1
"""Sizes in the units of the drawing; a letter is about `LETTER` wide."""

STYLE = """.nnx-picture{color-scheme:light dark;background:var(--card,Canvas);max-width:46rem;width:100%;height:auto;font:11px/1.2 system-ui,sans-serif}
.nnx-picture text{fill:var(--text,CanvasText)}.nnx-picture .quiet{fill:var(--muted,GrayText)}
.nnx-picture .figure{paint-order:stroke;stroke:var(--card,Canvas);stroke-width:2.5px;stroke-opacity:.75}
.nnx-picture .argument{fill:var(--resident,#2f6db5)}.nnx-picture .output{fill:#3f9a6b}.nnx-picture .temporary{fill:var(--temporaries,#a8680f)}
.nnx-picture .loop{fill:currentColor;opacity:.08}.nnx-picture .grid{stroke:currentColor;opacity:.15}
.nnx-picture .peak{stroke:currentColor;stroke-dasharray:2 3}.nnx-picture .bound{stroke:var(--bad,#b3261e);stroke-dasharray:5 3}"""


class _Drawing:
    """Writer of one SVG."""

    def __init__(self, picture: Picture, bound: int | None, named: str) -> None:
        self.picture, self.named = picture, named
        highest = max(picture.total, picture.live)
        self.bound = bound if bound is not None and bound < 2 * highest else None
        self.top = 1.1 * max(highest, self.bound or 0)

    def x(self, at: float) -> float:
        """The place of an instruction."""
        return at / (self.picture.length + 1) * WIDTH

    def y(self, size: float) -> float:
        """The place of so many bytes."""
        return TOP + HEIGHT * (1 - size / self.top)

    def lines(self) -> Iterator[str]:
        """The elements, one a line."""
        picture = self.picture
        height = TOP + HEIGHT + 24 + ROW * len(picture.bars) + 4
        title = f"Live bytes over program order: peak {format_bytes(picture.total)}"
        yield (
            f'<svg xmlns="http://www.w3.org/2000/svg" class="nnx-picture" viewBox="0 0 {WIDTH} {height}" role="img"'
            f' aria-label="{html.escape(title)}"><style>{STYLE}</style>'
        )
        yield self.text(
            0, 12, f"peak {format_bytes(picture.total)} at instruction {picture.peak_at} of {picture.length}"
        )
        yield from self.legend()
        for begin, end in picture.loops:
            width = max(self.x(end) - self.x(begin), 1)
            yield f'<rect class="loop" x="{self.x(begin):.1f}" y="{TOP}" width="{width:.1f}" height="{HEIGHT}"><title>one step of a loop</title></rect>'
        yield from self.areas()
        yield from self.grid()
        at = self.x(picture.peak_at + 0.5)
        yield f'<line class="peak" x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{height - 4}"/>'
        yield from self.bars()
        yield "</svg>"

    def legend(self) -> Iterator[str]:
        """The kinds with their bytes at the peak, and what no buffer explains."""
        picture, at = self.picture, 0.0
        fullest = max(picture.columns, key=sum)
        for kind, size in zip(KINDS, fullest, strict=True):
            if size < NAMED * picture.total:
                continue
            words = f"{kind}s {format_bytes(size)}".replace("temporarys", "temporaries")
            yield f'<rect class="{kind}" x="{at:.1f}" y="21" width="9" height="9"/>{self.text(at + 13, 29, words)}'
            at += 13 + LETTER * len(words) + 12
        if picture.total - picture.live >= NAMED * picture.total:
            yield self.text(at, 29, f"not explained {format_bytes(picture.total - picture.live)}", "quiet")

    def areas(self) -> Iterator[str]:
        """One area for each kind, on top of one another."""
        columns, step = self.picture.columns, WIDTH / len(self.picture.columns)
        below = [0] * len(columns)
        for number, kind in enumerate(KINDS):
            above = [base + column[number] for base, column in zip(below, columns, strict=True)]
            there = "".join(
                f"L{at * step:.1f} {self.y(size):.1f}H{(at + 1) * step:.1f}" for at, size in enumerate(above)
            )
            back = "".join(
                f"L{(at + 1) * step:.1f} {self.y(size):.1f}H{at * step:.1f}"
                for at, size in reversed([*enumerate(below)])
            )
            yield f'<path class="{kind}" d="M{there[1:]}{back}Z"/>'
            below = above

    def grid(self) -> Iterator[str]:
        """Lines with figures, and the bound."""
        for part in (0.25, 0.5, 0.75):
            height = self.y(self.top * part)
            yield f'<line class="grid" x1="0" x2="{WIDTH}" y1="{height:.1f}" y2="{height:.1f}"/>'
            yield self.text(2, height - 3, format_bytes(round(self.top * part)), "figure")
        if self.bound is not None:
            height = self.y(self.bound)
            yield f'<line class="bound" x1="0" x2="{WIDTH}" y1="{height:.1f}" y2="{height:.1f}"/>'
            yield self.text(WIDTH, height - 3, f"{self.named} {format_bytes(self.bound)}", anchor="end")
        loops = "; shaded: one step of a loop" if self.picture.loops else ""
        yield self.text(0, TOP + HEIGHT + 14, f"program order{loops}; below: the largest buffers at the peak", "quiet")

    def bars(self) -> Iterator[str]:
        """The largest buffers at the peak, each with its words above."""
        for number, bar in enumerate(self.picture.bars):
            y = TOP + HEIGHT + 24 + ROW * number
            begin, width = self.x(bar.start), max(self.x(bar.end + 1) - self.x(bar.start), 2)
            words = f"{format_bytes(bar.bytes)} {bar.text}"
            most = int(WIDTH / LETTER)
            short = words if len(words) <= most else f"{words[: most - 3]}..."
            yield f"<g><title>{html.escape(words)}</title>{self.text(0, y + 10, short)}"
            yield f'<rect class="{bar.kind}" x="{begin:.1f}" y="{y + 15}" width="{width:.1f}" height="9" rx="2"/></g>'

    def text(self, x: float, y: float, words: str, style: str = "", anchor: str = "") -> str:
        """Words at a place."""
        more = (f' class="{style}"' if style else "") + (f' text-anchor="{anchor}"' if anchor else "")
        return f'<text x="{x:.1f}" y="{y:.1f}"{more}>{html.escape(words)}</text>'
