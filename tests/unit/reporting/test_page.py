"""The page: everything is on it, nothing on it is anybody else's HTML, it loads nothing, and it can be read in both schemes."""

import base64
import hashlib
import re
from html.parser import HTMLParser

import documents
import pytest
from hypothesis import given

from pytest_nnxcheck import Violation
from pytest_nnxcheck.reporting import html_page
from pytest_nnxcheck.reporting.records import plain

VOID = {"meta", "link", "input", "wbr"}
PARTS = [
    "<b>",
    "</dd>",
    "</pre>",
    "</details>",
    "<script>",
    "&lt;",
    "&#60;",
    "<!--",
    "]]>",
    '" onclick="',
    "'>",
    "</style>",
    "é",
    "\n",
]
HOSTILE = documents.hostile_texts(PARTS)


class Parsed(HTMLParser):
    """A page as its elements and its text; every element must be closed, in the right order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)

    def all(self, name: str) -> list[str]:
        return [attrs[name] or "" for _, attrs in self.elements if name in attrs]

    def cells(self) -> list[str]:
        return [attrs["title"] for tag, attrs in self.elements if tag == "a" and "cell" in (attrs.get("class") or "")]


PAGE = html_page.render(documents.whole())


def test_a_run_as_a_page(golden):
    """Open tests/golden/report.html in a browser to review it."""
    golden("report.html", PAGE)


def test_every_link_of_the_page_leads_to_a_place_on_it():
    parsed = Parsed(PAGE)
    ids, links = parsed.all("id"), [link for link in parsed.all("href") if not link.startswith("data:")]
    assert len(ids) == len(set(ids))
    assert {link.removeprefix("#") for link in links} <= set(ids)
    assert all(link.startswith("#") for link in links)
    assert len(parsed.cells()) == sum(len(record.nestings) for record in documents.whole().records)


@pytest.mark.parametrize(
    "outcomes, badges",
    [
        (documents.BROKEN, {"failed": "✗ failed", "xfailed": "⊘ xfailed", "interrupted": "■ interrupted"}),
        (documents.HELD, {"passed": "✓ passed", "failed": "! failed", "skipped": "✓ passed", "error": "! error"}),
        ([], {"skipped": "⊘ skipped", "interrupted": "■ interrupted"}),
    ],
    ids=["broken", "held", "none"],
)
def test_the_badge_of_a_test(outcomes, badges):
    for end, said in badges.items():
        assert said in html_page.render(documents.document(documents.ended("t.py::t", outcomes, end=end))), end


def test_transforms_of_the_users_own_have_columns():
    found = documents.ended("t.py::t", [documents.outcome("jit"), documents.outcome("grad")])
    found = documents.nested(found, 1, nesting="<own>", layers=("<own>[closure]",))
    heads = re.findall(r'<th scope="col">(.*?)</th>', html_page.render(documents.document(found)))
    assert heads[:3] == ["test", "jit", "&lt;own&gt;"]


def test_where_nothing_was_measured_there_is_no_order():
    text = html_page.render(documents.document(documents.ended("t.py::t", [documents.outcome("scan")])))
    assert "<select" not in text
    assert "<select" in PAGE


def test_a_page_takes_in_the_programs_that_it_has_room_for(monkeypatch):
    broken = [documents.outcome(name, "violated", program=f"{name}.py") for name in ("scan", "remat", "jit")]
    found = documents.ended("t.py::t", broken, end="failed")
    for at in range(3):
        found = documents.nested(found, at, program_text=f"# {found.nestings[at].nesting}".ljust(100, "#"))
    monkeypatch.setattr(html_page, "PROGRAMS", 250)
    text = html_page.render(documents.document(found))
    assert re.findall(r"<pre[^>]*># (\w+)#", text) == ["jit", "scan", "jit"]  # that of the message is there twice
    assert '<dd class="command"><code>remat.py</code></dd>' in text


@pytest.mark.parametrize(
    "tests, title",
    [
        ([], "No marked test ran - nnx invariants"),
        (["passed"], "1 test passed - nnx invariants"),
        (["passed", "passed"], "All 2 tests passed - nnx invariants"),
        (["passed", "failed", "error"], "2 of 3 tests failed - nnx invariants"),
    ],
    ids=["none", "one", "all", "some"],
)
def test_the_title_says_how_it_went(tests, title):
    document = documents.document(*(documents.ended(f"t.py::t{n}", end=end) for n, end in enumerate(tests)))
    text = html_page.render(document)
    assert f"<title>{title}</title>" in text
    Parsed(text)


@pytest.mark.slow
@given(HOSTILE, HOSTILE, HOSTILE)
def test_no_text_becomes_a_part_of_the_page(name, words, file):
    def rendered(name, words, file):
        violation = Violation("memory", words, ((words, words),), words)
        outcomes = [
            documents.outcome("jit", "violated", violations=(violation,), notes=(words,), program=file),
            documents.outcome("scan", "failed", reason=words),
        ]
        told = plain(words)
        found = documents.ended(plain(f"{name}::{name}"), outcomes, end="failed", notes=(told,))
        found = documents.nested(found, 0, program_text=told)
        found = documents.nested(found, 1, nesting=told, layers=(told,), mode=told)
        return html_page.render(documents.document(found))

    hostile, plainest = Parsed(rendered(name, words, file)), Parsed(rendered("n", "w", "f"))
    assert [(tag, *attrs) for tag, attrs in hostile.elements] == [(tag, *attrs) for tag, attrs in plainest.elements]
    # What the parser makes of text is what was written, line ends aside.
    shown = "".join(hostile.text)
    assert all(plain(each) in shown for each in (name, words, file))


def test_the_page_can_load_nothing():
    parsed = Parsed(PAGE)
    (policy,) = [
        attrs["content"] for _, attrs in parsed.elements if attrs.get("http-equiv") == "Content-Security-Policy"
    ]
    script = re.search(r"<script>(.*?)</script>", PAGE, re.DOTALL)[1]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert policy == (
        f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{digest}';"
        " base-uri 'none'; form-action 'none'"
    )
    assert not {"src", "srcset", "action", "poster", "data"} & {name for _, attrs in parsed.elements for name in attrs}
    assert not {name for _, attrs in parsed.elements for name in attrs if name.startswith("on")}
    assert not re.search(r"url\(|@import|@font-face|image-set", PAGE)
    assert re.findall(r"https?://\S+?(?=%22)", PAGE) == []  # that of the icon is quoted, the name of its kind of XML
    assert "//" not in PAGE.replace("http%3A//www.w3.org/2000/svg", "")


def colours(text: str) -> dict[str, str]:
    return dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", text))


def luminance(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    dark, light = sorted([luminance(one), luminance(other)])
    return (light + 0.05) / (dark + 0.05)


LIGHT = colours(html_page.read("html_page.css").partition("@media")[0])
DARK = colours(html_page.read("html_page.css").partition("(prefers-color-scheme: dark)")[2].partition("\n}")[0])
KINDS = tuple(html_page.SYMBOLS)
READ = [(kind, f"{kind}-ink") for kind in KINDS]
READ += [(paper, ink) for paper in ("page", "card", "inset") for ink in ("text", "muted", "link", "good", "bad")]
SEEN = [("track", part) for part in ("resident", "temporaries", "constants", "mark")] + [("card", "focus")]


@pytest.mark.parametrize("scheme", [LIGHT, DARK], ids=["light", "dark"])
def test_contrast_is_enough_for_everybody(scheme):
    assert LIGHT.keys() == DARK.keys()
    poor = {pair: contrast(scheme[pair[0]], scheme[pair[1]]) for pair in READ}
    assert {pair: ratio for pair, ratio in poor.items() if ratio < 4.5} == {}
    faint = {pair: contrast(scheme[pair[0]], scheme[pair[1]]) for pair in SEEN}
    assert {pair: ratio for pair, ratio in faint.items() if ratio < 3} == {}


def test_no_verdict_is_told_by_colour_alone():
    assert len(set(html_page.SYMBOLS.values())) == len(KINDS) == 6
    style = html_page.read("html_page.css")
    assert all(f".cell.{kind} " in style for kind in KINDS)


@pytest.mark.slow
def test_a_thousand_nestings_are_a_page_of_a_few_megabytes():
    document = documents.many(1000)
    assert len(document.nestings) == 1000
    assert len(html_page.render(document).encode()) < 3_000_000
