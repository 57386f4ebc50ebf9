"""A plain call that raises where its trace does not: the test fails with the user's own error, un-nested, though its body reads no value."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from checking import Example
from flax import nnx
from healthy import FLAX, numbers, rngs
from probes import refuses_lists

from pytest_nnxcheck import check
from pytest_nnxcheck.core.nesting import Nesting
from pytest_nnxcheck.engine.example import Call
from pytest_nnxcheck.engine.observe import is_small
from pytest_nnxcheck.subject import profile
from pytest_nnxcheck.subject.subject import bind
from pytest_nnxcheck.values import uncomputed

refuses = pytest.mark.skipif(not refuses_lists(), reason="this flax refuses no array in a list")
has_data = pytest.mark.skipif(FLAX < (0, 12), reason="nnx.data came with flax 0.12")


class Keeps(nnx.Module):
    """Puts a list of arrays into an attribute for as long as the call lasts, which flax 0.12.5 refuses outside of a trace."""

    def __init__(self) -> None:
        self.scale = nnx.Param(jnp.float32(0.5))

    def __call__(self, x: jax.Array) -> jax.Array:
        self.parts = self.kept(x)
        out = x * self.scale[...]
        del self.parts
        return out

    def kept(self, x):
        return [x]


class KeepsData(Keeps):
    """The healthy twin: the attribute says what it holds."""

    def kept(self, x):
        return nnx.data([x])


class InJit(Keeps):
    """In a jit of the model's own flax takes the list, in a plain call as well."""

    def __call__(self, x):
        return nnx.jit(Keeps.__call__)(self, x)


class Makes(nnx.Module):
    """Makes a module inside the call, that keeps a list."""

    def __call__(self, x):
        inner = Holder()
        inner.fill(x)
        return inner.parts[0] * 2


class Holder(nnx.Module):
    def fill(self, x):
        self.parts = [x]


class Deep(nnx.Module):
    """Too many operations to be run for nothing, and the list is in a layer of a layer."""

    def __init__(self, inner: type[nnx.Module]) -> None:
        self.attention = nnx.MultiHeadAttention(2, 4, decode=False, rngs=rngs())
        self.inner = nnx.List([inner()])

    def __call__(self, x):
        return self.inner[0](self.attention(x))


class OnlyTraced(nnx.Module):
    """Raises on arrays."""

    def __init__(self) -> None:
        self.scale = nnx.Param(jnp.float32(0.5))

    def __call__(self, x):
        if not isinstance(x, jax.core.Tracer):
            raise TypeError("call me in a jit")
        return x * self.scale[...]


@pytest.mark.slow
@refuses
@pytest.mark.parametrize("cls", [Keeps, Makes])
@pytest.mark.parametrize("deep", [False, True])
def test_an_array_in_a_list_is_refused_un_nested(cls, deep):
    model = Deep(cls) if deep else cls()
    with pytest.raises(ValueError, match="assigned to static attribute 'parts'"):
        check(model, numbers((2, 3, 4)), effort="quick")


@pytest.mark.slow
@has_data
@pytest.mark.parametrize("cls", [KeepsData, InJit])
@pytest.mark.parametrize("deep", [False, True])
def test_what_flax_takes_in_a_plain_call_holds(cls, deep):
    model = Deep(cls) if deep else cls()
    report = check(model, numbers((2, 3, 4)), transforms="jit,remat", styles="argument", max_examples=0)
    assert report.ok, str(report)


@has_data
@pytest.mark.parametrize("cls, refused", [(Keeps, refuses_lists()), (KeepsData, False), (InJit, False)])
def test_an_abstract_model_is_held_to_what_its_plain_call_does(cls, refused):
    model, x = nnx.eval_shape(cls), jax.ShapeDtypeStruct((3, 4), jnp.float32)
    if refused:
        with pytest.raises(ValueError, match="assigned to static attribute 'parts'"):
            check(model, x, effort="quick")
    else:
        assert check(model, x, transforms="jit,remat", styles="argument", max_examples=0).ok


def test_code_that_raises_on_arrays_is_run_where_it_is_small():
    with pytest.raises(TypeError, match="call me in a jit"):
        check(OnlyTraced(), numbers((3, 4)), effort="quick")


def small(model, x, example=None):
    subject = bind(model, (x,), {})
    facts = profile.profile(bind(model, (numbers(x.shape),), {}))
    return is_small(Call(subject, Nesting(), example=example or Example(), profile=facts))


def test_the_same_call_is_run_or_traced_whatever_was_compiled_before():
    linear, attention = nnx.Linear(4, 4, rngs=rngs()), nnx.MultiHeadAttention(2, 4, decode=False, rngs=rngs())
    for _ in range(2):
        assert [small(model, numbers((2, 3, 4))) for model in (linear, attention)] == [True, False]


def test_a_call_that_is_handed_a_stand_in_is_not_run_for_nothing():
    """As the body's second call, which gets what the first returned."""
    x = uncomputed.stand_in(
        jax.typeof(numbers((3, 4))) if hasattr(jax, "typeof") else jax.core.get_aval(numbers((3, 4)))
    )
    linear = nnx.Linear(4, 4, rngs=rngs())
    assert small(linear, x)
    assert not small(linear, x, Example(stand_ins={id(x): x}))


def test_a_layer_is_one_operation_however_often_it_is_called():
    def repeated(layer, x):
        for _ in range(5):
            x = layer(x)
        return x

    once, often = (
        profile.profile(bind(function, (nnx.Linear(4, 4, rngs=rngs()), numbers((3, 4))), {})).program
        for function in (lambda layer, x: layer(x), repeated)
    )
    assert often.equations == 5 * once.equations
    assert often.operations == once.operations
