"""The generator against `jax.random` and exact integer arithmetic."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from jax.extend import random

from radazo_jax._src.base import keys
from radazo_jax._src.directions import generator
from tests.helpers.tables import slow

ONES = 2**32 - 1
PI = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)  # The digits of pi.

SHAPES = [(), (0,), slow((5,)), (3, 4), slow((257, 1003))]


def as_int(counts):
    hi, lo = np.asarray(counts.hi), np.asarray(counts.lo)
    return (hi.astype(object) << 32) + lo.astype(object)


def drawn(key, shape):
    at = generator.positions(shape)
    return tuple(
        f(key, at) for f in (generator.bits, generator.uniform, generator.normal)
    )


@pytest.mark.parametrize("shape", SHAPES)
def test_bits_and_normals_are_those_of_jax_random(shape):
    compiled = jax.jit(lambda key: drawn(key, shape))
    for seed in (0, 1, 2**31 + 5):
        key = jax.random.key(seed, impl="threefry2x32")
        bits, uniform, normal = compiled(key)
        np.testing.assert_array_equal(bits, jax.random.bits(key, shape))
        np.testing.assert_array_equal(uniform, jax.random.uniform(key, shape))
        expected = jax.random.normal(key, shape, jnp.float32)
        np.testing.assert_array_equal(normal, expected)
    if shape == (3, 4):
        for got, eager in zip((bits, uniform, normal), drawn(key, shape), strict=True):
            np.testing.assert_array_equal(eager, got)


def test_fold_in_is_that_of_jax_random():
    key, data = jax.random.key(5), jnp.array([0, 1, 7, 2**32 - 1], jnp.uint32)
    expected = jax.vmap(lambda i: jax.random.fold_in(key, i))(data)
    found = generator.fold_in(key, data)
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(
        jax.random.key_data(found), jax.random.key_data(expected)
    )


# Key, counter, and words, by the authors: known answers of Random123.
@pytest.mark.parametrize(
    ("rounds", "key", "at", "expected"),
    [
        (13, (0, 0), (0, 0), (0x9D1C5EC6, 0x8BD50731)),
        (13, (ONES, ONES), (ONES, ONES), (0xFD36D048, 0x2D17272C)),
        (13, PI[2:], PI[:2], (0xBA3E4725, 0xF27D669E)),
        (20, (0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
        (20, (ONES, ONES), (ONES, ONES), (0x1CB996FC, 0xBB002BE7)),
        (20, PI[2:], PI[:2], (0xC4923A9C, 0x483DF7A0)),
    ],
)
def test_words_are_those_of_random123(rounds, key, at, expected):
    key = jax.random.wrap_key_data(jnp.array(key, jnp.uint32))
    found = generator.words(key, generator.Counter(*map(jnp.uint32, at)), rounds)
    assert tuple(map(int, found)) == expected


def of_pairs(words):
    """Both normals of each pair in float64: the sine and the cosine of one angle."""
    first = np.asarray(words[0]).astype(np.int64)
    v = (first >> 1) * 2.0**-31 + 2.0**-32
    angle = np.pi / 2 * np.asarray(words[1]).astype(np.int32) * 2.0**-31
    half = 1 - 2 * (first & 1)
    radius = np.sqrt(-2 * np.log(v))
    return v, radius * np.sin(angle), radius * half * np.cos(angle)


def test_fast_normals_are_standard_normal():
    at = generator.positions((1_000_000,))
    z = np.asarray(generator.fast_normal(jax.random.key(11), at), np.float64)
    assert scipy.stats.kstest(z, "norm").pvalue > 1e-3
    # Four standard errors of each moment.
    for power, moment, variance in [(1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)]:
        assert abs((z**power).mean() - moment) < 4e-3 * variance**0.5
    pairs = z.reshape(-1, 2, 16)
    first, second = pairs[:, 0].ravel(), pairs[:, 1].ravel()
    for x, y in [(z[:-1], z[1:]), (first, second), (first**2, second**2)]:
        assert abs(np.corrcoef(x, y)[0, 1]) < 4 / x.size**0.5
    # All angles are as likely.
    angle = np.arctan2(second, first) / (2 * np.pi) + 0.5
    assert scipy.stats.kstest(angle, "uniform").pvalue > 1e-3


def test_fast_normals_at_the_ends_of_the_words(monkeypatch):
    ends = np.array([0, 1, 2**31 - 1, 2**31, 2**32 - 1], np.uint32)
    words = list(map(jnp.asarray, np.meshgrid(ends, ends)))
    monkeypatch.setattr(generator, "words", lambda key, at, rounds: words)
    found = generator.normal_pairs(None, None)
    _, *expected = of_pairs(words)
    for x, y in zip((found.real, found.imag), expected, strict=True):
        assert np.isfinite(x).all()
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=4e-4)
    # √(-2 log 2⁻³²)
    np.testing.assert_allclose(abs(np.asarray(found.real)).max(), 6.6604, rtol=1e-4)


@pytest.mark.parametrize(
    ("shape", "starts", "sizes"),
    [
        slow((1000,), (17,), (100,)),
        slow((40, 50), (3, 7), (5, 11)),
        ((4, 5, 6), (1, 0, 2), (3, 5, 1)),
    ],
)
def test_any_block_of_a_leaf(shape, starts, sizes):
    key = jax.random.key(3)
    whole = np.asarray(jax.random.normal(key, shape))
    block = tuple(slice(a, a + n) for a, n in zip(starts, sizes, strict=True))

    @jax.jit
    def draw(starts):
        at = generator.positions(shape, generator.block(sizes, starts))
        return generator.normal(key, at)

    np.testing.assert_array_equal(draw(starts), whole[block])
    np.testing.assert_array_equal(
        jax.vmap(draw)(jnp.asarray([starts, starts]))[1], whole[block]
    )


@pytest.mark.parametrize(
    ("shape", "offset"),
    [
        ((2**20, 2**14), 0),
        ((70_001, 70_003), 12_345_678_901),
        ((3, 2**33), 2**40 + 17),
        ((4, 4), 2**32 - 7),
        ((2**16, 2**16), 0),
        ((2**16, 2**16), 1),
    ],
)
def test_positions_past_two_to_the_32(shape, offset):
    rng = np.random.default_rng(0)
    rows = rng.integers(0, shape[0], 64)
    columns = rng.integers(0, min(shape[1], 2**32), 64)
    rows[:2], columns[:2] = (0, shape[0] - 1), (0, min(shape[1], 2**32) - 1)
    indices = [jnp.asarray(rows, jnp.uint32), jnp.asarray(columns, jnp.uint32)]
    got = as_int(generator.positions(shape, indices, offset))
    expected = [
        offset + int(i) * shape[1] + int(j) for i, j in zip(rows, columns, strict=True)
    ]
    assert got.tolist() == expected


def test_bits_past_two_to_the_32_are_those_of_jax_random():
    key, shape = jax.random.key(1), (2**20, 2**14)
    at = generator.positions(shape, generator.block((1, 8), (2**19, 5)))
    words = generator.words(key, at)
    position = 2**19 * 2**14 + 5
    for j in range(8):
        hi, lo = divmod(position + j, 2**32)
        pair = jnp.array([hi, lo], jnp.uint32)
        expected = random.threefry_2x32(jax.random.key_data(key), pair)
        assert [int(words[0][0, j]), int(words[1][0, j])] == expected.tolist()


@pytest.mark.parametrize("bound", [1, 2, 7, 2**31, 2**32, 2**33 + 5, 2**40, 2**64 - 1])
def test_below_is_the_long_product(bound):
    key = jax.random.key(5)
    at = generator.positions((64,))
    hi, lo = generator.words(key, at)
    random = as_int(generator.Counter(hi, lo))
    assert as_int(generator.below(key, at, bound)).tolist() == [
        (int(r) * bound) >> 64 for r in random
    ]


def test_nothing_rolled_in_the_program():
    draw = jax.jit(lambda key: generator.normal(key, generator.positions((1000,))))
    assert "while" not in draw.lower(jax.random.key(0)).as_text()


def test_keys_of_every_kind():
    typed = jax.random.key(7, impl="threefry2x32")
    raw = jax.random.key_data(typed)
    for key in (typed, raw, np.asarray(raw), 7, np.int64(7), jnp.int32(7)):
        assert (jax.random.key_data(keys.as_key(key)) == raw).all()


@pytest.mark.parametrize(
    "key", [None, "0", 1.5, True, np.float32(1), np.zeros(3), object()]
)
def test_no_key(key):
    with pytest.raises(TypeError, match="seed must be a key such as"):
        keys.as_key(key, "seed")


@pytest.mark.parametrize("impl", ["rbg", "unsafe_rbg"])
def test_rbg_keys_are_refused(impl):
    key = jax.random.key(0, impl=impl)
    for k in (key, jax.random.key_data(key)):
        with pytest.raises(ValueError, match=r"rbg.*impl='threefry2x32'"):
            keys.as_key(k)


def test_batches_of_keys_are_refused():
    several = jax.random.split(jax.random.key(0), 3)
    for k in (several, jax.random.key_data(several)):
        with pytest.raises(ValueError, match=r"single key; got keys of shape \(3,\)"):
            keys.as_key(k)
