"""One call under a nesting, and what is known of it, as far as a program needs it."""

from __future__ import annotations

import functools
import inspect
import re
from dataclasses import dataclass
from typing import Any

from pytest_nnxcheck.core.nesting import Nesting
from pytest_nnxcheck.core.settings import Settings
from pytest_nnxcheck.subject.plain_objects import fields_by_class
from pytest_nnxcheck.subject.profile import Profile
from pytest_nnxcheck.subject.subject import Nodes, Subject
from pytest_nnxcheck.transforms.root import Root


@dataclass(frozen=True)
class Call:
    """One call, and what is known of it."""

    subject: Subject
    profile: Profile
    nesting: Nesting
    settings: Settings
    flags: tuple[bool, bool]
    """The flags of flax's mode: its graph, and graph updates."""
    times: int = 1
    """The number of times that its test makes it, one after the other."""
    alone: bool = True
    """True if its test makes no other: several are all written in the same way."""

    @property
    def opened(self) -> dict[str, Any]:
        """Classes that jax cannot take apart, with their fields that hold state."""
        return fields_by_class([value for _, value in self.subject.opened]) | dict(self.profile.output.opened)

    @property
    def root(self) -> Root:
        """The outermost jit."""
        return Root(self.subject, self.profile, self.nesting, self.settings.donate)

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

        Such a call has one module, which comes first, then arrays alone, and one array as its output.
        """
        subject, profile = self.subject, self.profile
        arrays_alone = subject.plain and not (subject.partial or subject.static or isinstance(subject.state, Nodes))
        if not self.alone or not arrays_alone or not (profile.output.plain and profile.output.names == ("",)):
            return ""
        labels = [*subject.labels.values(), *subject.input_names]
        parameters = inspect.signature(subject.function).parameters.values()
        given = [each.name for each in parameters if each.kind <= each.POSITIONAL_OR_KEYWORD][: len(labels)]
        # The program calls it by its own parameters, beside these two names.
        if not subject.input_names or given[1:] != labels[1:] or {"subject", "wrapped"} & {*labels}:
            return ""
        if given[0] == labels[0]:
            return "subject(state, *inputs)"
        return "state(*inputs)" if getattr(subject.function, "__name__", "") == "__call__" else ""

    @property
    def given(self) -> str:
        """The arguments of a `whole` call by their names; ``*args, **kwargs`` for any other."""
        model = [*self.subject.labels.values()] if self.whole.startswith("subject") else []
        return ", ".join([*model, *self.subject.input_names]) if self.whole else "*args, **kwargs"
