"""Budgets and stopping rules of runs."""

import time
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from radazo_jax._src.base import checks
from radazo_jax._src.steps import states

_DEFAULT_STEPS = 1000


class RunProgress(NamedTuple):
    """Progress of a run, which compiled loops keep and compare, too.

    Attributes:
      lowest: The lowest finite value so far, the largest number before: shape ().
      since: Number of steps since then: int32, shape ().
      target: A value that ends the run, the lowest number for none: shape ().
      patience: Number of steps without progress that ends the run: int32, shape ().
    """

    lowest: jax.Array | np.ndarray
    since: jax.Array | np.ndarray
    target: jax.Array | np.ndarray
    patience: jax.Array | np.ndarray

    def after(self, value: float | jax.Array) -> "RunProgress":
        """Returns the progress after a step with this value."""
        xp = jnp if isinstance(value, jax.Array) else np
        lower = xp.isfinite(value) & (value < self.lowest)
        since = xp.where(lower, 0, self.since + 1).astype(np.int32)
        return self._replace(lowest=xp.where(lower, value, self.lowest), since=since)

    def at_target(self) -> jax.Array | np.ndarray:
        """Returns whether the run has reached its target."""
        xp = jnp if isinstance(self.lowest, jax.Array) else np
        most = xp.finfo(self.lowest.dtype).max
        return (self.lowest < most) & (self.lowest <= self.target)

    def ends(self) -> jax.Array | np.ndarray:
        """Returns whether the run ends here."""
        return self.at_target() | (self.since >= self.patience)


class Budget:
    """Budgets of a run, and what it has used of them.

    Attributes:
      num_steps: Number of steps at most.
      size: The number of points of a step.
      progress: The progress so far.
      steps: Number of steps so far.
      evaluations: Number of evaluations so far.
      arrived: Number of evaluations of the unfinished step.
      again: Number of evaluations that compared the best points of a noisy run.
      reserved: Number of evaluations that are kept for this.
      is_open: Whether there is none, so that a run may end by itself.
    """

    progress: RunProgress
    size: int

    def __init__(
        self,
        num_steps: int | None = None,
        max_evaluations: int | None = None,
        max_seconds: float | None = None,
        target: float | None = None,
        patience: int | None = None,
        default_steps: int | None = _DEFAULT_STEPS,
    ):
        """Checks the budgets; `None` is no limit.

        Args:
          num_steps: Number of steps.
          max_evaluations: Number of evaluations.
          max_seconds: Seconds.
          target: A value that ends the run.
          patience: Number of steps without progress that ends the run.
          default_steps: Number of steps if nothing else limits them.

        Raises:
          TypeError, ValueError: If an argument is not valid.
        """
        # A target alone may never be reached.
        limits = num_steps, max_evaluations, max_seconds, patience
        self.is_open = all(limit is None for limit in limits)
        self._names_steps = num_steps is not None
        self._counts_evaluations = default_steps is None
        if self.is_open:
            num_steps = default_steps
        counts = {
            "num_steps": num_steps,
            "max_evaluations": max_evaluations,
            "patience": patience,
        }
        for name, value in counts.items():
            if value is not None:
                checks.check_int_at_least(name, value, 1)
        if max_seconds is not None:
            checks.check_positive("max_seconds", max_seconds)
            if jax.process_count() > 1:
                raise ValueError(
                    "max_seconds must be None in a run of several processes, whose "
                    f"clocks differ; got {max_seconds!r}. Give num_steps or "
                    "max_evaluations."
                )
        if target is not None:
            checks.check_finite("target", target)
        self.num_steps = states.MOST_STEPS if num_steps is None else num_steps
        self.steps = self.evaluations = self.arrived = self.again = self.reserved = 0
        self._most = np.inf if max_evaluations is None else max_evaluations
        self._max_seconds = np.inf if max_seconds is None else float(max_seconds)
        self._target = -np.inf if target is None else float(target)
        self._patience = min(patience or states.MOST_STEPS, states.MOST_STEPS)

    def start(
        self, size: int, done: int | jax.Array, dtype: jax.typing.DTypeLike
    ) -> None:
        """Starts to count the steps of a run.

        Args:
          size: The number of points of a step.
          done: The number of steps before the first.
          dtype: The dtype of the values that are compared.

        Raises:
          ValueError: If `num_steps` is too large, or `max_evaluations` too small.
        """
        if self.num_steps == states.MOST_STEPS and not self._names_steps:
            self.num_steps = states.room(done)
        states.check_room(done, self.num_steps)
        if self._most < size:
            raise ValueError(
                f"max_evaluations must be ≥ {size}, the evaluations of a step; got "
                f"{self._most}. Give a larger number, or an estimator with fewer "
                "directions."
            )
        self.size = size
        # Finite numbers, for users who look for others in compiled loops.
        most = np.finfo(dtype).max
        with np.errstate(all="ignore"):
            target = np.clip(self._target, -most, most).astype(dtype)
        none, patience = np.array(most, dtype), np.array(self._patience, np.int32)
        self.progress = RunProgress(none, np.zeros((), np.int32), target, patience)
        self._start = time.perf_counter()

    def spend(self, evaluations: int) -> None:
        """Deducts evaluations that were taken before the first step.

        Raises:
          ValueError: If `max_evaluations` does not leave two steps.
        """
        if self._most - evaluations < 2 * self.size:
            raise ValueError(
                f"max_evaluations must be ≥ {evaluations + 2 * self.size}, because "
                f"find_learning_rate took {evaluations}; got {self._most}. "
                "Give a larger number, or an optimizer with a learning rate."
            )
        self._most -= evaluations

    def end_at(self, last: int, done: int) -> None:
        """Ends the run once its learning rate is 0.

        Args:
          last: The number of steps of the whole run after which it is 0.
          done: The number of steps before the first.

        Raises:
          ValueError: If the caller wants more steps, or none is left.
        """
        wanted = self.num_steps if self._names_steps else 0
        if done >= last or wanted > last:
            raise ValueError(
                f"num_steps must end the run at step {last}, at which its learning "
                f"rate is 0; got {wanted} after {done}. Give fewer steps, or "
                "begin another run from state.params, which measures another rate."
            )
        self.num_steps = min(self.num_steps, last - done)

    @property
    def total(self) -> int | None:
        """The number of steps with all of their points, `None` if there is no limit."""
        total = min(self.num_steps, self._most // self.size)
        return None if total >= states.MOST_STEPS // 2 else int(total)

    def shown(self) -> tuple[str, int, int | None]:
        """Returns the unit of a progress bar, their number so far, and the total.

        A rejected step has one evaluation, so that evaluations do not tell steps.
        """
        is_limited = self._most < np.inf
        if self._counts_evaluations or (is_limited and not self._names_steps):
            total = int(self._most) if is_limited else None
            return "evaluation", self.evaluations + self.arrived, total
        unlimited = self.num_steps >= states.MOST_STEPS // 2
        return "step", self.steps, None if unlimited else self.num_steps

    def seconds_left(self) -> float:
        """Returns the seconds that are left."""
        return self._max_seconds - (time.perf_counter() - self._start)

    def steps_left(self) -> int:
        """Returns the number of steps that are left, if they need all their points."""
        by_evaluations = (self._most - self.evaluations) // self.size
        return int(min(self.num_steps - self.steps, by_evaluations))

    def count_step(self, value: float, evaluations: int) -> None:
        """Counts a step with this value and so many evaluations."""
        self.count_chunk(1, evaluations, self.progress.after(value))

    def allowed(self, evaluations: Sequence[int]) -> int:
        """Returns how many of the first steps are allowed, by their evaluations."""
        after = self.evaluations + np.cumsum(evaluations)
        return min(int(np.sum(after <= self._most)), self.num_steps)

    def reserve(self, share: float, fewest: int) -> None:
        """Keeps a share of the evaluations, if they are limited, to compare points."""
        if self._most < np.inf and not self.reserved:
            wanted = max(fewest, int(share * self._most))
            self.reserved = max(min(wanted, int(self._most) - self.evaluations), 0)

    def evaluations_left(self, compares: bool = False) -> int:
        """Returns the number of evaluations that may still be used.

        Args:
          compares: Whether they compare the best points, and take no step.
        """
        left = self._most - self.evaluations - (0 if compares else self._kept())
        return int(max(min(left, states.MOST_STEPS), 0))

    def _kept(self) -> int:
        """Returns the number of evaluations that steps must not use."""
        return max(self.reserved - self.again, 0)

    def count_chunk(self, steps: int, evaluations: int, progress: RunProgress) -> None:
        """Counts steps with so many evaluations, which led to this progress."""
        self.steps += steps
        self.evaluations += evaluations
        self.progress = progress

    def reason(self) -> str:
        """Returns the reason for which the run ends here, or an empty string."""
        if self.progress.at_target():
            return "target"
        if self.progress.since >= self.progress.patience:
            return "patience"
        spent = self.evaluations + self.size > self._most - self._kept()
        ended = self.steps >= self.num_steps
        if spent and not (ended and self._names_steps):
            return "max_evaluations"
        if ended:
            return "num_steps"
        return "max_seconds" if self.seconds_left() <= 0 else ""
