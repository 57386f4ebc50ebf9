"""Mistral 7B under the defaults: the usual build of a language model, `nnx.scan` over `nnx.remat`, breaks the memory rule.

Run it with ``pytest examples/real_size/mistral_7b.py``: the test of that form fails, by design, on every version. The tests of
the cured forms are in ``examples/test_language_model.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from language_model import MISTRAL_7B, Decoder

Wrap = Callable[[Any], Callable[..., Any]]


pytestmark = pytest.mark.nnx_invariants(styles="argument,functional", sweep="singles", max_examples=0)
CONFIG = replace(MISTRAL_7B, form="remat", dtype=jnp.float32)


def test_forward(nnx_wrap: Wrap) -> None:
    model = nnx.eval_shape(lambda: Decoder(CONFIG, rngs=nnx.Rngs(0)))
    assert nnx_wrap(model)(jax.ShapeDtypeStruct((1, 4096), jnp.int32)).shape == (1, 4096, 32768)


def test_decoding(nnx_wrap: Wrap) -> None:
    decoder = nnx.eval_shape(lambda: Decoder(CONFIG, cache=(1, 4096), rngs=nnx.Rngs(0)))
    token, position = jax.ShapeDtypeStruct((1,), jnp.int32), jax.ShapeDtypeStruct((), jnp.int32)
    assert nnx_wrap(decoder.decode)(token, position).shape == (1, 32768)
