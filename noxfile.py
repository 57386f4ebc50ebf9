"""The version matrix: ``nox`` runs all of it, ``nox -s lint types`` a part, ``nox -l`` lists the sessions."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import nox

nox.needs_version = ">=2025.10.14"
nox.options.default_venv_backend = "uv|virtualenv"

HERE = Path(__file__).parent
PROJECT = nox.project.load_toml(HERE / "pyproject.toml")
OLDEST, NEWEST = "3.11", "3.13"
ROWS = [
    nox.param("3.11", ("jax==0.4.33", "flax==0.10.2"), id="jax-0.4.33"),
    nox.param("3.11", ("jax==0.5.3", "flax==0.10.2"), id="jax-0.5.3"),
    nox.param("3.11", ("jax==0.6.2", "flax==0.10.7"), id="jax-0.6.2"),
    nox.param("3.11", ("jax==0.7.2", "flax==0.11.2"), id="jax-0.7.2"),
    nox.param("3.11", ("jax", "flax"), id="newest-3.11"),
    nox.param("3.13", ("jax", "flax"), id="newest-3.13"),
]
# Those of docs/targets.md.
OLDER_TARGETS = [*ROWS[1:3], nox.param("3.11", ("jax==0.10.2", "flax==0.12.8"), id="jax-0.10.2")]
# Each release of flax that no row above has, with the jax of its time.
FLAX_RELEASES = [
    nox.param(python, (f"jax=={jax}", f"flax=={flax}"), id=f"flax-{flax}")
    for python, jax, flaxes in (
        ("3.11", "0.5.0", ("0.10.3",)),
        ("3.11", "0.5.3", ("0.10.4", "0.10.5", "0.10.6")),
        ("3.11", "0.7.0", ("0.11.0", "0.11.1")),
        ("3.11", "0.7.2", ("0.12.0",)),
        ("3.11", "0.8.1", ("0.12.1", "0.12.2")),
        ("3.11", "0.9.0", ("0.12.3", "0.12.4")),
        ("3.11", "0.9.1", ("0.12.5", "0.12.6")),
        ("3.11", "0.10.2", ("0.12.7", "0.12.8")),
        ("3.13", "0.11.1", ("0.12.9",)),
        ("3.13", "0.11.2", ("0.12.10",)),
    )
    for flax in flaxes
]
WORKFLOWS = [
    str(path.relative_to(HERE))
    for folder in (HERE, HERE / "examples" / "downstream")
    for path in sorted((folder / ".github" / "workflows").glob("*.yml"))
]
# The versions of docs/published.md; what the others are not installed for is skipped.
PUBLISHED = [
    nox.param("3.13", ("google-tunix==0.1.7",), id="tunix"),
    nox.param("3.13", ("mamba2-jax==1.1.2", "mamba3-jax==1.0.1"), id="mamba"),
    nox.param("3.13", ("nnx-ppo==0.3.0", "canvit-nnx==0.2.0", "jraphx==0.1.0"), id="others"),
    nox.param("3.12", ("opifex==0.2.10", "avitai-artifex==0.1.15"), id="findings"),
    nox.param("3.13", ("keras==3.15.1", "probly==0.9.1", "zlynx==0.1.11", "optax==0.2.8"), id="more-findings"),
    nox.param("3.11", ("dantinox==0.4.14",), id="dantinox"),
    nox.param("3.13", ("attnax==0.2.0", "hyperbolix==1.4.0", "cax==0.4.4"), id="stale-reads"),
    nox.param("3.13", ("jaxkan==0.3.7", "jax-image-models==0.4.0"), id="plain-objects"),
    nox.param("3.11", ("gallifrey==0.1.1",), id="gallifrey"),
]
JAX_NIGHTLY = "https://us-python.pkg.dev/ml-oss-artifacts-published/jax/simple/"
FLAX_HEAD = "flax @ git+https://github.com/google/flax"
WORKERS = ("-n", "2")
PROCESSES = "tests/system/processes"
"""Workers of xdist, simulated devices, a run after a run: `system` runs them on the newest row, `floors` on the oldest."""
BY_VERSION = tuple(
    f"tests/engine/{folder}" for folder in ("calls", "donation", "invariants", "memory", "models", "transforms")
)
"""What may differ from one jax or flax to the next: `tests` runs these on the rows between the oldest and the newest.

The walk over Python objects, the arithmetic of parity and the cache of compiled programs run on the oldest row and the newest, and every night on all.
"""
BY_PYTHON = ("tests/engine/walk", "tests/engine/calls", "tests/plugin/watch")
"""What may differ from one Python to the next, code objects, frames and monitoring: `tests` runs these on the newest jax with the oldest Python."""
PASTED = "tests/system/paste/test_paste_programs.py"
"""`pasted` runs this file in one process, because what its tests share takes half a minute to make."""
PLAIN_PROGRAMS = "tests/system/test_published_programs.py"
"""Those of docs/published.md: `system` runs them as far as jax and flax alone go, `published` with the packages."""
ON_THE_OLDEST = (
    "tests/engine",
    "tests/plugin",
    PROCESSES,
    *(f"tests/unit/test_{name}.py" for name in ("chains", "nesting", "settings", "strategies")),
)
"""What depends on jax, flax, pytest, hypothesis or xdist: `floors` runs these on the oldest of each. Of `tests/unit` four files use hypothesis.

The other unit tests are plain functions on plain data: `readme` runs them once, and `calibrate` every night on all rows.
"""
TARGETS = "tests/targets"
PASTED_ON_TARGETS = "tests/system/paste/test_paste_targets.py"
"""`targets` runs this file besides its own folder. Without the wheels the file is skipped."""
DOCUMENTS = "tests/system/test_docs.py"
"""`targets` runs what the page on targets shows; elsewhere its blocks are skipped."""
LIGHT = """
import sys, pytest_nnxcheck.plugin.hooks
heavy = {"jax", "flax", "hypothesis"} & sys.modules.keys()
assert not heavy, f"loading the plugin imported {heavy}"
"""


def group(name: str) -> list[str]:
    """The pinned tools of one dependency group."""
    return list(nox.project.dependency_groups(PROJECT, name))


def quick_start() -> list[str]:
    """The commands that the README tells a newcomer to run."""
    block = re.search(r"<!-- quick start -->\n```console\n(.*?)```", (HERE / "README.md").read_text(), re.DOTALL)
    assert block is not None, "README.md has no block of commands after <!-- quick start -->"
    return [line.removeprefix("$ ") for line in block[1].splitlines() if line.startswith("$ ")]


def first_test() -> str:
    """The first test of the README."""
    block = re.search(r"^```python\n(.*?)```", (HERE / "README.md").read_text(), re.DOTALL | re.MULTILINE)
    assert block is not None, "README.md has no block of Python"
    return block[1]


def build_wheel(session: nox.Session, folder: Path) -> Path:
    """Build the wheel into a folder that holds no other."""
    shutil.rmtree(folder, ignore_errors=True)
    session.run("python", "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), ".")
    (built,) = folder.glob("pytest_nnxcheck-*.whl")
    return built


@nox.session(python=NEWEST)
def lint(session: nox.Session) -> None:
    """Ruff: rules and formatting. Import-linter: the order of the folders. The workflows and the action: their schemas, and what is unsafe in them."""
    session.install(*group("lint"))
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("lint-imports")
    session.run("check-jsonschema", "--builtin-schema", "vendor.github-workflows", *WORKFLOWS)
    session.run("check-jsonschema", "--builtin-schema", "vendor.github-actions", "action.yml")
    session.run("check-jsonschema", "--builtin-schema", "vendor.dependabot", ".github/dependabot.yml")
    forms = [".github/ISSUE_TEMPLATE/bug.yml", ".github/ISSUE_TEMPLATE/false_alarm.yml"]
    session.run("check-jsonschema", "--builtin-schema", "vendor.github-issue-forms", *forms)
    session.run("zizmor", "--offline", "--quiet", "--no-config", *WORKFLOWS, "action.yml")


@nox.session(python=NEWEST)
def types(session: nox.Session) -> None:
    """Mypy, strict, against the newest versions; pyright too, of what a typed downstream repository sees."""
    session.install(".", *group("types"))
    session.run("mypy")
    session.run("basedpyright")


@nox.session
@nox.parametrize(("python", "versions"), ROWS[1:-1])
def tests(session: nox.Session, versions: tuple[str, ...]) -> None:
    """What may differ by version, or by Python, on a row between the oldest (`floors`) and the newest (`readme`, `system`). Arguments after ``--`` go to pytest."""
    session.install(".[test]", *versions)
    newest = versions == ROWS[-1].args[1]
    session.run("pytest", *WORKERS, *(BY_PYTHON if newest else BY_VERSION), *session.posargs)


@nox.session
@nox.parametrize(("python", "versions"), FLAX_RELEASES)
def flax_releases(session: nox.Session, versions: tuple[str, ...]) -> None:
    """What may differ by version, on a release of flax between two rows: flax changes in each of them. Runs every night."""
    session.install(".[test]", *versions)
    session.run("pytest", *WORKERS, *BY_VERSION, *session.posargs)


@nox.session(python=NEWEST)
def system(session: nox.Session) -> None:
    """What `pytest` alone leaves out: whole processes, and what is slow, such as real sizes, documents, a run twice."""
    session.install(".[test]")
    those = "(system or slow) and not full"
    session.run("pytest", *WORKERS, "-m", those, f"--ignore={PASTED}", "tests", *session.posargs)


@nox.session
@nox.parametrize(("python", "versions"), [ROWS[0], ROWS[-1]])
def pasted(session: nox.Session, versions: tuple[str, ...]) -> None:
    """The programs to paste, of every way to fail, in an interpreter that has neither this plugin nor pytest."""
    session.install(".[test]", *versions)
    session.run("pytest", "-m", "not full", PASTED, *session.posargs)


@nox.session
@nox.parametrize(("python", "versions"), ROWS)
def calibrate(session: nox.Session, versions: tuple[str, ...]) -> None:
    """Run every test and every example, for hours: the whole corpus, with the shortcuts and without, under every effort.

    Other sessions run one test of each kind.
    """
    session.install(".[test]", *versions)
    session.run("pytest", *WORKERS, "-m", "", "tests", *session.posargs)
    # On flax 0.10 a closure around state that changes leaks in truth (google/flax#4520).
    styles = ["--nnx-styles", "argument,functional"] if "flax==0.10" in versions[1] else []
    session.run("pytest", "-n", "2", "-m", "", "examples", *styles)


@nox.session
@nox.parametrize(("python", "versions"), ROWS)
def verdicts(session: nox.Session, versions: tuple[str, ...]) -> None:
    """Write the verdict of every nesting of the corpus to verdicts-ROW.jsonl, minutes a row; a folder after ``--`` has those of another commit to compare with."""
    session.install(".[test]", *versions)
    name = re.sub(r"[^\w.-]+", "-", "-".join((session.python if isinstance(session.python, str) else "", *versions)))
    written = Path(f"verdicts-{name}.jsonl")
    session.run("python", "tests/verdicts.py", str(written))
    if session.posargs:
        session.run("python", "tests/verdicts.py", str(Path(session.posargs[0]) / written.name), str(written))


@nox.session(python=NEWEST)
def steady(session: nox.Session) -> None:
    """A mixed suite many times over, in another order, with other workers, seeds and caches: each test has one verdict and one message. ``-- 500`` runs every night.

    What else comes after ``--`` goes to pytest: with fewer styles and transforms a run is quicker.
    """
    session.install(".[test]")
    # Twelve runs have each cache, cold and warm, with and without workers, each in another order and with other seeds: see `Way`. More runs of the
    # same ways find only what one seed in hundreds shows, which the 500 of every night are for.
    few = ["12", "--nnx-styles=argument,closure", "--nnx-transforms=jit,scan,vmap"]
    session.run("python", "tests/steady.py", *(session.posargs or few))


@nox.session(python=NEWEST)
def targets(session: nox.Session) -> None:
    """The compilers of a TPU and of a GPU, which are wheels of 1.1 GB: healthy models and examples, each way to break there, programs to paste, meshes, real sizes, the page."""
    session.install(".[test,tpu,cuda]")
    session.run("pytest", *WORKERS, "-m", "not full", TARGETS, PASTED_ON_TARGETS, *session.posargs)
    session.run("pytest", "-k", "targets.md", DOCUMENTS)
    session.run("pytest", *WORKERS, "--nnx-target", "v5e,h100", "examples/test_model.py")
    # 62 GiB for a training step of seven billion parameters: no v5e, and three quarters of an H100, hold it.
    session.run("pytest", "--nnx-target", "v5p,h200", "examples/test_language_model.py")


@nox.session
@nox.parametrize(("python", "versions"), OLDER_TARGETS)
def older_targets(session: nox.Session, versions: tuple[str, ...]) -> None:
    """The compilers that belong to older versions of jax, and what they do not tell."""
    session.install(".[test,tpu,cuda]", *versions)
    session.run("pytest", *WORKERS, "-m", "not full", TARGETS, PASTED_ON_TARGETS, *session.posargs)


@nox.session(python=NEWEST)
def mutants(session: nox.Session) -> None:
    """The code broken on purpose in a hundred places, one at a time: a test must fail for each. Files and folders after ``--`` are where."""
    session.install(".[test,tpu,cuda]")
    session.run("python", "tests/mutants.py", *session.posargs)


@nox.session(python=OLDEST)
def floors(session: nox.Session) -> None:
    """The oldest pytest and hypothesis, with the oldest jax and flax: all that may differ there. What is slow runs there every night."""
    session.install(".[test]", "jax==0.4.33", "flax==0.10.2", "pytest==8.0.*", "hypothesis==6.100.*")
    session.run("pytest", *WORKERS, *ON_THE_OLDEST, *session.posargs)


@nox.session(python=NEWEST)
def page(session: nox.Session) -> None:
    """The page of a report in headless Chromium, which is installed where it is missing and this is root."""
    if not (shutil.which("chromium") and shutil.which("chromedriver")) and os.geteuid() == 0:
        session.run("apt-get", "update", "-qq", external=True)
        session.run("apt-get", "install", "-yqq", "chromium", "chromium-driver", external=True, silent=True)
    session.install(".[test]", *group("browser"))
    session.run("pytest", "tests/system/test_page_browser.py", *session.posargs, env={"NNXCHECK_BROWSER": "required"})


@nox.session(python=NEWEST)
def site(session: nox.Session) -> None:
    """The site of docs/, built into a temporary folder; every warning is an error. ``-- serve`` shows it on this machine."""
    session.install(*group("docs"))
    command = session.posargs or ["build", "--site-dir", str(Path(session.create_tmp()) / "site")]
    session.run("mkdocs", *command, env={"NO_MKDOCS_2_WARNING": "1"})


@nox.session
@nox.parametrize(("python", "packages"), PUBLISHED)
def published(session: nox.Session, packages: tuple[str, ...]) -> None:
    """Packages from PyPI that are not ours, on the newest versions that they allow: see docs/published.md."""
    session.install(".[test]", *packages)
    # Its own warnings are not ours to judge.
    session.run("pytest", "-n", "2", "-W", "ignore", "examples/published", PLAIN_PROGRAMS, *session.posargs)


@nox.session(python=NEWEST, venv_backend="venv")
def readme(session: nox.Session) -> None:
    """The commands of the README, word for word, in a fresh environment with pip."""
    for command in quick_start():
        session.run("bash", "-euc", command, external=True)


@nox.session(python=NEWEST, venv_backend="venv")
def wheel(session: nox.Session) -> None:
    """The built wheel in a clean environment: a test of the README passes with reports, it loads light, and it can be switched off."""
    there = Path(session.create_tmp())
    session.install("--quiet", str(build_wheel(session, there / "dist")))
    (there / "test_linear.py").write_text(first_test())
    (there / "test_plain.py").write_text("def test_plain():\n    pass\n")
    (there / "pytest.ini").write_text("[pytest]\n")  # what pytest finds above is not the user's
    session.chdir(there)
    session.run("python", "-c", LIGHT)
    reports = [f"--nnx-report=report.{kind}" for kind in ("html", "json", "md")]
    session.run("python", "-m", "pytest", "-W", "error", "--strict-markers", *reports, "test_linear.py")
    session.run("pytest", "-p", "no:nnxcheck", "test_plain.py")
    session.run("pytest", "-p", "no:nnxcheck", "--nnx-max-depth=2", "test_plain.py", success_codes=[4], silent=True)


@nox.session(python=NEWEST, venv_backend="venv")
def downstream(session: nox.Session) -> None:
    """A stranger's package with the built wheel: the steps of its workflow, again with a leak and a copy in its model, those of action.yml, and docs/large_suites.md."""
    there = Path(session.create_tmp())
    session.install("--quiet", *group("downstream"))
    built = build_wheel(session, there / "dist")
    session.run("python", "tests/downstream.py", str(built), str(there / "downstream"))


@nox.session(python=NEWEST, venv_backend="venv")
def package(session: nox.Session) -> None:
    """What is released: the sdist builds the same wheel, both hold what they should, and the wheel brings along what it declares."""
    there = Path(session.create_tmp()) / "dist"
    shutil.rmtree(there, ignore_errors=True)
    session.install("--quiet", *group("package"))
    session.run("python", "-m", "build", "--outdir", str(there), ".", silent=True)
    session.run("twine", "check", "--strict", *map(str, sorted(there.iterdir())))
    session.run("python", "tests/distributions.py", str(there))


@nox.session(python=NEWEST, default=False)
def release(session: nox.Session) -> None:
    """Write the changelog of a release, commit it and tag it: ``nox -s release -- 0.2.0``. Nothing is pushed."""
    session.install(*group("release"))
    session.run("python", ".ci/release.py", *session.posargs)


@nox.session(python=NEWEST, venv_backend="venv", default=False)
def heads(session: nox.Session) -> None:
    """The tests of the engine on the heads of jax and flax, against those on their newest releases: what changed goes to the summary page."""
    there = Path(session.create_tmp())
    session.install(".[test]")
    session.run("pytest", "-n", "2", "tests/engine", f"--junitxml={there}/released.xml", success_codes=[0, 1])
    session.run(
        "python", "-m", "pip", "install", "--pre", "--upgrade", "--extra-index-url", JAX_NIGHTLY, "jax", "jaxlib"
    )
    session.run("python", "-m", "pip", "install", "--upgrade", FLAX_HEAD)
    session.run("pytest", "-n", "2", "tests/engine", f"--junitxml={there}/heads.xml", success_codes=[0, 1])
    session.run("python", "tests/heads.py", str(there / "released.xml"), str(there / "heads.xml"))
