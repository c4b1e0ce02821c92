"""Points along low-rank directions, as the factors of their matrices."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax

from radazo_jax._src.contracts import Points
from radazo_jax._src.directions.distribution import Direction, lazy
from radazo_jax._src.directions.elements import Elements, LowRankFactors
from radazo_jax._src.directions.layout import Leaf
from radazo_jax._src.directions.low_rank import LowRank
from radazo_jax._src.names import checks_names


@checks_names
def candidate_factors(points: Points) -> tuple[optax.Params, optax.Params]:
    """Returns the displacements of points along `low_rank` directions as factors.

    Point i is W + Aᵢ Bᵢᵀ for each matrix W of θ: a LoRA adapter, which an inference
    server adds to its own copy of θ. If θ is itself a point, its B is zero.

    Args:
      points: The points, n of them. All leaves must be drawn of low rank: a leaf that
        is no matrix, or has a side no longer than the rank, is drawn dense.

    Returns:
      Two trees like the parameters, of A and of B, in float32 and of shapes
      [n, …, rows, r] and [n, …, columns, r]. The axes … stack matrices, as the layers
      of a scan. Several axes of rows are joined, and likewise several axes of columns.

    Raises:
      TypeError: If the directions are of another distribution.
      ValueError: If a leaf is drawn dense, or the points are moved by a shift.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> import radazo_jax as zo
      >>> estimator = zo.central_difference(zo.low_rank(2), num_directions=3)
      >>> params = {"layers": jnp.zeros((4, 8, 5))}
      >>> draw = zo.estimators.Draw.once(jax.random.key(0))
      >>> points, _ = estimator.points(draw, params, ())
      >>> a, b = zo.estimators.candidate_factors(points)
      >>> a["layers"].shape, b["layers"].shape
      ((6, 4, 8, 2), (6, 4, 5, 2))

    References:
      Hu et al., LoRA: Low-Rank Adaptation of Large Language Models, 2021,
      <https://arxiv.org/abs/2106.09685>. Sarkar et al., Evolution Strategies at the
      Hyperscale, 2025, <https://arxiv.org/abs/2511.16652>.
    """
    distribution, layout = points.directions.distribution, points.layout
    if not isinstance(distribution, LowRank):
        raise TypeError(
            f"points must be along directions of low_rank; got {distribution!r}."
        )
    if points.shift is not None:
        raise ValueError(
            "points must be θ + s u, without another tree; got points with a shift."
        )
    for leaf in layout.leaves:
        if distribution.axes(leaf) is None:
            raise ValueError(
                f"points must move matrices of low rank alone; got the leaf "
                f"{leaf.path} of shape {leaf.shape}, which is drawn dense. Tune the "
                "matrices alone, and let the function hold the other leaves."
            )

    def of_direction(direction: Direction) -> list[tuple[jax.Array, jax.Array]]:
        return [
            _matrices(lazy(direction, leaf, layout.dimension), distribution, leaf)
            for leaf in layout.leaves
        ]

    # θ is a point along the first direction, at scale 0.
    num_base, num_along = int(points.includes_params), points.scales.shape[1]
    each = np.repeat(np.arange(len(points.scales)), num_along)
    which = np.concatenate([np.zeros(num_base, int), each])
    scales = (points.scales * points.directions.scale[:, None]).reshape(-1)
    scales = jnp.concatenate([jnp.zeros(num_base, scales.dtype), scales])

    def scaled(b: jax.Array) -> jax.Array:
        return scales.reshape(-1, *(1,) * (b.ndim - 1)) * b[which]

    factors = jax.vmap(of_direction)(points.directions)
    return (
        jax.tree.unflatten(layout.treedef, [a[which] for a, _ in factors]),
        jax.tree.unflatten(layout.treedef, [scaled(b) for _, b in factors]),
    )


def _matrices(
    factors: Elements, distribution: LowRank, leaf: Leaf
) -> tuple[jax.Array, jax.Array]:
    """The factors of a leaf: [stacked, …, rows, r] and [stacked, …, columns, r]."""
    axes = distribution.axes(leaf)
    assert axes is not None and isinstance(factors, LowRankFactors)
    both = (*axes.rows, *axes.columns)
    stacked = [i for i in range(len(leaf.shape)) if i not in both]
    order = (*stacked, *both, len(leaf.shape))
    sizes = [leaf.shape[i] for i in stacked]

    def matrix(factor: jax.Array, side: tuple[int, ...]) -> jax.Array:
        length = math.prod(leaf.shape[i] for i in side)
        return factor.transpose(order).reshape(*sizes, length, distribution.rank)

    return matrix(factors.a, axes.rows), matrix(factors.b, axes.columns)
