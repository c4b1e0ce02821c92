"""Takes ten million steps of a tiny problem, and looks at memory and counts on the way.

    python -m campaigns.long_run --output records/trust/long_run.json

The run is a sequence of calls of `minimize`, each from the state of the last. It
starts close to the largest counts: its failed evaluations pass 2³¹, and its last
step is number 2³¹ - 1. Its directions, two per step, are numbered up to 2³². At the
end, the parameters and the counts are compared with their exact values. A second run
has a journal, and is rebuilt from it.
"""

import resource
import tempfile
import time
from pathlib import Path
from typing import Any

import click
import jax
import jax.numpy as jnp
import numpy as np

import radazo_jax as zo
from common import options
from common.record import record, write

START = np.zeros(4, np.float32)
CENTER = np.linspace(-1, 1, 4, dtype=np.float32)
OPTIMIZER = zo.zo_sgd(1e-2)
ESTIMATOR = zo.forward_difference(zo.orthonormal(), 2, smoothing=1e-3)
STEPS, FAILURES = 2**31 - 1, 2**31 - 2
PARTS = 10


def fun(x: jax.Array, fails: jax.Array) -> jax.Array:
    """A quadratic function that has no value at one step of 16."""
    return jnp.where(fails, jnp.nan, jnp.sum((x - CENTER) ** 2))


def sample(key: jax.Array) -> jax.Array:
    return jax.random.bernoulli(key, 1 / 16)


def mebibytes() -> float:
    """Returns the memory of this process, in MiB."""
    text = Path("/proc/self/statm").read_text()
    return int(text.split()[1]) * resource.getpagesize() / 2**20


def near_the_end(num_steps: int) -> Any:
    """The state of a run that has so many steps left."""
    state = zo.solver(fun, OPTIMIZER, ESTIMATOR).init(CENTER, 0)
    return state._replace(
        step=jnp.int32(STEPS - num_steps),
        failures=state.failures._replace(
            evaluations=jnp.int32(FAILURES - num_steps // 10)
        ),
    )


def long_run(num_steps: int) -> list[dict[str, Any]]:
    """Yields a row per part of the run: steps, memory, counts."""
    state, rows, steps_of_part = near_the_end(num_steps), [], num_steps // PARTS
    for part in range(PARTS):
        start = time.perf_counter()
        state = zo.minimize(
            *(fun, START, OPTIMIZER, ESTIMATOR),
            num_steps=steps_of_part,
            sample=sample,
            state=state,
            progress=False,
        ).state
        rows.append(
            {
                "table": "long_run",
                "steps": (part + 1) * steps_of_part,
                "step": int(state.step),
                "failed": int(state.failures.evaluations),
                "next_direction": 2 * int(state.step),
                "distance": float(np.abs(np.asarray(state.params) - CENTER).max()),
                "mib": mebibytes(),
                "us_per_step": 1e6 * (time.perf_counter() - start) / steps_of_part,
            }
        )
        print(rows[-1], flush=True)
    return rows


def with_journal(num_steps: int) -> dict[str, Any]:
    """A run with a journal, and its state rebuilt from it."""
    run = {"optimizer": OPTIMIZER, "estimator": ESTIMATOR}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.jsonl"
        before = mebibytes()
        result = zo.minimize(
            *(fun, CENTER),
            **run,
            sample=sample,
            num_steps=num_steps,
            key=0,
            progress=False,
            journal=path,
        )
        after = mebibytes()
        state = zo.replay(path, CENTER, **run, fun=fun, sample=sample)
        equal = jax.tree.map(lambda a, b: bool(jnp.all(a == b)), state, result.state)
        row = {"table": "journal", "steps": num_steps, "mib": after - before}
        row |= {"replay_mib": mebibytes() - after, "mb": path.stat().st_size / 1e6}
        return row | {"equal": all(jax.tree.leaves(equal))}


@options.command(__doc__)
@options.output
@click.option("--steps", type=options.COUNT, default=10**7)
@click.option("--journal-steps", type=options.COUNT, default=10**5)
def main(output: Path | None, steps: int, journal_steps: int) -> None:
    rows = long_run(steps)
    rows.append(with_journal(journal_steps))
    print(rows[-1])
    if output:
        write(output, record(rows))


if __name__ == "__main__":
    main()
