"""Custom distributions: two methods, and every estimator accepts them.

    python examples/custom_distribution.py

draws directions that are sparse, and directions whose neighbors are correlated, and
smooths a noisy curve along each of them.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax

import radazo_jax as zo


@dataclasses.dataclass(frozen=True)
class Sparse(zo.Distribution):
    """Random signs at a share of the coordinates, which each direction draws anew."""

    share: float = 0.1

    def factor(self, dimension):
        del dimension
        return 1.0  # E[u²] = share · 1/share in every coordinate, so E[u uᵀ] = I.

    def draw(self, key, number, at):
        del number
        which, signs = jax.random.split(key)
        chosen = zo.random.uniform(which, at) < self.share
        sign = jnp.where(zo.random.uniform(signs, at) < 0.5, -1.0, 1.0)
        return jnp.where(chosen, sign / self.share**0.5, 0.0)


@dataclasses.dataclass(frozen=True)
class Smooth(zo.Distribution):
    """Normal numbers, each correlated with its neighbors.

    If E[u uᵀ] = Σ is no multiple of I, an estimate is Σ times the gradient.
    """

    weight: float = 1.0

    def factor(self, dimension):
        del dimension
        return 1.0

    def draw(self, key, number, at):
        del number
        # There is no carry with fewer than 2³² coordinates.
        following = dataclasses.replace(at, lo=at.lo + np.uint32(1))
        here, there = (zo.random.normal(key, p) for p in (at, following))
        return (here + self.weight * there) / (1 + self.weight**2) ** 0.5

    def covariance(self, dimension):
        """Σ, an array [d, d]."""
        beside = np.eye(dimension, k=1) + np.eye(dimension, k=-1)
        return np.eye(dimension) + beside * self.weight / (1 + self.weight**2)


def main() -> None:
    x = jnp.linspace(0, 2 * jnp.pi, 200)
    noisy = jnp.sin(x) + jax.random.normal(jax.random.key(1), x.shape) / 5

    def loss(curve):
        rough = jnp.sum(jnp.diff(curve) ** 2)
        return jnp.sum((curve - noisy) ** 2) + 10 * rough

    for distribution in (zo.rademacher(), Sparse(), Smooth()):
        estimator = zo.central_difference(
            distribution, num_directions=10, smoothing=1e-3
        )
        # A sixth of 1/L, with L = 82 for the largest curvature.
        rate = optax.cosine_decay_schedule(2e-3, 2000)
        result = zo.train(
            loss, noisy, zo.zo_sgd(rate), estimator, num_steps=2000, key=0
        )
        error = jnp.sqrt(jnp.mean((result.params - jnp.sin(x)) ** 2))
        print(f"{distribution}: loss {result.values[-1]:.2f}, error {error:.3f}")


if __name__ == "__main__":
    main()
