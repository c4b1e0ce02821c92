"""Steps that are exported, stored, and loaded for whatever device there is."""

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import radazo_jax as zo
from tests.helpers.tables import DISTRIBUTIONS, jit


def loss(params, x):
    hidden = jnp.tanh(x @ params["w"] + params["b"][None])
    hidden, _ = jax.lax.scan(
        lambda hidden, w: (jnp.tanh(hidden @ w), None), hidden, params["layers"]
    )
    return jnp.mean(hidden**2)


@pytest.mark.parametrize("distribution", ["sphere", "low_rank"])
@pytest.mark.slow
def test_a_step_is_exported_for_every_platform(distribution):
    optimizer = zo.radazo(1e-2)
    value_and_grad = zo.value_and_grad(
        loss, zo.forward_difference(DISTRIBUTIONS[distribution], 3)
    )

    params = {
        "w": jax.random.normal(jax.random.key(1), (16, 8)),
        "b": jnp.zeros(8),
        "layers": jax.random.normal(jax.random.key(4), (2, 8, 8)),
    }
    leaves, treedef = jax.tree.flatten((params, optimizer.init(params)))

    def step(leaves, key, x):
        params, state = jax.tree.unflatten(treedef, leaves)
        value, gradient = value_and_grad(jax.random.wrap_key_data(key), params, x)
        updates, state = optimizer.update(gradient, state, params)
        params = optax.apply_updates(params, updates)
        return jax.tree.leaves((params, state)), value

    x = jax.random.normal(jax.random.key(2), (4, 16))
    key = jax.random.key_data(jax.random.key(3))
    exported = jax.export.export(jax.jit(step), platforms=["tpu", "cuda", "cpu"])
    exported = exported(leaves, key, x)
    assert exported.platforms == ("tpu", "cuda", "cpu")
    loaded = jax.export.deserialize(exported.serialize())
    jax.tree.map(
        lambda got, expected: np.testing.assert_allclose(got, expected, rtol=1e-5),
        jit(loaded.call)(leaves, key, x),
        jit(step)(leaves, key, x),
    )
