"""Measurements of a function by a few evaluations, before a run."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from radazo_jax._src.base import checks, keys, trees
from radazo_jax._src.directions.distributions import sphere
from radazo_jax._src.estimates.contracts import (
    Draw,
    GradientEstimator,
    Objective,
    Points,
    check_estimator,
)
from radazo_jax._src.estimates.differences import forward_difference
from radazo_jax._src.estimates.external import External, Mistake
from radazo_jax._src.estimates.gradients import points_of
from radazo_jax._src.estimates.points import candidates
from radazo_jax._src.estimates.vectorized import vectorized
from radazo_jax._src.measure import learning_rate
from radazo_jax._src.measure.learning_rate import LearningRate
from radazo_jax._src.measure.probes import Probe
from radazo_jax._src.measure.smoothing import Smoothing, Table
from radazo_jax._src.steps import rounded_away

_DIRECTIONS = 4
_REPEATS = 4

_MORE = 12  # Evaluations at θ that are added if the first ones differ.

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
        """A report in plain text."""
        measured = []
        if self.smoothing is not None:
            measured = [f"smoothing               {self.smoothing.smoothing:.3g}"]
        if self.learning_rate is not None:
            taken = self.learning_rate.learning_rate
            measured += [f"learning rate           {taken:.3g} / √(1 + t/100)"]
        values = [
            f"noise at one point      {self.noise:.3g}",
            f"difference along u      {self.difference:.3g}",
            f"  in units of the noise {_ratio(self.difference, self.noise):.3g}",
            f"  in ulps of the value  {_ratio(self.difference, self.ulp):.3g}",
            f"curvature / slope       {self.curvature:.3g}",
        ]
        lines = [
            f"value at θ              {self.value:.6g}",
            *(values if math.isfinite(self.value) else []),
            "lost by rounding        {:.1%} (params{})".format(*_most(self.lost)),
            *measured,
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
    sample: Callable[[jax.Array], Any] | None = None,
) -> Diagnosis:
    """Evaluates a function at a few points, and says what to set before a run.

    It evaluates a Python function four times at θ, and at two points along each of at
    most four directions, at the distance of the estimator: 12 evaluations. If the
    values at θ differ, it evaluates θ 12 more times, to separate the noise from the
    change of the function.

    A function that JAX traces is evaluated as by `find_smoothing`, and at the distance
    of the estimator: 300 evaluations. With `sample`, a learning rate is measured as by
    `find_learning_rate`.

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
    draw, state = Draw.once(key), chosen.init(params)
    dtype = _dtype_of(fun, params, sample, key)
    reasons: list[str] = []
    if dtype is None:
        if sample is not None:
            raise TypeError(
                "fun must be a function that JAX traces with sample; got one that it "
                "does not trace. Leave out sample, and pass a function of params alone."
            )
        points, _ = points_of(chosen, vectorized(1), draw, params, state)
        values = _by_hand(fun, params, points)
        found = values.diagnosis(trees.widest(params))
    else:
        probe = Probe(fun, sample, sphere(), vectorized(1)).checked(params, key)
        draw = draw._replace(fun=probe.loss_of(key, jnp.uint32(0)))
        points, _ = points_of(chosen, vectorized(1), draw, params, state)
        probe = probe._replace(distribution=points.directions.distribution)
        own = float(np.max(np.abs(points.scales)))
        # At a distance of 0, the loss at θ is evaluated twice more.
        table = Table.of(probe, params, key, 0.0, own)
        values = _Values.of_table(table, own)
        found = values.diagnosis(dtype)
        found, reasons = _with_settings(found, probe, params, key, table, own)
    found = found._replace(lost=rounded_away.by_rounding(points, params))
    return found._replace(advice=tuple(_advice(found, values, params, reasons)))


def _with_settings(
    found: Diagnosis, probe: Probe, params: Any, key: Any, table: Table, own: float
) -> tuple[Diagnosis, list[str]]:
    """The measurements with a smoothing and a rate, and what is wrong with the own."""
    reasons: list[str] = []
    try:
        far = table.smoothing()
        found = found._replace(smoothing=far)
        agreed = table.correlation(own, far.smoothing)
        is_near = 1 / _NEAR <= own / far.smoothing <= _NEAR
        if not (is_near or agreed >= _AGREEING):
            reasons = [
                f"differences at the smoothing {own:.2g} and at {far.smoothing:.2g} "
                f"have a correlation of {agreed:.2f}: {_instead(found)}"
            ]
    except ValueError as error:
        reasons = [f"no smoothing can be measured: {error}"]
    if probe.sample is None:
        return found, reasons
    try:
        rate = learning_rate.measured(probe, params, key)
    except ValueError as error:
        return found, [*reasons, f"no learning rate can be measured: {error}"]
    known = None if found.smoothing is None else found.smoothing.smoothing
    return found._replace(learning_rate=rate._replace(smoothing=known)), reasons


def _dtype_of(fun: Any, params: Any, sample: Any, key: jax.Array) -> Any:
    """The dtype of a function that JAX traces, `None` of another one."""
    traced: list[Any] = []

    def watched(params: optax.Params, key: jax.Array) -> Any:
        value = fun(params, *([] if sample is None else [sample(key)]))
        # A number that is known already was not computed by JAX.
        traced.append(isinstance(value, jax.core.Tracer))
        return value

    try:
        shape = jax.eval_shape(watched, params, key)
        return jnp.finfo(shape.dtype).dtype if traced[0] else None
    except Exception:
        return None


class _Values(NamedTuple):
    """Values of a function.

    Attributes:
      base: Repeated values at θ, each row at the same minibatch: [rows, repeats].
      moved: Values around θ, both ways along directions, one for each row of `base` if
        it has several: [directions, 2].
      failures: Texts about evaluations that failed.
    """

    base: np.ndarray
    moved: np.ndarray
    failures: tuple[str, ...] = ()

    @classmethod
    def of_table(cls, table: Table, own: float) -> "_Values":
        """The values at a distance of a table that has the distance 0 as well."""
        at = int(np.searchsorted(table.distances, np.float32(own)))
        base = np.concatenate([table.base, table.ahead[:, :1], table.back[:, :1]], 1)
        return cls(base, np.stack([table.ahead[:, at], table.back[:, at]], 1))

    def diagnosis(self, dtype: Any) -> Diagnosis:
        """The change of the function, without the part that noise has in it."""
        finite = np.isfinite(self.base)
        count = finite.sum(1)
        with np.errstate(all="ignore"):
            base = np.where(finite, self.base, 0).sum(1) / count
            errors = np.where(finite, self.base - base[:, None], 0)
            noise = math.sqrt(np.sum(errors**2) / np.sum(np.maximum(count - 1, 0)))
            change = self.moved - base[:, None]
        # The variances that noise gives to values around θ, and to means at θ.
        at_points, at_start = noise**2, noise**2 / self.base.shape[1]
        above, below = change.T
        slope = _signal((above - below) / 2, at_points / 2)
        curve = _signal((above + below) / 2, at_points / 2 + at_start)
        size = _signal(change, at_points + at_start)
        known = base[np.isfinite(base)]
        value = float(known.mean()) if known.size else math.nan
        spacing = _spacing(max(abs(value), size), dtype)
        curvature = _ratio(curve, slope)
        return Diagnosis(value, noise, size, spacing, curvature, {}, self.failures, ())


def _by_hand(fun: Any, params: Any, points: Points) -> _Values:
    """Values of a Python function, more of them if the values at θ differ."""
    points = rounded_away.moved(points).select(slice(_DIRECTIONS))
    forth = points.scales[:, :1]
    scales = jnp.concatenate([forth, -forth], axis=1)
    points = Points(points.directions, scales, True, points.layout)
    asked = jax.device_get(jax.jit(candidates)(points, params))
    failures: set[str] = set()

    def evaluate(order: list[int]) -> Any:
        try:
            with External().open(fun) as calls:
                points_of = jax.tree.map(lambda x: x[order], asked)
                outcome = calls.evaluate(points_of, distinct=False)
        except Mistake as mistake:
            raise TypeError(str(mistake)) from mistake.__cause__
        assert outcome is not None
        failures.update(outcome.failures.values())
        return outcome.values

    values = evaluate([0] * _REPEATS + list(range(1, points.num_points)))
    base, moved = values[:_REPEATS], values[_REPEATS:].reshape(-1, 2)
    if np.unique(base[np.isfinite(base)]).size > 1:
        base = np.append(base, evaluate([0] * _MORE))
    return _Values(base[None], moved, tuple(sorted(failures)))


def _instead(found: Diagnosis, otherwise: str = "") -> str:
    """The smoothing to take, or what to do without one that was measured."""
    if found.smoothing is None:
        return otherwise
    return f"take smoothing={found.smoothing.smoothing:.2g}"


def _advice(
    found: Diagnosis, values: _Values, params: Any, reasons: list[str]
) -> list[str]:
    """Settings to change."""
    everything = np.append(values.base, values.moved)
    failed = int(np.sum(~np.isfinite(everything)))
    text = f"fun failed at {failed} of {everything.size} points: find out why first"
    if not math.isfinite(found.value):
        return [f"{text}, or start elsewhere, because params have no value"]
    seen = _on_values(found, values, reasons)
    return [text] * bool(failed) + seen + _on_rounding(found, params)


def _on_values(found: Diagnosis, values: _Values, reasons: list[str]) -> list[str]:
    """Advice if something hides the change of the function, or magnifies it.

    Args:
      found: The measurements.
      values: The values.
      reasons: Advice on the smoothing, which tells more than curvature alone.
    """
    noise, difference, ulp = found.noise, found.difference, found.ulp

    def larger(factor: float) -> str:
        times = f"make smoothing {min(max(factor, 1.5), 10.0):.2g} times as large"
        return _instead(found, f"{times}, and check again")

    if noise == 0 and np.all(values.moved == values.base[:, :1]):
        return [
            f"fun did not change: does it use its argument? If it does, {larger(10)}"
        ]
    if noise > _NOISY * difference:
        return [
            "the noise of fun hides its change along u: "
            f"{larger(_ratio(noise, _NOISY * difference))}, or average more directions"
        ]
    if difference < _FEW_ULPS * ulp:
        return [
            f"fun changes by {difference / ulp:.2g} ulps: "
            f"{larger(_ratio(_FEW_ULPS * ulp, difference))}, subtract a constant from "
            "fun, or compute it in a wider dtype"
        ]
    if found.curvature > _NO_SLOPE:
        return ["fun has no slope at params, as at a minimum: diagnose it elsewhere"]
    if found.curvature > _CURVED and not reasons:
        return [
            f"curvature makes {found.curvature:.2g} times as much of a difference as "
            f"the slope: {_instead(found, 'make smoothing smaller')}, or central "
            "differences, unless params are at a minimum"
        ]
    return reasons


def _on_rounding(found: Diagnosis, params: optax.Params) -> list[str]:
    """Names the array that loses most by rounding, and what to do instead."""
    share, worst = _most(found.lost)
    if share <= _MUCH_LOST:
        return []
    more = sum(share > _MUCH_LOST for share in found.lost.values()) - 1
    return [
        f"params{worst} loses {share:.0%} of its perturbation by rounding"
        f"{f', and {more} more arrays lose much' if more else ''}: "
        f"{_instead(found, 'make smoothing larger')}, or keep it in a wider dtype; "
        "low_rank() perturbs no matrix"
    ]


def _most(shares: dict[str, float]) -> tuple[float, str]:
    """The largest share, and its array."""
    return max((share, name) for name, share in shares.items())


def _signal(changes: np.ndarray, variance: float) -> float:
    """The root mean square of changes without noise of this variance."""
    kept = changes[np.isfinite(changes)]
    square = np.mean(kept**2) if kept.size else np.nan
    return float(np.sqrt(np.maximum(square - variance, 0.0)))


def _spacing(value: float, dtype: Any) -> float:
    """The distance between two neighboring numbers of a dtype, at a value."""
    kind = jnp.finfo(dtype)
    if not math.isfinite(value):
        return math.nan
    binade = 2.0 ** math.floor(math.log2(abs(value))) if value else 0.0
    return float(max(binade, float(kind.tiny)) * float(kind.eps))


def _ratio(a: float, b: float) -> float:
    """Divides, to infinity if only `b` is 0, and to 0 if both are."""
    return a / b if b else math.inf if a else 0.0
