"""`Vectors`: trees of parameters as the vectors of a method on the host."""

from typing import Any

import jax
import numpy as np
import optax

from radazo_jax._src import trees
from radazo_jax._src.methods.contract import Box
from radazo_jax._src.steps import box
from radazo_jax._src.steps.box import Bounds


class Vectors:
    """Converts between trees of parameters and vectors of float64.

    Attributes:
      tree: The tree with which it was made, of NumPy arrays.
      dimension: d, the number of parameters.
    """

    def __init__(self, params: optax.Params):
        self.tree = trees.as_numpy(params)
        leaves, self._treedef = jax.tree.flatten(self.tree)
        self._kinds = [(leaf.shape, leaf.dtype) for leaf in leaves]
        self._ends = np.cumsum([leaf.size for leaf in leaves], dtype=int).tolist()
        self.dimension = self._ends[-1] if leaves else 0
        self._exact = all(dtype == np.float64 for _, dtype in self._kinds)

    def flat(self, tree: Any) -> np.ndarray:
        """Returns the vector of a tree like the parameters, or of a number: [d]."""
        filled = jax.tree.leaves(trees.filled(tree, self.tree))
        parts = [
            np.broadcast_to(np.asarray(leaf).astype(np.float64), shape).ravel()
            for leaf, (shape, _) in zip(filled, self._kinds, strict=True)
        ]
        return np.concatenate(parts) if parts else np.zeros(0)

    def trees(self, points: np.ndarray) -> Any:
        """Returns points, [n, d], as a tree whose leaves have n rows."""
        leaves, begin = [], 0
        for (shape, dtype), end in zip(self._kinds, self._ends, strict=True):
            part = points[:, begin:end].reshape(len(points), *shape)
            leaves.append(part.astype(dtype))
            begin = end
        return jax.tree.unflatten(self._treedef, leaves)

    def one(self, point: np.ndarray) -> Any:
        """Returns the tree of a single point, [d]."""
        return jax.tree.map(lambda x: x[0], self.trees(point[None]))

    def round(self, points: np.ndarray) -> np.ndarray:
        """Returns points, [..., d], rounded to the dtypes of the parameters."""
        points = np.asarray(points, np.float64)
        if self._exact:
            return points
        rounded, begin = points.copy(), 0
        with np.errstate(over="ignore"):
            for (_, dtype), end in zip(self._kinds, self._ends, strict=True):
                rounded[..., begin:end] = points[..., begin:end].astype(dtype)
                begin = end
        return rounded

    def box(self, bounds: Bounds | None) -> Box:
        """Returns bounds as vectors, rounded toward each other."""
        if bounds is None:
            none = np.full(self.dimension, np.inf)
            return Box(-none, none)
        # In float64, so that bounds are not rounded outward before.
        wide = jax.tree.map(lambda x: x.astype(np.float64), self.tree)
        with jax.enable_x64(True):
            lower, upper = map(self.flat, box.as_trees(bounds, wide))
        return Box(self._inward(lower, 1), self._inward(upper, -1))

    def _inward(self, bound: np.ndarray, sign: int) -> np.ndarray:
        rounded = self.round(bound)
        outside = sign * rounded < sign * bound
        if not np.any(outside):
            return rounded
        next_to = np.empty_like(rounded)
        begin = 0
        for (_, dtype), end in zip(self._kinds, self._ends, strict=True):
            part = rounded[begin:end].astype(dtype)
            next_to[begin:end] = np.nextafter(part, dtype.type(sign * np.inf))
            begin = end
        return np.where(outside, next_to, rounded)
