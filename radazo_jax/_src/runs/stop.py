"""Budgets and stopping rules of runs."""

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from radazo_jax._src import checks
from radazo_jax._src.runs import states, step
from radazo_jax._src.runs.states import Run, SolverState

_DEFAULT_STEPS = 1000


class Limits(NamedTuple):
    """Limits to which the progress of a run is compared after each step.

    Attributes:
      target: A value that ends the run, minus infinity for none: shape ().
      patience: Number of steps without progress that ends the run: int32, shape ().
    """

    target: Any
    patience: Any


class Progress(NamedTuple):
    """Progress of a run.

    Attributes:
      lowest: The lowest finite value so far, infinite before the first: shape ().
      since: Number of steps since then: int32, shape ().
    """

    lowest: Any
    since: Any

    @classmethod
    def none(cls, dtype: jax.typing.DTypeLike = np.float32) -> "Progress":
        """Returns the progress before the first step."""
        return cls(np.array(np.inf, dtype), np.zeros((), np.int32))

    def after(self, value: Any) -> "Progress":
        """Returns the progress after a step with this value."""
        xp = jnp if isinstance(value, jax.Array) else np
        lower = xp.isfinite(value) & (value < self.lowest)
        since = xp.where(lower, 0, self.since + 1).astype(np.int32)
        return Progress(xp.where(lower, value, self.lowest), since)

    def at_target(self, limits: Limits) -> Any:
        """Returns whether the run has reached its target."""
        xp = jnp if isinstance(self.lowest, jax.Array) else np
        return xp.isfinite(self.lowest) & (self.lowest <= limits.target)

    def ends(self, limits: Limits) -> Any:
        """Returns whether the run ends here."""
        return self.at_target(limits) | (self.since >= limits.patience)


class Budget(NamedTuple):
    """Budgets of a run.

    Attributes:
      num_steps: Number of steps, `None` for as many as can be counted.
      max_evaluations: Number of evaluations, or `None`.
      max_seconds: Seconds, or `None`.
      target: A value that ends the run, or `None`.
      patience: Number of steps without progress that ends the run, or `None`.
    """

    num_steps: int | None
    max_evaluations: int | None
    max_seconds: float | None
    target: float | None
    patience: int | None

    @classmethod
    def of(cls, *arguments: Any) -> "Budget":
        """Returns the budget; raises an error if an argument is not valid."""
        given = cls(*arguments)
        # A target alone may never be reached.
        if all(limit is None for limit in given._replace(target=None)):
            given = given._replace(num_steps=_DEFAULT_STEPS)
        for name in ("num_steps", "max_evaluations", "patience"):
            value = getattr(given, name)
            if value is not None:
                checks.check_int_at_least(name, value, 1)
        if given.max_seconds is not None:
            checks.check_positive("max_seconds", given.max_seconds)
            if jax.process_count() > 1:
                raise ValueError(
                    "max_seconds must be None in a run of several processes, whose "
                    f"clocks differ; got {given.max_seconds!r}. Give num_steps or "
                    "max_evaluations."
                )
        if given.target is not None:
            checks.check_finite("target", given.target)
        return given

    def watch(
        self,
        run: Run,
        state: SolverState,
        dtype: jax.typing.DTypeLike,
        varies: bool = False,
    ) -> "Watch":
        """Starts to watch a run.

        Args:
          run: The run.
          state: The state before the first step.
          dtype: The dtype of the values that are compared.
          varies: Whether a step may need fewer evaluations than it has points.

        Raises:
          ValueError: If `num_steps` is too large, or `max_evaluations` too small.
        """
        size = 1 if self.max_evaluations is None else step.num_points(run, state)
        return self.watch_points(size, state.step, dtype, varies)

    def watch_points(
        self, size: int, done: Any, dtype: Any, varies: bool = False
    ) -> "Watch":
        """Starts to watch a run of which only these numbers are known.

        Args:
          size: The number of points of a step.
          done: The number of steps before the first.
          dtype: The dtype of the values that are compared.
          varies: As in `watch`.

        Raises:
          ValueError: As in `watch`.
        """
        steps, reason = self.num_steps, "num_steps"
        if steps is None:
            steps = states.room(done)
        states.check_room(done, steps)
        if self.max_evaluations is not None:
            if self.max_evaluations < size:
                raise ValueError(
                    f"max_evaluations must be ≥ {size}, the evaluations of a step; got "
                    f"{self.max_evaluations}. Give a larger number, or an estimator "
                    "with fewer directions."
                )
            if not varies and self.max_evaluations // size < steps:
                steps, reason = self.max_evaluations // size, "max_evaluations"
        with np.errstate(all="ignore"):
            target = np.array(
                -np.inf if self.target is None else float(self.target), dtype
            )
        patience = min(self.patience or states.MOST_STEPS, states.MOST_STEPS)
        limits = Limits(target, np.array(patience, np.int32))
        return Watch(
            steps,
            reason,
            self.max_seconds,
            limits,
            Progress.none(dtype),
            size,
            self.max_evaluations if varies else None,
        )


class Watch:
    """The steps, the progress and the clock of a run, and what ends it.

    Attributes:
      num_steps: Number of steps at most, also by `max_evaluations`.
      limits: Limits of the progress.
      progress: The progress so far.
      steps: Number of steps so far.
      evaluations: Number of evaluations so far.
    """

    def __init__(
        self,
        num_steps: int,
        reason: str,
        max_seconds: float | None,
        limits: Limits,
        progress: Progress,
        size: int,
        max_evaluations: int | None,
    ):
        self.num_steps = num_steps
        self.limits = limits
        self.progress = progress
        self.steps = self.evaluations = 0
        self._reason = reason
        self._size = size
        self._most = np.inf if max_evaluations is None else max_evaluations
        self._max_seconds = np.inf if max_seconds is None else float(max_seconds)
        self._start = time.perf_counter()

    @property
    def total(self) -> int | None:
        """Number of steps for a progress bar, `None` if there is no limit."""
        return None if self.num_steps >= states.MOST_STEPS // 2 else self.num_steps

    def seconds_left(self) -> float:
        """Returns the seconds that are left."""
        return self._max_seconds - (time.perf_counter() - self._start)

    def saw(self, value: Any, evaluations: int) -> None:
        """Counts a step with this value and so many evaluations."""
        self.evaluations += evaluations
        self.took(1, self.progress.after(value))

    def allowed(self, evaluations: Sequence[int]) -> int:
        """Returns how many of the first steps are allowed, by their evaluations."""
        before = self.evaluations + np.cumsum([0, *evaluations])[:-1]
        fits = int(np.sum(before + self._size <= self._most))
        return min(fits, self.num_steps)

    def took(self, steps: int, progress: Progress) -> None:
        """Counts steps that led to this progress."""
        self.steps += steps
        self.progress = progress

    def reason(self) -> str:
        """Returns the reason for which the run ends here, or an empty string."""
        if self.progress.at_target(self.limits):
            return "target"
        if self.progress.since >= self.limits.patience:
            return "patience"
        if self.steps >= self.num_steps:
            return self._reason
        if self.evaluations + self._size > self._most:
            return "max_evaluations"
        return "max_seconds" if self.seconds_left() <= 0 else ""
