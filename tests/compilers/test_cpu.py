"""Compiled programs for eight simulated devices: traffic and memory.

The texts and sizes of compiled programs hold for JAX 0.10.2.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import radazo_jax as zo
from tests.helpers import tables
from tests.helpers.compiled import sent
from tests.helpers.tables import mesh_of

WIDTH, ROWS, DEPTH = 32, 16, 3


def abstract(mesh, spec, *shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))


def compiled(mesh, fun, *args, **options):
    with jax.set_mesh(mesh):
        return jax.jit(fun, **options).lower(*args).compile()


def layers(params, x, weights=lambda w: w):
    """Scanned layers, whose products are 2 * DEPTH * ROWS * WIDTH² flops."""

    def layer(x, w):
        return jnp.tanh(x @ weights(w)), None

    x, _ = lax.scan(layer, x, params)
    return jnp.mean(x**2)


def gathered(params, x):
    return layers(params, x, lambda w: lax.with_sharding_constraint(w, P()))


def step(loss, distribution, num_directions, batch_size=1, axis_name="k"):
    estimator = zo.forward_difference(
        tables.DISTRIBUTIONS[distribution], num_directions, 1e-3
    )
    if axis_name is None:
        return zo.value_and_grad(loss, estimator, evaluator=zo.vectorized(batch_size))
    return zo.value_and_grad(
        loss, estimator, evaluator=zo.sharded(axis_name, batch_size)
    )


KEY = jax.eval_shape(lambda: jax.random.key(0))


@pytest.mark.parametrize("distribution", tables.every(tables.KINDS, *tables.FAST))
def test_sharded_parameters_send_what_a_forward_pass_sends(distribution):
    mesh = mesh_of(2, 2, 2)
    params = abstract(mesh, P(None, None, "model"), DEPTH, WIDTH, WIDTH)
    x = abstract(mesh, P(("data", "model")), ROWS, WIDTH)
    forward = sent(compiled(mesh, gathered, params, x))
    out = (NamedSharding(mesh, P()), params.sharding)
    fun = step(gathered, distribution, 1)
    found = sent(compiled(mesh, fun, KEY, params, x, out_shardings=out))
    layer = 4 * WIDTH**2
    assert forward[-1] == layer
    # An evaluation a device gathers a layer in its loop. What else is sent is less
    # than the rows of a matrix.
    assert [n for n in found if n >= layer] == [n for n in forward if n >= layer]
    assert sum(n for n in found if n < layer) <= 2 * DEPTH * 4 * WIDTH * 8


def test_low_rank_evaluations_share_a_gathered_layer():
    """A constraint on a perturbed matrix is one on the matrix alone."""
    mesh = mesh_of(2, 1, 4)
    params = abstract(mesh, P(None, None, "model"), DEPTH, WIDTH, WIDTH)
    x = abstract(mesh, P("model"), ROWS, WIDTH)
    fun = step(gathered, "low_rank", 7, batch_size=None)
    found = sent(compiled(mesh, fun, KEY, params, x))
    layer = 4 * WIDTH**2
    assert [n for n in found if n >= layer] == [layer]


@pytest.mark.parametrize("distribution", tables.every(tables.KINDS, *tables.FAST))
def test_a_perturbed_program_stores_no_noise(distribution):
    """Beyond the forward pass it holds about a layer; the noise has as many as θ."""
    distribution, depth, width = tables.DISTRIBUTIONS[distribution], 8, 256
    params = jax.ShapeDtypeStruct((depth, width, width), jnp.float32)
    x = jax.ShapeDtypeStruct((ROWS, width), jnp.float32)
    direction = jax.eval_shape(distribution.sample, KEY, params)

    def held(fun, *args):
        memory = jax.jit(fun).lower(*args).compile().memory_analysis()
        return memory.temp_size_in_bytes

    beyond = held(zo.perturb(layers), params, direction, 0.1, x) - held(
        layers, params, x
    )
    assert beyond <= 1.5 * 4 * width**2


@pytest.mark.slow
def test_cross_entropy_over_a_sharded_vocabulary():
    """XLA's partitioner dies of it under a shard_map over some of the axes."""
    mesh = mesh_of(2, 2, 2)
    shapes = {"embedding": (64, 16), "hidden": (16, 16), "output": (16, 64)}
    keys = jax.random.split(jax.random.key(0), 3)
    params = {
        name: jax.random.normal(key, shape) / 4
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }
    tokens = jax.random.randint(jax.random.key(1), (8, 12), 0, 64)

    def loss(params, tokens):
        x = params["embedding"][tokens]
        logits = jnp.tanh(x @ params["hidden"]) @ params["output"]
        found = jax.nn.log_softmax(logits)
        return -jnp.mean(jnp.take_along_axis(found, tokens[..., None], axis=-1))

    key = jax.random.key(2)
    expected, _ = step(loss, "gaussian", 3, None, None)(key, params, tokens)
    with jax.set_mesh(mesh):
        params = jax.device_put(params, P(None, "model"))
        tokens = jax.device_put(tokens, P("data"))
        value, gradient = jax.jit(step(loss, "gaussian", 3))(key, params, tokens)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(gradient))


@pytest.mark.parametrize("size", [1, 8])
def test_slices_have_their_layout_given_on_one_chip_alone(size):
    # A given layout would gather a sharded array.
    mesh = mesh_of(1, 1, size)
    params = abstract(mesh, P(None, None, "model"), DEPTH, WIDTH, WIDTH)
    x = abstract(mesh, P(), ROWS, WIDTH)
    key = jax.ShapeDtypeStruct((), KEY.dtype, sharding=NamedSharding(mesh, P()))
    traced = jax.jit(step(layers, "gaussian", 2, axis_name=None)).trace(key, params, x)
    text = traced.lower(lowering_platforms=("tpu",)).as_text()
    assert ("LayoutConstraint" in text) == (size == 1)
