"""The effect of β₁ on the moments (the paper's figure of that name).

    python -m paper.moments

R-AdaZO minimizes Quadratic in 10⁴ dimensions, with the hyperparameters of
`synthetic.py` and β₁ in {0.5, 0.7, 0.9, 0.95, 0.99}. Along the way, at the same θ and
from the same estimates g_t:

(a) the cosine of g_t, and of the first moment m_t, with the true gradient ∇F;
(b) the relative error of the average of g² (`ori`), and of the average of m² (`ours`),
    against the v_t of the true gradient, the average of (∇F)²;

Two more measures are not in the paper. They separate a larger step from a better
direction:

(c) the cosine of v_t with the true v_t: what is left of (b) if one factor for
    all coordinates is free, which the learning rate is; and the cosine of a v that is
    equal in all coordinates, which has no information;
(d) the cosine of the update m_t/√v_t with ∇F, with either v_t.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import radazo_jax as zo
from common.record import array
from common.tables import Table
from paper import common, functions
from paper.common import DIMENSION, LEARNING_RATE, NUM_DIRECTIONS, SMOOTHING

BETAS = (0.5, 0.7, 0.9, 0.95, 0.99)  # β₁
B2 = 0.99  # β₂
EPS_ROOT = 1e-8  # ζ
POINTS = 100

# What is measured -> how the tables call it.
MEASURES = {
    "cosine_g": "cos(g, ∇F)",
    "cosine_m": "cos(m, ∇F)",
    "error_ori": "error of v (ori)",
    "error_ours": "error of v (ours)",
    "cosine_v_ori": "cos(v (ori), v of ∇F)",
    "cosine_v_ours": "cos(v (ours), v of ∇F)",
    "cosine_v_flat": "cos(1, v of ∇F)",
    "cosine_update_ori": "cos(m/√v (ori), ∇F)",
    "cosine_update_ours": "cos(m/√v (ours), ∇F)",
}


class State(NamedTuple):
    params: jax.Array  # θ, [d].
    optimizer_state: Any  # The state of R-AdaZO, with m and v.
    nu_ori: jax.Array  # v of g², [d].
    nu_true: jax.Array  # v of (∇F)², [d].


def cosine(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.vdot(x, y) / (jnp.linalg.norm(x) * jnp.linalg.norm(y))


def measure(dimension: int, steps: int, seeds: int) -> dict[str, np.ndarray]:
    """Each measure, averaged over pieces of the run: [betas, seeds, points]."""
    estimator = zo.forward_difference(zo.sphere(), NUM_DIRECTIONS, SMOOTHING)
    value_and_grad = zo.value_and_grad(functions.quadratic, estimator)
    true_grad = jax.grad(functions.quadratic)

    def scale(b1: jax.Array) -> optax.GradientTransformation:
        return zo.scale_by_radazo(b1, B2, EPS_ROOT)

    def init(b1: jax.Array, params: jax.Array) -> State:
        zeros = jnp.zeros_like(params)
        return State(params, scale(b1).init(params), zeros, zeros)

    def step(
        b1: jax.Array, key: jax.Array, state: State
    ) -> tuple[State, dict[str, jax.Array]]:
        value, grad = value_and_grad(key, state.params)
        truth = true_grad(state.params)
        update, optimizer_state = scale(b1).update(grad, state.optimizer_state)
        mu, nu = optimizer_state.mu, optimizer_state.nu
        nu_ori = B2 * state.nu_ori + (1 - B2) * grad**2
        nu_true = B2 * state.nu_true + (1 - B2) * truth**2
        size = jnp.linalg.norm(nu_true)
        out = {
            "gap": value,
            "cosine_g": cosine(grad, truth),
            "cosine_m": cosine(mu, truth),
            "error_ori": jnp.linalg.norm(nu_ori - nu_true) / size,
            "error_ours": jnp.linalg.norm(nu - nu_true) / size,
            "cosine_v_ori": cosine(nu_ori, nu_true),
            "cosine_v_ours": cosine(nu, nu_true),
            "cosine_v_flat": cosine(jnp.ones_like(nu_true), nu_true),
            "cosine_update_ori": cosine(mu / jnp.sqrt(nu_ori + EPS_ROOT), truth),
            "cosine_update_ours": cosine(update, truth),
        }
        params = state.params - LEARNING_RATE * update
        return State(params, optimizer_state, nu_ori, nu_true), out

    keys = jax.vmap(jax.random.split)(common.seed_keys(seeds))
    starts = jax.vmap(lambda key: functions.uniform_start(key, dimension))(keys[:, 0])
    betas = jnp.asarray(BETAS)
    # The betas share their directions: the inner vmap leaves the key alone.
    states = jax.vmap(jax.vmap(init, (0, None)), (None, 0))(betas, starts)

    def all_betas(key: jax.Array, t: jax.Array, states: State) -> Any:
        return jax.vmap(step, (0, None, 0))(betas, key, states)

    def report(states: State, out: dict[str, np.ndarray]) -> str:
        middle = len(BETAS) // 2
        return f"β₁={BETAS[middle]}: cos(m, ∇F) {out['cosine_m'][:, middle].mean():.3f}"

    chunk = max(1, steps // POINTS)
    name, keys = "Quadratic", keys[:, 1]
    _, outs = common.run(all_betas, keys, states, steps, chunk, name, report)
    return {name: np.transpose(out, (2, 1, 0)) for name, out in outs.items()}


def averages(content: dict[str, Any], name: str) -> np.ndarray:
    """A measure averaged over the whole run: [betas, seeds]."""
    return array(content["measures"][name]).mean(axis=-1)


def tables(content: dict[str, Any]) -> list[Table]:
    def table(caption: str, names: Sequence[str]) -> Table:
        rows = [
            (str(b1), *(common.mean_std(averages(content, name)[i]) for name in names))
            for i, b1 in enumerate(content["betas"])
        ]
        return Table(caption, ("β₁", *(MEASURES[name] for name in names)), rows)

    whole = f"averages over {content['iterations'][-1]:,} iterations"
    names = list(MEASURES)
    return [
        table(f"Moments against the truth: {whole}", names[:4]),
        table(f"Directions, whatever their length: {whole}", names[4:]),
    ]


@common.experiment(__doc__, steps=5000, seeds=5, fast=(200, 2))
def main(size: common.Size) -> None:
    dimension = 200 if size.fast else DIMENSION
    measures = measure(dimension, size.steps, size.seeds)
    points = measures["gap"].shape[-1]
    content = {
        "settings": common.settings(dimension, size.seeds, b2=B2, eps_root=EPS_ROOT),
        "betas": BETAS,
        "iterations": np.arange(1, points + 1) * max(1, size.steps // POINTS),
        "measures": measures,
    }
    common.finish(size.output / "moments", content, tables)


if __name__ == "__main__":
    main()
