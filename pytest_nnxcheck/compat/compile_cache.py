"""Compile equal programs once: within a test by their lowered text, between runs by jax's persistent cache. Listen to the compiles of others.

The persistent cache is for the plugin's own compiles alone. Its options are public, but not the folder that it has open: jax opens the folder of the first compile once for the process, and
writes to it whatever the options say later. A user's compiles after ours would go into our folder.
"""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Callable, Container, Hashable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
from jax._src import compilation_cache

from pytest_nnxcheck.compat.arrays import as_array
from pytest_nnxcheck.compat.staging import compiler_options, configured, quick_compiles, whole_stacks
from pytest_nnxcheck.kept import Folder, Kept

__tracebackhide__ = True  # pytest shows the frames of the user, not these

EQUAL_FROM = (0, 6, 2)
"""The first jax whose cache gives back an equal program: totals, buffers, lines, aliases, and donation keeps its pointers.

Tried on the CPU: jax 0.6.2, 0.10.2 and 0.12 do. On jax 0.4.33 and 0.5.3 ``memory_analysis()`` of a loaded program has no aliased bytes,
so that its peak is too high; all else is equal.
"""
OPTIONS: dict[str, Any] = {
    # A check compiles small programs.
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
    """The reason why programs cannot be kept between runs here; empty if they can."""
    values = jax.config.values
    if jax.__version_info__ < EQUAL_FROM:
        return f"jax {jax.__version__} loads programs without their aliased bytes"
    if jax.default_backend() != "cpu":
        return f"untried on {jax.default_backend()}"
    if not {DIRECTORY, *OPTIONS} <= values.keys() or not all(hasattr(compilation_cache, name) for name in _OPENED):
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
        module: Any = compilation_cache
        module._cache, module._cache_initialized = Folder(folder, "-cache", bytes, bytes), True
        yield


UNUSABLE = "Some donated buffers were not usable"
"""The beginning of jax's warning of donation that XLA cannot use."""


def to_the_end(
    program: Callable[..., Any], state: Any, inputs: tuple[Any, ...], stand_ins: Container[int] = ()
) -> tuple[Any, Exception | None]:
    """Run to the end; for ``stand_ins`` among what is returned, by their ids, nothing runs. Donation that XLA cannot use is reported by us, with paths; jax's warning of it is left out."""
    try:
        with warnings.catch_warnings(), quick_compiles(), whole_stacks(), cached_compiles():
            warnings.filterwarnings("ignore", message=UNUSABLE)
            returned = program(state, *inputs)
            jax.block_until_ready([leaf for leaf in jax.tree.leaves(returned) if id(leaf) not in stand_ins])
            return jax.tree.map(as_array, returned), None
    except Exception as error:  # noqa: BLE001 - the user's code may raise anything
        return None, error


@contextlib.contextmanager
def judged_compiles(*, ours: bool = True) -> Iterator[None]:
    """Compile for a while without the user's own cache folder; without ``ours``, in no cache folder at all.

    By default jax leaves lines out of its keys, so that a program from the user's folder may name lines that have moved, and before
    `EQUAL_FROM` it has no aliased bytes. jax cannot read a program again that it wrote for a chip that is not there. All versions.
    """
    folder = jax.config.values.get(DIRECTORY)
    if not folder or (ours and folder == str(_folder.get())):
        yield
        return
    with _set({DIRECTORY: None}):
        yield


@contextlib.contextmanager
def _set(options: dict[str, Any]) -> Iterator[None]:
    """Close the folder that jax has opened and set options for a while; then put all back as it was."""
    opened = {name: getattr(compilation_cache, name) for name in _OPENED if hasattr(compilation_cache, name)}
    with configured(options):
        try:
            # `reset_cache` logs the path of the folder that is open, which ours has not.
            setattr(compilation_cache, _OPENED[0], None)
            compilation_cache.reset_cache()
            yield
        finally:
            for name, value in opened.items():
                setattr(compilation_cache, name, value)


# --- programs of the same text: a jit, and the same jit over an ``eval_shape`` or an idle ``remat``, say

_FUNCTION = re.compile(r"func\.func (?:public |private )?@([\w.$-]+)")
_NAMES = re.compile(r'module @\S+ |jax\.result_info = "[^"]*"(?:, )?')


def canonical(text: str) -> str:
    """The text of a StableHLO module without the names that jax gives: of the module, its results and its functions."""
    text = _NAMES.sub("", text)
    numbers = {name: str(number) for number, name in enumerate(dict.fromkeys(_FUNCTION.findall(text)))}
    return re.sub(r"@([\w.$-]+)", lambda match: f"@{numbers.get(match[1], match[1])}", text)


def beside_text(lowered: Any) -> Hashable | None:
    """The differences between programs of the same text: devices, weak types, kinds of keys, constants that are handed in, captured references.

    `None` for a program that calls Python code: the text names a callback by its primitive, from jax 0.6 on without an address. With
    ``jax_use_simplified_jaxpr_constants`` a captured array is an argument of the program, which keeps it alive, so that its id stays its own.
    No public way: ``in_avals`` and ``out_info`` lack the devices, and ``out_info`` the weak types. Tried on all versions.
    """
    try:
        arguments = lowered._lowering.compile_args
        if arguments["keepalive"] or arguments["host_callbacks"]:
            return None
        types = (
            tuple(arguments[name]) for name in ("global_in_avals", "global_out_avals", "in_shardings", "out_shardings")
        )
        written = arguments.get("mut")
        captured = [*(getattr(lowered._lowering, "const_args", None) or ()), *(written.in_mut if written else ())]
        outputs = tuple(written.out_mut) if written else ()
        own = tuple(f"captured at {id(array):#x}" for array in captured)
        beside = (*types, arguments.get("device_assignment"), own, outputs)
        hash(beside)
    except (AttributeError, KeyError, TypeError):
        return None
    return beside


def durable_text(text: str, lowered: Any, beside: Hashable) -> str:
    """The text of a program with all that is `beside_text`, for later processes; empty where that names objects of this process, or several devices. All versions."""
    more = repr(beside)
    arguments = lowered._lowering.compile_args
    devices = arguments.get("num_devices", len([*(arguments.get("device_assignment") or ())]))
    return f"{text}\n{more}" if devices == 1 and " at 0x" not in more else ""


@dataclass(slots=True, eq=False)
class Compiling:
    """A program that is compiled when something is asked of it first, for all that share it."""

    lowered: Any
    executable: bool
    """True if the folder of compiled programs keeps it."""
    program: Any = None
    read: dict[Any, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Compiled:
    """The compiled program of a lowered one."""

    compiling: Compiling
    shared: bool
    """True if it was compiled for another lowered program of the same text, and has the lines of that one."""
    lowered: Any
    key: str = ""
    """Its `durable_text`; empty where facts about it are of this process alone."""

    @property
    def program(self) -> Any:
        """The program, which is compiled now if it was not yet. Raises what XLA raises."""
        compiling = self.compiling
        if compiling.program is None:
            with judged_compiles(ours=compiling.executable):
                compiling.program = compiling.lowered.compile(compiler_options=compiler_options())
        return compiling.program

    @property
    def read(self) -> dict[Any, Any]:
        """Facts that were read of the program, for all that share it."""
        return self.compiling.read

    def __call__(self, *args: Any) -> Any:
        """Run it on the arguments of the program that was lowered. Raises what jax raises."""
        if not self.shared:
            return self.program(*args)
        positional, keywords = jax.tree.unflatten(self.program.in_tree, jax.tree.leaves((args, {})))
        return jax.tree.unflatten(self.lowered.out_tree, jax.tree.leaves(self.program(*positional, **keywords)))


@dataclass(slots=True)
class SharedPrograms:
    """The compiled programs of one test, by their text and `beside_text`. All versions: the output of ``as_text`` has no locations."""

    known: Kept[Compiled] = field(default_factory=Kept)
    on: bool = True

    def compiled(self, lowered: Any, *, alone: bool = False, runs: bool = True) -> Compiled:
        """The compiled program of a lowered one; ``alone`` compiles it anew. One that ``runs`` is kept in the folder of compiled programs. Raises what XLA raises."""
        beside = None if alone or not self.on else beside_text(lowered)
        if beside is None:
            return Compiled(Compiling(lowered, executable=True), shared=False, lowered=lowered)
        text = canonical(lowered.as_text())

        def find_out() -> Compiled:
            key = durable_text(text, lowered, beside)
            return Compiled(Compiling(lowered, executable=runs or not key), shared=False, lowered=lowered, key=key)

        known = self.known.recall((text, beside), find_out)
        return known if known.lowered is lowered else replace(known, shared=True, lowered=lowered)
