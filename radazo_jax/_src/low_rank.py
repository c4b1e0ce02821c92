"""Directions that are matrices of low rank, leaf by leaf."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from radazo_jax._src import checks, counter
from radazo_jax._src.directions import Direction, Draw, Factors, Law, Leaf, layout
from radazo_jax._src.laws import Gaussian


class MatrixAxes(NamedTuple):
    """Which axes of a leaf form matrices.

    Attributes:
      rows: The axes that index the rows.
      columns: The axes that index the columns. All other axes stack matrices.
    """

    rows: tuple[int, ...]
    columns: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class LowRank(Gaussian):
    """See `low_rank`."""

    rank: int
    where: Callable[[str, tuple[int, ...]], bool] | None
    dimension_numbers: Callable[[Any], Any] | None
    # What a function's use of the leaves says, by path; set by `axes.specialize`.
    inferred: tuple[tuple[str, MatrixAxes | None], ...] = ()

    def block(
        self,
        direction: Direction,
        leaf: Leaf,
        indices: Sequence[jax.Array],
        num_coordinates: int,
    ) -> jax.Array:
        axes = self.axes(leaf)
        if axes is None:
            leaf = leaf._replace(offset=self._room(leaf))
            return super().block(direction, leaf, indices, num_coordinates)
        return self._factors(direction, leaf, axes, indices).product()

    def sample(self, key: jax.typing.ArrayLike, params: Any) -> Direction:
        self.check_where(params)
        return super().sample(key, params)

    def check_where(self, params: Any) -> None:
        """Raises if `where` matches no leaf."""
        leaves = [(jax.tree_util.keystr(x.path), x.shape) for x in layout(params)]
        if self.where and leaves and not any(self.where(*leaf) for leaf in leaves):
            raise ValueError(
                f"where must match at least one leaf; it matches none of {leaves}."
            )

    def given(self, params: Any) -> tuple[tuple[str, MatrixAxes | None], ...]:
        """The axes that the user gave for `params`, by path."""
        if self.dimension_numbers is None:
            return self.inferred
        return _by_path(self.dimension_numbers(params))

    def factors(self, direction: Direction, leaf: Leaf) -> Factors | None:
        axes = self.axes(leaf)
        if axes is None:
            return None
        return self._factors(direction, leaf, axes, counter.block(leaf.shape))

    def num_stored(self, leaf: Leaf) -> int:
        axes = self.axes(leaf)
        if axes is None:
            return super().num_stored(leaf)
        size = math.prod(leaf.shape)
        rows = math.prod(leaf.shape[axis] for axis in axes.rows)
        columns = math.prod(leaf.shape[axis] for axis in axes.columns)
        return self.rank * (size // rows + size // columns)

    def axes(self, leaf: Leaf) -> MatrixAxes | None:
        """The axes that make the matrices of a leaf; `None` if it is drawn dense."""
        path = jax.tree_util.keystr(leaf.path)
        if self.where is not None and not self.where(path, leaf.shape):
            return None
        axes = dict(self.inferred).get(path, default_axes(range(len(leaf.shape))))
        if axes is None:
            return None
        sides = [math.prod(leaf.shape[axis] for axis in side) for side in axes]
        return axes if min(sides) > self.rank else None

    def numbers(
        self, direction: Direction, leaves: Sequence[Leaf], num_coordinates: int
    ) -> jax.Array:
        del num_coordinates
        # Drawn together they are one piece of code, which compiles faster.
        at = [part for leaf in leaves for part in self._all_positions(leaf)]
        return counter.normal(direction.key, counter.concatenate(at))

    def draws(self, numbers: jax.Array, leaves: Sequence[Leaf]) -> list[Draw]:
        at = jax.eval_shape(lambda: [self._all_positions(leaf) for leaf in leaves])
        shapes = [part.lo.shape for of_leaf in at for part in of_leaf]
        parts = iter(counter.split(numbers, shapes))
        return [
            next(parts)
            if self.axes(leaf) is None
            else self._scaled(next(parts), next(parts))
            for leaf in leaves
        ]

    def _all_positions(self, leaf: Leaf) -> list[counter.Counter]:
        """Where the elements of a leaf are drawn, or those of its two factors."""
        axes = self.axes(leaf)
        if axes is None:
            return [counter.positions(leaf.shape, offset=self._room(leaf))]
        return self._positions(leaf, axes, counter.block(leaf.shape))

    def _room(self, leaf: Leaf) -> int:
        """Where the numbers of a leaf begin: each has the room of two factors."""
        return 2 * self.rank * leaf.offset

    def _factors(
        self,
        direction: Direction,
        leaf: Leaf,
        axes: MatrixAxes,
        indices: Sequence[jax.Array],
    ) -> Factors:
        at = self._positions(leaf, axes, indices)
        return self._scaled(*(counter.normal(direction.key, part) for part in at))

    def _scaled(self, a: jax.Array, b: jax.Array) -> Factors:
        return Factors(a / math.sqrt(self.rank), b)

    def _positions(
        self, leaf: Leaf, axes: MatrixAxes, indices: Sequence[jax.Array]
    ) -> list[counter.Counter]:
        """Where the elements of both factors are drawn."""
        at, offset = [], self._room(leaf)
        last = jnp.arange(self.rank, dtype=jnp.uint32)
        last = last.reshape((1,) * len(leaf.shape) + (self.rank,))
        for dropped in (axes.columns, axes.rows):
            kept = [axis for axis in range(len(leaf.shape)) if axis not in dropped]
            shape = (*(leaf.shape[axis] for axis in kept), self.rank)
            along = [jnp.expand_dims(indices[axis], -1) for axis in kept]
            at.append(counter.positions(shape, [*along, last], offset))
            offset += math.prod(shape)
        return at


def default_axes(remaining: Sequence[int]) -> MatrixAxes | None:
    """The last two of the remaining axes of a leaf, where there are two."""
    if len(remaining) < 2:
        return None
    return MatrixAxes((remaining[-2],), (remaining[-1],))


def low_rank(
    rank: int = 1,
    where: Callable[[str, tuple[int, ...]], bool] | None = None,
    dimension_numbers: Any = None,
) -> Law:
    """Matrices of low rank: u = A Bᵀ / √r with standard normal A and B.

    E[u uᵀ] = I, the factor is c = 1. A perturbed product needs no perturbed matrix:
    x (W + s A Bᵀ) = x W + s (x A) Bᵀ, and nothing is rounded into W. Leaves that are
    not matrices, or have a side no longer than the rank, are drawn dense from the
    Gaussian law.

    An estimator finds out from the function which axes of a leaf form the matrix and
    which stack independent matrices (layers, experts): axes that a product contracts
    are rows, axes that a `scan` runs over are stacked. Without a function, as in
    `law.sample`, the last two axes form the matrix.

    Args:
      rank: r, a positive integer.
      where: `where(path, shape) -> bool` chooses the leaves that are drawn of low
        rank, by `jax.tree_util.keystr` of their path; the others are drawn dense.
      dimension_numbers: The axes of each leaf, where they are not to be inferred, in
        the manner of `optax.contrib.MuonDimensionNumbers`: a tree like the
        parameters, or a function of the parameters to one, of `MatrixAxes`, or
        `None` for a leaf that is drawn dense.

    Returns:
      The law.

    Raises:
      TypeError, ValueError: If `rank` is not a positive integer or `where` is not
        a function; when sampled, if `where` matches no leaf.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> import radazo_jax as zo
      >>> params, law = jnp.zeros((8, 6)), zo.low_rank(rank=2)
      >>> u = law.materialize(law.sample(jax.random.key(0), params), params)
      >>> int(jnp.linalg.matrix_rank(u))
      2

    References:
      Sarkar et al., Evolution Strategies at the Hyperscale, 2025,
      <https://arxiv.org/abs/2511.16652>.
    """
    checks.check_int_at_least("rank", rank, 1)
    if where is not None and not callable(where):
        raise TypeError(f"where must be a function of path and shape; got {where!r}.")
    inferred: tuple[tuple[str, MatrixAxes | None], ...] = ()
    if dimension_numbers is not None and not callable(dimension_numbers):
        inferred, dimension_numbers = _by_path(dimension_numbers), None
    return LowRank(rank, where, dimension_numbers, inferred)


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
