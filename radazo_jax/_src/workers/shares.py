"""Members of a step: which are missing, and which workers evaluate which."""

import heapq
from collections import Counter
from collections.abc import Sequence

import numpy as np

from radazo_jax._src import trees

MOST_ATTEMPTS = 5  # Evaluations of a member that end without a value.
_PERIOD = 64  # Steps between two repeats, once the steps 0, 1, 2, 4, … are past.
_JUMP = 4.0  # A step is in doubt if its values spread so many times as widely, but
_MOST = 16  # at most every so many steps on average.


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


def shared_out(
    found: "Members", rates: Sequence[float], num_workers: int, batch_size: int
) -> list[np.ndarray]:
    """Shares the members that nobody evaluates out to idle workers, in whole batches.

    Args:
      found: The members of the step.
      rates: The batches per second that each idle worker evaluates.
      num_workers: The number of all workers.
      batch_size: The number of members in a batch.

    Returns:
      The members of each idle worker.
    """
    missing = found.missing()
    batches = -(-len(missing) // batch_size)
    # What was lost is shared by all workers as they become idle.
    begins = len(missing) == len(found.values)
    most = batches if begins else -(-batches // (2 * num_workers or 1))
    counts = shares(min(batches, most * len(rates)), rates)
    ends = np.cumsum([0, *counts]) * batch_size
    return [missing[ends[i] : ends[i + 1]] for i in range(len(counts))]


class Members:
    """The members of a step, and the answers so far.

    Attributes:
      values: The values, [n]; NaN for what is missing or failed.
      owners: The workers of these values, [n]; empty for those without one.
      failures: Texts about members that failed.
      checksums: The checksum of the parameters before the step, by worker.
      repeats: The members that all workers evaluate; `None` until they are chosen.
      repeated: The values at these members, by worker.
    """

    def __init__(self, num_members: int, dtype: np.dtype):
        self.values = np.full(num_members, np.nan, dtype)
        self.failures: dict[int, str] = {}
        self.checksums: dict[str, int] = {}
        self.repeats: np.ndarray | None = None
        self.repeated: dict[str, np.ndarray] = {}
        self.owners = [""] * num_members
        self._done = np.zeros(num_members, bool)
        self._sent = np.zeros(num_members, np.int32)
        self._attempts = np.zeros(num_members, np.int32)

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
        if self.repeats is not None and np.array_equal(members, self.repeats):
            self.repeated[worker] = values
        new = ~self._done[members]
        for i, value in zip(members[new], values[new], strict=True):
            self.values[i], self.owners[i], self._done[i] = value, worker, True

    def agreed(self) -> int | None:
        """Returns the checksum of more than half of the workers; `None` without one."""
        counts = Counter(self.checksums.values())
        best, count = counts.most_common(1)[0] if counts else (None, 0)
        return best if 2 * count > counts.total() else None

    def revoke(self, workers: set[str]) -> None:
        """Drops the values of some workers."""
        for i, owner in enumerate(self.owners):
            if owner in workers:
                self.values[i], self.owners[i], self._done[i] = np.nan, "", False
        for worker in workers:
            del self.checksums[worker]
            self.repeated.pop(worker, None)


class Repeats:
    """Chooses members that all workers evaluate, so that their values are compared.

    A worker may differ from the others only later in a run: at parameters that the
    first values did not have, or because its memory changes.
    """

    def __init__(self, batch_size: int):
        self._batch_size = batch_size
        self._spread = np.inf  # Of the step before.
        self._doubts = 0

    def of(self, step: int, found: Members) -> np.ndarray:
        """Returns the members of a step that are repeated, a batch or none.

        Args:
          step: The number of the step.
          found: Its members, which all have a value or have failed.
        """
        if not len(found.values):
            return np.zeros(0, np.int32)
        values = np.where(np.isfinite(found.values), found.values, np.inf)
        highest, lowest = int(values.argmax()), int(values.argmin())
        with np.errstate(invalid="ignore", over="ignore"):
            spread = values[highest] - values[lowest]
        before, self._spread = self._spread, spread
        # One worker may have computed the highest values, and another one the lowest.
        doubtful = spread > _JUMP * before and self._doubts * _MOST <= step
        if doubtful and found.owners[highest] != found.owners[lowest]:
            self._doubts += 1
            return self._batch(highest, len(values))
        if step & (step - 1) == 0 or step % _PERIOD == 0:
            return self._batch(step % len(values), len(values))
        return np.zeros(0, np.int32)

    def _batch(self, member: int, num_members: int) -> np.ndarray:
        """A batch with a member. It takes as long if it is not full."""
        first = max(min(member, num_members - self._batch_size), 0)
        return np.arange(
            first, min(first + self._batch_size, num_members), dtype=np.int32
        )


def differs(values: np.ndarray, others: np.ndarray, scale: float = 0.0) -> np.ndarray:
    """Returns whether values at the same points are of different functions.

    Args:
      values: The values of one worker.
      others: The values of another one.
      scale: A value of the run. Terms of the loss are rounded as if they were as large.

    Returns:
      One truth value per point.
    """
    size = abs(scale) if np.isfinite(scale) else 0.0
    most = trees.rounding(values) * np.maximum(
        np.maximum(abs(values), abs(others)), size
    )
    finite, other_finite = np.isfinite(values), np.isfinite(others)
    with np.errstate(invalid="ignore", over="ignore"):
        far = abs(values - others) > most
    return np.where(finite & other_finite, far, finite != other_finite)
