"""Programs of jax: staging, compiler options, jaxprs, and what XLA tells of a compiled one."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

from pytest_nnxcheck.compat.arrays import unwrapped
from pytest_nnxcheck.compat.frames import raised_by_library
from pytest_nnxcheck.core.errors import Unfit
from pytest_nnxcheck.core.nesting import Misfit
from pytest_nnxcheck.core.text import first_line

__tracebackhide__ = True  # pytest shows the frames of the user, not these


def serialized_buffer_assignment(totals: Any) -> tuple[bytes | None, bool]:
    """XLA's ``BufferAssignmentProto``, and whether it is field 3 of the ``HloProto`` that is given in its place.

    ``totals`` is what ``memory_analysis()`` of a compiled program returned, which serializes both anew in each call.
    `None` where this jaxlib gives neither. No public way: ``memory_analysis()`` documents totals only. On jax 0.6.2 to 0.12 the proto is
    an attribute of its own, on jax 0.4.33 and 0.5.3 it stands in the other. Tried on all versions, CPU.
    """
    assignment = getattr(totals, "serialized_buffer_assignment_proto", None)
    return (assignment, False) if assignment else (getattr(totals, "serialized_hlo_proto", None), True)


def serialized_hlo_module(compiled: Any) -> bytes | None:
    """XLA's ``HloModuleProto`` of a compiled program as it was optimized, `None` where this jaxlib does not give it.

    No public way: ``as_text()`` has no instruction ids, which the buffer assignment names buffers by.
    Tried on all versions, CPU.
    """
    try:
        (module, *_) = compiled.runtime_executable().hlo_modules()
        proto: bytes = module.as_serialized_hlo_module_proto()
    except (AttributeError, ValueError, RuntimeError, NotImplementedError):
        return None
    return proto


def open_jaxpr(jaxpr: Any) -> Any:
    """The jaxpr inside a closed one. jax 0.12 has one type for both, whose ``jaxpr`` may be itself; open ones pass. All versions."""
    return getattr(jaxpr, "jaxpr", jaxpr)


def captured_values(jaxpr: Any) -> list[Any]:
    """The values that a closed jaxpr captured, in order; an open one has none. All versions."""
    return [unwrapped(value) for value in getattr(jaxpr, "consts", ()) or ()]


def scan_layout(eqn: Any) -> tuple[int, int]:
    """(constants, carries) of a scan equation: `num_consts`, `num_carry` up to jax 0.10, three flat trees from 0.12. All versions."""
    if "num_consts" in eqn.params:
        return eqn.params["num_consts"], eqn.params["num_carry"]
    consts, carry, _ = eqn.params["ft_in"].unpack()
    return len(list(consts)), len(list(carry))


@dataclass(frozen=True, slots=True)
class StagedJit:
    """A jitted function, called with arguments: what jax traced and lowered for them."""

    jitted: Any
    arguments: tuple[Any, ...]
    traced: Any
    lowered: Any

    @property
    def donated(self) -> tuple[bool, ...]:
        """Whether each of the flat arguments is donated; nothing of a program that captures a `jax.Ref`, whose arguments jax cannot tell."""
        import jax

        try:
            return tuple(info.donated for info in jax.tree.leaves(self.lowered.args_info))
        except ValueError:  # "Too many leaves for PyTreeDef"
            return ()

    def run(self, compiled: Callable[..., Any]) -> Any:
        """Run the compiled program on the arguments. Raises what jax raises."""
        try:
            return compiled(*self.arguments)
        except TypeError as error:
            if "Computation compiled for" not in str(error):
                raise
        # A leaked tracer was hoisted to a parameter that nobody passes (jax 0.5): the plain call says so in jax's words.
        return self.jitted(*self.arguments)


def staged_jit(
    wrapper: Callable[..., Any], f: Callable[..., Any], run: Callable[[StagedJit], Any], **options: Any
) -> Any:
    """``wrapper(f, **options)`` (`jax.jit` or `nnx.jit`) that traces and lowers once, and returns what ``run`` makes of that.

    `nnx.jit` of flax 0.10.2 has no ``trace``, and where it has one its result hides the abstract outputs: the `jax.jit` inside it is staged
    instead. All versions.
    """
    import jax

    def stage(jitted: Any) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            traced = jitted.trace(*args)
            return run(StagedJit(jitted, args, traced, traced.lower()))

        return call

    if wrapper is jax.jit:
        return stage(jax.jit(f, **options))
    jit = jax.jit
    with mock.patch.object(jax, "jit", lambda *args, **kwargs: stage(jit(*args, **kwargs))):
        return wrapper(f, **options)


def without_dead_code(jaxpr: Any) -> Any:
    """An open jaxpr without the equations that no output needs, inside loops too; its inputs stay.

    No public way: `jax.jit` drops them where it lowers, and not inside of loops. All versions.
    """
    from jax.interpreters import partial_eval

    return partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)[0]


def inputs_needed(jaxpr: Any, outputs: list[bool]) -> list[bool]:
    """For each input of an open jaxpr whether one of these outputs needs it, or an effect, inside loops and jits too.

    Before jax 0.12 a while loop needs all that it carries; a function with a rule of its own for the derivative does in all versions. No public way.
    All versions.
    """
    from jax.interpreters import partial_eval

    return list(partial_eval.dce_jaxpr(jaxpr, outputs)[1])


def jitted(function: Any) -> str:
    """How one writes the jit that a function is, ``nnx.jit`` or ``jax.jit``; empty where it is none.

    No public type: that of `jax.jit` is one of jaxlib, `nnx.jit` gives an object from flax 0.10.7 on, and a function that keeps its jit as ``inner`` before.
    All versions.
    """
    jit = vars(function).get("inner") if inspect.isfunction(function) else function
    package = type(jit).__module__.partition(".")[0]
    if package not in ("jaxlib", "flax") or not hasattr(jit, "lower"):
        return ""
    return "jax.jit" if jit is function and package == "jaxlib" else "nnx.jit"


def jitted_jaxpr(closed: Any, donated: tuple[int, ...], *, keep_unused: bool) -> Any:
    """A jit of a closed jaxpr: a function of its flat arguments, some of them donated. All versions."""
    import jax
    import jax.extend

    function = jax.extend.core.jaxpr_as_fun(closed)
    return jax.jit(function, donate_argnums=donated, keep_unused=keep_unused)


@contextlib.contextmanager
def configured(options: dict[str, Any]) -> Iterator[None]:
    """Options of jax for a while. They are public, but not all have an attribute to read them by. All versions."""
    import jax

    before = {name: jax.config.values[name] for name in options}
    try:
        for name, value in options.items():
            jax.config.update(name, value)
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


def quick_compiles() -> contextlib.AbstractContextManager[None]:
    """Compile without most optimizations for a while: what runs outside of our own jit compiles in two thirds of the time.

    The option is left alone where the backend is no CPU. All versions.
    """
    import jax

    return configured({"jax_disable_most_optimizations": True} if jax.default_backend() == "cpu" else {})


def whole_stacks() -> contextlib.AbstractContextManager[None]:
    """Programs keep every frame of the user's for a while; jax keeps the ten innermost, which may all be a library's.

    Measured: no time that can be told from noise. All versions.
    """
    return configured({"jax_traceback_in_locations_limit": -1})


def checks_values() -> bool:
    """Whether jax is set to check values while programs run, or to run them without staging: a trace tells little then. Public options. All versions."""
    import jax

    options = ("jax_debug_nans", "jax_debug_infs", "jax_disable_jit")
    return any(jax.config.values[name] for name in options)


def compiler_options() -> dict[str, Any] | None:
    """Optimization level 0 gives the same buffers on the CPU, and compiles in half the time (1290 programs, all versions)."""
    import jax

    return {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else None


def unfused_options() -> dict[str, Any] | None:
    """The options with which XLA fuses no operations and keeps none in a wider type, so that each is rounded as where it runs by itself.

    `None` where there are none.
    Tried on jax 0.6.2, 0.10.2 and 0.12.0.1, on the CPU; the XLA of jax 0.4.33 and 0.5.3 takes no list of passes here.
    """
    import jax

    if jax.default_backend() != "cpu" or jax.__version_info__ < (0, 6):
        return None
    return {
        "xla_backend_optimization_level": 0,
        "xla_disable_hlo_passes": "fusion",
        "xla_allow_excess_precision": False,
    }


def byte_bounds(array: Any) -> tuple[int, int]:
    """First and one-past-last address of a NumPy array: `numpy.byte_bounds` moved in NumPy 2. Tried on NumPy 1.26, 2.4, 2.5."""
    import numpy as np

    module = np.lib.array_utils if hasattr(np.lib, "array_utils") else np
    start, end = module.byte_bounds(array)
    return start, end


def shard_map(f: Callable[..., Any], mesh: Any, spec: Any) -> Callable[..., Any]:
    """``f`` over a mesh, with one spec for all that goes in and comes out.

    `jax.shard_map` from jax 0.6 on, before that in `jax.experimental`; the check that outputs are replicated is ``check_vma`` and
    ``check_rep``. It is off, as it refuses loops whose carry starts from constants. All versions.
    """
    import jax

    if hasattr(jax, "shard_map"):
        return jax.shard_map(f, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    from jax.experimental.shard_map import shard_map as experimental

    mapped: Callable[..., Any] = experimental(f, mesh=mesh, in_specs=spec, out_specs=spec, check_rep=False)
    return mapped


def nnx_shard_map(f: Callable[..., Any], mesh: Any, spec: Any) -> Callable[..., Any]:
    """The same with modules among the arguments; flax has `nnx.shard_map` from 0.10.7 on. Raises `Unfit` before. All versions."""
    import flax
    from flax import nnx

    if not hasattr(nnx, "shard_map"):
        raise Unfit(Misfit("no nnx.shard_map", flax.__version__))
    check = "check_vma" if "check_vma" in inspect.signature(nnx.shard_map).parameters else "check_rep"
    options: dict[str, Any] = {check: False}
    return nnx.shard_map(f, mesh=mesh, in_specs=spec, out_specs=spec, **options)


_NO_RULE = (
    "Cannot `vmap` ordered IO callback.",
    "performing a set/swap operation with vmapped value on an unbatched array reference",
    "performing an addupdate operation with vmapped value on an unbatched array reference",
)
"""How what jax raises begins where it maps an ordered `io_callback`, all versions, or a write to a captured `jax.Ref`, from jax 0.7 on."""


def fault_of_jax(error: BaseException | None, transforms: list[str]) -> Misfit | None:
    """What jax itself cannot do under ``transforms`` inside a jit: what it has no rule for, or fails one of its own assertions at; `None` for any other exception.

    No rule: ``ragged_dot`` under `jax.vmap`, a callback of which nobody said how it is mapped. All versions raise `NotImplementedError`; other words
    for it are those of ``_NO_RULE``, which no type tells.
    An assertion: a call that draws random numbers, in a branch, in a loop, differentiated, an ``assert`` without text in jax's rule for
    conditionals. Tried on all versions: jax 0.4.33, 0.5.3 and 0.6.2 fail it, jax 0.10.2 and 0.12 do not.
    """
    import jax

    if error is None or not transforms:
        return None
    without_rule = type(error) is NotImplementedError or any(map(str(error).startswith, _NO_RULE))
    if without_rule and raised_by_library(error):
        return Misfit("no rule", jax.__version__, first_line(error))
    if type(error) is not AssertionError or str(error):
        return None
    names = iter(transforms)
    nested = all(any(name in kind for name in names) for kind in (("grad",), ("scan", "fori_loop"), ("cond", "switch")))
    return Misfit("branch in a loop", jax.__version__) if nested else None
