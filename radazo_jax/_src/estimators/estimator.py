"""Estimators: points, and a reduction of the values at them."""

import inspect
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from radazo_jax._src import checks, compiler
from radazo_jax._src.base import Draw, Estimate, Points, Values
from radazo_jax._src.directions.combination import LinearCombination
from radazo_jax._src.evaluators.vectorized import Evaluator, check_evaluator, vectorized


class GradientEstimator(NamedTuple):
    """Pure functions that estimate gradients from function values.

    Attributes:
      init: `init(params) -> state`, the estimator's state; `()` if it has none.
      points: `points(draw, params, state) -> (Points, state)`: the points at which the
        function is evaluated in this step. The keys of the draw are consumed.
      reduce: `reduce(points, values, params, state) -> (Estimate, state)`, with the
        `Values` at the points.

    Examples:
      Simultaneous perturbation with one direction and two points along it:

      >>> import jax, jax.numpy as jnp
      >>> import radazo_jax as zo
      >>> from radazo_jax.estimators import Estimate, sample_points
      >>> distribution, mu = zo.rademacher(), 1e-3
      >>> def points(draw, params, state):
      ...     return sample_points(distribution, draw, 1, [mu, -mu], params), state
      >>> def reduce(points, values, params, state):
      ...     above, below = values.along[0]
      ...     slope = (above - below) / (2 * mu)
      ...     gradient = points.combine(slope[None])
      ...     value = (above + below) / 2
      ...     return Estimate(value, slope**2, jnp.int32(2), gradient), state
      >>> spsa = zo.GradientEstimator(lambda params: (), points, reduce)
      >>> value_and_grad = zo.value_and_grad(lambda x: jnp.sum(x**2), spsa)
      >>> value, gradient = value_and_grad(jax.random.key(0), jnp.ones(3))
      >>> round(float(value), 3)
      3.0
    """

    init: Callable[[Any], Any]
    points: Callable[[Draw, Any, Any], tuple[Points, Any]]
    reduce: Callable[[Points, Values, Any, Any], tuple[Estimate, Any]]

    def estimate(
        self,
        fun: Callable[[optax.Params], Any],
        key: jax.typing.ArrayLike,
        params: optax.Params,
        state: Any,
        *,
        evaluator: Evaluator = vectorized(),
        has_aux: bool = False,
    ) -> tuple[tuple[Any, Any], Any]:
        """Estimates value and gradient of a function that JAX can trace.

        Each call is a run of its own: directions without replacement are numbered
        from 0. For an estimator with state, or for many steps, use `solver`.

        Args:
          fun: `fun(params)` returns a real scalar, or `(scalar, aux)` with `has_aux`.
          key: A key; it is consumed.
          params: A tree of floating-point arrays.
          state: The estimator's state.
          evaluator: The evaluator of the points.
          has_aux: Whether `fun` returns a pair.

        Returns:
          `((value, gradient), state)`, with `(value, aux)` for the value if `has_aux`;
          aux is the output at the first point.
        """
        check_evaluator(evaluator)
        params = checks.as_params(params)
        estimate, (_, aux), state = evaluated(
            self, evaluator, fun, Draw.once(key), params, state, has_aux
        )
        value = (estimate.value, aux) if has_aux else estimate.value
        return (value, estimate.gradient.materialize(params)), state


def evaluated(
    estimator: GradientEstimator,
    evaluator: Evaluator,
    fun: Callable[[optax.Params], Any],
    draw: Draw,
    params: optax.Params,
    state: Any,
    has_aux: bool = False,
) -> tuple[Estimate, tuple[Values, Any], Any]:
    """The estimate of a function, its values and aux, and the estimator's new state."""
    loss = checks.checked_loss(fun, has_aux, vector_valued=True)
    draw = draw._replace(fun=lambda params: loss(params)[0])
    points, state = points_of(estimator, evaluator, draw, params, state)
    values, aux = values_at(evaluator, fun, params, points, has_aux)
    estimate, state = reduced(estimator, points, values, params, state)
    return estimate, (values, aux), state


def points_of(
    estimator: GradientEstimator,
    evaluator: Evaluator,
    draw: Draw,
    params: optax.Params,
    state: Any,
) -> tuple[Points, Any]:
    """The points of an estimate, cached, and the state of the estimator after them."""
    found = estimator.points(draw, params, state)
    if isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], Points):
        points, state = found
        return evaluator.cache(points), state
    raise TypeError(
        "points of the estimator must return a pair (Points, state); got "
        f"{type(found).__name__}. It is called as points(draw, params, state)."
    )


def values_at(
    evaluator: Evaluator,
    fun: Callable[[optax.Params], Any],
    params: optax.Params,
    points: Points,
    has_aux: bool = False,
) -> tuple[Values, Any]:
    """The values at the points, rounded as values from elsewhere are, and aux."""
    values, aux = evaluator.evaluate(fun, params, points, has_aux)
    return points.split(compiler.rounded(points.join(values))), aux


def reduced(
    estimator: GradientEstimator,
    points: Points,
    values: Values,
    params: optax.Params,
    state: Any,
) -> tuple[Estimate, Any]:
    """The estimate, and the state of the estimator after it."""
    found = estimator.reduce(points, values, params, state)
    is_pair = isinstance(found, tuple) and len(found) == 2
    if not (is_pair and isinstance(found[0], Estimate)):
        kind = type(found[0] if is_pair else found).__name__
        raise TypeError(
            "reduce of the estimator must return a pair (Estimate, state); got "
            f"{kind}{' first' * is_pair}. Return Estimate(value, slope, num_values, "
            "gradient), state."
        )
    estimate, state = found
    gradient = estimate.gradient
    if not isinstance(gradient, LinearCombination):
        raise TypeError(
            "gradient of an Estimate must be a LinearCombination; got "
            f"{type(gradient).__name__}. Make it by points.combine(coefficients), or "
            "by LinearCombination.of_tree(tree, points.layout)."
        )
    # If the loss at the parameters is not finite, the value only replaces it.
    at_params = values.base if points.includes_params else estimate.value
    measured = jnp.all(jnp.isfinite(at_params))
    args = {"measured": measured, **estimate.extra_args}
    return estimate._replace(extra_args=args), state


def updated_if_usable(estimate: Estimate, before: Any, after: Any) -> Any:
    """The state after an estimate, or before it if no value could be used."""
    return optax.tree.where(estimate.num_values > 0, after, before)


def extra_args(
    estimate: Estimate,
    gradient: optax.Updates,
    value_fn: Callable[[optax.Params], Any] | None,
    bounds: Any = None,
) -> dict[str, Any]:
    """The extra arguments that Optax transformations get with a gradient."""
    args = {
        "value": estimate.value,
        "grad": gradient,
        "slope": estimate.slope,
        "combination": estimate.gradient,
        **estimate.extra_args,
    }
    if bounds is not None:
        args["bounds"] = bounds
    if value_fn is None:
        return args | {"value_fn": None}
    return args | {"value_fn": _taking_all(value_fn, args)}


def _taking_all(
    value_fn: Callable[[optax.Params], Any], names: Iterable[str]
) -> Callable[..., Any]:
    """`value_fn`, or its mean, with further keyword arguments, which it ignores.

    Optax's line searches pass all extra arguments that they do not know on to the
    function, and refuse those that its signature does not name.
    """

    def at(params: optax.Params, **others: Any) -> Any:
        del others
        return mean_value(value_fn(params))

    kinds = inspect.Parameter
    keywords = (kinds(name, kinds.KEYWORD_ONLY, default=None) for name in names)
    first = kinds("params", kinds.POSITIONAL_OR_KEYWORD)
    at.__signature__ = inspect.Signature([first, *keywords])  # type: ignore[attr-defined]
    return at


def mean_value(value: Any) -> Any:
    """The value, or the mean if the function returns several."""
    return jnp.mean(value) if jnp.ndim(value) else value


def check_estimator(estimator: Any) -> None:
    """Raises unless `estimator` is one."""
    if isinstance(estimator, optax.GradientTransformation):
        raise TypeError(
            "estimator must be a GradientEstimator such as forward_difference(); got "
            "an Optax transformation. Are estimator and optimizer swapped?"
        )
    if not isinstance(estimator, GradientEstimator):
        raise TypeError(
            "estimator must be a GradientEstimator such as forward_difference(); got "
            f"{estimator!r}.{checks.refer_to('estimators')}"
        )
