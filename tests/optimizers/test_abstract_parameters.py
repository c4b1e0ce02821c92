"""Optimizer states of parameters that are shapes, or a place in a tree."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

import radazo_jax as zo

PARAMS = {"b": jnp.ones(3), "w": jnp.ones((4, 3), jnp.bfloat16)}
SPECS = {"b": PartitionSpec("x"), "w": PartitionSpec("x", "y")}


def _clipped(params):
    return jax.tree.map(lambda p: jnp.clip(p, -1, 1), params)


OPTIMIZERS = {
    "radazo": zo.radazo(1e-2),
    "radazo, replayed": zo.radazo(1e-2, moments="replayed"),
    "zo_adamm": zo.zo_adamm(1e-2, amsgrad=True),
    "zo_rmsprop": zo.zo_rmsprop(1e-2),
    "zo_sgd": zo.zo_sgd(1e-2, momentum=0.9),
    "zo_signsgd": zo.zo_signsgd(1e-2),
    "anchored_decay": zo.transforms.anchored_decay(None, 0.1),
    "anchored_decay, given": zo.transforms.anchored_decay(PARAMS, 0.1),
    "rounding": zo.transforms.stochastic_rounding(0),
    "keep_params_in": zo.transforms.keep_params_in(_clipped),
}
# How many trees like the parameters a state has.
COPIES = {
    "radazo": 2,
    "zo_adamm": 3,
    "zo_rmsprop": 1,
    "zo_sgd": 1,
    "anchored_decay": 1,
    "anchored_decay, given": 1,
}
EACH = pytest.mark.parametrize("name", OPTIMIZERS)


def _shapes(state):
    return jax.tree.map(lambda x: (jnp.shape(x), jnp.result_type(x)), state)


@EACH
def test_abstract_parameters_have_the_state_of_arrays(name):
    init = OPTIMIZERS[name].init
    expected = _shapes(init(PARAMS))
    abstract = jax.eval_shape(lambda: PARAMS)
    assert _shapes(init(abstract)) == expected
    assert _shapes(jax.eval_shape(init, PARAMS)) == expected
    assert _shapes(jax.eval_shape(init, abstract)) == expected


@EACH
def test_tree_map_params_maps_the_trees_like_the_parameters(name):
    optimizer = OPTIMIZERS[name]
    state = optimizer.init(PARAMS)
    seen = []

    def of_param(x, spec):
        seen.append((x.shape, spec))
        return spec

    mapped = optax.tree_map_params(
        optimizer,
        of_param,
        state,
        SPECS,
        transform_non_params=lambda _: PartitionSpec(),
    )
    copies = COPIES.get(name, 0)
    assert sorted(seen, key=str) == sorted(
        [((3,), SPECS["b"]), ((4, 3), SPECS["w"])] * copies, key=str
    )
    # A specification for each array: the one of a tree may stand for its leaves.
    jax.tree.map(
        lambda spec, part: [spec] * len(jax.tree.leaves(part)),
        mapped,
        state,
        is_leaf=lambda x: isinstance(x, PartitionSpec),
    )


@EACH
def test_tree_map_params_keeps_what_it_does_not_map(name):
    optimizer = OPTIMIZERS[name]
    state = optimizer.init(PARAMS)
    same = optax.tree_map_params(optimizer, lambda x: x, state)
    assert jax.tree.structure(same) == jax.tree.structure(state)
    for a, b in zip(jax.tree.leaves(same), jax.tree.leaves(state), strict=True):
        assert a is b


def test_a_run_continues_from_a_state_in_the_place_of_an_abstract_one():
    estimator = zo.forward_difference(zo.rademacher(), num_directions=2)
    optimizer = OPTIMIZERS["radazo, replayed"]
    init, step = zo.solver(
        lambda p: jnp.sum(p["b"] ** 2) + jnp.sum(p["w"].astype("float32") ** 2),
        optimizer,
        estimator,
    )
    state, _ = jax.jit(step)(init(PARAMS, 0))
    template = optimizer.init(jax.eval_shape(lambda: PARAMS))
    leaves = [np.asarray(x) for x in jax.tree.leaves(state.optimizer_state)]
    restored = jax.tree.unflatten(jax.tree.structure(template), leaves)
    _, expected = jax.jit(step)(state)
    _, info = jax.jit(step)(state._replace(optimizer_state=restored))
    assert info.value == expected.value
