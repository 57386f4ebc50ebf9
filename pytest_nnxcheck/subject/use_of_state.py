"""The use that a call makes of its state: the outputs that are new values of inputs, leaves without a use, state that changes and is not donated.

An output is matched by what goes into it, by name, and by type. The match names the leaf and the reason where a buffer was lost; only the
pointers prove that one was lost.
"""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

from pytest_nnxcheck.compat import staging
from pytest_nnxcheck.compat.arrays import array_type, nbytes
from pytest_nnxcheck.core.facts import Advice, ArrayType, NotDonated, Path, Unused
from pytest_nnxcheck.core.text import beginning
from pytest_nnxcheck.subject.profile import Profile, StateUse
from pytest_nnxcheck.subject.subject import Nodes, Subject
from pytest_nnxcheck.subject.traced_again import plain

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


# --- state that the call does not use, and state that it changes and does not donate


def of_state(subject: Subject, profile: Profile) -> Iterator[Advice]:
    """Advice on state that the call does not use, or changes and does not donate, whatever its size."""
    state = profile.state
    used = {path for number, path in enumerate(state.paths) if number not in state.unused}
    unused = [number for number, path in enumerate(state.paths) if path not in used]
    if unused:
        # Several objects are named one by one: nothing is the name of all.
        least = int(isinstance(subject.state, Nodes))
        parts = whole_parts((state.paths[number] for number in unused), used, least)
        names = dict.fromkeys(map(subject.path, parts))
        yield Unused(tuple(names), sum(state.sizes[number] for number in unused))
    if jit := staging.jitted(subject.function):
        yield from not_donated(subject, profile, jit)


def whole_parts(paths: Iterable[Path], others: Collection[Path], least: int) -> Iterator[Path]:
    """The shortest paths of ``least`` keys or more that lead to these leaves, and to none of the others."""
    shared = {path[:length] for path in others for length in range(len(path) + 1)}
    for path in paths:
        yield next((path[:length] for length in range(least, len(path)) if path[:length] not in shared), path)


def not_donated(subject: Subject, profile: Profile, jit: str) -> Iterator[NotDonated]:
    """State that the wrapped function, a jit, changes and does not donate. A leaf that gets another type has no use for its old buffer."""
    names = [*map(subject.path, profile.state.paths), *subject.input_names]
    every, leaves = [*profile.state.sizes, *map(nbytes, subject.inputs)], len(profile.state.paths)
    changed = {*changed_leaves(profile.state), *(leaves + number for number in changed_inputs(subject, profile))}
    by_argument: Counter[str] = Counter()
    for number in sorted(changed):
        if profile.program.donated[number] is False:
            by_argument[root(names[number])] += every[number]
    if by_argument:
        donated = {root(name) for name, given in zip(names, profile.program.donated, strict=False) if given}
        function = plain(subject.function)
        code = getattr(function, "__code__", None)
        yield NotDonated(
            function=getattr(function, "__name__", type(function).__name__),
            jit=jit,
            line=beginning(code) if code else "",
            arguments=tuple(by_argument),
            donate=option(subject.function, {*by_argument, *donated}),
            bytes=by_argument.total(),
        )


def changed_leaves(state: StateUse) -> Iterator[int]:
    """The numbers of the leaves that come back with another value of the same type."""
    moved = state.changed - {leaf.path for leaf in state.retyped} - {*state.removed}
    return (number for number, path in enumerate(state.paths) if path in moved)


def changed_inputs(subject: Subject, profile: Profile) -> Iterator[int]:
    """The numbers of the inputs that are state, and come back with another value of the same type: arguments, an `nnx.State` say, whose every array an output of the same name follows."""
    new = successors(subject, profile, "all")
    names, outputs = subject.input_names, profile.output
    followed = {
        number: output for number, output in new.items() if common(keys(names[number]), keys(outputs.names[output]))
    }
    batches = {root(name) for number, name in enumerate(names) if number not in followed}
    for number, output in followed.items():
        same_type = array_type(outputs.types[output]) == array_type(subject.inputs[number])
        if root(names[number]) not in batches and same_type and outputs.handed_out[output] != number:
            yield number


def root(name: str) -> str:
    """The argument that a name begins with."""
    return re.match(r"\w*", name)[0]  # type: ignore[index]


def option(function: Any, arguments: Collection[str]) -> str:
    """The option of a jit that donates these arguments; a name that is no parameter is that of a method's object, the first argument."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    positions = {each.name: number for number, each in enumerate(parameters) if each.kind is not each.KEYWORD_ONLY}
    if any(each.name in arguments for each in parameters if each.kind is each.KEYWORD_ONLY):
        return f"donate_argnames={tuple(sorted(arguments))}"
    numbers = sorted({positions.get(name, 0) for name in arguments})
    return f"donate_argnums={numbers[0] if len(numbers) == 1 else tuple(numbers)}"
