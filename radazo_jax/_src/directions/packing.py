"""Numbers that are drawn together with their neighbors, cheaper than one by one."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from radazo_jax._src.directions.layout import Part
from radazo_jax._src.numbers import counter
from radazo_jax._src.numbers.counter import Counter, Positions

# So many neighbors, from a multiple of it on, are drawn together.
GROUP = 32


class Packing(NamedTuple):
    """The draw of the numbers of a group of neighbors, as a few units.

    Their absolute values are below 8, so that they fit into the exact norm.

    Attributes:
      per_group: The number of units of a group: a power of two. Units are numbered
        through all groups.
      width: The number of 32-bit words of a unit.
      draw: `draw(key, number, at)` draws the units of these numbers.
      unpack: `unpack(units, start, shape)` returns the elements of an array, of which
        the first is number `start` of the first group. Units may be stacked.
      choose: `choose(size, stored)` returns a function of two functions without
        arguments that calls the first, which draws units, or the second, which draws
        the numbers one by one. `stored` tells whether so many numbers may be stored.
        Otherwise the draw should be fused into whatever reads it.
    """

    per_group: int
    width: int
    draw: Callable[[jax.Array, jax.Array, Positions], jax.Array]
    unpack: Callable[[jax.Array, Any, tuple[int, ...]], Any]
    choose: Callable[[int, bool], Callable[..., Any]]

    def keeps(self, start: Any) -> bool:
        """Whether nothing but a rearrangement is left to do with stored units.

        Otherwise XLA's CPU backend would align a unit for each of its elements.
        """
        return self.width > 1 or (isinstance(start, int) and start == 0)

    def num_units(self, start: Any, size: int) -> int:
        """The number of units in which so many neighbors lie."""
        if isinstance(start, int) and self.keeps(start):
            return self.per_group * -(-(start + size) // GROUP)
        # One more, for an unknown start, or to be shifted into the last.
        return self.per_group * (-(-size // GROUP) + 1)

    def first(self, at: Positions) -> Counter:
        """The number of the first unit of the group in which a position lies."""
        group = Counter(at.hi, at.lo & np.uint32(2**32 - GROUP))
        return counter.shift_right(group, (GROUP // self.per_group).bit_length() - 1)

    def units(self, part: Part) -> Part:
        """The units in which the numbers of an array lie."""
        group, start = divmod(part.offset, GROUP)
        return Part((self.num_units(start, part.size),), self.per_group * group)


def together(units: Callable[[], Any], one_by_one: Callable[[], Any]) -> Any:
    """The choice of units everywhere."""
    del one_by_one
    return units()


def apart(units: Callable[[], Any], one_by_one: Callable[[], Any]) -> Any:
    """The choice of single numbers everywhere."""
    del units
    return one_by_one()
