"""Runs of a search by its contract alone, along given directions."""

import jax
import jax.numpy as jnp
import numpy as np

import radazo_jax as zo
from radazo_jax.estimators import Estimate
from radazo_jax.search import Descent
from tests.helpers.tables import jit


def descent(direction, value, slope, **others):
    """A direction, and an estimate of which a search knows value and slope.

    Args:
      direction: The direction, an array.
      value: The loss at the parameters.
      slope: The negative derivative of the loss along the direction.
      others: Fields of `Descent`, or of its estimate.
    """
    of_descent = {
        "gradient": -direction,
        "value": jnp.asarray(value, jnp.result_type(direction)),
        "project": lambda params: params,
        "loss": None,
    }
    of_descent |= {k: others.pop(k) for k in list(others) if k in of_descent}
    dtype = jnp.result_type(float)
    value, slope = (jnp.asarray(x, dtype) for x in (value, slope))
    estimate = Estimate(value, slope, jnp.int32(2), None, **others)
    return Descent(direction, estimate=estimate, **of_descent)


def step(search, state, params, found):
    """Judges the latest step, and moves along a direction or goes back.

    Returns:
      The parameters, the state, and whether the run might stay.
    """
    accepted, state = search.judge(state, params, found.value)

    def move(state):
        return search.move(state, params, found)

    def back(state):
        return search.back(state, params, found.project)

    params, state = jax.lax.cond(accepted, move, back, state)
    return params, state, accepted


def descend(fun, x, search, num_steps, direction=None):
    """Steps along the exact gradient, or another direction of descent.

    Returns:
      The parameters before each step and after the last one, the state, and the value
      at the start of each step.
    """
    direction = direction or (lambda x, t: -jax.grad(fun)(x))

    def body(carry, t):
        x, state = carry
        value, gradient = jax.value_and_grad(fun)(x)
        found = descent(
            direction(x, t), value, jnp.sum(gradient**2), gradient=gradient, loss=fun
        )
        after, state, _ = step(search, state, x, found)
        return (after, state), (value, x)

    times = jnp.arange(num_steps)
    run = jit(lambda x: jax.lax.scan(body, (x, search.init(x)), times))
    (x, state), (values, xs) = run(jnp.asarray(x))
    return np.concatenate([xs, x[None]]), state, np.asarray(values)


REJECTED = zo.runs.Outcome.REJECTED
TAKEN = zo.runs.Outcome.TAKEN
