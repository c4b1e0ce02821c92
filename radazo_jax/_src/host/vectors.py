"""`Vectors`: trees of parameters as the vectors of a method on the host."""

from contextlib import suppress
from fractions import Fraction
from typing import Any

import jax
import numpy as np
import optax

from radazo_jax._src.base import checks, shown, trees
from radazo_jax._src.methods.contract import Box
from radazo_jax._src.steps import box
from radazo_jax._src.steps.box import Bounds

# A step is a fraction with at most this denominator if there is one, so that multiples
# of 0.1 are the numbers that are written 0.1, 0.2 and 0.3.
_DENOMINATOR = 10**6

# A bound is a multiple of a step up to so many roundings.
_ROUNDINGS, _EPS = 4, np.finfo(np.float64).eps


def _fraction(step: float) -> tuple[float, float]:
    """Returns a numerator and a denominator of a step."""
    found = Fraction(step).limit_denominator(_DENOMINATOR)
    return (found.numerator, found.denominator) if float(found) == step else (step, 1.0)


class Vectors:
    """A conversion between trees of parameters and vectors of float64.

    Attributes:
      tree: The tree with which it was made, of NumPy arrays.
      dimension: d, the number of parameters.
      step: Spacing of the values of each parameter, 0 if it is continuous, shape [d].
    """

    def __init__(self, params: optax.Params, step: optax.Params | None = None):
        """Reads a tree.

        Args:
          params: The tree.
          step: Spacing of the values: a number, or a tree like the parameters of
            numbers and arrays that broadcast to the leaves. `None` is 0.

        Raises:
          ValueError: If `step` is none of these, negative or not finite.
        """
        self.tree = trees.as_numpy(params)
        leaves, self._treedef = jax.tree.flatten(self.tree)
        self._leaves, self.dimension = [], 0
        for leaf in leaves:
            begin, self.dimension = self.dimension, self.dimension + leaf.size
            place = slice(begin, self.dimension)
            self._leaves.append((place, leaf.shape, leaf.dtype))
        self._exact = all(dtype == np.float64 for *_, dtype in self._leaves)
        self.step = self._checked(step)
        self._gridded = self.step > 0
        steps, which = np.unique(self.step, return_inverse=True)
        fractions = np.array([_fraction(x) for x in steps.tolist()], np.float64)
        self._above, self._below = fractions.reshape(-1, 2)[which].T

    def _checked(self, step: optax.Params | None) -> np.ndarray:
        """Returns the spacings as a vector, if they are as they must be."""
        if step is None:
            return np.zeros(self.dimension)
        found = self._vector(step)
        if found is None or not np.all((found >= 0) & (found < np.inf)):
            got = " ".join(repr(step).split())
            raise ValueError(
                "step must be a number of at least 0, or a tree of them like params, "
                f"{shown.tree(self.tree)}; got {got}. Pass 1 for whole numbers, and 0 "
                "for continuous parameters."
            )
        return found

    def flat(self, tree: optax.Params) -> np.ndarray:
        """Returns the vector of a tree like the parameters, or of a number: [d]."""
        found = self._vector(tree)
        if found is None:
            raise ValueError(
                "scale must be a number, or a tree like params, "
                f"{shown.tree(self.tree)}; got {shown.tree(tree)}."
            )
        return found

    def _vector(self, tree: optax.Params) -> np.ndarray | None:
        """Returns the vector of numbers and arrays that broadcast to the leaves."""
        treedef: Any = self._treedef
        with suppress(TypeError, ValueError):
            leaves = treedef.flatten_up_to(trees.filled(tree, self.tree))
            arrays = [np.asarray(x).astype(float, casting="same_kind") for x in leaves]
            return np.concatenate(
                [
                    np.broadcast_to(x, shape).ravel()
                    for x, (_, shape, _) in zip(arrays, self._leaves, strict=True)
                ]
                or [np.zeros(0)]
            )
        return None

    def tree_of(self, points: np.ndarray) -> optax.Params:
        """Returns points, [..., d], as a tree of arrays that nobody else has."""
        leaves = [
            points[..., place].astype(dtype).reshape(points.shape[:-1] + shape)
            for place, shape, dtype in self._leaves
        ]
        return jax.tree.unflatten(self._treedef, leaves)

    def round(self, points: np.ndarray) -> np.ndarray:
        """Returns points, [..., d], rounded to the steps and dtypes of parameters."""
        points = np.asarray(points, np.float64)
        if np.any(self._gridded):
            with np.errstate(all="ignore"):
                multiples = self._multiples(np.rint(points / self.step))
            points = np.where(self._gridded, multiples, points)
        return self._cast(points)

    def _cast(self, points: np.ndarray) -> np.ndarray:
        """Returns points, [..., d], rounded to the dtypes of the parameters."""
        if self._exact:
            return points
        rounded = points.copy()
        with np.errstate(over="ignore"):
            for place, _, dtype in self._leaves:
                rounded[..., place] = points[..., place].astype(dtype)
        return rounded

    def _multiples(self, numbers: np.ndarray) -> np.ndarray:
        """Returns multiples of the steps, with no negative zero."""
        return numbers * self._above / self._below + 0.0

    def box(self, bounds: Bounds | None) -> Box:
        """Returns bounds as vectors, rounded toward each other."""
        if bounds is None:
            none = np.full(self.dimension, np.inf)
            return Box(-none, none)
        # In float64, so that bounds are not rounded outward before.
        wide = jax.tree.map(lambda x: x.astype(np.float64), self.tree)
        with jax.enable_x64(True):
            lower, upper = map(self.flat, box.as_trees(bounds, wide))
        found = Box(self._inward(lower, 1), self._inward(upper, -1))
        empty = np.flatnonzero(found.lower > found.upper)
        if len(empty):
            i = int(empty[0])
            raise ValueError(
                f"step must have a multiple within the bounds; got {self.step[i]} and "
                f"the bounds {lower[i]} and {upper[i]} at {self.name(i)}."
            )
        return found

    def name(self, i: int) -> str:
        """Returns the name of the parameter of this number."""
        paths = jax.tree_util.tree_leaves_with_path(self.tree)
        leaf = next(k for k, x in enumerate(self._leaves) if i < x[0].stop)
        place, shape, _ = self._leaves[leaf]
        at = list(map(int, np.unravel_index(i - place.start, shape)))
        return f"params{jax.tree_util.keystr(paths[leaf][0])}{at or ''}"

    def warn_of_rounding(self, start: np.ndarray) -> None:
        """Warns if a start, [d], is not the tree because this is no multiple."""
        given = self.flat(self.tree)
        moved = np.flatnonzero((start != given) & self._gridded)
        if len(moved):
            i = int(moved[0])
            checks.warn(
                f"params must be multiples of step; got {given[i]} at {self.name(i)}, "
                f"with the step {self.step[i]}. The run starts at {start[i]}."
            )

    def _inward(self, bound: np.ndarray, sign: int) -> np.ndarray:
        if np.any(self._gridded):
            with np.errstate(all="ignore"):
                nearest = np.rint(bound / self.step)
                multiples = self._multiples(nearest)
                # A bound is a multiple up to the rounding of both.
                same = self._cast(multiples) == self._cast(bound)
                same |= abs(multiples - bound) <= _ROUNDINGS * _EPS * abs(bound)
                outside = ~same & (sign * multiples < sign * bound)
                multiples = self._multiples(nearest + sign * outside)
            bound = np.where(self._gridded & np.isfinite(bound), multiples, bound)
        rounded = self._cast(bound)
        outside = (sign * rounded < sign * bound) & ~self._gridded
        if not np.any(outside):
            return rounded
        next_to = np.empty_like(rounded)
        for place, _, dtype in self._leaves:
            part = rounded[place].astype(dtype)
            next_to[place] = np.nextafter(part, dtype.type(sign * np.inf))
        return np.where(outside, next_to, rounded)
