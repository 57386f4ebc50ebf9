"""What is said of the heads of jax and flax: the failures that are theirs, apart from those that were there before."""

import heads

JUNIT = (
    '<testsuites><testsuite><testcase classname="tests.engine.test_a" name="test_holds"/>'
    '<testcase classname="tests.engine.test_a" name="test_old"><failure message="old&#10;more"/></testcase>'
    "{}</testsuite></testsuites>"
)
NEW = '<testcase classname="tests.engine.test_b" name="test_new"><error message="AttributeError: core"/></testcase>'


def test_failures_are_read_with_the_first_line_of_their_reason(tmp_path):
    (tmp_path / "a.xml").write_text(JUNIT.format(NEW))
    assert heads.failures(tmp_path / "a.xml") == {
        "tests.engine.test_a::test_old": "old",
        "tests.engine.test_b::test_new": "AttributeError: core",
    }


def test_a_test_that_fails_on_the_heads_alone_comes_first():
    text = heads.difference({"a": "old", "gone": "x"}, {"a": "old", "b": "AttributeError"}, "jax 1.0")
    lines = [line for line in text.splitlines() if line]
    assert lines[:4] == [
        "## Heads of jax and flax: 1 tests fail that pass on the releases",
        "jax 1.0",
        "### Fail on the heads alone",
        "* `b`: AttributeError",
    ]
    assert lines[5::2] == ["* `gone`: x", "* `a`: old"]
    assert heads.difference({}, {}, "jax 1.0").splitlines()[-1] == "jax 1.0"
