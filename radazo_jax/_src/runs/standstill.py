"""A warning about runs in which the function does not change."""

import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np

_STEPS = 10


class Standstill:
    """Warns once if all values of the first steps of a run are equal.

    Equal values give no direction and no step size, so that the run stays at its start.
    A function that has changed before may be at its minimum.
    """

    def __init__(self, step: Any, stacklevel: int):
        """Begins to look at a run.

        Args:
          step: The number of the next step; a run that continues is not looked at.
          stacklevel: The user's frame, counted as `warnings.warn` would from the
            function that calls the methods.
        """
        self._values: list[float] | None = None if int(step) else []
        self._stacklevel = stacklevel

    def saw(self, numbers: Mapping[str, np.ndarray]) -> None:
        """Looks at the numbers of steps, as a `History` has them.

        Runs of workers do not know slopes when they see the values.
        """
        if self._values is None:
            return
        few = slice(_STEPS - len(self._values))
        value, std, points = (
            numbers[name][few] for name in ("value", "value_std", "evaluations")
        )
        slope = numbers.get("slope", np.zeros_like(value))[few]
        # The mean of n equal values may differ from them by n roundings.
        rounding = points * np.finfo(np.float32).eps * np.abs(value)
        equal = bool(np.all((std <= rounding) & (slope == 0)))
        self._values += value.tolist()
        first = self._values[0]
        if not equal or np.any(value != first):
            self._values = None
        elif len(self._values) >= _STEPS:
            self._values = None
            warnings.warn(
                f"fun returned {first:.6g} at all points of the first {_STEPS} steps, "
                "so the run stays at its start. If fun is made of steps, name an "
                "estimator whose smoothing is about as wide as a step, such as "
                "central_difference(smoothing=0.2), and an optimizer such as "
                "radazo(1e-2). help(zo.diagnose) says how to measure fun.",
                stacklevel=self._stacklevel + 1,
            )
