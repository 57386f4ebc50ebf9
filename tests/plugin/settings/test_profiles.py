"""Profiles: named sets of settings in the file that pytest reads, which of them wins, and what is said of a bad one."""

import pytest

TOML = """
[tool.pytest.ini_options]
nnx_effort = "quick"
nnx_max_depth = 2
nnx_memory_tolerance = "1%"

[tool.pytest-nnxcheck.profiles.nightly]
effort = "thorough"
max_depth = 4
transforms = ["jit", "scan"]
all = true
report = ["a.md", "b.json"]
memory_tolerance = "2%"

[tool.pytest-nnxcheck.profiles.ci]
memory_budget = 1024
report = "one report.md"
"""
INI = """
[pytest]
nnx_max_depth = 2
[pytest-nnxcheck.profiles.nightly]
effort = thorough
max_depth = 4
transforms = jit scan
report = a.md "b c.json"
"""


def test_a_profile_wins_over_the_ini_file_and_an_option_over_both(read):
    found = read("--nnx-profile=nightly", "--nnx-max-depth=5", pyproject=TOML).of_a_check
    assert found == {"effort": "thorough", "max_examples": found["max_examples"], "sweep": "pairs", "max_depth": "5", "transforms": "jit,scan", "all": "on"}  # fmt: skip
    assert read("--nnx-profile=nightly", "--nnx-effort=quick").of_a_check["sweep"] == "short"
    assert read().of_a_check["max_depth"] == "2"


def test_a_profile_gives_the_options_of_a_run_too(read, pytester):
    nightly, ci = read("--nnx-profile=nightly", pyproject=TOML), read("--nnx-profile=ci")
    assert nightly.of_a_run == {"report": "a.md,b.json", "memory_tolerance": "1/50", "profile": "nightly"}
    assert ci.of_a_run["report"] == "one report.md"
    assert ci.source("report") == ("profile ci (pyproject.toml:17)", pytester.path)
    assert ci.of_a_check["memory_budget"] == "1KiB"


def test_the_ini_file_may_name_the_profile_and_have_it(read, pytester):
    (pytester.path / "pytest.ini").write_text(INI.replace("[pytest]", "[pytest]\nnnx_profile = nightly"))
    assert read().of_a_check["transforms"] == "jit,scan"
    assert read().of_a_run["report"] == "a.md,b c.json"
    assert read("-o", "nnx_profile=").of_a_check == {"max_depth": "2"}


def test_the_tables_of_pyproject_count_beside_a_pytest_ini(read, pytester):
    (pytester.path / "pytest.ini").write_text("[pytest]\nnnx_max_depth = 3\n")
    assert read("--nnx-profile=ci", pyproject=TOML).of_a_check == {"max_depth": "3", "memory_budget": "1KiB"}


def test_the_marker_of_a_test_wins_over_a_profile(run_inner, pytester):
    pytester.makepyprojecttoml(TOML)
    source = """
@marked(transforms="jit", styles="argument", sweep="singles", max_examples=0)
def test_x(nnx_wrap):
    assert nnx_wrap(Model())(1) == 1
    assert {*RUNS} <= {"un-nested", "jit"}

@marked
def test_y(nnx_wrap):
    nnx_wrap(Model())(1)
    assert not RUNS or "vmap" not in str(RUNS)
"""
    run_inner(source, "--nnx-profile=nightly").assert_outcomes(passed=2)


def test_a_replay_repeats_the_profile_that_was_typed(read):
    typed = read("--nnx-profile=ci", "--nnx-memory-budget=2x", pyproject=TOML)
    assert typed.replayed == "--nnx-profile ci --nnx-memory-budget 2x"


BAD = [
    ("nightli", "", r"option --nnx-profile: unknown profile 'nightli', did you mean 'nightly'\? \(pyproject.toml\)"),
    ("x", "efort = 'quick'", r"option --nnx-profile: profile x \(pyproject.toml:20\): unknown setting 'efort', did you mean 'effort'\?"),
    ("x", "effort = 'quik'", r"profile x \(pyproject.toml:20\): unknown effort 'quik', did you mean 'quick'\?"),
    ("x", "max_depth = 0", r"profile x \(pyproject.toml:20\): max_depth=0 is not a whole number of at least 1"),
    ("x", "nesting = 'jit'", r"option --nnx-profile: profile x \(pyproject.toml:20\): nesting='jit' is for the command line, --nnx-nesting"),
    ("x", "no_cache = true", r"option --nnx-profile: profile x \(pyproject.toml:20\): no_cache=True is for the command line, --nnx-no-cache"),
    ("x", "profile = 'ci'", r"option --nnx-profile: profile x \(pyproject.toml:20\): profile='ci' is for the command line or the ini file, --nnx-profile"),
    ("x", "target = 'v9'", r"profile x \(pyproject.toml:20\): .*'v9'"),
]  # fmt: skip


@pytest.mark.parametrize("name, line, message", BAD, ids=[line or name for name, line, _ in BAD])
def test_a_bad_profile_stops_the_run_and_names_the_line(read, name, line, message):
    text = f"{TOML}\n[tool.pytest-nnxcheck.profiles.x]\n{line}\n"
    with pytest.raises(pytest.UsageError, match=f"^{message}") as refused:
        read(f"--nnx-profile={name}", pyproject=text).configure()
    assert "\n" not in str(refused.value)


def test_no_profiles_at_all_and_a_profile_that_is_no_table(read):
    for text, message in (
        ("", r"there is no profile 'ci': write a table \[tool.pytest-nnxcheck.profiles.ci\] in pyproject.toml"),
        ("[tool.pytest-nnxcheck.profiles]\nci = 3", "pyproject.toml: profile ci is no table"),
    ):
        with pytest.raises(pytest.UsageError, match=f"option --nnx-profile: {message}"):
            read("--nnx-profile=ci", pyproject=text).configure()
