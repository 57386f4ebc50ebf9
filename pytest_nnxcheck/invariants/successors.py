"""Which output of a call is the new value of which input: by what goes into it, by name, and by type.

It names the leaf and the reason where a buffer was lost; whether one was lost is told by the pointers alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from pytest_nnxcheck.compat.arrays import array_type
from pytest_nnxcheck.core.facts import ArrayType
from pytest_nnxcheck.subject.profile import Profile
from pytest_nnxcheck.subject.subject import Subject

Typed = tuple[str, ArrayType]
"""Name and type of an array."""


def successors(subject: Subject, profile: Profile, donate: str) -> dict[int, int]:
    """The number of the output that is the new value of each donated input, as far as there is one."""
    donated = {
        number: (subject.input_names[number], array_type(subject.inputs[number])) for number in subject.donated(donate)
    }
    outputs = list(zip(profile.out_names, map(array_type, profile.out), strict=True)) if donated else []
    return new_values(donated, outputs, profile.origins)


def new_values(
    inputs: Mapping[int, Typed], outputs: Sequence[Typed], origins: Sequence[AbstractSet[int]]
) -> dict[int, int]:
    """The number of the output that is the new value of each of these inputs, as far as there is one: the best matches first.

    ``origins`` are the numbers of the inputs that go into each output; it may be empty, where that is not known.
    """
    ways = []
    for number, (name, kind) in inputs.items():
        for output, (place, other) in enumerate(outputs):
            made_of = origins[output] & inputs.keys() if origins else set(inputs)
            match = Match.of(keys(name), keys(place), kind, other, made_of, number)
            if match.likely:
                ways.append((match.rank, -output, -number))
    new: dict[int, int] = {}
    taken = set[int]()
    for _, output, number in sorted(ways, reverse=True):
        if -number not in new and -output not in taken:
            new[-number] = -output
            taken.add(-output)
    return new


@dataclass(frozen=True, slots=True)
class Match:
    """What speaks for an output as the new value of an input.

    ``made_of`` is 2 where of these inputs only this one goes into it, 1 where others do too; ``named`` is how many keys their paths have in
    common at their ends, and ``deeper`` how many more the output's has; ``alike`` is 3 for the same type, 2 for the same shape, 1 for as many axes.
    """

    made_of: int
    named: int
    deeper: int
    alike: int
    words: bool

    @classmethod
    def of(
        cls,
        path: list[str],
        place: list[str],
        kind: ArrayType,
        other: ArrayType,
        made_of: AbstractSet[int],
        number: int,
    ) -> Match:
        named = common(path, place)
        return cls(
            made_of=0 if number not in made_of else 1 if len(made_of) > 1 else 2,
            named=named,
            deeper=len(place) - len(path),
            alike=likeness(kind, other),
            words=any(not re.fullmatch(r"\[\d+\]", key) for key in path[len(path) - named :]),
        )

    @property
    def likely(self) -> bool:
        """A name is enough if it is more than a number, or as deep as in a tuple that is returned; a type only with what goes into it."""
        if self.named:
            return self.words or self.deeper > 0 or self.alike > 0
        return self.made_of > 0 and self.alike > 1

    @property
    def rank(self) -> tuple[int, ...]:
        """The greater, the better. The usual output is a tuple of results and new state: there paths are one key deeper."""
        return self.made_of, self.named, self.alike, -abs(self.deeper - 1)


def keys(path: str) -> list[str]:
    """The steps of a path behind its root: ``opt_state[0].mu['kernel']`` has three."""
    return re.findall(r"\.\w+|\[[^\]]*\]", path)


def common(one: list[str], other: list[str]) -> int:
    """How many keys two paths have in common at their ends."""
    pairs = zip(one[::-1], other[::-1], strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def likeness(one: ArrayType, other: ArrayType) -> int:
    if one == other:
        return 3
    shapes = [kind.shape or () for kind in (one, other)]
    return 2 if shapes[0] == shapes[1] else int(len(shapes[0]) == len(shapes[1]))
