"""What the README and the docs show is true: their code runs, their tables are the code's, their links lead somewhere."""

from __future__ import annotations

import re
import shutil
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest
from healthy import FLAX

from pytest_nnxcheck.core.catalogue import OWN_INVARIANTS, REGISTERED
from pytest_nnxcheck.core.settings import table_markdown

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
README = (ROOT / "README.md").read_text()
SETTINGS = (DOCS / "settings.md").read_text()
SHOWN = (DOCS / "failures.md").read_text().partition("<!-- fails: ")[2].partition("```text\n")[2].partition("```")[0]
PAGES = sorted(DOCS.glob("*.md"))
DOCUMENTS = [ROOT / "README.md", *PAGES]
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
BLOCK = re.compile(
    r"(?:^<!-- fails: (?P<fails>\w+) -->\n)?(?:^<!-- from flax (?P<since>[\d.]+) -->\n)?^```python\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
FEW = ["--nnx-sweep=singles", "--nnx-max-examples=0", "--nnx-styles=argument"]


@dataclass(frozen=True)
class Snippet:
    """A block of Python: where it stands, the invariant that its test must break, if any, and the flax it is written for."""

    place: str
    code: str
    fails: str | None
    since: str


def snippets(document: Path) -> list[Snippet]:
    text = document.read_text()
    return [
        Snippet(f"{document.name}:{line_of(text, m)}", m["code"], m["fails"], m["since"] or "0")
        for m in BLOCK.finditer(text)
    ]


def line_of(text: str, match: re.Match[str]) -> int:
    return text.count("\n", 0, match.start("code")) + 1


SNIPPETS = [snippet for document in DOCUMENTS for snippet in snippets(document)]


@pytest.mark.parametrize("snippet", SNIPPETS, ids=lambda snippet: snippet.place)
def test_code_of_the_documents_does_what_they_say(snippet, pytester, inner_args):
    if tuple(map(int, snippet.since.split("."))) > FLAX:
        pytest.skip(f"written for flax {snippet.since}")
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
    pytester.makepyfile(test_decoder=snippet.code)
    options = ["--nnx-nesting=jit"] if snippet.fails else FEW
    result = pytester.runpytest_inprocess(*inner_args, "--strict-markers", *options)
    result.assert_outcomes(
        failed=int(bool(snippet.fails)), passed=0 if snippet.fails else snippet.code.count("def test_")
    )
    if snippet.fails:
        assert f"nnx invariant broken: {snippet.fails}" in rows(result.stdout.str())[0]
        assert_shown(rows(SHOWN), rows(result.stdout.str()))


def rows(output: str) -> list[str]:
    """The message of a failure, without the user's source line above it."""
    lines = [line.rstrip() for line in output.splitlines() if line.startswith("E  ")]
    return lines[next(number for number, line in enumerate(lines) if "nnx invariant broken" in line) :]


def assert_shown(shown: list[str], real: list[str]) -> None:
    """The page shows the rows of the failure, in their order; figures, hints and lines depend on the version."""
    assert (shown[0], shown[-1]) == (real[0], real[-1])
    wanted, found = labels(shown), labels(real)
    assert [label for label in wanted if label in found] == [label for label in found if label in wanted]
    for message in (shown, real):
        assert any("copy of decoder.blocks.linear.kernel" in row for row in message)


def labels(message: list[str]) -> list[str]:
    return list(dict.fromkeys(row.split()[1] for row in message))


def test_every_python_block_is_found():
    fences = sum(document.read_text().count("```python") for document in DOCUMENTS)
    assert len(SNIPPETS) == fences >= 3


@pytest.mark.parametrize("scope", ["check", "run"])
def test_the_tables_of_settings_are_those_of_the_code(scope):
    (table,) = re.findall(rf"<!-- settings of a {scope} -->\n(.*?)<!-- /settings -->", SETTINGS, re.DOTALL)
    assert table == table_markdown(scope), (
        f"paste pytest_nnxcheck.core.settings.table_markdown({scope!r}) into docs/settings.md"
    )


def test_the_quick_start_is_two_commands():
    (block,) = re.findall(r"<!-- quick start -->\n```console\n(.*?)```", README, re.DOTALL)
    lines = block.splitlines()
    assert len(lines) == 2
    assert all(line.startswith("$ pip install ") and " && pytest" in line for line in lines)


def test_the_readme_is_a_screen_and_a_half():
    assert len(README.splitlines()) <= 160
    assert len(README.encode()) <= 9_000


def test_the_failure_in_the_readme_is_an_excerpt_of_the_whole_one():
    (excerpt,) = re.findall(r"<!-- excerpt of docs/failures.md -->\n```text\n(.*?)```", README, re.DOTALL)
    whole = iter(SHOWN.splitlines())
    assert [row for row in excerpt.splitlines() if row not in whole] == []  # `in` goes on where it stopped
    assert (excerpt.splitlines()[0], excerpt.splitlines()[-1]) == (SHOWN.splitlines()[0], SHOWN.splitlines()[-1])


def links(document: Path) -> list[tuple[str, str]]:
    """The relative links: file, empty for the document itself, and anchor, empty where there is none."""
    prose = FENCED.sub("", document.read_text())
    targets = re.findall(r"\]\((?!\w+:)([^)\s]+)\)", prose)
    return [(target.partition("#")[0], target.partition("#")[2]) for target in targets]


def anchors(document: Path) -> set[str]:
    """The headings as GitHub makes anchors of them; of those that read the same, the later ones get a number."""
    found: Counter[str] = Counter()
    slugs = set()
    for heading in re.findall(r"^#+ +(.*)$", FENCED.sub("", document.read_text()), re.MULTILINE):
        words = re.sub(r"\]\([^)]*\)", "", heading).strip().lower()
        slug = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
        slugs.add(f"{slug}-{found[slug]}" if found[slug] else slug)
        found[slug] += 1
    return slugs


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)
def test_links_lead_to_files_and_headings(document):
    broken = []
    for name, anchor in links(document):
        target = document.parent / name if name else document
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(f"{name}#{anchor}" if anchor else name)
    assert broken == []


def test_the_index_lists_every_page():
    listed = {(DOCS / name).resolve() for name, _ in links(DOCS / "index.md") if name}
    assert set(PAGES) - {DOCS / "index.md"} - listed == set()
    assert "docs/index.md" in dict(links(ROOT / "README.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_begins_with_a_title_and_a_sentence(page):
    title, blank, about = page.read_text().splitlines()[:3]
    assert title.startswith("# ")
    assert blank == ""
    assert re.match(r"[`\w]", about)
