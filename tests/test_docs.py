"""What the README and the docs show is true: their code runs, their table is the code's, their commands are there."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
from healthy import FLAX

from pytest_nnxcheck.core.nesting import REGISTERED
from pytest_nnxcheck.core.settings import settings_table_markdown
from pytest_nnxcheck.plugin.run_options import outlets_table_markdown

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
SHOWN = README.partition("<!-- fails: ")[2].partition("```text\n")[2].partition("```")[0]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
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
        registered = dict(REGISTERED)
        try:
            exec(compile(snippet.code, snippet.place, "exec"), {"__name__": "__main__"})
        finally:
            REGISTERED.clear()
            REGISTERED.update(registered)
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
    """The README shows the rows of the failure, in their order; figures, hints and lines depend on the version."""
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


def test_the_table_of_settings_is_that_of_the_code():
    (table,) = re.findall(r"<!-- settings -->\n(.*?)<!-- /settings -->", README, re.DOTALL)
    assert table == settings_table_markdown(), (
        "paste pytest_nnxcheck.core.settings.settings_table_markdown() into README.md"
    )


def test_the_table_of_outlets_is_that_of_the_code():
    (table,) = re.findall(r"<!-- outlets -->\n(.*?)<!-- /outlets -->", README, re.DOTALL)
    assert table == outlets_table_markdown(), (
        "paste pytest_nnxcheck.plugin.run_options.outlets_table_markdown() into README.md"
    )


def test_the_quick_start_is_two_commands():
    (block,) = re.findall(r"<!-- quick start -->\n```console\n(.*?)```", README, re.DOTALL)
    lines = block.splitlines()
    assert len(lines) == 2
    assert all(line.startswith("$ pip install ") and " && pytest" in line for line in lines)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)
def test_links_to_files_lead_somewhere(document):
    targets = re.findall(r"\]\((?!https?://|#)([^)#]+)", document.read_text())
    assert not [target for target in targets if not (document.parent / target).exists()]
