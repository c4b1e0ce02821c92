"""The paper's relatives by name, and steps whose values come from float64 NumPy."""

import jax
import jax.numpy as jnp
import numpy as np

import radazo_jax as zo
from tests.helpers.compare import Hashed
from tests.helpers.tables import jit

SLOPES = np.array([0.5, -1.0, 2.0, 1.5, -0.25, 1.0])
CURVATURES = np.array([1.0, 3.0, 0.5, 2.0, 4.0, 1.0])
PARAMS = {"a": jnp.array([[1.0, -2.0], [0.5, 0.25]]), "b": jnp.array([3.0, -1.0])}
DIMENSION = 6

# Each with few directions: arguments, by the name of the function.
MAKERS = {
    "residual_feedback": {"num_directions": 2},
    "spsa": {},
    "evolution_strategy": {"population_size": 6},
    "variance_reduced": {"num_directions": 2, "period": 3, "anchor_steps": 1},
    "coordinate_wise": {"num_directions": 3},
    "prior_guided": {"num_directions": 2, "decay": 0.5},
    "prior_guided(prior)": {"num_directions": 2, "prior": lambda x: moved(x, 1.0)},
    "query_reuse": {"num_directions": 2, "memory_size": 3},
    "linear_interpolation": {"num_directions": 2, "radius": 0.1},
    "gaussian_process": {"num_directions": 2, "memory_size": 8},
    "majority_vote": {"num_directions": 3},
    "normalized_batch": {"num_directions": 3},
    "hessian_informed": {},
    "lazy_low_rank": {},
    "momentum_perturbation": {},
}
HASHED = Hashed()
WITHOUT_DISTRIBUTION = {"spsa", "coordinate_wise", "lazy_low_rank"}


def make(name, distribution=HASHED, **kwargs):
    """An estimator of the table, by a distribution that costs nothing to compile."""
    if name not in WITHOUT_DISTRIBUTION:
        kwargs = {"distribution": distribution, **kwargs}
    function = name.partition("(")[0]
    module = zo if hasattr(zo, function) else zo.contrib
    return getattr(module, function)(**MAKERS[name], **kwargs)


# Those whose values show the derivative along the gradient exactly.
EXACT_SLOPES = set(MAKERS) - {"residual_feedback", "majority_vote", "gaussian_process"}


def flat(tree):
    """Joins the leaves to one float64 vector."""
    leaves = [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(tree)]
    return np.concatenate([leaf.reshape(-1) for leaf in leaves])


def rows(trees):
    leaves = [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(trees)]
    return np.concatenate([leaf.reshape(len(leaf), -1) for leaf in leaves], 1)


def quadratic(x, level=0.0):
    """A quadratic function of float64 vectors."""
    return level + x @ SLOPES + (x**2) @ CURVATURES / 2


def traced(params):
    """The same of trees, for JAX."""
    x = jnp.concatenate([leaf.reshape(-1) for leaf in jax.tree.leaves(params)])
    slopes, curvatures = (jnp.asarray(c, x.dtype) for c in (SLOPES, CURVATURES))
    return jnp.sum(slopes * x + curvatures * x**2 / 2)


def derivative(x):
    return SLOPES + CURVATURES * x


class Steps:
    """Steps of a run whose values come from NumPy, in float64."""

    def __init__(self, estimator, fun=quadratic):
        self.fun = fun
        self.state = estimator.init(PARAMS)

        @jit
        def ask(key, step, params, state):
            draw = zo.estimators.Draw(key, jax.random.key(100), step)
            points, state = estimator.points(draw, params, state)
            distribution = points.directions.distribution
            materialize = jax.vmap(lambda u: distribution.materialize(u, params))
            at = zo.estimators.candidates(points, params)
            return points, state, at, materialize(points.directions)

        @jit
        def tell(points, values, params, state):
            values = points.split(values)
            estimate, state = estimator.reduce(points, values, params, state)
            return estimate, estimate.gradient.materialize(params), state

        self.ask, self.tell = ask, tell

    def __call__(self, step, params=PARAMS, values=None, **kwargs):
        """The estimate, the points, their values, and the directions.

        The gradient of the estimate is a tree.
        """
        key = jax.random.key(step)
        points, state, at, us = self.ask(key, jnp.int32(step), params, self.state)
        at = rows(at)
        found = self.fun(at, **kwargs) if values is None else values(at)
        given = jnp.asarray(found, jnp.float32)
        estimate, gradient, self.state = self.tell(points, given, params, state)
        return estimate._replace(gradient=gradient), at, found, rows(us)


def gradients(estimator, state, keys):
    """Returns an estimate at the parameters for each key, [keys, d]."""

    def one(key):
        return zo.estimators.estimate(estimator, traced, key, PARAMS, state)[0][1]

    return rows(jit(jax.vmap(one))(keys))


def moved(params, by):
    return jax.tree.map(lambda p: p + by, params)
