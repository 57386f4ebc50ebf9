"""jax's persistent compilation cache, for the plugin's own compiles alone.

Its options are public, but not the folder that it has open: jax opens the folder of the first compile once for the process, and
writes to it whatever the options say later. A user's compiles after ours would go into our folder.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from pytest_nnxcheck import atomic_file
from pytest_nnxcheck.compat.compilation import configured

EQUAL_FROM = (0, 6, 2)
"""The first jax whose cache gives back an equal program: totals, buffers, lines, aliases, and donation keeps its pointers.

Tried on the CPU: jax 0.6.2, 0.10.2 and 0.12 do. On jax 0.4.33 and 0.5.3 ``memory_analysis()`` of a loaded program has no aliased bytes,
so that its peak is too high; all else is equal.
"""
OPTIONS: dict[str, Any] = {
    # Small programs are what a check compiles.
    "jax_persistent_cache_min_compile_time_secs": 0.0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
    # Without it, a program whose lines have moved would come back with its old lines.
    "jax_compilation_cache_include_metadata_in_key": True,
    # A file that cannot be read or written costs a compile, never a test.
    "jax_raise_persistent_cache_errors": False,
}
DIRECTORY = "jax_compilation_cache_dir"
_OPENED = ("_cache", "_cache_initialized", "_cache_checked", "_cache_used")
_WARNING = "Error (reading|writing) persistent compilation cache entry"
_folder: ContextVar[Path | None] = ContextVar("nnxcheck_compile_folder", default=None)


class _Programs:
    """The programs of a folder. jax's own class neither notices a damaged file nor ever writes it anew."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def get(self, key: str) -> bytes | None:
        """The bytes that were put there, or `None`."""
        return atomic_file.kept(self._path(key))

    def put(self, key: str, value: bytes) -> None:
        """Keep a compiled program; jax turns an `OSError` into a warning."""
        atomic_file.keep(self._path(key), value)

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}-cache"


@contextlib.contextmanager
def compile_folder(folder: Path | None) -> Iterator[None]:
    """Name the folder of `cached_compiles` for a while; with `None` it keeps nothing. jax itself is not touched yet."""
    token = _folder.set(folder)
    try:
        yield
    finally:
        _folder.reset(token)


def folder_of_compiles() -> Path | None:
    """The folder of `compile_folder`."""
    return _folder.get()


def no_compile_cache() -> str:
    """Why programs cannot be kept between runs here; empty if they can."""
    import jax

    values = jax.config.values
    if jax.__version_info__ < EQUAL_FROM:
        return f"jax {jax.__version__} gives back programs that tell no aliased bytes"
    if jax.default_backend() != "cpu":
        return f"untried on {jax.default_backend()}"
    if not {DIRECTORY, *OPTIONS} <= values.keys() or not all(hasattr(_module(), name) for name in _OPENED):
        return f"jax {jax.__version__} has other options than the versions that were tried"
    if values[DIRECTORY]:
        return f"{DIRECTORY} is set: the user keeps compiled programs himself"
    return "" if values["jax_enable_compilation_cache"] else "jax_enable_compilation_cache is off"


@contextlib.contextmanager
def cached_compiles() -> Iterator[None]:
    """Let jax read and write programs in the folder of `compile_folder` for a while; then put all of jax back as it was.

    Where `no_compile_cache` gives a reason, nothing is touched. Programs with callbacks are safe: jax leaves them out, or (0.12) gives
    them the callbacks of this process. The features of the processor are part of the key. All versions.
    """
    folder = _folder.get()
    if folder is None or no_compile_cache():
        yield
        return
    with _set({**OPTIONS, DIRECTORY: str(folder)}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=_WARNING)
        module = _module()
        module._cache, module._cache_initialized = _Programs(folder), True
        yield


@contextlib.contextmanager
def judged_compiles(*, ours: bool = True) -> Iterator[None]:
    """Compile for a while without the user's own cache folder; without ``ours``, in no cache folder at all.

    By default jax leaves lines out of its keys, so that a program from the user's folder may name lines that have moved, and before
    `EQUAL_FROM` it has no aliased bytes. jax cannot read a program again that it wrote for a chip that is not there. All versions.
    """
    import jax

    folder = jax.config.values.get(DIRECTORY)
    if not folder or (ours and folder == str(_folder.get())):
        yield
        return
    with _set({DIRECTORY: None}):
        yield


@contextlib.contextmanager
def _set(options: dict[str, Any]) -> Iterator[None]:
    """Close the folder that jax has opened and set options for a while; then put all back as it was."""
    module = _module()
    opened = {name: getattr(module, name) for name in _OPENED if hasattr(module, name)}
    with configured(options):
        try:
            module.reset_cache()
            yield
        finally:
            for name, value in opened.items():
                setattr(module, name, value)


def _module() -> Any:
    from jax._src import compilation_cache

    return compilation_cache
