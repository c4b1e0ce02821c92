"""The warning of a run whose loss rises."""

from collections.abc import Callable

import numpy as np

from radazo_jax._src import checks

# A run is judged by the latest tenth of its steps, if these are so many.
_SHARE, _FEWEST = 10, 20
_PARTS = 4
_ERRORS = 4.0  # A rise of so many standard errors is none of noise.
_TIMES = 1.5  # A loss that stays above so many times the first one has risen.


class Rising:
    """Warns once if the loss of a run has risen for a tenth of its steps.

    The latest tenth is cut into four parts. The loss rises if the mean of each part is
    above the one before, the last mean is above the first by more than noise explains,
    and it is above the loss at the start of the run. A loss that has jumped at once,
    and stays far above the first one, has risen, too.
    """

    def __init__(self, num_steps: int | None, advice: Callable[[], str]):
        """Begins to look at a run.

        Args:
          num_steps: The number of its steps, if it is known.
          advice: Returns what to try, as the last sentences of the warning.
        """
        self._size = (num_steps or 0) // _SHARE // _PARTS
        self._advice = advice
        self._values = np.zeros(0)
        self._start = self._first = np.nan
        self._is_over = self._size * _PARTS < _FEWEST

    def see(self, values: np.ndarray) -> None:
        """Looks at the losses of further steps."""
        if self._is_over:
            return
        self._values = np.concatenate([self._values, np.asarray(values, np.float64)])
        if not np.isfinite(self._first):
            self._first = self._values[0]
        if not np.isfinite(self._start) and len(self._values) >= self._size:
            self._start = self._values[: self._size].mean()
        latest = self._values[-self._size * _PARTS :]
        self._values = latest
        if len(latest) < self._size * _PARTS or not np.isfinite(latest).all():
            return
        parts = latest.reshape(_PARTS, -1)
        means, error = parts.mean(1), np.sqrt(2 * parts.var(1, ddof=1).mean())
        rises = bool(np.all(np.diff(means) > 0)) and means[-1] > self._start
        rises &= means[-1] - means[0] > _ERRORS * error / np.sqrt(self._size)
        before, start = means[0], self._start
        if 0 < _TIMES * self._first < latest.min():
            rises, before, start = True, self._first, self._first
        if rises:
            self._is_over = True
            checks.warn(
                f"The loss has risen from {before:.3g} to {means[-1]:.3g} in the "
                f"latest {len(latest)} steps, above {start:.3g} at the start: "
                "steps are too long, or differences do not tell the slope. "
                + self._advice()
            )
