"""Custom estimators: points and a reduction, or a wrapper around another estimator.

    python examples/custom_estimator.py

An estimator never evaluates the function. `points` returns the points of a step, and
`reduce` turns the values at them into an estimate of the gradient. The function here
returns a value that is wrong by up to 100 at one point in seven, as a bad sensor would.
"""

import jax.numpy as jnp
import optax

import radazo_jax as zo
from radazo_jax.estimators import Estimate, sample_points

SIGNS = zo.rademacher()  # The distribution of the directions.


def one_bit(num_directions=10, smoothing=5e-2):
    """Central differences of which only the signs count.

    A value that is far off has no more weight than any other.
    """

    def points(draw, params, state):
        scales = [smoothing, -smoothing]
        return sample_points(SIGNS, draw, num_directions, scales, params), state

    def reduce(points, values, params, state):
        slopes = (values.along[:, 0] - values.along[:, 1]) / (2 * smoothing)
        usable = jnp.isfinite(slopes)
        slopes = jnp.where(usable, slopes, 0.0)
        coefficients = jnp.sign(slopes) / num_directions
        estimate = Estimate(
            value=jnp.nanmedian(values.along),
            slope=jnp.sum(coefficients * slopes),
            num_values=2 * jnp.sum(usable, dtype=jnp.int32),
            gradient=points.combine(coefficients),
        )
        return estimate, state

    return zo.GradientEstimator(lambda params: (), points, reduce)


def without_outliers(estimator, limit=5.0):
    """A wrapper that drops values far from the median.

    The estimators of the package leave out values that are not finite. "Far" is more
    than `limit` times the median distance to the median.
    """

    def reduce(points, values, params, state):
        distance = jnp.abs(values.along - jnp.nanmedian(values.along))
        far = distance > limit * jnp.nanmedian(distance)
        kept = values._replace(along=jnp.where(far, jnp.nan, values.along))
        return estimator.reduce(points, kept, params, state)

    return estimator._replace(reduce=reduce)


def main() -> None:
    target = jnp.linspace(-1.0, 1.0, 50)

    def loss(params):
        wave = jnp.sin(1e4 * jnp.sum(params))  # Looks random.
        wrong = jnp.where(wave > 0.9, 1000 * (wave - 0.9), 0.0)
        return jnp.sum((params - target) ** 2) + wrong

    optimizer = zo.radazo(optax.cosine_decay_schedule(1e-2, 2000))
    central = zo.central_difference(SIGNS, smoothing=5e-2)
    for name, estimator in (
        ("central_difference", central),
        ("without_outliers(central_difference)", without_outliers(central)),
        ("one_bit", one_bit()),
    ):
        result = zo.minimize(loss, jnp.zeros(50), optimizer, estimator, 2000, key=0)
        error = jnp.sqrt(jnp.mean((result.params - target) ** 2))
        print(f"{name}: error {error:.3f}")


if __name__ == "__main__":
    main()
