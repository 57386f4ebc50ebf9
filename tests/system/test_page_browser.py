"""The page in headless Chromium: clicked, measured on a wide and a narrow screen, in both schemes, with and without scripts.

Skipped where there is no Chromium or no selenium; with NNXCHECK_BROWSER=required that is a failure.
"""

import contextlib
import os
import shutil
from pathlib import Path

import documents
import pytest

from pytest_nnxcheck.reporting import html_page

FLAGS = """
    --headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking
    --disable-component-update --disable-sync
""".split()
SCREENS = [(1280, "light"), (1280, "dark"), (390, "light"), (390, "dark")]
PAPERS = {"light": "rgb(245, 246, 248)", "dark": "rgb(14, 18, 23)"}
LONG = "x" * 300
OVERFLOW = """
    const width = document.documentElement.clientWidth;
    return [document.documentElement.scrollWidth - width, document.body.scrollWidth - width];
"""
TARGETS = "return [...document.querySelectorAll('a.cell')].map(e => e.getBoundingClientRect()).map(r => Math.min(r.width, r.height))"


CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def missing() -> str:
    if not CHROMIUM or not shutil.which("chromedriver"):
        return "needs chromium and chromedriver: apt-get install chromium chromium-driver"
    try:
        import selenium  # noqa: F401
    except ImportError:
        return "needs selenium: pip install selenium"
    return ""


@contextlib.contextmanager
def browser(profile: Path, *, scripts: bool):
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in [*FLAGS, f"--user-data-dir={profile}"]:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    if not scripts:
        options.add_experimental_option("prefs", {"profile.managed_default_content_settings.javascript": 2})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))
    try:
        yield driver
    finally:
        driver.quit()


@contextlib.contextmanager
def started(tmp_path_factory, *, scripts: bool):
    if reason := missing():
        if os.environ.get("NNXCHECK_BROWSER") == "required":
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason)
    with browser(tmp_path_factory.mktemp("profile"), scripts=scripts) as driver:
        yield driver


@pytest.fixture(scope="module", params=[True, False], ids=["scripts", "no_scripts"])
def either(request, tmp_path_factory):
    """A browser that runs the scripts of a page, and one that does not."""
    with started(tmp_path_factory, scripts=request.param) as driver:
        yield driver


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    with started(tmp_path_factory, scripts=True) as driver:
        yield driver


def show(driver, path: Path, document, width=1280, scheme="light"):
    path.write_text(html_page.render(document), encoding="utf-8")
    screen = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
    media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    driver.get(path.as_uri())


def find(driver, selector):
    return driver.find_element("css selector", selector)


@pytest.mark.parametrize("width", [1280, 390])
def test_a_click_on_a_failing_cell_shows_its_cause_and_program(either, tmp_path, width):
    from selenium.webdriver.common.keys import Keys

    document = documents.mixed(program="program.py", program_text="print('the program')")
    show(either, tmp_path / "report with spaces.html", document, width)
    find(either, "a.cell.violated").click()
    cause = find(either, "#t1")
    for said in ("peak 5.0 MiB is over the budget of 4.0 MiB", "Program: program.py", "--nnx-nesting 'jit > scan'"):
        assert said in cause.text
    inside = cause.rect["y"] - either.execute_cdp_cmd("Page.getLayoutMetrics", {})["cssVisualViewport"]["pageY"]
    assert 0 <= inside < 900
    again = find(either, "#t1n3")
    assert not again.is_displayed()
    find(either, "#t1 .nestings > summary").click()
    find(either, "#t1 .nesting.violated > summary").click()
    assert "print('the program')" in again.text
    assert not find(either, "#t2n2").is_displayed()
    find(either, "a.cell.failed").send_keys(Keys.ENTER)  # by keyboard as well
    assert "TypeError: no batch" in find(either, "#t1n4").text


def test_the_filters_leave_what_failed(either, tmp_path):
    show(either, tmp_path / "report.html", documents.mixed())
    assert find(either, "article.ok").is_displayed()
    find(either, "#only-failing").click()
    assert not find(either, "article.ok").is_displayed()
    assert not find(either, "tr.ok").is_displayed()
    assert find(either, "article.bad").is_displayed()
    find(either, "#hide-held").click()
    assert not find(either, "tr.bad a.cell.held").is_displayed()
    assert find(either, "tr.bad a.cell.violated").is_displayed()


def test_a_test_that_passes_opens_from_its_square(either, tmp_path):
    show(either, tmp_path / "report.html", documents.mixed())
    assert find(either, "article.ok h3").is_displayed()
    assert not find(either, "#t2").is_displayed()
    find(either, ".further > summary").click()
    find(either, 'a.cell[href="#t2n2"]').click()
    assert find(either, "#t2n2").is_displayed()


def test_commands_and_programs_can_be_copied(driver, tmp_path):
    document = documents.mixed(program="program.py", program_text="print('the program')")
    show(driver, tmp_path / "report.html", document)
    driver.execute_script("document.addEventListener('copy', () => window.copied = document.activeElement.value)")
    for secure in (True, False):
        if not secure:
            driver.execute_script("navigator.clipboard.writeText = () => Promise.reject()")
        else:
            driver.execute_script("navigator.clipboard.writeText = async text => window.copied = text")
        for selector, text in [(".command", document.nestings[2].replay), (".program", "print('the program')")]:
            button = find(driver, f"#t1 .failure {selector} .copy")
            button.click()
            assert driver.execute_async_script("setTimeout(() => arguments[0](window.copied), 50)") == text
            assert button.text == "Copied"
    assert find(driver, "#t1 .program").get_attribute("open") is None


def test_the_tests_are_sorted_by_their_share_of_a_bound(driver, tmp_path):
    ends = [documents.ended(f"t.py::t{n}", [documents.outcome("jit", peak=n * 100, budget=1000)]) for n in (5, 7, 6)]
    ends += [
        documents.ended("t.py::t9", [documents.outcome("scan")]),
        documents.ended("t.py::t8", documents.BROKEN, end="failed"),
    ]
    show(driver, tmp_path / "report.html", documents.document(*ends))

    def names(within):
        found = driver.find_elements("css selector", f"{within} .test-name")
        return [name.get_attribute("textContent") for name in found]

    assert names("article") == ["t8", "t5", "t6", "t7", "t9"]
    find(driver, "#order option:nth-child(2)").click()
    assert names("article") == ["t8", "t7", "t6", "t5", "t9"]  # five of four megabytes come first
    assert names(".further tr") == ["t7", "t6", "t5", "t9"]
    find(driver, "#order option").click()
    assert names("article") == ["t8", "t5", "t6", "t7", "t9"]


def test_without_scripts_there_is_no_button(tmp_path_factory, tmp_path):
    with started(tmp_path_factory, scripts=False) as driver:
        show(driver, tmp_path / "report.html", documents.mixed())
        assert driver.find_elements("css selector", "button") == []
        assert not find(driver, "#order").is_displayed()


@pytest.mark.parametrize("width, scheme", SCREENS)
def test_the_page_fits_the_screen(driver, tmp_path, width, scheme):
    broken = documents.outcome("jit > scan", "violated", reason=LONG, notes=(LONG,), program=LONG)
    hostile = documents.ended(f"tests/{LONG}.py::test_{LONG}[<b>&]", [broken], end="failed", notes=[LONG], message=LONG)
    documents_of = documents.document(hostile, *(documents.ended(f"t.py::t{n}", documents.BROKEN) for n in range(3)))
    show(driver, tmp_path / "report.html", documents_of, width, scheme)
    assert driver.execute_script("return getComputedStyle(document.body).backgroundColor") == PAPERS[scheme]
    assert max(driver.execute_script(OVERFLOW)) <= 0
    for cell in driver.find_elements("css selector", "tr.bad a.cell"):
        cell.click()
    assert max(driver.execute_script(OVERFLOW)) <= 0
    assert min(driver.execute_script(TARGETS)) >= (24 if width < 500 else 22)


def test_nothing_is_loaded_and_nothing_is_refused(driver, tmp_path):
    driver.get("about:blank")
    driver.get_log("performance")
    driver.get_log("browser")
    show(driver, tmp_path / "report.html", documents.mixed())
    find(driver, "a.cell.violated").click()
    requests = [
        entry["message"] for entry in driver.get_log("performance") if "Network.requestWillBeSent" in entry["message"]
    ]
    assert [request for request in requests if '"url":"file://' not in request and '"url":"data:' not in request] == []
    assert len(requests) >= 1
    assert driver.get_log("browser") == []  # where a policy refuses something, this says so


def test_a_thousand_nestings_open_at_once(driver, tmp_path):
    show(driver, tmp_path / "report.html", documents.many(1000))
    assert len(driver.find_elements("css selector", "a.cell")) == 1000
    taken = driver.execute_script("return performance.getEntriesByType('navigation')[0].loadEventEnd")
    assert 0 < taken < 5000  # 0.4 s on two cores; the bound is for a machine that does much else
