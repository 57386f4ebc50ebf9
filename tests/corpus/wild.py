"""Subjects as model authors write them: under the defaults each holds, or is rejected with a reason. None ends in an exception of the plugin's."""

from __future__ import annotations

from dataclasses import replace

import wild_calls
import wild_inputs
import wild_state
import wild_training
from wild_cases import WILD

from pytest_nnxcheck import Nesting
from pytest_nnxcheck.checks.check_call import check_call
from pytest_nnxcheck.core.settings import merge, parse_given
from pytest_nnxcheck.reporting import violations

FILES = (wild_calls, wild_inputs, wild_state, wild_training)
SUBJECTS = sorted(set(WILD) - {"dict_with_keys_of_several_types"})
SHARE = 16
"""One subject in so many runs with every suite, all of them in the full run."""


def run(case, nesting, example, **more):
    """One subject under one nesting; settings as in the marker."""
    settings = merge(parse_given({**case.settings, **more}, lambda name: name))
    parsed = Nesting.parse(nesting)
    found = check_call(case.subject, case.args, case.kwargs, nesting=parsed, settings=settings, example=example)
    return replace(found, outcome=violations.worded(found.outcome))
