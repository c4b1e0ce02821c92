"""Points in a box, drawn in a space without bounds."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

# The distance from a bound in which points are drawn closer to it: as a share of the
# distance of the bounds, or of the unit of a parameter with one bound.
_MARGIN = 0.05


class Box(NamedTuple):
    """A box, and the space in which points are drawn, which has no bounds.

    A parameter x near its lower bound l is drawn as g, with x − l = (g − l + a)²/(4a);
    likewise near its upper bound. What is drawn beyond the bound is reflected. So a
    function that falls toward a bound has a minimum there, to which σ converges.

    Attributes:
      lower: The lower bounds, minus infinity without: [d].
      upper: The upper bounds: [d].
      margin: a, the distance from a bound below which x and g differ: [d].
    """

    lower: jax.Array
    upper: jax.Array
    margin: jax.Array

    @classmethod
    def of(cls, lower: jax.Array, upper: jax.Array, unit: jax.Array) -> "Box":
        """The box of these bounds.

        Args:
          lower: The lower bounds: [d].
          upper: The upper bounds: [d].
          unit: The unit of each parameter, used if it has fewer than two bounds: [d].
        """
        width = upper - lower
        unit = jnp.where(jnp.isfinite(width), width, unit)
        # Between equal bounds, nothing moves.
        return cls(lower, upper, jnp.where(unit > 0, _MARGIN * unit, 1))

    def drawn(self, x: jax.Array) -> jax.Array:
        """The g of a point in the box."""
        lower, upper, a = self
        above, below = jnp.maximum(x - lower, 0), jnp.maximum(upper - x, 0)
        g = jnp.where(above < a, lower - a + 2 * jnp.sqrt(a * above), x)
        return jnp.where(below < a, upper + a - 2 * jnp.sqrt(a * below), g)

    def moved(self, x: jax.Array, away: jax.Array) -> jax.Array:
        """The displacement from x in the box of a displacement from its g: [d]."""
        lower, upper, a = self
        start = self.drawn(x)
        g = start + away
        span = upper - lower + 2 * a
        above = abs(g - lower + a)  # Reflected at the lower end.
        inside = jnp.isfinite(span)
        turn = jnp.where(inside, 2 * span, 1)
        above = jnp.where(inside, above % turn, above)
        above = jnp.where(above > span, turn - above, above)
        below = jnp.where(inside, span - above, abs(upper + a - g))
        near_lower, near_upper = above < 2 * a, below < 2 * a
        far = jnp.where(jnp.isfinite(lower), lower - a + above, upper + a - below)
        far = jnp.where(jnp.isfinite(lower) | jnp.isfinite(upper), far, g)
        found = jnp.where(near_lower, lower + above**2 / (4 * a), far)
        found = jnp.where(near_upper, upper - below**2 / (4 * a), found)
        # If nothing changes, nothing is rounded.
        same = (start == x) & (g >= lower + a) & (g <= upper - a)
        found = jnp.where(same, away, found - x)
        return jnp.where(lower == upper, 0, found)

    def shift(self, x: jax.Array, away: jax.Array) -> jax.Array:
        """The displacement of a mean, which is not reflected: [d]."""
        lower, upper, a = self
        start = self.drawn(x)
        away = jnp.clip(away, lower - a - start, upper + a - start)
        return self.moved(x, away)
