"""One call under a nesting, and what is known of it, as far as a program needs it."""

from __future__ import annotations

import functools
import inspect
import re
from dataclasses import dataclass
from typing import Any

from pytest_nnxcheck.core.facts import Path
from pytest_nnxcheck.core.nesting import Nesting
from pytest_nnxcheck.core.settings import Settings
from pytest_nnxcheck.engine.root import Root
from pytest_nnxcheck.engine.run import references
from pytest_nnxcheck.subject.plain_objects import fields_by_class
from pytest_nnxcheck.subject.profile import Profile
from pytest_nnxcheck.subject.subject import Nodes, Subject
from pytest_nnxcheck.transforms.compose import donated_inputs


@dataclass(frozen=True)
class Call:
    """One call, and what is known of it."""

    subject: Subject
    profile: Profile
    nesting: Nesting
    settings: Settings
    flags: tuple[bool, bool]
    """Of flax's mode: its graph, and graph updates."""
    alone: bool = True
    """Whether its test makes no other: several are all written in the same way."""

    @property
    def donated(self) -> tuple[int, ...]:
        """The numbers of the inputs that are donated."""
        return donated_inputs(self.subject, self.nesting, self.settings.donate)

    @property
    def opened(self) -> dict[str, Any]:
        """Classes that jax cannot take apart, with their fields that hold state."""
        return fields_by_class([value for _, value in self.subject.opened]) | dict(self.profile.opened)

    @property
    def root(self) -> Root:
        """The outermost jit."""
        return Root(self.subject, self.profile, self.nesting, self.settings.donate, self.references)

    @functools.cached_property
    def references(self) -> frozenset[Path]:
        """The leaves that are a `jax.Ref` under the nesting."""
        in_refs = self.subject.in_refs or self.profile.in_references
        return references(self.subject.fresh()) if in_refs else frozenset()

    def keys(self, path: str) -> str:
        """The keys that lead to a leaf, as arguments; empty where it is not in the state."""
        for name, label in sorted(self.subject.labels.items(), key=lambda item: len(item[1]), reverse=True):
            rest = path.removeprefix(label)
            if path.startswith(label) and rest[:1] in ("", ".", "["):
                steps = [repr(word) if word else key for word, key in re.findall(r"\.(\w+)|\[('[^']*'|[^\]]*)\]", rest)]
                return ", ".join([*([repr(name)] if isinstance(self.subject.state, Nodes) else []), *steps])
        return ""

    def value(self, path: str, state: str = "state") -> str:
        """The expression for a leaf or an input by its path; empty for what is neither."""
        if path in self.subject.input_names:
            return f"inputs[{self.subject.input_names.index(path)}]"
        return f"value_at({state}, {keys})" if (keys := self.keys(path)) else ""

    @functools.cached_property
    def whole(self) -> str:
        """The text of a call that a program need not take apart; empty for any other.

        Such a call has one module, arrays alone, and one array as its output.
        """
        subject, profile = self.subject, self.profile
        arrays_alone = subject.plain and not (subject.partial or subject.static or isinstance(subject.state, Nodes))
        one_array = profile.plain and profile.out_names == ("",)
        if not (self.alone and arrays_alone and subject.input_names and one_array):
            return ""
        parameters = inspect.signature(subject.function).parameters.values()
        given = [each.name for each in parameters if each.kind <= each.POSITIONAL_OR_KEYWORD]
        labels = [*subject.labels.values(), *subject.input_names]
        if getattr(subject.function, "__qualname__", "") == f"{type(subject.state).__qualname__}.__call__":
            return "type(subject).__call__" if given[1 : len(labels)] == labels[1:] else ""
        return "subject" if given[: len(labels)] == labels and "subject" not in labels else ""

    @property
    def given(self) -> str:
        """The arguments of a `whole` call by their names; ``*args, **kwargs`` for any other."""
        models = [*self.subject.labels.values()] if self.whole == "subject" else []
        return ", ".join([*models, *self.subject.input_names] if self.whole else ["*args", "**kwargs"])
