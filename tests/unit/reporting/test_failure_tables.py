"""The file of expected failures: what is said of one that cannot be read, and which tests a table is for."""

from fnmatch import fnmatchcase

import pytest

from pytest_nnxcheck.core.errors import SettingError
from pytest_nnxcheck.core.expected_failures import ExpectedFailure
from pytest_nnxcheck.plugin.known_failures import Table, covers, read
from pytest_nnxcheck.plugin.selection import Selection

BAD_FILES = {
    '["a"]\nmemry = "x"\n': "known.toml, table 'a': expected failure 'memry' names no known invariant or nesting: unknown word 'memry', did you mean 'memory'?",
    '["a"]\nmemory = 3\n': "known.toml, table 'a': expected failure 'memory' has the reason 3, write why it fails",
    'memory = "x"\n': "known.toml: 'memory' is outside of a table, write the test above it, as [\"tests/test_model.py::test_block\"]",
    '[tests.model]\nmemory = "x"\n': "known.toml: table 'tests' holds tables, put the node id in quotes, as a whole",
    '["a"]\nmemory = "x\n': "known.toml is no TOML file: *line 2*",
    '["a"]\n["a"]\n': "known.toml is no TOML file: *line 2*",
}


@pytest.mark.parametrize("text, message", BAD_FILES.items())
def test_a_file_that_cannot_be_read_says_why(tmp_path, text, message):
    (tmp_path / "known.toml").write_text(text)
    with pytest.raises(SettingError) as caught:
        read(tmp_path / "known.toml", "known.toml")
    assert fnmatchcase(str(caught.value), message if "*" in message else message.replace("[", "[[]"))


def test_a_file_that_is_no_text(tmp_path):
    (tmp_path / "bad.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(SettingError, match=r"^bad.toml is no TOML file: 'utf-8' codec"):
        read(tmp_path / "bad.toml", "bad.toml")
    with pytest.raises(SettingError, match=r"^here: cannot read|^cannot read here"):
        read(tmp_path, "here")


@pytest.mark.parametrize(
    "pattern, matched, not_matched",
    [
        ("t.py::test_a", ["t.py::test_a", "t.py::test_a[1-2]"], ["t.py::test_ab", "x/t.py::test_a", "t.py::test_b"]),
        ("t.py::test_a[1-2]", ["t.py::test_a[1-2]"], ["t.py::test_a", "t.py::test_a[1-3]"]),
        ("t.py::Test*", ["t.py::TestX::test_a", "t.py::TestY"], ["t.py::test_a"]),
        ("*/t_?.py::*", ["tests/t_a.py::test_x"], ["t_a.py::test_x", "tests/t_ab.py::test_x"]),
    ],
)
def test_what_a_table_is_for(pattern, matched, not_matched):
    table = Table(pattern, (ExpectedFailure("memory", "x"),))
    assert all(map(table.matches, matched))
    assert not any(map(table.matches, not_matched))


@pytest.mark.parametrize(
    "pattern, paths, covered",
    [
        ("a/t.py::test_x", ["a/t.py"], True),
        ("a/t.py::test_x", ["a"], True),
        ("a/t.py::test_x", [""], True),
        ("a/t.py::test_x", ["b", "a/u.py"], False),
        ("a/no.py::test_x", ["b"], True),
        ("a/*.py::test_x", ["a"], True),
        ("a/*.py::test_x", ["a/t.py", "b"], False),
        ("*::test_x", ["a", "b"], False),
        ("*::test_x", [""], True),
    ],
)
def test_what_a_selection_covers(tmp_path, pattern, paths, covered):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "t.py").touch()
    selection = Selection(tmp_path, tuple(tmp_path / path for path in paths))
    assert covers(selection, Table(pattern, ())) == covered
    assert covers(Selection(tmp_path, (), everything=True), Table(pattern, ()))


def test_a_table_knows_its_line(tmp_path):
    """The one of which the name is part of another's stands below it."""
    (tmp_path / "known.toml").write_text(
        '# known\n["t.py::test_block_cache"]\nmemory = "x"\n\n[ "t.py::test_block" ]  # slow\nmemory = "y"\n["t.py::test_x[#1]"]\nmemory = "z"\n[model]\nscan = "x"\n'
    )
    tables = read(tmp_path / "known.toml", "known.toml")
    assert [(table.pattern, table.line) for table in tables] == [
        ("t.py::test_block_cache", 2),
        ("t.py::test_block", 5),
        ("t.py::test_x[#1]", 7),
        ("model", 9),
    ]
