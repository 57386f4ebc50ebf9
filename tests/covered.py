"""Record which lines of the package each test runs, also in the processes that it starts: a plugin of pytest, and what their `sitecustomize` imports.

PYTEST_DONT_REWRITE: a process has imported this before its pytest asks for it.
"""

import atexit
import inspect
import json
import os
import sys
import time
from collections import defaultdict
from pathlib import Path

FOLDER, TEST = "NNXCHECK_COVERED", "NNXCHECK_COVERED_TEST"
"""Variables of the environment: the folder to write to, and the test that started this process."""
PACKAGE = f"{os.sep}pytest_nnxcheck{os.sep}"
EVENTS = sys.monitoring.events
TOOL = sys.monitoring.COVERAGE_ID
LINES = defaultdict(lambda: defaultdict(set))
SECONDS = {}
CODES = set()


def started(code, _offset):
    is_function = code.co_flags & inspect.CO_OPTIMIZED  # what an import runs, modules and classes, belongs to no test
    if is_function and PACKAGE in code.co_filename and code not in CODES:
        CODES.add(code)
        sys.monitoring.set_local_events(TOOL, code, EVENTS.LINE)
    return sys.monitoring.DISABLE


def line(code, number):
    LINES[os.environ.get(TEST, "")][code.co_filename.rpartition(PACKAGE)[2]].add(number)
    return sys.monitoring.DISABLE


def write():
    found = {test: {file: sorted(numbers) for file, numbers in files.items()} for test, files in LINES.items()}
    target = Path(os.environ[FOLDER]) / f"{os.getpid()}-{time.time_ns()}.json"
    target.write_text(json.dumps({"lines": found, "seconds": SECONDS}))


if FOLDER in os.environ and sys.monitoring.get_tool(TOOL) is None:
    sys.monitoring.use_tool_id(TOOL, "covered")
    sys.monitoring.register_callback(TOOL, EVENTS.PY_START, started)
    sys.monitoring.register_callback(TOOL, EVENTS.LINE, line)
    sys.monitoring.set_events(TOOL, EVENTS.PY_START)
    atexit.register(write)


def pytest_runtest_logstart(nodeid):
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return  # the controller hears of the same tests, and runs none
    os.environ[TEST] = nodeid
    SECONDS[nodeid] = time.perf_counter()
    for code in CODES:  # each line counts once a test, and costs nothing after that
        sys.monitoring.set_local_events(TOOL, code, EVENTS.NO_EVENTS)
        sys.monitoring.set_local_events(TOOL, code, EVENTS.LINE)


def pytest_runtest_logfinish(nodeid):
    if os.environ.pop(TEST, None):
        SECONDS[nodeid] = time.perf_counter() - SECONDS[nodeid]
