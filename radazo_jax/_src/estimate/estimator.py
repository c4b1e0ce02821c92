"""Estimators: points, and a reduction of the values at them."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from radazo_jax._src import checks, fusion
from radazo_jax._src.estimate.compiled import Evaluator, compiled
from radazo_jax._src.estimate.points import Estimate, Points
from radazo_jax._src.numbers import keys
from radazo_jax._src.perturb import axes


class GradientEstimator(NamedTuple):
    """Pure functions that estimate gradients from function values.

    Attributes:
      init: `init(params) -> state`, the estimator's state; `()` where it has none.
      points: `points(key, params, state) -> Points`: where the function is to be
        evaluated. The typed key is consumed.
      reduce: `reduce(points, values, params, state) -> (Estimate, state)`; the values
        are at least float32, [n], in the order of the points.
      evaluator: What turns points into values, unless they are evaluated elsewhere.

    Examples:
      Simultaneous perturbation with one direction, along which there are two points:

      >>> import jax, jax.numpy as jnp
      >>> import radazo_jax as zo
      >>> law, mu = zo.rademacher(), 1e-3
      >>> def points(key, params, state):
      ...     return zo.points_along(law, key, [0], [mu, -mu], params)
      >>> def reduce(points, values, params, state):
      ...     above, below = values
      ...     slope = (above - below) / (2 * mu)
      ...     gradient = zo.weighted_sum(slope[None], points, params)
      ...     value = (above + below) / 2
      ...     return zo.Estimate(value, gradient, slope**2, jnp.int32(2)), state
      >>> spsa = zo.GradientEstimator(lambda params: (), points, reduce)
      >>> value_and_grad = zo.value_and_grad(lambda x: jnp.sum(x**2), spsa)
      >>> value, gradient = value_and_grad(jax.random.key(0), jnp.ones(3))
      >>> round(float(value), 3)
      3.0
    """

    init: Callable[[Any], Any]
    points: Callable[[jax.Array, Any, Any], Points]
    reduce: Callable[[Points, jax.Array, Any, Any], tuple[Estimate, Any]]
    evaluator: Evaluator = compiled()

    def estimate(
        self,
        fun: Callable[[Any], Any],
        key: jax.typing.ArrayLike,
        params: Any,
        state: Any,
        *,
        has_aux: bool = False,
    ) -> tuple[tuple[Any, Any], Any]:
        """Estimates value and gradient of a function that JAX can trace.

        Args:
          fun: `fun(params)` returns a real scalar, or `(scalar, aux)` with `has_aux`.
          key: A key; it is consumed.
          params: A tree of floating-point arrays.
          state: The estimator's state.
          has_aux: Whether `fun` returns a pair.

        Returns:
          `((value, gradient), state)`, with `(value, aux)` for the value if `has_aux`;
          aux is that at the first point.
        """
        estimate, aux, state = evaluated(self, fun, key, params, state, has_aux)
        value = (estimate.value, aux) if has_aux else estimate.value
        return (value, estimate.gradient), state


def evaluated(
    estimator: GradientEstimator,
    fun: Callable[[Any], Any],
    key: jax.typing.ArrayLike,
    params: Any,
    state: Any,
    has_aux: bool = False,
) -> tuple[Estimate, Any, Any]:
    """The estimate of a function, its aux at the first point, and the new state."""
    params = checks.as_params(params)
    points = held_points(estimator, keys.as_key(key), params, state, fun, has_aux)
    values, aux = evaluate(estimator, fun, params, points, has_aux)
    estimate, state = estimator.reduce(points, values, params, state)
    return estimate, aux, state


def held_points(
    estimator: GradientEstimator,
    key: jax.Array,
    params: Any,
    state: Any,
    fun: Callable[[Any], Any] | None = None,
    has_aux: bool = False,
) -> Points:
    """The points of an estimate, stored where that pays.

    Args:
      estimator: The estimator.
      key: A typed key; it is consumed.
      params: θ, arrays.
      state: The estimator's state.
      fun: What will be evaluated, where it can be traced: from it, a law may learn
        which matrices are multiplied. It is not evaluated here.
      has_aux: Whether `fun` returns a pair.
    """
    points = estimator.points(key, params, state)
    if fun is not None:
        points = _specialized(points, fun, params, has_aux)
    return estimator.evaluator.hold(points)


def evaluate(
    estimator: GradientEstimator,
    fun: Callable[[Any], Any],
    params: Any,
    points: Points,
    has_aux: bool = False,
) -> tuple[jax.Array, Any]:
    """The values at the points, rounded as values from elsewhere would be, and aux."""
    values, aux = estimator.evaluator.evaluate(fun, params, points, has_aux)
    return fusion.rounded(values), aux


def extra_args(
    estimate: Estimate, value_fn: Callable[[Any], Any] | None
) -> dict[str, Any]:
    """What Optax transformations get of an estimate besides its gradient."""

    def at(params: Any, slope: Any = None) -> Any:
        # Optax's line searches hand all extra arguments that they do not know to the
        # function, and refuse those that it does not take.
        del slope
        assert value_fn is not None
        return value_fn(params)

    args = {
        "value": estimate.value,
        "grad": estimate.gradient,
        "slope": estimate.slope,
        "value_fn": None if value_fn is None else at,
    }
    if estimate.ahead is not None:
        args |= {"ahead": estimate.ahead, "value_ahead": estimate.value_ahead}
    return args


def check_estimator(estimator: Any) -> None:
    """Raises unless `estimator` is one."""
    if not isinstance(estimator, GradientEstimator):
        raise TypeError(
            "estimator must be a GradientEstimator such as forward_difference(); got "
            f"{estimator!r}.{checks.see('api/estimators')}"
        )


def _specialized(
    points: Points, fun: Callable[[Any], Any], params: Any, has_aux: bool
) -> Points:
    """The points by a law that knows which matrices `fun` multiplies."""
    loss = checks.checked_loss(fun, has_aux)
    directions = points.directions
    law = axes.specialize(directions.law, lambda p: loss(p)[0], params, points.layout)
    directions = dataclasses.replace(directions, law=law)
    return dataclasses.replace(points, directions=directions)
