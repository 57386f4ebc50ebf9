"""Mutants are drawn from the syntax tree, and change what they say."""

import sys

import pytest

pytestmark = pytest.mark.skipif(sys.version_info < (3, 12), reason="older Pythons cannot tell what each test runs")

CODE = """
if TYPE_CHECKING:
    import os

@frozen(slots=True)
def é(a: 7 = 1):
    if a and not b:
        self.é = "é"; f(a)
    return [x for x in a if x < 2]
"""


def test_each_place_goes_wrong_in_every_way(tmp_path, monkeypatch):
    import mutants

    monkeypatch.setattr(mutants, "PACKAGE", tmp_path)
    (tmp_path / "some.py").write_text(CODE)
    found = list(mutants.mutants_of(tmp_path / "some.py"))
    assert {mutant.function for mutant in found} == {"é"}
    assert [(mutant.lines[0], mutant.old, mutant.new) for mutant in found] == [
        (6, "1", "2"),
        (7, "a and not b", "(not (a and (not b)))"),
        (7, "a and not b", "(not b)"),
        (7, "a and not b", "(a)"),
        (7, "not b", "bool(b)"),
        (8, 'self.é = "é"', "pass"),
        (8, "f(a)", "pass"),
        (9, "return [x for x in a if x < 2]", "return None"),
        (9, "x < 2", "True"),
        (9, "x < 2", "(x <= 2)"),
        (9, "2", "3"),
    ]
    assert found[6].changed() == CODE.replace("f(a)", "pass")


def test_the_package_has_mutants_of_every_kind():
    import mutants

    drawn = list(mutants.mutants_of(mutants.PACKAGE / "core" / "text.py"))
    assert all(mutant.compiles() for mutant in drawn)
    assert {mutant.new for mutant in drawn} >= {"pass", "return None", "True", "2"}
