"""Turn a test into a hypothesis test over nestings: the sweep as explicit examples, then the drawn nestings. No pytest in it.

The names of hypothesis that are not public, the attributes that its decorators set on a test, come first.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from types import MethodType
from typing import Any

import hypothesis
from hypothesis import HealthCheck, Phase
from hypothesis import strategies as st

from pytest_nnxcheck.core.settings import Settings
from pytest_nnxcheck.runner import strategies
from pytest_nnxcheck.runner.run import Run, Sweep, sweep


@dataclass(frozen=True)
class HypothesisTest:
    """A test as hypothesis sees it."""

    body: Callable[..., Any]
    """The innermost function."""
    drawn: dict[str, Any] | None
    """The strategies of ``@given`` by argument; `None` without one."""
    examples: tuple[Any, ...]
    """The values of ``@example``, in the order in which they run."""
    settings: Any
    """The settings of ``@settings``; `None` without it."""
    seeded: bool
    """The test has a ``@seed``."""
    attributes: dict[str, Any]
    """The attributes that a copy of the test must carry for ``@seed`` and ``@reproduce_failure`` to work."""


def hypothesis_test(test: Callable[..., Any]) -> HypothesisTest:
    """Take a test function apart into the attributes that hypothesis' decorators set on it.

    Only ``hypothesis.inner_test`` is documented. The strategies of ``@given``, the values of ``@example`` and the
    ``@settings`` of a test have no public reader, and without them a test with its own ``@given`` could not be run with
    a nesting drawn beside its arguments. Tried on hypothesis 6.100 and 6.170.
    """
    handle = getattr(test, "hypothesis", None)
    own = (
        "_hypothesis_internal_settings_applied",
        "hypothesis_explicit_examples",
        "hypothesis",
        "is_hypothesis_test",
        "__wrapped__",
        "__wrapped_target",
    )
    return HypothesisTest(
        body=test if handle is None else handle.inner_test,
        drawn=None if handle is None else dict(handle._given_kwargs),
        # hypothesis runs them from the last to the first: decorators apply from the bottom up.
        examples=tuple(reversed(getattr(test, "hypothesis_explicit_examples", ()))),
        settings=getattr(test, "_hypothesis_internal_use_settings", None),
        seeded=getattr(test, "_hypothesis_internal_use_seed", None) is not None,
        attributes={name: value for name, value in vars(test).items() if name not in own},
    )


ARGUMENT = "nnx_nesting"
"""The argument by which hypothesis passes the nesting; no fixture of a user has this name."""


def build(test: Callable[..., Any], run: Run, passed: Collection[str], *, seeded: bool = False) -> Callable[..., Any]:
    """Make a hypothesis test that runs ``test`` under generated nestings; ``run`` collects what they do.

    ``passed`` names the arguments that pytest passes. ``seeded``: the command line has a seed of hypothesis; without one a test draws the
    same nestings every time.
    """
    function = getattr(test, "__func__", test)
    parts = hypothesis_test(function)
    run.remember = run.memo.same_arguments = parts.drawn is None
    run.repeats = run.remember and not (seeded or parts.seeded)
    # A body that draws for itself would draw other values in a second run, so that all values are computed in the first.
    run.executor.values_needed = any(strategy == st.data() for strategy in (parts.drawn or {}).values())
    inner = _inner(parts, run, {*passed, *(parts.drawn or ())}, bound=function is not test)
    explicit = _explicit(parts, run.settings)
    built = _settings(parts, run, swept=bool(explicit))(inner)
    if run.settings.nesting is None:
        nestings = strategies.nestings(run.settings, lambda mode: run.exclusions[mode])
    else:
        nestings = st.sampled_from([replace(run.settings.nesting, mode=mode) for mode in run.settings.chosen_modes])
    built = hypothesis.given(**(parts.drawn or {}), **{ARGUMENT: nestings})(built)
    for example in reversed(explicit):
        built = example(built)
    return MethodType(built, test.__self__) if function is not test else built  # type: ignore[attr-defined]


def _inner(parts: HypothesisTest, run: Run, names: Collection[str], *, bound: bool) -> Callable[..., None]:
    """The body with one more argument, the nesting; arguments that pytest does not pass keep the body's own defaults."""

    def inner(*args: Any, **kwargs: Any) -> None:
        __tracebackhide__ = True
        case, body = kwargs.pop(ARGUMENT), functools.partial(parts.body, *args, **kwargs)
        if run.uncalled:
            return
        if isinstance(case, Sweep):
            sweep(run, case, body)
        else:
            run.example(case, body)

    functools.update_wrapper(inner, parts.body, updated=())
    vars(inner).update(parts.attributes)
    own = list(inspect.signature(parts.body).parameters.values())
    passed = [p.replace(default=p.empty) for p in own[bound:] if p.name in names and p.default is p.empty]
    nesting = inspect.Parameter(ARGUMENT, inspect.Parameter.KEYWORD_ONLY)
    inner.__signature__ = inspect.Signature([*own[:bound], *passed, nesting])  # type: ignore[attr-defined]
    return inner


def _settings(parts: HypothesisTest, run: Run, *, swept: bool) -> hypothesis.settings:
    """The user's hypothesis settings, changed for examples that compile.

    No deadline: the first call compiles. No explain phase: it runs a failing example about 40 times more. Without a seed and without
    a user's ``@given`` the draws repeat, so that the same commit gives the same verdicts.
    """
    settings = run.settings
    base: Any = parts.settings or hypothesis.settings.default
    phases = [phase for phase in base.phases if phase is not Phase.explain]
    changed: dict[str, Any] = {"deadline": None}
    if parts.drawn is None:
        # Nothing of the user's is drawn: health checks and the blob of `reproduce_failure` would be about our strategy.
        changed |= {"print_blob": False, "suppress_health_check": list(HealthCheck)}
        if run.repeats:
            changed |= {"derandomize": True, "database": None}
        draws = settings.nesting is None and strategies.draws_any(settings)
        phases = [Phase.explicit, *(phase for phase in phases if draws and phase is not Phase.explicit)]
    elif settings.nesting is None and swept and settings.max_examples == 0:
        phases = [Phase.explicit]
    if settings.nesting is None:
        changed["max_examples"] = max(settings.max_examples, 1)
    return hypothesis.settings(base, phases=phases, **changed)


def _explicit(parts: HypothesisTest, settings: Settings) -> list[hypothesis.example]:
    """The explicit examples in the order in which they run: the first is a sweep, the user's further ones only probe."""
    full, probes = Sweep(settings), Sweep(replace(settings, sweep="probes", expected_failures=()))
    if not parts.drawn:
        return [hypothesis.example(**{ARGUMENT: full})]
    if not parts.examples:
        values = _simplest(parts.drawn)
        return [] if values is None else [hypothesis.example(**values, **{ARGUMENT: full})]
    cases = [full] + [probes] * (len(parts.examples) - 1)
    return [_with_nesting(example, case, parts) for example, case in zip(parts.examples, cases, strict=True)]


def _with_nesting(example: Any, case: Sweep, parts: HypothesisTest) -> hypothesis.example:
    names = [p.name for p in inspect.signature(parts.body).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    values = dict(zip(names[-len(example.args) :], example.args, strict=True)) if example.args else example.kwargs
    explicit = hypothesis.example(**values, **{ARGUMENT: case})
    return explicit if example.raises is None else explicit.xfail(reason=example.reason or "", raises=example.raises)


def _simplest(drawn: dict[str, Any]) -> dict[str, Any] | None:
    """The simplest value of each strategy; none with `st.data()`, which cannot be an explicit argument."""
    if any(strategy == st.data() for strategy in drawn.values()):
        return None
    quiet = hypothesis.settings(database=None, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    try:
        return dict(hypothesis.find(st.fixed_dictionaries(drawn), lambda _: True, settings=quiet))
    except Exception:  # noqa: BLE001 - the user's strategies are at fault, and hypothesis says so best, in the test
        return None
