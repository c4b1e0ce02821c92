"""The part of an optimizer's updates that parameters round away."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from radazo_jax._src import compiler, program
from radazo_jax._src.base import Estimate, Points
from radazo_jax._src.estimators import gradients
from radazo_jax._src.trees import wide

# By then, an update of R-AdaZO is no longer large because v is small.
_UPDATES = 30


def lost_updates(
    optimizer: optax.GradientTransformation,
    points: Points,
    moved: np.ndarray,
    value: float,
    params: Any,
    fun: Callable[[Any], Any] | None,
) -> dict[str, float]:
    """The share of each leaf's update that its dtype rounds away.

    The update is the last of several with one gradient, at the same parameters.

    Args:
      optimizer: The optimizer.
      points: Points at a scale and its negative along each direction.
      moved: The mean values at these points, [K, 2].
      value: The value at the parameters.
      params: The parameters.
      fun: The function, if JAX can trace it.
    """
    scales = np.asarray(points.scales, np.float64)[:, 0]
    slopes = (moved[:, 0] - moved[:, 1]) / (2 * np.where(scales == 0, 1, scales))
    slopes = np.where(np.isfinite(slopes), slopes, 0)
    coefficients = points.factor / len(slopes) * slopes
    numbers = (
        jnp.asarray(x, jnp.float32)
        for x in (value, coefficients @ slopes, coefficients)
    )
    args = points, params, *numbers
    shares = program.of(_shares, (optimizer, fun), *args)(*args)
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    return {
        jax.tree_util.keystr(path): float(share)
        for path, share in zip(paths, jax.device_get(shares), strict=True)
    }


def _shares(
    made: tuple[optax.GradientTransformation, Callable[[Any], Any] | None],
    points: Points,
    params: Any,
    value: jax.Array,
    slope: jax.Array,
    coefficients: jax.Array,
) -> list[jax.Array]:
    optimizer, fun = made
    number = jnp.int32(points.num_points)
    estimate = Estimate(value, slope, number, points.combine(coefficients))
    gradient = estimate.gradient.materialize(params)
    update = partial(
        optax.with_extra_args_support(optimizer).update,
        gradient,
        params=params,
        **gradients.extra_args(estimate, gradient, value, fun),
    )

    def again(_: Any, carry: tuple[Any, Any]) -> tuple[Any, Any]:
        return update(state=carry[1])

    start = (jax.tree.map(jnp.zeros_like, params), optimizer.init(params))
    updates, _ = lax.fori_loop(0, _UPDATES, again, start)
    after = optax.apply_updates(params, updates)
    return jax.tree.leaves(jax.tree.map(_share, params, updates, after))


def _share(p: jax.Array, u: jax.Array, after: jax.Array) -> jax.Array:
    """The norm of what was lost over the norm of the update."""
    wanted = wide(u)
    # A fused program would compute with the sum before it is rounded.
    lost = wide(compiler.rounded(after)) - wide(p) - wanted
    norm = jnp.sqrt(jnp.sum(wanted**2))
    share = jnp.sqrt(jnp.sum(lost**2)) / jnp.where(norm > 0, norm, 1)
    return share.astype(jnp.float32)
