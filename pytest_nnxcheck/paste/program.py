"""The text of a program: the user's test, the layers that ran, what looks for the finding, and the line that calls.

`slicer` copies all but a few lines from source that exists. The plugin writes the program before the nesting runs, so that a killed process leaves it behind.
"""

from __future__ import annotations

import ast
import platform
import shlex
from collections.abc import Iterator
from dataclasses import dataclass

import flax
import jax
import jaxlib

from pytest_nnxcheck import wheels
from pytest_nnxcheck.core.chips import parse_target
from pytest_nnxcheck.core.outcome import Outcome
from pytest_nnxcheck.core.peak import OnTarget
from pytest_nnxcheck.core.text import lay_out
from pytest_nnxcheck.devices import FLAG
from pytest_nnxcheck.engine import reference
from pytest_nnxcheck.paste import looks, runtime
from pytest_nnxcheck.paste.call import Call
from pytest_nnxcheck.paste.findings import judged_on
from pytest_nnxcheck.paste.layers import call_text
from pytest_nnxcheck.paste.slicer import Slice, bound_in, globals_in
from pytest_nnxcheck.paste.usage import STAND_IN, Usage, one_line
from pytest_nnxcheck.reporting.report import found_rows, headline
from pytest_nnxcheck.subject import abstract_arrays
from pytest_nnxcheck.transforms import layer, mapping

STAND_IN_TEXT = """def {}(subject, *args, kwargs=None, **settings):
    return nnx_wrap(subject)(*args, **(kwargs or {{}}))"""
"""``check`` or ``assert_invariants``, as the user's own code calls it."""
USUAL = {
    "jax_enable_x64": False,
    "jax_default_prng_impl": "threefry2x32",
    "jax_debug_nans": False,
    "jax_numpy_rank_promotion": "allow",
}
SOURCES = (looks, runtime, layer, mapping, reference, abstract_arrays)
"""Where the functions of ours are that the lines of a program call."""


@dataclass(frozen=True)
class Spec:
    """One program: its call, and the outcome where it is known."""

    call: Call
    title: str
    replay: str
    path: str
    outcome: Outcome | None = None


def compose(spec: Spec, usage: Usage) -> str:
    """The whole program. Raises `NoSource`."""
    copied, texts = usage.slice, our_part(spec, usage.slice)
    user = copied.chunks(ours=False)
    taken = {name for text in (*copied.imports, *user, *usage.setup) for name in bound_in(text)}
    own = renamed([*copied.chunks(ours=True), *texts], taken)
    imports = {"import jax", "import jax.numpy as jnp", "from flax import nnx", *copied.imports}
    imports |= {f"import {name}" for name in ("contextlib", "itertools", "types") if name in globals_in(own)}
    missing = "{} = None  # needs pytest: write it anew where the test uses it"
    parts = [
        "\n".join(f"# {one_line(line)}".rstrip() for line in header(spec).splitlines()),
        "from __future__ import annotations" if copied.future else "",
        "\n".join(environment([*copied.folders], judged_on(spec.outcome))),
        "\n".join(sorted(imports, key=lambda line: (line.startswith("from"), line))),
        "\n".join(configuration()),
        *((STAND_IN_TEXT if name in STAND_IN else missing).format(name) for name in copied.missing),
        section("the test", "\n\n".join(user)),
        section("the layers that ran around it, and what looks for the finding", own),
        section("the call", "\n".join(ending(spec, usage))),
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


def our_part(spec: Spec, copied: Slice) -> list[str]:
    """The layers around the call, and what the user's code gets in the place of ``nnx_wrap``. What those need is copied."""
    call, earlier = spec.call, ""
    texts = [call_text(call, copied, spec.outcome)]
    if call.earlier:
        texts.append("CALLS = itertools.count()")
        as_it_is = "call_abstract(subject, args, kwargs)" if call.subject.abstract else "subject(*args, **kwargs)"
        earlier = f"{as_it_is} if next(CALLS) < {call.earlier} else "
    texts.append(f"def nnx_wrap(subject):\n    return lambda {call.given}: {earlier}wrapped(subject, {call.given})")
    for module in SOURCES:
        copied.take(module, sorted(globals_in("\n".join(texts))))
    if call.opened:
        texts.append(f"OPENED.update({call.opened!r})")
    return texts


def configuration() -> Iterator[str]:
    """The settings of jax that change what a program computes, where they are not the usual ones."""
    for name, usual in USUAL.items():
        if (value := getattr(jax.config, name)) != usual:
            yield f"jax.config.update({name!r}, {value!r})"


def section(title: str, text: str) -> str:
    return f"# {f'--- {title} ':-<116}\n{text}"


def renamed(texts: list[str], taken: set[str]) -> str:
    """Our part of a program, with other names for what the user's part binds as well."""
    clash = {name for text in texts for name in bound_in(text)} & (taken - {"nnx_wrap"})
    whole = "\n\n".join(texts)
    tree = ast.parse(whole if clash else "")
    for node in ast.walk(tree):
        for part in () if isinstance(node, ast.keyword) else ("id", "name", "arg"):
            if getattr(node, part, None) in clash:
                setattr(node, part, f"{getattr(node, part)}_")
    return ast.unparse(tree) if clash else whole


def header(spec: Spec) -> str:
    """What the program shows, in the words of the message, with which versions, and how to run it."""
    outcome, rows = spec.outcome, [("nesting", str(spec.call.nesting))]
    rows += [] if outcome is None else found_rows(outcome)
    versions = [f"{module.__name__} {module.__version__}" for module in (jax, jaxlib, flax)]
    machine = f"Python {platform.python_version()}, {platform.platform()}, {jax.default_backend()}"
    rows.append(("versions", f"{', '.join(versions)}, {machine}; it does not need the plugin"))
    if on := judged_on(outcome):
        rows.append(("needs", f"the wheel {on.wheel}, which compiles for {on.target}, and none of its devices"))
    if spec.path:
        rows.append(("program", f"python {shlex.quote(spec.path)}"))
    head = headline(outcome) if outcome is not None else "nnx: written before the nesting ran"
    return lay_out(head, spec.title, [*rows, ("replay", spec.replay)])


def environment(folders: list[str], on: OnTarget | None) -> Iterator[str]:
    """What must be set before jax is imported: simulated devices, the platform, what the compiler of a target needs, where the user's modules are."""
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


def ending(spec: Spec, usage: Usage) -> Iterator[str]:
    """What the arguments are, then the call, in the mode of flax that the nesting ran in."""
    yield from usage.setup
    graph, updates = spec.call.flags
    if not (graph and updates):
        yield f"with nnx.set_graph_mode({graph}), nnx.set_graph_updates({updates}):\n    {usage.call}"
    else:
        yield usage.call
    yield f'print("held:", {str(spec.call.nesting)!a})'
