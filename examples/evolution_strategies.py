"""Published evolution strategies for language models, as settings of radazo_jax.

    python examples/evolution_strategies.py

Each function returns an optimizer and an estimator with the update rule of a paper. The
losses that they minimize are negative rewards.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

import radazo_jax as zo


def eggroll(learning_rate, population_size, smoothing, rank=1, grouped=True):
    """EGGROLL: pairs of low rank, z-scores by prompt, and SGD.

    θ ← θ + η √N · mean(scoreᵢ · σ Aᵢ Bᵢᵀ / √r)

    Sarkar et al., Evolution Strategies at the Hyperscale, 2025. For Countdown: η 0.125,
    N 512, σ 7e-4; for GSM8K: η 0.06, σ 2e-3.
    """
    shaping = zo.shaping.by_group() if grouped else zo.shaping.z_score()
    estimator = zo.evolution_strategy(
        zo.low_rank(rank), population_size, smoothing, shaping=shaping
    )
    # The estimate is divided by σ, and their gradient is multiplied by it.
    scale = math.sqrt(population_size) * smoothing**2
    return optax.chain(optax.scale(scale), optax.sgd(learning_rate)), estimator


def es_at_scale(population_size=30, smoothing=1e-3, rate=5e-4):
    """ES at Scale: independent normal members, z-scores, and a plain step.

    θ ← θ + α/N Σᵢ scoreᵢ εᵢ

    Qiu et al., Evolution Strategies at Scale, 2025, algorithm 1, with α = σ/2.
    """
    estimator = zo.evolution_strategy(
        zo.gaussian(),
        population_size,
        smoothing,
        antithetic=False,
        shaping=zo.shaping.z_score(eps=1e-8, eps_root=0.0),
    )
    return optax.sgd(rate * smoothing), estimator


def qes(population_size, smoothing, rate, bits=4, decay=0.9):
    """QES: ranks from −1 to 1, and steps of integers whose rest is kept.

    u = α Σᵢ rankᵢ εᵢ + γ e,  θ ← θ + round(u),  e ← u − round(u)

    Xu et al., Quantized Evolution Strategies, 2026. The parameters are floating-point
    arrays of integer codes, 0 … 2ᵇⁱᵗˢ − 1, and the loss rounds the members to codes.
    """
    ranks = zo.shaping.centered_ranks()
    estimator = zo.evolution_strategy(
        zo.gaussian(),
        population_size,
        smoothing,
        antithetic=False,
        shaping=lambda values: 2 * ranks(values),
    )
    scale = optax.scale(-rate * population_size * smoothing)
    return optax.chain(scale, round_with_residual(bits, decay)), estimator


class RoundWithResidualState(NamedTuple):
    """The rest of the updates that no integer step has taken yet."""

    residual: optax.Updates


def round_with_residual(bits, decay):
    """Rounds updates to integers, and adds what is lost to the next ones.

    A step that would leave the range of the codes is not taken. The residual is held
    within ±1.5, so that it does not grow there.
    """
    most = 2**bits - 1

    def init(params):
        return RoundWithResidualState(jax.tree.map(jnp.zeros_like, params))

    def update(updates, state, params):
        wanted = jax.tree.map(lambda u, e: u + decay * e, updates, state.residual)

        def taken(p, u):
            after = p + jnp.round(u)
            return jnp.where((after >= 0) & (after <= most), jnp.round(u), 0)

        steps = jax.tree.map(taken, params, wanted)
        rest = jax.tree.map(lambda u, s: jnp.clip(u - s, -1.5, 1.5), wanted, steps)
        return steps, RoundWithResidualState(rest)

    return optax.GradientTransformation(init, update)


def main() -> None:
    codes, start = jnp.arange(64.0).reshape(8, 8) % 16, jnp.full((8, 8), 7.0)

    def loss(params):
        return jnp.mean((jnp.round(params) - codes) ** 2)

    for name, (optimizer, estimator) in {
        "EGGROLL": eggroll(0.5, 64, 0.5, grouped=False),
        "ES at Scale": es_at_scale(64, 0.5, 0.5),
        "QES": qes(64, 0.5, 0.01),
    }.items():
        result = zo.train(loss, start, optimizer, estimator, num_steps=500, key=0)
        print(f"{name}: loss {float(loss(result.params)):.2f}, was {loss(start):.2f}")


if __name__ == "__main__":
    main()
