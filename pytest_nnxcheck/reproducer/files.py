"""Where the programs to paste go: one file for each nesting of a test, written before it runs, kept where something broke.

A file that cannot be written never loses a run: it is said once, and the run goes on.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from pytest_nnxcheck.compat import flax_modes
from pytest_nnxcheck.core import settings
from pytest_nnxcheck.core.catalogue import REGISTERED
from pytest_nnxcheck.core.outcome import BodyFinished, BodyStarted
from pytest_nnxcheck.core.text import near_to
from pytest_nnxcheck.engine.example import CallStarted
from pytest_nnxcheck.reporting import report
from pytest_nnxcheck.reproducer import calls_of_test
from pytest_nnxcheck.reproducer.assertions import can_look_for
from pytest_nnxcheck.reproducer.calls_of_test import Usage, one_line

if TYPE_CHECKING:
    from pytest_nnxcheck.core.nesting import Nesting
    from pytest_nnxcheck.core.outcome import Outcome
    from pytest_nnxcheck.core.settings import Settings
    from pytest_nnxcheck.reproducer.compose import Spec
    from pytest_nnxcheck.reproducer.nesting_text import Facts
    from pytest_nnxcheck.subject.profile import Profile
    from pytest_nnxcheck.subject.subject import Subject

LONGEST = 60
"""Characters of a name in a file name, before its hash."""
KEPT = ("violated", "failed")
NONE = "none:"
"""What is told in place of a file where there is none."""


class ProgramWarning(UserWarning):
    """A program to paste could not be written."""


def file_name(text: str) -> str:
    """A name that every file system takes, and that no other text has: ``test_model.py-test_x-1f0c22ab``."""
    plain = re.sub(r"[^A-Za-z0-9_.]+", "-", text).strip("-.")
    return f"{plain[-LONGEST:].lstrip('-.')}-{hashlib.blake2b(os.fsencode(ascii(text)), digest_size=4).hexdigest()}"


@dataclass
class Programs:
    """The programs of one run: ``folder`` is where they go (none: they are kept as text), ``near`` what their paths are shown relative to.

    ``usage_of`` says how the body of an example, or the caller of a check, makes its calls.
    """

    title: str
    usage_of: Callable[[Any], Usage]
    replay: Callable[[Nesting], str]
    folder: Callable[[], Path] | None = None
    near: Path | None = None
    texts: dict[Nesting, str] = field(default_factory=dict)
    _body: Any = None
    _usages: dict[Any, tuple[Any, Usage]] = field(default_factory=dict)
    _specs: dict[Nesting, Spec] = field(default_factory=dict)
    _told: set[Nesting] = field(default_factory=set)
    _problem: str = ""
    _last: Nesting | None = None

    def listen(self, event: object) -> None:
        """Write the program of each call before it runs, and keep those that have something to show."""
        if isinstance(event, BodyStarted):
            self._body, self._specs = event.body, {}
        elif isinstance(event, CallStarted):
            self._write_before(event.subject, event.profile, event.nesting, event.settings)
        elif isinstance(event, BodyFinished):
            self._keep(event.outcomes)

    def _write_before(self, subject: Subject, profile: Profile | None, nesting: Nesting, chosen: Settings) -> None:
        """A nesting of a call is about to run; without a profile, the call is about to be traced for it."""
        with self._harmless():
            from pytest_nnxcheck.reproducer.compose import compose
            from pytest_nnxcheck.reproducer.nesting_text import facts_of
            from pytest_nnxcheck.subject.profile import UNKNOWN

            known = self._specs.get(nesting)
            calls = () if known is None else known.calls
            call = facts_of(subject, profile or UNKNOWN, nesting, chosen)
            if calls and calls[-1] == call and nesting == self._last:
                # The last facts go for every further call.
                return
            calls = calls[:-1] if calls and calls[-1] == call else calls
            spec = self._spec(nesting, chosen, (*calls, call))
            self._specs[nesting] = spec if profile is not None else replace(spec, calls=calls)
            if self.folder is not None:
                if self._last is not None and self._last not in {nesting, *self._told}:
                    # Of an example there is one file: that of what runs last.
                    self._path(self._last).unlink(missing_ok=True)
                self._last = nesting
                self._write(nesting, compose(spec, self._usage()))

    def _spec(self, nesting: Nesting, chosen: Settings, calls: tuple[Facts, ...]) -> Spec:
        from pytest_nnxcheck.reproducer.compose import Spec

        return Spec(
            nesting=nesting,
            settings=chosen,
            calls=calls,
            title=self.title,
            replay=self.replay(nesting),
            path=self._shown(nesting),
            flags=flax_modes.mode_flags(),
        )

    def with_program(self, outcome: Outcome) -> Outcome:
        """The outcome of a nesting with its program, which now tells what broke."""
        spec = self._specs.get(outcome.nesting)
        if outcome.verdict not in KEPT or outcome.nesting in self._told or not (spec or self._problem):
            return outcome
        broken = [violation.invariant for violation in outcome.violations]
        if broken and not any(map(can_look_for, outcome.violations)):
            return replace(outcome, program=f"{NONE} no program can look for {' and '.join(broken)} without the plugin")
        with self._harmless():
            from pytest_nnxcheck.reproducer.compose import compose

            assert spec is not None, self._problem
            told = replace(spec, outcome=outcome)
            self._told.add(outcome.nesting)
            self.texts[outcome.nesting] = compose(told, self._usage())
            if self.folder is not None:
                self._write(told.nesting, self.texts[outcome.nesting])
                return replace(outcome, program=told.path)
        return replace(outcome, program=self._problem and f"not written: {self._problem}")

    def _keep(self, outcomes: Mapping[Nesting, Outcome]) -> None:
        """An example has ended: programs of nestings that have nothing to show go."""
        for nesting in self._specs if self.folder is not None else ():
            known = outcomes.get(nesting)
            broke = known is not None and known.verdict in KEPT and not known.program.startswith(NONE)
            with self._harmless():
                if not broke:
                    self._path(nesting).unlink(missing_ok=True)
                    with contextlib.suppress(OSError):  # where another program is in it
                        self._path(nesting).parent.rmdir()
                elif nesting not in self._told and nesting in self.texts:
                    # It broke with other arguments: the program with those is the one to keep.
                    self._write(nesting, self.texts[nesting])
        self._body, self._specs, self._told, self._last = None, {}, set(), None

    def _usage(self) -> Usage:
        """How the present example makes its calls; read once for the same body and the same arguments."""
        body = self._body
        values = [*getattr(body, "args", ()), *getattr(body, "keywords", {}).values()]
        key = (id(getattr(body, "func", body)), *map(id, values))
        if key not in self._usages:
            self._usages = {key: ((body, values), self.usage_of(body))}
        return self._usages[key][1]

    def _path(self, nesting: Nesting) -> Path:
        assert self.folder is not None
        return self.folder() / file_name(self.title) / f"{file_name(str(nesting))}.py"

    def _shown(self, nesting: Nesting) -> str:
        """The path as the user types it, in the folder that he works in."""
        if self.folder is None:
            return ""
        path = str(self._path(nesting))
        return path if self.near is None else near_to((str(self.near),), path)

    def _write(self, nesting: Nesting, text: str) -> None:
        path = self._path(nesting)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode("utf-8", "backslashreplace"))

    @contextlib.contextmanager
    def _harmless(self) -> Any:
        """Nothing that goes wrong here may cost the run: it is said once."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - the user's code and file system may do anything
            if not self._problem:
                self._problem = one_line(f"{type(error).__name__}: {error}")
                text = f"the programs to paste of {one_line(self.title)} cannot be written ({self._problem})"
                with contextlib.suppress(ProgramWarning):
                    warnings.warn(ProgramWarning(text), stacklevel=2)


# --- the programs of a check outside of pytest


def of_check(
    frame: FrameType | None, subject: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], chosen: Settings
) -> Programs:
    """The programs of a `check`, as text: nobody said where files could go."""
    name = getattr(subject, "__qualname__", None) or type(subject).__qualname__

    def usage_of(_body: Any) -> Usage:
        return calls_of_test.of_check(frame, subject, args, kwargs, own_transforms(chosen))

    def replay(nesting: Nesting) -> str:
        return report.replay(report.Report((), settings.Settings()), nesting)

    return Programs(f"check({name})", usage_of, replay)


def own_transforms(chosen: Settings) -> list[Callable[..., Any]]:
    """The functions of the user's own transforms that a nesting of the settings may have."""
    layers = () if chosen.nesting is None else chosen.nesting.layers
    named = {*chosen.transforms, *(layer.transform for layer in layers)}
    return [each.function for (transform, _), each in REGISTERED.items() if transform in named]
