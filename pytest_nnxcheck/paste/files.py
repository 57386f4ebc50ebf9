"""The files of programs to paste: a draft of each call before it runs, and a file for each nesting that broke.

A file that cannot be written never loses a run: it is said once, and the run goes on.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

from pytest_nnxcheck.compat import flax_modes
from pytest_nnxcheck.core.nesting import Nesting
from pytest_nnxcheck.core.outcome import BodyFinished, BodyStarted, Outcome
from pytest_nnxcheck.core.settings import Settings
from pytest_nnxcheck.core.text import near_to
from pytest_nnxcheck.engine.example import CallStarted
from pytest_nnxcheck.paste import usage
from pytest_nnxcheck.paste.program import Looks, PastedCall, compose, looks_of, wrapped_text
from pytest_nnxcheck.paste.slicer import Slice
from pytest_nnxcheck.paste.usage import Usage, one_line
from pytest_nnxcheck.reporting.report import Report
from pytest_nnxcheck.subject.profile import UNKNOWN

LONGEST = 60
"""Characters of a name in a file name, before its hash: file systems take 255 of a name, and Windows 260 of a path."""
KEPT = ("violated", "failed")


class ProgramWarning(UserWarning):
    """A program to paste could not be written."""


def file_name(text: str) -> str:
    """A name that every file system takes, and that no other text has: ``test_model.py-test_x-1f0c22ab``."""
    plain = re.sub(r"[^A-Za-z0-9_.]+", "-", text).strip("-.")
    return f"{plain[-LONGEST:].lstrip('-.')}-{hashlib.blake2b(os.fsencode(ascii(text)), digest_size=4).hexdigest()}"


@dataclass
class Programs:
    """The programs of one run."""

    test: Report
    """A report of the test without outcomes: its name, and how to run it."""
    usage_of: Callable[[Any], Usage]
    """Returns the way in which the body of an example, or the caller of a check, makes its calls."""
    folder: Callable[[], Path] | None = None
    """Returns the folder of the files; without one they are kept as text alone."""
    near: Path | None = None
    """The folder that their paths are shown relative to."""
    texts: dict[Nesting, str] = field(default_factory=dict)
    """The programs of the nestings that broke."""
    _body: Any = None
    _call: PastedCall | None = None
    """The present call of the body."""
    _earlier: int = 0
    """The number of calls before it, and before those in a row that are written in the same way."""
    _alike: int = 0
    """The number of these."""
    _drafted: bool = False
    _problem: str = ""

    def listen(self, event: object) -> None:
        """Write the program of each call before it runs: the call may take the process with it."""
        if isinstance(event, BodyStarted):
            self._body, self._call, self._earlier, self._alike, self._drafted = event.body, None, 0, 0, False
        elif isinstance(event, CallStarted):
            with self._harmless():
                self._draft(event)
        elif isinstance(event, BodyFinished):
            with self._harmless():
                self._finish(event.outcomes)

    def with_program(self, outcome: Outcome) -> Outcome:
        """The outcome of a nesting with its program, which now looks for what broke."""
        call, broken = self._call, [violation.invariant for violation in outcome.violations]
        if outcome.verdict not in KEPT or outcome.program or not (call or self._problem):
            return outcome
        with self._harmless():
            if call is not None:
                if broken and not looks_of(outcome, call):
                    none = f"none: no program can look for {' and '.join(broken)} without the plugin"
                    return replace(outcome, program=none)
                path = self._path(str(outcome.nesting))
                self.texts[outcome.nesting] = self._write(call, path, outcome)
                return replace(outcome, program=self._shown(path))
        return replace(outcome, program=f"not written: {self._problem}")

    def _draft(self, event: CallStarted) -> None:
        """A call is about to run under a nesting; without a profile, it is about to be traced for it."""
        call = PastedCall(
            event.subject, event.profile or UNKNOWN, event.nesting, event.settings, flax_modes.mode_flags()
        )
        last, self._call = self._call, call
        if last is not None and last.subject is not call.subject:
            if wrapped_text(call, Slice(), Looks()) == wrapped_text(last, Slice(), Looks()):
                self._alike += 1
                return
            self._earlier, self._alike = self._earlier + self._alike + 1, 0
        if self.folder is not None:
            self._write(call, self._path("running"))

    def _finish(self, outcomes: Mapping[Nesting, Outcome]) -> None:
        """The body has ended: its draft goes, and a program of its nesting that has nothing to show."""
        names = ["running"] if self._drafted else []
        if self._call and ((nesting := self._call.nesting) not in outcomes or outcomes[nesting].verdict not in KEPT):
            self.texts.pop(nesting, None)
            names += [str(nesting)] * self._drafted
        self._body, self._call, self._drafted = None, None, False
        for path in filter(None, map(self._path, names)):
            path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # where another program is in it
                path.parent.rmdir()

    def _path(self, name: str) -> Path | None:
        return self.folder and self.folder() / file_name(self.test.test_id) / f"{file_name(name)}.py"

    def _shown(self, path: Path | None) -> str:
        """The path as the user types it, from the folder that paths are shown relative to."""
        if path is None or self.near is None:
            return str(path or "")
        return near_to((str(self.near),), str(path))

    def _write(self, call: PastedCall, path: Path | None, outcome: Outcome | None = None) -> str:
        """Write the program of a call, into a file if there are files."""
        self._drafted = True
        others = f"< {self._earlier}" * bool(self._earlier)
        if outcome is not None:
            others = f"not in range({self._earlier}, {self._earlier + self._alike + 1})"
        text = compose(call, others, self.usage_of(self._body), self.test, self._shown(path), outcome)
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(text.encode("utf-8", "backslashreplace"))
        return text

    @contextlib.contextmanager
    def _harmless(self) -> Iterator[None]:
        """Nothing that goes wrong here may cost the run: it is said once."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - the user's code and file system may do anything
            if not self._problem:
                self._problem = one_line(f"{type(error).__name__}: {error}")
                text = f"the programs to paste of {one_line(self.test.test_id)} cannot be written ({self._problem})"
                with contextlib.suppress(ProgramWarning):
                    warnings.warn(ProgramWarning(text), stacklevel=2)


# --- the programs of a check outside of pytest


def of_check(frame: FrameType | None, subject: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Programs:
    """The programs of a `check`, as text: nobody said where files could go."""
    name = getattr(subject, "__qualname__", None) or type(subject).__qualname__
    test = Report((), Settings(), test_id=f"check({name})")
    return Programs(test, lambda _body: usage.of_check(frame, subject, args, kwargs))
