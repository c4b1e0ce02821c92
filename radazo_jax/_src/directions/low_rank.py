"""Directions that are matrices of low rank, leaf by leaf."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import optax

from radazo_jax._src import checks
from radazo_jax._src.directions.dense import Normals
from radazo_jax._src.directions.distribution import Distribution
from radazo_jax._src.directions.elements import Elements, LowRankFactors
from radazo_jax._src.directions.layout import Layout, Leaf, MatrixAxes, Part, layout_of

# Factors are drawn as one array of at most so many numbers of all directions (32 MiB):
# each draw takes 50 ms to compile on a CPU, but the array is held while it is split.
# From so many directions on, splitting more takes nearly as long as drawing.
_MAX_TOGETHER, _MANY, _MAX_SPLIT = 2**23, 2**8, 2**18


@dataclasses.dataclass(frozen=True, repr=False)
class LowRank(Normals):
    """See `low_rank`."""

    _constructor = "low_rank"

    rank: int
    # The axes that the user gave: by path, or as a function of the parameters.
    dimension_numbers: (
        tuple[tuple[str, MatrixAxes | None], ...] | Callable[[Any], Any] | None
    ) = None

    def factor(self, dimension: int) -> float:
        del dimension
        return 1.0

    def _layout(self, params: optax.Params) -> Layout:
        layout = layout_of(params)
        given = self.dimension_numbers
        if given is None:
            return layout
        if callable(given):
            given = _by_path(given(params))
        return layout.with_axes(dict(given))

    def axes(self, leaf: Leaf) -> MatrixAxes | None:
        """The axes that make the matrices of a leaf; `None` if it is drawn dense."""
        if leaf.axes is None:
            return None
        sides = [math.prod(leaf.shape[axis] for axis in side) for side in leaf.axes]
        return leaf.axes if min(sides) > self.rank else None

    # Matrices are stored as two factors, which are never computed one by one.

    def _parts(self, leaf: Leaf) -> list[Part]:
        # Each leaf has the room of two factors.
        first, axes = 2 * self.rank * leaf.offset, self.axes(leaf)
        if axes is None:
            return [Part(leaf.shape, first)]

        def without(dropped: Sequence[int]) -> tuple[int, ...]:
            kept = (1 if i in dropped else n for i, n in enumerate(leaf.shape))
            return (*kept, self.rank)

        a = Part(without(axes.columns), first)
        return [a, Part(without(axes.rows), first + a.size)]

    def _joined(self, leaf: Leaf, parts: Sequence[Elements]) -> Elements:
        if len(parts) == 1:
            return parts[0]
        a, b = (part.values() for part in parts)
        return LowRankFactors(a / math.sqrt(self.rank), b)

    def _most_together(self, num_directions: int) -> int:
        most = _MAX_TOGETHER if num_directions < _MANY else _MAX_SPLIT
        return most // num_directions


@checks.checks_names
def low_rank(rank: int = 1, dimension_numbers: Any = None) -> Distribution:
    """Matrices of low rank: u = A Bᵀ / √r with standard normal A and B.

    E[u uᵀ] = I, the factor is c = 1. A perturbed product needs no perturbed matrix:
    x (W + s A Bᵀ) = x W + s (x A) Bᵀ, and nothing is rounded into W. Leaves that are
    not matrices, or have a side no longer than the rank, are drawn dense, with standard
    normal elements. The default `smoothing` of differences is for shorter directions:
    give one, 1e-3 to begin with.

    An estimator finds out from the function which axes of a leaf form the matrix and
    which stack independent matrices (layers, experts): axes that a product contracts
    are rows, axes that a `scan` runs over are stacked. Without a function, as in
    `distribution.sample`, the last two axes form the matrix.

    Args:
      rank: r, a positive integer.
      dimension_numbers: The axes of each leaf, instead of inferred ones, in the manner
        of `optax.contrib.MuonDimensionNumbers`: a tree like the
        parameters, or a function of the parameters to one, of `MatrixAxes`, or
        `None` for a leaf that is drawn dense.

    Returns:
      The distribution.

    Raises:
      TypeError, ValueError: If `rank` is not a positive integer, or
        `dimension_numbers` holds something else than `MatrixAxes` and `None`.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> import radazo_jax as zo
      >>> params, distribution = jnp.zeros((8, 6)), zo.low_rank(rank=2)
      >>> u = distribution.materialize(
      ...     distribution.sample(jax.random.key(0), params), params
      ... )
      >>> int(jnp.linalg.matrix_rank(u))
      2

    References:
      Sarkar et al., Evolution Strategies at the Hyperscale, 2025,
      <https://arxiv.org/abs/2511.16652>.
    """
    rank = checks.check_int_at_least("rank", rank, 1)
    given = dimension_numbers
    if given is not None and not callable(given):
        given = _by_path(given)
    return LowRank(rank, given)


def _by_path(tree: Any) -> tuple[tuple[str, MatrixAxes | None], ...]:
    def ends(x: Any) -> bool:
        return x is None or isinstance(x, MatrixAxes)

    found = jax.tree_util.tree_leaves_with_path(tree, is_leaf=ends)
    for path, axes in found:
        if not ends(axes):
            raise TypeError(
                "dimension_numbers must hold MatrixAxes or None; got "
                f"{axes!r} at {jax.tree_util.keystr(path)}."
            )
    return tuple((jax.tree_util.keystr(path), axes) for path, axes in found)
