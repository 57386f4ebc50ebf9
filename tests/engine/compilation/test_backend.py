"""Code of the user's gets the answers of another machine; jax and flax do not."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import jax.extend.backend
import jax.numpy as jnp
import numpy as np
import pytest
from jax import local_devices

from pytest_nnxcheck.compat.backend import Machine, asked

CHIP = SimpleNamespace(platform="tpu", device_kind="TPU v9", coords=(0, 0, 0))
FOUR = Machine("tpu", (CHIP,) * 4)


def test_the_users_lines_get_the_answers_of_a_machine_and_are_collected():
    with asked(FOUR) as lines:
        assert (jax.default_backend(), jax.device_count(), jax.local_device_count()) == ("tpu", 4, 4)
        assert {device.device_kind for device in (*jax.devices(), *local_devices(), *jax.devices("tpu"))} == {"TPU v9"}
        assert jax.extend.backend.get_backend().platform == "tpu"
        assert jax.devices("cpu")[0].platform == "cpu"
    assert [line.partition(" asked ")[2] for line in lines][:2] == ["jax.default_backend()", "jax.device_count()"]
    assert all("test_backend.py:" in line for line in lines)
    assert jax.default_backend() == "cpu"


def test_without_a_machine_the_lines_are_collected_and_the_answers_are_those_of_jax():
    with asked() as lines:
        assert jax.default_backend() == "cpu"
        with pytest.raises(RuntimeError):
            jax.devices("tpu")
    assert [line.partition(" asked ")[2] for line in lines] == ["jax.default_backend()", "jax.devices()"]
    assert [*lines.values()] == ['"cpu"', "an exception"]


def test_jax_itself_goes_on_with_this_machine():
    with asked(FOUR):
        mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))
        x = jax.device_put(jnp.ones(8), jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data")))
        assert float(jax.jit(jnp.sum)(x)) == 8
        assert jax.make_mesh((1,), ("data",)).devices.item().platform == "cpu"
    assert mesh.devices.item() == jax.local_devices()[0]
