"""A smoothing for a loss that JAX traces, measured before the run."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from radazo_jax._src.base import checks, keys, trees
from radazo_jax._src.directions.distribution import Distribution
from radazo_jax._src.directions.distributions import sphere
from radazo_jax._src.estimates.contracts import Evaluator, Objective
from radazo_jax._src.estimates.vectorized import vectorized
from radazo_jax._src.measure.probes import Probe, root_mean_square

# Of the probe: chosen on networks with steps and without. Still shorter distances would
# agree with each other if no step lies between them.
_DIRECTIONS, _SIZES, _FACTOR = 20, 5, 4.0

# A longer distance is chosen if it agrees by less than the best, by about the error
# (1 − a²)/√n of a correlation a.
_TOLERANCE = 0.3


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
        """A report in plain text."""
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
    sample: Callable[[jax.Array], Any] | None = None,
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
    probe = Probe(fun, sample, distribution, evaluator).checked(params, key)
    return Table.of(probe, params, key).smoothing()


def unchanged(loss: float, size: float) -> ValueError:
    """The error of a loss that is the same up to this change per element."""
    return ValueError(
        f"fun must change with params; got {loss:.6g} at all points up to a change of "
        f"{size:.3g} per element. Start elsewhere."
    )


class Table(NamedTuple):
    """The losses at θ and around it, along several directions.

    Attributes:
      distances: All distances, also the caller's, from short to long: [m].
      usual: Whether a distance is one of those to choose from: [m].
      unit: The distance that moves a parameter by 1, in the root mean square.
      base: The losses at θ, on the minibatches of the directions: [directions, 1].
      ahead: The losses at the distances along the directions: [directions, m].
      back: Likewise on the other side of θ.
    """

    distances: np.ndarray
    usual: np.ndarray
    unit: float
    base: np.ndarray
    ahead: np.ndarray
    back: np.ndarray

    @classmethod
    def of(
        cls, probe: Probe, params: optax.Params, key: jax.Array, *own: float
    ) -> "Table":
        """Evaluates the losses.

        Args:
          probe: The loss, with traced functions.
          params: θ.
          key: A typed key.
          *own: Further distances, from which none is chosen.
        """
        unit = math.sqrt(probe.distribution.factor(trees.size(params)))
        # The state of a run holds μ in float32, and must continue with the same.
        usual = (unit * _sizes(params)).astype(np.float32)
        tried = np.unique(np.append(usual, np.asarray(own, np.float32)))
        around = np.concatenate([[0.0], tried, -tried])
        losses = probe.losses(params, key, _DIRECTIONS, around)
        parts = np.split(losses, [1, 1 + len(tried)], axis=1)
        return cls(tried, np.isin(tried, usual), unit, *parts)

    @property
    def num_evaluations(self) -> int:
        """The number of evaluations."""
        return self.base.size + self.ahead.size + self.back.size

    def smoothing(self) -> Smoothing:
        """The smoothing according to the losses.

        Raises:
          ValueError: As `find_smoothing` does for a loss.
        """
        base, tried = self.base.mean(), self.distances[self.usual]
        ahead, back = self.ahead[:, self.usual], self.back[:, self.usual]
        usable = np.isfinite(ahead).all(0) & np.isfinite(back).all(0)
        if not math.isfinite(base):
            raise ValueError(
                f"fun must be finite at params; got {base}. Start elsewhere, or check "
                "that sample returns examples."
            )
        if usable.sum() < 2:
            raise ValueError(
                "fun must be finite around params; got values that are not, already at "
                f"a change of {tried[1] / self.unit:.3g} per element. Start elsewhere."
            )
        if np.all(ahead[:, usable] == self.base):
            raise unchanged(base, tried[usable][-1] / self.unit)
        found = np.full(len(tried), np.nan)
        found[usable] = _agreements(*(x[:, usable] - self.base for x in (ahead, back)))
        best = np.nanmax(found)
        last = np.flatnonzero(found >= best - _TOLERANCE * (1 - best**2))[-1]
        # If the longest one is not the best, what helps most is between the two.
        far = tried[last] if found[last] == best else tried[last] / math.sqrt(_FACTOR)
        return Smoothing(
            float(far),
            float(best),
            tuple(tried.tolist()),
            tuple(found.tolist()),
            self.num_evaluations,
        )

    def correlation(self, far: float, other: float) -> float:
        """The correlation of differences at a distance with the odd part at another.

        The other one is the next longer one that was tried.
        """
        at = np.searchsorted(self.distances, np.array([far, other], np.float32))
        ahead, back = (x[:, at] - self.base for x in (self.ahead, self.back))
        return float(_correlations(ahead, back)[0, 1])


def _correlations(ahead: np.ndarray, back: np.ndarray) -> np.ndarray:
    """The correlation of differences with odd parts, for each two distances: [m, m].

    Args:
      ahead: The differences f(θ + sᵢ u) − f(θ), [directions, m], from short to long.
      back: The differences f(θ − sᵢ u) − f(θ), likewise.
    """
    odd, even = (ahead - back) / 2, (ahead + back) / 2
    length = np.sqrt(np.sum(odd**2, axis=0))
    whole = np.sqrt(np.sum(odd**2 + even**2, axis=0))
    scale = np.outer(whole, length)
    pairs = np.divide(odd.T @ odd, scale, out=np.zeros_like(scale), where=scale != 0)
    return np.clip(pairs, -1, 1)  # Of a linear function, rounding makes them exceed 1.


def _agreements(ahead: np.ndarray, back: np.ndarray) -> np.ndarray:
    """The agreement of each distance: [m]."""
    pairs = _correlations(ahead, back)
    weights = np.tile(np.arange(1.0, len(pairs) + 1) ** 2, (len(pairs), 1))
    np.fill_diagonal(weights, 0)
    return np.sum(weights * pairs, axis=1) / np.sum(weights, axis=1)


def _sizes(params: Any) -> np.ndarray:
    """Changes per element, from short to long: powers of two, so that runs share μ."""
    rms = root_mean_square(params) or 1.0
    longest = 2.0 ** round(math.log2(rms))
    return longest / _FACTOR ** np.arange(_SIZES - 1.0, -1.0, -1.0)
