"""Files that are read and written whole: a reader finds the old content or the new one, never a part."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import stat
import time
from collections.abc import Iterator
from pathlib import Path


def read(path: Path) -> str:
    """The text of a file. Raises `OSError`, also for a pipe, a device or a socket, which may have no end; and `UnicodeDecodeError`."""
    if not _has_an_end(path):
        raise OSError(errno.EINVAL, "it is a pipe, a device or a socket, and no file")
    return path.read_text(encoding="utf-8")


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


def keep(path: Path, content: bytes) -> None:
    """Write bytes with their digest, for `kept`, over whatever is there. Raises `OSError`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with _beside(path) as new:
        new.write_bytes(_digest(content) + b"\n" + content)
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        new.replace(path)


def kept(path: Path) -> bytes | None:
    """The bytes that `keep` wrote; `None` where there are none, or where the digest does not fit: cut, changed, somebody else's."""
    try:
        content = path.read_bytes() if _has_an_end(path) else b""
    except OSError:
        return None
    digest, _, content = content.partition(b"\n")
    return content if digest == _digest(content) else None


def _digest(content: bytes) -> bytes:
    return hashlib.sha256(content).hexdigest().encode()


def _has_an_end(path: Path) -> bool:
    mode = path.stat().st_mode
    return stat.S_ISREG(mode) or stat.S_ISDIR(mode)  # to read a folder raises


def unwritable(path: Path, *, make_folders: bool = False) -> str:
    """Why no file can be written there; empty if one can. It writes one to find out: permissions do not bind everybody."""
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
    """A temporary name in the folder of the target: a short one, since the target's own may have the greatest length."""
    new = target.parent / f".nnx-{os.getpid()}-{time.monotonic_ns()}"
    try:
        yield new
    finally:
        new.unlink(missing_ok=True)
