"""R-AdaZO with replayed moments, and with stored ones (not in the paper).

    python -m paper.replayed --output records/evidence/replayed.json

Both run at each learning rate of one grid. All runs of a seed share start, directions
and minibatches. A table has the best rate of each. `--resume` continues a record. The
problems:

* ``digits``: a classifier of handwritten digits, in minibatches of 64. The final loss
  is the mean over the training set.
* ``language``: a decoder of two layers, from a random start, on sequences whose tokens
  follow from the last by a rule. The final loss is the mean over 64 minibatches of 16
  sequences.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import click
import jax
import jax.numpy as jnp
import numpy as np
import optax

import radazo_jax as zo
from common import options
from common.campaign import Campaign, Case, campaign
from common.distributions import DISTRIBUTIONS
from common.record import array, numbers
from paper import common, decoder, tuned

NUM_DIRECTIONS = 8  # K
SMOOTHING = 5e-3  # μ
RATES = (5e-4, 1e-3, 2e-3, 4e-3, 8e-3)
MOMENTS: dict[str, Callable[..., optax.GradientTransformationExtraArgs]] = {
    "stored": zo.radazo,
    "replayed": functools.partial(
        zo.radazo, moments="replayed", max_directions=NUM_DIRECTIONS
    ),
}


def language() -> tuned.Problem:
    sizes = decoder.Sizes(
        layers=2, width=32, heads=2, vocabulary=64, length=16, dtype="float32"
    )
    rule = jax.random.permutation(jax.random.key(0), sizes.vocabulary)

    def sample(key: jax.Array) -> jax.Array:
        keys = jax.random.split(key)
        shape = (sizes.length, 16)
        drawn = jax.random.randint(keys[0], shape, 0, sizes.vocabulary)
        ruled = jax.random.bernoulli(keys[1], 0.9, shape)

        def following(last: jax.Array, each: Any) -> tuple[jax.Array, jax.Array]:
            other, is_ruled = each
            token = jnp.where(is_ruled, rule[last], other)
            return token, token

        _, tokens = jax.lax.scan(following, drawn[0], (drawn, ruled))
        return tokens.T

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        return decoder.loss_fn(params, tokens, sizes.heads)

    tests = jax.vmap(sample)(jax.random.split(jax.random.key(1), 64))
    return tuned.Problem(
        init=lambda key: decoder.init(key, sizes),
        loss=loss,
        sample=sample,
        full_loss=lambda params: jnp.mean(
            jax.lax.map(lambda tokens: loss(params, tokens), tests)
        ),
    )


PROBLEMS = {"digits": tuned.digits, "language": language}


def final_losses(
    problem_name: str, distribution: str, moments: str, steps: int, seeds: int
) -> dict[str, Any]:
    """The losses at the end of runs whose learning rate falls to 0."""
    problem = PROBLEMS[problem_name]()
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
    problems: Sequence[str], distributions: Sequence[str], steps: int, seeds: int
) -> Iterator[Case]:
    for problem, distribution, moments in itertools.product(
        problems, distributions, MOMENTS
    ):
        case = {
            "problem": problem,
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
                "problem": row["problem"],
                "distribution": row["distribution"],
                "moments": row["moments"],
                "η": f"{row['rates'][at]:g}",
                "loss": common.mean_std(losses[at]),
            }
        )
    return [*rows, *best]


@campaign(__doc__)
@options.listed("--problems", of=PROBLEMS, text="Problems")
@options.listed("--distributions", of=DISTRIBUTIONS, text="Of directions")
@click.option("--steps", type=options.COUNT, default=2000)
@click.option("--seeds", type=options.COUNT, default=5)
def main(
    problems: Sequence[str], distributions: Sequence[str], steps: int, seeds: int
) -> Campaign:
    return Campaign(cases(problems, distributions, steps, seeds), derived)


if __name__ == "__main__":
    main()
