"""A wrapped object that is called where no body of a marked test runs: the message says where that was."""

import pytest

THREADS = {
    "thread": "import threading; t = threading.Thread(target=lambda: m(3)); t.start(); t.join()",
    "pool": "import concurrent.futures as c\n    with c.ThreadPoolExecutor(1) as p: p.submit(m, 3).result()",
    "to_thread": "import asyncio; asyncio.run(asyncio.to_thread(m, 3))",
    "swallowed": "import concurrent.futures as c\n    with c.ThreadPoolExecutor(1) as p: p.submit(m, 3).exception()",
}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("also_called", [True, False])
@pytest.mark.parametrize("way", THREADS)
def test_a_call_in_another_thread_is_told(run_inner, way, also_called):
    call = "m(3)" if also_called else "pass"
    test = "@marked(effort='quick')\ndef test_x(nnx_wrap):\n    m = nnx_wrap(Model())\n    {}\n    {}\n"
    result = run_inner(test.format(call, THREADS[way]))
    result.assert_outcomes(failed=1, warnings=None)
    result.stdout.fnmatch_lines(
        ["E * nnx_wrap(Model) was called in another thread than the body of its test: call it *"]
    )
    result.stdout.no_fnmatch_line("*mark the test*")


def test_a_thread_may_use_what_the_call_returned(run_inner):
    run_inner(
        "import concurrent.futures as c\n"
        "@marked(effort='quick')\n"
        "def test_x(nnx_wrap):\n"
        "    y = nnx_wrap(Model())(3)\n"
        "    with c.ThreadPoolExecutor(1) as p: assert p.submit(lambda: y).result() == 3\n"
    ).assert_outcomes(passed=1)


def test_a_coroutine_in_the_thread_of_the_body_is_no_misuse(run_inner):
    run_inner(
        "import asyncio\n"
        "@marked(effort='quick')\n"
        "def test_x(nnx_wrap):\n"
        "    async def go(): return nnx_wrap(Model())(3)\n"
        "    assert asyncio.run(go()) == 3\n"
    ).assert_outcomes(passed=1)


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


def test_a_fixture_that_wraps_and_does_not_call_is_fine(run_inner):
    run_inner(
        "import pytest\n"
        "@pytest.fixture\ndef made(nnx_wrap): return nnx_wrap(Model())\n"
        "@marked(effort='quick')\ndef test_x(made, nnx_wrap): made(3)\n"
    ).assert_outcomes(passed=1)


@pytest.mark.parametrize("subject", ["None", "3", "[Model()]", "''"])
def test_what_cannot_be_wrapped_is_told_at_the_line_of_the_test(run_inner, subject):
    result = run_inner(f"@marked(effort='quick')\ndef test_x(nnx_wrap): nnx_wrap({subject})\n")
    result.stdout.fnmatch_lines(["E * nnx_wrap got * which cannot be called: *"])
    result.stdout.no_fnmatch_line("*api.py*")
