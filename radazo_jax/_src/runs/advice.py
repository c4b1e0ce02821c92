"""Advice before a run, by the measurements of a function."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from radazo_jax._src.base import Points
from radazo_jax._src.directions.low_rank import LowRank
from radazo_jax._src.runs.repeats import Measures, Repeats, ratio

# Shares and ratios beyond which there is advice.
_MUCH_LOST = 0.3
_INSTEAD_OF_LOSING = (
    "chain stochastic_rounding(key) after the optimizer, or keep it in float32"
)
_FEW_ULPS = 16.0
_NOISY = 0.3
_CURVED = 1.0


class Used(NamedTuple):
    """Settings of a run that advice must not name, because they are used.

    Attributes:
      central: Whether the estimator evaluates both ways along each direction.
      low_rank: Whether its directions are of low rank.
      wide: The names of the arrays of at least float32.
    """

    central: bool
    low_rank: bool
    wide: frozenset[str]

    @classmethod
    def of(cls, points: Points, params: optax.Params) -> "Used":
        """Returns the settings of a run with these points."""
        scales = np.asarray(points.scales)
        leaves = jax.tree_util.tree_leaves_with_path(params)
        return cls(
            bool(np.all(np.isin(-scales, scales))) and scales.shape[1] > 1,
            isinstance(points.directions.distribution, LowRank),
            frozenset(
                jax.tree_util.keystr(path) for path, x in leaves if x.dtype.itemsize > 2
            ),
        )

    def instead_of_rounding(self, name: str) -> str:
        """Returns ways to lose less of the perturbation of an array."""
        ways = ["make smoothing larger"]
        if name not in self.wide:
            ways.append("keep it in float32")
        if not self.low_rank:
            ways.append("take low_rank()")
        return _either(ways)


def _either(ways: list[str]) -> str:
    *first, last = ways
    return f"{', '.join(first)}, or {last}" if first else last


def advised(
    values: Repeats,
    found: Measures,
    ulp: float,
    shares: dict[str, float],
    of_updates: dict[str, float],
    used: Used,
) -> list[str]:
    """Settings to change.

    Args:
      values: The values of the function.
      found: Their measures.
      ulp: The distance between two neighboring numbers at the value.
      shares: The share of the perturbation of each array that rounding takes.
      of_updates: The share of its update; empty without an optimizer.
      used: The settings of the run.
    """
    return [
        *_advice_on_failures(values),
        *_advice_on_values(found, ulp, values.dtype, used),
        *_advice_on_lost("perturbation", shares, used.instead_of_rounding),
        *_advice_on_lost("update", of_updates, lambda name: _INSTEAD_OF_LOSING),
    ]


def _advice_on_failures(values: Repeats) -> list[str]:
    all_values = np.concatenate([values.base, values.moved.ravel()])
    failed = int(np.sum(~np.isfinite(all_values)))
    if not failed:
        return []
    return [f"fun failed at {failed} of {len(all_values)} points: find out why first"]


def _advice_on_values(found: Measures, ulp: float, dtype: Any, used: Used) -> list[str]:
    """Advice if something hides the change of the function, or magnifies it."""
    noise, difference, curvature = found.noise, found.difference, found.curvature
    least, most = found.difference_range
    if found.unchanged:
        return [
            "fun did not change: does it use its argument? If it does, make smoothing "
            "10 times as large, and check again"
        ]
    if noise > _NOISY * difference:
        # If the change cannot be told from zero, its upper limit bounds the factor.
        hidden = least == 0
        wanted = ratio(noise, _NOISY * (most if hidden else difference))
        larger = f"{'at least ' if hidden else ''}{min(max(wanted, 1.5), 10.0):.2g}"
        return [
            f"the noise of fun hides its change along u: make smoothing {larger} "
            "times as large, and check again, or average more directions"
        ]
    if difference < _FEW_ULPS * ulp:
        larger = f"{min(ratio(_FEW_ULPS * ulp, difference), 10.0):.2g}"
        single = dtype != np.float64
        return [
            f"fun changes by {difference / ulp:.2g} ulps: make smoothing "
            f"{larger} times as large, and check again, or subtract a constant "
            f"from fun{', or compute it in float64' * single}"
        ]
    if curvature > _CURVED:
        return [
            f"curvature makes {curvature:.2g} times as much of a difference as the "
            f"slope: take {'' if used.central else 'central_difference, or '}a smaller "
            "smoothing, unless params are at a minimum"
        ]
    return []


def _advice_on_lost(
    what: str, shares: dict[str, float], instead: Callable[[str], str]
) -> list[str]:
    """Names the array that loses most by rounding, and what to do instead."""
    many = [name for name, share in shares.items() if share > _MUCH_LOST]
    if not many:
        return []
    worst = max(many, key=lambda name: shares[name])
    more = f", and {len(many) - 1} more arrays lose much" if many[1:] else ""
    return [
        f"params{worst} loses {shares[worst]:.0%} of its {what} by rounding{more}: "
        + instead(worst)
    ]
