"""Run `mixed_suite.py` many times, each time another way: a test has one verdict and one message. ``nox -s steady -- 500``.

What changes from run to run is the order of the tests, the workers of xdist, the seeds of Python's hashes and of hypothesis, and the caches of
pytest, of the plugin and of jax. Each run is a process of its own, two of them beside each other. All that the reports of pytest and of the
plugin say of a test is compared with the first run; the functions of ``SAME`` name the little that may differ. Each test must also end as its
name says, so that a broken installation is not called steady.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import random
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SUITE = "test_mixed.py"
CACHES = {
    "kept": [],  # what failed before is tried first, and programs that were compiled are taken from there
    "programs compiled anew": ["--nnx-no-cache"],
    "off": ["-p", "no:cacheprovider"],
}
BESIDE_EACH_OTHER = 2

Said = dict[str, str]
"""All that the reports of one run say of each test, by its id."""


@dataclass(frozen=True)
class Way:
    """How one run differs from the others. A number always gives the same one; the first is as plain as can be."""

    number: int

    @property
    def workers(self) -> int:
        """One run in three has two workers, which takes twice the time. The caches have a period of four, so twelve runs have each cache with and without workers."""
        return 2 if self.number % 3 == 2 else 0

    @property
    def seed(self) -> int:
        return self.number

    @property
    def cache(self) -> str:
        return ["off", *CACHES][self.number % (len(CACHES) + 1)]

    @property
    def jax_compiles_anew(self) -> bool:
        """One run in ten has none of the programs that jax has compiled outside of the checks; the others are quicker for them."""
        return self.number % 10 == 0

    def order(self, tests: list[str]) -> list[str]:
        return random.Random(self.seed).sample(tests, len(tests)) if self.number else tests

    def command(self, tests: list[str], options: list[str]) -> list[str]:
        """What to run in the folder of the suite; the workers get the plugin from there too."""
        # Of a frame pytest prints the repr of its arguments otherwise, and so the address of the fixture.
        those = ["-q", "--tb=short", "-W", "ignore", "-n", str(self.workers), f"--hypothesis-seed={self.seed}"]
        return [sys.executable, "-m", "pytest", *those, *CACHES[self.cache], *options, *self.order(tests)]

    def __str__(self) -> str:
        jax = ", jax compiles anew" if self.jax_compiles_anew else ""
        return f"run {self.number}: -n {self.workers}, seeds {self.seed}, cache {self.cache}{jax}"


# --- one run --------------------------------------------------------------------------------------------------------------


def one_run(way: Way, tests: list[str], options: list[str], folder: Path) -> Said:
    """What the reports say after one run in a folder that no other run uses meanwhile."""
    for report in ("junit.xml", "report.json"):
        (folder / report).unlink(missing_ok=True)
    temporary = folder / "temporary"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    command = way.command(tests, ["--junitxml=junit.xml", "--nnx-report=report.json", *options])
    done = subprocess.run(
        command, cwd=folder, env=environment(way, folder), capture_output=True, text=True, check=False
    )
    if done.returncode != 1 or not (folder / "report.json").exists():
        sys.exit(f"{way}: pytest ended with {done.returncode}\n{shlex.join(command)}\n{done.stdout}\n{done.stderr}")
    said = said_in((folder / "junit.xml").read_text(), json.loads((folder / "report.json").read_text()))
    return {test: same(text, folder) for test, text in said.items()}


def environment(way: Way, folder: Path) -> dict[str, str]:
    """The variables of one run: this checkout, its seed of hashes, a folder for what is temporary, and jax' own cache."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "PYTEST_"))}
    compiled = {
        "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    return {
        **kept,
        **({} if way.jax_compiles_anew else compiled),
        "JAX_PLATFORMS": "cpu",
        "PYTHONHASHSEED": str(way.seed),
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "TMPDIR": str(folder / "temporary"),
    }


def said_in(junit: str, report: dict[str, Any]) -> Said:
    """Outcome and message of each test as pytest has them, and after these all that the plugin's report has of it."""
    said = {}
    for case in ET.fromstring(junit).iter("testcase"):
        ends = [f"{end.tag}\n{end.text}" for end in case if end.tag in ("failure", "error", "skipped")]
        said[f"{SUITE}::{case.get('name')}"] = "\n".join(ends or ["passed"])
    for part in ("tests", "nestings"):
        for row in report[part]:
            text = json.dumps(without_seconds(row), indent=1, sort_keys=True)
            said[row["nodeid"]] += f"\n{part}: {text}".replace("\\n", "\n")  # a program is one string
    return said


# --- what may differ ------------------------------------------------------------------------------------------------------


def without_seconds(row: dict[str, Any]) -> dict[str, Any]:
    """How long it took is no verdict."""
    return {name: value for name, value in row.items() if name != "seconds"}


def one_folder(text: str, folder: Path) -> str:
    """Runs beside each other are in folders of their own, and messages name the files in them."""
    return text.replace(str(folder), "FOLDER")


def one_home_of_programs(text: str, _folder: Path) -> str:
    """Programs to paste are written to pytest's cache, and to a temporary folder of a new name where that is off."""
    return re.sub(r"(?:FOLDER/)?(?:\.pytest_cache/d/nnxcheck|temporary/nnxcheck-\w+)/", "PROGRAMS/", text)


SAME = (one_folder, one_home_of_programs)


def same(text: str, folder: Path) -> str:
    """A text without what may differ from run to run."""
    for step in SAME:
        text = step(text, folder)
    return text


# --- what is compared -----------------------------------------------------------------------------------------------------


def amiss(said: Said) -> list[str]:
    """The tests that do not end as their names say."""
    return [f"{test} ends with: {text[:2000]}" for test, text in said.items() if not ends_as_named(test, text)]


def ends_as_named(test: str, text: str) -> bool:
    _, ends, *what = re.split(r"[_\[]", test.partition("::")[2])
    if ends == "holds":
        return text.startswith("passed\n")
    is_broken = "nnx invariant broken" in text.partition("\ntests: ")[0]
    named = rf"nnx invariant broken: {what[0]}\b" if ends == "breaks" else "ConcretizationTypeError"
    return text.startswith("failure\n") and bool(re.search(named, text)) and is_broken == (ends == "breaks")


def differences(first: Said, other: Said) -> list[str]:
    """A test a text: the lines in which two runs differ."""
    return [
        "\n".join(difflib.unified_diff(*(run.get(test, "").splitlines() for run in (first, other)), lineterm="", n=2))
        for test in sorted({*first, *other})
        if first.get(test) != other.get(test)
    ]


# --- all runs -------------------------------------------------------------------------------------------------------------


def folder_of_suite(folder: Path) -> Path:
    """The suite alone, below no configuration but its own."""
    folder.mkdir()
    shutil.copy(ROOT / "tests" / "mixed_suite.py", folder / SUITE)
    (folder / "pytest.ini").write_text("[pytest]\n")
    return folder


def tests_of(folder: Path) -> list[str]:
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", SUITE]
    listed = subprocess.run(
        command, cwd=folder, env=environment(Way(0), folder), capture_output=True, text=True, check=True
    )
    return [line for line in listed.stdout.splitlines() if line.startswith(f"{SUITE}::")]


def lane(number: int, runs: range, tests: list[str], options: list[str], there: Path) -> list[tuple[Way, Said]]:
    """Every so many-th run, one after the other, in one folder: its caches are those of the runs before."""
    folder = folder_of_suite(there / f"lane-{number}")
    done = []
    for run in runs[number::BESIDE_EACH_OTHER]:
        done.append((Way(run), one_run(Way(run), tests, options, folder)))
        print(Way(run), flush=True)  # noqa: T201 - a program that reports
    return done


def main() -> int:
    """Run the suite as often as asked, and say what differed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="?", type=int, default=12)
    parser.add_argument("--from", dest="start", type=int, default=0, help="the number of the first run")
    chosen, options = parser.parse_known_args()
    runs = range(chosen.start, chosen.start + chosen.runs)
    with tempfile.TemporaryDirectory(prefix="steady-") as folder:
        there = Path(folder).resolve()
        tests = tests_of(folder_of_suite(there / "listed"))
        with ThreadPoolExecutor(BESIDE_EACH_OTHER) as pool:
            lanes = [pool.submit(lane, n, runs, tests, options, there) for n in range(BESIDE_EACH_OTHER)]
            done = sorted((each for one in lanes for each in one.result()), key=lambda pair: pair[0].number)
    (first, wanted), *others = done
    problems = [f"{first}: {test}" for test in amiss(wanted)]
    if wanted.keys() != set(tests):
        problems.append(f"{first}: not all tests ran, {sorted(set(tests) - wanted.keys())}")
    problems += [f"{first} against {way}\n{text}" for way, said in others for text in differences(wanted, said)]
    print(*problems, sep="\n\n")  # noqa: T201 - a program that reports
    print(f"{len(done)} runs of {len(tests)} tests: {len(problems)} differences")  # noqa: T201 - a program that reports
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
