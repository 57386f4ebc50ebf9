"""What is released holds what it should: a folder with one sdist and one wheel is taken apart. Run by ``nox -s package`` and before a release."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import venv
import zipfile
from email.parser import Parser
from email.policy import compat32
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
IN_SDIST = (
    "pytest_nnxcheck/py.typed tests/unit examples/test_model.py examples/downstream/.github/workflows/ci.yml docs/index.md"
    " action.yml noxfile.py conftest.py pyproject.toml README.md CHANGELOG.md CONTRIBUTING.md LICENSE PKG-INFO"
).split()


def normal(name: str) -> str:
    """The name of a package in a requirement, as an index spells it."""
    return re.sub(r"[-_.]+", "-", re.split(r"[^\w.-]", name.strip(), maxsplit=1)[0]).lower()


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def check_wheel(wheel: Path) -> None:
    """The package as it lies here, py.typed, its metadata, and nothing else."""
    files = contents(wheel)
    info = f"pytest_nnxcheck-{PROJECT['version']}.dist-info/"
    package = ROOT / "pytest_nnxcheck"
    here = {
        str(path.relative_to(ROOT)): path.read_bytes()
        for path in package.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert "pytest_nnxcheck/py.typed" in files, "the wheel has no py.typed"
    others = {name for name in files if not name.startswith(info)}
    assert others == here.keys(), f"other files than the package: {sorted(others ^ here.keys())}"
    changed = [name for name in others if files[name] != here[name]]
    assert not changed, f"not as they lie here: {changed}"
    metadata = Parser(policy=compat32).parsestr(files[f"{info}METADATA"].decode())
    assert (metadata["Name"], metadata["Version"]) == (PROJECT["name"], PROJECT["version"])
    declared = [text for text in metadata.get_all("Requires-Dist", []) if "extra ==" not in text]
    assert {normal(text) for text in declared} == {normal(text) for text in PROJECT["dependencies"]}, declared
    plugin = "[pytest11]\nnnxcheck = pytest_nnxcheck.plugin.hooks"
    assert plugin in files[f"{info}entry_points.txt"].decode(), "the wheel is no plugin of pytest"
    assert f"{info}licenses/LICENSE" in files, "the wheel has no license"


def check_sdist(sdist: Path) -> None:
    root = f"{sdist.name.removesuffix('.tar.gz')}/"
    with tarfile.open(sdist) as archive:
        names = [name.removeprefix(root) for name in archive.getnames()]
    missing = [name for name in IN_SDIST if not any(there == name or there.startswith(f"{name}/") for there in names)]
    assert not missing, f"the sdist lacks {missing}"
    strays = [name for name in names if re.search(r"__pycache__|\.pyc$|\.nox|\.venv|_cache/|\.hypothesis", name)]
    assert not strays, f"the sdist holds {strays}"


def check_same_wheel(sdist: Path, wheel: Path, folder: Path) -> None:
    """The wheel is rebuilt from the sdist alone: `build` may have made both from this folder."""
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(sdist)]
    subprocess.run(build, check=True)
    (rebuilt,) = folder.glob("*.whl")
    assert contents(rebuilt) == contents(wheel), "the sdist builds another wheel"


def check_installed(wheel: Path, folder: Path) -> None:
    """In a fresh environment pip brings what is declared, what that needs, and no conflict."""
    venv.create(folder, with_pip=True)
    python = str(folder / "bin" / "python")
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-compile", str(wheel)], check=True)
    subprocess.run([python, "-m", "pip", "check"], check=True)
    inspected = subprocess.run(
        [python, "-m", "pip", "inspect"], check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    installed = {normal(row["metadata"]["name"]): row for row in json.loads(inspected.stdout)["installed"]}
    asked = {name for name, row in installed.items() if row.get("requested")} - {"pip", "setuptools"}
    assert asked == {normal(PROJECT["name"])}, f"asked for {asked}"
    missing = {normal(text) for text in PROJECT["dependencies"]} - installed.keys()
    assert not missing, f"declared and not installed: {missing}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    check_wheel(wheel)
    check_sdist(sdist)
    with tempfile.TemporaryDirectory() as scratch:
        check_same_wheel(sdist, wheel, Path(scratch) / "rebuilt")
        check_installed(wheel, Path(scratch) / "venv")
    print(f"{wheel.name} and {sdist.name} hold what they should")


if __name__ == "__main__":
    main()
