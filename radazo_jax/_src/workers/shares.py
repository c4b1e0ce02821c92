"""Members of a step: which are missing, and which worker evaluates which."""

import heapq
from collections import Counter
from collections.abc import Sequence

import numpy as np

MOST_ATTEMPTS = 5  # Evaluations of a member that end without a value.


def shares(num_batches: int, rates: Sequence[float]) -> list[int]:
    """The numbers of batches by which the slowest worker ends first.

    A batch takes as long if it is not full.

    Args:
      num_batches: The number of batches, which take the same time.
      rates: The batches per second that each worker evaluates.

    Returns:
      The number of batches of each worker.
    """
    counts = [0] * len(rates)
    # The time at which a worker would end with one more batch.
    ends = [(1 / rate, i) for i, rate in enumerate(rates)]
    heapq.heapify(ends)
    for _ in range(num_batches if rates else 0):
        _, i = ends[0]
        counts[i] += 1
        heapq.heapreplace(ends, ((counts[i] + 1) / rates[i], i))
    return counts


class Members:
    """The members of a step, and the answers so far.

    Attributes:
      values: The values, [n]; NaN for what is missing or failed.
      failures: Texts about members that failed.
      checksums: The checksum of the parameters before the step, by worker.
    """

    def __init__(self, num_members: int, dtype: np.dtype):
        self.values = np.full(num_members, np.nan, dtype)
        self.failures: dict[int, str] = {}
        self.checksums: dict[str, int] = {}
        self._done = np.zeros(num_members, bool)
        self._sent = np.zeros(num_members, np.int32)
        self._attempts = np.zeros(num_members, np.int32)
        self._owners = [""] * num_members

    def complete(self) -> bool:
        """Returns whether each member has a value, or has failed."""
        return bool(self._done.all())

    def missing(self) -> np.ndarray:
        """Returns the members that nobody evaluates: int32."""
        return np.flatnonzero(~self._done & (self._sent == 0)).astype(np.int32)

    def send(self, members: np.ndarray) -> None:
        """Counts members that a worker was asked for."""
        self._sent[members] += 1

    def give_up(self, members: np.ndarray) -> None:
        """Counts members for which another worker is asked, as this one is late."""
        self._sent[members] -= 1

    def fail(self, members: np.ndarray, problem: str) -> None:
        """Counts an evaluation that ended without a value."""
        self._attempts[members] += 1
        for i in members:
            if self._attempts[i] >= MOST_ATTEMPTS and not self._done[i]:
                self._done[i], self.failures[int(i)] = True, problem

    def receive(self, worker: str, members: np.ndarray, values: np.ndarray) -> None:
        """Takes values; the first value of a member counts."""
        new = ~self._done[members]
        for i, value in zip(members[new], values[new], strict=True):
            self.values[i], self._owners[i], self._done[i] = value, worker, True

    def agreed(self) -> int | None:
        """Returns the checksum of more than half of the workers; `None` without one."""
        counts = Counter(self.checksums.values())
        best, count = counts.most_common(1)[0] if counts else (None, 0)
        return best if 2 * count > counts.total() else None

    def revoke(self, workers: set[str]) -> None:
        """Drops the values of some workers."""
        for i, owner in enumerate(self._owners):
            if owner in workers:
                self.values[i], self._owners[i], self._done[i] = np.nan, "", False
        for worker in workers:
            del self.checksums[worker]
