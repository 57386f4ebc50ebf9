"""The program to paste: a file that runs one nesting of one test, and checks it, with jax and flax alone.

It is put together from text that exists: the layers that ran (`transforms`), what takes a call apart and looks for the known finding
(`runtime`, `checks`), and the user's own test (`user_source`). It is written before the nesting runs, so that a process that is killed leaves it
behind, and removed where there is nothing to show.
"""

from __future__ import annotations

import itertools
import platform
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

import flax
import jax
import jaxlib

from pytest_nnxcheck import wheels
from pytest_nnxcheck.core.chips import parse_target
from pytest_nnxcheck.core.nesting import Nesting
from pytest_nnxcheck.core.outcome import Outcome
from pytest_nnxcheck.core.peak import OnTarget
from pytest_nnxcheck.core.settings import Settings
from pytest_nnxcheck.devices import FLAG
from pytest_nnxcheck.reporting.report import headline
from pytest_nnxcheck.reproducer.assertions import judged_on
from pytest_nnxcheck.reproducer.calls_of_test import FILL_IN, Usage, one_line
from pytest_nnxcheck.reproducer.form import form_of
from pytest_nnxcheck.reproducer.nesting_text import Facts
from pytest_nnxcheck.reproducer.own_source import import_lines

STAND_INS = {
    "check": "def check(subject, *args, kwargs=None, **settings):\n    return nnx_wrap(subject)(*args, **(kwargs or {}))",
    "assert_invariants": "def assert_invariants(subject, *args, kwargs=None, **settings):\n    nnx_wrap(subject)(*args, **(kwargs or {}))",
}
"""What the user's own code takes from pytest and from this package, in a few lines."""
USUAL = {
    "jax_enable_x64": False,
    "jax_default_prng_impl": "threefry2x32",
    "jax_debug_nans": False,
    "jax_numpy_rank_promotion": "allow",
}


@dataclass(frozen=True)
class Spec:
    """One program: the nesting, how it is checked, the facts of its calls, the user's code, and the verdict where it is known."""

    nesting: Nesting
    settings: Settings
    calls: tuple[Facts, ...]
    title: str
    replay: str
    path: str
    flags: tuple[bool, bool] = (True, True)
    """Graph, and graph updates, of the mode of flax that the nesting ran in."""
    outcome: Outcome | None = None


# --- the text


def compose(spec: Spec, usage: Usage) -> str:
    """The whole program."""
    sources = usage.sources
    form = form_of(spec.outcome, spec.nesting, spec.settings, spec.calls, usage.names)
    stand_ins = [STAND_INS.get(name, f"{name} = {FILL_IN}  # needs pytest: write it anew") for name in sources.missing]
    holes = [*usage.holes, *(name for name in sources.missing if name not in STAND_INS)]
    needed = {"import jax", "import jax.numpy as jnp", "from flax import nnx", *(["import sys"] if holes else [])}
    imports = import_lines({*form.imports, *sources.imports, *needed})
    parts = [
        "\n".join(f"# {one_line(line)}".rstrip() for line in header(spec)),
        "from __future__ import annotations" if sources.future else "",
        "\n".join(environment([*sources.folders], judged_on(spec.outcome))),
        "\n".join([*imports, *configuration()]),
        f"{FILL_IN} = ..." if holes else "",
        *stand_ins,
        section("the test", sources.chunks()),
        section("the layers that ran around it", (*form.layers, *form.nesting)),
        section("how a call is taken apart, run and checked; nothing here is about the test", form.support),
        main(spec, usage, holes),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def section(text: str, parts: Sequence[str]) -> str:
    """Parts of a program under a title; those of one line stand together."""
    short = ["\n" not in part for part in parts]
    gaps = ["\n" if one and other else "\n\n" for one, other in itertools.pairwise(short)]
    body = "".join(itertools.chain.from_iterable(zip(parts, [*gaps, ""], strict=False)))
    return f"# {f'--- {text} ':-<116}\n{body}"


def header(spec: Spec) -> list[str]:
    """What the program shows, with which versions, and how to run it."""
    outcome = spec.outcome
    lines = [
        headline(outcome) if outcome else f"nesting: {spec.nesting} (written before it ran)",
        f"test: {spec.title}",
    ]
    if outcome is not None:
        lines += [f"nesting: {spec.nesting}", *([f"{outcome.verdict}: {outcome.reason}"] if outcome.reason else [])]
        for violation in outcome.violations:
            lines += [f"{violation.invariant}: {violation.summary}"]
            lines += [f"    {label:<10}  {text}" for label, text in violation.details]
            lines += [f"    hint        {violation.hint}"] if violation.hint else []
    versions = [f"{module.__name__} {module.__version__}" for module in (jax, jaxlib, flax)]
    machine = f"Python {platform.python_version()}, {platform.platform()}, {jax.default_backend()}"
    lines += [f"versions: {', '.join(versions)}, {machine}; it does not need the plugin"]
    if on := judged_on(outcome):
        lines += [f"needs the wheel {on.wheel}, which compiles for {on.target}, and none of its devices"]
    lines += [f"run:    python {shlex.quote(spec.path)}"] if spec.path else []
    return [*lines, f"replay: {spec.replay}"]


def environment(folders: list[str], on: OnTarget | None) -> list[str]:
    """What must be set before jax is imported: simulated devices, the platform, what the compiler of a target needs, where the user's modules are."""
    lines = [f"import {'os, sys' if folders else 'os'}"]
    if on is not None:
        needed = wheels.WITHOUT_GPU if parse_target(on.target).chip.gpu else wheels.WITHOUT_TPU
        lines.append(f"os.environ |= { ({**needed, wheels.LOG_LEVEL: '3'})!r}")
    if jax.default_backend() == "cpu":
        lines.append('os.environ.setdefault("JAX_PLATFORMS", "cpu")')
        if (count := jax.device_count()) > 1:
            flags = f'os.environ.get("XLA_FLAGS", "") + " {FLAG}={count}"'
            lines.append(f'os.environ |= {{"XLA_FLAGS": {flags}, "JAX_NUM_CPU_DEVICES": "{count}"}}')
    return [*lines, *([f"sys.path[:0] = {folders!a}"] if folders else [])]


def configuration() -> list[str]:
    """The settings of jax that change what a program computes, where they are not the usual ones."""
    changed = {name: getattr(jax.config, name) for name, usual in USUAL.items() if getattr(jax.config, name) != usual}
    return ["", *(f"jax.config.update({name!r}, {value!r})" for name, value in changed.items())] if changed else []


def main(spec: Spec, usage: Usage, holes: list[str]) -> str:
    """The lines at the end: what the arguments are, then the call, in the mode of flax that the nesting ran in."""
    lines = [*usage.setup]
    if holes:
        lines += [
            f"left = [name for name in {holes!r} if globals()[name] is {FILL_IN}]",
            "if left:",
            "    sys.exit(f\"fill in {', '.join(left)}: what the test had there could not be written\")",
        ]
    graph, updates = spec.flags
    if (graph, updates) != (True, True):
        lines.append(f"with nnx.set_graph_mode({graph}), nnx.set_graph_updates({updates}):\n    {usage.call}")
    else:
        lines.append(usage.call)
    return section("the call", ["\n".join([*lines, f'print("held:", {str(spec.nesting)!a})'])])
