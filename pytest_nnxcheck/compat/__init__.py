"""The version room: every touch of a name of jax or flax that depends on the version, or that is not public.

Each function says what it is for, why there is no public way, and on which versions it was tried:
jax 0.4.33 and 0.5.3 with flax 0.10.2, jax 0.6.2 with flax 0.10.7, jax 0.10.2 with flax 0.12.8, jax 0.12 with flax 0.12.12
("all versions" below). Other rooms write ``compat.name``.
"""

from __future__ import annotations

from pytest_nnxcheck.compat.meshes import active_mesh, annotated, on_devices
from pytest_nnxcheck.compat.modes import (
    flax_mode,
    flax_version,
    is_mode_refusal,
    iter_graph,
    mode_flags,
    mode_words,
    modes,
    split,
    state,
)
from pytest_nnxcheck.compat.nodes import (
    attributes,
    cached_partial,
    flat_state,
    flattened_paths,
    is_graph_node,
    is_key,
    is_refusal,
    is_tracer_error,
    loops_that_compare,
    raw_leaves,
    scan_cure,
    variables,
    zeros,
)
from pytest_nnxcheck.compat.programs import (
    byte_bounds,
    compiler_options,
    open_jaxpr,
    quick_compiles,
    scan_layout,
    serialized_buffer_assignment,
    serialized_hlo_module,
    staged,
)
from pytest_nnxcheck.compat.values import (
    concrete,
    is_library_file,
    is_tracer,
    kind_of,
    set_variable_metadata,
    set_variable_value,
    trace_identity,
    tracer_kind,
    tracer_line,
    variable_kind,
    variable_metadata,
    variable_value,
)

__all__ = [
    "active_mesh",
    "annotated",
    "attributes",
    "byte_bounds",
    "cached_partial",
    "compiler_options",
    "concrete",
    "flat_state",
    "flattened_paths",
    "flax_mode",
    "flax_version",
    "is_graph_node",
    "is_key",
    "is_library_file",
    "is_mode_refusal",
    "is_refusal",
    "is_tracer",
    "is_tracer_error",
    "iter_graph",
    "kind_of",
    "loops_that_compare",
    "mode_flags",
    "mode_words",
    "modes",
    "on_devices",
    "open_jaxpr",
    "quick_compiles",
    "raw_leaves",
    "scan_cure",
    "scan_layout",
    "serialized_buffer_assignment",
    "serialized_hlo_module",
    "set_variable_metadata",
    "set_variable_value",
    "split",
    "staged",
    "state",
    "trace_identity",
    "tracer_kind",
    "tracer_line",
    "variable_kind",
    "variable_metadata",
    "variable_value",
    "variables",
    "zeros",
]
