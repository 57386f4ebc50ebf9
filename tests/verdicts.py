"""Write the verdict of every nesting of the corpus as JSON lines, to compare two states of the code: ``nox -s verdicts -- before.jsonl``.

One line a nesting: subject, nesting, verdict, and for each broken invariant its kind, path and how many copies of the state it tells of. The corpus
is what the tests are made of: the healthy models, small and wide, the leaky ones and their twins, subjects as they are in the wild, the public
reports, leaves that are rewritten, the examples, and the tests of published packages that are installed. Two files of the same versions are
compared by ``python tests/verdicts.py before.jsonl after.jsonl``. Only public names of the plugin are used, so that the script runs on old commits.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
WIDE = 160
"""A square kernel of this width is above the 64 KiB from which memory is judged, which those of the tests are not."""
EVERYTHING = "tracers,memory,donation,updates,recompilation,finite,parity"
"""Before `updates` there were the others: ``--invariants`` names them for an older commit."""
SWEEP = {"sweep": "short", "max_examples": 0, "all": "on", "invariants": EVERYTHING}
GROUPS = ("healthy", "wide", "leaky", "wild", "reports", "rewritten", "examples", "published")

Subject = tuple[str, Callable[[], Any]]
"""A name, and what makes a fresh subject: it has ``subject`` and ``args``, and may have ``kwargs`` and ``settings``."""


def subjects_of(group: str) -> Iterator[Subject]:
    """The subjects of a group that the installed versions have."""
    import healthy

    if group in ("wide", "wild", "rewritten"):
        healthy.WIDTH, healthy.BATCH, healthy.SEQUENCE = WIDE, (3, WIDE), (2, 4, WIDE)
    if group in ("healthy", "wide"):
        yield from healthy.HEALTHY.items()
    elif group == "leaky":
        from leaky import LEAKY

        for name, twins in LEAKY.items():
            yield name, twins.leaky
            yield f"{name} (cured)", twins.healthy
    elif group == "wild":
        import wild

        yield from ((name, wild.WILD[name]) for name in wild.SUBJECTS)
    elif group == "reports":
        yield from of_reports(healthy.Case)
    elif group == "rewritten":
        yield from of_rewritten(healthy.Case)


def of_reports(case: Callable[..., Any]) -> Iterator[Subject]:
    """The public reports, and a training step over the living form of google/flax#4871 with its cure."""
    import bugs
    from flax import nnx

    def built(make: Callable[..., Any], *options: Any) -> Any:
        return make(nnx.Rngs(0), *options)

    yield "4520", lambda: case(built(bugs.report_4520), bugs.inputs_4520())
    yield "4871", lambda: case(built(bugs.report_4871), (0.0,))
    x = bugs.inputs_4819()
    for remat, scan in ((False, False), (False, True), (True, False), (True, True)):
        name, model = f"4819 {remat} {scan}", partial(built, bugs.report_4819, remat, scan)
        yield name, lambda model=model: case(model(), x)
        for decode in (bugs.autoregressive_decode, bugs.autoregressive_decode_in_carry):
            yield f"{name} {decode.__name__}", lambda decode=decode, model=model: case(decode, (model(), *x))
    x = bugs.inputs_scan_over_remat()
    for how in ("remat", *bugs.cures()):
        model = partial(built, bugs.ScanOverRemat, how)
        yield f"scan over {how}", lambda model=model: case(model(), x)
        yield f"scan over {how}, twice", lambda model=model: case(bugs.call_twice, (model(), *x))
        yield f"training step of scan over {how}", lambda model=model: training_step(case, model())
    for step in (bugs.step_in_place, bugs.step_other_dtype, bugs.step_drops_one):
        yield step.__name__, lambda step=step: case(step, (bugs.Pair(100_000),))


def training_step(case: Callable[..., Any], model: Any) -> Any:
    """A step of Adam."""
    import bugs
    import optax
    from flax import nnx
    from healthy import FLAX

    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)

    def step(model: Any, optimizer: Any, x: Any) -> Any:
        loss, gradients = nnx.value_and_grad(lambda model: (model(x) ** 2).mean())(model)
        optimizer.update(*((model, gradients) if FLAX >= (0, 11) else (gradients,)))
        return loss

    return case(step, (model, optimizer, *bugs.inputs_scan_over_remat()))


def of_rewritten(case: Callable[..., Any]) -> Iterator[Subject]:
    """Leaves that a call reads and writes anew."""
    from rewritten_leaves import REWRITTEN

    for name, (make, args) in REWRITTEN.items():
        yield name, lambda make=make, args=args: case(make(), args)


def lines_of(name: str, make: Callable[[], Any], settings: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A line for each nesting of one subject; one line alone where the check ends in an exception."""
    from pytest_nnxcheck import check

    try:
        found = make()
        chosen = {**SWEEP, **settings, **getattr(found, "settings", {})}
        report = check(found.subject, *found.args, kwargs=getattr(found, "kwargs", {}), **chosen)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        yield {"subject": name, "raises": type(error).__name__, "words": str(error).splitlines()[:1]}
        return
    for outcome in report.outcomes:
        yield {"subject": name, **of_outcome(outcome)}


def of_outcome(outcome: Any) -> dict[str, Any]:
    broken = [
        {
            "invariant": violation.invariant,
            "kind": type(finding).__name__,
            "path": getattr(finding, "path", ""),
            "copies": copies(finding),
        }
        for violation in outcome.violations
        for finding in violation.findings[:3]
    ]
    return {"nesting": str(outcome.nesting), "verdict": outcome.verdict, "reason": outcome.reason, "broken": broken}


def copies(finding: Any) -> float:
    """How many copies of its state a finding says that the program holds."""
    figures, size = getattr(finding, "figures", None), getattr(finding, "bytes", None)
    is_copy = type(finding).__name__ == "StateCopied" and figures is not None and size
    return round(size / figures.state, 2) if is_copy else 0.0


def of_suite(folder: str) -> Iterator[dict[str, Any]]:
    """The nestings of a suite of tests, from its JSON report."""
    with tempfile.TemporaryDirectory() as there:
        report = Path(there) / "report.json"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "ignore", "-m", "not full"]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
        done = subprocess.run(
            [*command, f"--nnx-report={report}", folder],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if not report.exists():
            yield {"subject": folder, "raises": f"pytest ended with {done.returncode}"}
            return
        for nesting in json.loads(report.read_text())["nestings"]:
            broken = [
                {"invariant": violation["invariant"], "summary": violation["summary"]}
                for violation in nesting["violations"]
            ]
            kept = {key: nesting[key] for key in ("nesting", "verdict", "reason")}
            yield {"subject": nesting["nodeid"], **kept, "broken": broken}


def write(file: Path, groups: list[str], share: int, settings: dict[str, Any]) -> None:
    """Write the lines of some groups, each in a process of its own: a group sets the width of its models."""
    for group in groups:
        started, count = time.monotonic(), 0
        with file.open("a") as lines:
            if group in ("wide", "wild"):
                settings = {**settings, "styles": "argument,functional"}
            if group in ("examples", "published"):
                suite = of_suite("examples" if group == "examples" else "examples/published")
                for line in suite:
                    lines.write(json.dumps({"group": group, **line}) + "\n")
                    count += 1
            else:
                for number, (name, make) in enumerate(subjects_of(group)):
                    if number % share == 0:
                        for line in lines_of(name, make, settings):
                            lines.write(json.dumps({"group": group, **line}) + "\n")
                            count += 1
                        lines.flush()
        print(f"{group}: {count} nestings in {time.monotonic() - started:.0f} s", flush=True)  # noqa: T201 - a program that reports


def difference(before: Path, after: Path) -> int:
    """Print the lines in which two files differ; how many there are."""
    one, other = (
        {(line["group"], line["subject"], line.get("nesting")): line for line in map(json.loads, path.open())}
        for path in (before, after)
    )
    keys = [key for key in dict.fromkeys([*one, *other]) if one.get(key) != other.get(key)]
    for key in keys:
        print(key)  # noqa: T201 - a program that reports
        for sign, lines in (("-", one), ("+", other)):
            if key in lines:
                rest = {
                    name: value for name, value in lines[key].items() if name not in ("group", "subject", "nesting")
                }
                print(f"  {sign} {json.dumps(rest)}")  # noqa: T201 - a program that reports
    print(f"{len(keys)} of {len({*one, *other})} nestings differ")  # noqa: T201 - a program that reports
    return len(keys)


def main() -> int:
    """Write one file, or compare two."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, help="the file to write, or two to compare")
    parser.add_argument("--groups", default=",".join(GROUPS), help="which parts of the corpus")
    parser.add_argument("--share", type=int, default=1, help="one subject in so many")
    parser.add_argument("--invariants", default=EVERYTHING)
    chosen = parser.parse_args()
    if len(chosen.files) == 2:
        return 1 if difference(*chosen.files) else 0
    warnings.simplefilter("ignore")
    sys.path[:0] = [str(ROOT / "tests" / "corpus")]
    groups = chosen.groups.split(",")
    if len(groups) == 1:
        write(chosen.files[0], groups, chosen.share, {"invariants": chosen.invariants})
        return 0
    chosen.files[0].unlink(missing_ok=True)
    for group in groups:
        command = [
            sys.executable,
            __file__,
            str(chosen.files[0]),
            f"--groups={group}",
            f"--share={chosen.share}",
            f"--invariants={chosen.invariants}",
        ]
        subprocess.run(command, check=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
