"""The language model, tiny and real, then as Mistral 7B: compiled at its real size, and never allocated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, get_args

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from language_model import MISTRAL_7B, TINY, Decoder, Form, adam, train_step

Wrap = Callable[[Any], Callable[..., Any]]
TOKENS = jnp.array([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])
CAN_SWITCH_OFF = "graph_updates" in nnx.remat.__code__.co_varnames
FORMS = [form for form in get_args(Form) if form != "no_graph_updates" or CAN_SWITCH_OFF]
FEW = {"styles": "argument,functional", "sweep": "probes", "max_examples": 3}


def whole_number(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


@pytest.mark.parametrize("form", FORMS)
def test_decoding_gives_the_logits_of_the_whole_text(form: Form) -> None:
    config = replace(TINY, form=form)
    logits = Decoder(config, rngs=nnx.Rngs(0))(TOKENS)
    decoder = Decoder(config, cache=TOKENS.shape, rngs=nnx.Rngs(0))
    step = nnx.jit(Decoder.decode)
    one_by_one = [step(decoder, TOKENS[:, i], jnp.array(i)) for i in range(TOKENS.shape[1])]
    assert jnp.isfinite(logits).all()
    assert jnp.allclose(jnp.stack(one_by_one, axis=1), logits, atol=1e-4)


@pytest.mark.parametrize("form", FORMS)
def test_training_lowers_the_loss(form: Form) -> None:
    model = Decoder(replace(TINY, form=form), rngs=nnx.Rngs(0))
    optimizer, step = adam(model), nnx.jit(train_step)
    losses = [float(step(model, optimizer, TOKENS)) for _ in range(5)]
    assert losses == sorted(losses, reverse=True)


def test_it_has_as_many_parameters_as_the_published_one() -> None:
    model = nnx.eval_shape(lambda: Decoder(MISTRAL_7B, rngs=nnx.Rngs(0)))
    assert sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model))) == 7_248_023_552


@pytest.mark.nnx_invariants(**FEW)
def test_forward_of_7_billion_parameters(nnx_wrap: Wrap) -> None:
    model = nnx.eval_shape(lambda: Decoder(MISTRAL_7B, rngs=nnx.Rngs(0)))
    assert nnx_wrap(model)(whole_number(1, 4096)).shape == (1, 4096, 32768)


@pytest.mark.nnx_invariants(**FEW)
def test_decoding_of_7_billion_parameters(nnx_wrap: Wrap) -> None:
    decoder = nnx.eval_shape(lambda: Decoder(MISTRAL_7B, cache=(8, 4096), rngs=nnx.Rngs(0)))
    assert nnx_wrap(decoder.decode)(whole_number(8), whole_number()).shape == (8, 32768)


@pytest.mark.nnx_invariants(styles="argument", transforms="jit", sweep="singles", max_examples=0)
def test_training_step_of_7_billion_parameters(nnx_wrap: Wrap) -> None:
    """Parameters, their gradients and two moments of adam: the state of the optimizer is donated and kept as well."""
    model = nnx.eval_shape(lambda: Decoder(MISTRAL_7B, rngs=nnx.Rngs(0)))
    optimizer = nnx.eval_shape(lambda model: adam(model), model)
    assert nnx_wrap(train_step)(model, optimizer, whole_number(1, 4097)).shape == ()
