"""Measurements of a function by a few evaluations, before a run."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from radazo_jax._src import checks, programs, trees
from radazo_jax._src.base import (
    Draw,
    GradientEstimator,
    Objective,
    Points,
    candidates,
)
from radazo_jax._src.directions.dense import sphere
from radazo_jax._src.estimators.gradients import points_of
from radazo_jax._src.evaluators.external import External
from radazo_jax._src.evaluators.vectorized import vectorized
from radazo_jax._src.numbers import keys
from radazo_jax._src.runs import classes, learning_rate, lost
from radazo_jax._src.runs.advice import Used, advised
from radazo_jax._src.runs.learning_rate import Evaluated, LearningRate
from radazo_jax._src.runs.repeats import Repeats, measures, ratio
from radazo_jax._src.steps import draws
from radazo_jax._src.steps.defaults import is_staged, method

_DIRECTIONS = 4
_REPEATS = 4

# Evaluations added if the first ones at θ differ: at θ, and at each other point.
_MORE_AT_START, _MORE_AT_POINTS = 12, 3


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
      kind: The class that the default method finds: "smooth", "scaled", "noisy",
        "in steps", "failing" (at some points) or "constant". Empty if an estimator is
        named, and above 100 parameters.
      sizes: The sizes of the parameters if the class is "scaled", a tree like them to
        pass as `scale`; otherwise `None`.
      learning_rate: The learning rate of `find_learning_rate`, of a run whose number of
        steps is not known; `None` without `sample`, or if there is none.
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
    kind: str = ""
    sizes: Any = None
    learning_rate: LearningRate | None = None

    def __repr__(self) -> str:
        """A report in plain text."""
        updates = []
        if self.lost_updates:
            updates = [f"  of an update          {_worst(self.lost_updates)}"]
        rate = []
        if self.learning_rate is not None:
            taken = self.learning_rate.learning_rate
            rate = [f"learning rate           {taken:.3g} / √(1 + t/100)"]
        lines = [
            *([f"class                   {self.kind}"] if self.kind else []),
            f"value at θ              {self.value:.6g}",
            f"noise at one point      {self.noise:.3g}{_shown(self.noise_range)}",
            f"difference along u      {self.difference:.3g}"
            f"{_shown(self.difference_range)}",
            f"  in units of the noise {ratio(self.difference, self.noise):.3g}",
            f"  in ulps of the value  {ratio(self.difference, self.ulp):.3g}",
            f"curvature / slope       {self.curvature:.3g}",
            f"lost by rounding        {_worst(self.lost)}",
            *updates,
            *rate,
            *(f"failed                  {text}" for text in self.failures),
            *(f"→ {text}" for text in self.advice or ("nothing to mend",)),
        ]
        return "\n".join(lines)


def diagnose(
    fun: Objective,
    params: optax.Params,
    estimator: GradientEstimator | None = None,
    key: jax.typing.ArrayLike = 0,
    optimizer: optax.GradientTransformation | None = None,
    *,
    sample: Callable[[jax.Array], Any] | None = None,
) -> Diagnosis:
    """Evaluates a function at a few points, and says what to set before a run.

    Without an estimator and up to 100 parameters, the default method takes its first
    steps, up to the one that moves: d + 2 evaluations, and at most ten times d + 1 more
    if it seeks the sizes of parameters, or a step of `cma` if differences are 0. They
    tell the class of the function.

    Then it evaluates θ four times, and two points along each of at most four
    directions, at the distance of the estimator: 12 evaluations. If the values at θ
    differ, it evaluates θ 12 more times and each other point 3 more times, to separate
    the noise from the change of the function: 48 evaluations. With `sample`, all this
    is measured on one minibatch, without a class, and then a learning rate as by
    `find_learning_rate`.

    Args:
      fun: A function of the parameters, as in `minimize` or `minimize_black_box`. One
        that JAX can trace is compiled.
      params: θ, a tree of floating-point arrays.
      estimator: The estimator of the run; by default the default method's.
      key: A key; it is consumed.
      optimizer: The optimizer of the run. If it is given, it takes 30 updates with the
        gradient along the directions, at θ, and the last one is compared with its
        rounded sum with θ. This tells whether `stochastic_rounding` is needed.
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
      → fun changes by ... ulps: make smoothing ... times as large, ...

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

      The class of a function of few parameters:

      >>> import numpy as np
      >>> zo.diagnose(lambda x: float(np.sum(np.floor(x))), np.full(2, 0.3)).kind
      'in steps'
    """
    minibatches = sample is not None
    default = method(None, estimator, None, params, minibatches)
    staged = is_staged(None, None, None, params, minibatches)
    if estimator is not None or not staged:
        return _measured_at(fun, params, default[1], key, optimizer, sample)
    params = trees.with_float64(params)
    look = classes.first_look(fun, params, key)
    with trees.precision_of(params):
        found = _measured_at(fun, params, default[1], key, optimizer)
    return _classified(found, look)


def _classified(found: Diagnosis, look: classes.Look) -> Diagnosis:
    """The measurements with the class of the function, and what it advises."""
    # The default method has no smoothing to change.
    kept = found.advice if look.kind == classes.FAILING else ()
    advice = (classes.ADVICE[look.kind],) if look.kind in classes.ADVICE else kept
    return found._replace(kind=look.kind, sizes=look.sizes, advice=advice)


def _measured_at(
    fun: Objective,
    params: optax.Params,
    estimator: GradientEstimator,
    key: jax.typing.ArrayLike,
    optimizer: optax.GradientTransformation | None,
    sample: Callable[[jax.Array], Any] | None = None,
) -> Diagnosis:
    """The measurements at the distances of an estimator."""
    arrays = checks.as_params(params)
    checks.warn_of_float32(params)
    params, of_batches = arrays, fun
    if sample is not None:
        batch = sample(draws.key_of(keys.as_key(key), jnp.uint32(0), draws.BATCH))
        fun = functools.partial(_on_batch, of_batches, batch)
    state = estimator.init(params)
    traced = _traceable(fun, params)
    if sample is not None and not traced:
        raise TypeError(
            "fun must be a function that JAX traces with sample; got one that it does "
            "not trace. Leave out sample, and pass a function of params alone."
        )
    if traced and not programs.are_disabled():
        fun = programs.traced(fun, params)
    draw = Draw.once(key)._replace(fun=fun if traced else None)
    points, _ = points_of(estimator, vectorized(1), draw, params, state)
    used = Used.of(points, params)
    points = _both_ways(points)
    values = _measured((_by_jax if traced else _by_hand)(fun, params, points))
    shares = lost.by_rounding(points, params)
    of_updates = {}
    if optimizer is not None:
        moved, value = values.moved.mean(0), float(values.base.mean())
        of_updates = lost.of_updates(
            optimizer, points, moved, value, params, fun if traced else None
        )
    found = _judged(values, shares, of_updates, used)
    if sample is None:
        return found
    distribution = getattr(points.directions, "distribution", sphere())
    probe = Evaluated(of_batches, sample, distribution, vectorized(1))
    return _with_rate(found, probe, params, keys.as_key(key))


def _on_batch(fun: Objective, batch: Any, params: optax.Params) -> Any:
    return fun(params, batch)


def _with_rate(
    found: Diagnosis, probe: Evaluated, params: optax.Params, key: jax.Array
) -> Diagnosis:
    """The measurements with a learning rate, or with the reason why there is none."""
    try:
        rate = learning_rate.measured(probe.traced(params, key), params, key)
    except ValueError as error:
        text = f"no learning rate can be measured: {error}"
        return found._replace(advice=(*found.advice, text))
    return found._replace(learning_rate=rate)


def _both_ways(points: Points) -> Points:
    """θ, and both ways along the first directions."""
    few = lost.moved(points).select(slice(_DIRECTIONS))
    forth = few.scales[:, :1]
    scales = jnp.concatenate([forth, -forth], axis=1)
    return Points(few.directions, scales, True, points.layout)


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
_Evaluate = Callable[[int, int], Repeats]


def _measured(evaluate: _Evaluate) -> Repeats:
    """The values, with more repetitions if the values at θ differ."""
    few = evaluate(_REPEATS, 1)
    if np.unique(few.base[np.isfinite(few.base)]).size < 2:
        return few
    more = evaluate(_MORE_AT_START, _MORE_AT_POINTS)
    return Repeats(
        np.concatenate([few.base, more.base]),
        np.concatenate([few.moved, more.moved]),
        few.dtype,
        tuple(sorted({*few.failures, *more.failures})),
    )


def _by_jax(
    fun: Callable[[optax.Params], Any], params: optax.Params, points: Points
) -> _Evaluate:
    at_points = programs.of(_along, fun, params, points)
    again = programs.of(_at_params, fun, params)

    def evaluate(at_start: int, at_points_each: int) -> Repeats:
        moved = [at_points(params, points) for _ in range(at_points_each)]
        base = [again(params) for _ in range(at_start)]
        others = np.array(moved, np.float64).reshape(at_points_each, -1, 2)
        return Repeats(np.array(base, np.float64), others, moved[0].dtype, ())

    return evaluate


def _along(
    fun: Callable[[optax.Params], Any], params: optax.Params, points: Points
) -> jax.Array:
    """The values at the points along directions, in one row."""
    values, _ = vectorized(1).evaluate(fun, params, points, False)
    return values.along.reshape(-1)


def _at_params(fun: Callable[[optax.Params], Any], params: optax.Params) -> Any:
    return checks.checked_loss(fun, False)(params)[0]


def _by_hand(
    fun: Callable[[optax.Params], Any], params: optax.Params, points: Points
) -> _Evaluate:
    asked = jax.device_get(jax.jit(candidates)(points, params))
    others = list(range(1, points.num_points))

    def evaluate(at_start: int, at_points_each: int) -> Repeats:
        order = np.array([0] * at_start + others * at_points_each)
        with External().open(fun) as calls:
            outcome = calls.repeat(jax.tree.map(lambda x: x[order], asked))
        assert outcome is not None
        return Repeats(
            outcome.values[:at_start],
            outcome.values[at_start:].reshape(at_points_each, -1, 2),
            trees.widest(params),
            tuple(sorted(set(outcome.failures.values()))),
        )

    return evaluate


def _judged(
    values: Repeats, shares: dict[str, float], of_updates: dict[str, float], used: Used
) -> Diagnosis:
    found = measures(values)
    ulp = float(np.spacing(np.abs(np.asarray(found.value, values.dtype))))
    advice = advised(values, found, ulp, shares, of_updates, used)
    return Diagnosis(
        found.value,
        found.noise,
        found.noise_range,
        found.difference,
        found.difference_range,
        ulp,
        found.curvature,
        shares,
        of_updates,
        values.failures,
        tuple(advice),
    )


def _worst(shares: dict[str, float]) -> str:
    """The largest share, and its array, as reports print them."""
    name = max(shares, key=lambda name: shares[name])
    return f"{shares[name]:.1%} (params{name})"


def _shown(interval: tuple[float, float]) -> str:
    """A range, as reports print it; nothing if it is a single number."""
    least, most = interval
    return f" (95 %: {least:.3g} to {most:.3g})" if least < most else ""
