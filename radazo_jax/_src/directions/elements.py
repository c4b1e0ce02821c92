"""The elements of a leaf of a direction: unstored, or stored in one of three forms.

All forms have one interface. `values()` are the elements of a leaf, before they are
scaled. `weighted_sum(coefficients)` is the weighted sum of several, stacked. `marks`
are the arrays from which the elements are computed, each of the rank of the leaf and
broadcastable to its shape: if a leaf is sliced or transposed, its marks are too, and
`with_marks` has the elements that are left.
"""

import dataclasses
import functools
import math
import string
from collections.abc import Hashable, Sequence
from typing import Protocol, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from radazo_jax._src.base import xla
from radazo_jax._src.base.trees import STATIC
from radazo_jax._src.directions import generator
from radazo_jax._src.directions.generator import Positions
from radazo_jax._src.directions.layout import GROUP, Packing, Part

# Up to this many terms, a weighted sum of directions is one expression, which fuses
# into whatever consumes it; beyond, it is a product that is stored.
_MAX_TERMS = 16

_EXACT = lax.Precision.HIGHEST

Marks = tuple[jax.Array, ...]


class Elements(Protocol):
    """Elements of a leaf of a direction, in one of the forms below."""

    @property
    def marks(self) -> Marks: ...

    def with_marks(self, marks: Marks) -> "Elements": ...

    def values(self) -> jax.Array: ...

    def weighted_sum(self, coefficients: jax.Array) -> jax.Array: ...


class Draws(Hashable, Protocol):
    """A distribution, by what draws its elements."""

    def draw(self, key: jax.Array, number: jax.Array, at: Positions) -> jax.Array: ...

    def _packing(self, dimension: int) -> Packing | None: ...


class _Elementwise:
    """Forms whose sums are sums of their elements."""

    def weighted_sum(self, coefficients: jax.Array) -> jax.Array:
        us = jax.vmap(lambda elements: elements.values())(self)
        if len(coefficients) > _MAX_TERMS:
            return jnp.tensordot(coefficients, us, 1, precision=_EXACT)
        terms = [coefficients[k] * us[k] for k in range(len(coefficients))]
        return functools.reduce(jnp.add, terms)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LazyElements(_Elementwise):
    """Elements that are not stored, but drawn wherever they are read.

    Attributes:
      key: The key of the direction.
      number: Its number.
      indices: The elements asked for, one uint32 array per axis of the part.
      distribution: The distribution that draws them.
      part: The leaf, or another array of random numbers.
      dimension: d, how many coordinates all leaves have.
      order: The axes of the elements from the outermost in the part to the innermost;
        `None` unless the elements are neighbors in the part.
      stored: Whether what neighbors are drawn from may be stored.
    """

    key: jax.Array
    number: jax.Array
    indices: Marks
    distribution: Draws = dataclasses.field(metadata=STATIC)
    part: Part = dataclasses.field(metadata=STATIC)
    dimension: int = dataclasses.field(metadata=STATIC)
    order: tuple[int, ...] | None = dataclasses.field(default=None, metadata=STATIC)
    stored: bool = dataclasses.field(default=False, metadata=STATIC)

    @property
    def marks(self) -> Marks:
        return self.indices

    def with_marks(self, marks: Marks) -> Self:
        same = all(a is b for a, b in zip(marks, self.indices, strict=True))
        order = self.order if same else None
        return dataclasses.replace(self, indices=marks, order=order)

    def values(self) -> jax.Array:
        packing: Packing | None = self.distribution._packing(self.dimension)
        size = math.prod(jnp.broadcast_shapes(*(i.shape for i in self.indices)))
        if packing is None or self.order is None or size == 0:
            return self._one_by_one()
        units = functools.partial(self._from_units, packing)
        return packing.choose(size, self.stored)(units, self._one_by_one)

    def _one_by_one(self) -> jax.Array:
        at = self.part.positions(self.dimension, self.indices)
        return draw(self.distribution, self.key, self.number, at)

    def _from_units(self, packing: Packing) -> jax.Array:
        assert self.order is not None
        indices = [index.transpose(self.order) for index in self.indices]
        shape = jnp.broadcast_shapes(*(index.shape for index in indices))
        start = self._start_in_group(indices)
        count = packing.num_units(start, math.prod(shape))

        def drawn(first: Positions, key: jax.Array, number: jax.Array) -> jax.Array:
            after = generator.low(jnp.arange(count, dtype=jnp.uint32))
            at = generator.add(packing.first(first), after)
            return packing.draw(key, number, Positions(*at, self.dimension))

        def unpacked(first: Positions, units: jax.Array) -> Elements:
            within = first.lo % np.uint32(GROUP) if start is None else start
            return packing.unpack(units, within, shape)

        def both(first: Positions, key: jax.Array, number: jax.Array) -> Elements:
            return unpacked(first, drawn(first, key, number))

        # Constant along all other axes, so that XLA adds nothing to it.
        begins = [
            index.reshape(-1)[0] if index.size < size else jnp.uint32(0)
            for index, size in zip(indices, self.part.shape, strict=True)
        ]
        first = self.part.positions(self.dimension, begins)
        args = first, self.key, self.number
        if packing.keeps(start):
            elements = unpacked(first, xla.compute_once(drawn, *args))
        else:
            elements = xla.compute_once(both, *args)
        return elements.values().transpose(np.argsort(self.order))

    def _start_in_group(self, indices: Sequence[jax.Array]) -> int | None:
        """Returns the place of the first element in its group; `None` if not known."""
        shape = self.part.shape
        cut = [i for i, n in enumerate(shape) if indices[i].size < n]
        strides = [math.prod(shape[axis + 1 :]) for axis in cut]
        known = all(stride % GROUP == 0 for stride in strides)
        return self.part.offset % GROUP if known else None


def draw(
    distribution: Draws, key: jax.Array, number: jax.Array, at: Positions
) -> jax.Array:
    """Draws the numbers of a distribution, which may be a custom one."""
    _check_positions_alone(distribution, at.dimension)
    return _drawn(distribution, key, number, at)


@functools.lru_cache(maxsize=64)
def _check_positions_alone(distribution: Draws, dimension: int) -> None:
    """Raises if an element depends on the other positions, or on their shape.

    A draw by the shape of an array, as by `jax.random`, would give equal numbers to
    arrays of equal shape, and other ones to each part of an array.
    """
    if dimension < 3 or type(distribution).__module__.startswith("radazo_jax."):
        return
    # Outside of any mesh: under a `shard_map`, an eager program would be manual too.
    no_mesh = jax.sharding.AbstractMesh((), ())
    with jax.sharding.use_abstract_mesh(no_mesh), jax.ensure_compile_time_eval():
        key, number = jax.random.key(0), jnp.uint32(0)
        first, second = (
            _drawn(
                distribution,
                key,
                number,
                generator.positions((2,), offset=offset, dimension=dimension),
            )
            for offset in (0, 1)
        )
        same = np.array_equal(first[1], second[0], equal_nan=True)
    if not same:
        raise TypeError(
            f"draw of {distribution!r} must compute each element from the key, the "
            "number and the element's position alone; got two numbers for one "
            "position. jax.random draws by shapes: use radazo_jax.random instead, as "
            "in zo.random.normal(key, at)."
        )


def _drawn(
    distribution: Draws, key: jax.Array, number: jax.Array, at: Positions
) -> jax.Array:
    found = distribution.draw(key, number, at)
    shape = np.shape(at.lo)
    if (
        not isinstance(found, jax.Array | np.ndarray)
        or found.shape != shape
        or not jnp.issubdtype(found.dtype, jnp.floating)
    ):
        raise TypeError(
            f"draw of {distribution!r} must return float32 of the shape "
            f"{shape} of the positions; got {found!r:.200}."
        )
    return jnp.asarray(found)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DenseElements(_Elementwise):
    """Elements that are stored: float32, of the leaf's shape."""

    array: jax.Array

    @property
    def marks(self) -> Marks:
        return (self.array,)

    def with_marks(self, marks: Marks) -> Self:
        return dataclasses.replace(self, array=marks[0])

    def values(self) -> jax.Array:
        return self.array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PackedSigns(_Elementwise):
    """Random signs of a leaf, 32 to a word.

    Attributes:
      words: uint32, [⌈size / 32⌉]: element i, in row-major order, is -1 if bit
        i mod 32 of word ⌊i / 32⌋ is set, else 1, times the magnitude.
      shape: The leaf's shape.
      magnitude: The absolute value of the elements: a positive number.
    """

    words: jax.Array
    shape: tuple[int, ...] = dataclasses.field(metadata=STATIC)
    magnitude: float = dataclasses.field(default=1.0, metadata=STATIC)

    @property
    def marks(self) -> Marks:
        return (self.values(),)

    def with_marks(self, marks: Marks) -> DenseElements:
        return DenseElements(*marks)

    def values(self) -> jax.Array:
        bits = self.words[:, None] >> jnp.arange(32, dtype=jnp.uint32)[None, :]
        bits = bits.reshape(-1)[: math.prod(self.shape)]
        # XLA would move a mere reshape into loops.
        return sign(bits.reshape(self.shape), self.magnitude)


def sign(word: jax.Array, magnitude: float = 1.0) -> jax.Array:
    """Returns -magnitude if the lowest bit is set, else magnitude."""
    bits = np.float32(magnitude).view(np.uint32)
    return lax.bitcast_convert_type((word << np.uint32(31)) | bits, jnp.float32)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LowRankFactors:
    """A matrix of low rank, u = Σ_ρ a[…, ρ] b[…, ρ], by its two factors.

    Attributes:
      a: float32, with the axes of the leaf and another one, of size r; it has size 1
        along the axes of the columns.
      b: Likewise, with size 1 along the axes of the rows.
    """

    a: jax.Array
    b: jax.Array

    @property
    def marks(self) -> Marks:
        return (self.a, self.b)

    def with_marks(self, marks: Marks) -> Self:
        return type(self)(*marks)

    def values(self) -> jax.Array:
        return jnp.sum(self.a * self.b, axis=-1)

    def weighted_sum(self, coefficients: jax.Array) -> jax.Array:
        weights = coefficients.reshape((-1,) + (1,) * (self.a.ndim - 1))
        return _sum_of_products(weights * self.a, self.b)


def _sum_of_products(a: jax.Array, b: jax.Array) -> jax.Array:
    """Sums a[k, …, ρ] b[k, …, ρ] over k and ρ; no axis varies in both factors."""
    num, *shape, rank = jnp.broadcast_shapes(a.shape, b.shape)
    if num * rank <= _MAX_TERMS:
        terms = [a[k, ..., j] * b[k, ..., j] for j in range(rank) for k in range(num)]
        return functools.reduce(jnp.add, terms)
    # One product over k and ρ, which stay in their place: to move them would take as
    # long as the product of many small matrices.
    names = string.ascii_lowercase
    (names_a, a), (names_b, b) = (drop_constant_axes(x, names) for x in (a, b))
    out = "".join(names[i + 1] for i, size in enumerate(shape) if size != 1)
    last = "Z" if rank != 1 else ""
    if not last:
        a, b = a[..., 0], b[..., 0]
    spec = f"{names_a}{last},{names_b}{last}->{out}"
    return jnp.einsum(spec, a, b, precision=_EXACT).reshape(shape)


def drop_constant_axes(factor: jax.Array, names: str) -> tuple[str, jax.Array]:
    """Drops axes along which a factor is constant, and returns the others' names."""
    kept = [axis for axis in range(factor.ndim - 1) if factor.shape[axis] != 1]
    shape = (*(factor.shape[axis] for axis in kept), factor.shape[-1])
    return "".join(names[axis] for axis in kept), factor.reshape(shape)
