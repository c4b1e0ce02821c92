"""Checks of numbers by their names: `checks.positive(smoothing=smoothing)`."""

import math
import numbers
from collections.abc import Callable
from typing import Any


def positive(**named: Any) -> None:
    _require("a finite number > 0", lambda x: 0 < x < math.inf, named)


def non_negative(**named: Any) -> None:
    _require("a finite number ≥ 0", lambda x: 0 <= x < math.inf, named)


def rate(**named: Any) -> None:
    """The decay rate of an average."""
    _require("a number in [0, 1)", lambda x: 0 <= x < 1, named)


def count(**named: Any) -> None:
    _require("an int ≥ 1", lambda x: isinstance(x, numbers.Integral) and x >= 1, named)


def _require(
    expected: str, holds: Callable[[Any], bool], named: dict[str, Any]
) -> None:
    for name, value in named.items():
        if not holds(value):
            raise ValueError(f"{name} must be {expected}; got {value!r}.")
