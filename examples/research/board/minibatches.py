"""R-AdaZO on minibatches at a measured learning rate, against the tuned one.

    python -m board.minibatches --output records/board/minibatches.json

A row is a problem and a number of directions. Three runs of 3,000 evaluations each
take the learning rate of `zo.find_learning_rate`, whose evaluations count, and seven
multiples of it. The best of these multiples is the tuned rate. *Lost* is the loss on
held-out examples after a run, as a share of what the tuned rate wins on average: 0 is
the tuned rate, and 1 no progress. Runs without a known end have rates that do not
depend on it. The default method of an earlier revision, which measured the size of its
steps on the minibatches that follow, has as many evaluations.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import radazo_jax as zo
from benchmarks.against import package_at
from board.minibatch_problems import PROBLEMS, Problem
from common import options
from common.record import collect, numbers
from common.tables import Table

EVALUATIONS = 3000
DIRECTIONS = (1, 4, 16)
SEEDS = 3
# The last revision with the earlier default method.
EARLIER = "623fbbf9f9e8ca4a518e953c0b2475eb064b9faa"

_FACTORS = tuple(2.0**i for i in range(-3, 4))
RULE, EARLIER_NAME = "rule", "earlier default"
# Rates that do not depend on the number of steps, over the rule's at its first step
# times √T.
_ENDLESS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "1/√t, ½": lambda t: 0.5 / np.sqrt(t + 100),
    "1/√t, ¼": lambda t: 0.25 / np.sqrt(t + 100),
    "constant, averaged": lambda t: np.full(t.shape, 0.5 / np.sqrt(1000)),
    "constant, averaged, ½": lambda t: np.full(t.shape, 0.25 / np.sqrt(1000)),
}


def names() -> list[str]:
    """The methods of a row."""
    multiples = [RULE if f == 1 else f"{RULE} × {f:g}" for f in _FACTORS]
    return [*multiples, *_ENDLESS, EARLIER_NAME]


def rates(found: zo.runs.LearningRate, num_steps: int) -> np.ndarray:
    """The learning rates of all steps by all methods but the earlier: [methods, T]."""
    t, first = np.arange(num_steps), found.learning_rate * np.sqrt(found.num_steps)
    linear = (1 - t / num_steps) / np.sqrt(num_steps)
    endless = [rate(t) for rate in _ENDLESS.values()]
    return first * np.stack([f * linear for f in _FACTORS] + endless)


def measured(name: str, num_directions: int, before: ModuleType) -> dict[str, Any]:
    """The row of a problem and a number of directions."""
    problem = PROBLEMS[name]()
    keys = [jax.random.key(seed) for seed in range(SEEDS)]
    found = [
        zo.find_learning_rate(
            problem.loss,
            problem.start,
            1000,
            sample=problem.sample,
            key=key,
            distribution=zo.orthonormal(),
        )
        for key in keys
    ]
    spent = max(each.num_evaluations for each in found)
    num_steps = (EVALUATIONS - spent) // (num_directions + 1)
    of_seeds = jnp.asarray(np.stack([rates(each, num_steps) for each in found]))
    run = functools.partial(_run, problem, num_directions)
    last, mean = jax.jit(jax.vmap(run))(jnp.stack(keys), of_seeds.astype(jnp.float32))
    averaged = np.array(["averaged" in name for name in names()[:-1]])
    ends = np.where(averaged, mean, last)
    earlier = functools.partial(_run_before, before, problem, num_directions)
    ends = np.concatenate(
        [ends, jax.jit(jax.vmap(earlier))(jnp.stack(keys))[:, None]], 1
    )
    start = float(problem.loss(problem.start, problem.held_out))
    return {
        "dimension": sum(x.size for x in jax.tree.leaves(problem.start)),
        "steps": num_steps,
        "learning_rates": numbers(
            [x.learning_rate * np.sqrt(x.num_steps / num_steps) for x in found]
        ),
        "start": numbers(start),
        "ends": dict(zip(names(), numbers(ends.T), strict=True)),
    }


def _run(
    problem: Problem, num_directions: int, key: jax.Array, rates: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The held-out losses at the ends and at the means of runs: [methods] each."""
    estimator = zo.forward_difference(zo.orthonormal(), num_directions)

    def of_method(rates: jax.Array) -> tuple[jax.Array, jax.Array]:
        optimizer = zo.radazo(lambda count: rates[count], bias_correction=True)
        init, step = zo.solver(
            problem.loss, optimizer, estimator, sample=problem.sample
        )

        def averaged(carry: Any, t: jax.Array) -> Any:
            state, mean = carry
            state, _ = step(state)
            # The weight of a step is proportional to its number.
            share = 2 / (t + 2)
            mean = jax.tree.map(lambda m, p: m + share * (p - m), mean, state.params)
            return (state, mean), None

        begun = init(problem.start, key), problem.start
        numbers = jnp.arange(len(rates), dtype=jnp.float32)
        (state, mean), _ = jax.lax.scan(averaged, begun, numbers)
        return tuple(problem.loss(p, problem.held_out) for p in (state.params, mean))

    return jax.vmap(of_method)(rates)


def _run_before(
    before: ModuleType, problem: Problem, num_directions: int, key: jax.Array
) -> jax.Array:
    """The held-out loss at the end of a run by the earlier default method."""
    optimizer, _, search = before.default_method(problem.start, minibatches=True)
    estimator = before.forward_difference(before.orthonormal(), num_directions)
    init, step = before.solver(
        problem.loss, optimizer, estimator, search, sample=problem.sample
    )
    state, _ = jax.lax.scan(
        lambda state, _: (step(state)[0], None),
        init(problem.start, key),
        length=_num_steps_before(num_directions),
    )
    return problem.loss(state.params, problem.held_out)


def _num_steps_before(num_directions: int) -> int:
    """The steps of the earlier default method, which evaluates the loss on its own.

    Twice at each of the first 40 steps but the first, and later every eight steps.
    """
    of_eight = 8 * (num_directions + 1) + 2
    left = EVALUATIONS - 40 * (num_directions + 1) - 2 * 39
    return 40 + 8 * left // of_eight


def lost(row: dict[str, Any]) -> dict[str, np.ndarray]:
    """The losses of the methods in each run: [seeds], infinite if one failed."""
    ends = {
        name: np.array([np.inf if x is None else x for x in values])
        for name, values in row["ends"].items()
    }
    tuned = min(float(ends[name].mean()) for name in names()[: len(_FACTORS)])
    return {name: (end - tuned) / (row["start"] - tuned) for name, end in ends.items()}


def tables(content: dict[str, Any]) -> list[Table]:
    """The losses of each method over all rows, and of some methods in each row."""
    rows = [lost(row) for row in content["rows"]]
    total = []
    for name in names():
        of_rows = np.array([row[name] for row in rows])
        means = of_rows.mean(axis=1)
        cells = np.median(means), means.mean(), of_rows.max()
        diverged = int(np.sum(of_rows.max(axis=1) > 1))
        total.append((name, *map(_shown, cells), f"{diverged} of {len(rows)}"))
    compared = [RULE, f"{RULE} × 0.5", f"{RULE} × 2", *_ENDLESS, EARLIER_NAME]
    each = [
        (row["problem"], str(row["num_directions"]), *_means(found, compared))
        for row, found in zip(content["rows"], rows, strict=True)
    ]
    evaluations = content["settings"]["evaluations"]
    return [
        Table(
            f"Held-out loss lost after {evaluations:,} evaluations, over all problems "
            "and K: 0 is the best of seven rates, 1 no progress",
            ["method", "median", "mean", "worst run", "diverged"],
            total,
        ),
        Table("The mean over three runs", ["problem", "K", *compared], each),
    ]


def _means(found: dict[str, np.ndarray], names: Sequence[str]) -> Iterator[str]:
    return (_shown(found[name].mean()) for name in names)


def _shown(x: float) -> str:
    return f"{x:.2f}" if np.isfinite(x) else "∞"


@options.command(__doc__)
@options.some("--problems", of=PROBLEMS, text="Problems")
@options.output
@options.resume
def main(problems: Sequence[str], output: Path | None, resume: bool) -> None:
    about = {"settings": {"evaluations": EVALUATIONS, "earlier": EARLIER}}
    with package_at(EARLIER) as before:
        cases = [
            (
                {"problem": name, "num_directions": k},
                functools.partial(measured, name, k, before),
            )
            for name in problems
            for k in DIRECTIONS
        ]
        made = collect(output, resume, cases, lambda rows: rows, **about)
    for table in tables({"rows": made} | about):
        print(table.caption, table.format(), sep="\n\n", end="\n\n")


if __name__ == "__main__":
    main()
