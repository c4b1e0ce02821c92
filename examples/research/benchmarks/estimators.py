"""Measures the memory of each estimator, and the time of its step.

The optimizer is R-AdaZO. Evaluations of Rosenbrock's function take next to no time, so
the rest of a step dominates. Within one run, columns are

* ``state/d``: the state of the estimator, in floats of 4 bytes for each parameter;
* ``temporary/d``: the temporary buffers of a compiled step, likewise;
* ``step/forward``: the time of a step per evaluation, divided by the time of
  ``forward_difference``.

    python -m benchmarks.estimators --output estimators.json
"""

import functools
from typing import Any

import click
import jax
import jax.numpy as jnp

import radazo_jax as zo
from benchmarks.programs import num_bytes
from benchmarks.timing import Step, key_of, medians, scanned
from common import options
from common.campaign import Campaign, campaign
from paper.functions import rosenbrock

DIMENSION = 10_000
STEPS = 50
OPTIMIZER = zo.radazo(1e-6)
# About as many evaluations a step for each; the rest are defaults.
ESTIMATORS = {
    "forward_difference": zo.forward_difference(),
    "spsa": zo.spsa(5, 5e-4),
    "coordinate_wise": zo.contrib.coordinate_wise(5),
    "residual_feedback": zo.contrib.residual_feedback(num_directions=10),
    "variance_reduced": zo.contrib.variance_reduced(num_directions=5),
    "prior_guided": zo.contrib.prior_guided(num_directions=9),
    "query_reuse": zo.contrib.query_reuse(),
    "linear_interpolation": zo.contrib.linear_interpolation(),
    "gaussian_process": zo.contrib.gaussian_process(num_directions=10, memory_size=100),
    "majority_vote": zo.contrib.majority_vote(),
    "momentum_perturbation": zo.contrib.momentum_perturbation(),
}


def step_of(estimator: zo.GradientEstimator) -> Step:
    """A whole step, with the estimator's state."""

    def step(carry: Any, i: jax.Array) -> Any:
        params, moments, memory = carry
        (_, gradient), memory = zo.estimators.estimate(
            estimator, rosenbrock, key_of(i), params, memory
        )
        updates, moments = OPTIMIZER.update(gradient, moments, params)
        return params + updates, moments, memory

    return step


def start(estimator: zo.GradientEstimator) -> Any:
    params = jnp.full(DIMENSION, 0.5)
    return params, OPTIMIZER.init(params), estimator.init(params)


def state_bytes(estimator: zo.GradientEstimator) -> int:
    return num_bytes(jax.eval_shape(estimator.init, jnp.zeros(DIMENSION)))


def temporary_bytes(estimator: zo.GradientEstimator) -> int:
    one = jax.jit(step_of(estimator), donate_argnums=0)
    compiled = one.lower(start(estimator), jnp.uint32(0)).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def rows(repeats: int) -> list[dict[str, Any]]:
    runs = {
        name: scanned(step_of(estimator), start(estimator), STEPS)
        for name, estimator in ESTIMATORS.items()
    }
    seconds, found = medians(runs, repeats), []
    for name, estimator in ESTIMATORS.items():
        params, draw = jnp.zeros(DIMENSION), zo.estimators.Draw.once(jax.random.key(0))
        points, _ = estimator.points(draw, params, estimator.init(params))
        count = points.num_points
        bytes_of = state_bytes(estimator)
        row = {
            "estimator": f"`{name}`",
            "evaluations": count,
            "state/d": bytes_of / (4 * DIMENSION),
            "temporary/d": temporary_bytes(estimator) / (4 * DIMENSION),
            "step_us": 1e6 * seconds[name] / STEPS,
        }
        found.append(row)
    each = [row["step_us"] / row["evaluations"] for row in found]
    return [
        row | {"step/forward": one / each[0]}
        for row, one in zip(found, each, strict=True)
    ]


@campaign(__doc__)
@click.option("--repeats", type=options.COUNT, default=7)
def main(repeats: int) -> Campaign:
    return Campaign([({}, functools.partial(rows, repeats))])


if __name__ == "__main__":
    main()
