"""A learning rate for R-AdaZO on minibatches, measured before the run, with μ."""

import math
import sys
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from radazo_jax._src.base import checks, keys, trees
from radazo_jax._src.directions.distribution import Distribution
from radazo_jax._src.directions.distributions import sphere
from radazo_jax._src.estimates.contracts import Evaluator, Objective
from radazo_jax._src.estimates.vectorized import vectorized
from radazo_jax._src.measure.smoothing import (
    NearbyLosses,
    Probe,
    mean_at_start,
    no_change_error,
)

_PAIRS = 8  # Symmetric pairs of points, each on a minibatch of its own.
_MOST_SIZES = 20
# So many, if noise hides the rise at the size of the parameters.
_MOST_HIDDEN = 6
# Why the flatness is the size of the parameters.
_SMALL = "a change of this size raises the loss by less than was sought"
_HIDDEN = "noise hides a rise at this size"
_NONE = "no size showed a rise"
# The rise at which a change counts as large, of the loss or of its spread.
_SHARE, _SPREAD = 0.1, 0.5
_LEAST_SPREAD = 1e-5  # Of losses between minibatches, of the loss; less is rounding.

# η √((1 + β₁) T / (1 − β₁)) over the flatness, chosen on small networks.
_FACTOR = 1.2 * math.sqrt(19)

# Without a known end, the rate falls as 1/√(1 + t / _SLOW).
_SLOW = 100

# The number of steps whose first rate a run without a known end has.
_ENDLESS = 400


class DecayedRate(NamedTuple):
    """State of a learning rate that falls over a run.

    Attributes:
      count: t, the number of updates so far: int32, shape ().
      learning_rate: η of the latest update, or of the first if there is none yet:
        float32, shape ().
      initial_learning_rate: η of the first update: float32, shape ().
      num_steps: T, the number of updates after which the rate is 0; 0 if it is not
        known: int32, shape ().
      smoothing: μ of the run that was measured with the rate, NaN without: float32,
        shape ().
    """

    # `count` is the name that Optax's states have; it hides a method of tuple.
    count: jax.Array  # type: ignore[assignment]
    learning_rate: jax.Array
    initial_learning_rate: jax.Array
    num_steps: jax.Array
    smoothing: jax.Array

    @classmethod
    def of(
        cls, learning_rate: float, num_steps: int | None, smoothing: float | None = None
    ) -> "DecayedRate":
        """Returns the state before the first update."""
        # No two fields share a buffer, because runs donate their states.
        rate, first = (trees.as_scalar(learning_rate, np.float32) for _ in range(2))
        count, end = (trees.as_scalar(n, np.int32) for n in (0, num_steps or 0))
        far = trees.as_scalar(np.nan if smoothing is None else smoothing, np.float32)
        return cls(count, rate, first, end, far)

    def now(self) -> jax.Array:
        """Returns the rate of the next update: float32, shape ()."""
        t = jnp.asarray(self.count).astype(jnp.float32)
        end = jnp.asarray(self.num_steps).astype(jnp.float32)
        ending = jnp.maximum(1 - t / jnp.maximum(end, 1), 0)
        endless = jax.lax.rsqrt(1 + t / _SLOW)
        return self.initial_learning_rate * jnp.where(end > 0, ending, endless)


class LearningRate(NamedTuple):
    """A learning rate, and what it was computed from.

    Attributes:
      learning_rate: η of the first step; `schedule` has the rates of all steps.
      smoothing: μ of differences along the distribution, as `find_smoothing` measures
        it, or as the caller has named it.
      flatness: s, the root mean square per element of a random change of all
        parameters that raises the loss by `rise`, at most `rms` unless that is 0.
      rms: The root mean square of the parameters.
      limit: Why `flatness` is the size of the parameters; `None` if a rise was found.
      loss: The mean loss at the parameters, over the minibatches of the probe.
      rise: The rise of the loss that defines `flatness`.
      num_steps: T, the number of steps of the run; `None` if it is not known.
      b1: β₁, the decay rate of the first moment.
      num_evaluations: Number of evaluations that the probe took.
    """

    learning_rate: float
    smoothing: float | None
    flatness: float
    rms: float
    limit: str | None
    loss: float
    rise: float
    num_steps: int | None
    b1: float
    num_evaluations: int

    @property
    def schedule(self) -> Callable[[jax.typing.ArrayLike], jax.Array]:
        """η as an Optax schedule: from `learning_rate` linearly to 0 over the run.

        If the number of steps is not known, η of step t is `learning_rate` divided by
        √(1 + t/100).
        """
        rate = DecayedRate.of(self.learning_rate, self.num_steps)
        return lambda count: rate._replace(count=jnp.asarray(count)).now()

    def over(self, num_steps: int | None) -> "LearningRate":
        """Returns the rate for another number of steps, without an evaluation."""
        if num_steps is not None:
            checks.check_int_at_least("num_steps", num_steps, 2)
        scale = (1 - self.b1) / ((1 + self.b1) * (num_steps or _ENDLESS))
        rate = _FACTOR * self.flatness * math.sqrt(scale)
        return self._replace(learning_rate=rate, num_steps=num_steps)

    def __repr__(self) -> str:
        """Returns a report in plain text."""
        end = "falls as 1/√(1 + t/100)"
        if self.num_steps is not None:
            end = f"decayed to 0 over     {self.num_steps} steps"
        far, limit = self.smoothing, self.limit
        limited = f"  limited by the size of the parameters: {limit}"
        lines = [
            f"learning rate           {self.learning_rate:.3g}",
            f"  {end}",
            *([f"smoothing               {far:.3g}"] if far else []),
            f"flatness                {self.flatness:.3g}",
            *([limited] if limit else []),
            f"loss at params          {self.loss:.6g}",
            f"  rise that was probed  {self.rise:.3g}",
            f"evaluations             {self.num_evaluations}",
        ]
        return "\n".join(lines)


@checks.checks_names
def find_learning_rate(
    fun: Objective,
    params: optax.Params,
    num_steps: int | None,
    *,
    sample: Callable[[jax.Array], object] | None = None,
    b1: float = 0.9,
    key: jax.typing.ArrayLike = 0,
    distribution: Distribution = sphere(),
    evaluator: Evaluator = vectorized(batch_size=1),
    rise: float | None = None,
    smoothing: float | None = None,
    progress: bool = True,
) -> LearningRate:
    """Measures μ and a learning rate for R-AdaZO, decayed linearly to 0 over a run.

    μ is the one of `find_smoothing`, unless it is named. For the rate, it measures how
    far all parameters can move at random before the loss rises by a tenth, or a loss
    ≤ 0 by half its standard deviation between minibatches: the *flatness* s, the root
    mean square of such a change per element. Each size is tried by eight symmetric
    pairs of points, each on a minibatch of its own, the same for all sizes. The size
    is halved or doubled until it brackets the rise, and interpolated. If a change of
    the size of the parameters raises the loss by less, or no size shows a rise, as from
    a start above chance level, s is the root mean square of the parameters (1 if that
    is 0). The learning rate is

        η = 1.2 √19 · s √((1 − β₁) / ((1 + β₁) T))

    because a step of R-AdaZO moves an element by about η √((1 + β₁) / (1 − β₁)), and T
    of them add up as random steps. It holds for any number of directions.

    Use it for losses on minibatches, or if nothing is known of the scale of the
    parameters. It takes 17 to 104 evaluations in most cases, 220 more for μ, and the
    memory of an evaluation and of a direction of up to 2²⁴ elements. Most of the time
    of a first call is the compilation of one loop around the loss. `train` uses it
    if no optimizer is named. The default method of `minimize` needs no learning rate.

    Args:
      fun: The loss, `fun(params)` or, with `sample`, `fun(params, batch)`, as in
        `train`.
      params: θ at the start of the run: a tree of floating-point arrays.
      num_steps: T, the number of steps of the run, at least 2. If it is `None`, the
        rate is η at T = 400, and falls as 1/√(1 + t/100).
      sample: `sample(key)` returns a minibatch.
      b1: β₁ of the optimizer, in [0, 1).
      key: A key; it is consumed.
      distribution: The distribution of the random changes, such as the estimator's.
      evaluator: The evaluator. `vectorized` takes one point after the other here,
        whatever its batch size.
      rise: The rise of the loss at which a change counts as large; by default, a tenth
        of the loss at θ. The zero of a negative reward has no meaning: if the loss is
        ≤ 0, the default is half its standard deviation between eight minibatches.
      smoothing: μ, if it is known: it is then not measured.
      progress: Whether to print to standard error what is compiled and measured.

    Returns:
      The smoothing, the learning rate, and what it was computed from. `print` shows a
      report.

    Raises:
      TypeError, ValueError: If an argument has the wrong type or value; if the loss at
        θ is not finite, or not positive and the same on all minibatches, without
        `rise`; if it is constant, or rises too much at all sizes; as `find_smoothing`
        does.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> import radazo_jax as zo
      >>> def loss(params, batch):
      ...     return 1 + jnp.mean((params - batch) ** 2)
      >>> def sample(key):
      ...     return jax.random.normal(key, (32,))
      >>> params = jnp.full(32, 3.0)
      >>> found = zo.find_learning_rate(loss, params, 500, sample=sample)
      >>> print(found)
      learning rate           ...
        decayed to 0 over     500 steps
      ...
      >>> optimizer = zo.radazo(found.schedule, bias_correction=True)
      >>> estimator = zo.forward_difference(smoothing=found.smoothing)
    """
    params = checks.as_params(params)
    if num_steps is not None:
        checks.check_int_at_least("num_steps", num_steps, 2)
    checks.check_unit_interval("b1", b1)
    if rise is not None:
        checks.check_positive("rise", rise)
    if smoothing is not None:
        checks.check_positive("smoothing", smoothing)
    probe = Probe(fun, sample, params, keys.as_key(key), distribution, evaluator)
    probe = probe.checked()
    if progress:
        both = "" if smoothing is not None else " and the smoothing"
        size = f"{trees.size(params):,} parameters"
        text = f"Compiling the loss, and measuring the learning rate{both}: {size}"
        print(text, file=sys.stderr)
    found = endless_rate(probe, rise, b1).over(num_steps)
    if smoothing is not None:
        return found._replace(smoothing=float(smoothing))
    return with_measured_smoothing(found, probe)


def with_measured_smoothing(found: LearningRate, probe: Probe) -> LearningRate:
    """Returns the rate together with the smoothing that is measured.

    Raises:
      ValueError: As `find_smoothing` does for a loss.
    """
    of = NearbyLosses.of(probe).smoothing()
    count = found.num_evaluations + of.num_evaluations
    return found._replace(smoothing=of.smoothing, num_evaluations=count)


def endless_rate(
    probe: Probe, rise: float | None = None, b1: float = 0.9
) -> LearningRate:
    """Measures the learning rate of a run whose end is not known.

    Args:
      probe: The loss, with traced functions.
      rise: The rise of the loss at which a change counts as large.
      b1: β₁ of the optimizer.

    Raises:
      ValueError: As `find_learning_rate` does for a loss.
    """
    count = 1 if probe.sample is None else _PAIRS
    losses = probe.losses(count, [0.0])
    loss, rms = mean_at_start(losses), probe.rms
    sought = _rise(losses) if rise is None else float(rise)

    def relative_rise(size: float) -> float:
        pair = size * probe.unit, -size * probe.unit
        # Of a constant, exactly 0.
        found = float(np.mean(probe.losses(_PAIRS, pair) - losses))
        return found / sought if math.isfinite(found) else math.inf

    flatness, limit, num_sizes = _flatness(relative_rise, rms, loss)
    taken = count + 2 * _PAIRS * num_sizes
    return LearningRate(
        math.nan, None, flatness, rms, limit, loss, sought, None, float(b1), taken
    ).over(None)


def _rise(losses: np.ndarray) -> float:
    """Returns the rise that counts as large, from the losses of minibatches at θ."""
    loss = float(np.mean(losses))
    if loss > 0:
        return _SHARE * loss
    spread = float(np.std(losses, ddof=1)) if len(losses) > 1 else 0.0
    if spread <= _LEAST_SPREAD * abs(loss):
        raise ValueError(
            "fun must be positive at params, or differ between minibatches, without "
            f"rise; got {loss:.6g}. Pass rise to find_learning_rate, the rise of the "
            "loss that counts as large."
        )
    return _SPREAD * spread


def _flatness(
    rise: Callable[[float], float], rms: float, loss: float
) -> tuple[float, str | None, int]:
    """Finds the size at which a relative rise is 1.

    Args:
      rise: The rise at a size, relative to the rise that is sought.
      rms: The largest size, unless it is 0.
      loss: The loss at θ.

    Returns:
      The size; why it is the largest one, if it is; and the number of sizes tried.
    """
    largest = rms or 1.0
    size, found = largest, rise(largest)
    if rms and 0 < found <= 1:
        return largest, _SMALL, 1
    factor = 2.0 if found <= 1 else 0.5
    hidden, changes = rms > 0 and found <= 0, found != 0
    most = _MOST_HIDDEN if hidden else _MOST_SIZES
    for tried in range(2, most + 1):
        following, at_following = size * factor, rise(size * factor)
        if hidden and at_following > 0:
            return largest, _HIDDEN, tried
        if (at_following <= 1) != (found <= 1):
            return _between(size, found, following, at_following), None, tried
        size, found = following, at_following
        changes |= found != 0
    if found <= 1 and changes:
        return largest, _NONE, most
    if not changes:
        raise no_change_error(loss, size)
    raise ValueError(
        "fun must rise with a random change of params; at a change of "
        f"{size:.3g} per element it rose by {found:.3g} times rise. Pass another rise "
        "to find_learning_rate, or start elsewhere."
    )


def _between(size: float, rise: float, other: float, at_other: float) -> float:
    """Interpolates the size between two at which the rise is 1, by a power law."""
    (low, below), (high, above) = sorted([(size, rise), (other, at_other)])
    if not 0 < below < above < math.inf:
        return math.sqrt(low * high)
    share = math.log(1 / below) / math.log(above / below)
    return low * (high / low) ** share
