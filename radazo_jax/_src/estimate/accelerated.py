"""Estimates ahead of the parameters: Nesterov's momentum, over random subspaces."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from radazo_jax._src.estimate.estimator import GradientEstimator, check_estimator
from radazo_jax._src.estimate.points import Estimate, Points, shifted
from radazo_jax._src.trees import at_least_float32, product, widest


class AcceleratedState(NamedTuple):
    """State of `accelerated`.

    Attributes:
      estimator: The state of the estimator that is accelerated.
      previous: The parameters of the latest step: a tree like the parameters.
      momentum: z, which gathers the steps: likewise, at least float32.
      share: The share of z in the point ahead, 0 where it is to be dropped: shape ().
      value_ahead: The latest value ahead, infinite before the first step: shape ().
      count: The number of steps: int32, shape ().
    """

    estimator: Any
    previous: Any
    momentum: Any
    share: jax.Array
    value_ahead: jax.Array
    # `count` is the name that Optax's states have; it hides a method of tuple.
    count: jax.Array  # type: ignore[assignment]


def accelerated(estimator: GradientEstimator) -> GradientEstimator:
    """Estimates the gradient ahead of the parameters, where the last steps lead.

    Steps along estimates are those of a descent over random subspaces, and take the
    more of them the more curvatures differ. Nesterov's momentum takes about the root of
    that. With z₀ = θ₀ and share a₀ = K/d, or 1 if that is less, a step is

        yₜ = θₜ + aₜ (zₜ − θₜ)
        θₜ₊₁ = yₜ − η ĝ(yₜ)
        zₜ₊₁ = zₜ + a₀/aₜ (θₜ₊₁ − yₜ)
        aₜ₊₁ = (√(aₜ⁴ + 4 aₜ²) − aₜ²) / 2

    and the momentum is dropped, z ← θ and a ← a₀, where f(yₜ) > f(θₜ) and f(yₜ₋₁),
    where f(yₜ) is not finite, or where the step from y goes against the step from θ.
    The first d/K steps, whose directions are all new, are without it. The step size
    must suit the curvature; `parabolic_sgd` measures it by the value at θ, one
    evaluation more.

    Args:
      estimator: One that evaluates the parameters themselves and a point along each
        direction, such as `forward_difference` or `adaptive_difference`; best with the
        law `orthonormal`.

    Returns:
      The estimator, of one evaluation more, with an `AcceleratedState`, which has two
      trees like the parameters. Its value is that at θ; gradient and slope are those at
      the point ahead. The optimizer is to be `parabolic_sgd`, which starts its steps
      there; others do not, and take steps of another kind.

    Raises:
      TypeError: If `estimator` is not an estimator.
      ValueError: By the first step, if it has other points.

    Examples:
      >>> import jax.numpy as jnp
      >>> import radazo_jax as zo
      >>> scales = jnp.logspace(0, 3, 64)
      >>> def last_loss(estimator):
      ...     result = zo.minimize(
      ...         lambda x: jnp.sum(scales * x**2),
      ...         jnp.ones(64),
      ...         zo.parabolic_sgd(),
      ...         estimator,
      ...         200,
      ...         key=0,
      ...         progress=False,
      ...     )
      ...     return result.values[-1]
      >>> plain = zo.adaptive_difference(zo.orthonormal())
      >>> bool(last_loss(zo.accelerated(plain)) < 0.5 * last_loss(plain))
      True

    References:
      Fercoq & Richtárik, Accelerated, Parallel, and Proximal Coordinate Descent, SIAM
      J. Optim. 2015, algorithm 1, <https://arxiv.org/abs/1312.5799>; restarted by the
      gradient as in O'Donoghue & Candès, Adaptive Restart for Accelerated Gradient
      Schemes, 2015, <https://arxiv.org/abs/1204.3982>.
    """
    check_estimator(estimator)

    def init(params: Any) -> AcceleratedState:
        return AcceleratedState(
            estimator.init(params),
            jax.tree.map(jnp.array, params),
            jax.tree.map(_wide, params),
            jnp.zeros((), widest(params)),
            jnp.full((), jnp.inf, widest(params)),
            jnp.zeros((), jnp.int32),
        )

    def points(key: jax.Array, params: Any, state: AcceleratedState) -> Points:
        there = estimator.points(key, params, state.estimator)
        _check_points(there)
        ahead = _ahead(params, _followed(params, state, len(there.scales)))
        # The point ahead itself is at distance 0 along any direction.
        directions = jax.tree.map(
            lambda x: jnp.concatenate([x[:1], x]), there.directions
        )
        scales = jnp.concatenate([jnp.zeros_like(there.scales[:1]), there.scales])
        ones = jnp.ones_like(scales)
        return Points(directions, scales, True, there.layout, ahead, ones)

    def reduce(
        points: Points, values: jax.Array, params: Any, state: AcceleratedState
    ) -> tuple[Estimate, AcceleratedState]:
        state = _followed(params, state, len(points.scales) - 1)
        ahead = _ahead(params, state)
        there = dataclasses.replace(
            points,
            directions=jax.tree.map(lambda x: x[1:], points.directions),
            scales=points.scales[1:],
            shift=None,
            shifts=None,
        )
        at = shifted(params, ahead, jnp.ones((), state.share.dtype))
        estimate, after = estimator.reduce(there, values[1:], at, state.estimator)
        estimate = estimate._replace(
            value=values[0],
            num_values=estimate.num_values + jnp.isfinite(values[0]).astype(jnp.int32),
            ahead=ahead,
            value_ahead=values[1],
        )
        # Where the loss ahead is higher and rises, or is none, the momentum is dropped.
        value_ahead = values[1].astype(state.value_ahead.dtype)
        drops = (values[1] > values[0]) & (value_ahead > state.value_ahead)
        drops |= ~jnp.isfinite(values[1])
        return estimate, state._replace(
            estimator=after,
            share=jnp.where(drops, 0, state.share),
            value_ahead=value_ahead,
            count=optax.safe_increment(state.count),
        )

    return GradientEstimator(init, points, reduce, estimator.evaluator)


def _check_points(points: Points) -> None:
    if (
        not points.with_params
        or points.scales.shape[1] != 1
        or points.shift is not None
    ):
        raise ValueError(
            "estimator must evaluate the parameters and a point along each direction, "
            "as forward_difference does; got one with other points."
        )


def _followed(
    params: Any, state: AcceleratedState, num_directions: int
) -> AcceleratedState:
    """The state after the step that led to `params`, or was not taken."""
    share, dtype = state.share, state.share.dtype
    size = sum(leaf.size for leaf in jax.tree.leaves(params))
    first = jnp.asarray(min(1.0, num_directions / size), dtype)
    whole = jax.tree.map(lambda p, old: _wide(p) - _wide(old), params, state.previous)
    step = jax.tree.map(
        lambda s, old, z: s - share.astype(z.dtype) * (z - _wide(old)),
        whole,
        state.previous,
        state.momentum,
    )
    forth = (share > 0) & (product(step, whole, dtype) > 0)
    gain = jnp.where(forth, first / share, 0)
    momentum = jax.tree.map(
        lambda p, z, s: jnp.where(forth, z + gain.astype(z.dtype) * s, _wide(p)),
        params,
        state.momentum,
        step,
    )
    # Among directions that all are new, there is nothing to gather.
    new = state.count.astype(dtype) * num_directions < size
    following = (jnp.sqrt(share**4 + 4 * share**2) - share**2) / 2
    share = jnp.where(new, 0, jnp.where(forth, following, first))
    return state._replace(previous=params, momentum=momentum, share=share)


def _ahead(params: Any, state: AcceleratedState) -> Any:
    """What is between the parameters and the point ahead, y − θ."""
    return jax.tree.map(
        lambda p, z: state.share.astype(z.dtype) * (z - _wide(p)),
        params,
        state.momentum,
    )


def _wide(x: jax.Array) -> jax.Array:
    return x.astype(at_least_float32(x.dtype))
