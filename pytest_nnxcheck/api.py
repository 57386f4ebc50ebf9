"""The same check outside pytest, and the objects that `nnx_wrap` returns."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import os
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any, Generic, NoReturn, ParamSpec, Protocol, TypeVar

import hypothesis
import jax

from pytest_nnxcheck import devices, wheels
from pytest_nnxcheck.compat import flax_modes
from pytest_nnxcheck.core.errors import CheckError, InvariantViolation, SettingError, UnexpectedPass
from pytest_nnxcheck.core.settings import merge, parse_given
from pytest_nnxcheck.paste import program
from pytest_nnxcheck.reporting.report import Report, rejected_modes
from pytest_nnxcheck.runner import conclude, execution, hypothesis_test
from pytest_nnxcheck.runner.execution import running_for
from pytest_nnxcheck.runner.run import Run
from pytest_nnxcheck.subject.on_purpose import of_frames, prepared_by

P = ParamSpec("P")
R = TypeVar("R")
_NAMES = ("__module__", "__name__", "__qualname__", "__doc__")


class Wrapped(Generic[P, R]):
    """The object that ``nnx_wrap`` returns: a call of it runs the subject under the current nesting.

    Attributes and ``isinstance`` are those of the subject. Functions of flax and jax need the subject itself.
    """

    __wrapped__: Callable[P, R]
    __owner__: str
    """The name that the user's code has for the object of a bound method."""

    def __init__(self, subject: Callable[P, R], owner: str = "") -> None:
        object.__setattr__(self, "__wrapped__", subject)
        object.__setattr__(self, "__owner__", owner)
        for name in _NAMES:
            if hasattr(subject, name):
                object.__setattr__(self, name, getattr(subject, name))

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the subject under the nesting. Raises a violation, or the subject's own exception."""
        __tracebackhide__ = True
        execution = running_for(repr(self))
        arguments = tuple(unwrap(value) for value in args)
        named = {name: unwrap(value) for name, value in kwargs.items()}
        output: R = execution.call(self.__wrapped__, arguments, named, self.__owner__)
        return output

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """The class of the subject, for `isinstance`."""
        return type(self.__wrapped__)

    def __reduce__(self) -> tuple[Any, ...]:
        return Wrapped, (self.__wrapped__, self.__owner__)

    def __deepcopy__(self, memo: dict[int, Any]) -> Wrapped[P, R]:
        return Wrapped(copy.deepcopy(self.__wrapped__, memo), self.__owner__)

    def __getattr__(self, name: str) -> Any:
        # Not self.__wrapped__: `copy.copy` asks an instance that has none yet.
        return getattr(object.__getattribute__(self, "__wrapped__"), name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self.__wrapped__, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self.__wrapped__, name)

    def __repr__(self) -> str:
        subject = self.__wrapped__
        return f"nnx_wrap({getattr(subject, '__qualname__', None) or type(subject).__name__})"


def _refuse(wrapped: Wrapped[..., Any]) -> NoReturn:
    """Refuse a wrapped subject inside a transform: no nesting would see what the user's own transform does with it. Raises `CheckError`."""
    __tracebackhide__ = True
    raise CheckError(
        f"{wrapped!r} was handed to flax, to jax or to another call in place of what it wraps: hand over the module itself, and"
        " wrap the call that is to be checked, as nnx_wrap(f)(model, ...)"
    )


# Without, they take it for a leaf, and fail far from here or do nothing.
jax.tree_util.register_pytree_node(Wrapped, _refuse, lambda _, leaves: leaves)


class Wrap(Protocol):
    """The type of the fixture ``nnx_wrap``, for annotations: ``def test_model(nnx_wrap: Wrap) -> None``."""

    def __call__(self, subject: Callable[P, R]) -> Wrapped[P, R]:
        """Wrap a module, a bound method, or a function of graph nodes. Raises `CheckError` for a subject that cannot be called."""
        ...


def unwrap(value: Any) -> Any:
    """The subject of a wrapped object; anything else as it is."""
    return value.__wrapped__ if isinstance(value, Wrapped) else value


def wrap(subject: Callable[P, R]) -> Wrapped[P, R]:
    """Wrap a module, a bound method, or a function of graph nodes, as the `nnx_wrap` fixture does.

    Raises `CheckError` for a subject that cannot be called.
    """
    __tracebackhide__ = True
    return wrapped_for(subject, inspect.currentframe())


def wrapped_for(subject: Callable[P, R], frame: FrameType | None) -> Wrapped[P, R]:
    """Wrap a subject for the caller of a frame, whose names it keeps. Raises `CheckError` for one that cannot be called."""
    __tracebackhide__ = True
    if not callable(subject):
        raise CheckError(
            f"nnx_wrap got {type(subject).__name__} {' '.join(repr(subject).split()):.60}, which cannot be called: wrap a module with a __call__,"
            " a bound method such as model.decode, or a function whose arguments hold modules"
        )
    method = unwrap(subject)
    return Wrapped(method, owner_name(method, None if frame is None else frame.f_back))


def owner_name(subject: Any, frame: FrameType | None) -> str:
    """The name that the code of a frame has for the object that a bound method is of; empty where it has none."""
    while isinstance(subject, functools.partial):
        subject = subject.func
    if frame is None or not inspect.ismethod(subject):
        return ""
    for name, value in (*frame.f_locals.items(), *frame.f_globals.items()):
        # By type: `isinstance` asks a lazy object for its class. What pytest writes into an assertion has names that no code can have.
        held = value.__wrapped__ if type(value) is Wrapped else value
        if held is subject.__self__ and name.isidentifier():
            return str(name)
    return ""


def check(subject: Callable[..., Any], *args: Any, kwargs: Mapping[str, Any] | None = None, **settings: Any) -> Report:
    """Call ``subject(*args, **kwargs)`` under generated nestings. Returns a `Report` with the outcome of each.

    ``settings`` are the settings that the marker takes, and ``nesting='jit > scan'``, which runs this nesting alone. `check` reads no
    ini file and no command line. The draws repeat, so the same check gives the same report.

    Raises `CheckError` if the check cannot be made, and the subject's own exception if the un-nested call raises.
    """
    run, error = _run(subject, args, dict(kwargs or {}), settings, inspect.currentframe())
    if error is not None and (isinstance(error, CheckError) or not _told(run, error)):
        raise error.with_traceback(error.__traceback__)
    return run.report()


def assert_invariants(
    subject: Callable[..., Any], *args: Any, kwargs: Mapping[str, Any] | None = None, **settings: Any
) -> None:
    """Do the same as `check`, and raise an exception if something fails.

    Raises the `InvariantViolation` of the nesting that its message names, or the exception that the subject raised under a nesting.
    Raises `CheckError` if flax refuses the call in one of the modes, and `UnexpectedPass` if an expected failure did not happen.
    """
    __tracebackhide__ = True
    run, error = _run(subject, args, dict(kwargs or {}), settings, inspect.currentframe())
    if error is None and (problem := rejected_modes(run.report())):
        error = CheckError(problem)
    if error is not None:
        raise error.with_traceback(error.__traceback__)
    if lines := run.report().unexpected:
        raise UnexpectedPass("\n".join(lines))


def _run(
    subject: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    settings: Mapping[str, Any],
    frame: FrameType | None,
) -> tuple[Run, BaseException | None]:
    wrapped = wrapped_for(subject, frame)
    chosen = merge(parse_given(settings, lambda name: f"check(..., {name}=...)"))
    try:
        flax_modes.require_modes(chosen.chosen_modes)
    except SettingError as lacking:
        name = "nesting" if "nesting" in settings else "modes"
        raise SettingError(f"check(..., {name}=...): {lacking}") from None
    try:
        put_back = wheels.prepare(os.environ, chosen.target)
    except SettingError as lacking:
        raise SettingError(f"check(..., target=...): {lacking}") from None
    with contextlib.ExitStack() as environment:
        environment.callback(put_back)
        called_by = None if frame is None else frame.f_back
        environment.enter_context(prepared_by(of_frames(called_by)))
        if chosen.devices is not None:
            devices.require(chosen.devices, devices.available())

        @hypothesis.settings(database=None, derandomize=True)
        def body() -> None:
            __tracebackhide__ = True
            wrapped(*args, **kwargs)

        texts = program.of_check(called_by, wrapped.__wrapped__, args, kwargs)
        run = Run(chosen, programs=texts)
        error = _outcome(hypothesis_test.build(body, run, ()), run)
        run.forget()
        if error is None and (problem := conclude.proves_nothing(run)):
            error = CheckError(problem)
    return run, error


def _outcome(built: Callable[..., Any], run: Run) -> BaseException | None:
    try:
        built()
    except BaseException as error:
        if execution.passes_through(error):
            raise
        return conclude.conclude(error, run)
    return None


def _told(run: Run, error: BaseException) -> bool:
    """True if the report shows the exception; it does not where the subject itself raises un-nested in every mode."""
    outcomes = run.outcomes.values()
    return isinstance(error, InvariantViolation) or any(
        outcome.verdict == "failed" if outcome.nesting.layers else outcome.verdict == "held" for outcome in outcomes
    )


__all__ = ["Wrap", "Wrapped", "assert_invariants", "check", "unwrap", "wrap"]
