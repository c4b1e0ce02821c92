"""Estimators as Optax gradient transformations."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from radazo_jax._src import checks
from radazo_jax._src.estimate.estimator import (
    GradientEstimator,
    check_estimator,
    evaluated,
    extra_args,
)
from radazo_jax._src.numbers import keys
from radazo_jax._src.types import GradientTransformationExtraArgs


class EstimateGradientState(NamedTuple):
    """State of `estimate_gradient`.

    Attributes:
      key: The key of the updates to come: a typed key, shape ().
      value: The value at the latest update, infinite before: float32, shape ().
      estimator_state: The state of the estimator.
      inner_state: The state of the inner transformation, `()` without one.
    """

    key: jax.Array
    value: jax.Array
    estimator_state: Any
    inner_state: Any = ()


def estimate_gradient(
    estimator: GradientEstimator,
    key: jax.typing.ArrayLike,
    inner: optax.GradientTransformation | None = None,
) -> GradientTransformationExtraArgs:
    """Emits an estimate of the gradient in place of the updates that come in.

    Put first in an `optax.chain`, it makes the whole zeroth-order step an Optax
    optimizer. Key and estimator state live in the optimizer state, so that a
    checkpoint of that state is a checkpoint of the run. The key in it is a typed key:
    Orbax and pickle store it as it is, other serializers need
    `jax.random.key_data` before and `jax.random.wrap_key_data` after.

    Wrappers such as `optax.apply_if_finite`, `flatten`, `masked`, `MultiSteps` and
    `partition` go after it, as in
    `chain(estimate_gradient(...), apply_if_finite(radazo(...), 3))`. Around it they
    act on incoming updates, which it ignores, or give `value_fn` something else than
    the whole tree of parameters.

    Args:
      estimator: An estimator, such as `forward_difference()`.
      key: The key of the whole run; it is consumed.
      inner: A transformation that gets the estimate as its updates, and `value`,
        `grad`, `slope` and `value_fn` as extra arguments, where it takes any. A chain
        passes the same extra arguments to all of its members, so what needs those of
        the estimate, as `parabolic_sgd` does, goes here.

    Returns:
      A transformation whose `update(updates, state, params, value_fn=fn)` ignores
      `updates`: they may be `None` or `params` themselves where a wrapper
      maps over them. `fn(params)` is the loss, a function known when the update is
      traced: close over it under `jax.jit`. The latest value is
      `optax.tree.get(state, "EstimateGradientState").value`, in any chain.

    Raises:
      TypeError: If `estimator` is not a `GradientEstimator`, the key is no key,
        `params` have been masked, or, in `update`, `value_fn` is missing.
      ValueError: If processes hold different keys, or, in `update`, `params` is
        missing.

    Examples:
      >>> import jax, jax.numpy as jnp, optax
      >>> import radazo_jax as zo
      >>> def loss(params):
      ...     return jnp.sum((params - 1.0) ** 2)
      >>> estimator = zo.forward_difference(num_directions=8)
      >>> tx = optax.chain(zo.estimate_gradient(estimator, key=0), zo.radazo(0.01))
      >>> params = jnp.zeros(4)
      >>> state = tx.init(params)
      >>> @jax.jit
      ... def step(params, state):
      ...     updates, state = tx.update(None, state, params, value_fn=loss)
      ...     return optax.apply_updates(params, updates), state
      >>> for _ in range(200):
      ...     params, state = step(params, state)
      >>> bool(loss(params) < 0.01)
      True
      >>> bool(optax.tree.get(state, "EstimateGradientState").value < 0.01)
      True

      Without a learning rate:

      >>> tx = zo.estimate_gradient(estimator, 0, zo.parabolic_sgd())

    References:
      Shu et al., Refining Adaptive Zeroth-Order Optimization at Ease, ICML 2025,
      algorithm 2, first line of the loop.
    """
    check_estimator(estimator)
    key = keys.check_same_key(key)
    tx = optax.with_extra_args_support(optax.identity() if inner is None else inner)

    def init(params: Any) -> EstimateGradientState:
        _check_not_masked(params)
        return EstimateGradientState(
            # Cloned here, where the mesh is, so that its type is that of the keys
            # that update returns.
            key=jax.random.clone(key),
            value=jnp.full((), jnp.inf, jnp.float32),
            estimator_state=estimator.init(params),
            inner_state=() if inner is None else tx.init(params),
        )

    def update(
        updates: Any,
        state: EstimateGradientState,
        params: Any = None,
        *,
        value_fn: Callable[[Any], jax.Array] | None = None,
        **others: Any,
    ) -> tuple[Any, EstimateGradientState]:
        del updates
        if params is None:
            raise ValueError(
                "params must be passed to update, as update(updates, state, params, "
                "value_fn=...); got None."
            )
        _check_not_masked(params)
        if not callable(value_fn):
            raise TypeError(
                "value_fn must be passed to update, as the function of params whose "
                f"gradient is estimated; got {value_fn!r}."
            )
        next_key, subkey = jax.random.split(state.key)
        estimate, _, estimator_state = evaluated(
            estimator, value_fn, subkey, params, state.estimator_state
        )
        new, inner_state = estimate.gradient, state.inner_state
        if inner is not None:
            args = others | extra_args(estimate, value_fn)
            new, inner_state = tx.update(new, inner_state, params, **args)
        value = estimate.value.astype(jnp.float32)
        return new, EstimateGradientState(next_key, value, estimator_state, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def _check_not_masked(params: Any) -> None:
    """Raises if a wrapper has taken leaves out of `params`."""
    leaves = jax.tree_util.tree_leaves_with_path(
        params, is_leaf=lambda x: isinstance(x, optax.MaskedNode)
    )
    for path, leaf in leaves:
        if isinstance(leaf, optax.MaskedNode):
            raise TypeError(
                "params must be the whole tree that value_fn takes; got a MaskedNode "
                f"at {jax.tree_util.keystr(path)}. Put optax.masked or optax.partition "
                "after estimate_gradient, as in "
                "optax.chain(estimate_gradient(...), optax.masked(...))."
                + checks.see("api/runs")
            )
