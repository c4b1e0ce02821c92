"""Second moments of matrices, kept by their means over rows and columns."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from radazo_jax._src.directions.layout import MatrixAxes, layout_of
from radazo_jax._src.optimize.transforms import scalar
from radazo_jax._src.trees import at_least_float32


class FactoredMoment(NamedTuple):
    """The second moment of a stack of matrices, by its means.

    Attributes:
      rows: The means over the columns: of the leaf's shape, with size 1 along the axes
        of the columns.
      columns: The means over the rows, likewise.
    """

    rows: jax.Array
    columns: jax.Array


def initial_moment(value: Any, p: Any, axes: MatrixAxes | None) -> Any:
    """v₀ of a leaf: a `FactoredMoment` if it has matrices, else an array like it."""
    shape, dtype = jnp.shape(p), at_least_float32(jnp.result_type(p))
    value = scalar(value, dtype)
    if axes is None:
        return jnp.full_like(p, value, dtype)

    def without(axes: tuple[int, ...]) -> jax.Array:
        sizes = [1 if axis in axes else n for axis, n in enumerate(shape)]
        return jnp.full(sizes, value, dtype)

    return FactoredMoment(without(axes.columns), without(axes.rows))


def squares(x: jax.Array, axes: MatrixAxes | None, shape: tuple[int, ...]) -> Any:
    """x² of a block of a leaf, as a second moment of the block keeps it.

    Of matrices, these are the block's shares of the means of the whole leaf, which has
    this shape: the shares of all blocks add up to them.
    """
    if axes is None:
        return x * x

    def mean(over: tuple[int, ...]) -> jax.Array:
        size = math.prod(shape[axis] for axis in over)
        return jnp.sum(x * x, axis=over, keepdims=True) / size

    return FactoredMoment(mean(axes.columns), mean(axes.rows))


def product(
    nu: FactoredMoment, axes: MatrixAxes, mean: jax.Array | None = None
) -> jax.Array:
    """R_i C_j / mean(R), zero if all are zero; the mean is one of the whole matrix."""
    if mean is None:
        mean = mean_of(nu, axes)
    return nu.rows * (nu.columns / jnp.where(mean > 0, mean, 1))


def mean_of(nu: FactoredMoment, axes: MatrixAxes) -> jax.Array:
    """The mean of the second moment of each matrix."""
    return jnp.mean(nu.rows, axis=axes.rows, keepdims=True)


def axes_of(dimension_numbers: Any, params: Any) -> list[MatrixAxes | None]:
    """The axes of each leaf that form matrices, in the order of the leaves."""
    if dimension_numbers is None:
        return [leaf.axes for leaf in layout_of(params).leaves]
    given = dimension_numbers
    tree = given(params) if callable(given) else given
    treedef: Any = jax.tree.structure(params)
    found: list[MatrixAxes | None] = treedef.flatten_up_to(tree)
    return found
