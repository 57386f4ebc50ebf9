"""A file that is put in its place at once: whoever reads it, and whatever stops us, it is the old one or the new one."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path


def write(path: Path, text: str) -> None:
    """Write a file anew; it keeps its permissions, and a link stays a link. Raises `OSError`, and leaves nothing behind then."""
    target = Path(os.path.realpath(path))
    with _beside(target) as new:
        with new.open("wb") as file:
            file.write(text.encode("utf-8"))
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileNotFoundError):
            new.chmod(target.stat().st_mode & 0o777)
        new.replace(target)


def unwritable(path: Path, *, make_folders: bool = False) -> str:
    """Why no file could be put there; empty if one could. Tried out: permissions do not bind everybody."""
    target = Path(os.path.realpath(path))
    try:
        if make_folders:
            target.parent.mkdir(parents=True, exist_ok=True)
        with _beside(target) as new:
            new.write_bytes(b"")
        with contextlib.suppress(FileNotFoundError):
            target.stat()  # a name may be too long for a file, when that of the one beside it is not
    except (OSError, ValueError) as error:
        return reason(error)
    return "it is a folder" if target.is_dir() else ""


def reason(error: Exception) -> str:
    """``No space left on device``."""
    return getattr(error, "strerror", None) or str(error)


@contextlib.contextmanager
def _beside(target: Path) -> Iterator[Path]:
    """A name for a new file in the same folder, which is gone afterwards: a short one, for the target's may be as long as it can be."""
    new = target.parent / f".nnx-{os.getpid()}-{time.monotonic_ns()}"
    try:
        yield new
    finally:
        new.unlink(missing_ok=True)
