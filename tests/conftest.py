"""Heavy modules are imported before any inner run of pytester: what a run imports first, it drops at its end.

A second import of jax aborts the interpreter, one of hypothesis leaves two of each of its classes.
"""

import atexit
import os
import shutil
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

# Inner runs are processes of their own. Where Python keeps no bytecode, each would compile all of jax and flax: they keep theirs in a folder that goes.
if sys.dont_write_bytecode:
    BYTECODE = tempfile.mkdtemp(prefix="nnxcheck-tests-")
    atexit.register(shutil.rmtree, BYTECODE, ignore_errors=True)
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix = BYTECODE
    sys.dont_write_bytecode = False
# Models are built, and called for comparison, again and again: jax compiles these programs quickly, and each once in a worker.
# What the plugin judges is compiled anew all the same: see `judged_compiles` of compat/compile_cache.py.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
# On jax 0.5.3 a program out of the folder computed other numbers: a remat in a while_loop that was compiled before.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ and not version("jax").startswith("0.5."):
    COMPILED = tempfile.mkdtemp(prefix="nnxcheck-tests-")
    atexit.register(shutil.rmtree, COMPILED, ignore_errors=True)
    os.environ |= {
        "JAX_COMPILATION_CACHE_DIR": COMPILED,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
# jax writes a program in place: a worker that reads it meanwhile would get half of it, and a warning, which fails a test.
elif "JAX_COMPILATION_CACHE_DIR" in os.environ and "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["JAX_COMPILATION_CACHE_DIR"] += f"/{os.environ['PYTEST_XDIST_WORKER']}"

import flax.nnx  # noqa: F401
import hypothesis.strategies
import jax
import pytest

import pytest_nnxcheck
from pytest_nnxcheck import api  # noqa: F401
from pytest_nnxcheck.compat import compile_cache
from pytest_nnxcheck.paste import program  # noqa: F401
from pytest_nnxcheck.plugin import gathered, hooks  # noqa: F401

# A process that a test starts runs the package that the test imports, and no other that may be installed.
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(Path(pytest_nnxcheck.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
)

# On a service pytest does not cut its short summary, so that each text would be there once more; and this plugin shows no progress.
for name in ("CI", "BUILD_NUMBER"):
    os.environ.pop(name, None)

# The same examples in every run, and no clock: a machine that is busy for a moment is no failure.
hypothesis.settings.register_profile("tests", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("tests")

TESTS = Path(__file__).parent


def pytest_addoption(parser: pytest.Parser) -> None:
    """The option that writes the golden files anew."""
    parser.addoption(
        "--update-golden",
        action="store_true",
        help="write the files of tests/golden anew, for a review of their changes",
    )


@pytest.fixture
def golden(request: pytest.FixtureRequest):
    """Compare a long text with a file of tests/golden, which a person has reviewed: ``golden("page.html", text)``."""

    def compare(name: str, text: str) -> None:
        path, update = TESTS / "golden" / name, "pytest --update-golden"
        if request.config.getoption("update_golden"):
            path.write_text(text, encoding="utf-8", newline="\n")
        assert path.exists(), f"there is no {path}: write it with {update}, and read it"
        assert text == path.read_text(encoding="utf-8"), f"{path.name} is another text: if it is better, {update}"

    return compare


@pytest.fixture(scope="session")
def inner_args(request: pytest.FixtureRequest) -> list[str]:
    """What an inner run needs to load the plugin: nothing where the package is installed."""
    installed = request.config.pluginmanager.hasplugin("nnxcheck")
    return [] if installed else ["-p", hooks.__name__]


@pytest.fixture(autouse=True)
def _outside_of_actions(monkeypatch: pytest.MonkeyPatch) -> None:
    """An inner run adds nothing to the summary of the step that runs these tests."""
    monkeypatch.delenv("GITHUB_ACTIONS", raising=False)


@pytest.fixture(autouse=True)
def _no_stale_bytecode(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test file that is written twice in one second with as many characters would be taken from its first bytecode."""
    monkeypatch.setattr(sys, "dont_write_bytecode", True)


@pytest.fixture
def aliased_bytes(monkeypatch: pytest.MonkeyPatch):
    """Before jax 0.6.2 a program out of the folder above tells no aliased bytes: what reads them of a user's own program goes without it."""
    if jax.__version_info__ >= compile_cache.EQUAL_FROM:
        yield
        return
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    with compile_cache.judged_compiles():
        yield


@pytest.fixture
def optimized():
    """As users compile."""
    before = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch):
    """The engine of fake_engine.py in place of the real one, for checks made in this process."""
    import fake_engine

    monkeypatch.setitem(
        sys.modules, "pytest_nnxcheck.checks.check_call", sys.modules.get("pytest_nnxcheck.checks.check_call")
    )
    fake_engine.install()
    return fake_engine


@pytest.fixture
def run_inner(pytester: pytest.Pytester, inner_args: list[str]):
    """Run a suite with the fake engine: ``run_inner(source, *args, subprocess=False, conftest="")``."""

    def run(source: str, *args: str, subprocess: bool = False, conftest: str = "") -> pytest.RunResult:
        head = f"import sys\nsys.path[:0] = [{str(TESTS)!r}, {str(TESTS.parent)!r}]\nimport fake_engine\nfake_engine.install()\n"
        pytester.makeconftest(head + conftest)
        imports = "import pytest\nfrom fake_engine import RUNS, Model, has\nmarked = pytest.mark.nnx_invariants\n"
        pytester.makepyfile(test_inner=imports + source)
        start = pytester.runpytest_subprocess if subprocess else pytester.runpytest_inprocess
        return start(*inner_args, "-p", "no:randomly", *args)

    return run


@pytest.fixture
def no_folder_of_the_user(monkeypatch: pytest.MonkeyPatch):
    """The tests have one, see above: options and environment as jax has them, for a while."""
    usual = {"min_compile_time_secs": "1", "min_entry_size_bytes": "0"}
    for name, value in usual.items():
        monkeypatch.setenv(f"JAX_PERSISTENT_CACHE_{name.upper()}", value)
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    with compile_cache._set({compile_cache.DIRECTORY: None}):
        yield
