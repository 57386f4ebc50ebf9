"""A marked test of a call that a suite makes, to paste: the lines of the test up to the call, with the subject wrapped."""

from __future__ import annotations

import ast
import contextlib
import inspect
import re
import textwrap
from types import FrameType

from pytest_nnxcheck.core.settings import MARKER
from pytest_nnxcheck.watch.calls import SuiteCall


def marked_test(call: SuiteCall) -> str:
    """The source of the test; where the call is in no function whose source can be read, with places to fill in."""
    with contextlib.suppress(OSError, SyntaxError, ValueError, TypeError, LookupError):
        if text := from_source(call.caller, call.target.rpartition(":")[2].rpartition(".")[2]):
            return text
    module, _, path = call.target.partition(":")
    name = re.sub(r"\W+", "_", path).lower()
    return f"from {module} import {path.partition('.')[0]}\n\n@pytest.mark.{MARKER}\ndef test_{name}(nnx_wrap):\n    nnx_wrap(...)(...)  # {call.text}"


def from_source(frame: FrameType, name: str) -> str:
    """The function of a frame up to the statement that makes the call, marked; empty where the call is not written there. Raises what reading it raises.

    The columns of the call are unknown in an assertion that pytest 8 has rewritten: there the one call of that ``name`` is it.
    """
    code = frame.f_code
    lines, first = inspect.getsourcelines(code)
    source = textwrap.dedent("".join(lines))
    tree = ast.parse(source).body[0]
    if not isinstance(tree, ast.FunctionDef):
        return ""
    indent = len(lines[0]) - len(lines[0].lstrip())
    line, end, column, end_column = list(code.co_positions())[frame.f_lasti // 2]
    if line is None:
        return ""
    row = line - first + 1
    last = next((each for each in tree.body if each.lineno <= row <= (each.end_lineno or 0)), None)
    calls = [] if last is None else [each for each in ast.walk(last) if isinstance(each, ast.Call)]
    place = (row, (end or 0) - first + 1, (column or 0) - indent, (end_column or 0) - indent)
    made = [each for each in calls if _place(each) == place]
    made = made or [each for each in calls if ast.unparse(each.func).rpartition(".")[2] == name]
    if last is None or len(made) != 1:
        return ""
    made[0].func = ast.Call(ast.Name("nnx_wrap", ast.Load()), [made[0].func], [])
    tree.body = tree.body[: tree.body.index(last) + 1]
    own = [each for each in tree.args.args if each.arg != "self"]
    tree.args.args = [ast.arg("nnx_wrap"), *(each for each in own if each.arg != "nnx_wrap")]
    names = {each.id for each in ast.walk(ast.Module(tree.body, [])) if isinstance(each, ast.Name)}
    mark = ast.parse(f"pytest.mark.{MARKER}", mode="eval").body
    tree.decorator_list = [mark, *(each for each in tree.decorator_list if "parametrize" in ast.unparse(each))]
    head = "# self: build what setUp builds\n" if "self" in names else ""
    return head + ast.unparse(ast.fix_missing_locations(tree))


def _place(node: ast.Call) -> tuple[int, int | None, int, int | None]:
    return node.lineno, node.end_lineno, node.col_offset, node.end_col_offset
