"""What an estimator asks for, and what it makes of the answer.

An estimator never evaluates. Its `points` says where the function is to be evaluated,
an evaluator turns these points into values, and its `reduce` makes an estimate of them:

    key ──▶ points ──▶ evaluator ──▶ values ──▶ reduce ──▶ estimate
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from radazo_jax._src.directions import sums
from radazo_jax._src.directions.law import Direction, Law, elements
from radazo_jax._src.directions.layout import Layout, layout_of
from radazo_jax._src.trees import STATIC, as_arrays, at_least_float32


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Points:
    """Where a function is to be evaluated: θ itself, and θ + sₖᵢ uₖ.

    A pytree of a few numbers per point, whatever the size of the parameters. An
    estimator that remembers a tree w, as an earlier point or a gradient, can ask for
    θ + tₖᵢ w + sₖᵢ uₖ; all points share w.

    Attributes:
      directions: The directions uₖ, stacked: [K].
      scales: The scales sₖᵢ, float32, [K, m]: each direction is evaluated at m points.
      with_params: Whether θ is a point as well, the first; static.
      layout: The layout of the parameters; static.
      shift: w, a tree like the parameters, or `None`.
      shifts: The scales tₖᵢ of w, float32, [K, m], or `None`.
    """

    directions: Direction
    scales: jax.Array
    with_params: bool = dataclasses.field(metadata=STATIC)
    layout: Layout = dataclasses.field(metadata=STATIC)
    shift: Any = None
    shifts: jax.Array | None = None

    @property
    def num_points(self) -> int:
        """n, the number of points: K m, and one more if θ is one."""
        return self.scales.size + self.with_params

    def split(self, values: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The value at θ, and the others: [K, m].

        Args:
          values: The values at the points, [n].

        Returns:
          The value at θ, NaN if it is not a point, and the others.

        Raises:
          ValueError: If there are not n values.
        """
        if values.shape != (self.num_points,):
            raise ValueError(
                f"values must have one value per point, shape ({self.num_points},); "
                f"got shape {values.shape}."
            )
        rest = values[self.with_params :].reshape(self.scales.shape)
        nan = jnp.full((), jnp.nan, values.dtype)
        return (values[0] if self.with_params else nan), rest

    def beside(self, shift: Any, shifts: jax.Array) -> "Points":
        """The same points, each moved by a multiple of one tree: w, and [K, m]."""
        moved: Points = dataclasses.replace(self, shift=shift, shifts=shifts)
        return moved

    def along(self, which: slice | np.ndarray) -> "Points":
        """The points along some of the directions alone, by an index of them."""
        some: Points = dataclasses.replace(
            self,
            directions=jax.tree.map(lambda x: x[which], self.directions),
            scales=self.scales[which],
            shifts=None if self.shifts is None else self.shifts[which],
        )
        return some


class Estimate(NamedTuple):
    """What an estimator makes of the values at its points.

    Attributes:
      value: The value at θ, or what stands for it: at least float32, shape ().
      gradient: The estimate of the gradient, a tree like the parameters.
      slope: The derivative along `gradient` as the values show it: shape ().
      num_values: How many values were used: int32, shape ().
      ahead: w, where the estimate is that at θ + w: a tree like the parameters, or
        `None`.
      value_ahead: The value at θ + w, shape (), or `None`.
    """

    value: jax.Array
    gradient: Any
    slope: jax.Array
    num_values: jax.Array
    ahead: Any = None
    value_ahead: jax.Array | None = None


def points_along(
    law: Law,
    key: jax.Array,
    numbers: jax.typing.ArrayLike,
    scales: Sequence[float] | jax.Array,
    params: Any,
    with_params: bool = False,
) -> Points:
    """Points along the directions of these numbers, all at the same scales.

    Args:
      law: The law of the directions.
      key: A typed key; it is consumed.
      numbers: Which of the directions under the key, uint32, [K].
      scales: How far from θ along each, [m]; in the units of the parameters.
      params: θ, a tree of arrays, of which only the shapes are used.
      with_params: Whether θ itself is a point, the first.

    Returns:
      The points.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> import radazo_jax as zo
      >>> law, key, params = zo.sphere(), jax.random.key(0), jnp.zeros(3)
      >>> points = zo.points_along(law, key, jnp.arange(4), [0.1, -0.1], params)
      >>> points.num_points
      8
    """
    layout = layout_of(params)
    numbers = jnp.asarray(numbers).astype(jnp.uint32)
    along = jnp.asarray(scales, jnp.float32)
    directions = sums.sample(law, key, numbers, layout)
    each = jnp.broadcast_to(along, (len(numbers), *along.shape))
    return Points(directions, each, with_params, layout)


def shifted_points(
    law: Law,
    key: jax.Array,
    numbers: jax.typing.ArrayLike,
    which: Sequence[int],
    scales: jax.Array,
    shift: Any,
    shifts: jax.Array,
    params: Any,
) -> Points:
    """θ, and the points θ + tᵢ w + sᵢ uᵢ, with a tree w that all of them share.

    Args:
      law: The law of the directions.
      key: A typed key; it is consumed.
      numbers: Which of the directions under the key, uint32, [K].
      which: Which of these directions each point has, [n].
      scales: sᵢ, float32, [n].
      shift: w, a tree like the parameters.
      shifts: tᵢ, float32, [n].
      params: θ.

    Returns:
      The points; each has a direction of its own, m = 1.
    """
    layout = layout_of(params)
    numbers = jnp.asarray(numbers).astype(jnp.uint32)
    each = jnp.asarray(which)
    directions = sums.sample(law, key, numbers, layout)
    directions = jax.tree.map(lambda x: x[each], directions)
    return Points(directions, scales[:, None], True, layout, shift, shifts[:, None])


def weighted_sum(coefficients: jax.Array, points: Points, params: Any) -> Any:
    """Σₖ coefficientsₖ uₖ over the directions of some points.

    Args:
      coefficients: Real, [K].
      points: The points.
      params: θ.

    Returns:
      A tree like `params`; the sum is taken in float32.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> import radazo_jax as zo
      >>> params = jnp.zeros(3)
      >>> key = jax.random.key(0)
      >>> points = zo.points_along(zo.rademacher(), key, [0, 1], [1.0], params)
      >>> zo.weighted_sum(jnp.ones(2), points, params).shape
      (3,)
    """
    return sums.combine(coefficients, points.directions, points.layout, params)


def candidates(points: Points, params: Any) -> Any:
    """The points as trees of arrays, for what evaluates them outside of a program.

    Args:
      points: The points, n of them.
      params: θ.

    Returns:
      A tree like `params` whose leaves have one axis more, the first, of size n.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> import radazo_jax as zo
      >>> estimator, params = zo.central_difference(num_directions=3), jnp.zeros(2)
      >>> points = estimator.points(jax.random.key(0), params, ())
      >>> zo.candidates(points, params).shape
      (6, 2)
    """
    params = as_arrays(params)

    def moved(direction: Direction, scale: jax.Array, shift: Any) -> Any:
        us = jax.tree.unflatten(
            points.layout.treedef, elements(direction, points.layout)
        )
        at = shifted(params, points.shift, shift)
        return jax.tree.map(lambda p, u: _step(p, scale * u), at, us)

    at_scales = jax.vmap(moved, in_axes=(None, 0, 0))
    moved_params = jax.vmap(at_scales)(points.directions, points.scales, points.shifts)

    def flat(p: jax.Array, moved: jax.Array) -> jax.Array:
        rows = lax.collapse(moved, 0, 2)
        return jnp.concatenate([p[None], rows]) if points.with_params else rows

    return jax.tree.map(flat, params, moved_params)


def shifted(params: Any, shift: Any, distance: jax.Array | None) -> Any:
    """θ + t w, rounded to the dtypes of θ; θ itself without a w.

    Args:
      params: θ.
      shift: w, a tree like θ, or `None`.
      distance: t, or `None`.
    """
    if distance is None:
        return params

    def move(p: jax.Array, w: jax.Array) -> jax.Array:
        wide = at_least_float32(p.dtype)
        return _step(p, distance.astype(wide) * w.astype(wide))

    return jax.tree.map(move, params, shift)


def _step(p: jax.Array, distance: jax.Array) -> jax.Array:
    wide = at_least_float32(p.dtype)
    return (p.astype(wide) + distance.astype(wide)).astype(p.dtype)
