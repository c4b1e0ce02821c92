"""Reverted steps restore the parameters before them, under bounds and projections."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import radazo_jax as zo
from tests.helpers.compare import Hashed
from tests.helpers.tables import every, jit

DIMENSION, SEEDS, STEPS = 20, 100, 300
START = jnp.full(DIMENSION, 0.3)
UNIT = functools.partial(optax.projections.projection_box, lower=0.0, upper=1.0)
OPTIMIZER = zo.parabolic_sgd()
ACCELERATED = zo.accelerated(zo.adaptive_difference(zo.orthonormal(), 10))
PROJECTED = optax.chain(zo.parabolic_sgd(), zo.keep_params_in(UNIT))
TREES = (jnp.zeros(DIMENSION), jnp.ones(DIMENSION))
METHODS = {
    "unbounded": (OPTIMIZER, ACCELERATED, None),
    "bounds": (OPTIMIZER, ACCELERATED, (0.0, 1.0)),
    "bounds as trees": (OPTIMIZER, ACCELERATED, TREES),
    "projection": (PROJECTED, ACCELERATED, None),
    "projection, plain": (
        PROJECTED,
        zo.adaptive_difference(zo.orthonormal(), 10),
        None,
    ),
}

METHOD_NAMES = every(METHODS, "bounds")


def quadratic(x, matrix, center):
    return (x - center) @ matrix @ (x - center)


@functools.cache
def problems(inside):
    """Matrices with condition numbers up to 300, and minima inside the box or not."""
    random = np.random.default_rng(0)
    bases, _ = np.linalg.qr(random.normal(size=(SEEDS, DIMENSION, DIMENSION)))
    largest = random.uniform(0, 2.5, SEEDS)
    scales = np.logspace(0, largest, DIMENSION).T
    matrices = np.einsum("sij,sj,skj->sik", bases, scales, bases)
    low, high = (0.2, 0.8) if inside else (-0.5, 1.5)
    centers = random.uniform(low, high, (SEEDS, DIMENSION))
    return jnp.float32(matrices), jnp.float32(centers)


@functools.cache
def program(method):
    """The runs from all keys on all problems."""
    optimizer, estimator, bounds = METHODS[method]
    init, step = zo.solver(quadratic, optimizer, estimator, bounds=bounds)

    def run(state, key, *problem):
        def body(carry, _):
            state, before = carry
            new, info = step(state, *problem)
            wrong = info.reverted & jnp.any(new.params != before)
            inside = jnp.all((new.params >= 0) & (new.params <= 1))
            return (new, state.params), (info.value, info.reverted, wrong, ~inside)

        state = state._replace(key=key)
        return jax.lax.scan(body, (state, state.params), length=STEPS)[1]

    keys, state = jax.random.split(jax.random.key(0), SEEDS), init(START, 0)
    batched = jax.jit(jax.vmap(run, in_axes=(None, 0, 0, 0)))
    return functools.partial(batched, state, keys)


@functools.cache
def runs(method, inside):
    """The values of all runs, how many steps they reverted, and how many wrongly."""
    return jax.tree.map(np.asarray, program(method)(*problems(inside)))


@pytest.mark.parametrize("method", METHOD_NAMES)
def test_restores_the_parameters_before_the_step_bit_for_bit(method):
    for inside in (True, False):
        values, reverted, wrong, outside = runs(method, inside)
        assert np.sum(np.any(reverted, axis=1)) >= SEEDS / 5
        assert not wrong.any()
        assert method == "unbounded" or not outside.any()
        assert np.isfinite(values).all()


def cliff(x):
    """A bowl that is infinite beyond a distance of 5 from its minimum."""
    value = jnp.sum((x - 1.0) ** 2)
    return jnp.where(value > 25.0, jnp.inf, value)


def test_a_reverted_step_leaves_the_other_members_of_a_chain_as_they_were():
    optimizer = optax.chain(
        zo.scale_by_radazo(),
        optax.scale(-1.0),
        zo.scale_by_parabolic_step(extra_evaluations=1, initial_step_size=1e3),
    )
    estimator = zo.forward_difference(Hashed(), num_directions=4)
    init, step = zo.solver(cliff, optimizer, estimator)
    step, states, reverted = jit(step), [init(START, 0)], []
    for _ in range(8):
        state, info = step(states[-1])
        states.append(state)
        reverted.append(bool(info.reverted))
    assert any(reverted) and not all(reverted)
    for t in np.flatnonzero(reverted):
        before, after = states[t], states[t + 1]
        chex.assert_trees_all_equal(
            after.optimizer_state[:2], before.optimizer_state[:2]
        )
        chex.assert_trees_all_equal(after.params, states[t - 1].params)


def test_a_bad_last_step_is_reverted_without_a_gradient_that_is_not_finite():
    """Neither by a step, nor at the end of a run."""
    seen = []

    def update(updates, state, params=None, **others):
        del params, others
        finite = jnp.all(jnp.isfinite(updates))
        jax.debug.callback(lambda finite: seen.append(bool(finite)), finite)
        return updates, state

    spy = optax.GradientTransformationExtraArgs(lambda _: optax.EmptyState(), update)
    optimizer = optax.chain(
        spy,
        zo.scale_by_radazo(),
        optax.scale(-1.0),
        zo.scale_by_parabolic_step(extra_evaluations=1, initial_step_size=1e3),
    )
    estimator = zo.forward_difference(Hashed(), num_directions=4)
    for num_steps in (1, 2):
        result = zo.minimize(
            *(cliff, START, optimizer, estimator, num_steps, 0), progress=False
        )
        chex.assert_trees_all_equal(result.params, START)
        jax.effects_barrier()
    # The last step of the first run, and the only one of the second before a revert.
    assert len(seen) >= 4 and all(seen)


def test_other_leaves_of_a_partition_stay_where_they_are():
    """A revert restores the leaves of its own transformation alone."""
    labels = {"a": "found", "b": "set"}
    found = optax.chain(
        optax.scale(-1.0), zo.scale_by_parabolic_step(initial_step_size=1e3)
    )
    optimizer = optax.partition({"found": found, "set": zo.radazo(1e-3)}, labels)
    init, step = zo.solver(
        lambda p: cliff(p["a"]) + jnp.sum((p["b"] - 1) ** 2),
        optimizer,
        zo.forward_difference(Hashed(), num_directions=4),
    )
    first = init({"a": START, "b": jnp.zeros(3)}, 0)
    step = jit(step)
    second, _ = step(first)
    third, info = step(second)
    assert info.reverted
    chex.assert_trees_all_equal(third.params["a"], first.params["a"])
    chex.assert_trees_all_equal(third.params["b"], second.params["b"])
    assert (second.params["b"] != first.params["b"]).all()


def test_a_transformation_under_flatten_restores_the_tree():
    """`optax.flatten` lets a transformation remember the parameters as one vector."""
    found = optax.chain(
        optax.scale(-1.0), zo.scale_by_parabolic_step(initial_step_size=1e3)
    )
    init, step = zo.solver(
        lambda p: cliff(p["a"]) + jnp.sum(p["b"] ** 2),
        optax.flatten(found),
        zo.forward_difference(Hashed(), num_directions=4),
    )
    first = init({"a": START, "b": jnp.full((2, 3), 0.5)}, 0)
    step = jit(step)
    second, _ = step(first)
    third, info = step(second)
    assert info.reverted and (second.params["b"] != first.params["b"]).all()
    chex.assert_trees_all_equal(third.params, first.params)
