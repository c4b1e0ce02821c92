"""Shapings against their formulas in float64 NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

import radazo_jax as zo
from tests.helpers.tables import jit

RANDOM = np.random.default_rng(0)
# Losses of 8 members on 3 prompts: some equal, some that failed.
VALUES = RANDOM.normal(size=(8, 3)).round(1) * [1.0, 10.0, 1.0]
VALUES[2, 0] = VALUES[5, 0]
FAILED = VALUES.copy()
FAILED[1, 0], FAILED[6, 1], FAILED[7] = np.nan, np.inf, np.nan
TABLES = {"all": VALUES, "failed": FAILED, "members": VALUES[:, 0]}


def prompts(values):
    """Pairs of a prompt's values and which of them are finite."""
    for column in values.reshape(len(values), -1).T:
        yield column, np.isfinite(column)


def z_score(values, eps=0.0, eps_root=1e-5):
    finite = values[np.isfinite(values)]
    scale = np.sqrt(np.var(finite) + eps_root) + eps
    return np.where(np.isfinite(values), (values - finite.mean()) / scale, 0)


def by_group(values):
    scale = np.sqrt(np.var(values[np.isfinite(values)]) + 1e-5)
    columns = [
        np.where(finite, (column - column[finite].mean()) / scale, 0)
        for column, finite in prompts(values)
    ]
    return np.stack(columns, 1).reshape(values.shape)


def centered_ranks(values):
    columns = []
    for column, finite in prompts(values):
        weights = np.zeros(len(column))
        ranks = scipy.stats.rankdata(column[finite]) - 1
        weights[finite] = ranks / (finite.sum() - 1) - 0.5
        columns.append(weights)
    return np.stack(columns, 1).reshape(values.shape)


def pair_signs(values, threshold=0.0):
    weights = np.zeros(values.shape)
    for i in range(0, len(values), 2):
        with np.errstate(invalid="ignore"):
            difference = values[i] - values[i + 1]
        known = np.isfinite(difference) & (np.abs(difference) > threshold)
        weights[i] = np.where(known, np.sign(np.nan_to_num(difference)), 0)
        weights[i + 1] = -weights[i]
    return weights


def best_of(values, k=3):
    columns = []
    for column, finite in prompts(values):
        weights = np.zeros(len(column))
        kth = np.sort(column[finite])[k - 1]
        below, at = finite & (column < kth), finite & (column == kth)
        weights[below] = 1
        weights[at] = (k - below.sum()) / at.sum()
        columns.append(-weights * finite.sum() / k)
    return np.stack(columns, 1).reshape(values.shape)


FORMULAS = {
    "z_score": (zo.shaping.z_score(), z_score),
    "z_score(1e-8, 0)": (
        zo.shaping.z_score(1e-8, 0.0),
        lambda values: z_score(values, 1e-8, 0.0),
    ),
    "by_group": (zo.shaping.by_group(), by_group),
    "centered_ranks": (zo.shaping.centered_ranks(), centered_ranks),
    "pair_signs": (zo.shaping.pair_signs(), pair_signs),
    "pair_signs(0.5)": (
        zo.shaping.pair_signs(0.5),
        lambda values: pair_signs(values, 0.5),
    ),
    "best_of": (zo.shaping.best_of(3), best_of),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_the_formula(name):
    shaping, formula = FORMULAS[name]
    with jax.enable_x64(True):
        found = jit(lambda tables: jax.tree.map(shaping, tables))(
            jax.tree.map(jnp.asarray, TABLES)
        )
    for case, values in TABLES.items():
        np.testing.assert_allclose(
            found[case], formula(values), rtol=0, atol=1e-12, err_msg=case
        )


def test_without_a_spread_all_weights_are_zero():
    """All equal, as rewards of 0 are; one that did not fail; none."""
    tables = {
        "equal": jnp.full(4, 2.0),
        "one": jnp.where(jnp.arange(4) == 1, 2.0, jnp.nan),
        "none": jnp.full(4, jnp.nan),
    }

    @jit
    def weights(tables):
        shapings = {name: shaping for name, (shaping, _) in FORMULAS.items()}
        return {name: jax.tree.map(f, tables) for name, f in shapings.items()}

    found = weights(tables)
    # It has weights for the members that there are.
    of_best = found.pop("best_of")
    np.testing.assert_array_equal(of_best["one"], [0, -1, 0, 0])
    found["best_of"] = {"none": of_best["none"]}
    for name, each in found.items():
        for case, values in each.items():
            np.testing.assert_array_equal(values, 0, err_msg=f"{name}, {case}")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: zo.shaping.best_of(9)(jnp.zeros(8)), "number of members, 8; got 9"),
        (lambda: zo.shaping.best_of(0), "k must be an int ≥ 1; got 0"),
        (lambda: zo.shaping.pair_signs()(jnp.zeros(7)), "must have an even number of"),
        (lambda: zo.shaping.pair_signs(-1.0), "threshold must be a finite number ≥ 0"),
        (lambda: zo.shaping.z_score(eps_root=-1e-5), "eps_root must be a finite num"),
        (lambda: zo.shaping.by_group()(jnp.zeros((1, 4))), "at least two members to"),
        (lambda: zo.shaping.z_score()(jnp.zeros((2, 2, 2))), r"\[members, prompts\]"),
    ],
)
def test_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call()
