"""The outputs that are new values of inputs.

An output is matched by what goes into it, by name, and by type. The match names the leaf and the reason where a buffer was lost; only the
pointers prove that one was lost.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet

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
    output = profile.output
    outputs = list(zip(output.names, map(array_type, output.types), strict=True)) if donated else []
    return new_values(donated, outputs, output.origins)


def new_values(
    inputs: Mapping[int, Typed], outputs: Sequence[Typed], origins: Sequence[AbstractSet[int]]
) -> dict[int, int]:
    """The number of the output that is the new value of each of these inputs, as far as there is one: the best matches first.

    ``origins`` are the numbers of the inputs that go into each output; it may be empty, where that is not known.
    """
    ways = []
    for number, of_input in inputs.items():
        for output, of_output in enumerate(outputs):
            rank = fit(of_input, of_output, origins[output] & inputs.keys() if origins else set(inputs), number)
            if rank is not None:
                ways.append((rank, -output, -number))
    new: dict[int, int] = {}
    taken = set[int]()
    for _, output, number in sorted(ways, reverse=True):
        if -number not in new and -output not in taken:
            new[-number] = -output
            taken.add(-output)
    return new


def fit(of_input: Typed, of_output: Typed, made_of: AbstractSet[int], number: int) -> tuple[int, ...] | None:
    """Rank an output as the new value of an input, the greater the better: by the inputs that it is ``made_of``, by name, by type; None where it does not fit."""
    path, place = keys(of_input[0]), keys(of_output[0])
    sole = 0 if number not in made_of else 1 if len(made_of) > 1 else 2
    named, deeper, alike = common(path, place), len(place) - len(path), likeness(of_input[1], of_output[1])
    words = any(not re.fullmatch(r"\[\d+\]", key) for key in path[len(path) - named :])
    # A name is enough if it is more than a number, or as deep as in a tuple that is returned; a type only with what goes into it.
    if not ((words or deeper > 0 or alike > 0) if named else (sole and alike > 1)):
        return None
    # The usual output is a tuple of results and new state: there paths are one key deeper.
    return sole, named, alike, -abs(deeper - 1)


def keys(path: str) -> list[str]:
    """The steps of a path behind its root: ``opt_state[0].mu['kernel']`` has three."""
    return re.findall(r"\.\w+|\['(?:[^'\\]|\\.)*'\]|\[\"[^\"]*\"\]|\[[^\]]*\]", path)


def common(one: list[str], other: list[str]) -> int:
    """The number of keys that two paths have in common at their ends."""
    pairs = zip(one[::-1], other[::-1], strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def likeness(one: ArrayType, other: ArrayType) -> int:
    """3 for the same type, 2 for the same shape, 1 for as many axes."""
    if one == other:
        return 3
    shapes = [kind.shape or () for kind in (one, other)]
    return 2 if shapes[0] == shapes[1] else int(len(shapes[0]) == len(shapes[1]))
