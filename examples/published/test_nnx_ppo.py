"""nnx-ppo: a recurrent actor critic with a running normalizer, and one step of PPO, a scan of gradients."""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from training import FORWARD, STEP, Wrap

pytest.importorskip("nnx_ppo", reason="nnx-ppo is not installed")
ppo = importlib.import_module("nnx_ppo.algorithms.ppo")
types = importlib.import_module("nnx_ppo.algorithms.types")
containers = importlib.import_module("nnx_ppo.networks.containers")
factories = importlib.import_module("nnx_ppo.networks.factories")
feedforward = importlib.import_module("nnx_ppo.networks.feedforward")
normalizer = importlib.import_module("nnx_ppo.networks.normalizer")
recurrent = importlib.import_module("nnx_ppo.networks.recurrent")
sampling = importlib.import_module("nnx_ppo.networks.sampling_layers")
adapter = importlib.import_module("nnx_ppo.networks.adapter")
JaxDataclass = importlib.import_module("nnx_ppo.jax_dataclass").JaxDataclass


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True)
class EnvState(JaxDataclass):  # type: ignore[misc]
    """The state of an environment, with the fields that the package asks for."""

    data: dict[str, jax.Array]
    obs: jax.Array
    info: dict[str, Any]
    reward: jax.Array
    done: jax.Array
    metrics: dict[str, Any]


class MoveToCenter:
    """A point that is rewarded for being near the origin."""

    def reset(self, rng: jax.Array) -> EnvState:
        return self._state(jax.random.uniform(rng, (2,)) * 2 - 1)

    def step(self, state: EnvState, action: jax.Array) -> EnvState:
        return self._state(state.data["pos"] + jnp.clip(action, -1, 1))

    def _state(self, pos: jax.Array) -> EnvState:
        distance = jnp.square(pos).sum()
        return EnvState({"pos": pos}, pos / 10, {}, jnp.exp(-distance * 2), jnp.where(distance > 4, 1.0, 0.0), {})


@pytest.mark.nnx_invariants(**FORWARD)
def test_recurrent_step(nnx_wrap: Wrap) -> None:
    rngs = nnx.Rngs(0)
    action = containers.Sequential(
        [feedforward.Dense(16, 4, rngs), sampling.NormalTanhSampler(rngs, entropy_weight=0.01)],
    )
    network = containers.Sequential([
        normalizer.Normalizer(2),
        recurrent.LSTM(2, 16, rngs, trainable_initial_state=True),
        adapter.PPOAdapter(action=action, value=feedforward.Dense(16, 1, rngs)),
    ])  # fmt: skip
    out = nnx_wrap(network)(network.initialize_state(4), jnp.ones((4, 2)))
    assert out.output.actions.shape == (4, 2)


@pytest.mark.nnx_invariants(**STEP | {"transforms": "jit,scan"})
def test_step_of_ppo(nnx_wrap: Wrap) -> None:
    env = MoveToCenter()
    network = factories.make_mlp_actor_critic(2, 2, [16], [16], nnx.Rngs(0), normalize_obs=True)
    state = ppo.new_training_state(env, network, 4, 1)
    losses = types.LoggingLevel.LOSSES
    state, _ = nnx_wrap(ppo.ppo_step)(env, state, 4, 3, 0.95, 0.97, 0.2, True, False, 2, 2, 1.0, losses)
    assert state.steps_taken.shape == ()
