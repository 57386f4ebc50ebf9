"""The Markdown of a run: what it says, that nothing in it is anybody else's markup, and that it fits."""

import re

import documents
import pytest
from hypothesis import example, given
from markdown_it import MarkdownIt

from pytest_nnxcheck.core.outcome import Violation
from pytest_nnxcheck.reporting import html_page, markdown
from pytest_nnxcheck.reporting.records import plain

PARTS = [
    "|",
    "`",
    "``` \n",
    "\\",
    "<b>",
    "</details>",
    "</code>",
    "*",
    "_",
    "**",
    "](x)",
    "![",
    "&lt;",
    "@you",
    "#1",
    "~~",
    "$x$",
    "a",
    "é",
    "\n",
    "\n\n# ",
]
HOSTILE = documents.hostile_texts(PARTS)
PARSER = MarkdownIt("gfm-like", {"linkify": False, "html": True})


def shape(text: str) -> list[str]:
    """The elements that a text is rendered to, in order, without the characters between them."""
    return re.findall(r"</?\w+[^>]*>", PARSER.render(text))


def hostile(words: str):
    violation = documents.MEMORY
    broken = documents.outcome("jit > scan", "violated", violations=(violation,))
    found = documents.ended(f"t.py::test[{words}]", [broken], end="failed", message=plain(words))
    own = documents.ended(f"u.py::test[{words}]", [], end="failed", message=plain(words))
    return documents.document(found, own, documents.ended(f"v.py::test[{words}]"))


@given(HOSTILE)
@example("a|b\\|c`d")
@example("```\n</details>")
def test_no_text_becomes_markup(words):
    def elements(text):
        return [tag for tag in shape(text) if tag not in {"<code>", "</code>"}]

    assert elements(markdown.render(hostile(words))) == elements(markdown.render(hostile("plain")))


@given(HOSTILE.map(plain).filter(lambda name: not re.search(r"[\x80-\x9f\ufdd0-\ufdef\ufffe\uffff]", name)))
def test_code_says_the_name_itself(name):
    rendered = PARSER.render(f"| {markdown.code(name)} |\n|---|\n").partition("</code>")[0].partition("<code>")[2]
    unescaped = rendered.replace("&lt;", "<").replace("&gt;", ">").replace("&quot;", '"').replace("&amp;", "&")
    assert "".join(unescaped.split()) == "".join(name.split())


def test_a_run_reads_well(golden):
    golden("report.md", markdown.render(documents.whole()))


@pytest.mark.parametrize("invariant, shown", [("memory", True), ("tracers", False)])
def test_bytes_explain_no_leak(invariant, shown):
    violations = (Violation(invariant, "it broke"),)
    broken = [documents.outcome("jit", "violated", peak=5000, budget=9000, violations=violations)]
    rows = (("un-nested", "peak 5.0 MiB under a plain jax.jit"),)
    record = documents.ended("t.py::t", broken, end="failed", un_nested_peak=rows)
    assert ("worst peak 4.9 KiB" in record.head.summary) == shown
    document = documents.document(record)
    assert ("| 4.9 KiB | 8.8 KiB |" in markdown.render(document)) == shown
    assert ["peak 5.0 MiB" in page.render(document) for page in (markdown, html_page)] == [shown, shown]


@pytest.mark.parametrize(
    "end, said", [("passed", "✓ nnx invariants: all pass"), (None, "nnx invariants: no marked test ran")]
)
def test_a_run_without_a_failure(end, said):
    tests = [] if end is None else [documents.ended("t.py::t", end=end)]
    assert markdown.render(documents.document(*tests)).startswith(f"## {said}\n")


@pytest.mark.parametrize("limit", [markdown.COMMENT, 5_000, 1_500])
def test_a_large_run_is_cut_to_what_fits(limit):
    tests = [
        documents.ended(f"t.py::test_{n:03}", documents.BROKEN, end="failed", message="é" * 9_000) for n in range(100)
    ]
    text = markdown.render(documents.document(*tests, documents.ended("u.py::u")), limit)
    assert len(text.encode()) <= limit
    assert text.count("<details>") == text.count("</details>")
    assert re.search(
        r"\n\d+ more tests do not fit in here, or not with their messages: see the .html or .json report.\n$", text
    )
    assert "1000 characters more" in text or limit < markdown.COMMENT
    html = PARSER.render(text)
    assert html.count("<table>") == html.count("</table>")


@pytest.mark.parametrize("lines, taken", [(1, True), (1000, False)])
def test_a_long_program_is_not_in_it(lines, taken):
    found = documents.ended("t.py::t", documents.BROKEN, end="failed")
    at = next(at for at, each in enumerate(found.nestings) if each.nesting == found.head.shown)
    text = markdown.render(documents.document(documents.nested(found, at, program_text="print(1)\n" * lines)))
    assert ("```python\nprint(1)\n" in text) == taken


def test_what_fits_is_not_cut():
    tests = [documents.ended(f"t.py::test_{n:03}", documents.BROKEN, end="failed") for n in range(20)]
    text = markdown.render(documents.document(*tests))
    assert "do not fit" not in text
    assert text.count("<details>") == 20


# --- the summary page of a step of GitHub Actions


@pytest.mark.parametrize(
    "environ", [{}, {"GITHUB_ACTIONS": "false", "GITHUB_STEP_SUMMARY": "x"}, {"GITHUB_STEP_SUMMARY": "x"}]
)
def test_elsewhere_there_is_no_summary(environ):
    assert markdown.step_summary(environ) is None


def test_the_summary_is_added_to_what_is_there(tmp_path):
    file = tmp_path / "summary.md"
    file.write_text("# Before\n")
    assert markdown.step_summary({"GITHUB_ACTIONS": "true", "GITHUB_STEP_SUMMARY": str(file)}) == file
    markdown.append(file, documents.mixed())
    assert file.read_text().startswith("# Before\n\n## ✗ nnx invariants: 1 of 2 tests failed\n")
    markdown.append(file, documents.mixed())
    assert file.read_text().count("## ✗ nnx") == 2


@pytest.mark.parametrize("there", [0, 1024 * 1024 - 3_000, 1024 * 1024 - 10, 2 * 1024 * 1024])
def test_the_summary_never_grows_over_what_github_takes(tmp_path, there):
    file = tmp_path / "summary.md"
    file.write_bytes(b"x" * there)
    tests = [
        documents.ended(f"t.py::test_{n:04}", documents.BROKEN, end="failed", message="é" * 9_000) for n in range(100)
    ]
    markdown.append(file, documents.document(*tests))
    assert file.stat().st_size <= max(there, markdown.STEP)
    assert (file.stat().st_size > there) == (there < 1024 * 1024 - 10)
