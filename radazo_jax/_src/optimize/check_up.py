"""What a few evaluations tell of a function before a run."""

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from radazo_jax._src import checks
from radazo_jax._src.directions.law import elements
from radazo_jax._src.estimate.estimator import (
    GradientEstimator,
    check_estimator,
    points_of,
)
from radazo_jax._src.estimate.outside import outside
from radazo_jax._src.estimate.points import Draw, Points, candidates
from radazo_jax._src.estimate.vectorized import vectorized
from radazo_jax._src.trees import wide, widest

_DIRECTIONS = 4
_REPEATS = 4

# Shares and ratios beyond which something is to be mended.
_MUCH_LOST = 0.3
_LOST = 0.7
_FEW_ULPS = 16.0
_NOISY = 0.3
_CURVED = 1.0


class CheckUp(NamedTuple):
    """What `check_up` found.

    Attributes:
      value: The value at θ, the mean of what was evaluated there.
      noise: The standard deviation of the value at one point, evaluated again.
      difference: The root mean square of f(θ + s u) − f(θ), with s the distance at
        which the estimator evaluates.
      ulp: The spacing of the numbers in which values are compared, at the value.
      curvature: The part of a difference that is due to the curvature of the
        function, divided by the part due to its slope.
      lost: The share of each leaf's perturbation that its dtype rounds away: the norm
        of what is lost, divided by that of the perturbation.
      failures: What was said of evaluations that failed.
      advice: What to set; empty if there is nothing to mend.
    """

    value: float
    noise: float
    difference: float
    ulp: float
    curvature: float
    lost: dict[str, float]
    failures: tuple[str, ...]
    advice: tuple[str, ...]

    def __str__(self) -> str:
        """A report in plain text."""
        worst = max(self.lost, key=lambda name: self.lost[name])
        lines = [
            f"value at θ              {self.value:.6g}",
            f"noise at one point      {self.noise:.3g}",
            f"difference along u      {self.difference:.3g}",
            f"  in units of the noise {_ratio(self.difference, self.noise):.3g}",
            f"  in ulps of the value  {_ratio(self.difference, self.ulp):.3g}",
            f"curvature / slope       {self.curvature:.3g}",
            f"lost by rounding        {self.lost[worst]:.1%} (params{worst})",
            *(f"failed                  {text}" for text in self.failures),
            *(f"→ {text}" for text in self.advice or ("nothing to mend",)),
        ]
        return "\n".join(lines)


def check_up(
    fun: Callable[[Any], Any],
    params: Any,
    estimator: GradientEstimator,
    key: jax.typing.ArrayLike,
) -> CheckUp:
    """Evaluates a function at a few points, and says what to set before a run.

    It evaluates θ four times, and two points along each of at most four directions,
    at the distance of the estimator: 12 evaluations.

    Args:
      fun: A function of the parameters, as in `minimize` or `minimize_black_box`. One
        that JAX can trace is compiled.
      params: θ, a tree of floating-point arrays.
      estimator: The estimator of the run.
      key: A key; it is consumed.

    Returns:
      What was found. It is printed as well.

    Raises:
      TypeError, ValueError: If an argument is not as described.

    Examples:
      >>> import jax.numpy as jnp
      >>> import radazo_jax as zo
      >>> found = zo.check_up(
      ...     lambda x: 1e4 + jnp.sum(x**2), jnp.ones(9), zo.forward_difference(), 0
      ... )
      value at θ              10009
      ...
      → fun changes by ... ulps: make smoothing 1.5 times as large, ...
    """
    check_estimator(estimator)
    params = checks.as_params(params)
    state = estimator.init(params)
    traced = _traceable(fun, params)
    draw = Draw.once(key)._replace(fun=fun if traced else None)
    points, _ = points_of(estimator, vectorized(1), draw, params, state)
    points = _both_ways(points)
    evaluate = _by_jax if traced else _by_hand
    values, failures, dtype = evaluate(fun, params, points)
    found = _judged(values, dtype, lost_by_rounding(points, params), failures)
    print(found)
    return found


def lost_by_rounding(points: Points, params: Any) -> dict[str, float]:
    """The share of each leaf's perturbation that its dtype rounds away."""
    shares = jax.device_get(_lost(_moved(points), params))
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    return {
        jax.tree_util.keystr(path): float(share)
        for path, share in zip(paths, shares, strict=True)
    }


def warn_of_rounding(points: Points, params: Any) -> None:
    """Warns where parameters round most of their perturbation away."""
    lost = lost_by_rounding(points, params)
    bad = {name: share for name, share in lost.items() if share > _LOST}
    if bad:
        name, share = max(bad.items(), key=lambda item: item[1])
        warnings.warn(
            f"{len(bad)} of the {len(lost)} arrays of params round most of their "
            f"perturbation away: params{name} loses {share:.0%} of it, so that its "
            "gradient is one of rounding errors. Make smoothing larger, keep these "
            "arrays in float32, or take low_rank()." + checks.see("tutorial/choosing"),
            stacklevel=3,
        )


@jax.jit
def _lost(points: Points, params: Any) -> list[jax.Array]:
    first = jax.tree.map(lambda x: x[0], points.directions)
    scale = points.scales[0, 0]

    def share(p: jax.Array, u: jax.Array, kept: bool) -> jax.Array:
        if kept:
            return jnp.zeros(())
        before = wide(p)
        wanted = scale.astype(before.dtype) * u.astype(before.dtype)
        moved = wide((before + wanted).astype(p.dtype)) - before
        norm = jnp.sqrt(jnp.sum(wanted**2))
        lost = jnp.sqrt(jnp.sum((moved - wanted) ** 2))
        return jnp.where(norm > 0, lost / norm, 0).astype(jnp.float32)

    # A matrix that is perturbed by factors is multiplied as it is.
    leaves = points.layout.leaves
    law = first.law
    kept = [law._storage.size(law, leaf) < leaf.size for leaf in leaves]
    us = elements(first, points.layout)
    return list(map(share, jax.tree.leaves(params), us, kept))


def _both_ways(points: Points) -> Points:
    """θ, and both ways along the first directions."""
    few = _moved(points).select(slice(_DIRECTIONS))
    forth = few.scales[:, :1]
    scales = jnp.concatenate([forth, -forth], axis=1)
    return Points(few.directions, scales, True, points.layout)


def _moved(points: Points) -> Points:
    """Those that are away from θ along their direction, for others lie beside it."""
    moved = np.flatnonzero(points.scales[:, 0])
    return points.select(moved) if moved.size else points


def _traceable(fun: Callable[[Any], Any], params: Any) -> bool:
    traced = []

    def watched(params: Any) -> Any:
        value = fun(params)
        # A number that is known already was not computed by JAX.
        traced.append(isinstance(value, jax.core.Tracer))
        return value

    try:
        jax.eval_shape(watched, params)
    except Exception:
        return False
    return traced[0]


def _by_jax(
    fun: Callable[[Any], Any], params: Any, points: Points
) -> tuple[np.ndarray, tuple[str, ...], Any]:
    @jax.jit
    def at_points(params: Any, points: Points) -> jax.Array:
        values, _ = vectorized(1).evaluate(fun, params, points, False)
        return points.join(values)

    again = jax.jit(lambda params: checks.checked_loss(fun, False)(params)[0])
    values = at_points(params, points)
    repeated = [again(params) for _ in range(_REPEATS)]
    return np.array([*repeated, *values[1:]], np.float64), (), values.dtype


def _by_hand(
    fun: Callable[[Any], Any], params: Any, points: Points
) -> tuple[np.ndarray, tuple[str, ...], Any]:
    asked = jax.jit(candidates)(points, params)
    repeats = [0] * (_REPEATS - 1)
    order = np.array([*repeats, *range(points.num_points)])
    asked = jax.tree.map(lambda x: np.array(x)[order], asked)
    with outside(fun, None) as evaluate_points:
        outcome = evaluate_points(asked, len(order))
    assert outcome is not None
    failures = tuple(sorted(set(outcome.failures.values())))
    return outcome.values, failures, widest(params)


def _judged(
    values: np.ndarray,
    dtype: Any,
    lost: dict[str, float],
    failures: tuple[str, ...],
) -> CheckUp:
    base, moved = values[:_REPEATS], values[_REPEATS:].reshape(-1, 2)
    value = _mean(base)
    noise = np.std(base, ddof=1) if np.isfinite(base).all() else np.nan
    above, below = moved.T - value
    difference = np.sqrt(_mean(above**2))
    slope, curve = (above - below) / 2, (above + below) / 2
    curvature = _ratio(np.sqrt(_mean(curve**2)), np.sqrt(_mean(slope**2)))
    ulp = float(np.spacing(np.abs(np.asarray(value, dtype))))

    # Noise alone makes a difference, for it is in both values.
    seen = difference**2 - noise**2 * (1 + 1 / len(base))
    signal = np.sqrt(max(seen, 0.0))

    advice = []
    failed = int(np.sum(~np.isfinite(values)))
    if failed:
        advice.append(
            f"fun failed at {failed} of {len(values)} points: find out why first"
        )
    if noise > _NOISY * signal:
        larger = min(_ratio(noise, _NOISY * signal), 10.0)
        advice.append(
            f"the noise of fun hides its change along u: make smoothing {larger:.2g} "
            "times as large, and check again, or average more directions"
        )
    elif difference < _FEW_ULPS * ulp:
        larger = min(_ratio(_FEW_ULPS * ulp, difference), 10.0)
        advice.append(
            f"fun changes by {difference / ulp:.2g} ulps: make smoothing "
            f"{larger:.2g} times as large, and check again, or subtract a constant "
            "from fun, or compute it in float64"
        )
    elif curvature > _CURVED:
        advice.append(
            f"curvature makes {curvature:.2g} times as much of a difference as the "
            "slope: take central_difference, or a smaller smoothing, unless params "
            "are at a minimum"
        )
    many = [name for name, share in lost.items() if share > _MUCH_LOST]
    if many:
        worst = max(many, key=lambda name: lost[name])
        advice.append(
            f"params{worst} loses {lost[worst]:.0%} of its perturbation by rounding"
            f"{f', and {len(many) - 1} more arrays lose much' if many[1:] else ''}: "
            "make smoothing larger, keep it in float32, or take low_rank()"
        )
    return CheckUp(
        float(value),
        float(noise),
        float(difference),
        ulp,
        float(curvature),
        lost,
        failures,
        tuple(advice),
    )


def _mean(values: np.ndarray) -> Any:
    """The mean of those that are finite."""
    finite = values[np.isfinite(values)]
    return np.mean(finite) if finite.size else np.nan


def _ratio(a: Any, b: Any) -> float:
    return float(a) / float(b) if b else float("inf") if a else 0.0
