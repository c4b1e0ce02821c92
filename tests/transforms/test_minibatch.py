"""The step size that is measured on the minibatches of the steps that follow."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import radazo_jax as zo
from tests.helpers.tables import jit

DIMENSION = 40
CURVATURES = np.linspace(0.5, 3, DIMENSION).astype(np.float32)


def loss(x, center):
    return jnp.sum(CURVATURES * (x - 1 - center) ** 2) / 2


def chain(*directions, **options):
    step = zo.scale_by_minibatch_step(**options)
    return optax.chain(*directions, optax.scale(-1.0), step)


def test_measures_on_the_loss_of_the_next_step():
    """After a step along -x, another curvature moves log η by a closed form."""
    tx = zo.scale_by_minibatch_step(initial_step_size=0.5)
    x = jnp.ones(4)
    state = tx.init(x)
    first, state = tx.update(-x, state, x, value=2.0, value_fn=jnp.sum)
    np.testing.assert_allclose(first, -0.5)

    def following(x):
        return 3 * jnp.sum(x**2)

    x = x + first
    _, state = tx.update(-x, state, x, value=following(x), value_fn=following)
    # Along -½ from 1, of 3 |x|² in four dimensions: slope 12, curvature 6.
    fall, rise = 12.0, 6.0
    np.testing.assert_allclose(
        state.step_size, 0.5 * np.exp((fall - rise) / np.hypot(fall, rise)), rtol=1e-5
    )
    np.testing.assert_allclose(state.power, 0.1 * (fall**2 + rise**2), rtol=1e-5)


# The minima of the losses of the steps.
CENTERS = 0.3 * np.sin(1.7 * np.arange(100)[:, None] + np.arange(DIMENSION))


def noisy(x, center):
    """A loss that is another in each step, and its gradient."""
    curvatures, away = CURVATURES.astype(np.float64), x - center
    return (curvatures * away**2).sum(), 2 * curvatures * away


def by_hand(x, size):
    """The sizes of steps by the rule of the docstring, in float64 NumPy."""
    moved, power, searching, sizes = None, 0.0, True, []
    for t, center in enumerate(CENTERS):
        early = t < 40
        value, gradient = noisy(x, center)
        back = False
        if moved is not None and (early or t % 8 == 0):
            before, behind = (noisy(x - n * moved, center)[0] for n in (1, 2))
            s, h = (behind - value) / 2, behind + value - 2 * before
            power = 0.9 * power + 0.1 * (s**2 + h**2)
            back = value - before > (0.1 if early else 0.5) * before
            error = (s - h) / np.sqrt(max(power, s**2 + h**2))
            size *= 0.25 if back else np.exp((1.0 if searching else 0.2) * error)
            searching &= h <= abs(s) and not back
            x, moved = (x - moved if back else x), None
        if back:
            power = 0.0
        else:
            step = -size * gradient
            x, moved = x + step, step if moved is None else moved + step
        sizes.append(size)
    return x, sizes


@pytest.mark.parametrize("size", [1e-4, 10.0])
def test_follows_its_rule(size):
    """The first 40 steps measured each, then eight together; some taken back."""
    start = 5 * np.ones(DIMENSION)
    expected, sizes = by_hand(start, size)
    with jax.enable_x64(True):
        tx, x, found = zo.scale_by_minibatch_step(size), jnp.asarray(start), []

        @jit
        def step(x, state, center):
            value, gradient = noisy(x, center)
            updates, state = tx.update(
                -gradient, state, x, value=value, value_fn=lambda x: noisy(x, center)[0]
            )
            return x + updates, state

        state = tx.init(x)
        for center in CENTERS:
            x, state = step(x, state, center)
            found.append(state.step_size)
        np.testing.assert_allclose(found, sizes, rtol=1e-9)
        np.testing.assert_allclose(x, expected, rtol=1e-9)
    assert len(set(sizes[40:])) == 8


def test_evaluates_twice_at_first_and_every_eighth_step_then():
    tx, calls = zo.scale_by_minibatch_step(), []

    def fun(x):
        jax.debug.callback(lambda: calls.append(None))
        return jnp.sum(x)

    @jit
    def step(x, state):
        down = -jnp.ones_like(x)
        updates, state = tx.update(down, state, x, value=jnp.sum(x), value_fn=fun)
        return optax.apply_updates(x, updates), state

    x, counts = jnp.ones(3), []
    state = tx.init(x)
    for _ in range(56):
        x, state = step(x, state)
        jax.effects_barrier()
        counts.append(len(calls))
    # Nothing is there to be measured in the first.
    assert counts == [0, *range(2, 80, 2), *[80] * 8, *[82] * 8]


def test_all_steps_since_a_measurement_are_taken_back():
    tx, x = zo.scale_by_minibatch_step(0.1), jnp.ones(4)
    state = tx.init(x)._replace(count=jnp.array(41))
    first, state = tx.update(-x, state, x, value=1.0, value_fn=jnp.sum)
    second, state = tx.update(-x, state, x + first, value=1.0, value_fn=jnp.sum)
    there = x + first + second
    back, state = tx.update(-x, state, there, value=jnp.inf, value_fn=jnp.sum)
    np.testing.assert_allclose(back, -(first + second), rtol=1e-6)
    assert not state.pending
    np.testing.assert_allclose(state.step_size, 0.1 / 4)


def test_a_step_that_rounding_hides_becomes_longer():
    tx, x = zo.scale_by_minibatch_step(1e-9), jnp.ones(4)
    state = tx.init(x)
    step, state = tx.update(-x, state, x, value=4.0, value_fn=jnp.sum)
    _, state = tx.update(-x, state, x + step, value=4.0, value_fn=jnp.sum)
    np.testing.assert_allclose(state.step_size, 1e-9 * np.e, rtol=1e-6)


def test_what_is_missing_is_named():
    tx, x = zo.scale_by_minibatch_step(), jnp.ones(2)
    with pytest.raises(ValueError, match=r"^value_fn must be passed to update"):
        tx.update(x, tx.init(x), x, value=1.0)
    with pytest.raises(ValueError, match="initial_step_size must be"):
        zo.scale_by_minibatch_step(0.0)
