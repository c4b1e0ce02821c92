"""Replayed moments: the windowed sum, its squares, and updates in place."""

import warnings

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import radazo_jax as zo
from radazo_jax._src.directions import sums
from radazo_jax.estimators import Draw, candidates, sample_points
from tests.helpers.compare import Hashed
from tests.helpers.tables import DISTRIBUTIONS, KINDS, each_distribution, jit

# A matrix, a stack of matrices, a vector, a number.
PARAMS = {
    "w": jnp.ones((6, 5)),
    "stack": jnp.ones((3, 4, 2)),
    "b": jnp.ones(5),
    "s": jnp.ones(()),
}
AXES = {"w": (0, 1), "stack": (1, 2), "b": None, "s": None}
WINDOW, STEPS, NUM = 4, 6, 3
B1, B2, EPS_ROOT = 0.4, 0.9, 1e-3
ESTIMATOR = zo.forward_difference(Hashed(), NUM, smoothing=0.25)
# Here an element is a float32 that is multiplied by its weight. The other distributions
# round a product of floats before.
EXACT = ("gaussian", "rademacher", "coordinate", "hashed")


def loss(params):
    value = sum(jnp.sum(jnp.tanh(p) ** 2) for p in jax.tree.leaves(params))
    # Two programs may round the same loss in two ways.
    return jnp.round(value * 64) / 64


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks that cut matrices, stacks and vectors, with a remainder each."""
    monkeypatch.setattr(sums, "MAX_ELEMENTS", 4)
    monkeypatch.setattr(sums, "_TOGETHER", 40)


def drawn(distribution, t, params):
    """The combination of a step, and its directions as arrays."""
    points = sample_points(distribution, Draw.once(t), NUM, [1.0], params)
    # The directions of a run, though each step here is the first of its own.
    coefficients = jnp.cos(jnp.arange(NUM, dtype=jnp.float64) + t.astype(jnp.float64))
    us = candidates(points, jax.tree.map(jnp.zeros_like, params))
    return points.combine(coefficients), us


def reference(us, coefficients, bias_correction):
    """The updates and the second moments of one leaf, by their formulas in float64."""
    gs = [np.tensordot(c, u, 1) for c, u in zip(coefficients, us[0], strict=True)]
    axes, updates, rows, columns, whole = us[1], [], 0.0, 0.0, 0.0
    for t in range(1, len(gs) + 1):
        latest = gs[max(t - WINDOW, 0) : t][::-1]
        m = (1 - B1) * sum(B1**j * g for j, g in enumerate(latest))
        if bias_correction:
            m = m / (1 - B1 ** len(latest))
        square = m**2
        if axes is None:
            whole = v = B2 * whole + (1 - B2) * square
        else:
            row, column = axes
            rows = B2 * rows + (1 - B2) * square.mean(column, keepdims=True)
            columns = B2 * columns + (1 - B2) * square.mean(row, keepdims=True)
            mean = rows.mean(row, keepdims=True)
            v = rows * columns / np.where(mean > 0, mean, 1)
        v = v / (1 - B2**t) if bias_correction else v
        updates.append(m / np.sqrt(v + EPS_ROOT))
    return updates, (whole if axes is None else (rows, columns))


def assert_is_the_formula(distribution, bias_correction):
    law = (DISTRIBUTIONS | {"hashed": Hashed()})[distribution]
    tx = zo.scale_by_replayed_radazo(
        WINDOW, B1, B2, EPS_ROOT, bias_correction=bias_correction
    )
    with jax.enable_x64(True):
        params = jax.tree.map(lambda p: p.astype(jnp.float64), PARAMS)

        def step(state, t):
            combination, us = drawn(law, t, params)
            updates, state = tx.update(None, state, params, combination=combination)
            return state, (updates, us, combination.coefficients)

        times = jnp.arange(STEPS, dtype=jnp.uint32)
        # Compiled as users do: what compilers fuse is part of the question.
        run = jax.jit(lambda state: jax.lax.scan(step, state, times))
        state, (updates, us, coefficients) = run(tx.init(params))
    # An element of another distribution is a product rounded to float32, which is
    # within 2⁻²⁴ of the one here, of each of 12 terms that may cancel.
    rtol = 1e-12 if distribution in EXACT else 2e-6
    for leaf, axes in AXES.items():
        each = (np.asarray(us[leaf], np.float64), axes)
        expected, nu = reference(each, np.asarray(coefficients), bias_correction)
        size = np.max(np.abs(expected))
        np.testing.assert_allclose(updates[leaf], expected, rtol=0, atol=rtol * size)
        kept = state.nu[leaf]
        kept = kept if axes is None else tuple(kept)
        for got, wanted in zip(jax.tree.leaves(kept), jax.tree.leaves(nu), strict=True):
            assert got.dtype == np.float64
            np.testing.assert_allclose(got, wanted, rtol=4 * rtol)


@pytest.mark.parametrize(
    ("distribution", "bias_correction"),
    [("hashed", False), *each_distribution((False, True), fast=(), among=KINDS)],
)
def test_is_the_windowed_sum_and_the_factored_moment(distribution, bias_correction):
    assert_is_the_formula(distribution, bias_correction)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("distribution", "bias_correction"), [("sphere", False), ("low_rank", True)]
)
def test_is_the_same_block_by_block(distribution, bias_correction, small_blocks):
    assert_is_the_formula(distribution, bias_correction)


# --- Chains -----------------------------------------------------------------------


def both_chains(*others):
    first = zo.scale_by_replayed_radazo(WINDOW, B1)
    return optax.chain(first, *others), zo.chain_in_place(first, *others)


def states_after(optimizer, params, steps=4):
    init, step = zo.solver(loss, optimizer, ESTIMATOR)
    run = jit(lambda state: jax.lax.scan(lambda s, _: step(s), state, length=steps)[0])
    return run(init(params, 0))


@pytest.mark.slow
def test_a_chain_in_place_is_a_chain(small_blocks):
    """The chain has a schedule, weight decay, and rounding by position."""
    others = (
        optax.add_decayed_weights(0.5),
        optax.scale_by_learning_rate(optax.linear_schedule(0.25, 0.0, 8)),
        zo.stochastic_rounding(1),
    )
    params = {"w": PARAMS["w"].astype(jnp.bfloat16)}
    as_tree, in_place = (states_after(tx, params) for tx in both_chains(*others))
    # Of equal updates; a fused program may round a product once less.
    chex.assert_trees_all_close(
        *(jax.tree.map(jnp.float32, s.params) for s in (as_tree, in_place)), rtol=2**-7
    )
    same = [
        np.mean(np.asarray(a) == np.asarray(b))
        for a, b in zip(
            jax.tree.leaves(as_tree.params),
            jax.tree.leaves(in_place.params),
            strict=True,
        )
    ]
    assert min(same) > 0.8
    counts = [optax.tree.get_all_with_path(s, "count") for s in (as_tree, in_place)]
    chex.assert_trees_all_equal(*counts)


@pytest.mark.slow
def test_the_alias_is_the_chain():
    first = zo.scale_by_replayed_radazo()
    assert zo.chain_in_place(first) is first
    chained = zo.chain_in_place(
        zo.scale_by_replayed_radazo(WINDOW, B1), optax.scale_by_learning_rate(0.1)
    )
    alias = zo.radazo(0.1, B1, moments="replayed", window=WINDOW)
    chex.assert_trees_all_equal(
        states_after(chained, PARAMS), states_after(alias, PARAMS)
    )


@pytest.mark.slow
def test_only_some_leaves_are_replayed():
    labels = {"w": "replayed", "stack": "replayed", "b": "set", "s": "set"}
    replayed = zo.radazo(0.1, moments="replayed")
    optimizer = optax.partition(
        {"replayed": replayed, "set": optax.set_to_zero()}, labels
    )
    some, every = (states_after(tx, PARAMS, 1) for tx in (optimizer, replayed))
    for leaf, label in labels.items():
        expected = every.params if label == "replayed" else PARAMS
        np.testing.assert_allclose(some.params[leaf], expected[leaf], rtol=1e-6)


@pytest.mark.slow
def test_a_skipped_step_does_not_enter_the_window():
    optimizer = zo.radazo(0.1, moments="replayed")
    init, step = zo.solver(
        lambda params, bad: jnp.where(bad, jnp.nan, loss(params)), optimizer, ESTIMATOR
    )
    step, state = jax.jit(step), init(PARAMS, 0)
    state, _ = step(state, False)
    after, info = step(state, True)
    assert info.skipped
    chex.assert_trees_all_equal(after.optimizer_state, state.optimizer_state)
    chex.assert_trees_all_equal(after.params, state.params)


# --- Size -------------------------------------------------------------------------


def test_no_tree_of_the_size_of_the_parameters_is_held(monkeypatch):
    """The update holds a few of 64 layers at a time."""
    monkeypatch.setattr(sums, "MAX_ELEMENTS", 2**12)
    params = jax.ShapeDtypeStruct((64, 64, 64), jnp.float32)
    optimizer = zo.chain_in_place(
        zo.radazo(1e-3, moments="replayed"), zo.stochastic_rounding(1)
    )
    key = jax.eval_shape(lambda: jax.random.key(0))
    state = jax.eval_shape(optimizer.init, params)

    def step(params, state, key):
        points = sample_points(zo.low_rank(), Draw.once(key), 1, [1.0], params)
        combination = points.combine(jnp.ones(1))
        return optimizer.update.apply(
            lambda u, p, at: u, state, params, combination=combination
        )

    memory = (
        jax.jit(step, donate_argnums=0).lower(params, state, key).compile()
    ).memory_analysis()
    layer = 4 * 64 * 64
    assert memory.alias_size_in_bytes >= 64 * layer
    assert memory.temp_size_in_bytes < 24 * layer


# --- Arguments --------------------------------------------------------------------


def test_bad_arguments_are_named():
    cases = [
        (lambda: zo.scale_by_replayed_radazo(1), "window must be an int ≥ 2; got 1."),
        (lambda: zo.radazo(1e-3, moments="replayed", window=1), "window must be"),
        (lambda: zo.radazo(1e-3, moments="lost"), "moments must be 'stored' or"),
        (
            lambda: zo.radazo(1e-3, mu_dtype="bfloat16", moments="replayed"),
            "mu_dtype must be left out with replayed moments",
        ),
        (
            lambda: zo.chain_in_place(
                zo.scale_by_replayed_radazo(), optax.trace(0.9)
            ).init(PARAMS),
            "others must work element by element.*optax.chain",
        ),
    ]
    for call, message in cases:
        with pytest.raises(ValueError, match=message) as caught:
            call()
        assert "\n" not in str(caught.value)
    with pytest.raises(TypeError, match="first must update in place"):
        zo.chain_in_place(zo.zo_sgd(1e-3))


def test_a_short_window_is_named_with_the_dropped_weight():
    # 0.9²² is 9.8 %, and 0.9²⁸ is 5.2 %; 0.9²⁹ is 4.7 %.
    with pytest.warns(UserWarning, match=r"window=22 drops 10% .*window=29"):
        zo.scale_by_replayed_radazo(window=22)
    with pytest.warns(UserWarning, match=r"window=28 drops 5%"):
        zo.radazo(1e-3, moments="replayed", window=28)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        zo.radazo(1e-3, moments="replayed", window=29)


def test_an_update_without_a_combination_is_explained():
    optimizer = zo.radazo(1e-3, moments="replayed")
    state = optimizer.init(PARAMS)
    with pytest.raises(
        TypeError, match=r"combination must be passed .* solver, train and "
    ) as caught:
        optimizer.update(PARAMS, state, PARAMS)
    assert "\n" not in str(caught.value)
