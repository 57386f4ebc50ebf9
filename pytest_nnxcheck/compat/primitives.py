"""The primitives of jax by name, as equations of a jaxpr have them: names that change from version to version.

``eqn.primitive.name`` is what the documentation of jaxprs shows. Tried on all versions.
"""

from __future__ import annotations

SCAN, WHILE, COND = "scan", "while", "cond"

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
