"""Files that are read and written whole: a reader finds the old content or the new one, never a part."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path


def read(path: Path) -> str:
    """The text of a file. Raises `OSError`, also for a pipe, a device or a socket, which may have no end; and `UnicodeDecodeError`."""
    return read_bytes(path).decode()


def read_bytes(path: Path) -> bytes:
    """The content of a file. Raises `OSError`, also for a pipe, a device or a socket, which may have no end."""
    mode = path.stat().st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):  # to read a folder raises
        raise OSError(errno.EINVAL, "it is a pipe, a device or a socket, and no file")
    return path.read_bytes()


def write(path: Path, text: str) -> None:
    """Write a file anew; it keeps its permissions, and a link stays a link. Raises `OSError`, and leaves nothing behind then."""
    target = Path(os.path.realpath(path))
    with beside(target) as new:
        with new.open("wb") as file:
            file.write(text.encode("utf-8"))
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileNotFoundError):
            new.chmod(target.stat().st_mode & 0o777)
        new.replace(target)


def unwritable(path: Path, *, make_folders: bool = False) -> str:
    """Why no file can be written there; empty if one can. It writes one to find out: permissions do not bind everybody."""
    target = Path(os.path.realpath(path))
    try:
        if make_folders:
            target.parent.mkdir(parents=True, exist_ok=True)
        with beside(target) as new:
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
def beside(target: Path) -> Iterator[Path]:
    """A temporary name in the folder of the target: a short one, since the target's own may have the greatest length."""
    new = target.parent / f".nnx-{os.getpid()}-{time.monotonic_ns()}"
    try:
        yield new
    finally:
        new.unlink(missing_ok=True)
