"""The language model as Mistral 7B: compiled at its real size, and never allocated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from language_model import MISTRAL_7B, Decoder, train_step, with_adam

Wrap = Callable[[Any], Callable[..., Any]]
FEW = {"styles": "argument,functional", "sweep": "probes", "max_examples": 3}


def whole_number(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


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
    model, optimizer = nnx.eval_shape(lambda: with_adam(MISTRAL_7B, nnx.Rngs(0)))
    assert nnx_wrap(train_step)(model, optimizer, whole_number(1, 4097)).shape == ()
