"""Measurements of a function by a few evaluations, before a run."""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from radazo_jax._src.base import checks, keys, programs, trees
from radazo_jax._src.directions.distributions import sphere
from radazo_jax._src.estimates.contracts import (
    Draw,
    GradientEstimator,
    Objective,
    check_estimator,
)
from radazo_jax._src.estimates.differences import forward_difference
from radazo_jax._src.estimates.external import External, Mistake
from radazo_jax._src.estimates.gradients import points_of
from radazo_jax._src.estimates.points import candidates, sample_points
from radazo_jax._src.estimates.vectorized import vectorized
from radazo_jax._src.measure.learning_rate import LearningRate, endless_rate
from radazo_jax._src.measure.smoothing import NearbyLosses, Probe, Smoothing
from radazo_jax._src.steps import rounded_away, states, step

# Along which a Python function is evaluated.
_DIRECTIONS = 4

# Shares and ratios beyond which there is advice.
_MUCH_LOST = 0.3
_FEW_ULPS = 16.0
_NOISY = 0.3
_CURVED, _NO_SLOPE = 1.0, 1e3
_AGREEING = 0.8  # An estimate then needs 1.6 times as many directions.
_NEAR = 2.0  # Distances are measured by factors of 4.


class Diagnosis(NamedTuple):
    """The measurements of `diagnose`.

    Attributes:
      value: The value at θ, the mean of what was evaluated there.
      noise: The standard deviation of repeated values at one point.
      difference: The root mean square of f(θ ± s u) − f(θ), with s the distance at
        which the estimator evaluates. The part due to noise is subtracted.
      ulp: The spacing of the numbers that the function returns, at the value, or at
        the difference if that is larger.
      curvature: The part of a difference that is due to the curvature of the
        function, divided by the part due to its slope. The part due to noise is
        subtracted from both.
      lost: The share of each leaf's perturbation that its dtype rounds away: the norm
        of the lost part over the norm of the perturbation.
      failures: Texts about evaluations that failed.
      advice: Settings to change; empty if there are none.
      smoothing: The smoothing of `find_smoothing`, if JAX traces the function; `None`
        if there is none.
      learning_rate: The learning rate of `find_learning_rate`, of a run whose number of
        steps is not known; `None` without `sample`, or if there is none.
    """

    value: float
    noise: float
    difference: float
    ulp: float
    curvature: float
    lost: dict[str, float]
    failures: tuple[str, ...]
    advice: tuple[str, ...]
    smoothing: Smoothing | None = None
    learning_rate: LearningRate | None = None

    def __repr__(self) -> str:
        """Returns a report in plain text."""
        values = [
            f"noise at one point      {self.noise:.3g}",
            f"difference along u      {self.difference:.3g}",
            f"  in units of the noise {_ratio(self.difference, self.noise):.3g}",
            f"  in ulps of the value  {_ratio(self.difference, self.ulp):.3g}",
            f"curvature / slope       {self.curvature:.3g}",
        ]
        share, name = _worst(self.lost)
        rate = self.learning_rate and self.learning_rate._replace(smoothing=None)
        lines = [
            f"value at θ              {self.value:.6g}",
            *(values if math.isfinite(self.value) else []),
            f"lost by rounding        {share:.1%} (params{name})",
            *(repr(found) for found in (self.smoothing, rate) if found is not None),
            *(f"failed                  {text}" for text in self.failures),
            *(f"→ {text}" for text in self.advice or ("nothing to change",)),
        ]
        return "\n".join(lines)


@checks.checks_names
def diagnose(
    fun: Objective,
    params: optax.Params,
    estimator: GradientEstimator | None = None,
    key: jax.typing.ArrayLike = 0,
    *,
    sample: Callable[[jax.Array], object] | None = None,
) -> Diagnosis:
    """Evaluates a function at a few points, and says what to set before a run.

    It evaluates a Python function four times at θ, and at two points along each of
    four directions, at the distance of the estimator: 12 evaluations. If the values at
    θ differ, it evaluates θ 12 more times, to separate the noise from the change of the
    function.

    A function that JAX traces is evaluated as by `find_smoothing`, and at the distance
    of the estimator: 300 evaluations. With `sample`, a learning rate is measured as by
    `find_learning_rate`. The report contains the reports of both.

    The default method needs no settings, and finds the class of a function by itself:
    `stages` of its result name it.

    Args:
      fun: A function of the parameters, as in `train` or `minimize`. One that JAX can
        trace is compiled.
      params: θ, a tree of floating-point arrays.
      estimator: The estimator of the run; by default `forward_difference()`.
      key: A key; it is consumed.
      sample: `sample(key)` returns a minibatch, the second argument of `fun`, which
        JAX must be able to trace.

    Returns:
      The measurements. `print` shows them as a report, and so does a notebook.

    Raises:
      TypeError, ValueError: If an argument has the wrong type or value.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> import radazo_jax as zo
      >>> found = zo.diagnose(
      ...     lambda x: 1e4 + jnp.sum(x**2), jnp.ones(9), zo.forward_difference(), 0
      ... )
      >>> print(found)
      value at θ              10009
      ...
      → fun changes by ... ulps: take smoothing=..., subtract a constant ...

      `over` returns the learning rate of a run of T steps:

      >>> def loss(x, batch):
      ...     return 1 + jnp.mean((x - batch) ** 2)
      >>> def sample(key):
      ...     return jax.random.normal(key, (32,))
      >>> measured = zo.diagnose(
      ...     loss, jnp.full(32, 3.0), zo.forward_difference(), sample=sample
      ... )
      >>> measured.learning_rate.over(500).learning_rate
      0.0...
    """
    chosen = forward_difference() if estimator is None else estimator
    check_estimator(chosen)
    checks.check_fun(fun)
    params = trees.with_float64(params)
    checks.warn_of_float32(params)
    params, key = checks.as_params(params), keys.as_key(key)
    probe = Probe(fun, sample, params, key, sphere(), vectorized(1))
    draw, dtype = Draw.once(key), trees.widest(params)
    states.check_known((params, key))
    try:
        loss, drawn = step.traced_functions(fun, sample, params, key)
        # A number that is known already, without a dtype, was not computed by JAX.
        dtype, is_traced = loss.output.dtype, True
    except Exception as error:
        is_traced = False
        if sample is not None:
            raise TypeError(
                "fun must be a function that JAX traces with sample; got one that it "
                "does not trace. Leave out sample, and pass a function of params alone."
            ) from error
    if is_traced:
        if not programs.are_disabled():
            probe = probe._replace(fun=loss, sample=drawn)
        draw = draw._replace(fun=probe.loss_of(jnp.uint32(0)))
    points, _ = points_of(chosen, vectorized(1), draw, params, chosen.init(params))
    probe = probe._replace(distribution=points.directions.distribution)
    own = float(np.max(np.abs(points.scales)))
    failures: tuple[str, ...] = ()
    if is_traced:
        losses = NearbyLosses.of(probe, 0.0, 0.0, own, -own)
        base = np.append(losses.base, losses.further[:, :2], axis=1)
        moved = losses.further[:, 2:]
        smoothing, rate, reasons = _settings(probe, losses, own)
    else:
        base, moved, failures = _called(probe, draw, own)
        smoothing, rate, reasons = None, None, []
    lost = rounded_away.by_rounding(points, params)
    values = _changes(base, moved, dtype)
    found = Diagnosis(*values, lost, failures, (), smoothing, rate)
    failed = ~np.isfinite(np.append(base, moved))
    return found._replace(advice=tuple(_advice(found, failed, reasons)))


def _called(
    probe: Probe, draw: Draw, own: float
) -> tuple[np.ndarray, np.ndarray, tuple[str, ...]]:
    """Calls a Python function at θ and around it.

    Returns:
      Values at θ: [1, repeats]; values both ways along directions: [directions, 2]; and
      texts about the points that failed.
    """
    failures: set[str] = set()

    def values(*scales: float) -> np.ndarray:
        points = sample_points(
            probe.distribution, draw, _DIRECTIONS, scales, probe.params
        )
        asked = jax.device_get(jax.jit(candidates)(points, probe.params))
        outcome = calls.evaluate(asked, distinct=False)
        assert outcome is not None
        failures.update(outcome.failures.values())
        return outcome.values.reshape(_DIRECTIONS, -1)

    try:
        with External().open(probe.fun) as calls:
            base, moved = np.split(values(0.0, own, -own), [1], axis=1)
            if np.unique(base[np.isfinite(base)]).size > 1:
                base = np.append(base, values(0.0, 0.0, 0.0), axis=1)
    except Mistake as mistake:
        raise TypeError(str(mistake)) from mistake.__cause__
    return base.reshape(1, -1), moved, tuple(sorted(failures))


def _settings(
    probe: Probe, losses: NearbyLosses, own: float
) -> tuple[Smoothing | None, LearningRate | None, list[str]]:
    """Returns the smoothing and the rate of a run, and advice on another smoothing."""
    smoothing, rate, reasons = None, None, []
    try:
        smoothing = losses.smoothing()
        far = smoothing.smoothing
        ahead, back = losses.further[:, 2:].T
        agreed = losses.correlation(ahead, back, far)
        if not (1 / _NEAR <= own / far <= _NEAR or agreed >= _AGREEING):
            reasons.append(
                f"differences at the smoothing {own:.2g} and at {far:.2g} have a "
                f"correlation of {agreed:.2f}: take smoothing={far:.2g}"
            )
    except ValueError as error:
        reasons.append(f"no smoothing can be measured: {error}")
    try:
        if probe.sample is not None:
            known = smoothing and smoothing.smoothing
            rate = endless_rate(probe)._replace(smoothing=known)
    except ValueError as error:
        reasons.append(f"no learning rate can be measured: {error}")
    return smoothing, rate, reasons


def _changes(
    base: np.ndarray, moved: np.ndarray, dtype: jax.typing.DTypeLike
) -> tuple[float, float, float, float, float]:
    """Returns value, noise, difference, ulp and curvature of a `Diagnosis`.

    Args:
      base: Repeated values at θ, each row at the same minibatch: [rows, repeats].
      moved: Values around θ, both ways along directions, one for each row of `base` if
        it has several: [directions, 2].
      dtype: The dtype of the values.
    """

    def mean(x: np.ndarray, axis: int | None = None, less: int = 0) -> np.ndarray:
        """Returns the mean of finite values as if there were `less` fewer, or NaN."""
        known = np.isfinite(x)
        count = np.maximum(np.sum(known, axis) - less, 0)
        return np.asarray(np.sum(x, axis, where=known) / count)

    def signal(changes: np.ndarray, variance: float) -> float:
        """Returns their root mean square without noise of this variance."""
        return float(np.sqrt(np.maximum(mean(changes**2) - variance, 0.0)))

    with np.errstate(all="ignore"):
        means = mean(base, 1)
        noise = float(np.sqrt(mean(mean((base - means[:, None]) ** 2, 1, less=1))))
        change = moved - means[:, None]
        # The variances that noise gives to values around θ, and to means at θ.
        around, start = noise**2, noise**2 / base.shape[1]
        slope = signal(change @ [0.5, -0.5], around / 2)
        curve = signal(change @ [0.5, 0.5], around / 2 + start)
        size, value = signal(change, around + start), float(mean(means))
        ulp = float(np.spacing(np.asarray(max(abs(value), size)).astype(dtype)))
    return value, noise, size, ulp, _ratio(curve, slope)


def _advice(found: Diagnosis, failed: np.ndarray, reasons: list[str]) -> list[str]:
    """Returns settings to change.

    Args:
      found: The measurements.
      failed: Whether a point failed: [n].
      reasons: Advice on the smoothing, which tells more than curvature alone.
    """
    text = f"fun failed at {failed.sum()} of {failed.size} points: find out why first"
    if not math.isfinite(found.value):
        return [f"{text}, or start elsewhere, because params have no value"]
    noise, change, ulp = found.noise, found.difference, found.ulp
    far = found.smoothing and f"take smoothing={found.smoothing.smoothing:.2g}"

    def larger(factor: float) -> str:
        times = f"make smoothing {min(max(factor, 1.5), 10.0):.2g} times as large"
        return far or f"{times}, and check again"

    # Of what hides the change of the function, or magnifies it, the first counts.
    if noise == change == 0:
        reasons = [
            f"fun did not change: does it use its argument? If it does, {larger(10)}"
        ]
    elif noise > _NOISY * change:
        reasons = [
            "the noise of fun hides its change along u: "
            f"{larger(_ratio(noise, _NOISY * change))}, or average more directions"
        ]
    elif change < _FEW_ULPS * ulp:
        reasons = [
            f"fun changes by {change / ulp:.2g} ulps: "
            f"{larger(_ratio(_FEW_ULPS * ulp, change))}, subtract a constant from fun, "
            "or compute it in a wider dtype"
        ]
    elif found.curvature > _NO_SLOPE:
        reasons = ["fun has no slope at params, as at a minimum: diagnose it elsewhere"]
    elif found.curvature > _CURVED and not reasons:
        reasons = [
            f"curvature makes {found.curvature:.2g} times as much of a difference as "
            f"the slope: {far or 'make smoothing smaller'}, or central differences, "
            "unless params are at a minimum"
        ]
    share, worst = _worst(found.lost)
    rounded = (
        f"params{worst} loses {share:.0%} of its perturbation by rounding: "
        f"{far or 'make smoothing larger'}, or keep it in a wider dtype; low_rank() "
        "perturbs no matrix"
    )
    return [
        *([text] if failed.any() else []),
        *reasons,
        *([rounded] if share > _MUCH_LOST else []),
    ]


def _worst(shares: dict[str, float]) -> tuple[float, str]:
    """Returns the largest share, and the name of its array."""
    return max((share, name) for name, share in shares.items())


def _ratio(a: float, b: float) -> float:
    """Divides, to infinity if only `b` is 0, and to 0 if both are."""
    return a / b if b else math.inf if a else 0.0
