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

from radazo_jax._src import counter, fusion


class Leaf(NamedTuple):
    """Where a leaf of the parameters lies among all coordinates.

    Attributes:
      shape: The leaf's shape.
      offset: How many coordinates the leaves before it have.
    """

    shape: tuple[int, ...]
    offset: int


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


class Kept(NamedTuple):
    """A direction whose elements have been drawn and stored.

    Attributes:
      draws: What was drawn, a tree like the parameters of float32 arrays.
      scale: What the draws are multiplied by, float32, shape ().
    """

    draws: Any
    scale: jax.Array


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
        draws = jax.tree.leaves(_draw_all(self, key, params))
        return Direction(key=key, scale=self.normalization(draws), law=self)

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

    def normalization(self, draws: Sequence[jax.Array]) -> jax.Array:
        """What all the elements drawn are multiplied by: float32, shape ()."""
        del draws
        return jnp.ones((), jnp.float32)


def layout(params: Any) -> list[Leaf]:
    """Where each leaf of ``params`` lies, in the order of ``jax.tree.leaves``."""
    leaves, offset = [], 0
    for leaf in jax.tree.leaves(params):
        leaves.append(Leaf(shape=tuple(jnp.shape(leaf)), offset=offset))
        offset += math.prod(leaves[-1].shape)
    return leaves


def num_coordinates(leaves: Sequence[Leaf]) -> int:
    """d, the number of coordinates of all leaves together."""
    return sum(math.prod(leaf.shape) for leaf in leaves)


def elements(direction: Direction | Kept, params: Any) -> Any:
    """All elements of ``direction``, as a tree like ``params`` of float32 arrays."""
    if isinstance(direction, Kept):
        draws = direction.draws
    else:
        draws = _draw_all(direction.law, direction.key, params)
    return jax.tree.map(lambda draw: direction.scale * draw, draws)


def keep(law: Law, keys: jax.Array, params: Any) -> Kept:
    """Samples several directions and stores them, drawing each number once.

    Args:
      law: The law to sample from.
      keys: Typed keys, [K]; they are consumed.
      params: The tree of arrays to sample for.

    Returns:
      The directions that ``law.sample`` samples, with a leading axis K.
    """
    draw = jax.vmap(lambda key: _draw_all(law, key, params))
    draws = fusion.compute_once(draw, keys, keys)
    return Kept(draws, jax.vmap(law.normalization)(jax.tree.leaves(draws)))


def _draw_all(law: Law, key: jax.Array, params: Any) -> Any:
    draws = _draw_leaves(law, key, tuple(layout(params)))
    return jax.tree.unflatten(jax.tree.structure(params), draws)


# Compiled as a whole where it is called outside of any jit; part of the program where
# there is one.
@functools.partial(jax.jit, static_argnames=("law", "leaves"), inline=True)
def _draw_leaves(
    law: Law, key: jax.Array, leaves: tuple[Leaf, ...]
) -> tuple[jax.Array, ...]:
    total = num_coordinates(leaves)
    return tuple(
        law.draw(key, counter.positions(leaf.shape, offset=leaf.offset), total)
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
