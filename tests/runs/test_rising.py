"""The warning of a run whose loss rises."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import radazo_jax as zo
from radazo_jax._src.runs.loop import Rising

RNG = np.random.default_rng(0)
NOISE = RNG.normal(size=1000)
STEPS = np.arange(1000)


@pytest.mark.parametrize(
    "losses, warns",
    [
        (2 + STEPS / 100, True),
        (2 + STEPS / 100 + NOISE / 4, True),
        (2 - STEPS / 1000 + NOISE, False),
        (2 + NOISE, False),
        (np.where(STEPS < 2, 2, 5 + NOISE / 4), True),
        (np.where(STEPS < 2, 2, 2.5 + NOISE / 4), False),
        (np.full(1000, 2.0), False),
        (np.where(STEPS < 500, 5 - STEPS / 200, 2.5 + (STEPS - 500) / 1000), False),
        (np.where(STEPS < 900, 2 + STEPS / 100, np.nan), True),
        (np.where(STEPS % 20 == 0, np.nan, 2 + STEPS / 100), False),
    ],
)
@pytest.mark.parametrize("chunk", [1, 64])
def test_a_rise_is_told_from_noise(losses, warns, chunk):
    told, rising = [], Rising(len(losses), lambda: "Try less.")

    def see():
        for begin in range(0, len(losses), chunk):
            rising.see(losses[begin : begin + chunk])

    if not warns:
        return see()
    with pytest.warns(UserWarning, match=r"The loss has risen from .* Try less\.") as w:
        see()
    told.extend(w)
    assert len(told) == 1


@pytest.mark.parametrize("num_steps", [None, 199])
def test_short_runs_are_not_judged(num_steps):
    Rising(num_steps, lambda: "").see(2 + STEPS / 100)


def loss(params, batch):
    return 1 + jnp.mean((params - batch) ** 2)


def jittery(params, batch):
    """Short differences show the sine alone, and steps are a random walk."""
    return loss(params, batch) + jnp.sin(3e3 * jnp.sum(params)) / 10


def sample(key):
    return jax.random.normal(key, (16,)) / 4


def run(fun, **options):
    return zo.train(
        fun, jnp.ones(16), sample=sample, num_steps=400, progress=False, **options
    )


@pytest.mark.slow
def test_a_run_that_rises_is_told_the_measured_rate_and_smoothing():
    found = zo.find_learning_rate(jittery, jnp.ones(16), 400, sample=sample)
    text = (
        "The loss has risen .* Measured at the start: radazo"
        rf"\({found.learning_rate:.2g}\) with smoothing={found.smoothing:.2g}"
    )
    with pytest.warns(UserWarning, match=text) as told:
        run(jittery, optimizer=zo.radazo(0.05), estimator=zo.forward_difference())
    assert len(told) == 1 and told[0].filename == __file__


@pytest.mark.slow
def test_a_run_at_the_measured_rate_is_not_told():
    assert np.isfinite(run(loss).values).all()
