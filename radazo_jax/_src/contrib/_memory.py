"""Parts of several estimators: past queries, wide arrays, one central difference."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from radazo_jax import distributions, estimators


class QueryBuffer(NamedTuple):
    """The directions of past points, the oldest first: 16 bytes each.

    Attributes:
      key_data: The words of the keys of the directions: uint32, [size, 2].
      numbers: Their numbers: uint32, [size].
      scales: Their scales: float32, [size].
    """

    key_data: jax.Array
    numbers: jax.Array
    scales: jax.Array

    def directions(
        self, distribution: distributions.Distribution
    ) -> distributions.Direction:
        """Returns the directions, to be drawn again, stacked."""
        keys = jax.random.wrap_key_data(self.key_data, impl="threefry2x32")
        return distributions.Direction(keys, self.numbers, self.scales, distribution)

    def followed_by(self, points: estimators.Points) -> "QueryBuffer":
        """Returns the buffer of the same size that ends with the points' directions."""
        new = points.directions
        added = QueryBuffer(jax.random.key_data(new.key), new.number, new.scale)
        return jax.tree.map(followed_by, self, added)


def empty(size: int) -> QueryBuffer:
    """Returns a buffer before the first query."""
    return QueryBuffer(
        jnp.zeros((size, 2), jnp.uint32),
        jnp.zeros(size, jnp.uint32),
        jnp.zeros(size, jnp.float32),
    )


def as_wide(x: jax.typing.ArrayLike) -> jax.Array:
    """Returns an array of at least float32."""
    x = jnp.asarray(x)
    return x.astype(jnp.float32) if jnp.finfo(x.dtype).bits < 32 else x


def wide_zeros(tree: optax.Params) -> optax.Params:
    """Returns zeros like the leaves, of at least float32."""
    return jax.tree.map(lambda x: jnp.zeros_like(as_wide(x)), tree)


def none(shape: tuple[int, ...], like: optax.Params) -> jax.Array:
    """Returns unknown values: the largest number, because NaN is a failed value.

    Args:
      shape: The shape of the values.
      like: A tree, in whose widest dtype they are, but at least in float32.
    """
    dtypes = [as_wide(x).dtype for x in jax.tree.leaves(like)]
    dtype = max(dtypes, key=lambda x: x.itemsize, default=jnp.dtype(jnp.float32))
    return jnp.full(shape, jnp.finfo(dtype).max, dtype)


def known(values: jax.Array) -> jax.Array:
    """Returns the values with NaN for those that are not known yet."""
    return jnp.where(values == jnp.finfo(values.dtype).max, jnp.nan, values)


def finite_mean(values: jax.Array) -> jax.Array:
    """Returns the mean of the values that are finite; NaN without any."""
    return jnp.mean(values, where=jnp.isfinite(values))


def along_tree(
    points: estimators.Points,
    values: estimators.Values,
    smoothing: float,
    tree: optax.Params,
) -> estimators.Estimate:
    """Returns the estimate (f(θ + μ w) − f(θ − μ w)) / 2μ · w along one tree w.

    If one of the values is not finite, the step is skipped.
    """
    above, below = values.along[0]
    slope = (above - below) / (2 * smoothing)
    return estimators.Estimate(
        finite_mean(values.along),
        slope=slope**2,
        num_values=jnp.where(jnp.isfinite(slope), 2, 0).astype(jnp.int32),
        gradient=points.of_tree(tree).scaled(slope),
    )


def followed_by(old: jax.Array, new: jax.Array) -> jax.Array:
    """Appends `new`, and drops as many of the oldest entries."""
    return jnp.concatenate([old, new])[len(new) :]


def updated_if_usable(
    estimate: estimators.Estimate, before: optax.Params, after: optax.Params
) -> optax.Params:
    """Returns the state after an estimate, or before it if no value could be used."""
    return optax.tree.where(estimate.num_values > 0, after, before)
