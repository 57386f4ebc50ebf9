"""Functions traced, lowered and compiled by jax: the parts of a jaxpr, options, the protos of a compiled program, and the names of primitives."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import jax
import jax.extend
import jax.numpy as jnp
from jax.interpreters import partial_eval

from pytest_nnxcheck.compat.arrays import unwrapped

__tracebackhide__ = True  # pytest shows the frames of the user, not these


def serialized_buffer_assignment(totals: Any) -> tuple[bytes | None, bool]:
    """XLA's ``BufferAssignmentProto``, and whether it is field 3 of the ``HloProto`` that is given in its place.

    ``totals`` is the result of ``memory_analysis()`` of a compiled program, which serializes both anew in each call.
    `None` where this jaxlib gives neither. No public way: ``memory_analysis()`` documents totals only. On jax 0.6.2 to 0.12 the proto is
    an attribute of its own, on jax 0.4.33 and 0.5.3 it is inside the other. Tried on all versions, CPU.
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


def writes_reference(eqn: Any, *, that_it_reads: bool = False) -> bool:
    """True if an equation writes to a reference, or to one that it reads too. No public way; tried on jax 0.10 and 0.12."""
    effects = [(type(effect).__name__, getattr(effect, "input", None)) for effect in eqn.effects]
    return any(name == "WriteEffect" and (not that_it_reads or ("ReadEffect", ref) in effects) for name, ref in effects)


def scan_layout(eqn: Any) -> tuple[int, int]:
    """(constants, carries) of a scan equation: `num_consts`, `num_carry` up to jax 0.10, three flat trees from 0.12. All versions."""
    if "num_consts" in eqn.params:
        return eqn.params["num_consts"], eqn.params["num_carry"]
    consts, carry, _ = eqn.params["ft_in"].unpack()
    return len(list(consts)), len(list(carry))


@dataclass(frozen=True, slots=True)
class StagedJit:
    """A jitted function, called with arguments, and its trace for them."""

    jitted: Any
    arguments: tuple[Any, ...]
    traced: Any
    """A `jax.stages.Traced`, which another platform may be able to lower alone."""

    @property
    def donated(self) -> tuple[bool, ...]:
        """True for each flat argument that is donated; empty for a program that captures a `jax.Ref`, whose arguments jax cannot list."""
        try:
            return tuple(info.donated for info in jax.tree.leaves(self.traced.args_info))
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
    """``wrapper(f, **options)`` (`jax.jit` or `nnx.jit`) that traces once, and returns the result of ``run`` for that.

    `nnx.jit` of flax 0.10.2 has no ``trace``, and where it has one its result hides the abstract outputs: the `jax.jit` inside it is staged
    instead. All versions.
    """

    def stage(jitted: Any) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            return run(StagedJit(jitted, args, jitted.trace(*args)))

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
    return partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)[0]


def inputs_needed(jaxpr: Any, outputs: list[bool]) -> list[bool]:
    """True for each input of an open jaxpr that one of these outputs or an effect needs, inside loops and jits too.

    Before jax 0.12 a while loop needs all that it carries, and in all versions a function with its own rule for the derivative needs all inputs.
    No public way. All versions.
    """
    return list(partial_eval.dce_jaxpr(jaxpr, outputs)[1])


def jitted(function: Any) -> str:
    """``nnx.jit`` or ``jax.jit`` for a jitted function; empty for any other.

    No public type: `jax.jit` gives an object of jaxlib; `nnx.jit` gives an object from flax 0.10.7 on, and before a function that keeps
    its jit as ``inner``. All versions.
    """
    jit = vars(function).get("inner") if inspect.isfunction(function) else function
    package = type(jit).__module__.partition(".")[0]
    if package not in ("jaxlib", "flax") or not hasattr(jit, "lower"):
        return ""
    return "jax.jit" if jit is function and package == "jaxlib" else "nnx.jit"


def jitted_jaxpr(closed: Any, donated: tuple[int, ...], *, keep_unused: bool) -> Any:
    """A jit of a closed jaxpr: a function of its flat arguments, some of them donated. All versions."""
    function = jax.extend.core.jaxpr_as_fun(closed)
    return jax.jit(function, donate_argnums=donated, keep_unused=keep_unused)


@contextlib.contextmanager
def configured(options: dict[str, Any]) -> Iterator[None]:
    """Set options of jax for a while. They are public, but not all have an attribute to read them by. All versions."""
    before = {name: jax.config.values[name] for name in options}
    try:
        for name, value in options.items():
            jax.config.update(name, value)
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


def quick_compiles() -> contextlib.AbstractContextManager[None]:
    """Compile programs outside of our own jit without most optimizations for a while, in two thirds of the time.

    Nothing is set where the backend is no CPU. All versions.
    """
    return configured({"jax_disable_most_optimizations": True} if jax.default_backend() == "cpu" else {})


def whole_stacks() -> contextlib.AbstractContextManager[None]:
    """Let jax keep every frame of a traceback for a while; by default it keeps the ten innermost, which may all be a library's.

    It takes no time that can be measured. All versions.
    """
    return configured({"jax_traceback_in_locations_limit": -1})


def checks_values() -> bool:
    """True if jax checks values while programs run: a trace says little then. Public options. All versions."""
    return any(jax.config.values[name] for name in ("jax_debug_nans", "jax_debug_infs"))


def jits_are_off() -> bool:
    """True if jax runs jitted functions without staging: `jax.disable_jit`, or the option. All versions."""
    return bool(jax.config.jax_disable_jit)


def without_leak_check() -> contextlib.AbstractContextManager[object]:
    """Turn jax' own check for leaked tracers off for a while: it takes for leaks the tracers that our walk holds while it looks.

    The public `jax.checking_leaks` is a partial that can only turn it on in this thread; its function turns it off. All versions.
    """
    off: contextlib.AbstractContextManager[object] = jax.checking_leaks.func(False)
    return off


def policy_names(policy: Any, depth: int = 2) -> frozenset[str]:
    """The names of values that a policy of `jax.checkpoint` is about, such as those of ``save_only_these_names``; none for any other policy.

    A policy may be made of others, and may call itself: ``depth`` ends the search.

    No public way: a function keeps them in its closure, an object of jax 0.10 in its attributes. Tried on all versions.
    """
    cells = [cell.cell_contents for cell in getattr(policy, "__closure__", None) or ()]
    kept = [*cells, *getattr(policy, "__dict__", {}).values()]
    found = (value for value in kept if isinstance(value, frozenset | set | tuple | list))
    named = {name for value in found for name in value if isinstance(name, str)}
    inner = (policy_names(other, depth - 1) for other in kept if callable(other) and depth)
    return frozenset(named.union(*inner))


def policy_saves(policy: Any, eqn: Any) -> bool:
    """True if a policy of `jax.checkpoint` saves or offloads what an equation makes, or if it raises.

    A policy is called as `jax.checkpoint` documents; the answers that are no `bool` have no public name. Tried on all versions.
    """
    try:
        answer = policy(eqn.primitive, *(var.aval for var in eqn.invars), **eqn.params)
    except Exception:  # noqa: BLE001 - it is the user's, and says no more here than that it does something
        return True
    return bool(answer) and type(answer).__name__ != "RecomputeType"


def compiler_options() -> dict[str, Any] | None:
    """Options for optimization level 0, which on the CPU gives the same buffers in half the time (1290 programs, all versions)."""
    return {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else None


_COMPILING = (
    "jax_compiler_enable_remat_pass",
    "jax_optimization_level",
    "jax_memory_fitting_level",
    "jax_exec_time_optimization_effort",
    "jax_memory_fitting_effort",
)


def settings_of_compiles() -> str:
    """The options of jax that change what its compilers make of a text, those that this jax has. Public options. All versions."""
    return repr([(name, jax.config.values[name]) for name in _COMPILING if name in jax.config.values])


def unfused_options() -> dict[str, Any] | None:
    """Options with which XLA neither fuses operations nor keeps results in a wider type: each is rounded as if it ran alone.

    `None` where there are none. Tried on jax 0.6.2, 0.10.2 and 0.12.0.1, on the CPU; the XLA of jax 0.4.33 and 0.5.3 takes no list of passes here.
    """
    if jax.default_backend() != "cpu" or jax.__version_info__ < (0, 6):
        return None
    return {
        "xla_backend_optimization_level": 0,
        "xla_disable_hlo_passes": "fusion",
        "xla_allow_excess_precision": False,
    }


def moved_to_chip(eqn: Any) -> list[Any]:
    """The results of an equation of `jax.device_put` into the memory of a device, as a `jax.memory.Space` or a sharding names it. All versions."""
    if eqn.primitive.name != "device_put":
        return []
    names = ({getattr(place, name, None) for name in ("memory_kind", "name")} for place in eqn.params["devices"])
    return [var for var, own in zip(eqn.outvars, names, strict=True) if own & {"Device", "device"}]


_PRODUCTS = frozenset({"dot_general", "ragged_dot", "ragged_dot_general", "conv_general_dilated"})
_TF32, _BFLOAT16 = 2.0**-10, 2.0**-7
"""The ``eps`` of the types to which chips round the operands of a product. That of float16 is the one of TF32."""
_OF_BACKEND = {"gpu": _TF32, "tpu": _BFLOAT16}
_OF_ALGORITHM = {"TF32": _TF32, "F16": _TF32, "BF16": _BFLOAT16}
"""The same, by the type that the name of a `jax.lax.DotAlgorithmPreset` begins with."""
_SEVERAL_TF32 = re.compile(r"^TF32_.*_X\d$")
"""An algorithm that makes several products of one, and is as exact as float32. One of bfloat16 is not: XLA rounds the product of a matrix and a vector to it."""


def rounding_of_product(eqn: Any) -> float:
    """The ``eps`` by which the present backend rounds the operands of a matrix product or convolution of float32; 0 where it does not.

    The precision is a parameter of the equation: `None`, one or a pair of `jax.lax.Precision`, or an algorithm. All versions.
    """
    name = eqn.primitive.name
    if name not in _PRODUCTS or all(var.aval.dtype not in ("float32", "complex64") for var in eqn.invars):
        return 0.0
    asked, default = eqn.params.get("precision"), _OF_BACKEND.get(jax.default_backend(), 0.0)
    if hasattr(asked, "lhs_precision_type") or hasattr(asked, "supported_lhs_types"):
        # jax lowers a convolution without the algorithm, and a ragged product with its casts alone.
        own = 0.0 if name == "conv_general_dilated" else _rounding_of_algorithm(asked, default)
        return own if name == "dot_general" else max(own, default)
    names = {getattr(each, "name", "DEFAULT") for each in (asked if isinstance(asked, tuple) else (asked,))}
    return default if names & {"DEFAULT", "HIGH"} else 0.0


def _rounding_of_algorithm(asked: Any, default: float) -> float:
    """The ``eps`` by which a `jax.lax.DotAlgorithm`, or a preset of one, rounds its operands."""
    if not hasattr(asked, "name"):
        return float(jnp.finfo(asked.lhs_precision_type).eps)  # type: ignore[no-untyped-call]
    if asked.name == "DEFAULT":
        return default
    # A CPU casts to float16, and ignores the rest of an algorithm.
    exact = jax.default_backend() == "cpu" and not asked.name.startswith("F16")
    return 0.0 if exact or _SEVERAL_TF32.match(asked.name) else _OF_ALGORITHM.get(asked.name.partition("_")[0], 0.0)


SCAN, WHILE, COND, SELECT = "scan", "while", "cond", "select_n"

LOOPS = frozenset({SCAN, WHILE})

REMATS = frozenset({"remat", "remat2", "checkpoint"})

CALLS = REMATS | {
    "pjit",
    "jit",
    "closed_call",
    "eval_jaxpr",
    "core_call",
    "custom_jvp_call",
    "custom_vjp_call",
    "custom_vjp_call_jaxpr",
}
"""Primitives that call a jaxpr of their own with the operands as they are."""

BARRIER, CONSTRAINT = "optimization_barrier", "sharding_constraint"

COPIES = frozenset({"copy", "copy_p", BARRIER, CONSTRAINT, "name", "stop_gradient"})
"""Primitives that hand their operand on."""

NEUTRAL = {"mul": 1, "div": 1, "add": 0, "sub": 0}
"""Primitives that XLA drops where their second operand is this number; a product and a sum also where the first one is."""

READ_SLICE, UPDATE_SLICE = "dynamic_slice", "dynamic_update_slice"

RESHAPES = frozenset({"broadcast_in_dim", "squeeze"})
"""Primitives that give all elements of their first operand, in order; a broadcast does where it adds axes of length one."""

UPDATES = frozenset({"dynamic_update_slice", "scatter", "scatter-add", "scatter-mul", "scatter-min", "scatter-max"})
"""Primitives that write a part of their first operand."""

JOINS = frozenset({"concatenate", "stack"})
"""Primitives that make one array of all operands; jax 0.12 has a `stack`."""

PARTS = frozenset(
    {"slice", "dynamic_slice", "split", "unstack", "squeeze", "reshape", "expand_dims", "broadcast_in_dim"}
)
"""Primitives that give some or all elements of their first operand, in order; a broadcast does where it has as many."""

GATHER, SLICES = "gather", frozenset({"slice", "dynamic_slice"})


@contextlib.contextmanager
def derivatives_taken() -> Iterator[list[str]]:
    """Collect a name for each derivative that is taken for a while, in code that is traced anew.

    There is no public way: all transforms come through these three functions, and before jax 0.6 their equations have no name. Tried on all versions.
    """
    taken: list[str] = []
    module = importlib.import_module("jax._src.interpreters.ad")

    def noted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            taken.append(name)
            return function(*args, **kwargs)

        return call

    names = [name for name in ("jvp", "vjp", "linearize") if hasattr(module, name)]
    patches: dict[str, Any] = {name: noted(name, getattr(module, name)) for name in names}
    with mock.patch.multiple(module, **patches):
        yield taken
