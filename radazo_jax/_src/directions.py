"""Laws of random directions, and the lazy directions that they sample.

A direction is a key and a law, not an array: its elements are computed where they are
needed, from their positions. Positions run through the whole tree of parameters, leaf
after leaf, so that a direction does not depend on how the same coordinates are cut
into leaves, and no two leaves share their numbers.
"""

import abc
import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from radazo_jax._src import counter

# How many coordinates are drawn together where only their norm is asked for.
_CHUNK = 2**18


class Leaf(NamedTuple):
    """Where a leaf of the parameters lies among all coordinates.

    Attributes:
      shape: The leaf's shape.
      offset: How many coordinates the leaves before it have.
      path: Its path in the tree, as ``jax.tree_util`` gives it.
    """

    shape: tuple[int, ...]
    offset: int
    path: tuple[Any, ...]


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["key", "scale"],
    meta_fields=["law"],
)
@dataclasses.dataclass(frozen=True)
class Direction:
    """A random direction u, as the numbers from which it can be computed anywhere.

    A pytree of two scalars whatever the size of the parameters: it can be vmapped,
    scanned, sharded and stored.

    Attributes:
      key: The typed key of the draw, shape ().
      scale: What the draw is multiplied by, float32, shape ().
      law: The law that sampled it; static.
    """

    key: jax.Array
    scale: jax.Array
    law: "Law"


class Factors(NamedTuple):
    """A matrix of low rank, u = Σ_ρ a[…, ρ] b[…, ρ], by its two factors.

    Attributes:
      a: float32, of the rank of the leaf and one axis more, of size r; it has size 1
        along the axes of the columns.
      b: Likewise, with size 1 along the axes of the rows.
    """

    a: jax.Array
    b: jax.Array

    def product(self) -> jax.Array:
        return jnp.sum(self.a * self.b, axis=-1)


@dataclasses.dataclass(frozen=True)
class Law(abc.ABC):
    """A distribution of directions u over all coordinates of a tree together.

    Every law is centered and symmetric, and has E[u uᵀ] = I / c, where the factor c
    is known: an estimator multiplies by it.
    """

    def sample(self, key: jax.typing.ArrayLike, params: Any) -> Direction:
        """Samples a direction for ``params``.

        Args:
          key: A key; it is consumed.
          params: A tree of arrays, of which only the shapes are used.

        Returns:
          The direction.
        """
        key = counter.as_key(key)
        return Direction(key=key, scale=self._scale(key, params), law=self)

    def materialize(self, direction: Direction, params: Any) -> Any:
        """Computes all elements of ``direction``.

        Args:
          direction: A direction that this law sampled.
          params: The tree of arrays it was sampled for.

        Returns:
          A tree like ``params``, in the shapes and dtypes of its leaves.
        """
        return jax.tree.map(
            lambda u, p: u.astype(jnp.result_type(p)),
            elements(direction, params),
            params,
        )

    @abc.abstractmethod
    def factor(self, params: Any) -> float:
        """The c of E[u uᵀ] = I / c."""

    @abc.abstractmethod
    def draw(
        self, key: jax.Array, at: counter.Counter, num_coordinates: int
    ) -> jax.Array:
        """The elements at positions ``at`` before they are scaled: float32."""

    def block(
        self,
        direction: Direction,
        leaf: Leaf,
        indices: Sequence[jax.Array],
        num_coordinates: int,
    ) -> jax.Array:
        """The elements of ``leaf`` at ``indices``, one array an axis: float32."""
        at = counter.positions(leaf.shape, indices, leaf.offset)
        return direction.scale * self.draw(direction.key, at, num_coordinates)

    def factors(self, direction: Direction, leaf: Leaf) -> Factors | None:
        """The factors of a leaf's elements, under a law that has such."""
        del direction, leaf
        return None

    def num_stored(self, leaf: Leaf) -> int:
        """How many numbers make the elements of ``leaf``."""
        return math.prod(leaf.shape)

    def normalization(self, draws: Sequence[jax.Array]) -> jax.Array:
        """What all the elements drawn are multiplied by: float32, shape ()."""
        del draws
        return jnp.ones((), jnp.float32)

    def _scale(self, key: jax.Array, params: Any) -> jax.Array:
        """``normalization`` of a draw, which is made only where it is read."""
        del key, params
        return self.normalization(())


def layout(params: Any) -> list[Leaf]:
    """Where each leaf of ``params`` lies, in the order of ``jax.tree.leaves``."""
    leaves, offset = [], 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        leaves.append(Leaf(tuple(jnp.shape(leaf)), offset, path))
        offset += math.prod(leaves[-1].shape)
    return leaves


def num_coordinates(leaves: Sequence[Leaf]) -> int:
    """d, the number of coordinates of all leaves together."""
    return sum(math.prod(leaf.shape) for leaf in leaves)


def elements(direction: Direction, params: Any) -> Any:
    """All elements of ``direction``, as a tree like ``params`` of float32 arrays."""
    blocks = _draw_blocks(direction, tuple(layout(params)))
    return jax.tree.unflatten(jax.tree.structure(params), blocks)


# Compiled as a whole where it is called outside of any jit; part of the program where
# there is one.
@functools.partial(jax.jit, static_argnames="leaves", inline=True)
def _draw_blocks(
    direction: Direction, leaves: tuple[Leaf, ...]
) -> tuple[jax.Array, ...]:
    total = num_coordinates(leaves)
    return tuple(
        direction.law.block(direction, leaf, counter.block(leaf.shape), total)
        for leaf in leaves
    )


class _Gaussian(Law):
    def factor(self, params: Any) -> float:
        del params
        return 1.0

    def draw(
        self, key: jax.Array, at: counter.Counter, num_coordinates: int
    ) -> jax.Array:
        del num_coordinates
        return counter.normal(key, at)


class _Sphere(_Gaussian):
    def factor(self, params: Any) -> float:
        return float(num_coordinates(layout(params)))

    def normalization(self, draws: Sequence[jax.Array]) -> jax.Array:
        square = sum((jnp.sum(draw**2) for draw in draws), jnp.float32(0))
        # A tree without coordinates, or one whose only number is drawn 0, has no
        # direction to normalize.
        return lax.rsqrt(jnp.maximum(square, jnp.finfo(jnp.float32).tiny))

    def _scale(self, key: jax.Array, params: Any) -> jax.Array:
        total = num_coordinates(layout(params))

        def at_once(key: jax.Array) -> jax.Array:
            unscaled = Direction(key, jnp.ones((), jnp.float32), self)
            return self.normalization(jax.tree.leaves(elements(unscaled, params)))

        if total <= _CHUNK:
            return at_once(key)
        # XLA's CPU backend stores what it sums, so there it is drawn in pieces.
        in_pieces = functools.partial(self._scale_in_pieces, total=total)
        return lax.platform_dependent(key, cpu=in_pieces, default=at_once)

    def _scale_in_pieces(self, key: jax.Array, *, total: int) -> jax.Array:
        pieces, rest = divmod(total, _CHUNK)

        def square(at: counter.Counter) -> jax.Array:
            return jnp.sum(self.draw(key, at, total) ** 2)

        def add(i: jax.Array, squares: jax.Array) -> jax.Array:
            piece = counter.block((1, _CHUNK), (i, 0))
            return squares + square(counter.positions((pieces, _CHUNK), piece))

        last = square(counter.positions((rest,), offset=pieces * _CHUNK))
        return self.normalization([jnp.sqrt(lax.fori_loop(0, pieces, add, last))])


class _Rademacher(Law):
    def factor(self, params: Any) -> float:
        del params
        return 1.0

    def draw(
        self, key: jax.Array, at: counter.Counter, num_coordinates: int
    ) -> jax.Array:
        del num_coordinates
        # A random word serves 32 elements, a bit each.
        five = np.uint32(5)
        word = counter.Counter(
            at.hi >> five, (at.lo >> five) | (at.hi << np.uint32(27))
        )
        bit = (counter.bits(key, word) >> (at.lo & np.uint32(31))) & np.uint32(1)
        # The bit becomes the sign bit of 1.0.
        return lax.bitcast_convert_type(
            (bit << np.uint32(31)) | np.uint32(0x3F800000), jnp.float32
        )


class _Coordinate(Law):
    def factor(self, params: Any) -> float:
        return float(num_coordinates(layout(params)))

    def draw(
        self, key: jax.Array, at: counter.Counter, num_coordinates: int
    ) -> jax.Array:
        zero = counter.Counter(jnp.zeros((), jnp.uint32), jnp.zeros((), jnp.uint32))
        chosen = counter.below(key, zero, max(num_coordinates, 1))
        bit = counter.bits(key, zero._replace(lo=zero.lo + np.uint32(1))) >> np.uint32(
            31
        )
        sign = 1 - 2 * bit.astype(jnp.float32)
        return jnp.where((at.hi == chosen.hi) & (at.lo == chosen.lo), sign, 0.0)


def sphere() -> Law:
    """Uniform on the unit sphere of all coordinates: the law of the paper.

    A standard normal vector divided by its norm, which is taken over the whole tree.
    E[u uᵀ] = I/d, so the factor is c = d, the number of all coordinates.

    Returns:
      The law.

    References:
      Shu et al., Refining Adaptive Zeroth-Order Optimization at Ease, ICML 2025,
      eq. (2).

    >>> import jax, jax.numpy as jnp
    >>> import radazo_jax as zo
    >>> params = {"w": jnp.zeros((3, 2)), "b": jnp.zeros(2)}
    >>> law = zo.sphere()
    >>> u = law.materialize(law.sample(jax.random.key(0), params), params)
    >>> print(f"{jnp.sqrt(jnp.sum(u['w'] ** 2) + jnp.sum(u['b'] ** 2)):.5f}")
    1.00000
    >>> law.factor(params)
    8.0
    """
    return _Sphere()


def gaussian() -> Law:
    """Independent standard normal elements: E[u uᵀ] = I, the factor is c = 1.

    Returns:
      The law.

    References:
      Nesterov & Spokoiny, `Random Gradient-Free Minimization of Convex Functions
      <https://doi.org/10.1007/s10208-015-9296-2>`_, 2017.

    >>> import jax, jax.numpy as jnp
    >>> import radazo_jax as zo
    >>> params, key, law = jnp.zeros(4), jax.random.key(0), zo.gaussian()
    >>> u = law.materialize(law.sample(key, params), params)
    >>> bool((u == jax.random.normal(key, (4,))).all())
    True
    """
    return _Gaussian()


def rademacher() -> Law:
    """Independent random signs: E[u uᵀ] = I, the factor is c = 1.

    The cheapest dense law: a bit of randomness an element. Of all laws with
    independent centered elements it has the smallest variance.

    Returns:
      The law.

    References:
      Spall, `Multivariate Stochastic Approximation Using a Simultaneous Perturbation
      Gradient Approximation <https://doi.org/10.1109/9.119632>`_, 1992.

    >>> import jax, jax.numpy as jnp
    >>> import radazo_jax as zo
    >>> params, law = jnp.zeros(4), zo.rademacher()
    >>> u = law.materialize(law.sample(jax.random.key(0), params), params)
    >>> bool((abs(u) == 1).all())
    True
    """
    return _Rademacher()


def coordinate() -> Law:
    """One coordinate of all, chosen uniformly, with a random sign.

    E[u uᵀ] = I/d, so the factor is c = d. The sign makes the law symmetric: a forward
    difference along it has no bias from curvature.

    Returns:
      The law.

    References:
      Lian et al., `A Comprehensive Linear Speedup Analysis for Asynchronous
      Stochastic Parallel Optimization from Zeroth-Order to First-Order
      <https://arxiv.org/abs/1606.00498>`_, 2016.

    >>> import jax, jax.numpy as jnp
    >>> import radazo_jax as zo
    >>> params, law = jnp.zeros(4), zo.coordinate()
    >>> u = law.materialize(law.sample(jax.random.key(0), params), params)
    >>> float(jnp.sum(abs(u)))
    1.0
    """
    return _Coordinate()
