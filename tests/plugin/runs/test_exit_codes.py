"""What docs/exit_codes.md says of each code happens."""

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[3] / "docs" / "exit_codes.md"
HOLDS = "@marked\ndef test_x(nnx_wrap):\n    nnx_wrap(Model())(3)\n"
BREAKS = "@marked\ndef test_x(nnx_wrap):\n    nnx_wrap(Model(tracers=has('jit')))(3)\n"
RAISES = "@marked\ndef test_x(nnx_wrap):\n    nnx_wrap(Model(failed=has('jit')))(3)\n"
REFUSED = "@marked\ndef test_x(nnx_wrap):\n    nnx_wrap(Model(rejected=has('scan[closure]')))(3)\n"
EXPECTED = BREAKS.replace("@marked", "@marked(expected_failures={'tracers': 'known'})")
UNEXPECTED = HOLDS.replace("@marked", "@marked(expected_failures={'tracers': 'known'})")
RUNS = {
    0: [(HOLDS,), (EXPECTED,), (REFUSED,)],
    1: [(BREAKS,), (RAISES,), (UNEXPECTED,), (REFUSED, "--nnx-on-rejection=fail")],
    2: [("@marked\ndef test_x(tmp_path): pass\n",)],
    4: [(HOLDS, "--nnx-max-depth=0"), (HOLDS, "--nnx-baseline=missing.jsonl")],
    5: [("",)],
}


@pytest.mark.parametrize(
    "code, source, options", [(code, source, options) for code, runs in RUNS.items() for source, *options in runs]
)
def test_a_run_ends_with_its_code(run_inner, code, source, options):
    assert run_inner(source, *options).ret == code


def test_the_page_has_a_row_for_each():
    rows = re.findall(r"^\| (\d) \|", PAGE.read_text(), re.MULTILINE)
    assert [int(row) for row in rows] == sorted({*RUNS, int(pytest.ExitCode.INTERNAL_ERROR)})
