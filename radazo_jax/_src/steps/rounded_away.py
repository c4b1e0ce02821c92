"""The part of perturbations that parameters round away."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax

from radazo_jax._src.base import checks, xla
from radazo_jax._src.base.trees import is_traced, wide
from radazo_jax._src.directions.distribution import elements, num_random
from radazo_jax._src.estimates import gradients
from radazo_jax._src.estimates.contracts import Draw, GradientEstimator, Points
from radazo_jax._src.estimates.vectorized import vectorized

# A share of a perturbation beyond which a run warns.
_LOST = 0.7

# A share that does no harm, and how often a distance is doubled to find it.
_FEW, _DOUBLINGS = 0.3, 30


def by_rounding(points: Points, params: optax.Params) -> dict[str, float]:
    """Returns the share of each leaf's perturbation that its dtype rounds away."""
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    shares = jax.device_get(_lost(moved(points), params))
    return {
        jax.tree_util.keystr(path): float(share)
        for path, share in zip(paths, shares, strict=True)
    }


def warn_of_rounding(
    estimator: GradientEstimator, draw: Draw, params: optax.Params, state: object
) -> None:
    """Warns if narrow parameters round most of their perturbation away.

    Args:
      estimator: The estimator.
      draw: The draw of the first step.
      params: The parameters. If they are traced, nothing is known of them.
      state: The state of the estimator.
    """
    narrow = any(leaf.dtype.itemsize < 4 for leaf in jax.tree.leaves(params))
    if not narrow or is_traced((params, draw, state)):
        return
    points, _ = gradients.points_of(estimator, vectorized(1), draw, params, state)
    lost = by_rounding(points, params)
    bad = {name: share for name, share in lost.items() if share > _LOST}
    if bad:
        name, share = max(bad.items(), key=lambda item: item[1])
        enough = _kept(points, params)
        checks.warn(
            f"{len(bad)} of the {len(lost)} arrays of params round most of their "
            f"perturbation away: params{name} loses {share:.0%} of it, so that its "
            f"gradient is one of rounding errors. Take smoothing={enough:.1g} or more, "
            "keep these arrays in float32, or take low_rank()."
            + checks.refer_to("diagnose")
        )


def _kept(points: Points, params: optax.Params) -> float:
    """Returns a distance at which rounding takes little of the perturbations."""
    for _ in range(_DOUBLINGS):
        points = dataclasses.replace(points, scales=2 * points.scales)
        if max(by_rounding(points, params).values()) <= _FEW:
            break
    return float(np.max(np.abs(points.scales)))


@jax.jit
def _lost(points: Points, params: optax.Params) -> list[jax.Array]:
    first = jax.tree.map(lambda x: x[0], points.directions)
    scale = points.scales[0, 0]

    def share(p: jax.Array, u: jax.Array, kept: bool) -> jax.Array:
        if kept:
            return jnp.zeros(())
        before = wide(p)
        wanted = scale.astype(before.dtype) * u.astype(before.dtype)
        # A fused program would compute with the sum before it is rounded.
        moved = wide(xla.rounded((before + wanted).astype(p.dtype))) - before
        norm, lost = (jnp.sqrt(jnp.sum(x**2)) for x in (wanted, moved - wanted))
        return (lost / jnp.where(norm > 0, norm, 1)).astype(jnp.float32)

    # A matrix that is perturbed by factors is multiplied as it is.
    leaves = points.layout.leaves
    distribution = first.distribution
    kept = [num_random(distribution, [leaf]) < leaf.size for leaf in leaves]
    us = elements(first, points.layout)
    return list(map(share, jax.tree.leaves(params), us, kept))


def moved(points: Points) -> Points:
    """Selects the points away from θ along their direction, of a scale other than 0."""
    away = np.flatnonzero(points.scales[:, 0])
    return points.select(away) if away.size else points
