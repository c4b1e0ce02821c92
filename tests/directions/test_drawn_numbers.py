"""The numbers of all directions, in integers and float64 of NumPy.

A journal holds values, not directions: it can be replayed as long as the same key draws
the same numbers. This file is a second implementation of what they are. If a test fails
because numbers changed, journals of earlier versions are lost.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

from tests.helpers.compare import sequence
from tests.helpers.tables import DISTRIBUTIONS, every, jit

WORD = 2**32
# More than one word of signs, leaves that begin within one, and a stack of matrices.
PARAMS = {
    "a": jnp.zeros(5),
    "b": jnp.zeros((6, 4)),
    "c": jnp.zeros(()),
    "d": jnp.zeros((2, 3, 4)),
}
SHAPES = [leaf.shape for leaf in jax.tree.leaves(PARAMS)]
SIZES = [leaf.size for leaf in jax.tree.leaves(PARAMS)]
DIMENSION = sum(SIZES)
# Of a run whose directions are numbered, more than a basis of 64 or 54.
NUM = 70


def threefry(key, high, low, rounds=20):
    """Threefry-2x32 (Salmon et al. 2011): two words for each pair."""
    schedule = [*key, key[0] ^ key[1] ^ 0x1BD11BDA]
    x, y = (np.asarray(word, np.uint64) for word in np.broadcast_arrays(high, low))
    x, y = (x + schedule[0]) % WORD, (y + schedule[1]) % WORD
    for i in range(rounds):
        distance = (13, 15, 26, 6, 17, 29, 16, 24)[i % 8]
        x = (x + y) % WORD
        y = x ^ ((y << np.uint64(distance)) % WORD | y >> np.uint64(32 - distance))
        if i % 4 == 3:
            group = i // 4 + 1
            x = (x + schedule[group % 3]) % WORD
            y = (y + schedule[(group + 1) % 3] + group) % WORD
    return x, y


def bits(key, high, low):
    x, y = threefry(key, high, low)
    return x ^ y


def fold_in(key, number):
    return [int(word) for word in threefry(key, 0, number)]


def gaussian(key, number, at):
    del number
    uniform = (bits(key, 0, at) >> np.uint64(9)) * 2.0**-23
    least = -1 + 2.0**-24
    return np.sqrt(2) * special.erfinv(uniform * (1 - least) + least)


def normal(key, at):
    """The transform of Box and Muller: neighbors at a distance of 16 share an angle."""
    in_pair = at // 16 % 2
    x, y = threefry(key, 0, at - 16 * in_pair, rounds=13)
    radius = np.sqrt(-2 * np.log((x >> np.uint64(1)) * 2.0**-31 + 2.0**-32))
    angle = np.pi / 2 * (y.astype(np.uint32).view(np.int32) * 2.0**-31)
    half = np.where(x % 2 == 0, 1, -1)
    return radius * np.where(in_pair, half * np.cos(angle), np.sin(angle))


def sphere(key, number, at):
    del number
    u = normal(key, at)
    return u / np.linalg.norm(u)


def signs(word, at):
    return 1.0 - 2.0 * (word >> (at % 32).astype(np.uint64) & np.uint64(1))


def rademacher(key, number, at):
    del number
    return signs(bits(key, 0, at // 32), at)


def orthonormal(key, number, at):
    """Signs of random words, times a row of the Walsh-Hadamard matrix."""
    size = (DIMENSION - 1).bit_length()
    key = fold_in(key, number >> size)
    row, mask = number % 2**size, 2**size - 1
    for i in range(4):
        factor, term = (int(bits(key, WORD - 1, 2 * i + j)) for j in (0, 1))
        row = (row * (factor | 1) + term) & mask
        row ^= row >> max(1, size - size // 2)
    hadamard = np.array([(-1.0) ** (row & int(i)).bit_count() for i in at])
    return signs(bits(key, 0, at // 32), at) * hadamard / np.sqrt(DIMENSION)


def one(chosen, negative, at):
    return np.where(at == chosen, -1.0 if negative else 1.0, 0.0)


def coordinate(key, number, at):
    del number
    high, low = (int(word) for word in threefry(key, 0, 0))
    chosen = (high * WORD + low) * DIMENSION >> 64
    return one(chosen, int(bits(key, 0, 1)) >> 31, at)


def coordinate_in_turn(key, number, at):
    """Hoang, Morris and Rogaway's card shuffle, of 24 rounds."""
    key, index = fold_in(key, number // DIMENSION), number % DIMENSION
    for i in range(24):
        partner = (int(bits(key, WORD - 1, i)) % DIMENSION - index) % DIMENSION
        if int(bits(key, i, max(index, partner))) >> 31:
            index = partner
    return one(index, int(bits(key, 24, index)) >> 31, at)


def low_rank(rank):
    """Leaf by leaf, each with the room of two factors; small sides are drawn dense."""

    def of_leaf(key, shape, offset):
        first = 2 * rank * offset
        if len(shape) < 2 or min(shape[-2:]) <= rank:
            return normal(key, first + np.arange(np.prod(shape, dtype=int)))
        *stack, rows, columns = shape
        sizes = [np.prod([*stack, side, rank]) for side in (rows, columns)]
        drawn = normal(key, first + np.arange(sum(sizes)))
        a = drawn[: sizes[0]].reshape(*stack, rows, rank) / np.sqrt(rank)
        b = drawn[sizes[0] :].reshape(*stack, columns, rank)
        return (a @ np.swapaxes(b, -1, -2)).reshape(-1)

    def draw(key, number, at):
        del number, at
        offsets = np.cumsum([0, *SIZES[:-1]])
        leaves = zip(SHAPES, offsets, strict=True)
        return np.concatenate([of_leaf(key, *leaf) for leaf in leaves])

    return draw


REFERENCE = {
    "sphere": sphere,
    "gaussian": gaussian,
    "rademacher": rademacher,
    "coordinate": coordinate,
    "coordinate in turn": coordinate_in_turn,
    "orthonormal": orthonormal,
    "low_rank": low_rank(1),
    "low_rank(2)": low_rank(2),
}


@pytest.mark.parametrize("name", every(REFERENCE, "sphere"))
def test_directions_are_those_of_the_second_implementation(name):
    """Direction k of a step: from `fold_in(key, k)`, or number k of the run's key."""
    distribution = DISTRIBUTIONS[name]
    num = NUM if distribution.sequential else 4
    draw = jit(lambda key: sequence(distribution, key, num, PARAMS))
    at = np.arange(DIMENSION)
    for seed in (0, 2**32 - 5):
        data = jax.random.key_data(jax.random.key(seed))
        found = [leaf.reshape(num, -1) for leaf in jax.tree.leaves(draw(data))]
        key = [int(word) for word in data]
        expected = [
            REFERENCE[name](key if distribution.sequential else fold_in(key, k), k, at)
            for k in range(num)
        ]
        # The error of float32 functions: of a logarithm near 1, and of erfinv.
        np.testing.assert_allclose(
            np.concatenate(found, 1), expected, rtol=1e-4, atol=2e-6
        )
