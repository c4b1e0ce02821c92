"""Perturbed leaves that are not built yet, and what can be done to them unbuilt.

A `View` stands for `p + scale * u` restricted to some elements of a leaf, in some
order. Beside the elements of p it carries marks from which those of u can be computed,
and which take part in every rearrangement, so that slices, transposes, reshapes and
look-ups of a perturbed leaf are again views, and u is computed only where a view is
used. The marks are of one of three kinds:

* where each element lies in its leaf, and so at which position it is drawn;
* the two factors of a matrix of low rank;
* the elements of u themselves, where they are stored.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Container, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from radazo_jax._src import counter, fusion, kept
from radazo_jax._src.directions import Direction, Draw, Factors, Leaf
from radazo_jax._src.dtypes import at_least_float32
from radazo_jax._src.kept import Kept

Marks = tuple[jax.Array, ...]


@dataclasses.dataclass(frozen=True)
class View:
    """Some elements of a perturbed leaf.

    Attributes:
      base: The unperturbed elements, in the leaf's dtype.
      dtype: The dtype in which the perturbed elements are asked for.
      scale: What u is multiplied by, shape ().
      marks: What u is computed from: arrays of the rank of `base`, broadcastable to
        its shape, and one axis more if `factors`.
      noise: `noise(direction, marks)` computes u: float32, broadcastable.
      direction: Its first argument, `None` where nothing is left to be drawn.
      factors: Whether the marks are the factors of a matrix of low rank.
      on_use: `on_use(view, contracted)`, called where the view is used: in a product
        that contracts the given axes, or built (none).
    """

    base: jax.Array
    dtype: Any
    scale: jax.Array
    marks: Marks
    noise: Callable[[Any, Marks], jax.Array]
    direction: Direction | None = None
    factors: bool = False
    on_use: Callable[["View", set[int]], None] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.base.shape

    def map(self, base: jax.Array, of_mark: Callable[[Any], Any]) -> "View":
        """The view whose elements have become `base`; its marks follow."""
        if self.factors:
            of_mark = jax.vmap(of_mark, in_axes=-1, out_axes=-1)
        marks = tuple(of_mark(mark) for mark in self.marks)
        return dataclasses.replace(self, base=base, marks=marks)

    def only_where(self, mask: jax.Array) -> "View":
        """The view with no noise where `mask`, of the rank of `base`, is false."""
        if self.factors:
            first, second = self.marks
            masked = jnp.where(jnp.expand_dims(mask, -1), first, 0.0)
            return dataclasses.replace(self, marks=(masked, second))
        inner = self.noise

        def noise(direction: Any, marks: Marks) -> jax.Array:
            return jnp.where(marks[-1], inner(direction, marks[:-1]), 0.0)

        return dataclasses.replace(self, marks=(*self.marks, mask), noise=noise)

    def used(self, contracted: Sequence[int] = ()) -> None:
        """Tells whoever asked that a product contracts these axes, or none does."""
        if self.on_use is not None:
            self.on_use(self, set(contracted))

    def build(self, *after: jax.Array, ready: Container[int] = ()) -> jax.Array:
        """The perturbed elements.

        Args:
          *after: Values that are to be computed before the elements are drawn.
          ready: Those of them, by `id`, that have been.

        Returns:
          An array of `shape` and `dtype`.
        """
        self.used()
        wide = at_least_float32(self.base.dtype)

        def moved(direction: Direction | None, scale: jax.Array) -> jax.Array:
            marks = tuple(_sharded_like(self.base, mark) for mark in self.marks)
            u = self.noise(direction, marks).astype(wide)
            return (self.base.astype(wide) + scale.astype(wide) * u).astype(self.dtype)

        if self.direction is None:
            return moved(None, self.scale)
        late = [value for value in after if id(value) not in ready]
        direction = fusion.tie(self.direction, *late)
        return fusion.compute_once(
            moved, direction.key, direction, self.scale, after=after
        )


def _sharded_like(base: jax.Array, mark: jax.Array) -> jax.Array:
    """`mark`, of which each device needs what belongs to its part of `base`."""
    spec = jax.typeof(base).sharding.spec
    if not any(spec):
        return mark
    sizes = mark.shape[: len(spec)]  # Of factors, there is one axis more.
    varying = [n if size > 1 else None for n, size in zip(spec, sizes, strict=True)]
    return jax.reshard(mark, jax.P(*varying))


def views_of(
    leaves: Sequence[jax.Array],
    layout: Sequence[Leaf],
    direction: Direction | Kept,
    scale: jax.Array,
) -> list[View]:
    """All parameters perturbed by `direction`, unbuilt."""
    if isinstance(direction, Kept):
        return [
            _of_draw(leaf, draw, direction.scale, scale)
            for leaf, draw in zip(leaves, direction.draws, strict=True)
        ]
    total = sum(math.prod(where.shape) for where in layout)

    def draw(direction: Direction) -> list[Factors | None]:
        return [direction.law.factors(direction, where) for where in layout]

    # Stored: XLA's CPU backend would draw a factor in every product with it.
    factors = jax.eval_shape(draw, direction)
    if jax.tree.leaves(factors):
        factors = fusion.compute_once(draw, direction.key, direction)
    return [
        _of_direction(leaf, where, total, direction, scale)
        if drawn is None
        else _of_factors(leaf, drawn, scale)
        for leaf, where, drawn in zip(leaves, layout, factors, strict=True)
    ]


def _of_draw(
    leaf: jax.Array, draw: Draw, normalization: jax.Array, scale: jax.Array
) -> View:
    if isinstance(draw, Factors):
        return _of_factors(leaf, draw, scale)
    u = kept.elements(draw, leaf.shape)

    def noise(_: Any, marks: Marks) -> jax.Array:
        return normalization * marks[0]

    return View(leaf, leaf.dtype, scale, (u,), noise)


def _of_factors(leaf: jax.Array, factors: Factors, scale: jax.Array) -> View:
    def noise(_: Any, marks: Marks) -> jax.Array:
        return Factors(*marks).product()

    return View(leaf, leaf.dtype, scale, tuple(factors), noise, factors=True)


def _of_direction(
    leaf: jax.Array, where: Leaf, total: int, direction: Direction, scale: jax.Array
) -> View:
    def noise(direction: Direction, marks: Marks) -> jax.Array:
        return direction.law.block(direction, where, marks, total)

    indices = tuple(counter.block(where.shape))
    return View(leaf, leaf.dtype, scale, indices, noise, direction)


def tie(value: Any, after: jax.Array) -> Any:
    """`value`, which if it is a view to be drawn is drawn after `after`."""
    if not isinstance(value, View) or value.direction is None:
        return value
    return dataclasses.replace(value, direction=fusion.tie(value.direction, after))


# --- Structural operations --------------------------------------------------------

# What becomes of a mark where its view is rearranged. Marks broadcast: what is done to
# an axis of the view is done to those marks that vary along it. Where a primitive is
# passed, it is the one that rearranges the view, with the same parameters: the public
# functions of JAX would normalize indices that the program has normalized already.

OfMark = Callable[[jax.Array], jax.Array]


def transpose(permutation: Sequence[int]) -> OfMark:
    return functools.partial(lax.transpose, permutation=permutation)


def reshape(shape: tuple[int, ...], sizes: Sequence[int]) -> OfMark:
    """Axes of the marks that do not meet stay apart."""
    groups = _reshape_groups(shape, tuple(sizes))

    def of_mark(mark: jax.Array) -> jax.Array:
        full, new = list(mark.shape), list(sizes)
        for old_axes, new_axes in groups:
            if all(mark.shape[a] == 1 for a in old_axes):
                for a in new_axes:
                    new[a] = 1
            else:
                for a in old_axes:
                    full[a] = shape[a]
        return jnp.broadcast_to(mark, full).reshape(new)

    return of_mark


def slice_(
    starts: Sequence[int], limits: Sequence[int], strides: Sequence[int]
) -> OfMark:
    def of_mark(mark: jax.Array) -> jax.Array:
        kept = [slice(None)] * mark.ndim
        for axis, size in enumerate(mark.shape):
            if size > 1:
                kept[axis] = slice(starts[axis], limits[axis], strides[axis])
        return mark[tuple(kept)]

    return of_mark


def dynamic_slice(
    primitive: core.Primitive, starts: Sequence[jax.Array], sizes: Sequence[int]
) -> OfMark:
    def of_mark(mark: jax.Array) -> jax.Array:
        along = [min(n, size) for n, size in zip(mark.shape, sizes, strict=True)]
        return primitive.bind(mark, *starts, slice_sizes=tuple(along))

    return of_mark


def reverse(dimensions: Sequence[int]) -> OfMark:
    def of_mark(mark: jax.Array) -> jax.Array:
        return lax.rev(mark, [a for a in dimensions if mark.shape[a] > 1])

    return of_mark


def expand(
    old: tuple[int, ...], shape: Sequence[int], broadcast_dimensions: Sequence[int]
) -> OfMark | None:
    """`broadcast_in_dim` where it repeats nothing, else `None`."""
    if math.prod(shape) != math.prod(old):
        return None

    def of_mark(mark: jax.Array) -> jax.Array:
        new = [1] * len(shape)
        for axis, target in enumerate(broadcast_dimensions):
            new[target] = mark.shape[axis]
        return mark.reshape(new)

    return of_mark


def at(view: View, i: jax.Array, base: jax.Array) -> View:
    """The i-th slice along the first axis, whose elements are `base`."""

    def of_mark(mark: jax.Array) -> jax.Array:
        if mark.shape[0] == 1:
            return mark.reshape(mark.shape[1:])
        return lax.dynamic_index_in_dim(mark, i, 0, keepdims=False)

    return view.map(base, of_mark)


def gather(
    view: View, starts: jax.Array, base: jax.Array, params: dict[str, Any]
) -> View | None:
    """A look-up that has read `base`: only the elements read are drawn."""
    modes = lax.GatherScatterMode
    numbers, sizes, mode = (
        params[name] for name in ("dimension_numbers", "slice_sizes", "mode")
    )
    if mode == modes.ONE_HOT or numbers.operand_batching_dims:
        return None
    batch_axes = [a for a in range(base.ndim) if a not in numbers.offset_dims]
    window_axes = iter(numbers.offset_dims)
    coordinates = []
    inside = jnp.ones((1,) * base.ndim, bool)
    for axis, size in enumerate(view.shape):
        coordinate = jnp.zeros((1,) * base.ndim, jnp.uint32)
        if axis not in numbers.collapsed_slice_dims:
            target = next(window_axes)
            shape = [1] * base.ndim
            shape[target] = sizes[axis]
            coordinate += jnp.arange(sizes[axis], dtype=jnp.uint32).reshape(shape)
        if axis in numbers.start_index_map:
            start = starts[..., numbers.start_index_map.index(axis)]
            if start.dtype.itemsize < 4:
                start = start.astype(jnp.int32)
            shape = [1] * base.ndim
            for a, extent in zip(batch_axes, start.shape, strict=True):
                shape[a] = extent
            start = start.reshape(shape)
            # Out of bounds the look-up clamps, or fills.
            clamped = jnp.clip(start, 0, size - sizes[axis])
            inside = inside & (start == clamped)
            coordinate = coordinate + clamped.astype(jnp.uint32)
        coordinates.append(coordinate)

    def of_mark(mark: jax.Array) -> jax.Array:
        axes = [a for a in range(mark.ndim) if mark.shape[a] > 1]
        if not axes:
            return mark.reshape((1,) * base.ndim)
        along = tuple(
            coordinates[a] if a in axes else jnp.zeros((1,) * base.ndim, jnp.uint32)
            for a in range(mark.ndim)
        )
        return mark.at[along].get(mode="promise_in_bounds")

    found = view.map(base, of_mark)
    fill = params["fill_value"]
    # To NaN, which no fill value stands for, anything may be added.
    if mode == modes.FILL_OR_DROP and fill is not None and not math.isnan(fill):
        return found.only_where(inside)
    return found


def _reshape_groups(
    old: tuple[int, ...], new: tuple[int, ...]
) -> list[tuple[list[int], list[int]]]:
    """Runs of old axes and of new ones that hold the same elements."""
    groups: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(old) or j < len(new):
        olds, news = [], []
        left = right = 1
        if i < len(old):
            olds.append(i)
            left, i = old[i], i + 1
        if j < len(new):
            news.append(j)
            right, j = new[j], j + 1
        while left != right:
            if left < right and i < len(old):
                olds.append(i)
                left, i = left * old[i], i + 1
            elif j < len(new):
                news.append(j)
                right, j = right * new[j], j + 1
            else:
                olds.append(i)
                left, i = left * old[i], i + 1
        groups.append((olds, news))
    return groups
