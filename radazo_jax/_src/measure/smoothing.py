"""A smoothing for a loss that JAX traces, measured before the run, and its probe."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from radazo_jax._src.base import checks, keys, programs, trees, xla
from radazo_jax._src.directions import storage
from radazo_jax._src.directions.distribution import Distribution
from radazo_jax._src.directions.distributions import sphere
from radazo_jax._src.estimates.contracts import (
    Evaluator,
    Loss,
    Objective,
    Points,
    check_evaluator,
)
from radazo_jax._src.estimates.differences import check_distribution
from radazo_jax._src.estimates.gradients import values_at
from radazo_jax._src.estimates.vectorized import Vectorized, vectorized
from radazo_jax._src.perturb import transform
from radazo_jax._src.steps import box, step
from radazo_jax._src.steps.box import Bounds

# The most directions and distances of a call, whose losses share a program.
_MOST = 20, 16

# Of the probe: chosen on networks with steps and without. Still shorter distances would
# agree with each other if no step lies between them.
_DIRECTIONS, _SIZES, _FACTOR = 20, 5, 4.0

# A longer distance is chosen if it agrees by less than the best, by about the error
# (1 − a²)/√n of a correlation a.
_TOLERANCE = 0.3


class Probe(NamedTuple):
    """A loss on minibatches within bounds, evaluated along random directions.

    Attributes:
      fun: The loss.
      sample: A function from a key to a minibatch; `None` without.
      params: θ.
      key: A typed key. Probes with the same key have the same directions and
        minibatches.
      distribution: The distribution of the directions.
      evaluator: The evaluator of the points.
      bounds: The box in which the points stay; `None` without.
    """

    fun: Any
    sample: Callable[[jax.Array], object] | None
    params: optax.Params
    key: jax.Array
    distribution: Distribution
    evaluator: Evaluator
    bounds: Bounds | None = None

    def checked(self) -> "Probe":
        """Returns the probe with its functions as they are now, and checked."""
        check_distribution(self.distribution)
        check_evaluator(self.evaluator)
        if programs.are_disabled():
            return self
        fun, sample = step.traced_functions(
            self.fun, self.sample, self.params, self.key
        )
        return self._replace(fun=fun, sample=sample)

    @property
    def unit(self) -> float:
        """The distance that moves a parameter by 1, in the root mean square."""
        return math.sqrt(self.distribution.factor(trees.size(self.params)))

    @property
    def rms(self) -> float:
        """The root mean square of the elements of all parameters."""
        total = float(_norm(self.params, trees.widest(self.params)))
        return total / max(trees.size(self.params), 1) ** 0.5

    def loss_of(self, number: jax.Array) -> Loss:
        """Returns the loss on a minibatch, by its number."""
        batch: tuple[object, ...] = ()
        if self.sample is not None:
            batch = (self.sample(step.key_of(self.key, number, step.BATCH)),)
        return lambda params: self.fun(box.project(self.bounds, params), *batch)

    def losses(
        self, num_directions: int, distances: Sequence[float] | np.ndarray
    ) -> np.ndarray:
        """Evaluates the losses along directions, each on a minibatch of its own.

        Args:
          num_directions: The number of directions, at most 20.
          distances: The distances from θ along each direction, at most 16.

        Returns:
          The losses: float64, [num_directions, distances].
        """
        given = np.asarray(distances, np.float32)
        run = self
        if isinstance(self.evaluator, Vectorized):
            # In turn whatever the batch size, so that the loss is compiled once.
            given = np.resize(given, _MOST[1])
            run = self._replace(evaluator=vectorized(batch_size=1))
        counts = [
            trees.as_scalar(n, np.int32) for n in (num_directions, len(distances))
        ]
        args = jnp.asarray(given), *counts
        found = np.asarray(programs.of(_losses, run, *args)(*args), np.float64)
        return found[:num_directions, : len(distances)]


def _losses(
    probe: Probe,
    distances: jax.Array,
    num_directions: jax.Array,
    num_distances: jax.Array,
) -> jax.Array:
    """Returns the losses, with zeros at the end: [20, distances]."""
    params = probe.params
    distances = distances.astype(trees.widest(params))

    def along(number: jax.Array, found: jax.Array) -> jax.Array:
        of = number.astype(jnp.uint32)
        loss = probe.loss_of(of)
        own = step.key_of(probe.key, of, step.DIRECTIONS)
        layout = transform.layout_for(probe.distribution, loss, params)
        directions = storage.sample_one(probe.distribution, own, layout)
        if not isinstance(probe.evaluator, Vectorized):
            points = Points(directions, distances[None], False, layout)
            points = probe.evaluator.cache(points)
            values, _ = values_at(probe.evaluator, loss, params, points)
            return found.at[number].set(values.along[0].astype(found.dtype))
        scalar = checks.checked_loss(loss, False)
        direction = jax.tree.map(lambda x: x[0], directions)

        def at(i: jax.Array, found: jax.Array) -> jax.Array:
            # Tied to the loop, ahead of which unstored elements would be drawn.
            u = xla.tie(direction, i) if direction.cached is None else direction
            value, _ = transform.evaluate(scalar, params, layout, u, distances[i])
            return found.at[number, i].set(value.astype(found.dtype))

        return lax.fori_loop(0, num_distances, at, found)

    widest = jax.dtypes.canonicalize_dtype(np.float64)
    found = jnp.zeros((_MOST[0], len(distances)), widest)
    return lax.fori_loop(0, num_directions, along, found)


_norm = jax.jit(trees.norm, static_argnums=1)


class Smoothing(NamedTuple):
    """A smoothing, and what it was chosen by.

    Attributes:
      smoothing: μ, in units of the length of a direction of the distribution.
      agreement: The largest agreement of a distance: at most 1, and about 1 for smooth
        functions.
      distances: The distances that were tried, from short to long: [m].
      agreements: The agreement at each distance, NaN if a loss there is not finite:
        [m].
      num_evaluations: The number of evaluations that the probe took.
    """

    smoothing: float
    agreement: float
    distances: tuple[float, ...]
    agreements: tuple[float, ...]
    num_evaluations: int

    def __repr__(self) -> str:
        """Returns a report in plain text."""
        pairs = zip(self.distances, self.agreements, strict=True)
        lines = [
            f"smoothing               {self.smoothing:.3g}",
            "distance and agreement  "
            + ", ".join(f"{far:.2g}: {shown:.2f}" for far, shown in pairs),
            f"evaluations             {self.num_evaluations}",
        ]
        return "\n".join(lines)


@checks.checks_names
def find_smoothing(
    fun: Objective,
    params: optax.Params,
    *,
    sample: Callable[[jax.Array], object] | None = None,
    key: jax.typing.ArrayLike = 0,
    distribution: Distribution = sphere(),
    evaluator: Evaluator = vectorized(batch_size=1),
) -> Smoothing:
    """Measures how far from θ to evaluate a loss, for differences along directions.

    Rounding, signs, spikes and the choice of the largest make a loss jump. Short
    differences then show the jumps, and long ones the curvature. In between, a
    difference shows a slope that holds at other distances, too. The loss is evaluated
    at θ ± sᵢu at five distances sᵢ along the same twenty directions u, each on a
    minibatch of its own. With oᵢ the odd part of the two differences from the loss at
    θ, and eᵢ the even part, vectors over the directions, the agreement of a distance is

        aᵢ = Σⱼ j² ⟨oᵢ, oⱼ⟩ / (|oⱼ| √(|oᵢ|² + |eᵢ|²)) / Σⱼ j²,    j ≠ i

    the correlation of its forward differences with the odd parts at the other
    distances, of which longer ones weigh more. μ is the longest distance whose
    agreement is at least a − 0.3 (1 − a²), with a the largest, or half of it if it is
    not the one with a. The distances move a parameter by the root mean square of all
    parameters (1 if that is 0), and by 1/4, 1/16 … 1/256 of it, rounded to a power of
    two.

    Use it for networks with rounding, signs or spikes, in loops that name an optimizer.
    `train` and `find_learning_rate` measure μ by themselves. It takes 220
    evaluations, and the memory of an evaluation and of a direction of up to 2²⁴
    elements.

    Args:
      fun: The loss, `fun(params)` or, with `sample`, `fun(params, batch)`, as in
        `train`.
      params: θ at the start of the run: a tree of floating-point arrays.
      sample: `sample(key)` returns a minibatch.
      key: A key; it is consumed.
      distribution: The distribution of the directions, such as the estimator's: μ is
        in units of their length.
      evaluator: The evaluator. `vectorized` takes one point after the other here,
        whatever its batch size.

    Returns:
      The smoothing, and the agreement of all distances. `print` shows a report.

    Raises:
      TypeError, ValueError: If an argument has the wrong type or value; if the loss is
        not finite at θ, or at all but one distance; if it is constant.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> import radazo_jax as zo
      >>> inputs = jax.random.normal(jax.random.key(0), (64, 8))
      >>> def loss(params):  # Its derivative is 0.
      ...     return jnp.mean((jnp.sign(inputs @ params) - jnp.sign(inputs[:, 0])) ** 2)
      >>> found = zo.find_smoothing(loss, jnp.ones(8))
      >>> print(found)
      smoothing               ...
      distance and agreement  ...
      evaluations             220
      >>> estimator = zo.forward_difference(smoothing=found.smoothing)
    """
    params, key = checks.as_params(params), keys.as_key(key)
    probe = Probe(fun, sample, params, key, distribution, evaluator)
    return NearbyLosses.of(probe.checked()).smoothing()


def mean_at_start(losses: np.ndarray) -> float:
    """Returns the mean of the losses at θ; raises if it is not finite."""
    loss = float(np.mean(losses))
    if not math.isfinite(loss):
        raise ValueError(
            f"fun must be finite at params; got {loss}. Start elsewhere, or check that "
            "sample returns examples."
        )
    return loss


def no_change_error(loss: float, size: float) -> ValueError:
    """Returns the error of a loss that is the same up to this change per element."""
    return ValueError(
        f"fun must change with params; got {loss:.6g} at all points up to a change of "
        f"{size:.3g} per element. Start elsewhere."
    )


class NearbyLosses(NamedTuple):
    """The losses at θ and around it, along several directions.

    Attributes:
      distances: The distances to choose from, from short to long: [m].
      unit: The distance that moves a parameter by 1, in the root mean square.
      base: The losses at θ, on the minibatches of the directions: [directions, 1].
      ahead: The losses at the distances along the directions: [directions, m].
      back: Likewise on the other side of θ.
      further: The losses at the distances of the caller: [directions, k].
    """

    distances: np.ndarray
    unit: float
    base: np.ndarray
    ahead: np.ndarray
    back: np.ndarray
    further: np.ndarray

    @classmethod
    def of(cls, probe: Probe, *further: float) -> "NearbyLosses":
        """Evaluates the losses of a probe with traced functions."""
        # Powers of two, so that runs share μ. The state of a run holds it in float32,
        # and must continue with the same.
        longest = 2.0 ** round(math.log2(probe.rms or 1.0))
        sizes = longest / _FACTOR ** np.arange(_SIZES - 1.0, -1.0, -1.0)
        tried = (probe.unit * sizes).astype(np.float32)
        around = np.concatenate([[0.0], tried, -tried, further])
        losses = probe.losses(_DIRECTIONS, around)
        parts = np.split(losses, [1, 1 + _SIZES, 1 + 2 * _SIZES], axis=1)
        return cls(tried, probe.unit, *parts)

    def smoothing(self) -> Smoothing:
        """Returns the smoothing according to the losses.

        Raises:
          ValueError: As `find_smoothing` does for a loss.
        """
        base, tried = mean_at_start(self.base), self.distances
        usable = np.isfinite(self.ahead).all(0) & np.isfinite(self.back).all(0)
        if usable.sum() < 2:
            raise ValueError(
                "fun must be finite around params; got values that are not, already at "
                f"a change of {tried[1] / self.unit:.3g} per element. Start elsewhere."
            )
        if np.all(self.ahead[:, usable] == self.base):
            raise no_change_error(base, tried[usable][-1] / self.unit)
        pairs = _correlations(self.base, self.ahead[:, usable], self.back[:, usable])
        weights = np.tile(np.arange(1.0, len(pairs) + 1) ** 2, (len(pairs), 1))
        np.fill_diagonal(weights, 0)
        found = np.full(_SIZES, np.nan)
        found[usable] = np.sum(weights * pairs, axis=1) / np.sum(weights, axis=1)
        best = np.nanmax(found)
        last = np.flatnonzero(found >= best - _TOLERANCE * (1 - best**2))[-1]
        # If the longest one is not the best, what helps most is between the two.
        far = tried[last] if found[last] == best else tried[last] / math.sqrt(_FACTOR)
        return Smoothing(
            smoothing=float(far),
            agreement=float(best),
            distances=tuple(tried.tolist()),
            agreements=tuple(found.tolist()),
            num_evaluations=self.base.size + self.ahead.size + self.back.size,
        )

    def correlation(self, ahead: np.ndarray, back: np.ndarray, other: float) -> float:
        """Returns the correlation of differences with odd parts farther away.

        Args:
          ahead: The losses at a distance along the directions: [directions].
          back: Likewise on the other side of θ.
          other: Another distance. The next longer one that was tried has the odd parts.
        """
        at = np.searchsorted(self.distances, np.float32(other))
        sides = (ahead, self.ahead[:, at]), (back, self.back[:, at])
        return float(_correlations(self.base, *(np.stack(x, 1) for x in sides))[0, 1])


def _correlations(base: np.ndarray, ahead: np.ndarray, back: np.ndarray) -> np.ndarray:
    """Returns the correlation of differences with odd parts, for each two distances.

    Args:
      base: The losses f(θ), [directions, 1].
      ahead: The losses f(θ + sᵢ u), [directions, m], from short to long.
      back: The losses f(θ − sᵢ u), likewise.

    Returns:
      The correlation of the differences at sᵢ with the odd parts at sⱼ: [m, m].
    """
    ahead, back = ahead - base, back - base
    odd, even = (ahead - back) / 2, (ahead + back) / 2
    length = np.sqrt(np.sum(odd**2, axis=0))
    whole = np.sqrt(np.sum(odd**2 + even**2, axis=0))
    scale = np.outer(whole, length)
    pairs = np.divide(odd.T @ odd, scale, out=np.zeros_like(scale), where=scale != 0)
    return np.clip(pairs, -1, 1)  # Of a linear function, rounding makes them exceed 1.
