"""Ends of methods: what they are called, and why one stage follows another."""

import enum
import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numpy as np

from radazo_jax._src.methods.contract import Ask, End, Part, Start, Steps, answered

_Call = TypeVar("_Call", bound=Callable[..., Steps])

# A value below so many times the first ones, downward, has fallen without end, if it is
# large, or if its point is so many sizes away.
_WITHOUT_END, _AWAY = 1 / np.finfo(float).eps, 1e3


class Reason(enum.StrEnum):
    """The reason for which a method ends, or a stage follows another; its text."""

    # A minimum, as far as values tell.
    MINIMUM = "a minimum was found"
    NEIGHBORS = "no neighbor is better"
    WITHIN = "neither the parameters nor the value moved beyond the tolerance"
    SETTLED = "the values hardly fall"

    # Nothing more can be found.
    EQUAL = "the values have become equal"
    STAGNANT = "the values no longer fall"
    SINGULAR = "the covariance has become singular"
    FLAT = (
        "no move changes the value: check that fun uses its parameters, or pass a "
        "larger scale"
    )
    FIXED = "no parameter can move"
    FAILED = "the function failed at the start"
    NEIGHBORHOOD = "no point near the best one can be used"

    # The run has diverged.
    DIVERGED = "values fall without end: check the sign of fun, or pass bounds"
    GROWING = "the step size has diverged: check the sign of fun, or pass bounds"

    # Another stage follows.
    STILL = "no short move changes the value"
    NOWHERE = "slopes led nowhere"
    JUMPS = "slopes led to a jump"
    NOISE = "the value at one point changed"
    LOWER = "a lower value was found"
    CELLS = "parameters change the value by steps"
    STEPS = "the function is piecewise constant"
    MANY = "more than 100 parameters"
    FEW = "few parameters"
    GRID = "parameters have a step"
    DIGITS = "values have few digits"
    JITTER = "values have jitter"
    APART = "sizes of parameters are far apart"
    SMOOTH = "short differences show slopes"
    SLOW = "models no longer help"
    OTHERS = "other ways from the start may lead lower"
    NEXT = "a point next to another minimum"
    LOOKING = "a minimum was found; looking for a lower one"

    def __repr__(self) -> str:
        return repr(self.value)


_DIVERGED = Reason.DIVERGED, Reason.GROWING


def stopped(reason: str) -> str:
    """Returns what a run is that ended for a reason: "converged" or "diverged".

    It is empty if the run has not ended.
    """
    return ("diverged" if reason in _DIVERGED else "converged") if reason else ""


def decided(value: float, changed: bool, reason: Reason = Reason.MINIMUM) -> Reason:
    """Returns what the end of a method is called.

    Args:
      value: The lowest value, infinite or NaN if the function failed.
      changed: Whether some move from its point shows a rise or curvature.
      reason: The end if one does.
    """
    if not np.isfinite(value):
        return Reason.FAILED
    return reason if changed else Reason.FLAT


def guarded(call: _Call) -> _Call:
    """Ends the steps of a method once values fall without end."""

    @functools.wraps(call)
    def steps(method: Any, start: Start) -> Steps:
        first: list[float] = []
        lowest = End(start.params, np.inf, Reason.DIVERGED)
        most, far = 2 * len(start.params) + 3, _AWAY * max(1.0, *abs(start.params))

        def answer(asked: Ask) -> Part[np.ndarray | None]:
            nonlocal lowest
            values = yield asked
            known = np.isfinite(values)
            if not np.any(known):
                return values
            if len(first) < most:
                first.extend(abs(values[known]))
            i = int(np.argmin(np.where(known, values, np.inf)))
            if values[i] < lowest.value:
                lowest = End(asked.points[i], float(values[i]), Reason.DIVERGED)
            large = -lowest.value > _WITHOUT_END
            away = large or np.max(abs(lowest.params - start.params)) > far
            endless = away and -lowest.value / _WITHOUT_END > max(first) > 0
            return None if endless else values

        end = yield from answered(call(method, start), answer)
        return end or lowest

    return cast("_Call", steps)
