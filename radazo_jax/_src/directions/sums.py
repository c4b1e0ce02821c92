"""Weighted sums of directions, and their inner products."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import partial, reduce
from operator import add
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import optax
from jax import lax

from radazo_jax._src.base import trees
from radazo_jax._src.base.names import checks_names
from radazo_jax._src.base.trees import STATIC, Tree, widest
from radazo_jax._src.base.xla import barrier, on_any_mesh, specs_of
from radazo_jax._src.directions import generator, storage
from radazo_jax._src.directions.distribution import (
    Direction,
    lazy,
    rows,
    values_of_leaf,
)
from radazo_jax._src.directions.elements import (
    DenseElements,
    Elements,
    LazyElements,
    LowRankFactors,
)
from radazo_jax._src.directions.layout import Layout, Leaf
from radazo_jax._src.directions.storage import Use

_T = TypeVar("_T")


def combine(
    coefficients: jax.Array, directions: Direction, layout: Layout, params: optax.Params
) -> optax.Params:
    """Computes Σₖ coefficientsₖ uₖ, a tree like `params`, sharded as it.

    The sum is taken in the widest dtype of the parameters, at least float32.

    Args:
      coefficients: Real, [K].
      directions: Directions, stacked.
      layout: The layout of `params`.
      params: The parameters.
    """
    leaves = jax.tree.leaves(params)
    if not any(map(trees.is_sharded, leaves)):
        return _combined(coefficients, directions, layout, params)
    # Outside of a program no compiler knows that each device needs its part alone.
    shardings = tuple(leaf.sharding for leaf in leaves)
    return _combined_in_parts(coefficients, directions, params, layout, shardings)


@partial(jax.jit, static_argnums=(3, 4))
def _combined_in_parts(
    coefficients: jax.Array,
    directions: Direction,
    params: optax.Params,
    layout: Layout,
    shardings: tuple[jax.sharding.Sharding, ...],
) -> optax.Params:
    combined = _combined(coefficients, directions, layout, params)
    leaves = map(lax.with_sharding_constraint, jax.tree.leaves(combined), shardings)
    return jax.tree.unflatten(layout.treedef, list(leaves))


def _combined(
    coefficients: jax.Array, directions: Direction, layout: Layout, params: optax.Params
) -> optax.Params:
    dtype = trees.widest(params)

    def program(
        coefficients: jax.Array, directions: Direction, params: optax.Params
    ) -> Tree:
        sums = _sums(coefficients.astype(dtype), directions, layout)
        gradient = jax.tree.unflatten(layout.treedef, sums)
        return jax.tree.map(lambda g, p: g.astype(jnp.result_type(p)), gradient, params)

    return on_any_mesh(program, specs_of(params))(coefficients, directions, params)


def _sums(
    coefficients: jax.Array, directions: Direction, layout: Layout
) -> list[jax.Array]:
    """Computes the weighted sum of the directions, leaf by leaf."""
    if directions.cached is not None:
        dtype = coefficients.dtype
        return [
            stored.weighted_sum(coefficients * scale)
            for scale, stored in (
                _in_dtype(dtype, directions.scale, stored)
                for stored in directions.cached
            )
        ]
    # Drawn again rather than kept: without the barrier the compiler would see that it
    # has drawn these before, and keep them through the evaluations.
    coefficients, directions = barrier((coefficients, directions))
    size = len(coefficients)
    if storage.are_stored(directions, layout, Use.SUMMED):
        return _sums(coefficients, storage.store(directions, layout), layout)

    def of_leaf(leaf: Leaf) -> jax.Array:
        if size == 1:
            direction = jax.tree.map(lambda x: x[0], directions)
            u = values_of_leaf(direction, leaf, layout.dimension)
            return coefficients[0] * (direction.scale * u).astype(coefficients.dtype)
        at_once, in_turn = (
            partial(way, leaf=leaf, dimension=layout.dimension)
            for way in (_sum_at_once, _sum_in_turn)
        )
        return lax.platform_dependent(
            coefficients, directions, cuda=at_once, rocm=at_once, default=in_turn
        )

    return [of_leaf(leaf) for leaf in layout.leaves]


def _in_dtype(
    dtype: jnp.dtype, scale: jax.Array, stored: Elements
) -> tuple[jax.Array, Elements]:
    """Scales and elements in a dtype, rounded as a point along them rounds its own."""
    if dtype == scale.dtype:
        return scale, stored
    if isinstance(stored, LowRankFactors):
        return scale.astype(dtype), jax.tree.map(lambda x: x.astype(dtype), stored)
    us = jax.vmap(lambda factor, u: factor * u.values())(scale, stored)
    return jnp.ones_like(scale, dtype), DenseElements(us.astype(dtype))


def _sum_at_once(
    coefficients: jax.Array, directions: Direction, leaf: Leaf, dimension: int
) -> jax.Array:
    """Computes the weighted sum on one leaf, as the sum over an axis of size K.

    XLA's GPU backend makes it a loop within the kernel that consumes the sum, so that
    nothing is stored, and compiles the draw once. Its CPU backend would store all K,
    and its TPU backend takes several times as long to compile as for separate terms.
    """

    def term(coefficient: jax.Array, direction: Direction) -> jax.Array:
        u = _one_by_one(direction, leaf, dimension)
        return coefficient * u.astype(coefficient.dtype)

    return jnp.sum(jax.vmap(term)(coefficients, directions), axis=0)


def _sum_in_turn(
    coefficients: jax.Array, directions: Direction, leaf: Leaf, dimension: int
) -> jax.Array:
    """Computes the weighted sum on one leaf, as an expression or as a loop."""
    size = len(coefficients)

    def term(k: jax.typing.ArrayLike) -> jax.Array:
        direction = jax.tree.map(lambda x: x[k], directions)
        u = _one_by_one(direction, leaf, dimension)
        return coefficients[k] * u.astype(coefficients.dtype)

    def add(k: jax.typing.ArrayLike, gradient: jax.Array) -> jax.Array:
        return gradient + term(k)

    if size > storage.MAX_UNROLLED:
        # A loop for each: an optimizer may have used one before the next is made.
        return lax.fori_loop(1, size, add, term(0))
    return reduce(lambda g, k: add(k, g), range(1, size), term(0))


def _one_by_one(direction: Direction, leaf: Leaf, dimension: int) -> jax.Array:
    """Returns the scaled elements of a leaf, none of which shares a word with others.

    The words of all K directions would be stored.
    """
    u = lazy(direction, leaf, dimension)
    if isinstance(u, LazyElements):
        u = dataclasses.replace(u, order=None)
    return direction.scale * u.values()


# Number of elements in a block: 64 MiB of float32.
MAX_ELEMENTS = 2**24

# Directions are drawn together up to this many random numbers, or as many as the block
# has elements; beyond, in turn.
_TOGETHER = 2**20


class Block(NamedTuple):
    """A part of a leaf whose elements are neighbors in row-major order.

    Attributes:
      starts: The first index along each axis: integers, which may be traced.
      sizes: The number of indices along each axis.
    """

    starts: Sequence[jax.typing.ArrayLike]
    sizes: tuple[int, ...]

    @property
    def indices(self) -> list[jax.Array]:
        """The indices of the elements, as `counter.block` returns them."""
        return generator.block(self.sizes, self.starts)

    def read(self, array: jax.Array) -> jax.Array:
        """Reads the block of an array like the leaf; some axes may have size 1."""
        sizes = [min(pair) for pair in zip(self.sizes, array.shape, strict=True)]
        return lax.dynamic_slice(array, self._starts_in(array), sizes)

    def write(self, array: jax.Array, part: jax.Array) -> jax.Array:
        """Returns the array with this part in the place of the block."""
        return lax.dynamic_update_slice(array, part, self._starts_in(array))

    def _starts_in(self, array: jax.Array) -> list[jax.Array]:
        return [
            jnp.int32(0) if size == 1 else jnp.asarray(start, jnp.int32)
            for start, size in zip(self.starts, array.shape, strict=True)
        ]


def cuts(shape: tuple[int, ...], axis: int) -> bool:
    """Returns whether blocks of an array are shorter along an axis from this on."""
    return axis <= _cut_axis(shape)


def _cut_axis(shape: tuple[int, ...]) -> int:
    """Returns the axis along which an array is cut into blocks; -1 for one block.

    A block has one index along the axes before it, and all along the axes after it.
    """
    sizes = [math.prod(shape[axis:]) for axis in range(len(shape))]
    return max((i for i, n in enumerate(sizes) if n > MAX_ELEMENTS), default=-1)


def for_each(shape: tuple[int, ...], body: Callable[[Block, _T], _T], carry: _T) -> _T:
    """Calls `carry = body(block, carry)` for each block of an array, in a loop.

    Args:
      shape: The shape of the array.
      body: A function of a block and a tree of arrays, to a tree of the same arrays.
      carry: The tree before the first block.

    Returns:
      The tree after the last block.
    """
    axis = _cut_axis(shape)
    if axis < 0:
        return body(Block((0,) * len(shape), shape), carry)
    before, after = shape[:axis], shape[axis + 1 :]
    size = max(MAX_ELEMENTS // math.prod(after), 1)
    count, rest = divmod(shape[axis], size)

    def of_size(size: int, count: int, first: int, carry: _T) -> _T:
        grid = (*before, count)

        def one(i: jax.Array, carry: _T) -> _T:
            *at, j = jnp.unravel_index(i, grid)
            starts: list[Any] = [*at, first + j * size, *(0 for _ in after)]
            return body(Block(starts, (*(1 for _ in before), size, *after)), carry)

        return lax.fori_loop(0, math.prod(grid), one, carry)

    carry = of_size(size, count, 0, carry)
    return of_size(rest, 1, count * size, carry) if rest else carry


def combine_block(
    coefficients: jax.Array,
    directions: Direction,
    starts: Sequence[jax.typing.ArrayLike],
    *,
    sizes: tuple[int, ...],
    leaf: Leaf,
    dimension: int,
) -> jax.Array:
    """Computes Σᵢ coefficientsᵢ uᵢ on a block of a leaf.

    The time to compile does not grow with the number of directions.

    Args:
      coefficients: Real, [n], of the dtype in which the sum is taken.
      directions: Directions, stacked: [n], which are drawn here.
      starts: The starts of the block.
      sizes: The sizes of the block.
      leaf: The leaf.
      dimension: d, the number of coordinates of all leaves.

    Returns:
      The sum, of the sizes of the block.
    """
    dtype, block = coefficients.dtype, Block(starts, sizes)
    packing = directions.distribution._packing(dimension)
    # Pairs of numbers would be stored once more than the elements.
    words = packing is not None and packing.width == 1

    def draw(direction: Direction) -> Elements:
        drawn = lazy(direction, leaf, dimension, block.indices, stored=words)
        if not isinstance(drawn, LowRankFactors):
            drawn = DenseElements(drawn.values())
        return jax.tree.map(lambda x: x.astype(dtype), drawn)

    def add(
        total: jax.Array, some: tuple[jax.Array, Direction]
    ) -> tuple[jax.Array, None]:
        weights, directions = some
        return total + jax.vmap(draw)(directions).weighted_sum(weights), None

    weights = coefficients * directions.scale.astype(dtype)
    drawn = jax.eval_shape(draw, jax.tree.map(lambda x: x[0], directions))
    each = max(sum(x.size for x in jax.tree.leaves(drawn)), 1)
    together = max(_TOGETHER, math.prod(sizes)) // each
    count = len(weights)
    if together >= count:
        return add(jnp.zeros(sizes, dtype), (weights, directions))[0]
    together = max(together, 1)
    # Directions of weight zero fill the last turn.
    turns = -(-count // together)
    rest = turns * together - count

    def in_turns(x: jax.Array, fill: jax.Array) -> jax.Array:
        padded = jnp.concatenate([x, jnp.broadcast_to(fill, (rest,))])
        return padded.reshape(turns, together)

    weights = in_turns(weights, jnp.zeros((), dtype))
    directions = jax.tree.map(lambda x: in_turns(x, x[0]), directions)
    return lax.scan(add, jnp.zeros(sizes, dtype), (weights, directions))[0]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LinearCombination:
    """Σₖ cₖ uₖ + Σⱼ wⱼ Tⱼ: a few numbers and keys that stand for a gradient.

    The tree of the size of the parameters exists only after `materialize`. An optimizer
    that can work with coefficients and keys receives the combination as the extra
    argument `combination`, and never causes the tree to be built.

    Attributes:
      coefficients: cₖ, real, [K]; `None` without directions.
      directions: uₖ, stacked: [K]; `None` without directions.
      layout: The layout of the parameters; static.
      trees: Pairs of a weight wⱼ, shape (), and a tree Tⱼ like the parameters.
    """

    coefficients: jax.Array | None
    directions: Direction | None
    layout: Layout = dataclasses.field(metadata=STATIC)
    trees: tuple[tuple[jax.Array, Any], ...] = ()

    @classmethod
    def of_tree(cls, tree: Tree, layout: Layout) -> "LinearCombination":
        """Returns the combination that is a single tree like the parameters."""
        return cls(None, None, layout).plus(jnp.ones((), jnp.float32), tree)

    @classmethod
    def of_flat(
        cls, flat: jax.Array, layout: Layout, params: optax.Params
    ) -> "LinearCombination":
        """Returns the combination that is a vector of all coordinates, [d].

        Args:
          flat: The vector.
          layout: The layout of the parameters.
          params: θ, whose dtypes and shardings the tree has.
        """

        def program(flat: jax.Array, params: optax.Params) -> Tree:
            leaves = [
                flat[leaf.offset : leaf.offset + leaf.size].reshape(leaf.shape)
                for leaf in layout.leaves
            ]
            tree = jax.tree.unflatten(layout.treedef, leaves)
            return jax.tree.map(lambda x, p: x.astype(jnp.result_type(p)), tree, params)

        return cls.of_tree(on_any_mesh(program, specs_of(params))(flat, params), layout)

    def plus(self, weight: jax.Array, tree: Tree) -> "LinearCombination":
        """Returns the combination with one more weighted tree."""
        return dataclasses.replace(self, trees=(*self.trees, (weight, tree)))

    def scaled(self, factor: jax.Array) -> "LinearCombination":
        """Multiplies the combination by a number, shape ().

        Zero times a coefficient or a weight is zero, also if it is not finite.
        """

        def times(x: jax.Array) -> jax.Array:
            return jnp.where(factor == 0, 0, factor.astype(x.dtype) * x)

        coefficients = self.coefficients
        return dataclasses.replace(
            self,
            coefficients=None if coefficients is None else times(coefficients),
            trees=tuple((times(weight), tree) for weight, tree in self.trees),
        )

    def materialize(self, params: optax.Params) -> optax.Params:
        """Builds the tree.

        Args:
          params: θ, whose shapes, dtypes and shardings the result has.

        Returns:
          A tree like `params`. Sums are taken in float32, or in float64 if the
          parameters or a tree are.
        """
        terms = [
            jax.tree.map(partial(_times, weight), tree, params)
            for weight, tree in self.trees
        ]
        if self.coefficients is not None and self.directions is not None:
            like = terms[0] if terms else params
            summed = combine(self.coefficients, self.directions, self.layout, like)
            terms.append(summed)
        return jax.tree.map(
            lambda p, *leaves: reduce(add, leaves).astype(jnp.result_type(p)),
            params,
            *terms,
        )


def _times(weight: jax.Array, x: jax.Array, like: jax.Array) -> jax.Array:
    dtype = widest((x, like))
    return weight.astype(dtype) * x.astype(dtype)


@checks_names
def gram(
    directions: Sequence[Direction], layout: Layout, trees: Sequence[Tree] = ()
) -> jax.Array:
    """Computes inner products of all pairs of directions and trees: float32, [n, n].

    The elements of one leaf of all of them are alive at a time.

    Args:
      directions: Directions, each stacked; n counts them all, and the trees.
      layout: The layout of the parameters, as of `Points`.
      trees: Trees like the parameters, each stacked; they follow the directions.

    Returns:
      The products.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> import radazo_jax as zo
      >>> draw, params = zo.estimators.Draw.once(jax.random.key(0)), jnp.zeros(3)
      >>> points, _ = zo.forward_difference(num_directions=2).points(draw, params, ())
      >>> products = zo.estimators.gram([points.directions], points.layout)
      >>> bool(jnp.allclose(jnp.diagonal(products), 1))
      True
    """

    def program(directions: Sequence[Direction], trees: Sequence[Tree]) -> jax.Array:
        leaves = [jax.tree.leaves(tree) for tree in trees]
        products = []
        for i in range(len(layout.leaves)):
            us = [rows(u, layout, i) for u in directions]
            ws = [tree[i].astype(jnp.float32) for tree in leaves]
            every = jnp.concatenate([*us, *(w.reshape(len(w), -1) for w in ws)])
            products.append(jnp.matmul(every, every.T, precision=lax.Precision.HIGHEST))
        return reduce(jnp.add, products)

    return on_any_mesh(program, jax.P())(directions, trees)
