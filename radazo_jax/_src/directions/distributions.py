"""The distributions of random directions."""

import abc
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from radazo_jax._src.base import checks, xla
from radazo_jax._src.base.names import checks_names
from radazo_jax._src.base.trees import Tree
from radazo_jax._src.directions import generator
from radazo_jax._src.directions.distribution import Distribution, UnitNorm
from radazo_jax._src.directions.elements import (
    DenseElements,
    Elements,
    LowRankFactors,
    PackedSigns,
    sign,
)
from radazo_jax._src.directions.generator import PAIR, Counter, Positions
from radazo_jax._src.directions.layout import (
    Layout,
    Leaf,
    MatrixAxes,
    Packing,
    Part,
    layout_of,
)

# Between so many numbers they are drawn in pairs: fewer are not worth the longer
# compilation, and pairs are stored before they are split, in 64 MiB at most.
_FEWEST, _MOST = 2**13, 2**24


class Normals(Distribution):
    """Distributions of normal numbers that are not the numbers of `jax.random`."""

    def draw(self, key: jax.Array, number: jax.Array, at: Positions) -> jax.Array:
        del number
        return generator.fast_normal(key, at)

    def _packing(self, dimension: int) -> Packing:
        del dimension
        return _PAIRS


def _choose_pairs(size: int, stored: bool) -> Callable[..., Tree]:
    # Elsewhere than on a single CPU, what is drawn together would be copied into the
    # shape of the leaf, or sent to other devices.
    fits = stored and _FEWEST <= size <= _MOST
    return xla.on_one_cpu if fits else lambda _, one_by_one: one_by_one()


def _draw(key: jax.Array, number: jax.Array, at: Positions) -> jax.Array:
    """Returns the two numbers of each pair: complex64."""
    del number
    near = at.lo & np.uint32(PAIR - 1)
    hi = (at.hi << np.uint32(1)) | (at.lo >> np.uint32(31))
    return generator.normal_pairs(key, Counter(hi, 2 * at.lo - near))


def _unpack(
    pairs: jax.Array, start: jax.typing.ArrayLike, shape: tuple[int, ...]
) -> DenseElements:
    stacked = pairs.shape[:-1]
    grouped = pairs.reshape(*stacked, -1, PAIR)
    numbers = jnp.stack([grouped.real, grouped.imag], axis=-2).reshape(*stacked, -1)
    size = math.prod(shape)
    if isinstance(start, int):
        numbers = numbers[..., start : start + size]
    else:
        numbers = lax.dynamic_slice_in_dim(numbers, start, size, axis=-1)
    return DenseElements(numbers.reshape(*stacked, *shape))


# Both numbers of a pair lie in the same group of neighbors.
_PAIRS = Packing(PAIR, 2, _draw, _unpack, _choose_pairs)


class Gaussian(Distribution):
    """See `gaussian`."""

    _constructor = "gaussian"

    def factor(self, dimension: int) -> float:
        del dimension
        return 1.0

    def draw(self, key: jax.Array, number: jax.Array, at: Positions) -> jax.Array:
        del number
        return generator.normal(key, at)


class Sphere(UnitNorm, Normals):
    """See `sphere`: the numbers of `Normals.draw`, divided by their norm."""

    _constructor = "sphere"
    normalized = True


@checks_names
def sphere() -> Distribution:
    """Uniform on the unit sphere of all coordinates: the distribution of the paper.

    A standard normal vector divided by its norm, which is taken over the whole tree.
    E[u uᵀ] = I/d, so the factor is c = d, the number of all coordinates.

    Returns:
      The distribution.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> import radazo_jax as zo
      >>> params = {"w": jnp.zeros((3, 2)), "b": jnp.zeros(2)}
      >>> distribution = zo.sphere()
      >>> u = distribution.materialize(
      ...     distribution.sample(jax.random.key(0), params), params
      ... )
      >>> print(f"{jnp.sqrt(jnp.sum(u['w'] ** 2) + jnp.sum(u['b'] ** 2)):.5f}")
      1.00000
      >>> distribution.factor(8)
      8.0

    References:
      Shu et al., Refining Adaptive Zeroth-Order Optimization at Ease, ICML 2025,
      eq. (2).
    """
    return Sphere()


@checks_names
def gaussian() -> Distribution:
    """Independent standard normal elements: E[u uᵀ] = I, the factor is c = 1.

    Returns:
      The distribution.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> import radazo_jax as zo
      >>> params, key, distribution = jnp.zeros(4), jax.random.key(0), zo.gaussian()
      >>> u = distribution.materialize(distribution.sample(key, params), params)
      >>> bool((u == jax.random.normal(key, (4,))).all())
      True

    References:
      Nesterov & Spokoiny, Random Gradient-Free Minimization of Convex Functions, 2017,
      <https://doi.org/10.1007/s10208-015-9296-2>.
    """
    return Gaussian()


# How often numbers change places, or not, to be in a random order.
_ROUNDS = 24


class Coordinate(UnitNorm):
    """See `coordinate`."""

    _constructor = "coordinate"

    def draw(self, key: jax.Array, number: jax.Array, at: Positions) -> jax.Array:
        del number
        chosen = generator.below(key, generator.zero(), max(at.dimension, 1))
        signed = sign(_bit(key, 0, jnp.uint32(1)))
        return jnp.where((at.hi == chosen.hi) & (at.lo == chosen.lo), signed, 0.0)


class CoordinateInTurn(UnitNorm):
    """See `coordinate`, without replacement."""

    sequential = True

    def __repr__(self) -> str:
        return "coordinate(replace=False)"

    def draw(self, key: jax.Array, number: jax.Array, at: Positions) -> jax.Array:
        if at.dimension >= 2**32:
            raise ValueError(
                "params must have fewer than 2^32 coordinates under "
                f"coordinate(replace=False); got {at.dimension}."
            )
        size = np.uint32(max(at.dimension, 1))
        key = generator.fold_in(key, number // size)
        chosen = shuffled(key, number % size, size)
        signed = sign(_bit(key, _ROUNDS, chosen))
        return jnp.where((at.hi == 0) & (at.lo == chosen), signed, 0.0)


def shuffled(key: jax.Array, index: jax.Array, size: np.uint32) -> jax.Array:
    """Returns the place of a number below `size` in a random order of them.

    In each round, two numbers form a pair if their sum modulo the size is a random
    number, and each pair changes places by the flip of a coin of its own.

    Args:
      key: A typed key.
      index: uint32, shape ().
      size: The number of numbers.

    References:
      Hoang, Morris & Rogaway, An Enciphering Scheme Based on a Card Shuffle, CRYPTO
      2012, <https://arxiv.org/abs/1208.1176>.
    """
    high = jnp.full((_ROUNDS,), 0xFFFFFFFF, jnp.uint32)
    sums = generator.bits(key, Counter(high, jnp.arange(_ROUNDS, dtype="uint32")))
    sums = sums % size

    def turn(i: jax.Array, index: jax.Array) -> jax.Array:
        drawn = sums[i]
        # Without an overflow: drawn - index modulo the size.
        gap = jnp.where(drawn >= index, drawn - index, size - (index - drawn))
        partner = jnp.where(gap == size, 0, gap)
        change = _bit(key, i.astype(jnp.uint32), jnp.maximum(index, partner))
        return jnp.where(change == 1, partner, index)

    # Written out, the rounds would be most of the time that a step compiles. A loop
    # needs a start that varies over the devices of a shard_map as the key does.
    return lax.fori_loop(0, _ROUNDS, turn, index + 0 * sums[0])


def _bit(key: jax.Array, high: jax.typing.ArrayLike, low: jax.Array) -> jax.Array:
    at = Counter(jnp.broadcast_to(jnp.uint32(high), low.shape), low)
    return generator.bits(key, at) >> np.uint32(31)


@checks_names
def coordinate(replace: bool = True) -> Distribution:
    """A coordinate chosen uniformly, with a random sign.

    E[u uᵀ] = I/d, so the factor is c = d. The sign makes the distribution symmetric: a
    forward difference along it has no bias from curvature.

    Without replacement, every d directions of a run are all coordinates once, in a
    random order that is another each time. An estimate along K = d of them is the
    gradient, up to O(μ): *full differences*, which suit optimizers that need one, such
    as `optax.lbfgs`.

    Args:
      replace: Whether each direction is chosen from all coordinates. If not, they are
        numbered through a run, as with `orthonormal`.

    Returns:
      The distribution.

    Raises:
      ValueError: Without replacement, from an estimate, if there are 2³² coordinates or
        more.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> import radazo_jax as zo
      >>> params, distribution = jnp.zeros(4), zo.coordinate()
      >>> u = distribution.materialize(
      ...     distribution.sample(jax.random.key(0), params), params
      ... )
      >>> float(jnp.sum(abs(u)))
      1.0

      A gradient from differences along all coordinates:

      >>> estimator = zo.forward_difference(
      ...     zo.coordinate(replace=False), num_directions=4, smoothing=1e-3
      ... )
      >>> x = jnp.arange(4.0)
      >>> value_and_grad = zo.value_and_grad(lambda x: jnp.sum(x**2), estimator)
      >>> _, gradient = value_and_grad(jax.random.key(0), x)
      >>> bool(jnp.allclose(gradient, 2 * x, atol=2e-3))
      True

    References:
      Lian et al., A Comprehensive Linear Speedup Analysis for Asynchronous Stochastic
      Parallel Optimization from Zeroth-Order to First-Order, 2016,
      <https://arxiv.org/abs/1606.00498>.
    """
    return Coordinate() if replace else CoordinateInTurn()


# For each of the five low bits of a position, the positions of a word that have it.
_BITS = (0xAAAAAAAA, 0xCCCCCCCC, 0xF0F0F0F0, 0xFF00FF00, 0xFFFF0000)

# How often the number of a row is mixed.
_TERMS = 4


class _Signed(Distribution):
    """Distributions that draw the signs of 32 neighbors together, and store a word."""

    def _packing(self, dimension: int) -> Packing:
        def unpack(
            words: jax.Array, start: jax.typing.ArrayLike, shape: tuple[int, ...]
        ) -> PackedSigns:
            magnitude = self._magnitude(dimension)
            return PackedSigns(_from_bit(words, start), shape, magnitude)

        return Packing(1, 1, self._word, unpack, _choose_units)

    @abc.abstractmethod
    def _word(self, key: jax.Array, number: jax.Array, at: Positions) -> jax.Array:
        """Draws uint32: bit b of word w says whether element 32 w + b is negative."""

    def _magnitude(self, dimension: int) -> float:
        """Returns the absolute value of all elements."""
        del dimension
        return 1.0

    def draw(self, key: jax.Array, number: jax.Array, at: Positions) -> jax.Array:
        words = Positions(*generator.shift_right(at, 5), at.dimension)
        word = self._word(key, number, words)
        bit = word >> (at.lo & np.uint32(31))
        return sign(bit, self._magnitude(at.dimension))


def _choose_units(size: int, stored: bool) -> Callable[..., Tree]:
    # A CPU that does not store words would compute one for each of its elements, and a
    # TPU would copy what is made of words into another order.
    del size
    return (lambda units, _: units()) if stored else xla.on_one_gpu


def _from_bit(words: jax.Array, start: jax.typing.ArrayLike) -> jax.Array:
    """Returns the words along the last axis, from a bit of the first one on."""
    if isinstance(start, int) and start == 0:
        return words
    start = jnp.uint32(start)
    # By two shifts, because one by 32 has no value.
    high = words[..., 1:] << (31 - start) << np.uint32(1)
    return (words[..., :-1] >> start) | high


class Rademacher(_Signed):
    """See `rademacher`."""

    _constructor = "rademacher"

    def factor(self, dimension: int) -> float:
        del dimension
        return 1.0

    def _word(self, key: jax.Array, number: jax.Array, at: Positions) -> jax.Array:
        del number
        return generator.bits(key, at)


class Orthonormal(UnitNorm, _Signed):
    """See `orthonormal`."""

    _constructor = "orthonormal"
    sequential = True

    def _magnitude(self, dimension: int) -> float:
        return 1 / math.sqrt(max(dimension, 1))

    def _word(self, key: jax.Array, number: jax.Array, at: Positions) -> jax.Array:
        num_bits = _num_bits(at.dimension)
        cycle = number >> np.uint32(num_bits) if num_bits < 32 else number * 0
        key = generator.fold_in(key, cycle)
        row = _row(key, number, num_bits)
        # Of the bits of a position, the low five lie in its word, the others in the
        # number of the word.
        above = generator.shift_right(row, 5)
        common = lax.population_count(above.lo & at.lo)
        if num_bits > 37:
            common = common + lax.population_count(above.hi & at.hi)
        word = generator.bits(key, at) ^ -(common & np.uint32(1))
        for bit, pattern in enumerate(_BITS[:num_bits]):
            is_set = (row.lo >> np.uint32(bit)) & np.uint32(1)
            word = word ^ (np.uint32(pattern) & -is_set)
        return word


def _num_bits(dimension: int) -> int:
    """Returns how many bits number the coordinates: the log₂ of the basis size."""
    return max(dimension - 1, 0).bit_length()


def _row(key: jax.Array, number: jax.Array, num_bits: int) -> Counter:
    """Returns the row that a direction of this number is, by a random bijection."""
    # The words of signs are drawn at positions below 2^59.
    here = jnp.full((2 * _TERMS,), 0xFFFFFFFF, jnp.uint32)
    drawn = generator.bits(key, Counter(here, jnp.arange(2 * _TERMS, dtype="uint32")))
    low_bits = min(num_bits, 32)
    mask = np.uint32(2**low_bits - 1)
    row = number & mask
    # Each of the two mixes is a bijection: a product with an odd number, and a shift.
    for factor, term in drawn.reshape(_TERMS, 2):
        row = (row * (factor | np.uint32(1)) + term) & mask
        row = row ^ (row >> np.uint32(max(1, low_bits - low_bits // 2)))
    high = jnp.zeros_like(row)
    if num_bits > 32:
        # There are 2^32 numbers, whose low words differ.
        at = Counter(jnp.full_like(row, 0xFFFFFFFE), row)
        high = generator.bits(key, at) & np.uint32(2 ** (num_bits - 32) - 1)
    return Counter(high, row)


@checks_names
def rademacher() -> Distribution:
    """Independent random signs: E[u uᵀ] = I, the factor is c = 1.

    The cheapest dense distribution: one random bit per element. Of all distributions
    with independent centered elements it has the smallest variance. Its directions have
    norm √d, and the directions of `sphere` norm 1: the same `smoothing` moves the
    parameters √d times as far.

    Returns:
      The distribution.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> import radazo_jax as zo
      >>> params, distribution = jnp.zeros(4), zo.rademacher()
      >>> u = distribution.materialize(
      ...     distribution.sample(jax.random.key(0), params), params
      ... )
      >>> bool((abs(u) == 1).all())
      True

    References:
      Spall, Multivariate Stochastic Approximation Using a Simultaneous Perturbation
      Gradient Approximation, 1992, <https://doi.org/10.1109/9.119632>.
    """
    return Rademacher()


@checks_names
def orthonormal() -> Distribution:
    """Rows of a random orthonormal basis, without replacement.

    Independent directions repeat the measurements of earlier ones. Here direction i of
    a run is row i mod n of a randomized Walsh-Hadamard basis, in a random order, and
    every n directions there is a new basis; n is the least power of two that is not
    below d, the number of all coordinates. An element is ±1/√d, so that all directions
    have norm 1, and E[u uᵀ] = I/d: the factor is c = d. Over each basis the mean of
    u uᵀ is I/d exactly. If d is a power of two, its directions are orthogonal.
    Otherwise there are n > d of them, which cannot all be orthogonal, and d evaluations
    do not span all coordinates.

    Step t of a run with K directions per step uses the directions tK to tK + K − 1.
    Each call of `value_and_grad` is a run of one step: only the directions of the same
    call are drawn without replacement. After 2³² directions, a run takes another key.

    Returns:
      The distribution.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> import radazo_jax as zo
      >>> params, estimator = jnp.zeros(4), zo.forward_difference(zo.orthonormal(), 4)
      >>> draw = zo.estimators.Draw.once(jax.random.key(0))
      >>> points, _ = estimator.points(draw, params, estimator.init(params))
      >>> u = zo.estimators.candidates(points, params)[1:] / points.scales
      >>> bool(jnp.allclose(u @ u.T, jnp.eye(4)))
      True

    References:
      Choromanski et al., Structured Evolution with Compact Architectures for Scalable
      Policy Optimization, ICML 2018, <https://arxiv.org/abs/1804.02395>, with one
      basis a step.
    """
    return Orthonormal()


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
        """Returns the axes of the matrices of a leaf; `None` if it is drawn dense."""
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
def low_rank(rank: int = 1, dimension_numbers: Tree = None) -> Distribution:
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


def _by_path(tree: Tree) -> tuple[tuple[str, MatrixAxes | None], ...]:
    def ends(x: Tree) -> bool:
        return x is None or isinstance(x, MatrixAxes)

    found = jax.tree_util.tree_leaves_with_path(tree, is_leaf=ends)
    for path, axes in found:
        if not ends(axes):
            raise TypeError(
                "dimension_numbers must hold MatrixAxes or None; got "
                f"{axes!r} at {jax.tree_util.keystr(path)}."
            )
    return tuple((jax.tree_util.keystr(path), axes) for path, axes in found)
