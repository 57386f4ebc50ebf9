"""What the README and the docs show is true: their code runs, their tables are the code's, their links lead somewhere."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
from healthy import FLAX

import pytest_nnxcheck
from pytest_nnxcheck import wheels
from pytest_nnxcheck.compat.targets import SHARE
from pytest_nnxcheck.core.catalogue import OWN_INVARIANTS, REGISTERED
from pytest_nnxcheck.core.chips import CHIPS, GIB, sizes_of
from pytest_nnxcheck.core.settings import TABLE, flag, names, show

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
SETTINGS = (DOCS / "settings.md").read_text()
TARGETS = (DOCS / "targets.md").read_text()
SHOWN = (DOCS / "failures.md").read_text().partition("<!-- fails: ")[2].partition("```text\n")[2].partition("```")[0]
PAGES = sorted(DOCS.glob("*.md"))
DOCUMENTS = [ROOT / "README.md", *PAGES]
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
BLOCK = re.compile(
    r"(?:^<!-- file: (?P<file>\S+) -->\n)?(?:^<!-- target: (?P<target>\S+) -->\n)?(?:^<!-- fails: (?P<fails>\w+)(?: under (?P<nesting>[^\n]+?))? -->\n)?"
    r"(?:^<!-- from flax (?P<since>[\d.]+) -->\n)?(?:^<!-- before flax (?P<until>[\d.]+) -->\n)?^```python\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
OPTIONS = {flag(name) for name in names(place="command line")}
TEXT = re.compile(r"^```text\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FEW = ["--nnx-sweep=singles", "--nnx-max-examples=0", "--nnx-styles=argument", "--nnx-transforms=jit,scan,vmap"]


@dataclass(frozen=True)
class Snippet:
    """A block of Python: where it stands, the flax and the targets it is written for, and the file that it is in a tutorial; of one that must fail, how and under which nesting; what is shown of its output."""

    place: str
    code: str
    fails: str | None
    nesting: str
    since: str
    until: str
    file: str | None
    target: str
    shown: str

    @property
    def elsewhere(self) -> str:
        """Why it cannot run here: the versions that it is written for, or the compilers that it needs; empty where it can."""
        if versions(self.since) > FLAX:
            return f"written for versions from flax {self.since}"
        if FLAX >= versions(self.until):
            return f"written for versions before flax {self.until}"
        return wheels.problem(self.target.split(",")) if self.target else ""

    @property
    def module(self) -> str:
        """The name of the test file in the message, where one is shown."""
        named = re.search(r"(\w+)\.py::", self.shown)
        return named[1] if named else "test_decoder"


def versions(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(".")))


def snippets(document: Path) -> list[Snippet]:
    text = document.read_text()
    return [
        Snippet(
            f"{document.name}:{line_of(text, m)}",
            m["code"],
            m["fails"],
            m["nesting"] or "jit",
            m["since"] or "0",
            m["until"] or "999",
            m["file"],
            m["target"] or "",
            shown_after(text, m.end()) if m["fails"] or (m["target"] and "def test_" in m["code"]) else "",
        )
        for m in BLOCK.finditer(text)
    ]


def shown_after(text: str, place: int) -> str:
    """The excerpt below a block that fails."""
    excerpt = TEXT.search(text, place)
    assert excerpt is not None
    return excerpt[1]


def line_of(text: str, match: re.Match[str]) -> int:
    return text.count("\n", 0, match.start("code")) + 1


SNIPPETS = [snippet for document in DOCUMENTS for snippet in snippets(document)]
RUN = [snippet for snippet in SNIPPETS if not snippet.file]  # files of the tutorial are run by test_tutorial.py


@pytest.mark.parametrize("snippet", RUN, ids=lambda snippet: snippet.place)
def test_code_of_the_documents_does_what_they_say(snippet, pytester, inner_args):
    if snippet.elsewhere:
        pytest.skip(snippet.elsewhere)
    if "def test_" not in snippet.code:
        registered, own = dict(REGISTERED), dict(OWN_INVARIANTS)
        try:
            exec(compile(snippet.code, snippet.place, "exec"), {"__name__": "__main__"})
        finally:
            REGISTERED.clear()
            REGISTERED.update(registered)
            OWN_INVARIANTS.clear()
            OWN_INVARIANTS.update(own)
        return
    shutil.copy(ROOT / "examples" / "model.py", pytester.path)
    pytester.syspathinsert()
    pytester.makepyfile(**{snippet.module: snippet.code})
    options = [f"--nnx-nesting={snippet.nesting}"] if snippet.fails else FEW
    run = pytester.runpytest_inprocess
    if snippet.target:  # its variables are those of a process
        run, options = pytester.runpytest_subprocess, [*options, f"--nnx-target={snippet.target}"]
    if devices := re.search(r"(?:devices=|CHIPS = )(\d+)", snippet.code):  # one process has one number of them
        run, options = pytester.runpytest_subprocess, [*options, f"--nnx-devices={devices[1]}"]
    result = run(*inner_args, "--strict-markers", *options)
    result.assert_outcomes(
        failed=int(bool(snippet.fails)), passed=0 if snippet.fails else snippet.code.count("def test_")
    )
    if not snippet.fails:
        assert [line for line in snippet.shown.splitlines() if line not in result.stdout.str()] == []
    if snippet.fails:
        message = rows(result.stdout.str().replace(f"{pytester.path}/", ""))
        assert snippet.fails == "raises" or f"nnx invariant broken: {snippet.fails}" in message[0]
        compare = assert_shown if snippet.shown == SHOWN else assert_excerpt
        compare(rows(snippet.shown), message)


def rows(output: str) -> list[str]:
    """The message of a failure, without the user's source line above it: a line for each row, which the page breaks where it likes."""
    lines = [line.rstrip() for line in output.splitlines() if line.startswith("E  ")]
    lines = lines[next((number for number, line in enumerate(lines) if "nnx invariant broken" in line), 0) :]
    return re.sub(r"\nE {10,}(?! )", " ", "\n".join(lines)).splitlines()


def assert_excerpt(shown: list[str], real: list[str]) -> None:
    """Every row that the page shows is one of the message, in its order, or the start of one; of the nesting, what a replay says of it."""
    said = iter(map(comparable, real))
    assert shown
    assert [
        row for row in map(comparable, shown) if not any(other.startswith(row) for other in said)
    ] == []  # which goes on where it stopped


def comparable(row: str) -> str:
    """A row without what depends on the version or on how it was run: the function of a line, and how many nestings were tried."""
    row = re.sub(r" \([\w.]*__call__\)", "", " ".join(row.split()))
    return re.sub(r"^(E nesting .*?)( replayed, no other was run)?$", r"\1", row)


def assert_shown(shown: list[str], real: list[str]) -> None:
    """The page shows the rows of the failure, in their order; figures, hints and lines depend on the version."""
    assert (shown[0], shown[-1]) == (real[0], real[-1])
    wanted, found = labels(shown), labels(real)
    assert [label for label in wanted if label in found] == [label for label in found if label in wanted]
    for message in (shown, real):
        assert any("copy of decoder.blocks.linear.kernel" in row for row in message)
        assert any("(tried: peak " in row for row in message)


def labels(message: list[str]) -> list[str]:
    return list(dict.fromkeys(row.split()[1] for row in message))


def test_every_python_block_is_found():
    fences = sum(document.read_text().count("```python") for document in DOCUMENTS)
    assert len(SNIPPETS) == fences >= 3
    assert {snippet.place.partition(":")[0] for snippet in SNIPPETS if snippet.file} == {"tutorial.md"}


@pytest.mark.parametrize("document", [*DOCUMENTS, ROOT / "CONTRIBUTING.md"], ids=lambda document: document.name)
def test_options_and_sessions_are_real(document):
    text = document.read_text()
    assert set(re.findall(r"--nnx-[a-z]+(?:-[a-z]+)*", text)) - OPTIONS == set()
    sessions = set(re.findall(r"^def (\w+)\(session", (ROOT / "noxfile.py").read_text(), re.MULTILINE))
    assert set(re.findall(r"nox -s '?(\w+)", text)) - sessions == set()


def sections_of(scope):
    """The settings of a scope in docs/settings.md, a heading for each."""
    lines = []
    for name in names(scope):
        row = TABLE[name]
        option = f"{flag(name)}{'' if row.kind.words else ' '}{row.kind.metavar}".rstrip()
        text = row.help[0].upper() + row.help[1:]
        lines += [
            f"### `{name}`",
            "",
            f"{text}{'; may be repeated' if row.kind.is_repeated else ''}. [More]({row.section})",
            "",
        ]
        alone = "" if "ini file" in row.places else ", command line alone"
        lines += [f"`{option}`, default `{show(row.default)}`{alone}.", ""]
    return "\n".join(["", *lines])


@pytest.mark.parametrize("scope", ["check", "named", "run"])
def test_the_settings_are_those_of_the_code(scope):
    (shown,) = re.findall(rf"<!-- settings of a {scope} -->\n(.*?)<!-- /settings -->", SETTINGS, re.DOTALL)
    assert shown == sections_of(scope), f"docs/settings.md should have:\n{sections_of(scope)}"


def between(start: str, end: str) -> str:
    """What the page on targets has between two marks."""
    (text,) = re.findall(rf"<!-- {start} -->\n\n(.*?)<!-- {end} -->", TARGETS, re.DOTALL)
    return text


def test_the_table_of_chips_is_that_of_the_code():
    table = ["| target | chip | memory, GiB | a program may use, GiB | devices of a slice |", "|---|---|---|---|---|"]
    for chip in CHIPS:
        label = re.search('device_description_str: "(.*)"', chip.gpu)
        name, share = (label[1], SHARE) if label else (f"TPU {chip.name}", 1)
        memory = f"{chip.memory / GIB:.2f} | {share * chip.memory / GIB:.2f}"
        sizes = re.sub(r"^(\d+, \d+)(, \d+){3,}(?=, )", r"\1, ...", sizes_of(chip))
        table.append(f"| `{chip.name}` | {name} | {memory} | {sizes} |")
    wanted = "\n".join([*table, ""])
    assert between("chips", "end of chips") == wanted, f"paste into docs/targets.md:\n{wanted}"


def test_the_accuracy_of_a_gpu_is_that_of_its_figures():
    measured = json.loads((DOCS / "target_against_device.json").read_text())
    rows = [
        row for row in (*measured["rows"], *measured["others"]) if "peak" in row["target"] and "peak" in row["device"]
    ]
    mib, same_peak, aligned = 2**20, 2**14, 2**10  # those of the benchmark
    assert all(row["device"]["peak"] <= row["target"]["most"] + aligned for row in rows)
    by = {row["program"]: row["device"]["peak"] - row["target"]["peak"] for row in rows}
    same = [more for more in by.values() if abs(more) < same_peak]
    lower = [more for more in by.values() if more <= -same_peak]
    higher = [more for more in by.values() if same_peak <= more <= 32 * mib + aligned]
    much = {name: more for name, more in by.items() if more > 32 * mib + aligned}
    shares = [100 * more / row["device"]["peak"] for row in rows for more in [much.get(row["program"])] if more]
    assert f"{len(rows)} programs were compiled with the device and without it" in TARGETS
    assert f"The peaks agree in {len(same)}, and {len(lower)} is lower" in TARGETS
    assert f"in {len(higher)} by up to 32 MiB, and in {len(much)} by {min(much.values()) // mib} to" in TARGETS
    assert f"{max(much.values()) // mib} MiB, {min(shares):.0f} to {max(shares):.0f} %. There" in TARGETS
    assert f"all {len(rows)} stayed within" in TARGETS
    most = max(row["target"]["most"] / row["target"]["peak"] for row in rows if row["device"]["peak"] > 512 * mib)
    assert f"up to {100 * (most - 1):.0f} % of a peak" in TARGETS


@pytest.mark.parametrize("document", [ROOT / "README.md", DOCS / "index.md"], ids=lambda document: document.name)
def test_the_failure_on_the_first_page_is_an_excerpt_of_the_whole_one(document):
    (excerpt,) = re.findall(r"<!-- excerpt of docs/failures.md -->\n```text\n(.*?)```", document.read_text(), re.DOTALL)
    whole = iter(SHOWN.splitlines())
    assert [row for row in excerpt.splitlines() if row not in whole] == []  # `in` goes on where it stopped
    assert (excerpt.splitlines()[0], excerpt.splitlines()[-1]) == (SHOWN.splitlines()[0], SHOWN.splitlines()[-1])


def links(document: Path) -> list[tuple[str, str]]:
    """The relative links: the file, from the folder of the document, and the heading, empty where there is none."""
    targets = re.findall(r"\]\((?!\w+:)([^)\s]+)\)", FENCED.sub("", document.read_text()))
    return [(target.partition("#")[0], target.partition("#")[2]) for target in targets]


def test_the_readme_leads_to_files_and_headings_and_the_index_to_every_page():
    """On GitHub, where nothing tells of a broken link; what the pages link mkdocs holds against the folder."""
    for name, heading in links(ROOT / "README.md"):
        assert (ROOT / name).exists(), name
        assert not heading or heading.replace("-", " ") in (ROOT / name).read_text().lower(), f"{name}#{heading}"
    assert "docs/index.md" in dict(links(ROOT / "README.md"))
    reached, ahead = set(), [DOCS / "index.md"]
    while ahead:
        page = ahead.pop()
        if page not in reached and page.suffix == ".md":
            reached.add(page)
            ahead += [(page.parent / name).resolve() for name, _ in links(page) if name]
    assert set(PAGES) - reached == set()


def test_the_reference_has_every_public_name():
    shown = re.findall(r"^::: pytest_nnxcheck\.(\w+)$", (DOCS / "api.md").read_text(), re.MULTILINE)
    assert sorted(shown) == sorted(set(pytest_nnxcheck.__all__) - {"__version__"})


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md"], ids=lambda page: page.name)
def test_a_list_or_table_stands_apart(page):
    """Without the blank line GitHub shows a list or a table all the same, and the site shows its text."""
    prose = FENCED.sub("", page.read_text())
    assert re.findall(r"^(?![*|\s]|- |\d+\.)(?!<!--).+\n(?:\* |- |\||1\. ).*", prose, re.MULTILINE) == []
