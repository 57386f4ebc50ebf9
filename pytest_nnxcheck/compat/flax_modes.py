"""The modes of flax: their names, and ways to run code, split a module and walk its graph (`nnx.iter_graph`) in one.

Graph mode follows references, and a transform hands changes of the graph out, or not (``graph_updates``); in tree mode a module is a
plain pytree. `nnx.set_graph_mode` and `nnx.set_graph_updates` are public, and work for all layers from flax 0.12.7 on.
Flax's two flags are read through ``current_value``, which its docstrings name and no page documents.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import flax
import jax
from flax import nnx

from pytest_nnxcheck.core.catalogue import MODES, REF
from pytest_nnxcheck.core.errors import SettingError

__tracebackhide__ = True  # pytest shows the frames of the user, not these

_FLAGS = {"graph": (True, True), "graph_no_updates": (True, False), "tree": (False, False), REF: (False, False)}
"""``nnx.set_graph_mode`` and ``nnx.set_graph_updates`` of each mode."""

_IN_GRAPH_MODE: dict[str, Any] = {"graph": True} if hasattr(nnx, "set_graph_mode") else {}


def modes() -> tuple[str, ...]:
    """The modes of the installed flax in which all layers can be written. Older flax has one mode, which is ``graph``.

    Flax 0.12.6 has `nnx.set_graph_mode`, but no `nnx.prefix` for a vmap without `nnx.StateAxes`, and 0.12.7 has both. References work from
    jax 0.10 on. All versions.
    """
    if not hasattr(nnx, "set_graph_mode") or not hasattr(nnx, "prefix"):
        return MODES[:2]
    return tuple(mode for mode in MODES if mode != REF or jax.__version_info__ >= (0, 10))


def takes_refs() -> bool:
    """True if a model whose Variables are references can be checked: from jax 0.10 and flax 0.12.7 on."""
    return REF in modes()


def with_refs(node: Any, *, ref: bool) -> Any:
    """A graph node whose Variables are references, or none of them is. From flax 0.12.7 on; before, no state that is checked holds one.

    Without references, code gets a Variable in the place of one that no Variable holds: it reads and writes both alike.
    """
    if not hasattr(nnx, "with_vars"):
        return node
    copy = nnx.with_vars(node, ref=ref, only=lambda _, variable: hasattr(variable, "shape"), allow_duplicates=True)
    for path, held in iter_graph(node):
        if isinstance(held, jax.Ref) and not ref:
            setattr(copy, path[0], nnx.Variable(held[...]))
    return copy


def mode_flags() -> tuple[bool, bool]:
    """The present setting of flax: (graph, graph updates). All versions."""
    if not hasattr(nnx, "set_graph_mode"):
        return _FLAGS["graph"]
    graph = bool(nnx.set_graph_mode.current_value())
    return graph, graph and bool(nnx.set_graph_updates.current_value())


@contextlib.contextmanager
def flax_mode(mode: str) -> Iterator[None]:
    """Run in a mode of flax for a while; ``current`` changes nothing. All versions.

    A function that was jitted at import keeps the traces of another mode: the context `_retraced` makes jax trace it again.
    """
    if mode == MODES[0]:
        yield
        return
    if not hasattr(nnx, "set_graph_mode"):
        yield
        return
    graph, updates = _FLAGS[mode]
    with nnx.set_graph_mode(graph), nnx.set_graph_updates(updates), _retraced()(mode):
        yield


@functools.cache
def _retraced() -> Any:
    """A context whose value is part of the keys of jax's caches: public on every jax that a flax with modes runs on. Tried on jax 0.9, 0.10 and 0.12."""
    return jax.make_user_context(None) if hasattr(jax, "make_user_context") else contextlib.nullcontext


def split(node: Any, *filters: Any) -> Any:
    """`nnx.split` in graph mode, whatever flax is set to: shared Variables are found in every mode. All versions."""
    return nnx.split(node, *filters, **_IN_GRAPH_MODE)


def state(node: Any, *filters: Any) -> Any:
    """`nnx.state` in graph mode, whatever flax is set to. All versions."""
    return nnx.state(node, *filters, **_IN_GRAPH_MODE)


def iter_graph(node: Any) -> Any:
    """`nnx.iter_graph` in graph mode, whatever flax is set to. All versions."""
    return nnx.iter_graph(node, **_IN_GRAPH_MODE)


def require_modes(wanted: tuple[str, ...]) -> None:
    """Refuse modes that the installed flax lacks. Raises `SettingError`."""
    if wanted == MODES[:1]:
        return
    lacking = [mode for mode in wanted if mode not in modes()]
    if lacking:
        raise SettingError(
            f"mode {lacking[0]!r} is not one of flax {flax.__version__}, which has {', '.join(modes())}: write one of"
            f" these, or install a newer flax (0.12.7 has {', '.join(MODES)})"
        )
