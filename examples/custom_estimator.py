"""Custom estimators: a class with two methods, or a wrapper around an estimator.

    python examples/custom_estimator.py

An estimator never evaluates the function. `points` returns the points of a step, and
`reduce` turns the values at them into an estimate of the gradient. The function here
returns a value that is wrong by up to 100 at one point in seven, as a bad sensor would.
"""

import dataclasses

import jax.numpy as jnp
import optax

import radazo_jax as zo
from radazo_jax.estimators import Estimate, sample_points

SIGNS = zo.rademacher()  # The distribution of the directions.


@dataclasses.dataclass(frozen=True)
class OneBit(zo.GradientEstimator):
    """Central differences of which only the signs count.

    A value that is far off has no more weight than any other.
    """

    num_directions: int = 10
    smoothing: float = 5e-2

    def points(self, draw, params, state):
        scales = [self.smoothing, -self.smoothing]
        return sample_points(SIGNS, draw, self.num_directions, scales, params), state

    def reduce(self, points, values, params, state):
        slopes = (values.along[:, 0] - values.along[:, 1]) / (2 * self.smoothing)
        usable = jnp.isfinite(slopes)
        slopes = jnp.where(usable, slopes, 0.0)
        coefficients = jnp.sign(slopes) / self.num_directions
        estimate = Estimate(
            value=jnp.nanmedian(values.along),
            slope=jnp.sum(coefficients * slopes),
            num_values=2 * jnp.sum(usable, dtype=jnp.int32),
            gradient=points.combine(coefficients),
        )
        return estimate, state


@dataclasses.dataclass(frozen=True)
class WithoutOutliers(zo.GradientEstimator):
    """A wrapper that drops values far from the median.

    The estimators of the package leave out values that are not finite. "Far" is more
    than `limit` times the median distance to the median.
    """

    estimator: zo.GradientEstimator
    limit: float = 5.0

    def init(self, params):
        return self.estimator.init(params)

    def points(self, draw, params, state):
        return self.estimator.points(draw, params, state)

    def reduce(self, points, values, params, state):
        distance = jnp.abs(values.along - jnp.nanmedian(values.along))
        far = distance > self.limit * jnp.nanmedian(distance)
        kept = values._replace(along=jnp.where(far, jnp.nan, values.along))
        return self.estimator.reduce(points, kept, params, state)


def main() -> None:
    target = jnp.linspace(-1.0, 1.0, 50)

    def loss(params):
        wave = jnp.sin(1e4 * jnp.sum(params))  # Looks random.
        wrong = jnp.where(wave > 0.9, 1000 * (wave - 0.9), 0.0)
        return jnp.sum((params - target) ** 2) + wrong

    # A hundredth of the size of the target.
    optimizer = zo.radazo(optax.cosine_decay_schedule(1e-2, 2000))
    central = zo.central_difference(SIGNS, smoothing=5e-2)
    for estimator in (central, WithoutOutliers(central), OneBit()):
        result = zo.train(
            loss, jnp.zeros(50), optimizer, estimator, num_steps=2000, key=0
        )
        error = jnp.sqrt(jnp.mean((result.params - target) ** 2))
        print(f"{estimator}: error {error:.3f}")


if __name__ == "__main__":
    main()
