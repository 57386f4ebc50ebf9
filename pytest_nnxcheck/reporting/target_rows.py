"""The words on targets: a row for each, a few words for a summary line. Made of the data alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from pytest_nnxcheck.core.chips import GIB, SHARE, parse_target
from pytest_nnxcheck.core.facts import Evidence
from pytest_nnxcheck.core.on_target import Network, OnTarget
from pytest_nnxcheck.core.text import Row, counted, format_bytes
from pytest_nnxcheck.reporting import memory_breakdown

PADDED, LITTLE = 0.1, 2**20
"""The part of a peak, and the bytes, below which padding is not shown: every compiler pads a little."""


def rows(targets: Iterable[OnTarget]) -> tuple[Row, ...]:
    """One row a target: whether the program fits, its copies of the state, the donated leaves that keep their buffer."""
    return tuple((on.target, "; ".join([fit(on), *details(on)])) for on in targets)


def where(on: OnTarget) -> Iterator[Row]:
    """The lines that hold most of the peak on a target, each with its largest buffers."""
    if on.split is not None and on.places:
        yield f"on {on.target}", f"peak {peak(on.peak or on.split.peak, on.limit)}; the rows below are of this program"
        yield from memory_breakdown.where(Evidence(split=on.split, places=on.places, buffers=on.buffers), on.split)


def fit(on: OnTarget) -> str:
    """``fits: peak 3.1 GiB of 15.75 GiB``, or why it does not, or is not known."""
    if on.left_out:
        return f"not checked: {on.left_out}"
    if on.peak is None:
        refused = f"does not fit {limit(on)}: {on.refused}".removesuffix(": ")
        if on.exhausted:
            refused = f"does not compile: {on.refused}"
        return "compiles; this compiler reports no totals" if on.fits else refused
    if on.fits and on.peak > on.limit:
        return f"fits: its compiler takes the program, whose totals sum up to {peak(on.peak, on.limit)}"
    if on.may_not_fit:
        figures = f"peak {peak(on.peak, on.limit)}, and up to {peak(on.most or 0, on.limit)} on the device"
        return f"may not fit {limit(on)}{share(on)}: {figures}"
    verb = "fits: peak {} of {}" if on.fits else "peak {} does not fit {}"
    return verb.format(peak(on.peak, on.limit), limit(on)) + share(on)


def details(on: OnTarget) -> Iterable[str]:
    """Further facts about a program on a target; none where it was refused or left out."""
    if on.left_out or on.refused:
        return
    if on.peak and on.unpadded is not None and on.peak - on.unpadded >= max(PADDED * on.peak, LITTLE):
        yield f"{100 * (1 - on.unpadded / on.peak):.0f} % of it is padding"
    if on.effort and not parse_target(on.target).chip.gpu:
        yield f"effort {on.effort}"
    if on.host:
        yield f"{format_bytes(on.host)} on the host"
    if on.state and (copies := f"{on.copies / on.state:.2f}") != "0.00":
        yield f"{copies} copies of the state"
    if on.donated:
        yield f"{on.donated - len(on.lost) - on.lost_too} of {on.donated} donated leaves kept"
    if on.lost_too:
        yield f"{on.lost_too} {lose(on.lost_too)} there and on the CPU"


_NETWORKS: dict[Network, str] = {"": "", "dcn": " between slices", "ici": " within a slice"}


def program(on: OnTarget) -> Iterator[Row]:
    """Rows on one call: the operations between devices, the work of each, and how a mesh cuts the arguments."""
    if on.collectives:
        each = (
            f"{'at least ' * one.at_least}{one.count} {one.kind}{_NETWORKS[one.network]} ({format_bytes(one.bytes)})"
            for one in on.collectives
        )
        yield f"{on.target} sends", f"{', '.join(each)} a call, by each device"
    if on.flops:
        yield (
            f"{on.target} computes",
            f"{in_thousands(on.flops)} flops, {format_bytes(on.accessed or 0)} read and written",
        )
    if on.spread:
        each = (
            f"{'whole' if not part.axes else 'over ' + ', '.join(part.axes)} {counted(part.leaves, 'array')} of"
            f" {in_thousands(part.elements)} elements ({format_bytes(part.bytes)} a device)"
            for part in on.spread
        )
        yield f"{on.target} holds", "; ".join(each)


def in_thousands(number: int) -> str:
    """A number with three digits and the letter of its size: ``425 M``."""
    size = next((at for at, _ in enumerate("KMGTP", 1) if number < 1000 ** (at + 1)), 5) if number >= 1000 else 0
    return f"{number / 1000**size:.3g} {' KMGTP'[size]}".rstrip()


def limit(on: OnTarget) -> str:
    return format_bytes(on.limit, decimals=2)


def peak(size: int, bound: int) -> str:
    """The peak, with a further decimal where rounding would hide which of the two is larger."""
    return format_bytes(size, decimals=2 if abs(size - bound) < 0.1 * GIB else 1)


def share(on: OnTarget) -> str:
    """The part of a GPU's memory that the limit is, in words."""
    if on.share == 1.0:
        return ""
    by_default = " by default" if on.share == SHARE else ""
    return f", the {100 * on.share:.0f} % of the memory that jax takes{by_default} (XLA_PYTHON_CLIENT_MEM_FRACTION)"


def brief(targets: Iterable[OnTarget], *, why: bool = False) -> str:
    """``fits v5e: 3.1 of 15.75 GiB; not checked on h100``: for a cell of a table; for a summary line with the reason ``why`` one was not checked."""
    return "; ".join(_brief(on) + (f": {on.left_out}" if why and on.left_out else "") for on in targets)


def _brief(on: OnTarget) -> str:
    if on.left_out:
        return f"not checked on {on.target}"
    if on.peak is None:
        if on.exhausted:
            return f"does not compile for {on.target}"
        return f"compiles for {on.target}" if on.fits else f"does not fit {on.target}: more than {limit(on)}"
    if on.fits and on.peak > on.limit:
        return f"fits {on.target}: its compiler takes the program"
    figures, whole = peak(on.peak, on.limit), limit(on)
    unit = whole.rpartition(" ")[2]
    fits = "fits" if on.fits else "does not fit"
    if on.may_not_fit:
        fits, figures = "may not fit", f"{figures.removesuffix(f' {unit}')} to {peak(on.most or 0, on.limit)}"
    return f"{fits} {on.target}: {figures.removesuffix(f' {unit}')} of {whole}"


def device(on: OnTarget) -> str:
    """``a v5e``, ``a device of v5e:2x4``."""
    if ":" in on.target:
        return f"a device of {on.target}"
    return f"{'an' if on.target[0] in 'ah' else 'a'} {on.target}"


def lose(leaves: int) -> str:
    """The verb for so many donated leaves."""
    return "loses its buffer" if leaves == 1 else "lose their buffer"


def larger_slices(name: str) -> tuple[str, ...]:
    """The next slices of a target's chip: of twice and of four times as many devices."""
    target = parse_target(name)
    return tuple(str(more) for times in (2, 4) if (more := target.of_size(times * target.devices)))
