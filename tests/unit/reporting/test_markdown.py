"""The Markdown of a run: what it says, that nothing in it is anybody else's markup, and that it fits."""

import re

import documents
import pytest
from hypothesis import example, given
from markdown_it import MarkdownIt

from pytest_nnxcheck.reporting.pages import markdown
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
    golden("report.md", markdown.render(documents.mixed()))


def test_the_message_and_the_program_are_folded_away():
    document = documents.mixed()
    document["nestings"][2]["program_text"] = "print(1)"
    html = PARSER.render(markdown.render(document))
    assert (
        "<details><summary><code>test_model.py::test_broken</code>: memory under <code>jit &#62; scan</code></summary>"
        in html
    )
    assert '<pre><code class="language-text">nnx invariant broken: memory' in html
    assert '<pre><code class="language-python">print(1)' in html
    document["nestings"][2]["program_text"] = "print(1)\n" * 1000
    assert "language-python" not in PARSER.render(markdown.render(document))
    assert "<td>3: 3 passed</td>" in html
    assert html.count("<details>") == html.count("</details>") == 2


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


def test_what_fits_is_not_cut():
    tests = [documents.ended(f"t.py::test_{n:03}", documents.BROKEN, end="failed") for n in range(20)]
    text = markdown.render(documents.document(*tests))
    assert "do not fit" not in text
    assert text.count("<details>") == 20


def test_it_says_what_was_not_run():
    stopped = documents.ended("t.py::t", documents.BROKEN, end="failed", not_run=12)
    known = documents.ended("t.py::u", documents.BROKEN, end="xfailed", not_run=3)
    text = markdown.render(documents.document(stopped, known))
    assert re.search(r"^14 nestings of 2 tests: 2 failed, .*, 15 not run", text, re.MULTILINE)
    assert re.search(r"^\| `t.py::u` \| 7: 1 failed, .*, 3 not run \|", text, re.MULTILINE)
    assert "not run" not in markdown.render(documents.mixed())
