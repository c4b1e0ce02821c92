"""Buckets of examples, and the rows of a step."""

import collections

import jax
import numpy as np
import pytest

from radazo_llm.examples.tokens import Batch
from radazo_llm.tune.batches import bounds, buckets, chunks, draw


def of_lengths(lengths):
    """Examples whose number is their label, with so many tokens each."""
    number, longest = len(lengths), -(-max(lengths) // 8) * 8
    tokens = np.zeros((number, 1, longest), np.int32)
    for row, length in zip(tokens, lengths, strict=True):
        row[0, :length] = 1 + np.arange(length)
    positions = np.repeat(np.array(lengths)[:, None, None] - 1, 2, axis=1)
    ones = np.ones((number, 2, 1))
    return Batch(
        tokens,
        positions.astype(np.int32),
        ones.astype(np.int32),
        ones.astype(np.float32),
        np.arange(number),
    )


LENGTHS = np.random.default_rng(0).integers(3, 30, 50).tolist()


@pytest.mark.parametrize("number", [1, 2, 4, 100])
def test_buckets_divide_examples_and_cut_only_padding(number):
    whole = of_lengths(LENGTHS)
    parts = buckets(whole, bounds(whole, number))
    assert len(parts) <= min(number, 4)  # Lengths are rounded up to multiples of 8.
    assert sorted(i for part in parts for i in part.label) == list(range(50))
    for part in parts:
        length = part.tokens.shape[-1]
        assert length % 8 == 0
        np.testing.assert_array_equal(part.tokens, whole.tokens[part.label, :, :length])
        assert not whole.tokens[part.label, :, length:].any()
    assert sum(part.tokens.size for part in parts) <= whole.tokens.size


def test_longer_examples_than_any_to_train_on_have_a_bucket():
    ends = bounds(of_lengths([3, 7, 12]), 2)
    assert ends.tolist() == [8, 16]
    parts = buckets(of_lengths([17, 5, 16]), ends)
    assert [part.tokens.shape[-1] for part in parts] == [8, 16, 24]
    assert [part.label.tolist() for part in parts] == [[1], [2], [0]]


@pytest.mark.parametrize("size", [1, 7, 50, 64])
def test_chunks_have_one_size_and_each_example_once(size):
    whole, labels = of_lengths(LENGTHS), []
    found = list(chunks(whole, size))
    assert {len(values) for _, chunk in found for values in chunk} == {size}
    for number, chunk in found:
        labels += chunk.label[:number].tolist()
    assert labels == list(range(50))


@pytest.mark.parametrize("counts", [(50,), (30, 15, 5)])
def test_examples_are_drawn_equally_often_and_differ_in_a_step(counts):
    keys = jax.random.split(jax.random.key(0), 2000)
    which, rows = jax.jit(jax.vmap(lambda key: draw(counts, 5, key)))(keys)
    seen = collections.Counter()
    for bucket, some in zip(np.asarray(which), np.asarray(rows), strict=True):
        assert len(set(some)) == 5 and some.max() < counts[bucket]
        seen.update((int(bucket), int(i)) for i in some)
    assert len(seen) == 50
    # 10,000 draws of 50 in batches of 5: five standard deviations of a bucket.
    bound = 5 * 200 / np.sqrt(2000 / 3 / len(counts))
    assert all(abs(count - 200) < bound for count in seen.values())


def test_a_bucket_with_few_examples_repeats_them():
    which, rows = draw((3,), 8, jax.random.key(0))
    assert int(which) == 0 and rows.shape == (8,) and set(np.asarray(rows)) <= {0, 1, 2}
