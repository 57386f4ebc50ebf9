"""Compiled programs that are kept between runs: equal to what was compiled, none of the user's, and never the cause of a failure."""

import contextlib
import importlib.util
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from checking import call
from compile_folders import WORKS, entries, works
from flax import nnx

from pytest_nnxcheck.compat import compile_cache, staging
from pytest_nnxcheck.xla import buffers, hlo

pytestmark = pytest.mark.usefixtures("no_folder_of_the_user")
EVENTS: list[str] = []
jax.monitoring.register_event_listener(lambda event, **_: EVENTS.append(event.rpartition("/")[2]))
OURS = {compile_cache.DIRECTORY, *compile_cache.OPTIONS}


class Net(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.inside, self.norm, self.out = (
            nnx.Linear(8, 16, rngs=rngs),
            nnx.BatchNorm(16, rngs=rngs),
            nnx.Linear(16, 4, rngs=rngs),
        )

    def __call__(self, x):
        return self.out(jnp.tanh(self.norm(nnx.relu(self.inside(x)))))


def options():
    return {name: jax.config.values[name] for name in OURS}


def opened():
    return {name: getattr(compile_cache.compilation_cache, name) for name in compile_cache._OPENED}


def compiled(folder, f, *args):
    """What is read of a program that went through the folder, whether it came out of it, and whether donation kept the pointers."""
    jax.clear_caches()
    EVENTS.clear()
    program = jax.jit(f, donate_argnums=0, keep_unused=True)
    with staging.whole_stacks(), compile_cache.compile_folder(folder), compile_cache.cached_compiles():
        found = program.lower(*args).compile(compiler_options=staging.compiler_options())
    read = buffers.read(found), hlo.aliases(found)
    donated = jax.tree.map(jnp.copy, args[0])
    before = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(donated)]
    after = found(donated, *args[1:])[0]
    return read, "cache_hits" in EVENTS, before == [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(after)]


CONSTANT = jnp.arange(4096.0).reshape(64, 64)


def captures(state, x):
    return state + 1.0, jnp.sin(x @ CONSTANT) @ CONSTANT


def scans(state, x):
    def body(state, x):
        model = nnx.merge(nnx.graphdef(Net()), state)
        return nnx.state(model), model(x)

    return jax.lax.scan(body, state, x)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["scan", "captured"])
def test_a_program_from_the_folder_tells_the_same(name, tmp_path, monkeypatch):
    monkeypatch.setattr(compile_cache, "EQUAL_FROM", (0,))  # on every version: what the table says of it is held too
    square = jnp.ones((64, 64))
    f, *args = {"scan": (scans, nnx.state(Net()), jnp.ones((3, 8, 8))), "captured": (captures, square, square)}[name]
    # From one line: the frames of all callers are in the key.
    found = [compiled(tmp_path, f, *args) for _ in range(2)]
    ((memory, aliases), *first), ((again, same), *second) = found
    assert (first, second) == ([False, True], [True, True])
    assert entries(tmp_path)
    assert memory.named
    assert any(buffer.stack for buffer in memory.buffers)
    assert aliases
    assert same == aliases
    if WORKS:
        assert again == memory
    else:
        assert (again.aliased, again.buffers) == (0, memory.buffers)
        assert memory.aliased > 0


def test_the_table_says_where_it_is_off(tmp_path):
    reason = compile_cache.no_compile_cache()
    assert reason == ("" if WORKS else f"jax {jax.__version__} loads programs without their aliased bytes")
    compiled(tmp_path, captures, jnp.ones((64, 64)), jnp.ones((64, 64)))
    assert bool(entries(tmp_path)) is WORKS


@pytest.mark.slow
@works
def test_a_nesting_from_the_folder_is_judged_the_same(tmp_path):
    def outcome(folder):
        jax.clear_caches()
        EVENTS.clear()
        with compile_cache.compile_folder(folder):
            found = call(Net(), jnp.ones((3, 8)), nesting="jit[functional] > scan", shortcuts="off")
        return found.outcome, "cache_hits" in EVENTS

    (plain, _), first, second = [outcome(folder) for folder in (None, tmp_path, tmp_path)]
    assert plain.verdict == "held"
    assert first == (plain, False)
    assert second == (plain, True)


@works
def test_moved_lines_are_not_served_as_they_were(tmp_path):
    source = "import jax.numpy as jnp\n\ndef f(state, x):\n    y = jnp.sin(x @ state) @ state\n    return state + 1.0, jnp.tanh(y @ y)\n"
    file = tmp_path / "moved.py"

    def lines(above):
        file.write_text("\n" * above + source)
        spec = importlib.util.spec_from_file_location("moved", file)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        (memory, _), hit, _ = compiled(tmp_path / "kept", module.f, jnp.ones((64, 64)), jnp.ones((64, 64)))
        own = [frame for buffer in memory.buffers for frame in buffer.stack if frame.startswith(str(file))]
        return hit, {int(frame.rpartition(":")[2]) - above for frame in own}

    first, again, moved = [lines(above) for above in (0, 0, 3)]
    assert first[1]
    assert first[0] is False
    assert again == (True, first[1])
    assert moved == (False, first[1])


def damage(folder, how):
    for path in folder.glob("*-cache"):
        content = path.read_bytes()
        path.unlink()
        if how == "a folder":
            (path / "inside").mkdir(parents=True)
        elif how == "a pipe":
            os.mkfifo(path)
        elif how == "a link to nothing":
            path.symlink_to("nothing")
        else:
            half = len(content) // 2
            flipped = content[:half] + bytes([content[half] ^ 1]) + content[half + 1 :]
            path.write_bytes(
                {
                    "noise": b"\0noise" * 99,
                    "empty": b"",
                    "cut": content[:half],
                    "one bit": flipped,
                    "longer": content * 2,
                }[how]
            )


@pytest.mark.slow
@works
@pytest.mark.parametrize(
    "how, strict",
    [
        *((how, False) for how in ("empty", "cut", "one bit", "longer", "a folder", "a pipe", "a link to nothing")),
        ("noise", True),  # errors of the cache raise
    ],
)
def test_a_damaged_entry_costs_one_compile_and_no_more(how, strict, tmp_path):
    found = []
    before = jax.config.jax_raise_persistent_cache_errors
    jax.config.update("jax_raise_persistent_cache_errors", strict)
    try:
        for _ in range(3):
            # A warning would be an error here.
            found.append(compiled(tmp_path, captures, jnp.ones((64, 64)), jnp.ones((64, 64))))
            if len(found) == 1:
                damage(tmp_path, how)
        assert found[1] == found[0]
        assert found[1][1:] == (False, True)
        assert found[2] == (found[0][0], True, True)
        assert jax.config.jax_raise_persistent_cache_errors is strict
    finally:
        jax.config.update("jax_raise_persistent_cache_errors", before)


@works
def test_a_folder_that_cannot_be_written_costs_nothing(tmp_path):
    file = tmp_path / "file"  # for root every folder can be written
    file.write_text("")
    _, hit, kept = compiled(file, captures, jnp.ones((64, 64)), jnp.ones((64, 64)))
    assert not hit
    assert kept
    assert file.read_text() == ""


@pytest.mark.parametrize("raises", [False, True])
def test_jax_is_put_back(raises, tmp_path):
    jax.jit(lambda x: x + 2)(jnp.ones(5))  # jax looks for a folder with its first compile
    before = options(), opened()
    with (
        compile_cache.compile_folder(tmp_path / "kept"),
        contextlib.suppress(KeyError),
        compile_cache.cached_compiles(),
    ):
        jax.jit(lambda x: x + 1)(jnp.ones(5))
        if raises:
            raise KeyError
    assert (options(), opened()) == before
    kept = entries(tmp_path / "kept")
    assert bool(kept) is WORKS
    jax.jit(lambda x: x * 3)(jnp.ones(5))
    with compile_cache.cached_compiles():  # nobody said where
        jax.jit(lambda x: x * 4)(jnp.ones(5))
    assert entries(tmp_path / "kept") == kept


def test_a_program_of_a_target_compiles_without_a_folder_while_ours_is_open(tmp_path):
    with compile_cache.compile_folder(tmp_path / "kept"), compile_cache.cached_compiles():
        with compile_cache.judged_compiles(ours=False):
            jax.jit(lambda x: x - 1)(jnp.ones(5))
        assert not entries(tmp_path / "kept")
        jax.jit(lambda x: x - 2)(jnp.ones(5))
    assert bool(entries(tmp_path / "kept")) is WORKS


SCALES = """
import jax.numpy as jnp
{}
def scales(model, x):
    big = jnp.cumsum(jnp.outer(x, x), axis=0)
    return jnp.sort(big @ big, axis=1).sum() + model.kernel.sum(), model.kernel[...] * 2
"""


@pytest.mark.slow
def test_what_is_judged_is_not_taken_from_the_users_folder(tmp_path):
    """jax finds programs there whose lines have moved; up to 0.5.3 it loads them without their aliased bytes."""
    told = []
    with compile_cache._set(
        {
            compile_cache.DIRECTORY: str(tmp_path),
            "jax_persistent_cache_min_compile_time_secs": 0.0,
            "jax_persistent_cache_min_entry_size_bytes": -1,
        }
    ):
        for lines in ("", "# moved" + 5 * "\n"):
            namespace: dict[str, object] = {}
            exec(compile(SCALES.format(lines), "scales.py", "exec"), namespace)
            jax.clear_caches()
            found = call(namespace["scales"], Net().inside, jnp.ones(64), nesting="jit")
            assert found.outcome.evidence is not None
            told.append((found.outcome.evidence.split, {place.line for place in found.outcome.evidence.places}))
    (first, lines), (second, moved) = told
    assert first == second
    assert "scales.py:6" in lines
    assert "scales.py:11" in moved - lines


USERS = """
import sys
import jax, jax.numpy as jnp
from pytest_nnxcheck.compat import compile_cache
from pathlib import Path
from pytest_nnxcheck.compat.compile_cache import OPTIONS
ours, his = map(Path, sys.argv[1:])
if not jax.config.jax_compilation_cache_dir:
    jax.config.update("jax_compilation_cache_dir", str(his))
f = jax.jit(lambda x: jnp.sin(x @ x))
x = jnp.ones((8, 8))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
before = {name: jax.config.values[name] for name in ("jax_compilation_cache_dir", *OPTIONS)}
with compile_cache.compile_folder(ours), compile_cache.cached_compiles():
    assert {name: jax.config.values[name] for name in before} == before
    f.lower(x).compile()
assert {name: jax.config.values[name] for name in before} == before
jax.config.update("jax_compilation_cache_dir", None)
with compile_cache.compile_folder(ours), compile_cache.cached_compiles():
    # jax goes on with the folder that it has opened; ours is another, and only for a while.
    jax.jit(lambda x: jnp.tan(x @ x)).lower(x).compile()
jax.config.update("jax_compilation_cache_dir", str(his))
jax.jit(lambda x: jnp.cos(x @ x)).lower(x).compile()
print(len(list(ours.glob("*"))), len(list(his.glob("*lambda*-cache"))))
"""


@pytest.mark.slow
@pytest.mark.parametrize("by", ["option", "environment"])
def test_a_users_own_folder_is_left_alone(by, tmp_path):
    ours, his = tmp_path / "ours", tmp_path / "his"
    ours.mkdir()
    environment = {**os.environ, "JAX_COMPILATION_CACHE_DIR": str(his)} if by == "environment" else dict(os.environ)
    command = [sys.executable, "-W", "error::UserWarning", "-c", USERS, str(ours), str(his)]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout.split()) == (0, ["1", "2"] if WORKS else ["0", "3"]), ran.stderr


@works
def test_a_user_who_switched_it_off_has_it_off(tmp_path):
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        assert compile_cache.no_compile_cache() == "jax_enable_compilation_cache is off"
        compiled(tmp_path, captures, jnp.ones((64, 64)), jnp.ones((64, 64)))
    finally:
        jax.config.update("jax_enable_compilation_cache", True)
    assert not entries(tmp_path)
