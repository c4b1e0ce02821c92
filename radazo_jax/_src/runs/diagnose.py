"""Measurements of a function by a few evaluations, before a run."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from radazo_jax._src import checks, program
from radazo_jax._src.base import (
    Draw,
    GradientEstimator,
    Points,
    candidates,
    check_estimator,
)
from radazo_jax._src.directions.distribution import elements
from radazo_jax._src.directions.low_rank import LowRank
from radazo_jax._src.estimators.gradients import points_of
from radazo_jax._src.evaluators.external import outside
from radazo_jax._src.evaluators.vectorized import vectorized
from radazo_jax._src.runs.lost_updates import lost_updates
from radazo_jax._src.runs.repeats import Values, measures, ratio
from radazo_jax._src.trees import wide, widest

_DIRECTIONS = 4
_REPEATS = 4

# Evaluations added if the first ones at θ differ: at θ, and at each other point.
_MORE_AT_START, _MORE_AT_POINTS = 12, 3

# Shares and ratios beyond which there is advice.
_MUCH_LOST = 0.3
_LOST = 0.7
_FEW_ULPS = 16.0
_NOISY = 0.3
_CURVED = 1.0


class Diagnosis(NamedTuple):
    """The measurements of `diagnose`.

    Attributes:
      value: The value at θ, the mean of what was evaluated there.
      noise: The standard deviation of repeated values at one point.
      noise_range: A 95 % confidence interval of `noise`, for normal noise.
      difference: The root mean square of f(θ ± s u) − f(θ), with s the distance at
        which the estimator evaluates. The part due to noise is subtracted.
      difference_range: A 95 % confidence interval of `difference`, for normal noise.
      ulp: The spacing of the numbers in which values are compared, at the value.
      curvature: The part of a difference that is due to the curvature of the
        function, divided by the part due to its slope. The part due to noise is
        subtracted from both. NaN if noise hides the difference.
      lost: The share of each leaf's perturbation that its dtype rounds away: the norm
        of the lost part over the norm of the perturbation.
      lost_updates: The share of each leaf's update that its dtype rounds away; empty
        without an optimizer.
      failures: Texts about evaluations that failed.
      advice: Settings to change; empty if there are none.
    """

    value: float
    noise: float
    noise_range: tuple[float, float]
    difference: float
    difference_range: tuple[float, float]
    ulp: float
    curvature: float
    lost: dict[str, float]
    lost_updates: dict[str, float]
    failures: tuple[str, ...]
    advice: tuple[str, ...]

    def __repr__(self) -> str:
        """A report in plain text."""
        worst = max(self.lost, key=lambda name: self.lost[name])
        lines = [
            f"value at θ              {self.value:.6g}",
            f"noise at one point      {self.noise:.3g}{_shown(self.noise_range)}",
            f"difference along u      {self.difference:.3g}"
            f"{_shown(self.difference_range)}",
            f"  in units of the noise {ratio(self.difference, self.noise):.3g}",
            f"  in ulps of the value  {ratio(self.difference, self.ulp):.3g}",
            f"curvature / slope       {self.curvature:.3g}",
            f"lost by rounding        {self.lost[worst]:.1%} (params{worst})",
            *self._lost_updates(),
            *(f"failed                  {text}" for text in self.failures),
            *(f"→ {text}" for text in self.advice or ("nothing to mend",)),
        ]
        return "\n".join(lines)

    def _lost_updates(self) -> list[str]:
        if not self.lost_updates:
            return []
        worst = max(self.lost_updates, key=lambda name: self.lost_updates[name])
        share = self.lost_updates[worst]
        return [f"  of an update          {share:.1%} (params{worst})"]


def diagnose(
    fun: Callable[[optax.Params], Any],
    params: optax.Params,
    estimator: GradientEstimator,
    key: jax.typing.ArrayLike = 0,
    optimizer: optax.GradientTransformation | None = None,
) -> Diagnosis:
    """Evaluates a function at a few points, and says what to set before a run.

    It evaluates θ four times, and two points along each of at most four directions,
    at the distance of the estimator: 12 evaluations. If the values at θ differ, it
    evaluates θ 12 more times and each other point 3 more times, to separate the noise
    from the change of the function: 48 evaluations.

    Args:
      fun: A function of the parameters, as in `minimize` or `minimize_black_box`. One
        that JAX can trace is compiled.
      params: θ, a tree of floating-point arrays.
      estimator: The estimator of the run.
      key: A key; it is consumed.
      optimizer: The optimizer of the run. If it is given, it takes 30 updates with the
        gradient along the directions, at θ, and the last one is compared with its
        rounded sum with θ. This tells whether `stochastic_rounding` is needed.

    Returns:
      The measurements. `print` shows them as a report, and so does a notebook.

    Raises:
      TypeError, ValueError: If an argument has the wrong type or value.

    Examples:
      >>> import jax.numpy as jnp
      >>> import radazo_jax as zo
      >>> found = zo.diagnose(
      ...     lambda x: 1e4 + jnp.sum(x**2), jnp.ones(9), zo.forward_difference(), 0
      ... )
      >>> print(found)
      value at θ              10009
      ...
      → fun changes by ... ulps: make smoothing 1.5 times as large, ...
    """
    check_estimator(estimator)
    arrays = checks.as_params(params)
    checks.warn_of_float32(params, stacklevel=2)
    params = arrays
    state = estimator.init(params)
    traced = _traceable(fun, params)
    if traced and not program.are_disabled():
        fun = program.traced(fun, params)
    draw = Draw.once(key)._replace(fun=fun if traced else None)
    points, _ = points_of(estimator, vectorized(1), draw, params, state)
    used = _Used.of(points, params)
    points = _both_ways(points)
    with (_by_jax if traced else _by_hand)(fun, params, points) as evaluate:
        values = _measured(evaluate)
    lost = lost_by_rounding(points, params)
    of_updates = {}
    if optimizer is not None:
        moved, value = values.moved.mean(0), float(values.base.mean())
        of_updates = lost_updates(
            optimizer, points, moved, value, params, fun if traced else None
        )
    return _judged(values, lost, of_updates, used)


class _Used(NamedTuple):
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
    def of(cls, points: Points, params: optax.Params) -> "_Used":
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


def lost_by_rounding(points: Points, params: optax.Params) -> dict[str, float]:
    """The share of each leaf's perturbation that its dtype rounds away."""
    shares = jax.device_get(_lost(_moved(points), params))
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    return {
        jax.tree_util.keystr(path): float(share)
        for path, share in zip(paths, shares, strict=True)
    }


def warn_of_rounding(points: Points, params: optax.Params) -> None:
    """Warns if parameters round most of their perturbation away."""
    lost = lost_by_rounding(points, params)
    bad = {name: share for name, share in lost.items() if share > _LOST}
    if bad:
        name, share = max(bad.items(), key=lambda item: item[1])
        warnings.warn(
            f"{len(bad)} of the {len(lost)} arrays of params round most of their "
            f"perturbation away: params{name} loses {share:.0%} of it, so that its "
            "gradient is one of rounding errors. Make smoothing larger, keep these "
            "arrays in float32, or take low_rank()." + checks.refer_to("diagnose"),
            stacklevel=3,
        )


@jax.jit
def _lost(points: Points, params: optax.Params) -> list[jax.Array]:
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
    distribution = first.distribution
    kept = [distribution._size(leaf) < leaf.size for leaf in leaves]
    us = elements(first, points.layout)
    return list(map(share, jax.tree.leaves(params), us, kept))


def _both_ways(points: Points) -> Points:
    """θ, and both ways along the first directions."""
    few = _moved(points).select(slice(_DIRECTIONS))
    forth = few.scales[:, :1]
    scales = jnp.concatenate([forth, -forth], axis=1)
    return Points(few.directions, scales, True, points.layout)


def _moved(points: Points) -> Points:
    """The points away from θ along their direction; the rest has a scale of 0."""
    moved = np.flatnonzero(points.scales[:, 0])
    return points.select(moved) if moved.size else points


def _traceable(fun: Callable[[optax.Params], Any], params: optax.Params) -> bool:
    traced = []

    def watched(params: optax.Params) -> Any:
        value = fun(params)
        # A number that is known already was not computed by JAX.
        traced.append(isinstance(value, jax.core.Tracer))
        return value

    try:
        jax.eval_shape(watched, params)
    except Exception:
        return False
    return traced[0]


# `evaluate(n, m)` evaluates θ n times and the other points m times each.
_Evaluate = Callable[[int, int], Values]


def _measured(evaluate: _Evaluate) -> Values:
    """The values, with more repetitions if the values at θ differ."""
    few = evaluate(_REPEATS, 1)
    if np.unique(few.base[np.isfinite(few.base)]).size < 2:
        return few
    more = evaluate(_MORE_AT_START, _MORE_AT_POINTS)
    return Values(
        np.concatenate([few.base, more.base]),
        np.concatenate([few.moved, more.moved]),
        few.dtype,
        tuple(sorted({*few.failures, *more.failures})),
    )


@contextmanager
def _by_jax(
    fun: Callable[[optax.Params], Any], params: optax.Params, points: Points
) -> Iterator[_Evaluate]:
    at_points = program.of(_along, fun, params, points)
    again = program.of(_at_params, fun, params)

    def evaluate(at_start: int, at_points_each: int) -> Values:
        moved = [at_points(params, points) for _ in range(at_points_each)]
        base = [again(params) for _ in range(at_start)]
        others = np.array(moved, np.float64).reshape(at_points_each, -1, 2)
        return Values(np.array(base, np.float64), others, moved[0].dtype, ())

    yield evaluate


def _along(
    fun: Callable[[optax.Params], Any], params: optax.Params, points: Points
) -> jax.Array:
    """The values at the points along directions, in one row."""
    values, _ = vectorized(1).evaluate(fun, params, points, False)
    return values.along.reshape(-1)


def _at_params(fun: Callable[[optax.Params], Any], params: optax.Params) -> Any:
    return checks.checked_loss(fun, False)(params)[0]


@contextmanager
def _by_hand(
    fun: Callable[[optax.Params], Any], params: optax.Params, points: Points
) -> Iterator[_Evaluate]:
    asked = jax.device_get(jax.jit(candidates)(points, params))
    others = list(range(1, points.num_points))
    with outside(fun, None) as evaluate_points:

        def evaluate(at_start: int, at_points_each: int) -> Values:
            order = np.array([0] * at_start + others * at_points_each)
            outcome = evaluate_points(
                jax.tree.map(lambda x: x[order], asked), len(order)
            )
            assert outcome is not None
            return Values(
                outcome.values[:at_start],
                outcome.values[at_start:].reshape(at_points_each, -1, 2),
                widest(params),
                tuple(sorted(set(outcome.failures.values()))),
            )

        yield evaluate


def _judged(
    values: Values, lost: dict[str, float], of_updates: dict[str, float], used: _Used
) -> Diagnosis:
    found = measures(values)
    noise, difference, curvature = found.noise, found.difference, found.curvature
    ulp = float(np.spacing(np.abs(np.asarray(found.value, values.dtype))))
    all_values = np.concatenate([values.base, values.moved.ravel()])
    advice = []
    failed = int(np.sum(~np.isfinite(all_values)))
    if failed:
        advice.append(
            f"fun failed at {failed} of {len(all_values)} points: find out why first"
        )
    least, most = found.difference_range
    if found.unchanged:
        advice.append(
            "fun did not change: does it use its argument? If it does, make smoothing "
            "10 times as large, and check again"
        )
    elif noise > _NOISY * difference:
        # If the change cannot be told from zero, its upper limit bounds the factor.
        hidden = least == 0
        wanted = ratio(noise, _NOISY * (most if hidden else difference))
        larger = f"{'at least ' if hidden else ''}{min(max(wanted, 1.5), 10.0):.2g}"
        advice.append(
            f"the noise of fun hides its change along u: make smoothing {larger} "
            "times as large, and check again, or average more directions"
        )
    elif difference < _FEW_ULPS * ulp:
        larger = f"{min(ratio(_FEW_ULPS * ulp, difference), 10.0):.2g}"
        single = values.dtype != np.float64
        advice.append(
            f"fun changes by {difference / ulp:.2g} ulps: make smoothing "
            f"{larger} times as large, and check again, or subtract a constant "
            f"from fun{', or compute it in float64' * single}"
        )
    elif curvature > _CURVED:
        advice.append(
            f"curvature makes {curvature:.2g} times as much of a difference as the "
            f"slope: take {'' if used.central else 'central_difference, or '}a smaller "
            "smoothing, unless params are at a minimum"
        )
    many = [name for name, share in lost.items() if share > _MUCH_LOST]
    if many:
        worst = max(many, key=lambda name: lost[name])
        advice.append(
            f"params{worst} loses {lost[worst]:.0%} of its perturbation by rounding"
            f"{f', and {len(many) - 1} more arrays lose much' if many[1:] else ''}: "
            + used.instead_of_rounding(worst)
        )
    many = [name for name, share in of_updates.items() if share > _MUCH_LOST]
    if many:
        worst = max(many, key=lambda name: of_updates[name])
        advice.append(
            f"params{worst} loses {of_updates[worst]:.0%} of its update by rounding"
            f"{f', and {len(many) - 1} more arrays lose much' if many[1:] else ''}: "
            "chain stochastic_rounding(key) after the optimizer, or keep it in float32"
        )
    return Diagnosis(
        found.value,
        noise,
        found.noise_range,
        difference,
        found.difference_range,
        ulp,
        curvature,
        lost,
        of_updates,
        values.failures,
        tuple(advice),
    )


def _shown(interval: tuple[float, float]) -> str:
    """A range, as reports print it; nothing if it is a single number."""
    least, most = interval
    return f" (95 %: {least:.3g} to {most:.3g})" if least < most else ""
