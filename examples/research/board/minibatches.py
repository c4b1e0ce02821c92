"""R-AdaZO on minibatches at the measured learning rate, against a searched one.

    python -m board.minibatches --output records/board/minibatches.json

A row is a problem, a number of directions, β₁, a precision and a budget. *Rule* is the
rate of `zo.find_learning_rate`, whose evaluations are deducted, and its multiples show
what an error of the rate costs. The *searched* rate is the best of seven in runs with
other keys, which train on a part of the examples and are judged by the rest of them.
*Lost* is the loss on held-out examples at the end, as a share of what the searched rate
wins on average: 0 is the searched rate, and 1 no progress. ln(end / best) is the
logarithm of its ratio to the searched rate's, which a high loss at the start does not
hide.
"""

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import radazo_jax as zo
from board.minibatch_problems import PROBLEMS, Problem
from common import options
from common.campaign import Campaign, campaign
from common.record import array, numbers
from common.tables import Table

SEEDS = 3
EVALUATIONS = 3000
SEARCHED, RULE, ADAMM = "searched", "rule", "ZO-AdaMM's rule"

# The rates of an earlier rule, and multiples of them: none is the rule's.
_UNIT = 2 / 3
_MULTIPLES = tuple(_UNIT * 2.0**i for i in range(-3, 4))
_SEARCH_SEEDS = range(100, 102)
_VALIDATION = 128  # Examples that judge the search.
_B1 = 0.9
# A step of R-AdaZO is so many times as long as one of ZO-AdaMM.
_LONGER = math.sqrt((1 + _B1) / (1 - _B1))


class Case(NamedTuple):
    """The settings of a row."""

    problem: str
    num_directions: int = 4
    b1: float = _B1
    evaluations: int = EVALUATIONS
    dtype: str = "float32"


class Run(NamedTuple):
    """A run, as the arguments of a program that all runs share.

    Attributes:
      key: A typed key.
      learning_rate: η of the first step.
      b1: β₁.
      num_steps: T.
      num_examples: The number of examples that minibatches are drawn from.
      is_endless: Whether η falls as 1/√(1 + t/100), and not linearly to 0.
      is_adamm: Whether ZO-AdaMM takes the steps.
    """

    key: jax.Array
    learning_rate: float
    b1: float
    num_steps: int
    num_examples: int
    is_endless: bool = False
    is_adamm: bool = False


class End(NamedTuple):
    """The end of a run: losses on the last training examples and on others."""

    validation: float
    held_out: float


def cases() -> list[Case]:
    """All rows: every problem with K = 4, and some with one or two differences."""
    rows = [Case(name) for name in PROBLEMS]
    names = ("Softmax", "Tumors", "Heavy tails", "4 bits", "Adapter")
    rows += [Case(name, b1=0.99) for name in names]
    for name in ("Softmax", "Transformer", "Residual"):
        rows += [Case(name, 1), Case(name, 1, evaluations=600)]
    rows += [Case(name, 16) for name in ("Softmax", "Transformer", "Residual")]
    rows += [Case("Reward", 1), Case("Softmax", 1, evaluations=40_100)]
    # A loss in bfloat16 would round differences away; this one is in float32.
    rows += [Case("Tumors", dtype="bfloat16")]
    return rows


def methods(case: Case) -> list[str]:
    """The names of the methods of a row."""
    return [name for name in METHODS if name != ADAMM or case.b1 == _B1]


def measured(case: Case) -> dict[str, Any]:
    """The row of a case."""
    problem = _problem(case.problem, case.dtype)
    start = float(problem.loss(problem.start, problem.held_out))
    end = _program(case.problem, case.num_directions, case.dtype)
    run = functools.partial(_run, case)
    search, rate = _search(run, end, len(problem.train[0]) - _VALIDATION)
    ends = {
        name: [end(METHODS[name](seed, rate, run)) for seed in range(SEEDS)]
        for name in methods(case)
    }
    return {
        "dimension": sum(x.size for x in jax.tree.leaves(problem.start)),
        "steps": run(0).num_steps,
        "learning_rates": numbers([run(seed).learning_rate for seed in range(SEEDS)]),
        "start": numbers(start),
        "search": numbers(search),
        "searched": numbers(rate),
        "ends": {
            name: numbers([end.held_out for end in found])
            for name, found in ends.items()
        },
    }


def _search(
    run: Callable[..., Run], end: Callable[[Run], End], num_examples: int
) -> tuple[dict[str, list[float]], float]:
    """The losses of seven multiples of the rule, and the rate of the best.

    Runs train on the first examples, and the last ones judge them.
    """
    losses = {
        f"{multiple:g}": [
            end(run(seed, multiple, num_examples=num_examples)).validation
            for seed in _SEARCH_SEEDS
        ]
        for multiple in _MULTIPLES
    }
    means = {name: np.mean(values) for name, values in losses.items()}
    best = min(means, key=lambda name: np.nan_to_num(means[name], nan=np.inf))
    rates = [run(seed).learning_rate for seed in _SEARCH_SEEDS]
    return losses, float(best) * float(np.exp(np.mean(np.log(rates))))


def _run(case: Case, seed: int, multiple: float = 1.0, **changes: Any) -> Run:
    """A run at a multiple of the measured rate."""
    found = _found(case.problem, case.dtype, seed)
    left = case.evaluations - found.num_evaluations
    num_steps = left // (case.num_directions + 1)
    ends = None if changes.get("is_endless") else num_steps
    rate = found._replace(b1=case.b1).over(ends).learning_rate
    problem = _problem(case.problem, case.dtype)
    run = Run(
        jax.random.key(seed),
        multiple * rate,
        case.b1,
        num_steps,
        len(problem.train[0]),
    )
    return run._replace(**changes)


# Each makes a run of a seed and of the searched rate.
METHODS: dict[str, Callable[[int, float, Callable[..., Run]], Run]] = {
    SEARCHED: lambda seed, rate, run: run(seed, learning_rate=rate),
    RULE: lambda seed, rate, run: run(seed),
    "rule × ⅓": lambda seed, rate, run: run(seed, _UNIT / 2),
    "rule × ⅔": lambda seed, rate, run: run(seed, _UNIT),
    "rule × 4/3": lambda seed, rate, run: run(seed, 2 * _UNIT),
    "rule × 8/3": lambda seed, rate, run: run(seed, 4 * _UNIT),
    "rule, 1/√t": lambda seed, rate, run: run(seed, is_endless=True),
    ADAMM: lambda seed, rate, run: run(seed, _UNIT * _LONGER, is_adamm=True),
}


@functools.cache
def _problem(name: str, dtype: str) -> Problem:
    problem = PROBLEMS[name]()
    return problem._replace(start=optax.tree.cast(problem.start, dtype))


@functools.cache
def _found(name: str, dtype: str, seed: int) -> zo.runs.LearningRate:
    """The measured rate."""
    problem = _problem(name, dtype)
    return zo.find_learning_rate(
        problem.loss,
        problem.start,
        None,
        sample=problem.sample,
        key=seed,
        distribution=_distribution(dtype),
        smoothing=_smoothing(name, dtype),
    )


def _smoothing(name: str, dtype: str) -> float:
    """μ, by the length of directions: 1 in float32, and about √d in bfloat16."""
    size = optax.tree.size(_problem(name, dtype).start)
    return 5e-3 if dtype == "float32" else 5e-3 / math.sqrt(size)


def _distribution(dtype: str) -> zo.distributions.Distribution:
    """Directions, of rank 1 in bfloat16, whose precision would round others away."""
    return zo.orthonormal() if dtype == "float32" else zo.low_rank()


@functools.cache
def _program(name: str, num_directions: int, dtype: str) -> Callable[[Run], End]:
    """The compiled runs of a problem, of any length and at any rate."""
    problem = _problem(name, dtype)
    smoothing, distribution = _smoothing(name, dtype), _distribution(dtype)
    estimator = zo.forward_difference(distribution, num_directions, smoothing)
    program = jax.jit(functools.partial(_end, problem, estimator))
    return lambda run: End(*map(float, program(run)))


def _end(problem: Problem, estimator: Any, run: Run) -> tuple[jax.Array, ...]:
    """The fields of the end of a run."""
    moments = _either(run.is_adamm, run.b1)

    def solver(rate: Any) -> Any:
        scaled = optax.chain(moments, optax.scale(-rate), *_rounding(problem))
        return zo.solver(problem.loss, scaled, estimator)

    def step(t: jax.Array, state: Any) -> Any:
        endless = 1 / jnp.sqrt(1 + t / 100)
        falling = jnp.where(run.is_endless, endless, 1 - t / run.num_steps)
        batch = problem.sample(jax.random.fold_in(run.key, t), run.num_examples)
        return solver(run.learning_rate * falling)[1](state, batch)[0]

    begun = solver(0.0)[0](problem.start, run.key)
    params = jax.lax.fori_loop(0, run.num_steps, step, begun).params
    last = tuple(z[-_VALIDATION:] for z in problem.train)
    return tuple(problem.loss(params, x) for x in (last, problem.held_out))


def _either(is_adamm: Any, b1: Any) -> optax.GradientTransformation:
    """The moments of R-AdaZO or of ZO-AdaMM, as a traced value says."""
    both = [
        scale(b1=b1, bias_correction=True)
        for scale in (zo.transforms.scale_by_radazo, zo.transforms.scale_by_zo_adamm)
    ]

    def init(params: Any) -> Any:
        return [scale.init(params) for scale in both]

    def update(updates: Any, states: Any, params: Any = None) -> Any:
        (one, first), (other, second) = (
            scale.update(updates, state, params)
            for scale, state in zip(both, states, strict=True)
        )
        chosen = jax.tree.map(lambda a, b: jnp.where(is_adamm, b, a), one, other)
        return chosen, [first, second]

    return optax.GradientTransformation(init, update)


def _rounding(problem: Problem) -> Iterable[optax.GradientTransformation]:
    """Stochastic rounding, without which most updates of bfloat16 are lost."""
    dtypes = {x.dtype for x in jax.tree.leaves(problem.start)}
    return () if dtypes == {jnp.float32.dtype} else (zo.stochastic_rounding(1),)


def lost(row: dict[str, Any], reference: str = SEARCHED) -> dict[str, np.ndarray]:
    """The losses of the methods in each run: [seeds], infinite if one failed.

    Args:
      row: A row of the record.
      reference: The method that loses nothing, or "best": the best rate of this row.
    """
    ends = {name: array(values) for name, values in row["ends"].items()}
    names = _RATES if reference == "best" else [reference]
    least = min(ends[name].mean() for name in names)
    gain = np.mean(row["start"]) - least
    return {name: (end - least) / gain for name, end in ends.items()}


def ratio(row: dict[str, Any], name: str) -> float:
    """ln(end / best), of the mean losses of a method and of the searched rate."""
    end, best = (array(row["ends"][method]).mean() for method in (name, SEARCHED))
    return float(np.log(end / best)) if best > 0 else np.nan


def kind(row: dict[str, Any]) -> str:
    """The settings that are named in a line of a table, all but the problem."""
    named = [f"K = {row['num_directions']}"]
    if row["b1"] != Case._field_defaults["b1"]:
        named.append(f"β₁ = {row['b1']:g}")
    if row["evaluations"] < EVALUATIONS:
        named.append(f"{row['evaluations']:,} evaluations")
    if row["evaluations"] > EVALUATIONS:
        named.append(f"{round(row['steps'], -3):,} steps")
    if row["dtype"] != Case._field_defaults["dtype"]:
        named.append(row["dtype"])
    return ", ".join(named)


def tables(content: dict[str, Any]) -> list[Table]:
    """The methods over all rows, the rule by kinds of rows, and each row."""
    rows = content["rows"]
    kinds = {name: [r for r in rows if kind(r) == name] for name in map(kind, rows)}
    heads = ["median", "mean", "worst run", "diverged"]
    return [
        Table(
            "Held-out loss lost, over all rows: 0 is the searched rate, 1 no progress",
            ["method", *heads],
            [(name, *_summary(rows, name)) for name in METHODS if name != SEARCHED],
        ),
        Table(
            "Lost by the rule, by kinds of rows; the last column is the mean if 0 is "
            "the best of the six rates on the held-out examples themselves",
            ["rows", "problems", *heads, "mean, to the best"],
            [
                (name, str(len(some)), *_summary(some, RULE), _to_best(some))
                for name, some in (kinds | {"all": rows}).items()
            ],
        ),
        Table(
            "The mean over three runs; *searched* is a multiple of the rule; "
            "ln(end / best) is of the rule",
            ["problem", "rows", SEARCHED, *_EACH, "ln(end / best)"],
            [(row["problem"], kind(row), _multiple(row), *_means(row)) for row in rows],
        ),
    ]


_RATES = (SEARCHED, RULE, "rule × ⅓", "rule × ⅔", "rule × 4/3", "rule × 8/3")
_EACH = [name for name in METHODS if name != SEARCHED]


def _summary(rows: Sequence[dict[str, Any]], name: str) -> tuple[str, ...]:
    """The median, the mean and the worst run of a method; how often it diverged."""
    rows = [row for row in rows if name in row["ends"]]
    found = np.stack([lost(row)[name] for row in rows])
    cells = np.median(found.mean(axis=1)), found.mean(), found.max()
    diverged = int(np.sum(found.max(axis=1) > 1))
    return (*map(_shown, cells), f"{diverged} of {len(rows)}")


def _to_best(rows: Sequence[dict[str, Any]]) -> str:
    return _shown(float(np.mean([lost(row, "best")[RULE] for row in rows])))


def _multiple(row: dict[str, Any]) -> str:
    """The searched rate over the rule's."""
    return f"{row['searched'] / np.exp(np.mean(np.log(row['learning_rates']))):.2g}"


def _means(row: dict[str, Any]) -> list[str]:
    found = lost(row)
    means = [found[name].mean() if name in found else np.nan for name in _EACH]
    return [_shown(x) for x in (*means, ratio(row, RULE))]


def _shown(x: float) -> str:
    """A cell; it is empty without a value, as of the ratio of rewards."""
    return "" if np.isnan(x) else f"{x:.2f}" if np.isfinite(x) else "∞"


@campaign(__doc__)
@options.listed("--problems", of=PROBLEMS, text="Problems")
def main(problems: Sequence[str]) -> Campaign:
    chosen = [case for case in cases() if case.problem in problems]
    rows = [(case._asdict(), functools.partial(measured, case)) for case in chosen]
    return Campaign(rows, tables=tables)


if __name__ == "__main__":
    main()
