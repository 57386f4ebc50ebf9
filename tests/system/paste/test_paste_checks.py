"""The program to paste outside of pytest: as text, from a check in a script."""

from __future__ import annotations

import subprocess
import sys

import jax
import jax.numpy as jnp
from pasted_programs import run_programs

from pytest_nnxcheck import Nesting, check

SCRIPT = """
import jax.numpy as jnp
from flax import nnx
from pytest_nnxcheck import check

KEPT = []

def keep(model, x):
    KEPT.append(model(x))

def main(width):
    return check(keep, nnx.Linear(width, width, rngs=nnx.Rngs(0)), jnp.ones((2, width)), nesting="jit")

report = check(keep, nnx.Linear(4, 4, rngs=nnx.Rngs(0)), jnp.ones((2, 4)), nesting="scan")
print(report.program())
print("#" * 9)
print(main(4).program())
print("#" * 9)
print(check(nnx.Linear(4, 4, rngs=nnx.Rngs(0)), jnp.ones((2, 4)), nesting="scan").program() == "")
"""


def test_a_check_in_a_script_gives_the_program_as_text(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-W", "ignore", "script.py"]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    *programs, none = done.stdout.split("#########\n")
    paths = [tmp_path / f"program_{number}.py" for number in range(len(programs))]
    for path, text in zip(paths, programs, strict=True):
        path.write_text(text)
    for _, text in run_programs(paths).values():
        assert text.startswith("nnx invariant broken: tracers\n  tracers remain in KEPT[0]")
    assert none.strip() == "True"


def test_a_check_whose_source_cannot_be_had_has_places_to_fill_in():
    from leaky import LEAKY

    made = LEAKY["class_attribute"].leaky()
    scope = {"check": check, "made": made}
    exec("report = check(made.subject, *made.args, nesting='jit')", scope)
    text = scope["report"].program()
    assert "subject = FILL_IN  # subject was a TracksLargest" in text
    assert "nnx_wrap(subject)(jnp.array(" in text
    assert scope["report"].program(scope["report"].outcomes[0]) == text
    assert Nesting.parse("jit") in scope["report"].programs


WRITTEN = [
    (jnp.arange(3), "jnp.array([0, 1, 2], 'int32')"),
    (jnp.arange(100.0), "jnp.ones((100,), 'float32')"),
    (jax.random.key(3), "jax.random.wrap_key_data(jnp.array([0, 3], 'uint32'))"),
]
PLAIN = [{"a": [1, 2.5, None, (True,)]}, "ü\n'\"", b"\0", -1j]


def test_arguments_are_written_out_and_of_a_large_array_its_shape():
    kept = []
    scope = {
        "check": check,
        "args": (*(array for array, _ in WRITTEN), *PLAIN),
        "keeps": lambda *values: kept.append(values[0] + 1),
    }
    exec("report = check(keeps, *args, nesting='jit')", scope)
    call = scope["report"].program().splitlines()[-2]
    for text in [*(text for _, text in WRITTEN), *map(ascii, PLAIN)]:
        assert text in call
