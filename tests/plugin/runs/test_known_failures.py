"""Expected failures in whole runs: in markers and in a file, strict, and with warnings on what matches nothing; with workers of xdist in tests/system/processes/test_runs.py."""

import pytest

TITLES = "=+ nnx expected failures =+"
KNOWN = '["test_inner.py::test_x"]\nmemory = "jax#926"\n'
BREAKS = "@marked(max_examples=0)\ndef test_x(nnx_wrap): nnx_wrap(Model(memory=has('jit')))(1)\n"
HOLDS = "@marked(max_examples=0)\ndef test_holds(nnx_wrap): nnx_wrap(Model())(1)\n"


@pytest.fixture
def run_known(run_inner, pytester):
    """Run a suite with a file of expected failures; a run in this process would inherit that warnings are errors."""

    def run(known, source, *args, **more):
        (pytester.path / "known.toml").write_text(known)
        return run_inner(source, "--nnx-expected-failures=known.toml", "-Wdefault", *args, **more)

    return run


def test_a_marker_excuses_what_it_names_strictly_and_the_rest_still_fails(run_inner, pytester):
    source = """
@marked(max_examples=0, expected_failures={'memory': 'jax#926'})
def test_known(nnx_wrap): nnx_wrap(Model(memory=has('jit')))(1)
@marked(max_examples=0, expected_failures={'memory': 'jax#926', 'scan': 'sow'})
def test_strict(nnx_wrap): nnx_wrap(Model(memory=has('jit')))(1)
@marked(max_examples=0, expected_failures={'memory': 'jax#926'})
def test_rest(nnx_wrap): nnx_wrap(Model(memory=has('jit'), tracers=has('vmap')))(1)
"""
    result = run_inner(source, "-v", "--junitxml=out.xml")
    result.assert_outcomes(passed=1, failed=2)
    known = r"test_inner.py::test_known  40 nestings: 24 passed, 16 expected to fail; worst peak .*"
    result.stdout.re_match_lines([known, r"    expected to fail: 'memory' \(jax#926\): 16 nestings"])
    xml = (pytester.path / "out.xml").read_text()
    assert '<property name="nnx_expected" value="16"' in xml
    assert "'memory' (jax#926): 16 nestings" in xml
    out = "take the entry out of the marker at test_inner.py:7"
    assert f"nnx expected failure 'scan' (sow) did not happen: 4 nestings passed, {out}" in result.outlines
    result.stdout.fnmatch_lines(["E *nesting     vmap", "E *tried *: 1 failed, 5 passed, 1 expected to fail; *"])
    summary = ["FAILED *::test_strict - Failed: nnx expected*", "FAILED *::test_rest - nnx tracers: tracers is broken"]
    result.stdout.fnmatch_lines(summary)
    assert "Traceback" not in result.stdout.str()


def test_the_body_goes_on_after_an_excused_call_that_has_an_output(run_inner):
    source = """
MODEL = Model(tracers=has("vmap"))
@marked(max_examples=0, expected_failures={"memory": "jax#926"})
@pytest.mark.parametrize("further", [Model(donation=has("jit", "scan")), Model()])
def test_goes_on(nnx_wrap, further):
    assert nnx_wrap(Model(memory=has("jit")))(3) == nnx_wrap(further)(3) == 3
@marked(max_examples=0, expected_failures={"tracers": "flax#4520"})
def test_ends(nnx_wrap):
    nnx_wrap(MODEL)(3)
    assert "vmap" not in str(MODEL.calls[-1]).split(" > ")
@marked(max_examples=0, expected_failures={"scan": "why"})
def test_of_a_nesting(nnx_wrap):
    nnx_wrap(Model())(3)
    assert "scan" not in RUNS[-1]
@marked(max_examples=0, expected_failures={"tracers": "why"})
def test_of_an_invariant(nnx_wrap):
    nnx_wrap(Model())(3)
    assert "scan" not in RUNS[-1]
"""
    result = run_inner(source)
    result.assert_outcomes(failed=2, passed=3)
    result.stdout.fnmatch_lines(["E *nnx invariant broken: donation*", "E *nesting     jit > scan *"])
    result.stdout.fnmatch_lines(
        ["FAILED *::test_goes_on[[]further0]*", "FAILED *::test_of_an_invariant - AssertionError: *"]
    )


def test_entries_of_class_function_and_file_add_up(run_known):
    source = """
@marked(max_examples=0, expected_failures={"memory": "class", "scan": "class"})
class TestX:
    @marked(expected_failures={"memory": "function"})
    def test_x(self, nnx_wrap, request):
        from pytest_nnxcheck.plugin.marker import SETTINGS
        entries = request.node.stash[SETTINGS].expected_failures
        assert {e.key: (e.reason, e.origin) for e in entries} == {
            "memory": ("function", "the marker at test_inner.py:7"),
            "scan": ("class", "the marker at test_inner.py:5"),
            "vmap": ("file", "known.toml, table 'test_inner.py::*'"),
        }
        nnx_wrap(Model(memory=has("jit"), failed=lambda n: {"vmap", "scan"} & {layer.transform for layer in n.layers}))(1)
"""
    known = '["test_inner.py::*"]\nmemory = "file"\nvmap = "file"\n["test_inner.py::TestX::test_x"]\nvmap = "later"\n'
    result = run_known(known, source)
    result.assert_outcomes(passed=1, warnings=2)
    result.stdout.fnmatch_lines(
        [
            "*ExpectedFailuresWarning: expected failure 'memory' (file) of table 'test_inner.py::[*]' matches no nesting that ran",
            "*ExpectedFailuresWarning: expected failure 'vmap' (later) of table * matches no nesting that ran",
        ]
    )


def test_a_known_failure_in_a_file(run_known):
    known = KNOWN + '["test_inner.py::test_holds"]\nmemory = "jax#926"\n'
    result = run_known(known, BREAKS + BREAKS.replace("test_x", "test_y") + HOLDS)
    result.assert_outcomes(passed=1, failed=2)
    result.stdout.fnmatch_lines(["test_inner.py::test_x  40 nestings: 24 passed, 16 expected to fail; *"])
    result.stdout.fnmatch_lines(["FAILED test_inner.py::test_y - nnx memory: memory is broken"])
    result.stdout.fnmatch_lines(["nnx * did not happen: * out of known.toml, table 'test_inner.py::test_holds'"])


GONE = (
    KNOWN
    + '\n["test_inner.py::test_gone"]\nmemory = "jax#926"\n["test_inner.py::test_[x]"]\n"jit > jit > jit > jit > jit" = "deep"\n'
)
TABLE = "table 'test_inner.py::test_gone' of expected failures matches no test marked nnx_invariants"
ENTRY = "expected failure 'jit > jit > jit > jit > jit' (deep) of table 'test_inner.py::test_[[]x[]]' matches no nesting that ran"


def test_what_matches_nothing_is_a_warning_at_its_line(run_known):
    result = run_known(GONE, BREAKS)
    result.assert_outcomes(passed=1, warnings=2)
    assert result.ret == 0
    warning = "  */known.toml:%s: ExpectedFailuresWarning: %s"
    result.stdout.fnmatch_lines(["known.toml:4", warning % (4, TABLE), "known.toml:6", warning % (6, ENTRY)])
    run_known(GONE, BREAKS, "-Wignore::pytest_nnxcheck.ExpectedFailuresWarning").assert_outcomes(passed=1, warnings=0)


@pytest.mark.parametrize("how", ["-Werror", "-Werror::pytest_nnxcheck.ExpectedFailuresWarning"])
def test_where_warnings_are_errors_the_run_fails(run_known, how):
    result = run_known(GONE, BREAKS, how)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.re_match_lines([TITLES])
    result.stdout.fnmatch_lines([f"ERROR known.toml:4: {TABLE}", f"ERROR known.toml:6: {ENTRY}"])
    assert "Traceback" not in result.stdout.str() + result.stderr.str()
    assert "INTERNALERROR" not in result.stdout.str()


SEVERAL = '["test_inner.py::*"]\nmemory = "a"\n"jit > jit > jit > jit > jit" = "b"\n["nowhere/*::test_*"]\nmemory = "x"\n["gone.py::test_x"]\nscan = "x"\n'
BOTH = BREAKS + BREAKS.replace("test_x", "test_y")


@pytest.mark.parametrize(
    "args, warned",
    [
        ((), ["4 deep", "'b'", "gone"]),
        (("test_inner.py::test_x",), ["gone"]),
        (("--nnx-nesting=jit",), ["4 deep", "gone"]),
        (("-x", "--nnx-memory-budget=1x"), ["4 deep", "'b'", "gone"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_only_what_the_selection_could_have_matched_is_warned_of(run_known, args, warned):
    result = run_known(SEVERAL, BOTH, *args)
    texts = {"4 deep": "'nowhere/*::test_*'", "'b'": "'jit > jit > jit > jit > jit' (b)", "gone": "'gone.py::test_x'"}
    lines = [line for line in result.outlines if "ExpectedFailuresWarning: " in line]
    assert [any(texts[name] in line for line in lines) for name in texts] == [name in warned for name in texts]
    assert len(lines) == len(warned)


def test_nothing_is_warned_of_where_the_collection_broke(run_known, pytester):
    pytester.makepyfile(test_broken="import no_such_module\n")
    result = run_known(SEVERAL, BOTH, "--continue-on-collection-errors")
    assert "ExpectedFailuresWarning" not in result.stdout.str()


@pytest.mark.parametrize("mark", ["", "@pytest.mark.skip\n"])
def test_a_test_that_failed_or_was_skipped_says_nothing_of_its_entries(run_known, mark):
    source = mark + BREAKS.replace("memory=has('jit')", "tracers=has('jit')")
    told = run_known(f'{KNOWN}"jit > jit > jit > jit > jit" = "x"\n', source).stdout.str()
    assert "ExpectedFailuresWarning" not in told


# --- the file: what cannot be read, and which tests a table is for

BAD_FILES = {
    '["a"]\nmemry = "x"\n': "known.toml, table 'a': expected failure 'memry' names no known invariant or nesting: unknown word 'memry', did you mean 'memory'[?]",
    '["a"]\nmemory = 3\n': "known.toml, table 'a': expected failure 'memory' has the reason 3, not a text: write why it fails *",
    '["a"]\nmemory = []\n': "known.toml, table 'a': expected failure 'memory' has the reason [[]], not a text: write why it fails *",
    '["a"]\nmemory = " "\n': "known.toml, table 'a': expected failure 'memory' has the reason ' ', write why it fails",
    'memory = "x"\n': "known.toml: 'memory' is outside of a table: write the test above it, as [[]\"tests/test_model.py::test_block\"]*",
    '[tests.model]\nmemory = "x"\n': "known.toml: table 'tests' holds tables: put the node id in quotes, as a whole*",
    '["a"]\nmemory = "x\n': "known.toml is no TOML file: *line 2*",
    '["a"]\n["a"]\n': "known.toml is no TOML file: *line 2*",
}  # fmt: skip


@pytest.mark.parametrize("text, message", BAD_FILES.items())
def test_a_file_that_cannot_be_read_stops_the_run_and_says_what_to_write(run_known, text, message):
    result = run_known(text, "raise SystemExit('collected')\n")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"ERROR: option --nnx-expected-failures: {message}"])


NAMED = """
@marked(max_examples=0, transforms="jit")
@pytest.mark.parametrize("name", ["1-2", "1-3"])
def test_a(nnx_wrap, name): nnx_wrap(Model(memory=has("jit")))(1)

class TestX:
    @marked(max_examples=0, transforms="jit")
    def test_a(self, nnx_wrap): nnx_wrap(Model(memory=has("jit")))(1)

@marked(max_examples=0, transforms="jit")
def test_ab(nnx_wrap): nnx_wrap(Model(memory=has("jit")))(1)
"""
TEST_A = {"test_a[1-2]", "test_a[1-3]"}


@pytest.mark.parametrize(
    "pattern, excused",
    [
        ("test_inner.py::test_a", TEST_A),
        ("test_inner.py::test_a[1-2]", {"test_a[1-2]"}),
        ("test_inner.py::Test*", {"TestX::test_a"}),
        ("test_i?ner.py::*", TEST_A | {"TestX::test_a", "test_ab"}),
        ("*::test_a", {"TestX::test_a"}),
        ("x/test_inner.py::test_a", set()),
    ],
)
def test_the_tests_that_a_table_is_for(run_known, pattern, excused):
    result = run_known(f'["{pattern}"]\nmemory = "jax#926"\n', NAMED, "-rA")
    assert {line.partition("::")[2] for line in result.outlines if line.startswith("PASSED ")} == excused
    result.assert_outcomes(passed=len(excused), failed=4 - len(excused), warnings=not excused)


@pytest.mark.parametrize(
    "pattern, paths, warned",
    [
        ("a/test_t.py::test_x", ["a/test_t.py"], True),
        ("a/test_t.py::test_x", ["a"], True),
        ("a/test_t.py::test_x", ["."], True),
        ("a/test_t.py::test_x", ["b", "a/test_u.py"], False),
        ("a/no.py::test_x", ["b"], True),
        ("a/*.py::test_x", ["a"], True),
        ("a/*.py::test_x", ["a/test_t.py", "b"], False),
        ("*::test_x", ["a", "b"], False),
        ("*::test_x", ["."], True),
    ],
)
def test_a_table_is_warned_of_where_the_run_looked_at_all_that_it_may_be_for(
    run_known, pytester, pattern, paths, warned
):
    for name in ("a/test_t.py", "a/test_u.py", "b/test_v.py"):
        (pytester.path / name).parent.mkdir(exist_ok=True)
        (pytester.path / name).write_text(f"def test_{name[7]}(): pass\n")
    result = run_known(f'["{pattern}"]\nmemory = "x"\n', "", "--rootdir=.", *paths)
    assert ("ExpectedFailuresWarning: table" in result.stdout.str()) == warned


def test_a_warning_names_the_line_of_its_table_and_not_that_of_a_similar_name(run_known):
    """The name of one is part of another's that is above it."""
    names = ['"t.py::test_block_cache"', ' "t.py::test_block" ', '"t.py::test_x[#1]"', "model"]
    known = "# known\n" + "".join(f'[{name}]  # slow\nmemory = "x"\n\n' for name in names)
    result = run_known(known, HOLDS)
    lines = [line for line in result.outlines if "ExpectedFailuresWarning: table" in line]
    told = {line.partition("known.toml:")[2].partition(":")[0]: line.split("'")[1] for line in lines}
    assert told == {"2": "t.py::test_block_cache", "5": "t.py::test_block", "8": "t.py::test_x[#1]", "11": "model"}
