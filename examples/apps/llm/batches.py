"""Batches of examples of similar length.

Examples are sorted into buckets, each padded to its own longest. Every step reads a
batch of one bucket: bucket b with a probability in proportion to its size.
"""

from collections.abc import Sequence

import numpy as np

from examples.apps.llm.data import Batch, examples_at

_MULTIPLE = 8  # As sequences are padded in `data.py`.


def buckets(batch: Batch, number: int) -> list[Batch]:
    """Divides examples by length into at most so many buckets of similar sizes."""
    lengths = batch.positions.max(axis=(1, 2)) + 1  # Of what is fed to the model.
    longest = batch.tokens.shape[-1]
    quantiles = np.quantile(lengths, np.arange(1, number + 1) / number, method="higher")
    ends = np.unique(np.minimum(-(-quantiles // _MULTIPLE) * _MULTIPLE, longest))
    place = np.searchsorted(ends, lengths)
    found = []
    for i, end in enumerate(ends):
        part = Batch(*(values[place == i] for values in batch))
        if len(part.label):
            found.append(part._replace(tokens=part.tokens[..., : int(end)]))
    return found


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
