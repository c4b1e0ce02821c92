"""Perturbed leaves that are not built yet.

A `View` stands for `p + scale * u` restricted to some elements of a leaf, in some
order. It has the elements of p, and the elements of u in their own form, whose marks
take part in every rearrangement: slices, transposes, reshapes and lookups of a
perturbed leaf are again views, and u is computed only when a view is used. The smallest
leaves are drawn once, before anything reads them.
"""

import dataclasses
from collections.abc import Callable, Container, Sequence
from typing import Any, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import optax

from radazo_jax._src.base import xla
from radazo_jax._src.base.trees import at_least_float32
from radazo_jax._src.directions import distribution
from radazo_jax._src.directions.distribution import Direction
from radazo_jax._src.directions.elements import (
    Elements,
    LazyElements,
    LowRankFactors,
    Marks,
)
from radazo_jax._src.directions.layout import Layout, Leaf

_T = TypeVar("_T")

Value: TypeAlias = Any  # An array or a `View`.

# The smallest leaves, with at most this many elements together, are drawn once for a
# whole evaluation, however often a program reads them. A draw at each read would be a
# conditional at each read, and each takes 20 ms to compile. The sums take at most
# 256 KiB. A CPU draws them in 0.4 ms, which is wasted only if few of them are read.
_MAX_DRAWN_TOGETHER = 2**16


@dataclasses.dataclass(frozen=True)
class View:
    """Some elements of a perturbed leaf.

    Attributes:
      base: The unperturbed elements, in the leaf's dtype; if `u` is `None`, the
        perturbed ones, not rounded to `dtype` yet.
      dtype: The dtype in which the perturbed elements are asked for.
      scale: The factor of the direction, shape (); or one that broadcasts to the leaf,
        which is built before anything reads it.
      norm: The first factor of the elements, shape ().
      u: The elements as they are held; `None` if they have been added to `base`.
      converted: Whether `dtype` is not the leaf's.
      mask: Whether an element is perturbed, broadcastable; `None` if all are.
      looked_up: Whether `base` was read by an index, and so is an array of its own.
      in_loop: Whether the program that reads it may stand in a loop.
      on_use: `on_use(view, contracted)`, called when the view is used: in a product
        that contracts the given axes, or built (none). Such a view is only traced, so
        building it draws nothing.
    """

    base: jax.Array
    dtype: jax.typing.DTypeLike
    scale: jax.Array
    norm: jax.Array
    u: Elements | None
    converted: bool = False
    mask: jax.Array | None = None
    looked_up: bool = False
    in_loop: bool = False
    on_use: Callable[["View", set[int]], None] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.base.shape

    @property
    def marks(self) -> Marks:
        """The marks of the elements of u; none if they were added already."""
        return () if self.u is None else self.u.marks

    @property
    def order(self) -> tuple[int, ...] | None:
        """The `order` of lazy elements."""
        return self.u.order if isinstance(self.u, LazyElements) else None

    def map(
        self,
        base: jax.Array,
        of_mark: Callable[[jax.Array], jax.Array],
        order: tuple[int, ...] | None = None,
    ) -> "View":
        """Returns the view whose elements have become `base`; its marks follow.

        Args:
          base: The unperturbed elements.
          of_mark: A function of each mark.
          order: The `order` of the new elements if they are lazy.
        """
        if self.u is None:
            return dataclasses.replace(self, base=base)
        mask = None if self.mask is None else of_mark(self.mask)
        if isinstance(self.u, LowRankFactors):
            of_mark = jax.vmap(of_mark, in_axes=-1, out_axes=-1)
        u = self.u.with_marks(tuple(of_mark(mark) for mark in self.u.marks))
        if isinstance(u, LazyElements):
            u = dataclasses.replace(u, order=order)
        return dataclasses.replace(self, base=base, u=u, mask=mask)

    def only_where(self, mask: jax.Array) -> "View":
        """Returns the view without noise at elements whose `mask` is false."""
        if isinstance(self.u, LowRankFactors):
            a = jnp.where(jnp.expand_dims(mask, -1), self.u.a, 0.0)
            return dataclasses.replace(self, u=LowRankFactors(a, self.u.b))
        if self.mask is not None:
            mask = mask & self.mask
        return dataclasses.replace(self, mask=mask)

    def used(self, contracted: Sequence[int] = ()) -> None:
        """Tells whoever asked that a product contracts these axes, or none does."""
        if self.on_use is not None:
            self.on_use(self, set(contracted))

    def build(self, *after: jax.Array, ready: Container[int] = ()) -> jax.Array:
        """Returns the perturbed elements.

        Args:
          *after: Values that must be computed before the elements are drawn.
          ready: The `id`s of values that were computed already.

        Returns:
          An array of `shape` and `dtype`.
        """
        self.used()
        if self.u is None or self.on_use is not None:
            return self.base.astype(self.dtype)

        if not isinstance(self.u, LazyElements):
            return self._sum(self.u, self.norm, self.scale).astype(self.dtype)
        late = [value for value in after if id(value) not in ready]
        u, base = xla.tie(self.u, *late), self.base
        if self.looked_up:
            # A TPU would keep what was looked up in float32 from the first sum of it
            # to the last.
            base = xla.tie_on_tpu(base, *late)
        view = dataclasses.replace(self, base=base)

        def rounded(u: Elements, norm: jax.Array, scale: jax.Array) -> jax.Array:
            return view._sum(u, norm, scale).astype(self.dtype)

        return xla.compute_once(rounded, u, self.norm, self.scale, after=after)

    def _sum(self, u: Elements, norm: jax.Array, scale: jax.Array) -> jax.Array:
        """Returns the perturbed elements, not rounded yet: at least float32."""
        wide = at_least_float32(self.base.dtype)
        u = u.with_marks(tuple(_sharded_like(self.base, mark) for mark in u.marks))
        noise = norm * u.values()
        if self.mask is not None:
            noise = jnp.where(_sharded_like(self.base, self.mask), noise, 0.0)
        return self.base.astype(wide) + scale.astype(wide) * noise.astype(wide)


def _sharded_like(base: jax.Array, mark: jax.Array) -> jax.Array:
    """Returns `mark`, of which each device needs what belongs to its part of `base`.

    Without a mesh around the program, `mark` stays whole.
    """
    spec = jax.typeof(base).sharding.spec
    if not any(spec) or jax.sharding.get_abstract_mesh().empty:
        return mark
    sizes = mark.shape[: len(spec)]  # Factors have an additional axis.
    varying = [n if size > 1 else None for n, size in zip(spec, sizes, strict=True)]
    return jax.reshard(mark, jax.P(*varying))


def views_of(
    params: optax.Params,
    layout: Layout,
    direction: Direction,
    scale: jax.Array,
    in_loop: bool = False,
) -> list[View]:
    """Returns the leaves of the parameters, perturbed by `direction`, unbuilt."""
    held = direction.cached or _unstored(direction, layout)
    leaves = jax.tree.leaves(params)
    scales = [scale.astype(at_least_float32(leaf.dtype)) for leaf in leaves]
    return [
        View(leaf, leaf.dtype, factor, direction.scale, u, in_loop=in_loop)
        for leaf, factor, u in zip(leaves, scales, held, strict=True)
    ]


def with_small_drawn(given: Sequence[View]) -> list[View]:
    """Returns `given`, with the smallest lazy elements drawn."""
    room, small = _MAX_DRAWN_TOGETHER, []
    drawn = [i for i, view in enumerate(given) if isinstance(view.u, LazyElements)]
    for i in sorted(drawn, key=lambda i: given[i].base.size):
        room -= given[i].base.size
        if room >= 0:
            small.append(i)
    if not small:
        return list(given)

    def sums(held: list[tuple[Elements, jax.Array, jax.Array]]) -> list[jax.Array]:
        pairs = zip(small, held, strict=True)
        return [given[i]._sum(*factors) for i, factors in pairs]

    held = [(given[i].u, given[i].norm, given[i].scale) for i in small]
    found = list(given)
    for i, base in zip(small, xla.compute_once(sums, held), strict=True):
        found[i] = dataclasses.replace(given[i], base=base, u=None)
    return found


def _unstored(direction: Direction, layout: Layout) -> list[Elements]:
    """Returns the elements of a direction: factors, or drawn when they are read."""

    def lazy(direction: Direction, leaf: Leaf) -> Elements:
        return distribution.lazy(direction, leaf, layout.dimension)

    def factors(direction: Direction) -> list[Elements | None]:
        held = [lazy(direction, leaf) for leaf in layout.leaves]
        return [u if isinstance(u, LowRankFactors) else None for u in held]

    # Stored, because XLA's CPU backend would draw a factor in every product with it.
    drawn = jax.eval_shape(factors, direction)
    if jax.tree.leaves(drawn):
        drawn = xla.compute_once(factors, direction)
    return [
        lazy(direction, leaf) if stored is None else stored
        for leaf, stored in zip(layout.leaves, drawn, strict=True)
    ]


def drawn_after(value: _T, after: jax.Array) -> _T:
    """Returns `value` in a loop, drawn after `after` if it is a view to be drawn."""
    if not isinstance(value, View):
        return value
    u = xla.tie(value.u, after) if isinstance(value.u, LazyElements) else value.u
    return dataclasses.replace(value, u=u, in_loop=True)
