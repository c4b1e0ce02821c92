"""Processes that run reward functions.

One that hangs is ended, and one that raises takes its own completions with it.
"""

import contextlib
import multiprocessing
from collections.abc import Mapping, Sequence
from concurrent.futures import TimeoutError
from typing import Any, NamedTuple

import numpy as np
import pebble

from radazo_llm.reward import functions
from radazo_llm.reward.functions import Job, Raised, Wrong

_START = 300.0  # Seconds in which processes must start.
_PATIENCE = 3  # Calls without a result, until a function is given up.


class Scores(NamedTuple):
    """The rewards of some completions.

    Attributes:
      total: The weighted sum, NaN if one of the functions gave none: float64, [n].
      each: The rewards of each function by name: float64, [n].
      failures: Failures of functions, a line each.
    """

    total: np.ndarray
    each: dict[str, np.ndarray]
    failures: list[str]


class RewardPool(contextlib.ExitStack):
    """Processes that run reward functions.

    Args:
      weights: The weight of each function, by a name that `functions.load` takes.
      processes: Number of processes.
      timeout: Seconds in which one of the calls that run must end.
    """

    def __init__(
        self, weights: Mapping[str, float], processes: int = 2, timeout: float = 30.0
    ) -> None:
        super().__init__()
        for name in weights:
            functions.load(name)
        self.weights, self.processes, self.timeout = dict(weights), processes, timeout
        self._processes: pebble.ProcessPool | None = None
        self._answered = False  # Whether a call gave a result.

    def _started(self) -> pebble.ProcessPool:
        """The processes; the time that they take to start is no function's."""
        if self._processes is not None:
            return self._processes
        # Not forked: JAX has threads.
        context = multiprocessing.get_context("spawn")
        begin = {"initializer": functions.begin, "context": context}
        found = pebble.ProcessPool(self.processes, **begin)
        self.callback(found.join)
        self.callback(found.stop)
        try:
            found.schedule(len, [""]).result(_START)
        except TimeoutError:
            raise ValueError(
                f"The processes of reward functions must start within {_START:g} s; "
                "none did. A program that uses them must do its work under `if "
                "__name__ == '__main__':`."
            ) from None
        self._processes = found
        return found

    def score(
        self,
        prompts: Sequence[str],
        completions: Sequence[str],
        columns: Mapping[str, Sequence[Any]],
        size: int,
    ) -> Scores:
        """Scores completions, `size` of them in a call.

        A call that raises is made again for each completion alone. Completions of a
        call that does not return in time have no reward.

        Raises:
          ValueError: If a function returns another number of values, or no numbers.
        """
        jobs = [
            Job(name, prompts, completions, columns).part(slice(i, i + size))
            for name in self.weights
            for i in range(0, len(completions), size)
        ]
        results, failures = self._run(jobs), list[str]()
        for i, (job, result) in enumerate(zip(jobs, results, strict=True)):
            number = len(job.completions)
            if isinstance(result, Raised) and number > 1:
                alone = self._run([job.part(slice(j, j + 1)) for j in range(number)])
            else:
                alone = [result]
            failures += [
                x if isinstance(x, str) else x.problem for x in alone if _failed(x)
            ]
            if alone[0] is result:
                results[i] = [np.nan] * number if _failed(result) else result
            else:
                results[i] = [np.nan if _failed(x) else x[0] for x in alone]
        calls = len(jobs) // len(self.weights)
        each = {
            name: np.concatenate(results[i * calls : (i + 1) * calls])
            for i, name in enumerate(self.weights)
        }
        total = sum(weight * each[name] for name, weight in self.weights.items())
        return Scores(np.asarray(total, np.float64), each, failures)

    def _run(self, jobs: Sequence[Job]) -> list[Any]:
        """The values of each call, `Raised`, or a text on why there are none."""
        if not self._answered and len(jobs) > _PATIENCE:
            return self._run(jobs[:_PATIENCE]) + self._run(jobs[_PATIENCE:])
        pool = self._started()
        calls = [
            pool.schedule(functions.call, [job], timeout=self.timeout) for job in jobs
        ]
        found = [
            self._result(job.name, call) for job, call in zip(jobs, calls, strict=True)
        ]
        self._answered = self._answered or not all(isinstance(x, str) for x in found)
        if not self._answered:
            raise ValueError(
                f"{found[0]} in {len(jobs)} calls of {len(jobs)}: it hangs, or ends "
                "its process. Correct it, or give a longer --timeout."
            )
        return found

    def _result(self, name: str, call: Any) -> Any:
        try:
            found = call.result()
        except TimeoutError:
            return f"{name} gave no result within {self.timeout} s"
        except pebble.ProcessExpired:
            return f"{name} gave no result, and its process ended"
        if isinstance(found, Wrong):
            raise ValueError(found.problem)
        return found


def _failed(result: Any) -> bool:
    return isinstance(result, str | Raised)
