"""examples/downstream as a stranger's CI: the steps of its workflow, and those of our action, run in order in a fresh environment.

Run by ``nox -s downstream``. Steps that use an action of GitHub's are left out; the commands are those that the files show.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import venv
from dataclasses import dataclass, field
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
PROJECT = ROOT / "examples" / "downstream"
SHELL = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c"]
INPUT = re.compile(r"\$\{\{ inputs\.([\w-]+) \}\}")
LEAK = (
    "src/pocketlm/model.py",
    "        return self.head(x)\n\n    def start",
    "        self.last = x\n        return self.head(x)\n\n    def start",
)
PAGE = ROOT / "docs" / "large_suites.md"
SHARED = "import jax\n\n\n@jax.jit\ndef scaled(x):\n    return x * 2.0\n"
BOTH = (
    "from pocketlm.shared import scaled\n\n\ndef test_one():\n    scaled(1.0)\n\n\ndef test_two():\n    scaled(1.0)\n"
)
"""Two tests of a function that jax traces once a process."""
COPY = ("src/pocketlm/layers.py", "nnx.remat(Block.__call__, graph_updates=False)", "nnx.remat(Block.__call__)")

PAGE = ROOT / "docs" / "large_suites.md"
SHARED = "import jax\n\n\n@jax.jit\ndef scaled(x):\n    return x * 2.0\n"
TWO_TESTS = (
    "from pocketlm.shared import scaled\n\n\ndef test_one():\n    scaled(1.0)\n\n\ndef test_two():\n    scaled(1.0)\n"
)
"""They share a function that jax traces once a process."""


@dataclass(frozen=True)
class Step:
    name: str
    command: str
    environ: dict[str, str] = field(default_factory=dict)
    folder: str = "."


def workflow_steps(path: Path, job: str) -> list[Step]:
    described = yaml.safe_load(path.read_text())["jobs"][job]
    return [step_of(step, described.get("env", {})) for step in described["steps"] if "run" in step]


def action_steps(path: Path, **given: str) -> list[Step]:
    described = yaml.safe_load(path.read_text())
    inputs = {name: row["default"] for name, row in described["inputs"].items()}
    unknown = given.keys() - inputs.keys()
    assert not unknown, f"the action has no inputs {unknown}"
    return [step_of(step, {}, inputs | given) for step in described["runs"]["steps"] if "run" in step]


def step_of(step: dict, environ: dict[str, str], inputs: dict[str, str] | None = None) -> Step:
    def filled(text: str) -> str:
        text = INPUT.sub(lambda match: (inputs or {})[match[1]], text)
        assert "${{" not in text, f"step {step['name']!r}: only inputs can be filled in here: {text}"
        return text

    assert "${{" not in step["run"], f"step {step['name']!r}: values come through env, where nothing evaluates them"
    values = {name: filled(str(value)) for name, value in (environ | step.get("env", {})).items()}
    return Step(step["name"], step["run"], values, filled(step.get("working-directory", ".")))


@dataclass(frozen=True)
class Runner:
    """A machine of GitHub's, as far as the steps see it."""

    python: Path
    project: Path

    def run(self, step: Step, *, fails: bool = False, options: str = "") -> tuple[str, str]:
        """What a step printed, and what it wrote on its summary page."""
        page = self.project.parent / "summary.md"
        page.write_text("")
        path = os.pathsep.join([str(self.python.parent), os.environ["PATH"]])
        outside = {"PYTHONPATH", "PYTHONDONTWRITEBYTECODE", "PYTEST_ADDOPTS", "VIRTUAL_ENV"}
        environ = {name: value for name, value in os.environ.items() if name not in outside}
        environ |= {"PATH": path, "CI": "true", "GITHUB_ACTIONS": "true", "GITHUB_STEP_SUMMARY": str(page)}
        environ |= {"PYTEST_ADDOPTS": options} if options else {}
        print(f"-- {step.name}{': must fail' if fails else ''}", flush=True)
        ended = subprocess.run(
            [*SHELL, step.command],
            cwd=self.project / step.folder,
            env=environ | step.environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        print(ended.stdout, flush=True)
        assert ended.returncode == int(fails), f"step {step.name!r} ended with {ended.returncode}"
        return ended.stdout, page.read_text()

    def edit(self, change: tuple[str, str, str]) -> None:
        """Write a change into the project; its text must stand there exactly once."""
        name, old, new = change
        text = (self.project / name).read_text()
        assert text.count(old) == 1, f"{name} holds {old!r} {text.count(old)} times"
        (self.project / name).write_text(text.replace(old, new))


def has(text: str, *parts: str) -> None:
    flat = " ".join(text.split())  # a message breaks its rows where they would be too long
    missing = [part for part in parts if " ".join(part.split()) not in flat]
    assert not missing, f"missing {missing} in:\n{text}"


def healthy(runner: Runner) -> Step:
    """All steps pass, every feature of the plugin that the project uses has said so; return the step of the tests."""
    install, test = workflow_steps(PROJECT / ".github" / "workflows" / "ci.yml", "test")
    runner.run(install)
    said, page = runner.run(test)
    has(said, "6 passed", "2 tests watched: no test left a tracer behind", "expected to fail", "nestings compared")
    assert "not in peaks.json" not in said, "other nestings are compiled than the baseline knows: write it anew"
    has(page, "## ✓ nnx invariants: ")
    for suffix in ("html", "json", "md"):
        assert (runner.project / f"report.{suffix}").stat().st_size > 0, f"no report.{suffix}"
    return test


def nightly(runner: Runner) -> None:
    """The workflow of every night, one test of it."""
    _, test = workflow_steps(PROJECT / ".github" / "workflows" / "nightly.yml", "test")
    said, _ = runner.run(test, options="-k test_probe")
    has(said, "1 passed", "nnx report: report.html")
    assert "nnx memory baseline" not in said, "the profile of every night names no baseline"


def broken(runner: Runner, test: Step) -> None:
    """A leak and a copy in the model: the summary page names test, invariant, nesting and path."""
    row = "| `tests/test_invariants.py::test_forward` | {} | `jit` |"
    only = "-k test_forward"
    for change, invariant, paths in (
        (LEAK, "tracers", ["tracers remain in model.last", "leaked      model.last"]),
        (COPY, "memory", ["extra copies of its state", "copy of model.stack.blocks.grow.kernel"]),
    ):
        runner.edit(change)
        said, page = runner.run(test, fails=True, options=only)
        has(said, "1 failed", f"nnx invariant broken: {invariant}")
        has(page, row.format(invariant), "nesting     jit ", *paths)
        runner.edit((change[0], change[2], change[1]))


def action(runner: Runner) -> None:
    """The steps of action.yml, with inputs that a shell would fall over."""
    name = "it's a $(touch pwned) `touch pwned`"
    inputs = {"args": "tests -k 'probe or prompt'", "effort": "quick", "watch": "report", "memory-budget": "2x"}
    (run,) = action_steps(ROOT / "action.yml", report=name, **inputs)
    said, page = runner.run(run)
    has(said, "2 passed", "1 test watched: no test left a tracer behind")
    has(page, "## ✓ nnx invariants: ")
    assert not (runner.project / "pwned").exists(), "an input of the action was evaluated"
    missing = [kind for kind in ("html", "json", "md", "xml") if not (runner.project / f"{name}.{kind}").exists()]
    assert not missing, f"the action left no report as {missing}"


def large_suite(runner: Runner) -> None:
    """What docs/large_suites.md shows: which tests run after which change, in one process and in two."""
    page = PAGE.read_text()
    commands, fixture, lines = (block_of(page, language) for language in ("console", "python", "toml"))
    install, in_two = (line.removeprefix("$ ") for line in commands.splitlines())
    in_one = in_two.removesuffix(" -n 2")
    assert in_one != in_two, "the page shows no run in two processes"
    runner.run(Step("Install pytest-testmon and pytest-xdist", f"{install} --constraint constraints.txt"))

    section, expression = lines.splitlines()
    runner.edit(("pyproject.toml", section, f"{section}\n{expression}"))
    for name, text in (
        ("tests/conftest.py", fixture),
        ("tests/test_shared.py", TWO_TESTS),
        ("src/pocketlm/shared.py", SHARED),
    ):
        (runner.project / name).write_text(text)

    probe, decoding, shared = (f"src/pocketlm/{name}.py" for name in ("probe", "decoding", "shared"))
    for what, change, command, ends in (
        ("a first run", None, in_one, "8 passed"),
        ("nothing changed", None, in_one, "no tests ran"),
        ("a line moved", (probe, "import jax\n", "# first\nimport jax\n"), in_one, "no tests ran"),
        ("a model file changed", (probe, "y.mean()", "y.max()"), in_one, "1 passed"),
        ("one that two tests execute", (decoding, "argmax(-1)", "argmax(axis=-1)"), in_two, "2 passed"),
        ("what jax traces once", (shared, "2.0", "3.0"), in_one, "2 passed"),
        (
            "pinned versions changed",
            ("constraints.txt", "flax==", "# another\nflax=="),
            f"{in_one} --collect-only",
            "8 tests collected",
        ),
    ):
        if change:
            runner.edit(change)
        quickly = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
        said, _ = runner.run(Step(f"testmon: {what}", command, quickly), options="--nnx-transforms jit")
        has(said, ends)
        assert "matches no test" not in said, "a test that testmon left out is taken for one that is gone"


def block_of(page: str, language: str) -> str:
    """The one block of a page in a language."""
    (text,) = re.findall(rf"^```{language}\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("wheel", type=lambda text: Path(text).resolve())
    parser.add_argument("folder", type=lambda text: Path(text).resolve(), help="an empty folder to work in")
    arguments = parser.parse_args()
    shutil.rmtree(arguments.folder, ignore_errors=True)
    shutil.copytree(PROJECT, arguments.folder / "project")
    venv.create(arguments.folder / "venv", with_pip=True)
    runner = Runner(arguments.folder / "venv" / "bin" / "python", arguments.folder / "project")
    # The plugin is this one, and no other that an index may have.
    no_other = [str(runner.python), "-m", "pip", "install", "--quiet", "--no-deps", str(arguments.wheel)]
    subprocess.run(no_other, check=True)
    test = healthy(runner)
    nightly(runner)
    broken(runner, test)
    action(runner)
    large_suite(runner)
    print("downstream: the workflow passed, a leak and a copy failed it, the action ran, and testmon chose the tests")


if __name__ == "__main__":
    sys.exit(main())
