"""The part of perturbations and of updates that parameters round away."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from radazo_jax._src import checks, programs, xla
from radazo_jax._src.base import Estimate, Points
from radazo_jax._src.directions.distribution import elements
from radazo_jax._src.estimators import gradients
from radazo_jax._src.trees import wide

# By then, an update of R-AdaZO is no longer large because v is small.
_UPDATES = 30

# A share of a perturbation beyond which a run warns.
_LOST = 0.7


def of_updates(
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
    shares = programs.of(_shares, (optimizer, fun), *args)(*args)
    return _by_path(shares, params)


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

    def share(p: jax.Array, u: jax.Array, after: jax.Array) -> jax.Array:
        # A fused program would compute with the sum before it is rounded.
        return _share(wide(xla.rounded(after)) - wide(p) - wide(u), wide(u))

    return jax.tree.leaves(jax.tree.map(share, params, updates, after))


def _share(lost: jax.Array, wanted: jax.Array) -> jax.Array:
    """The norm of what was lost over the norm of what was wanted: float32."""
    norm = jnp.sqrt(jnp.sum(wanted**2))
    share = jnp.sqrt(jnp.sum(lost**2)) / jnp.where(norm > 0, norm, 1)
    return share.astype(jnp.float32)


def by_rounding(points: Points, params: optax.Params) -> dict[str, float]:
    """The share of each leaf's perturbation that its dtype rounds away."""
    return _by_path(_lost(moved(points), params), params)


def _by_path(shares: list[jax.Array], params: optax.Params) -> dict[str, float]:
    """The shares of the leaves, by their paths."""
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    return {
        jax.tree_util.keystr(path): float(share)
        for path, share in zip(paths, jax.device_get(shares), strict=True)
    }


def warn_of_rounding(points: Points, params: optax.Params) -> None:
    """Warns if parameters round most of their perturbation away.

    Args:
      points: The points of a step.
      params: θ.
    """
    lost = by_rounding(points, params)
    bad = {name: share for name, share in lost.items() if share > _LOST}
    if bad:
        name, share = max(bad.items(), key=lambda item: item[1])
        checks.warn(
            f"{len(bad)} of the {len(lost)} arrays of params round most of their "
            f"perturbation away: params{name} loses {share:.0%} of it, so that its "
            "gradient is one of rounding errors. Make smoothing larger, keep these "
            "arrays in float32, or take low_rank()." + checks.refer_to("diagnose")
        )


@jax.jit
def _lost(points: Points, params: optax.Params) -> list[jax.Array]:
    first = jax.tree.map(lambda x: x[0], points.directions)
    scale = points.scales[0, 0]

    def share(p: jax.Array, u: jax.Array, unit: Any, kept: bool) -> jax.Array:
        if kept:
            return jnp.zeros(())
        before = wide(p)
        wanted = scale.astype(before.dtype) * u.astype(before.dtype)
        wanted = wanted if unit is None else unit * wanted
        moved = wide((before + wanted).astype(p.dtype)) - before
        return _share(moved - wanted, wanted)

    # A matrix that is perturbed by factors is multiplied as it is.
    leaves = points.layout.leaves
    distribution = first.distribution
    kept = [distribution._size(leaf) < leaf.size for leaf in leaves]
    us = elements(first, points.layout)
    units = jax.tree.leaves(points.units) or [None] * len(us)
    return list(map(share, jax.tree.leaves(params), us, units, kept))


def moved(points: Points) -> Points:
    """The points away from θ along their direction; the rest has a scale of 0."""
    away = np.flatnonzero(points.scales[:, 0])
    return points.select(away) if away.size else points
