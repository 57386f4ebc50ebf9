"""A wrapped object that is called where no body of a marked test runs: the message says where that was."""

import pytest

THREADS = {
    "thread": "import threading; t = threading.Thread(target=lambda: m(3)); t.start(); t.join()",
    "pool": "import concurrent.futures as c\n    with c.ThreadPoolExecutor(1) as p: p.submit(m, 3).result()",
    "to_thread": "import asyncio; asyncio.run(asyncio.to_thread(m, 3))",
    "swallowed": "import concurrent.futures as c\n    with c.ThreadPoolExecutor(1) as p: p.submit(m, 3).exception()",
}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("call", ["m(3)", "pass"])
def test_a_call_in_another_thread_is_told(run_inner, call):
    tests = (
        f"@marked(effort='quick')\ndef test_{name}(nnx_wrap):\n    m = nnx_wrap(Model())\n    {call}\n    {way}\n"
        for name, way in THREADS.items()
    )
    result = run_inner("".join(tests))
    result.assert_outcomes(failed=len(THREADS), warnings=None)
    words = "nnx_wrap(Model) was called in another thread than the body of its test: call it "
    told = [line for line in result.outlines if line.startswith("E ") and words in line]
    assert len(told) == len(THREADS)
    result.stdout.no_fnmatch_line("*mark the test*")


def test_a_call_in_the_thread_of_the_body_is_fine(run_inner):
    run_inner("""
import asyncio
import concurrent.futures as c
@marked(effort='quick')
def test_output(nnx_wrap):
    y = nnx_wrap(Model())(3)
    with c.ThreadPoolExecutor(1) as p: assert p.submit(lambda: y).result() == 3
@marked(effort='quick')
def test_coroutine(nnx_wrap):
    async def go(): return nnx_wrap(Model())(3)
    assert asyncio.run(go()) == 3
@pytest.fixture
def made(nnx_wrap): return nnx_wrap(Model())
@marked(effort='quick')
def test_fixture(made): made(3)
""").assert_outcomes(passed=3)


FIXTURES = {
    "fixture": ("return m(3)", "in a fixture or a setup method, which runs once"),
    "module's": ("return m(3)", "in a fixture or a setup method, which runs once"),
    "teardown": ("yield m; m(3)", "after the body of its test had ended"),
}


@pytest.mark.parametrize("way", FIXTURES)
def test_a_call_in_a_fixture_is_told(run_inner, way):
    body, words = FIXTURES[way]
    scope = "module" if way == "module's" else "function"
    result = run_inner(
        "import pytest\n"
        f"@pytest.fixture(scope='{scope}')\n"
        f"def made(nnx_wrap):\n    m = nnx_wrap(Model()); {body}\n"
        "@marked(effort='quick')\n"
        "def test_x(nnx_wrap, made):\n    nnx_wrap(Model())(3)\n"
    )
    result.assert_outcomes(passed=int(way == "teardown"), errors=1)
    result.stdout.fnmatch_lines([f"E * nnx_wrap(Model) was called {words}*"])
