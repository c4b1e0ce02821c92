"""Update rules of papers, transcribed in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import radazo_jax as zo
from examples import evolution_strategies as presets
from tests.helpers.tables import jit


class Preset:
    """Two steps of an optimizer and an estimator, with the noise that they drew."""

    def __init__(self, preset, params, losses):
        optimizer, estimator = preset

        @jit
        def step(key, values, params, state):
            # Each is a run of one step, with a product for low_rank to find.
            draw = zo.estimators.Draw.once(key)._replace(fun=lambda w: w @ w.T)
            points, _ = estimator.points(draw, params, ())
            noise = [
                points.combine(jnp.eye(len(points.scales))[k]).materialize(params)
                for k in range(len(points.scales))
            ]
            estimate, _ = estimator.reduce(points, points.split(values), params, ())
            gradient = estimate.gradient.materialize(params)
            updates, state = optimizer.update(gradient, state, params)
            return jnp.stack(noise), optax.apply_updates(params, updates), state

        self.params, self.noise = [params], []
        state = optimizer.init(params)
        for number, values in enumerate(losses):
            given = jnp.asarray(values, jnp.float32)
            noise, params, state = step(jax.random.key(number), given, params, state)
            self.noise.append(np.asarray(noise, np.float64))
            self.params.append(params)


WEIGHTS = jnp.asarray(np.random.default_rng(1).normal(size=(6, 5)), jnp.float32)


REWARDS = np.random.default_rng(2).normal(size=(2, 8, 4))


def assert_updates(run, expected):
    """Relative to the update: the parameters would hide it."""
    for before, after, update in zip(
        run.params[:-1], run.params[1:], expected, strict=True
    ):
        # θ is rounded to float32 after each step.
        found = np.asarray(after, np.float64) - np.asarray(before, np.float64)
        rounding = np.spacing(np.abs(np.asarray(after))).max()
        atol = 1e-6 * np.abs(update).max() + rounding
        np.testing.assert_allclose(found, update, rtol=0, atol=atol)


@pytest.mark.slow
@pytest.mark.parametrize("grouped", [True, False])
def test_eggroll(grouped):
    sigma, rate = 0.5, 3.0
    preset = presets.eggroll(rate, 8, sigma, rank=2, grouped=grouped)
    run = Preset(preset, WEIGHTS, -REWARDS)
    expected = []
    for noise, rewards in zip(run.noise, REWARDS, strict=True):
        assert all(np.linalg.matrix_rank(n, tol=1e-4) == 2 for n in noise)
        mean = rewards.mean(0) if grouped else rewards.mean()
        scores = (rewards - mean) / np.sqrt(rewards.var() + 1e-5)
        signed = np.repeat(noise, 2, 0) * np.tile([1, -1], 4)[:, None, None]
        member = scores.mean(1)  # Members are threads with the same noise.
        gradient = -np.sqrt(8) * np.mean(member[:, None, None] * sigma * signed, 0)
        expected.append(-rate * gradient)
    assert_updates(run, expected)


@pytest.mark.slow
def test_qes():
    rewards = REWARDS[:, :, 0]
    codes = jnp.asarray(np.random.default_rng(3).integers(0, 16, (6, 5)), jnp.float32)
    run = Preset(presets.qes(8, 0.5, 0.4, bits=4, decay=0.9), codes, -rewards)
    residual, at = np.zeros((6, 5)), np.asarray(codes, np.float64)
    for noise, reward, after in zip(run.noise, rewards, run.params[1:], strict=True):
        ranks = np.argsort(np.argsort(-reward))
        scores = 1 - 2 * ranks / 7
        # Their perturbation is σ times this noise, and their estimate is over σ.
        wanted = 0.4 * np.einsum("i,ijk->jk", scores, noise) + 0.9 * residual
        step = np.round(wanted)
        step[(at + step < 0) | (at + step > 15)] = 0
        residual, at = np.clip(wanted - step, -1.5, 1.5), at + step
        np.testing.assert_array_equal(after, at)
    assert np.any(at != np.asarray(codes))
