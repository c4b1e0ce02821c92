"""Stochastic rounding: exact sums, without bias, at any dtype, to four bits."""

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

import radazo_jax as zo
from tests.helpers.short_runs import called
from tests.helpers.tables import every, jit

DTYPES = {
    "bfloat16": ml_dtypes.bfloat16,
    "float16": np.float16,
    "float32": np.float32,
    "float64": np.float64,
}
SIZE = 20_000


def pairs(dtype):
    """Parameters and updates of all ratios from 2⁻²⁰ to 2⁶, and of both signs."""
    rng = np.random.default_rng(0)
    p = rng.normal(size=SIZE) * 2.0 ** rng.integers(-6, 3, SIZE)
    u = rng.normal(size=SIZE) * 2.0 ** rng.integers(-20, 6, SIZE)
    return p.astype(dtype), u.astype(dtype)


@pytest.mark.parametrize("name", every(DTYPES, "bfloat16", "float32"))
def test_rounds_to_a_neighbor_without_bias(name):
    dtype = DTYPES[name]
    p, u = pairs(dtype)
    with jax.enable_x64(True):
        tx = zo.stochastic_rounding(0)

        @jax.jit
        def step(state, p, u):
            updates, state = tx.update(u, state, p)
            return optax.apply_updates(p, updates), updates, state

        rounded, updates, _ = step(tx.init(p), jnp.asarray(p), jnp.asarray(u))
    assert rounded.dtype == updates.dtype == dtype
    rounded = np.asarray(rounded)
    # A sum of two float64 needs more digits than longdouble has, if one is much larger:
    # by less than 2¹¹ here, beyond which the error is far below a standard error.
    exact = p.astype(np.longdouble) + u.astype(np.longdouble)
    infinite = np.asarray(np.inf, dtype)
    above = np.nextafter(rounded, infinite).astype(np.longdouble)
    below = np.nextafter(rounded, -infinite).astype(np.longdouble)
    smaller = abs(u.astype(np.longdouble)) <= abs(p.astype(np.longdouble))
    assert np.all((below < exact) & (exact < above), where=smaller)
    # Larger updates may have to end at the second number.
    spacing = above - below
    assert np.all(abs(rounded.astype(np.longdouble) - exact) <= spacing)
    for some in (smaller, ~smaller):
        errors = ((rounded.astype(np.longdouble) - exact) / spacing)[some]
        z = errors.mean() / (errors.std() / np.sqrt(errors.size))
        assert abs(z) < 4
    # Rounding does not take the nearest number.
    assert np.mean(rounded != (p + u)) > 0.1


# Parameters, and updates that the narrow dtypes round: up to 3 % for float8_e5m2.
WIDE = [(1.0, -1e-3), (-3.0, 0.0127), (1.0, -0.97), (0.5, 2.3), (1e-2, -5.1)]
NARROW = ["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"]


@pytest.mark.parametrize("name", every(NARROW, "float16", "float8_e4m3fn"))
@pytest.mark.parametrize("incoming", every(["float32", "float64"], "float32"))
def test_wide_updates_keep_their_mean_in_narrow_parameters(name, incoming):
    dtype, size = np.dtype(getattr(ml_dtypes, name, None) or name), 2**17
    p = np.repeat(np.array([p for p, _ in WIDE]).astype(dtype), size)
    u = np.repeat(np.array([u for _, u in WIDE], incoming), size)
    tx = zo.stochastic_rounding(0)
    with jax.enable_x64(incoming == "float64"):
        updates, _ = jax.jit(tx.update)(jnp.asarray(u), tx.init(p), jnp.asarray(p))
        rounded = np.asarray(optax.apply_updates(jnp.asarray(p), updates))
    assert updates.dtype == rounded.dtype == dtype
    moved = (rounded.astype(np.float64) - p.astype(np.float64)).reshape(-1, size)
    for each, (_, wanted) in zip(moved, WIDE, strict=True):
        z = (each.mean() - wanted) / (each.std() / np.sqrt(size))
        assert abs(z) < 4.5
        assert len(np.unique(each)) <= 4


def test_each_update_draws_by_position_other_numbers():
    p, u = (jnp.asarray(x) for x in pairs(ml_dtypes.bfloat16))
    tx = zo.stochastic_rounding(0)
    update = jit(tx.update)
    first, state = update(u, tx.init(p), p)
    again, _ = update(u, tx.init(p), p)
    second, _ = update(u, state, p)
    chex.assert_trees_all_equal(first, again)
    assert np.any(first != second) and int(state.count) == 1
    # Of the same coordinates in two leaves.
    cut = [x.reshape(2, -1) for x in (p, u)]
    p2, u2 = ({"a": x[0], "b": x[1]} for x in cut)
    parts, _ = update(u2, tx.init(p2), p2)
    joined = np.concatenate([parts["a"], parts["b"]])
    np.testing.assert_array_equal(joined, first)


def test_bad_arguments_are_named():
    tx = zo.stochastic_rounding(0)
    with pytest.raises(ValueError, match="params must be passed to update"):
        tx.update(jnp.ones(2), tx.init(jnp.ones(2)))
    whole = jnp.ones(2, jnp.int32)
    with pytest.raises(TypeError, match="real floating-point arrays; got int32"):
        tx.update(whole, tx.init(whole), whole)


def test_what_is_not_finite_stays_so():
    tx = zo.stochastic_rounding(0)
    p = jnp.array([jnp.inf, jnp.nan, 1.0, 1.0], jnp.bfloat16)
    u = jnp.array([1.0, 1.0, -jnp.inf, jnp.nan], jnp.bfloat16)
    updates, _ = jit(tx.update)(u, tx.init(p), p)
    rounded = optax.apply_updates(p, updates)
    np.testing.assert_array_equal(
        *(np.asarray(x, np.float32) for x in (rounded, p + u))
    )


# --- Four bits ------------------------------------------------------------------


FLOAT4 = jnp.float4_e2m1fn
# All sixteen numbers of the format, by the OCP specification of microscaling formats.
NUMBERS = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
NUMBERS = np.array(sorted({*NUMBERS, *(-x for x in NUMBERS)}), np.float32)


@pytest.mark.slow
def test_a_run_on_four_bits_is_resumed_from_its_journal(tmp_path):
    start = {"a": np.ones(4, ml_dtypes.float4_e2m1fn), "b": np.ones(3, np.float32)}
    method = (
        zo.zo_sgd(0.1),
        zo.central_difference(zo.rademacher(), smoothing=1.0, num_directions=2),
    )

    def fun(p):
        return float(np.sum(p["b"] ** 2))

    def run(steps, **kwargs):
        return called(fun, start, *method, num_steps=steps, progress=False, **kwargs)

    run(3, journal=tmp_path / "run")
    resumed = run(6, journal=tmp_path / "run").params
    expected = run(6).params
    for name in start:
        np.testing.assert_array_equal(
            np.asarray(resumed[name], np.float32),
            np.asarray(expected[name], np.float32),
        )


# Sums of two numbers of the format that lie between two of them.
@pytest.mark.slow
@pytest.mark.parametrize(("p", "u"), [(4, 1.5), (2, 0.5), (-3, -0.5), (-6, 1)])
def test_the_mean_of_rounded_sums_is_the_sum(p, u):
    below = NUMBERS[p + u > NUMBERS].max()
    above = NUMBERS[p + u < NUMBERS].min()
    params = jnp.full(20_000, p, FLOAT4)
    optimizer = zo.transforms.stochastic_rounding(0)
    updates, _ = optimizer.update(
        jnp.full(20_000, u, FLOAT4), optimizer.init(params), params
    )
    after = np.asarray(optax.apply_updates(params, updates), np.float32)
    assert set(np.unique(after)) == {below, above}
    deviation = (above - below) / 2 / np.sqrt(20_000)
    assert abs(after.mean() - (p + u)) < 5 * deviation


@pytest.mark.slow
def test_sums_beyond_the_largest_number_stay_there():
    params = jnp.array([6, -6, 4], FLOAT4)
    optimizer = zo.transforms.stochastic_rounding(0)
    updates, _ = optimizer.update(
        jnp.array([1, -1, 4], FLOAT4), optimizer.init(params), params
    )
    after = optax.apply_updates(params, updates)
    np.testing.assert_array_equal(np.asarray(after, np.float32), [6, -6, 6])
