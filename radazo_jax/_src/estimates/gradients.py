"""Estimates of gradients: points, their values, and what is made of them."""

import inspect
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from radazo_jax._src.base import checks, keys, shown, xla
from radazo_jax._src.base.trees import Tree
from radazo_jax._src.directions.sums import LinearCombination
from radazo_jax._src.estimates.contracts import (
    Draw,
    Estimate,
    Evaluator,
    GradientEstimator,
    Points,
    Values,
    check_estimator,
    check_evaluator,
)
from radazo_jax._src.estimates.vectorized import vectorized

# The errors of functions that need known arrays.
UNTRACEABLE = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)


@checks.checks_names
def estimate(
    estimator: GradientEstimator,
    fun: Callable[[optax.Params], Tree],
    key: jax.typing.ArrayLike,
    params: optax.Params,
    state: Tree,
    *,
    evaluator: Evaluator = vectorized(),
    has_aux: bool = False,
) -> tuple[tuple[Tree, Tree], Tree]:
    """Estimates value and gradient of a function that JAX can trace.

    Each call is a run of its own: directions without replacement are numbered from 0.
    For an estimator with state, or for many steps, use `solver`.

    Args:
      estimator: An estimator, such as `forward_difference()`.
      fun: `fun(params)` returns a real scalar, or `(scalar, aux)` with `has_aux`.
      key: A key; it is consumed.
      params: A tree of floating-point arrays.
      state: The estimator's state, `estimator.init(params)` at first.
      evaluator: The evaluator of the points.
      has_aux: Whether `fun` returns a pair.

    Returns:
      `((value, gradient), state)`, with `(value, aux)` for the value if `has_aux`;
      aux is the output at the first point.

    Raises:
      TypeError: If `estimator` is not a `GradientEstimator`, `evaluator` is not an
        `Evaluator`, the loss is not real or the parameters are not floating-point.
      ValueError: If the loss is not a scalar, or the tree of parameters is empty.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> import radazo_jax as zo
      >>> estimator, params = zo.central_difference(num_directions=100), jnp.ones(3)
      >>> (value, gradient), state = zo.estimators.estimate(
      ...     estimator, jnp.sum, jax.random.key(0), params, estimator.init(params)
      ... )
      >>> round(float(value), 3), gradient.shape, state
      (3.0, (3,), ())
    """
    check_estimator(estimator)
    check_evaluator(evaluator)
    params = checks.as_params(params)
    found = evaluated(estimator, evaluator, fun, Draw.once(key), params, state, has_aux)
    estimate = found.estimate
    value = (estimate.value, found.aux) if has_aux else estimate.value
    return (value, estimate.gradient.materialize(params)), found.state


def key_first(key: Tree, params: optax.Params, name: str) -> jax.Array:
    """Returns the typed key; raises if it is missing, or follows the parameters."""
    try:
        typed = keys.as_key(key)
    except TypeError as error:
        raise TypeError(
            f"key must be the first argument, as in (key, {name}, ...); got "
            f"{shown.tree(key)} first. Pass a key such as jax.random.key(0) before "
            f"{name}."
        ) from error
    if params is None:
        raise TypeError(
            f"{name} must be the second argument, as in (key, {name}, ...); got a key "
            "alone."
        )
    return typed


def of_params(
    fun: Callable[..., Tree],
    args: tuple[Tree, ...],
    kwargs: dict[str, Tree],
    params: optax.Params,
) -> Tree:
    """Returns `fun` as a function of its first argument, as a `Partial` makes it."""
    # Each evaluation gets new containers, as under jit: fun may write into them.
    params, args, kwargs = jax.tree.map(lambda x: x, (params, args, kwargs))
    try:
        return fun(params, *args, **kwargs)
    except UNTRACEABLE as error:
        raise TypeError(
            "fun must be a function that JAX can trace; got one that turns a traced "
            "array into a Python number or a NumPy array. Use jax.numpy in it, or "
            "pass it to minimize, or to train with evaluator=external()."
            + checks.refer_to("minimize")
        ) from error
    except Exception as error:
        if isinstance(error, TypeError):
            _check_arguments(fun, (params, *args), kwargs, error)
        # By its name, because Flax need not be installed.
        if type(error).__name__ != "TraceContextError":
            raise
        raise TypeError(
            "fun must not write to Flax NNX objects that it closes over, as modules "
            f"with Dropout or BatchNorm do; got {str(error).partition(' (http')[0]!r}. "
            "Pass them as arguments to radazo_jax.nnx.value_and_grad, which keeps what "
            "they write."
        ) from error


def _check_arguments(
    fun: Callable[..., Tree], args: Tree, kwargs: dict[str, Tree], error: TypeError
) -> None:
    """Raises if a function cannot be called with these arguments."""
    try:
        signature = inspect.signature(fun)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        leaves = [getattr(x, "dtype", np.dtype(int)) for x in args[1:]]
        if any(jnp.issubdtype(x, jax.dtypes.prng_key) for x in leaves):
            raise TypeError(
                "fun must take the parameters alone, without a key; got a key as its "
                "batch. A state has the key of its run: call step(state)."
            ) from error
        raise TypeError(
            "fun must take the parameters, and the batch if there is one; got "
            f"fun{signature}, called with {len(args) + len(kwargs)} of them. Draw a "
            "batch with sample=, or close over the others."
        ) from error


class Evaluated(NamedTuple):
    """The estimate of a function, and what it was made of.

    Attributes:
      estimate: The estimate.
      values: The values at the points.
      aux: The auxiliary output at the first point.
      state: The state of the estimator after the estimate.
    """

    estimate: Estimate
    values: Values
    aux: Any
    state: Any


def evaluated(
    estimator: GradientEstimator,
    evaluator: Evaluator,
    fun: Callable[[optax.Params], Tree],
    draw: Draw,
    params: optax.Params,
    state: Tree,
    has_aux: bool = False,
) -> Evaluated:
    """Returns the estimate of a function."""
    loss = checks.checked_loss(fun, has_aux, vector_valued=True)
    draw = draw._replace(fun=lambda params: loss(params)[0])
    points, state = points_of(estimator, evaluator, draw, params, state)
    values, aux = values_at(evaluator, fun, params, points, has_aux)
    estimate, state = reduced(estimator, points, values, params, state)
    return Evaluated(estimate, values, aux, state)


def points_of(
    estimator: GradientEstimator,
    evaluator: Evaluator,
    draw: Draw,
    params: optax.Params,
    state: Tree,
) -> tuple[Points, Tree]:
    """Returns the cached points of an estimate, and the estimator's next state."""
    found = estimator.points(draw, params, state)
    _check_pair(found, Points, "points of the estimator", "points(draw, params, state)")
    points, state = found
    return evaluator.cache(points), state


def values_at(
    evaluator: Evaluator,
    fun: Callable[[optax.Params], Tree],
    params: optax.Params,
    points: Points,
    has_aux: bool = False,
) -> tuple[Values, Tree]:
    """Returns the values at the points, rounded as values from elsewhere, and aux."""
    found = evaluator.evaluate(fun, params, points, has_aux)
    call = "evaluate(fun, params, points, has_aux)"
    _check_pair(found, Values, "evaluate of the evaluator", call)
    values, aux = found
    return points.split(xla.rounded(points.join(values))), aux


def reduced(
    estimator: GradientEstimator,
    points: Points,
    values: Values,
    params: optax.Params,
    state: Tree,
) -> tuple[Estimate, Tree]:
    """Returns the estimate, and the state of the estimator after it."""
    found = estimator.reduce(points, values, params, state)
    call = "reduce(points, values, params, state)"
    _check_pair(found, Estimate, "reduce of the estimator", call)
    gradient = found[0].gradient
    if not isinstance(gradient, LinearCombination):
        raise TypeError(
            "gradient of an Estimate must be a LinearCombination; got "
            f"{type(gradient).__name__}. Make it by points.combine(coefficients), or "
            "by LinearCombination.of_tree(tree, points.layout)."
        )
    return found


def _check_pair(found: Tree, kind: type, name: str, call: str) -> None:
    """Raises unless a method has returned a pair that begins as it must."""
    if isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], kind):
        return
    second = "aux" if kind is Values else "state"
    is_pair = type(found) is tuple and len(found) == 2  # No `Values`, of two fields.
    got = f"{type(found[0]).__name__} first" if is_pair else type(found).__name__
    raise TypeError(
        f"{name} must return a pair ({kind.__name__}, {second}); got {got}. It is "
        f"called as {call}."
    )


def extra_args(
    estimate: Estimate,
    gradient: optax.Updates,
    value_fn: Callable[[optax.Params], Tree] | None,
) -> dict[str, Tree]:
    """Returns the extra arguments that Optax transformations get with a gradient.

    Args:
      estimate: The estimate.
      gradient: Its gradient, `None` if that is not built.
      value_fn: The loss, `None` if JAX does not evaluate it.
    """
    args = {
        "value": estimate.value,
        "grad": gradient,
        "slope": estimate.slope,
        "combination": estimate.gradient,
    }
    if value_fn is None:
        return args | {"value_fn": None}
    return args | {"value_fn": _taking_all(value_fn, args)}


def _taking_all(
    value_fn: Callable[[optax.Params], Tree], names: Iterable[str]
) -> Callable[..., Tree]:
    """Lets `value_fn`, or its mean, ignore further keyword arguments.

    Optax's line searches pass all extra arguments that they do not know on to the
    function, and refuse those that its signature does not name.
    """

    def at(params: optax.Params, **others: Tree) -> Tree:
        del others
        value = value_fn(params)
        return jnp.mean(value) if jnp.ndim(value) else value

    kinds = inspect.Parameter
    keywords = (kinds(name, kinds.KEYWORD_ONLY, default=None) for name in names)
    first = kinds("params", kinds.POSITIONAL_OR_KEYWORD)
    at.__signature__ = inspect.Signature([first, *keywords])  # type: ignore[attr-defined]
    return at
