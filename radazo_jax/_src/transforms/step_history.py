"""The directions of the latest steps, by a few numbers per step."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from radazo_jax._src import checks
from radazo_jax._src.directions.combination import LinearCombination
from radazo_jax._src.directions.distribution import Direction


class StepHistory(NamedTuple):
    """The coefficients and directions of the latest H steps, in turn.

    Step t is at index t mod H. A step without a direction k has coefficient 0.

    Attributes:
      key_data: The words of the keys: uint32, [H, max_directions, 2].
      number: The numbers of the directions: uint32, [H, max_directions].
      scale: The factors of their elements: float32, [H, max_directions].
      coefficient: The coefficients: at least float32, [H, max_directions].
    """

    key_data: jax.Array
    number: jax.Array
    scale: jax.Array
    coefficient: jax.Array

    @classmethod
    def init(cls, window: int, max_directions: int, dtype: np.dtype) -> "StepHistory":
        """The history before the first step."""
        shape = (window, max_directions)
        return cls(
            jnp.zeros((*shape, 2), jnp.uint32),
            jnp.zeros(shape, jnp.uint32),
            jnp.zeros(shape, jnp.float32),
            jnp.zeros(shape, dtype),
        )

    def with_step(
        self, index: jax.Array, coefficients: jax.Array, directions: Direction
    ) -> "StepHistory":
        """The history with a new step, which replaces the oldest."""
        step = StepHistory(
            jax.random.key_data(directions.key),
            directions.number,
            directions.scale,
            coefficients,
        )

        def write(kept: jax.Array, new: jax.Array) -> jax.Array:
            row = jnp.zeros(kept.shape[1:], kept.dtype)
            row = row.at[: len(new)].set(new.astype(kept.dtype))
            return kept.at[index].set(row)

        return StepHistory(*map(write, self, step))

    def weighted(
        self, weights: jax.Array, like: Direction
    ) -> tuple[jax.Array, Direction]:
        """The coefficients times the weights of their steps, and the directions.

        Args:
          weights: The weights of the steps, [H].
          like: The directions of a step, stacked: [K].

        Returns:
          Arrays and directions, stacked: [H · K].
        """
        key_data, number, scale, coefficient = (
            x[:, : len(like.scale)].reshape(-1, *x.shape[2:]) for x in self
        )
        key = jax.random.wrap_key_data(key_data, impl=jax.random.key_impl(like.key))
        repeated = jnp.repeat(weights, len(like.scale))
        directions = Direction(key, number, scale, like.distribution)
        return repeated * coefficient, directions


def check_combination(
    combination: object, max_directions: int
) -> tuple[jax.Array, Direction]:
    """The coefficients and directions of a combination of directions alone.

    Raises:
      TypeError: If it is not one.
      ValueError: If there are more directions than a history has room for.
    """
    if not isinstance(combination, LinearCombination):
        raise TypeError(
            "combination must be passed to the update, as solver, minimize and "
            "estimate_gradient(inner=...) do, because replayed moments need the "
            f"directions of the gradient; got {combination!r:.100}. Use them without "
            "optax.MultiSteps, with more directions per step instead."
            + checks.refer_to("scale_by_replayed_radazo")
        )
    coefficients, directions = combination.coefficients, combination.directions
    if combination.trees or coefficients is None or directions is None:
        raise TypeError(
            "combination must be a sum of directions alone; got one with "
            f"{len(combination.trees)} trees. Use stored moments with this estimator."
        )
    if len(coefficients) > max_directions:
        raise ValueError(
            "max_directions must be at least the number of directions per step, "
            f"{len(coefficients)}; got {max_directions}. Pass max_directions="
            f"{len(coefficients)}."
        )
    # Without stored elements, which the other steps do not have.
    drawn = Direction(
        directions.key, directions.number, directions.scale, directions.distribution
    )
    return coefficients, drawn
