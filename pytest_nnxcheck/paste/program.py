"""The text of a program: the user's test, the layers that ran, what looks for the finding, and the line that calls.

`slicer` copies all but a few lines from source that exists. The plugin writes the program before the nesting runs, so that a killed process leaves it behind.
"""

from __future__ import annotations

import platform
import shlex
import textwrap
from collections.abc import Iterator
from dataclasses import replace

import flax
import jax
import jaxlib

from pytest_nnxcheck import wheels
from pytest_nnxcheck.compat import flax_modes
from pytest_nnxcheck.core.chips import parse_target
from pytest_nnxcheck.core.nesting import Nesting
from pytest_nnxcheck.core.outcome import Outcome
from pytest_nnxcheck.core.peak import OnTarget
from pytest_nnxcheck.core.text import lay_out
from pytest_nnxcheck.devices import FLAG
from pytest_nnxcheck.paste import looks, runtime
from pytest_nnxcheck.paste.call import Call
from pytest_nnxcheck.paste.findings import Looks, looks_of
from pytest_nnxcheck.paste.layers import call_text
from pytest_nnxcheck.paste.slicer import Slice, bound_in, globals_in
from pytest_nnxcheck.paste.usage import STAND_IN, Usage, one_line
from pytest_nnxcheck.reporting.report import Report, found_rows, headline, replay
from pytest_nnxcheck.subject import abstract_arrays
from pytest_nnxcheck.transforms import layers

STAND_IN_TEXT = """def {}(subject, *args, kwargs=None, **settings):
    return nnx_wrap(subject)(*args, **(kwargs or {{}}))"""
"""``check`` or ``assert_invariants``, as the user's own code calls it."""
USUAL = {
    "jax_enable_x64": False,
    "jax_default_prng_impl": "threefry2x32",
    "jax_debug_nans": False,
    "jax_numpy_rank_promotion": "allow",
}
SOURCES = (looks, runtime, layers, abstract_arrays, flax_modes)
"""The modules of ours whose functions the lines of a program call."""


def compose(calls: list[Call], usage: Usage, test: Report, path: str, outcome: Outcome | None = None) -> str:
    """The whole program of the calls of a test; it looks for the outcome of the last one, where that is known. Raises `NoSource`."""
    looks = looks_of(outcome, calls[-1]) if outcome is not None else Looks()
    nesting, copied = calls[-1].nesting, usage.slice
    texts = our_part(calls, copied, looks)
    user, ours = copied.chunks(ours=False), [*copied.chunks(ours=True), *texts]
    taken = {name for text in (*copied.imports, *user, *usage.setup) for name in bound_in(text)} - {"nnx_wrap"}
    own = "\n\n".join(ours)
    imports = {"import jax", "import jax.numpy as jnp", "from flax import nnx", *copied.imports}
    imports |= {f"import {name}" for name in ("contextlib", "types") if name in globals_in(own)}
    if any(taken & bound_in(text) for text in ours):  # names of ours that the user's code has too
        indented = textwrap.indent(own, "    ")
        own = f"def with_own_names():\n{indented}\n\n    return nnx_wrap\n\nnnx_wrap = with_own_names()"
    missing = "{} = None  # needs pytest: write it anew where the test uses it"
    parts = [
        "\n".join(
            f"# {one_line(line)}".rstrip() for line in header(nesting, test, path, outcome, looks.on).splitlines()
        ),
        "from __future__ import annotations" if copied.future else "",
        "\n".join(environment([*copied.folders], looks.on)),
        "\n".join(sorted(imports, key=lambda line: (line.startswith("from"), line))),
        "\n".join(configuration()),
        *((STAND_IN_TEXT if name in STAND_IN else missing).format(name) for name in copied.missing),
        section("the test", "\n\n".join(user)),
        section("the layers that ran around it, and what looks for the finding", own),
        section("the call", "\n".join(ending(calls[-1], usage))),
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


def our_part(calls: list[Call], copied: Slice, looks: Looks) -> list[str]:
    """The layers around the calls, and what the user's code gets in the place of ``nnx_wrap``. What those need is copied."""
    *earlier, last = [replace(call, alone=len(calls) == 1) for call in calls]
    texts = [call_text(call, copied, Looks(), f"_{number}") for number, call in enumerate(earlier, 1)]
    texts.append(call_text(last, copied, looks))
    wrapped = "wrapped"
    if earlier:
        in_order = ", ".join(f"*[wrapped_{number}] * {call.times}" for number, call in enumerate(earlier, 1))
        texts.append(f"CALLS = iter([{in_order}])")
        wrapped = "next(CALLS, wrapped)"
    texts.append(f"def nnx_wrap(subject):\n    return lambda {last.given}: {wrapped}(subject, {last.given})")
    for module in SOURCES:
        copied.take(module, sorted(globals_in("\n".join(texts))))
    if opened := {name: fields for call in calls for name, fields in call.opened.items()}:
        texts.append(f"OPENED.update({opened!r})")
    return texts


def configuration() -> Iterator[str]:
    """The settings of jax that change what a program computes, where they are not the usual ones."""
    for name, usual in USUAL.items():
        if (value := getattr(jax.config, name)) != usual:
            yield f"jax.config.update({name!r}, {value!r})"


def section(title: str, text: str) -> str:
    return f"# {f'--- {title} ':-<116}\n{text}"


def header(nesting: Nesting, test: Report, path: str, outcome: Outcome | None, on: OnTarget | None) -> str:
    """The header of a program: its finding in the words of the message, the versions, and the command that runs it."""
    rows = [("nesting", str(nesting)), *(found_rows(outcome) if outcome is not None else ())]
    versions = [f"{module.__name__} {module.__version__}" for module in (jax, jaxlib, flax)]
    machine = f"Python {platform.python_version()}, {platform.platform()}, {jax.default_backend()}"
    rows.append(("versions", f"{', '.join(versions)}, {machine}; it does not need the plugin"))
    if on is not None:
        rows.append(("needs", f"the wheel {on.wheel}, which compiles for {on.target}, and none of its devices"))
    if path:
        rows.append(("program", f"python {shlex.quote(path)}"))
    head = headline(outcome) if outcome is not None else "nnx: written before the nesting ran"
    return lay_out(head, test.test_id, [*rows, ("replay", replay(test, nesting))])


def environment(folders: list[str], on: OnTarget | None) -> Iterator[str]:
    """The lines that run before jax is imported: simulated devices, the platform, the variables of a target's compiler, the folders of the user's modules."""
    yield f"import {'os, sys' if folders else 'os'}"
    if on is not None:
        needed = wheels.WITHOUT_GPU if parse_target(on.target).chip.gpu else wheels.WITHOUT_TPU
        yield f"os.environ |= { ({**needed, wheels.LOG_LEVEL: '3'})!r}"
    if jax.default_backend() == "cpu":
        yield 'os.environ.setdefault("JAX_PLATFORMS", "cpu")'
        if (count := jax.device_count()) > 1:
            flags = f'os.environ.get("XLA_FLAGS", "") + " {FLAG}={count}"'
            yield f'os.environ |= {{"XLA_FLAGS": {flags}, "JAX_NUM_CPU_DEVICES": "{count}"}}'
    if folders:
        yield f"sys.path[:0] = {folders!a}"


def ending(call: Call, usage: Usage) -> Iterator[str]:
    """The arguments, then the call, in the mode of flax that the nesting ran in."""
    yield from usage.setup
    graph, updates = call.flags
    if not (graph and updates):
        yield f"with nnx.set_graph_mode({graph}), nnx.set_graph_updates({updates}):\n    {usage.call}"
    else:
        yield usage.call
    yield f'print("passed:", {str(call.nesting)!a})'
