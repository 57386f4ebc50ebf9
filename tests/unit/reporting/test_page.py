"""The page: everything is on it, nothing on it is anybody else's HTML, it loads nothing, and it can be read in both schemes."""

import base64
import hashlib
import re
from html.parser import HTMLParser

import documents
import pytest
from hypothesis import given

from pytest_nnxcheck import Violation
from pytest_nnxcheck.core.facts import Evidence
from pytest_nnxcheck.core.peak import OnTarget
from pytest_nnxcheck.reporting.pages import html_nesting, html_page
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


MIXED = html_page.render(documents.mixed())


def test_every_nesting_has_a_cell_that_leads_to_its_cause():
    parsed = Parsed(MIXED)
    ids, links = parsed.all("id"), [link for link in parsed.all("href") if not link.startswith("data:")]
    assert len(ids) == len(set(ids))
    assert {link.removeprefix("#") for link in links} <= set(ids)
    assert all(link.startswith("#") for link in links)
    assert parsed.cells() == [
        "un-nested: passed",
        "jit: passed",
        "jit > scan: failed, memory",
        "jit > vmap: expected to fail",
        "remat > scan: left out",
        "scan[closure]: not supported by flax",
        "vmap: raised",
        "un-nested: passed",
        "jit: passed",
        "scan: passed",
    ]
    cells = [dict(attrs) for tag, attrs in parsed.elements if tag == "a" and "title" in attrs]
    # The one that the message is about leads to the failing test, whose cause comes first there.
    assert [cell["href"] for cell in cells if "violated" in cell["class"]] == ["#t1"]
    assert [cell["href"] for cell in cells[:2]] == ["#t1n1", "#t1n2"]
    signs = re.findall(r'<a class="cell (\w+)"[^>]*>(.)<', MIXED)
    assert signs[2:7] == [("violated", "✗"), ("expected", "~"), ("unfit", "·"), ("rejected", "⊘"), ("failed", "!")]


def test_a_cause_has_what_the_message_says_and_what_was_measured():
    (found,) = re.findall(r'<div class="cause" id="t1n3">(.*?)</div>', MIXED, re.DOTALL)
    text = " ".join("".join(Parsed(found.replace("<div", "<span")).text).split())
    for said in (
        "memory",
        "peak 5.0 MiB is over the budget of 4.0 MiB",
        "1.0 MiB temporary",
        "donate the state",
        "5.0 MiB = arguments 2.0 MiB + outputs 1.0 MiB + temporaries 3.0 MiB + constants 24 B - 1.0 MiB donated and reused",
        "3.0 MiB under a plain jax.jit, which is not judged; the nesting adds 2.0 MiB (temporaries +2.0 MiB)",
        "pytest test_model.py::test_broken --nnx-nesting 'jit > scan'",
    ):
        assert said in text


def rows(cause: str) -> list[str]:
    return re.findall(r"<dt[^>]*>(.*?)</dt>", cause)


def test_the_hint_is_the_first_row():
    details = (("", "and on v5e"), ("peak", "5.0 MiB"))
    two = [Violation("memory", "too much", details, "donate"), Violation("donation", "lost", (("lost", "x"),), "cast")]
    found = documents.ended("t.py::t", [documents.outcome("jit", "violated", violations=tuple(two))], end="failed")
    text = html_page.render(documents.document(found))
    (shown,) = re.findall(r'class="failure">(.*?)<details', text, re.DOTALL)
    assert rows(shown) == [
        "hint",
        "peak",
        "hint",
        "lost",
        "expected",
        "un-nested",
        "line",
        "buffer",
        "captured",
        "",
        "replay",
    ]
    assert '<b>memory</b> <span>too much\nand on v5e</span></p><dl><dt class="advice">hint</dt>' in shown


def test_leaked_tracers_need_no_memory():
    leak = Violation("tracers", "tracers remain in model.last", (("leaked", "model.last"),), "keep it")
    both = (leak, documents.MEMORY)
    broken = [
        documents.outcome("jit", "violated", violations=(leak,)),
        documents.outcome("jit > scan", "violated", violations=both),
    ]
    alone, beside = documents.ended("t.py::t", broken, end="failed")["nestings"]
    assert rows(html_nesting.cause(alone)) == ["hint", "leaked", "replay"]
    assert {"peak", "expected", "line"} < set(rows(html_nesting.cause(beside)))
    ends = [documents.ended("t.py::t", [outcome], end="failed") for outcome in broken]
    assert ['class="worst"' in html_page.render(documents.document(end)) for end in ends] == [False, True]


def test_a_test_that_passes_is_one_line():
    (bad, good) = re.findall(r"<article.*?</article>", MIXED, re.DOTALL)
    assert bad.startswith('<article class="bad" id="t1"')
    line, inside = good.split('</summary><div id="t2" class="inside">')
    assert line.startswith('<article class="ok" data-share="0.8333"><details><summary><h3>')
    assert (
        " ".join(re.sub(r"<[^>]*>", " ", line).split())
        == "✓ passed test_model.py:: test_holds 3 nestings: 3 passed worst peak jit 5.0 MiB of 6.0 MiB 83 %"
    )
    assert '<details class="nestings" open>' in inside
    assert '<details class="nestings">' in bad


def test_a_test_that_was_skipped_says_why():
    found = documents.ended("t.py::t", [], end="skipped", message="needs 8 devices")
    assert '<span class="summary">needs 8 devices</span>' in html_page.render(documents.document(found))


def test_tests_that_pass_are_folded_in_the_matrix_where_one_fails():
    assert re.findall(r'<details class="further ok"><summary>(.*?)</summary>', MIXED) == ["1 further test"]
    passing = html_page.render(documents.document(documents.ended("t.py::t")))
    assert "further ok" not in passing
    assert "<table" in passing


ON = OnTarget("v5e", limit=16 * 2**30, fits=True, peak=4 * 2**30)
H100 = OnTarget("h100", limit=60 * 2**30, fits=False, left_out="no compiler")
LARGE = OnTarget("v5e", limit=16 * 2**30, fits=False, refused="RESOURCE_EXHAUSTED")


def test_each_target_has_a_column():
    def on(*targets):
        return [documents.outcome("un-nested"), documents.outcome("jit", evidence=Evidence(targets=targets))]

    tests = [documents.ended(f"t.py::t{n}", on(*targets)) for n, targets in enumerate([[ON, H100], [LARGE], []])]
    text = html_page.render(documents.document(*tests))
    assert re.findall(r'<th scope="col">(.*?)</th>', text) == ["test", "un-nested", "jit", "v5e", "h100"]
    assert re.findall(r'<td data-column="v5e"><span class="(.*?)">(.*?)</span>', text) == [
        ("fit", "fits v5e: 4.0 of 16.00 GiB"),
        ("fit over", "does not fit v5e: more than 16.00 GiB"),
    ]
    assert '<td data-column="h100"><span class="fit">not checked on h100</span>' in text
    options = re.findall(r"<option>(.*?)</option>", text)
    assert options == ["failing first", "share of the budget", "share of v5e"]
    shares = [share.split() for share in re.findall(r'<article class="ok" data-share="(.*?)"', text)]
    assert shares == [["0.8333", "0.25"], ["0.8333", "Infinity"], ["0.8333", "-1.0"]]
    assert re.findall(r'<tr class="ok" data-share="(.*?)"', text) == [" ".join(each) for each in shares]


def test_where_nothing_was_measured_there_is_no_order():
    text = html_page.render(documents.document(documents.ended("t.py::t", [documents.outcome("scan")])))
    assert "<select" not in text
    assert '<select id="order">' in MIXED


def test_the_head_names_project_and_commit():
    found = documents.mixed()
    assert '<p class="project">nnx invariants</p>' in MIXED  # a report of an older version
    found["run"] = found["run"] | {"project": "<decoder>", "commit": "0123456789abcdef"}
    text = html_page.render(found)
    name = '&lt;decoder&gt; at <code title="0123456789abcdef">0123456789</code> · nnx invariants'
    assert f'<p class="project">{name}</p>' in text
    assert "<title>1 of 2 tests failed - &lt;decoder&gt; - nnx invariants</title>" in text
    found["run"]["commit"] = ""
    assert '<p class="project">&lt;decoder&gt; · nnx invariants</p>' in html_page.render(found)


def test_where_the_bytes_are_is_told_once():
    held, broken = documents.mixed()["nestings"][1:3]
    line = '<dt class="">line</dt><dd class="">model.py:7 (called from test_model.py:9)   3.0 MiB, 100 % of the temporaries'
    assert html_nesting.cause(held).count(line) == html_nesting.cause(broken).count(line) == 1
    broken["violations"][0]["details"] = broken["story"]
    assert html_nesting.cause(broken).count(line) == 1


def test_the_program_is_on_the_page():
    found = documents.ended("t.py::t", [documents.outcome("jit", "violated", program="prog.py")], end="failed")
    found["nestings"][0]["program_text"] = "print('<b>')\n"
    text = html_page.render(documents.document(found))
    assert "Program: prog.py" in text
    assert "print(&#x27;&lt;b&gt;&#x27;)" in text
    found["nestings"][0]["program_text"] = ""
    row = '<dt class="command">program</dt><dd class="command"><code>prog.py</code></dd>'
    assert row in html_page.render(documents.document(found))


def test_a_page_takes_in_what_it_has_room_for(monkeypatch):
    broken = [documents.outcome(name, "violated", program=f"{name}.py") for name in ("scan", "remat", "jit")]
    found = documents.ended("t.py::t", broken, end="failed")
    for nesting in found["nestings"]:
        nesting["program_text"] = f"# {nesting['nesting']}".ljust(100, "#")
    monkeypatch.setattr(html_page, "PROGRAMS", 250)
    text = html_page.render(documents.document(found))
    assert found["test"]["shown"] == "jit"
    assert re.findall(r"<pre[^>]*># (\w+)#", text) == ["jit", "scan", "jit"]  # that of the message is there twice
    assert '<dd class="command"><code>remat.py</code></dd>' in text


BADGES = {
    documents.BROKEN: {"failed": "✗ failed", "xfailed": "⊘ xfailed", "interrupted": "✗ failed"},
    documents.HELD: {"passed": "✓ passed", "failed": "! failed", "skipped": "✓ passed", "error": "! error"},
}


def test_the_badge_of_a_test():
    for outcomes, ends in BADGES.items():
        for end, said in ends.items():
            assert said in html_page.render(documents.document(documents.ended("t.py::t", outcomes, end=end))), end


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


def test_modes_have_lines_of_their_own():
    outcomes = [documents.outcome(name) for name in ("graph: jit", "tree: jit", "tree: scan")]
    text = html_page.render(documents.document(documents.ended("t.py::t", outcomes)))
    assert re.findall(r'class="mode">(\w+)<', text) == ["graph", "tree"]
    assert "modes: graph passed, tree passed" in text


def test_transforms_of_the_users_own_have_columns():
    found = documents.ended("t.py::t", [documents.outcome("jit"), documents.outcome("grad")])
    found["nestings"].append(found["nestings"][1] | {"nesting": "<own>", "layers": ["<own>[closure]"]})
    heads = re.findall(r'<th scope="col">(.*?)</th>', html_page.render(documents.document(found)))
    assert heads[:4] == ["test", "jit", "grad", "&lt;own&gt;"]


@pytest.mark.slow
@given(HOSTILE, HOSTILE, HOSTILE)
def test_no_text_becomes_a_part_of_the_page(name, words, file):
    def rendered(name, words, file):
        violation = Violation("memory", words, ((words, words),), words)
        outcomes = [
            documents.outcome("jit", "violated", violations=(violation,), notes=(words,), program=file),
            documents.outcome("scan", "failed", reason=words),
        ]
        found = documents.ended(f"{name}::{name}", outcomes, end="failed", notes=[plain(words)])
        found["nestings"][0]["program_text"] = plain(words)
        found["nestings"][1].update(nesting=plain(words), layers=[plain(words)], mode=plain(words))
        return html_page.render(documents.document(found))

    hostile, plainest = Parsed(rendered(name, words, file)), Parsed(rendered("n", "w", "f"))
    assert [(tag, *attrs) for tag, attrs in hostile.elements] == [(tag, *attrs) for tag, attrs in plainest.elements]
    # What the parser makes of text is what was written, line ends aside.
    shown = "".join(hostile.text)
    assert all(plain(each) in shown for each in (name, words, file))


def test_the_page_can_load_nothing():
    parsed = Parsed(MIXED)
    (policy,) = [
        attrs["content"] for _, attrs in parsed.elements if attrs.get("http-equiv") == "Content-Security-Policy"
    ]
    script = re.search(r"<script>(.*?)</script>", MIXED, re.DOTALL)[1]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert policy == (
        f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{digest}';"
        " base-uri 'none'; form-action 'none'"
    )
    assert not {"src", "srcset", "action", "poster", "data"} & {name for _, attrs in parsed.elements for name in attrs}
    assert not {name for _, attrs in parsed.elements for name in attrs if name.startswith("on")}
    assert not re.search(r"url\(|@import|@font-face|image-set", MIXED)
    assert re.findall(r"https?://\S+?(?=%22)", MIXED) == []  # that of the icon is quoted, the name of its kind of XML
    assert "//" not in MIXED.replace("http%3A//www.w3.org/2000/svg", "")


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
KINDS = tuple(html_nesting.SYMBOLS)
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
    assert len(set(html_nesting.SYMBOLS.values())) == len(KINDS) == 6
    style = html_page.read("html_page.css")
    assert all(f".cell.{kind} " in style for kind in KINDS)


@pytest.mark.parametrize(
    "peak, expected, budget, top",
    [(100, 50, 150, 150), (100, 300, 150, 300), (100, None, 10_000, 400), (100, None, None, 100), (0, None, 0, 1)],
)
def test_a_budget_far_away_does_not_squeeze_the_bars(peak, expected, budget, top):
    nesting = documents.ended("t.py::t", [documents.outcome("jit")])["nestings"][0]
    nesting.update(peak=peak, expected_peak=expected, budget=budget)
    assert html_nesting.full_width([nesting]) == top


def test_a_bar_shows_the_parts_of_the_peak():
    nesting = documents.ended("t.py::t", [documents.outcome("jit > scan", "violated")])["nestings"][0]
    drawn = html_nesting.bar(nesting, 10 * documents.MIB)
    assert re.findall(r'class="([\w-]+)" style="(?:width|left):([\d.]+)%"', drawn) == [
        ("resident", "20.00"),
        ("temporaries", "30.00"),
        ("constants", "0.00"),
        ("expected-mark", "30.00"),
        ("budget-mark", "40.00"),
    ]
    assert "5.0 MiB over 4.0 MiB" in drawn


@pytest.mark.slow
def test_a_thousand_nestings_are_a_page_of_a_few_megabytes():
    document = documents.many(1000)
    assert len(document["nestings"]) == 1000
    text = html_page.render(document)
    assert len(text.encode()) < 3_000_000


def test_the_page_says_what_was_not_run():
    stopped = documents.ended("t.py::t", documents.BROKEN, end="failed", not_run=12)
    text = html_page.render(
        documents.document(stopped, documents.ended("t.py::u", documents.BROKEN, end="failed", not_run=3))
    )
    assert "<li>14 nestings, 15 not run</li>" in text
    assert re.search(r"7 nestings: 1 failed, [^·]*, 12 not run ·", text)
    assert "not run" not in MIXED
