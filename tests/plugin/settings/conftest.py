"""The settings of a test, as its report shows them."""

import json

import pytest


@pytest.fixture
def settings_of(run_inner, pytester):
    """The settings of a marked test in a run with these options: ``settings_of("--nnx-max-depth=2", marker="max_examples=0")``."""

    def settings(*args, marker=""):
        source = f"@marked({marker})\ndef test_x(nnx_wrap): nnx_wrap(Model())(1)\n"
        result = run_inner(source, "--nnx-report=settings.json", *args)
        result.assert_outcomes(passed=1)
        (test,) = json.loads((pytester.path / "settings.json").read_text(encoding="utf-8"))["tests"]
        return test["settings"]

    return settings


@pytest.fixture
def refusal_of(pytester, inner_args):
    """The text with which a run with these options is refused."""

    def refusal(*args):
        with pytest.raises(pytest.UsageError) as caught:
            pytester.parseconfigure(*inner_args, *args)
        return str(caught.value)

    return refusal
