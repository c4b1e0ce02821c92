"""How long a zeroth-order step takes, in multiples of what it cannot do without.

On Rosenbrock's function, for every law, by forward differences with K = 10 directions
and by central ones with K = 5 (an evaluation fewer), the time of a
whole R-AdaZO step (evaluations, estimate, update) is divided, within one run, by the
time of

* ``evaluations``: its function evaluations alone, at points that lie ready;
* ``perturbed``: the same evaluations with the directions drawn;

and these times are divided by that of the step:

* ``naive``: the same step as one writes it by hand, with ``jax.random.normal``,
  ``tree_map`` and ``vmap``;
* ``evosax``: Open_ES with a population of 10, which are 5 pairs, where it is installed;
* ``torchzero``: randomized finite differences with the same K, and Adam, where it is.

All JAX runs are scans of many steps in one program, so that no dispatch is timed. Two
further tables compare the generator with ``jax.random``, and ``minimize`` with its
progress bar and without.

    python examples/benchmarks/step_time.py --output docs/benchmarks/step_time.json
"""

import argparse
import functools
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import others
from tabulate import tabulate
from timing import bars, medians, record, scanned, write

import radazo_jax as zo
from radazo_jax._src import counter, kept

SMOOTHING = 5e-3
LEARNING_RATE = 1e-6
LAWS = {
    "sphere": zo.sphere(),
    "gaussian": zo.gaussian(),
    "rademacher": zo.rademacher(),
    "coordinate": zo.coordinate(),
}
ESTIMATORS = {"forward": zo.forward_difference, "central": zo.central_difference}

Step = Callable[[Any, jax.Array], Any]


def rosenbrock(x: jax.Array) -> jax.Array:
    """Rosenbrock's function, as in the paper."""
    return jnp.sum(100.0 * (x[1:] - x[:-1] ** 2) ** 2 + (1.0 - x[:-1]) ** 2)


def key_of(i: jax.Array) -> jax.Array:
    return jax.random.fold_in(jax.random.key(0), i)


def our_step(estimator: zo.GradientEstimator) -> Step:
    optimizer = zo.radazo(LEARNING_RATE)
    value_and_grad = zo.value_and_grad(rosenbrock, estimator)

    def step(carry: Any, i: jax.Array) -> Any:
        x, state = carry
        _, gradient = value_and_grad(key_of(i), x)
        updates, state = optimizer.update(gradient, state, x)
        return optax.apply_updates(x, updates), state

    return step


def naive_step(num_directions: int, central: bool) -> Step:
    """The step by hand: Gaussian draws from ``jax.random``, normalized, under vmap."""
    optimizer = zo.radazo(LEARNING_RATE)

    def step(carry: Any, i: jax.Array) -> Any:
        x, state = carry
        base = rosenbrock(x)

        def term(key: jax.Array) -> jax.Array:
            z = jax.random.normal(key, x.shape)
            u = z / jnp.linalg.norm(z)
            shifted = lambda s: jax.tree.map(lambda p, v: p + s * v, x, u)  # noqa: E731
            above = rosenbrock(shifted(SMOOTHING))
            if central:
                slope = (above - rosenbrock(shifted(-SMOOTHING))) / (2 * SMOOTHING)
            else:
                slope = (above - base) / SMOOTHING
            return slope * u

        terms = jax.vmap(term)(jax.random.split(key_of(i), num_directions))
        gradient = x.size * jnp.mean(terms, axis=0)
        updates, state = optimizer.update(gradient, state, x)
        return optax.apply_updates(x, updates), state

    return step


def evaluations_step(points: jax.Array, i: jax.Array) -> jax.Array:
    """Evaluations at points that lie ready; writing them back costs one pass."""
    del i
    return points + 1e-30 * jnp.expand_dims(jax.vmap(rosenbrock)(points), 1)


def perturbed_step(law: zo.Law, num_directions: int, central: bool) -> Step:
    """The evaluations of a step with their directions drawn, and nothing else."""

    def step(x: jax.Array, i: jax.Array) -> jax.Array:
        stored = kept.keep(law, jax.random.split(key_of(i), num_directions), x)
        evaluate = functools.partial(zo.perturb(rosenbrock), x)
        values = jax.vmap(lambda u: evaluate(u, SMOOTHING))(stored).sum()
        if central:
            values += jax.vmap(lambda u: evaluate(u, -SMOOTHING))(stored).sum()
        else:
            values += rosenbrock(x)
        return x + 1e-30 * values

    return step


def torch_rosenbrock(tensors: list[Any]) -> Any:
    [x] = tensors
    a, b = x[:-1], x[1:]
    return (100.0 * (b - a**2) ** 2 + (1.0 - a) ** 2).sum()


def measure(
    dimension: int, name: str, population: int, repeats: int
) -> list[dict[str, Any]]:
    """The rows of one estimator at one dimension."""
    central = name == "central"
    num_directions = population // 2 if central else population
    # So many that the first touch of the memory does not count.
    num_steps = max(20, min(2000, 20_000_000 // dimension))
    x = jnp.full((dimension,), 0.5)
    start = (x, zo.radazo(LEARNING_RATE).init(x))
    num_evaluations = population if central else num_directions + 1
    shifts = jnp.linspace(0.0, 1e-3, num_evaluations)
    runs = {
        "evaluations": scanned(evaluations_step, x[None] + shifts[:, None], num_steps),
        "naive": scanned(naive_step(num_directions, central), start, num_steps),
    }
    for law_name, law in LAWS.items():
        estimator = ESTIMATORS[name](law, num_directions, SMOOTHING)
        runs[f"step {law_name}"] = scanned(our_step(estimator), start, num_steps)
        runs[f"perturbed {law_name}"] = scanned(
            perturbed_step(law, num_directions, central), x, num_steps
        )
    options = (SMOOTHING, LEARNING_RATE)
    if others.installed("evosax"):
        ask_and_tell, state = others.open_es(rosenbrock, x, population, *options)
        runs["evosax"] = scanned(
            lambda state, i: ask_and_tell(state, key_of(i)), state, num_steps
        )
    torch_steps = max(3, num_steps // 20)
    if others.installed("torchzero"):
        torch_step = others.torchzero(
            torch_rosenbrock, [np.asarray(x)], num_directions, central, *options
        )
        runs["torchzero"] = lambda: [torch_step() for _ in range(torch_steps)][-1]

    seconds = medians(runs, repeats)
    scale = dict.fromkeys(runs, 1e6 / num_steps) | {"torchzero": 1e6 / torch_steps}
    micro = {run: seconds[run] * scale[run] for run in runs}
    rows = []
    for law_name in LAWS:
        step = micro[f"step {law_name}"]
        row = {
            "d": dimension,
            "estimator": name,
            "K": num_directions,
            "law": law_name,
            "step_us": step,
            "step/evaluations": step / micro["evaluations"],
            "step/perturbed": step / micro[f"perturbed {law_name}"],
            "naive/step": micro["naive"] / step,
        }
        for other in ("evosax", "torchzero"):
            if other in micro:
                row[f"{other}/step"] = micro[other] / step
        rows.append(row)
    return rows


def measure_generator(size: int, repeats: int) -> list[dict[str, Any]]:
    """``counter`` against ``jax.random``: whole programs that draw ``size`` numbers."""
    key = jax.random.key(0)
    at = counter.positions((size,))
    draws = {
        "bits": (counter.bits, jax.random.bits),
        "normal": (counter.normal, jax.random.normal),
        "fast_normal": (counter.fast_normal, jax.random.normal),
    }
    rows = []
    for name, (ours, theirs) in draws.items():
        runs = {
            "counter": jax.jit(functools.partial(ours, counter=at)),
            "jax.random": jax.jit(functools.partial(theirs, shape=(size,))),
        }
        seconds = medians(
            {of: functools.partial(run, key) for of, run in runs.items()},
            max(repeats, 20),
        )
        rows.append(
            {
                "draw": name,
                "size": size,
                "ns/number": seconds["counter"] * 1e9 / size,
                "jax.random_ns/number": seconds["jax.random"] * 1e9 / size,
                "jax.random/counter": seconds["jax.random"] / seconds["counter"],
            }
        )
    return rows


def measure_progress(dimension: int, repeats: int) -> list[dict[str, Any]]:
    """``minimize`` with its progress bar against ``minimize`` without."""
    x = jnp.full((dimension,), 0.5)
    optimizer, estimator = zo.radazo(LEARNING_RATE), zo.forward_difference()
    num_steps = 20_000_000 // dimension

    def run(progress: bool) -> Any:
        return zo.minimize(
            rosenbrock, x, optimizer, estimator, num_steps, 0, progress=progress
        ).params

    seconds = medians(
        {
            "with": functools.partial(run, True),
            "without": functools.partial(run, False),
        },
        repeats,
    )
    ratio = seconds["with"] / seconds["without"]
    return [{"d": dimension, "num_steps": num_steps, "with/without": ratio}]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--dimensions", type=float, nargs="+", default=[1e3, 1e4, 1e5, 1e6]
    )
    parser.add_argument("--population", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--output", type=pathlib.Path)
    arguments = parser.parse_args()

    tables: dict[str, list[dict[str, Any]]] = {"steps": [], "generator": []}
    for dimension in map(int, arguments.dimensions):
        for name in ESTIMATORS:
            rows = measure(dimension, name, arguments.population, arguments.repeats)
            tables["steps"] += rows
            print(tabulate(rows, headers="keys", floatfmt=".2f"), end="\n\n")
        tables["generator"] += measure_generator(dimension, arguments.repeats)
    tables["progress"] = measure_progress(10_000, arguments.repeats)
    for name in ("generator", "progress"):
        print(tabulate(tables[name], headers="keys", floatfmt=".3f"), end="\n\n")
    if arguments.output:
        rows = [{"table": t, **row} for t, rows in tables.items() for row in rows]
        write(arguments.output, record(rows))
        columns = ("naive/step", "evosax/step", "torchzero/step")
        bars(
            arguments.output.with_suffix(".png"),
            {
                f"d = {r['d']:.0e}, {r['estimator']}, {r['law']}": r
                for r in tables["steps"]
            },
            columns,
        )


if __name__ == "__main__":
    main()
