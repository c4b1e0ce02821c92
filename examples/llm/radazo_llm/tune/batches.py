"""Batches of examples of similar length.

Examples are sorted into buckets, each padded to its own longest. Every step reads a
batch of one bucket: bucket b with a probability in proportion to its size.
"""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from radazo_llm.examples.tokens import Batch

_MULTIPLE = 8  # As sequences are padded in `tokens.py`.


def bounds(batch: Batch, number: int) -> np.ndarray:
    """Returns the lengths of at most so many buckets of similar sizes, ascending."""
    longest = batch.tokens.shape[-1]
    quantiles = np.arange(1, number + 1) / number
    ends = np.quantile(_lengths(batch), quantiles, method="higher")
    return np.unique(np.minimum(-(-ends // _MULTIPLE) * _MULTIPLE, longest))


def buckets(batch: Batch, ends: np.ndarray) -> list[Batch]:
    """Divides examples into buckets of these lengths, and one of longer examples."""
    longest = batch.tokens.shape[-1]
    place = np.searchsorted(ends, _lengths(batch))
    found = []
    for i, end in enumerate([*ends, longest]):
        part = Batch(*(values[place == i] for values in batch))
        if len(part.label):
            found.append(part._replace(tokens=part.tokens[..., : int(end)]))
    return found


def _lengths(batch: Batch) -> np.ndarray:
    """The number of tokens of each example that are fed to the model."""
    return batch.positions.max(axis=(1, 2)) + 1


def chunks(batch: Batch, size: int) -> Iterator[tuple[int, Batch]]:
    """Yields examples in order, so many at a time, and how many of them are new.

    All have one shape, so that one program serves them and other batches of the same
    lengths: the last is filled up with repetitions of the last example.
    """
    total = len(batch.label)
    for start in range(0, total, size):
        rows = np.minimum(np.arange(start, start + size), total - 1)
        yield min(size, total - start), Batch(*(values[rows] for values in batch))


def draw(
    counts: tuple[int, ...], size: int, key: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The examples of a step: a bucket, and rows of it, different ones if it has them.

    Args:
      counts: The number of examples of each bucket.
      size: The number of examples of a step.
      key: The key of the step.

    Returns:
      The number of the bucket, int32 (), and the rows, int32 [size].
    """
    of_bucket, of_rows = jax.random.split(key)
    ends = np.cumsum(counts) / np.float32(sum(counts))
    place = jnp.searchsorted(jnp.float32(ends), jax.random.uniform(of_bucket), "right")
    which = jnp.minimum(place, len(counts) - 1).astype(jnp.int32)
    rows = [
        jax.random.choice(of_rows, number, (size,), replace=number < size)
        for number in counts
    ]
    return which, jnp.stack(rows).astype(jnp.int32)[which]
