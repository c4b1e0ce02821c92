"""Batches of examples of similar length.

Examples are sorted into buckets, each padded to its own longest. Every step reads a
batch of one bucket: bucket b with a probability in proportion to its size.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from radazo_llm.tune.data import Batch, examples_at

_MULTIPLE = 8  # As sequences are padded in `data.py`.


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


class Feed:
    """The batches of a run. The batch of a step depends on the arguments alone.

    Args:
      parts: The buckets.
      seed: The seed of the run.
      sizes: The number of examples of each step.
    """

    def __init__(self, parts: Sequence[Batch], seed: int, sizes: np.ndarray) -> None:
        self.parts, self.seed, self.sizes = parts, seed, sizes
        counts = np.array([len(part.label) for part in parts])
        # Draws of later steps leave earlier draws as they are.
        draws = np.random.default_rng((seed, 1 << 30)).random(len(sizes))
        self.which = np.searchsorted(np.cumsum(counts) / counts.sum(), draws, "right")
        self.which = np.minimum(self.which, len(parts) - 1)

    def __call__(self, step: int) -> Batch:
        bucket, size = self.which[step], int(self.sizes[step])
        before = self.which[:step] == bucket
        first = int(self.sizes[:step][before].sum())
        return examples_at(self.parts[bucket], self.seed, first, size)
