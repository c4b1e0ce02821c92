"""R-AdaZO with replayed moments, and with stored ones (not in the paper).

    python examples/research/paper/replayed.py --output docs/evidence/replayed.json

Both run on a classifier of handwritten digits, in minibatches of 64, at each learning
rate of one grid. All runs of a seed share start, directions and minibatches. The final
loss is the mean over the training set; a table has the best rate of each. `--resume`
continues a record.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from tabulate import tabulate

import radazo_jax as zo
from examples.common import cli
from examples.common.distributions import DISTRIBUTIONS
from examples.common.record import array, collect, numbers
from examples.research.paper import common, tuned

NUM_DIRECTIONS = 8  # K
SMOOTHING = 5e-3  # μ
RATES = (5e-4, 1e-3, 2e-3, 4e-3, 8e-3)
MOMENTS: dict[str, Callable[..., optax.GradientTransformationExtraArgs]] = {
    "stored": zo.radazo,
    "replayed": functools.partial(
        zo.radazo, moments="replayed", max_directions=NUM_DIRECTIONS
    ),
}


def final_losses(
    distribution: str, moments: str, steps: int, seeds: int
) -> dict[str, Any]:
    """The losses at the end of runs whose learning rate falls to 0."""
    problem = tuned.digits()
    estimator = zo.forward_difference(
        DISTRIBUTIONS[distribution], NUM_DIRECTIONS, SMOOTHING
    )

    @jax.jit
    @functools.partial(jax.vmap, in_axes=(0, None))
    @functools.partial(jax.vmap, in_axes=(None, 0))
    def run(learning_rate: jax.Array, key: jax.Array) -> jax.Array:
        optimizer = MOMENTS[moments](optax.linear_schedule(learning_rate, 0.0, steps))
        init, step = zo.solver(problem.loss, optimizer, estimator)
        start, directions, batches = jax.random.split(key, 3)

        def one(state: Any, t: jax.Array) -> tuple[Any, None]:
            batch = problem.sample(jax.random.fold_in(batches, t))
            return step(state, batch)[0], None

        state = init(problem.init(start), directions)
        state, _ = jax.lax.scan(one, state, jnp.arange(steps))
        return problem.full_loss(state.params)

    losses = np.asarray(run(jnp.asarray(RATES), common.seed_keys(seeds)))
    return {"rates": list(RATES), "losses": numbers(losses)}


def cases(
    distributions: list[str], steps: int, seeds: int
) -> Iterator[tuple[dict[str, Any], Callable[[], dict[str, Any]]]]:
    for distribution in distributions:
        for moments in MOMENTS:
            case = {
                "distribution": distribution,
                "moments": moments,
                "steps": steps,
                "seeds": seeds,
            }
            yield case, functools.partial(final_losses, *case.values())


def derived(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows, and a table of each method at its best rate."""
    best = []
    for row in rows:
        losses = array(row["losses"])
        at = int(np.argmin(losses.mean(axis=1)))
        best.append(
            {
                "table": "best",
                "distribution": row["distribution"],
                "moments": row["moments"],
                "η": f"{row['rates'][at]:g}",
                "loss": common.mean_std(losses[at]),
            }
        )
    return [*rows, *best]


def main() -> None:
    parser = cli.parser(__doc__)
    add = parser.add_argument
    add("--distributions", nargs="+", default=["low_rank", "rademacher", "sphere"])
    add("--steps", type=cli.at_least_one, default=2000)
    add("--seeds", type=cli.at_least_one, default=5)
    cli.add_record(parser, resume=True)
    args = parser.parse_args()
    runs = cases(args.distributions, args.steps, args.seeds)
    rows = collect(args.output, args.resume, runs, derived)
    found = [row for row in rows if "table" in row]
    print(tabulate(found, headers="keys", floatfmt=".4f"))


if __name__ == "__main__":
    main()
