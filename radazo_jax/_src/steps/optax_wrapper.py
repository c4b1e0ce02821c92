"""Estimators as Optax gradient transformations."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from radazo_jax._src.base import checks, keys, shown
from radazo_jax._src.estimates.contracts import (
    Evaluator,
    GradientEstimator,
    GradientTransformationExtraArgs,
    Loss,
    check_estimator,
    check_evaluator,
)
from radazo_jax._src.estimates.gradients import evaluated
from radazo_jax._src.estimates.vectorized import vectorized
from radazo_jax._src.steps.step import direction_of, draw_of, is_skipped


class EstimateGradientState(NamedTuple):
    """State of `estimate_gradient`.

    Attributes:
      key: The key of the run: a typed key, shape (); it does not change.
      step: The number of updates so far: int32, shape ().
      value: The value at the latest update, infinite before the first: float32,
        shape ().
      estimator_state: The state of the estimator.
      inner_state: The state of the inner transformation, `()` without one.
    """

    key: jax.Array
    step: jax.Array
    value: jax.Array
    estimator_state: optax.OptState
    inner_state: optax.OptState = ()


@checks.checks_names
def estimate_gradient(
    estimator: GradientEstimator,
    key: jax.typing.ArrayLike,
    inner: optax.GradientTransformation | None = None,
    *,
    evaluator: Evaluator = vectorized(),
) -> GradientTransformationExtraArgs:
    """Replaces the updates that come in by an estimate of the gradient.

    Put first in an `optax.chain`, it makes the whole zeroth-order step an Optax
    optimizer. Key and estimator state live in the optimizer state, so that a
    checkpoint of that state is a checkpoint of the run. The key in it is a typed key:
    Orbax and pickle store it as it is, other serializers need
    `jax.random.key_data` before and `jax.random.wrap_key_data` after.

    Wrappers such as `optax.apply_if_finite`, `flatten`, `masked`, `MultiSteps` and
    `partition` go after it, as in
    `chain(estimate_gradient(...), apply_if_finite(radazo(...), 3))`. Around it they
    act on incoming updates, which it ignores, or give `value_fn` something else than
    the whole tree of parameters. `optax.masked` passes the gradient of the other
    parameters on unchanged, and does not freeze them. `optax.partition` with
    `optax.set_to_zero` does.

    Args:
      estimator: An estimator, such as `forward_difference()`.
      key: The key of the whole run; it is consumed.
      inner: A transformation that gets the estimate as its updates, and `value`,
        `grad`, `slope` and `value_fn` as extra arguments, if it takes any. A chain
        passes the same extra arguments to all of its members, so a transformation
        that needs the estimate, such as `scale_by_replayed_radazo`, must go here.
        A step in which no value can be used is skipped as by `solver`: the updates are
        zero, and the state of `inner` does not change.
      evaluator: The evaluator of the points, as in `value_and_grad`.

    Returns:
      A transformation whose `update(updates, state, params, value_fn=fn)` ignores
      `updates`: they may be `None`, or `params` if a wrapper maps over
      them. `fn(params)` is the loss, a function known when the update is
      traced: close over it under `jax.jit`. `obj_fn` is another name for `value_fn`.
      Without `inner`, updates are NaN if no value can be used; `optax.apply_if_finite`
      skips such a step. The latest value is
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

    References:
      Shu et al., Refining Adaptive Zeroth-Order Optimization at Ease, ICML 2025,
      algorithm 2, first line of the loop.
    """
    check_estimator(estimator)
    check_evaluator(evaluator)
    key = keys.check_same_key(key)
    tx = optax.with_extra_args_support(optax.identity() if inner is None else inner)

    def init(params: optax.Params) -> EstimateGradientState:
        _check_not_masked(params)
        return EstimateGradientState(
            # Cloned here, under the mesh, so that it has the type of the keys that
            # update returns.
            key=jax.random.clone(key),
            step=jnp.zeros((), jnp.int32),
            value=jnp.full((), jnp.inf, jnp.float32),
            estimator_state=estimator.init(params),
            inner_state=() if inner is None else tx.init(params),
        )

    def update(
        updates: optax.Updates,
        state: EstimateGradientState,
        params: optax.Params = None,
        *,
        value_fn: Loss | None = None,
        obj_fn: Loss | None = None,
        **others: object,
    ) -> tuple[optax.Updates, EstimateGradientState]:
        del updates
        checks.require_arguments(params=params)
        _check_not_masked(params)
        loss = _checked(obj_fn if value_fn is None else value_fn)
        params = checks.as_params(params)
        draw = draw_of(state.key, state.step)
        found = evaluated(
            estimator, evaluator, loss, draw, params, state.estimator_state
        )
        if inner is None:
            new, inner_state = found.estimate.gradient.materialize(params), ()
        else:
            new, after = direction_of(
                tx, state.inner_state, params, found.estimate, loss, **others
            )
            takes = ~is_skipped(found.estimate, found.values)
            new = jax.tree.map(lambda u: jnp.where(takes, u, 0), new)
            inner_state = optax.tree.where(takes, after, state.inner_state)
        return new, EstimateGradientState(
            state.key,
            optax.safe_increment(state.step),
            found.estimate.value.astype(jnp.float32),
            found.state,
            inner_state,
        )

    return optax.GradientTransformationExtraArgs(init, update)


def _checked(value_fn: Loss | None) -> Loss:
    """Returns the loss; raises unless it was passed."""
    if not callable(value_fn):
        raise TypeError(
            "value_fn must be passed to update, as the function of params whose "
            f"gradient is estimated; got {shown.given(value_fn)}."
        )
    return value_fn


def _check_not_masked(params: optax.Params) -> None:
    """Raises if a wrapper has taken leaves out of `params`."""
    leaves = jax.tree_util.tree_leaves_with_path(
        params, is_leaf=lambda x: isinstance(x, optax.MaskedNode)
    )
    for path, leaf in leaves:
        if isinstance(leaf, optax.MaskedNode):
            raise TypeError(
                "params must be the whole tree that value_fn takes; got a MaskedNode "
                f"at {jax.tree_util.keystr(path)}. Put optax.partition or optax.masked "
                "after estimate_gradient, as in "
                "optax.chain(estimate_gradient(...), optax.partition(...))."
                + checks.refer_to("estimate_gradient")
            )
