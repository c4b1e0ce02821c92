"""Estimates instead of derivatives: a replacement of `jax.value_and_grad`."""

from collections.abc import Callable
from typing import Any

import jax
import optax
from jax.tree_util import Partial

from radazo_jax._src import shown
from radazo_jax._src.estimators.estimator import GradientEstimator, check_estimator
from radazo_jax._src.evaluators.vectorized import Evaluator, check_evaluator, vectorized
from radazo_jax._src.numbers import keys


def value_and_grad(
    fun: Callable[..., Any],
    estimator: GradientEstimator,
    evaluator: Evaluator = vectorized(),
    *,
    has_aux: bool = False,
) -> Callable[..., tuple[Any, Any]]:
    """Estimates value and gradient of a function; replaces `jax.value_and_grad`.

    Args:
      fun: A function of the parameters, a tree of floating-point arrays, and of any
        other arguments; it returns a real scalar, or `(scalar, aux)` with
        `has_aux`. It need not be differentiable.
      estimator: An estimator without state, such as `forward_difference()`. Under a
        distribution that is `sequential`, the directions of each call are numbered from
        0.
      evaluator: The evaluator of the points: `vectorized(batch_size)`, or
        `sharded(axis_name)` to evaluate them on the devices along a mesh axis.
      has_aux: Whether `fun` returns a pair whose second element is auxiliary.

    Returns:
      A function `(key, params, *args, **kwargs) -> (value, gradient)`, with
      `(value, aux)` for the value if `has_aux`. It consumes its key. All
      evaluations get the same `args` and `kwargs`: the same minibatch, the same
      dropout key.

    Raises:
      TypeError: If `estimator` is not a `GradientEstimator`, or, when called, if
        the first argument is no key, the loss is not real or the parameters are not
        floating-point.
      ValueError: If, when called, the loss is not a scalar, the tree of parameters is
        empty, or the estimator has state (use `solver`).

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> import radazo_jax as zo
      >>> def loss(params, x, y):
      ...     return jnp.mean((x @ params - y) ** 2)
      >>> value_and_grad = zo.value_and_grad(loss, zo.forward_difference())
      >>> x, y = jnp.ones((4, 3)), jnp.zeros(4)
      >>> value, gradient = value_and_grad(jax.random.key(0), jnp.ones(3), x, y)
      >>> float(value), gradient.shape
      (9.0, (3,))

    References:
      Shu et al., Refining Adaptive Zeroth-Order Optimization at Ease, ICML 2025,
      eq. (2).
    """
    check_estimator(estimator)
    check_evaluator(evaluator)

    def estimated(
        key: jax.typing.ArrayLike | None = None,
        params: optax.Params = None,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Any, Any]:
        key = key_first(key, params, "params")
        state = estimator.init(params)
        if jax.tree.leaves(state):
            raise ValueError(
                "estimator must have no state, which value_and_grad would lose; got "
                "one with state. Use solver(fun, optimizer, estimator) instead."
            )
        loss = Partial(of_params, fun, args, kwargs)
        (value, gradient), _ = estimator.estimate(
            loss, key, params, state, evaluator=evaluator, has_aux=has_aux
        )
        return value, gradient

    return estimated


def key_first(key: Any, params: optax.Params, name: str) -> jax.Array:
    """The key, typed; raises if the key is missing, or follows the parameters."""
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
    fun: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    params: optax.Params,
) -> Any:
    """`fun` as a function of its first argument, which a `Partial` makes of it."""
    # Each evaluation gets new containers, as under jit: fun may write into them.
    params, args, kwargs = jax.tree.map(lambda x: x, (params, args, kwargs))
    try:
        return fun(params, *args, **kwargs)
    except Exception as error:
        # By its name, because Flax need not be installed.
        if type(error).__name__ != "TraceContextError":
            raise
        raise TypeError(
            "fun must not write to Flax NNX objects that it closes over, as modules "
            f"with Dropout or BatchNorm do; got {str(error).partition(' (http')[0]!r}. "
            "Pass them as arguments to radazo_jax.nnx.value_and_grad, which keeps what "
            "they write."
        ) from error
