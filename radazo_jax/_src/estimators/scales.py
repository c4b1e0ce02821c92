"""Sizes of parameters: the changes of them that change a function measurably."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from radazo_jax._src.trees import as_flat, number

# A size changes the value by about this share of it, within this factor.
_AIM, _WITHIN = 1e-2, 10.0

# Differences of values below so many roundings are hidden. Sizes are sought if some are
# hidden, or if they are apart by this factor.
_HIDDEN, _APART = 4.0, 1e4

# Factors of a distance: of the next one at most and at least, of the next one if the
# difference is hidden, and of the size then; after so many rounds, the latest guess is
# taken.
_LONGEST, _SHORTEST, _IF_HIDDEN, _GUESS_IF_HIDDEN = 1e6, 1e-4, 1e4, 1e3
_MOST_ROUNDS = 10

# The share of a distance at which the value failed.
_IF_FAILED = 1e-2

# The unit of points between two bounds, as a share of their distance.
_OF_WIDTH = 2 / 3

# A short difference belongs to a jump if it is this share of the aim.
_JUMP = 3e-2


class Sizes(NamedTuple):
    """The sizes of parameters, or the search for them.

    Attributes:
      round: The number of the round of the search, 0 if there is none: int32, shape ().
      distances: The distance of each coordinate in this round: [d].
      guesses: The sizes as far as they are known: [d].
      found: Whether the search for a size has ended: bool, [d].
      known: Whether the search has ended: bool, shape ().
      origin: The parameters at which it was begun: [d].
    """

    round: jax.Array
    distances: jax.Array
    guesses: jax.Array
    found: jax.Array
    known: jax.Array
    origin: jax.Array

    @classmethod
    def unknown(cls, dimension: int, dtype: jax.typing.DTypeLike) -> "Sizes":
        """Sizes that nothing has asked for yet: 1."""
        return cls(
            number(0, jnp.int32),
            jnp.zeros(dimension, dtype),
            jnp.ones(dimension, dtype),
            jnp.zeros(dimension, jnp.bool_),
            number(False, jnp.bool_),
            jnp.zeros(dimension, dtype),
        )

    def begun(self, at: jax.Array, bounds: tuple[Any, Any] | None) -> "Sizes":
        """The sizes as a search begins with them.

        Args:
          at: The parameters, [d].
          bounds: The bounds, trees like the parameters: finite widths are sizes.
        """
        dtype = self.distances.dtype
        sizes = self._replace(origin=at.astype(dtype))
        if bounds is None:
            return sizes
        low, high = (as_flat(bound) for bound in bounds)
        widths = high - low
        found = jnp.isfinite(widths)
        guesses = jnp.where(found & (widths > 0), widths, 1)
        return sizes._replace(guesses=guesses.astype(dtype), found=found)

    def sought(
        self, needed: jax.Array, steps: jax.Array, changes: jax.Array, value: jax.Array
    ) -> "Sizes":
        """The search, begun if it is needed: the first differences are a round of it.

        Args:
          needed: Whether it is needed: bool, shape ().
          steps: The displacements of the coordinates, 0 for those that did not move:
            [d].
          changes: The differences of the values there: [d].
          value: The value at the parameters: shape ().
        """
        begun = self._replace(
            distances=abs(steps).astype(self.distances.dtype),
            # Without room to move, any size is one.
            found=self.found | (steps == 0),
        )
        found = begun.after(changes, value)
        return optax.tree.where(needed, found, self)

    def typical(self, at: jax.Array, least: float) -> jax.Array:
        """The units of the distances of differences: [d].

        Args:
          at: The parameters, [d].
          least: The least of it, in sizes.
        """
        far = jnp.where(self.known, abs(at - self.origin), abs(at))
        return jnp.maximum(far, least * self.used())

    def used(self) -> jax.Array:
        """The sizes if they are known, else 1: [d]."""
        return jnp.where(self.known, self.guesses, 1)

    def after(self, changes: jax.Array, value: jax.Array) -> "Sizes":
        """The search after a round.

        Args:
          changes: The differences of the values at the distances: [d].
          value: The value at the parameters: shape ().
        """
        aim = _AIM * abs(value)
        change = abs(changes)
        finite = jnp.isfinite(change)
        ratio = jnp.where(finite & (change > 0), aim / change, 0)
        hidden = finite & ~is_measured(changes, value)
        met = finite & (ratio >= 1 / _WITHIN) & (ratio <= _WITHIN)
        # A short difference is linear, and a long one at most quadratic.
        root = jnp.where(finite, jnp.sqrt(ratio), _IF_FAILED)
        too_far = ~finite | (change > aim)
        guess = jnp.where(too_far, root, jnp.where(hidden, _GUESS_IF_HIDDEN, ratio))
        longer = jnp.where(hidden, _IF_HIDDEN, jnp.clip(ratio, _WITHIN, _LONGEST))
        factor = jnp.where(too_far, jnp.maximum(root, _SHORTEST), longer)
        guess = self.distances * jnp.where(met, 1, guess)
        found = self.found | met
        ends = jnp.all(found) | (self.round >= _MOST_ROUNDS)
        return self._replace(
            round=jnp.where(ends, 0, self.round + 1).astype(jnp.int32),
            distances=jnp.where(found, self.distances, factor * self.distances),
            guesses=jnp.where(self.found, self.guesses, guess),
            found=found,
            known=ends,
        )


def units(at: jax.Array, bounds: tuple[Any, Any] | None) -> jax.Array:
    """The units of points that are far apart, if nothing else is known: [d].

    Two thirds of the distance of two finite bounds, or else the root mean square of
    the parameters, but 1 at least.

    Args:
      at: The parameters, [d].
      bounds: The bounds, trees like the parameters.
    """
    typical = jnp.maximum(1, jnp.sqrt(jnp.mean(at**2)))
    unit = jnp.broadcast_to(typical, at.shape)
    if bounds is None:
        return unit
    low, high = (as_flat(bound) for bound in bounds)
    width = high - low
    usable = jnp.isfinite(width) & (width > 0)
    return jnp.where(usable, _OF_WIDTH * width, unit)


def is_measured(changes: jax.Array, value: jax.Array) -> jax.Array:
    """Whether differences of values exceed their rounding: bool, [d]."""
    return abs(changes) > _HIDDEN * jnp.finfo(value.dtype).eps * abs(value)


def are_of_steps(changes: jax.Array, value: jax.Array, moved: jax.Array) -> jax.Array:
    """Whether short differences say that a function is in steps: bool, shape ().

    Most of them are 0, or as large as differences at distances that are longer by
    orders of magnitude.

    Args:
      changes: The differences of the values at short distances: [d].
      value: The value at the parameters: shape ().
      moved: Whether a coordinate has moved: bool, [d].
    """
    jumps = abs(changes) > _JUMP * _AIM * abs(value)
    of_steps = moved & ((changes == 0) | jumps)
    return 2 * jnp.sum(of_steps) > jnp.sum(moved)


def are_needed(changes: jax.Array, value: jax.Array, steps: jax.Array) -> jax.Array:
    """Whether slopes are too unlike for parameters of one size: bool, shape ().

    Args:
      changes: The differences of the values, NaN if they are missing: [d].
      value: The value at the parameters: shape ().
      steps: The displacements of the coordinates, 0 for those that did not move: [d].
    """
    usable = (steps != 0) & jnp.isfinite(changes)
    hidden = jnp.any(usable & ~is_measured(changes, value))
    slopes = abs(changes / jnp.where(usable, steps, 1))
    largest = jnp.max(jnp.where(usable, slopes, 0))
    least = jnp.min(jnp.where(usable, slopes, jnp.inf))
    return hidden | (largest > _APART * least)
