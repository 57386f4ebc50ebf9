"""Things that are found out once, by a key: kept in memory for a test, and in the files of a folder for later runs."""

from __future__ import annotations

import contextlib
import hashlib
import shutil
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

from pytest_nnxcheck import atomic_file

V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class Folder(Generic[V]):
    """One file a key, with the digest of its content: a file that is cut, changed or somebody else's counts as none.

    jax takes one for its own folder of compiled programs: its own class neither notices a damaged file nor ever writes it anew.
    """

    path: Path
    suffix: str
    to_bytes: Callable[[V], bytes]
    of_bytes: Callable[[bytes], V]
    """Raises `ValueError`, `TypeError` or `LookupError` for bytes of another version."""

    def get(self, key: str) -> V | None:
        """The value that was put there, or `None`."""
        with contextlib.suppress(OSError, ValueError, TypeError, LookupError):
            digest, _, content = atomic_file.read_bytes(self._file(key)).partition(b"\n")
            return self.of_bytes(content) if digest == _digest(content) else None
        return None

    def put(self, key: str, value: V) -> None:
        """Write a value over whatever is there. Raises `OSError`, which jax turns into a warning."""
        content, file = self.to_bytes(value), self._file(key)
        self.path.mkdir(parents=True, exist_ok=True)
        with atomic_file.beside(file) as new:
            new.write_bytes(_digest(content) + b"\n" + content)
            if file.is_dir() and not file.is_symlink():
                shutil.rmtree(file)
            new.replace(file)

    def _file(self, key: str) -> Path:
        return self.path / (key + self.suffix)


@dataclass(slots=True)
class Kept(Generic[V]):
    """Values by their keys, each found out once."""

    values: dict[Hashable, V] = field(default_factory=dict)

    def recall(self, key: Hashable, find_out: Callable[[], V], folder: Folder[V] | None = None) -> V:
        """The value of a key: from memory, or from a folder, whose keys are texts; else it is found out, and kept in both.

        A file that cannot be read or written costs finding it out, never a test.
        """
        if key not in self.values:
            kept = None if folder is None else folder.get(str(key))
            self.values[key] = find_out() if kept is None else kept
            if folder is not None and kept is None:
                with contextlib.suppress(OSError):
                    folder.put(str(key), self.values[key])
        return self.values[key]

    def forget(self) -> None:
        """Drop what is kept in memory."""
        self.values.clear()


def _digest(content: bytes) -> bytes:
    return hashlib.sha256(content).hexdigest().encode()
