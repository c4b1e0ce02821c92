"""Populations whose values are shaped: evolution strategies."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax

from radazo_jax._src.base import checks, shown
from radazo_jax._src.base.trees import Tree
from radazo_jax._src.directions.distribution import Distribution
from radazo_jax._src.directions.distributions import sphere
from radazo_jax._src.estimates.contracts import (
    Draw,
    Estimate,
    GradientEstimator,
    Points,
    Values,
)
from radazo_jax._src.estimates.differences import (
    Finite,
    check_distribution,
    checked_smoothing,
    mean_of_finite,
)
from radazo_jax._src.estimates.points import sample_points
from radazo_jax._src.estimates.shaping import Shaping, z_score


@dataclasses.dataclass(frozen=True, repr=False)
class EvolutionStrategy(GradientEstimator):
    """See `evolution_strategy`."""

    _constructor = "evolution_strategy"

    distribution: Distribution
    population_size: int
    smoothing: float
    antithetic: bool
    shaping: Shaping

    @property
    def _signs(self) -> np.ndarray:
        """The sides of θ on which the members of a direction lie."""
        return np.array([1.0, -1.0] if self.antithetic else [1.0], np.float32)

    def points(
        self, draw: Draw, params: optax.Params, state: Tree
    ) -> tuple[Points, Tree]:
        scales = [self.smoothing, -self.smoothing][: len(self._signs)]
        points = sample_points(
            self.distribution, draw, self.population_size // len(scales), scales, params
        )
        return dataclasses.replace(points, vector_valued=True), state

    def reduce(
        self, points: Points, values: Values, params: optax.Params, state: Tree
    ) -> tuple[Estimate, Tree]:
        along = values.along
        members = along.reshape(self.population_size, *along.shape[2:])
        _, finite, count = Finite.of(members)
        used = jnp.maximum(count, 1).astype(members.dtype)

        def along_directions(members: jax.Array) -> jax.Array:
            """Sums over the sides of each direction, and over prompts: [K]."""
            each = members.reshape(*points.scales.shape, -1)
            sides = jnp.asarray(self._signs, each.dtype)[None, :, None]
            return jnp.sum(sides * each, (1, 2))

        weights = along_directions(_weights(self.shaping, members))
        scale = jnp.asarray(points.factor, weights.dtype) / self.smoothing
        coefficients = weights * scale / used
        # By the values, without their shaping: derivatives along the directions.
        means = jnp.mean(members, 0, where=finite, keepdims=True)  # Of each prompt.
        deviations = jnp.where(finite, members - means, 0)
        each_used = jnp.sum(finite.reshape(len(points.scales), -1), 1, dtype=jnp.int32)
        each_used = jnp.maximum(each_used, 1).astype(members.dtype)
        slopes = along_directions(deviations) / (each_used * self.smoothing)
        estimate = Estimate(
            mean_of_finite(members),
            slope=jnp.sum(coefficients * slopes),
            num_values=count,
            gradient=points.combine(coefficients),
        )
        return estimate, state


@checks.checks_names
def evolution_strategy(
    distribution: Distribution = sphere(),
    population_size: int = 20,
    smoothing: float = 5e-3,
    antithetic: bool = True,
    shaping: Shaping = z_score(),
) -> GradientEstimator:
    """An evolution strategy: a population around θ, weighted by its shaped values.

        ∇̂f(θ) = c/(n σ) Σᵢ wᵢ zᵢ,  w = shaping(f(θ + σ z₁), …, f(θ + σ zₙ))

    with c the factor of the distribution. An antithetic population has the pairs
    z₂ₖ₋₁ = uₖ and z₂ₖ = −uₖ; otherwise zᵢ = uᵢ. θ itself is not evaluated.

    Use it to train on a reward: the values of rewards have an arbitrary scale, noise
    and outliers, which the shaping removes. With the shaping `lambda values: values`,
    an antithetic population is `central_difference`. If values are exact, use
    `forward_difference`: weights hide how steep the function is.

    The function is a loss, as everywhere in radazo_jax: return the negative reward.
    It may return a value for each of G prompts, an array of shape [G]. The shaping then
    compares n · G values, and the weight of a member is the sum over its prompts. All
    members get the same prompts, the minibatch of the step.

    Values that are not finite have the weight zero, and n is the number of the
    remaining ones (n · G if there are several for each member). If none remains, the
    gradient is zero, and `train` skips the step.

    Args:
      distribution: The distribution of the directions u.
      population_size: n, the number of members, at least 2. It must be even if
        `antithetic`.
      smoothing: σ, the distance of the members from θ in units of u; a positive number
        in the units of the parameters.
      antithetic: Whether members come in pairs on opposite sides of θ. The curvature of
        f then adds nothing to the variance.
      shaping: A pure function from values, [n] or [n, G], to weights of the same shape,
        such as the functions of `zo.shaping`. Higher values must have higher weights.

    Returns:
      The estimator; it has no state. Its value is the mean of all finite values. Its
      slope is the derivative along the gradient according to the values themselves.

    Raises:
      TypeError: If an argument is of another type.
      ValueError: If `population_size` or `smoothing` is out of range, or the shaping
        does not fit the population.

    Examples:
      >>> import jax.numpy as jnp
      >>> import radazo_jax as zo
      >>> def loss(x):  # One value for each of three prompts.
      ...     return jnp.stack([jnp.sum((x - t) ** 2) for t in (0.8, 1.0, 1.2)])
      >>> result = zo.train(
      ...     loss,
      ...     jnp.zeros(4),
      ...     zo.radazo(1e-2),
      ...     zo.evolution_strategy(zo.gaussian(), 16, shaping=zo.shaping.by_group()),
      ...     num_steps=300,
      ...     key=0,
      ...     progress=False,
      ... )
      >>> bool(jnp.allclose(result.params, 1.0, atol=0.1))
      True

    References:
      Salimans et al., Evolution Strategies as a Scalable Alternative to Reinforcement
      Learning, 2017, algorithm 1, <https://arxiv.org/abs/1703.03864>.
    """
    check_distribution(distribution)
    smoothing = checked_smoothing(smoothing)
    n = checks.check_int_at_least("population_size", population_size, 2)
    if antithetic and n % 2:
        raise ValueError(
            f"population_size must be even if antithetic is True; got {n}. Give "
            f"{n + 1}, or antithetic=False."
        )
    if not callable(shaping):
        raise TypeError(
            "shaping must be a function of values such as zo.shaping.z_score(); got "
            f"{shown.given(shaping)}."
        )
    # An error is raised here, and not after evaluating the first population.
    jax.eval_shape(
        lambda x: _weights(shaping, x), jax.ShapeDtypeStruct((n,), jnp.float32)
    )
    return EvolutionStrategy(distribution, n, smoothing, bool(antithetic), shaping)


def _weights(shaping: Shaping, members: jax.Array) -> jax.Array:
    """Returns the weights of the values, 0 if a value or its weight is not finite."""
    weights = jnp.asarray(shaping(members))
    if weights.shape != members.shape:
        raise ValueError(
            f"shaping must return weights of the shape of its values, {members.shape}; "
            f"got {weights.shape}."
        )
    finite = jnp.isfinite(members) & jnp.isfinite(weights)
    return jnp.where(finite, weights.astype(members.dtype), 0)
