"""Which parts of a run are the same, to the bit, on other processors and versions.

    python -m campaigns.bits --output records/trust/bits.json \
        --python jax_0.10.0=../another/bin/python

A process computes directions, estimates and runs, others compute them with other
instructions, other numbers of threads and, by `--python`, other versions. What is not
equal is told by the largest difference, relative to the largest number.
"""

import functools
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
import jax
import jax.numpy as jnp
import numpy as np

import radazo_jax as zo
from common import RESEARCH, distributions
from common.campaign import Campaign, campaign

DISTRIBUTIONS = distributions.DISTRIBUTIONS | {"orthonormal": zo.orthonormal()}
SHAPES = {"first": (64, 48), "bias": (48,), "second": (48, 10)}
STEPS = 50
ISA = "--xla_cpu_max_isa="
ONE = "--xla_cpu_multi_thread_eigen=false"
# What a process has of flags and of processors.
SYSTEMS: dict[str, tuple[str, int | None]] = {
    "as it is": ("", None),
    "AVX2": (ISA + "AVX2", None),
    "SSE4.2": (ISA + "SSE4_2", None),
    "1_thread": (ONE, 1),
}


def start() -> dict[str, jax.Array]:
    rng = np.random.default_rng(0)
    return {
        name: jnp.asarray(rng.normal(size=shape) / 8, jnp.float32)
        for name, shape in SHAPES.items()
    }


INPUTS = np.random.default_rng(1).normal(size=(32, 64)).astype(np.float32)


def network(params: dict[str, jax.Array]) -> jax.Array:
    """A loss with products of matrices, whose sums are rounded."""
    hidden = jnp.tanh(INPUTS @ params["first"] + params["bias"])
    return jnp.mean(jnp.square(hidden @ params["second"] - 1))


def rounded(params: dict[str, jax.Array]) -> jax.Array:
    """A loss that is the same wherever sums are rounded a little otherwise."""
    return jnp.round(network(params) * 2**10) / 2**10


def computed() -> dict[str, np.ndarray]:
    """All that is compared, by its name."""
    params, key, result = start(), jax.random.key(0), {}

    def keep(name: str, tree: Any) -> None:
        leaves = [np.ravel(x).astype(np.float64) for x in jax.tree.leaves(tree)]
        result[name] = np.concatenate(leaves)

    for name, distribution in DISTRIBUTIONS.items():
        draw: Callable[[jax.Array], Any] = jax.jit(
            lambda key, distribution=distribution: distribution.materialize(
                distribution.sample(key, params), params
            )
        )
        keep(f"direction {name}", draw(key))
        estimator = zo.forward_difference(distribution, 4, 1e-2)
        estimate = jax.jit(zo.value_and_grad(network, estimator))
        keep(f"estimate {name}", estimate(key, params))
        for run, fun in (("run", network), ("run on rounded values", rounded)):
            ended = zo.train(
                *(fun, params, zo.radazo(1e-3), estimator),
                num_steps=STEPS,
                key=0,
                progress=False,
            )
            keep(f"{run} {name}", (ended.params, ended.values))
    return result


def given() -> dict[str, np.ndarray]:
    """Parameters after steps on given values, as workers of a run take them."""
    optimizers = {"zo_sgd": zo.zo_sgd(1e-3), "radazo": zo.radazo(1e-3)}
    names = ("rademacher", "orthonormal", "gaussian")
    result, start = {}, np.linspace(-1, 1, 1000, dtype=np.float32)
    values = np.random.default_rng(0).normal(size=(30, 9)).astype(np.float32)
    for name, optimizer in [("rademacher", "radazo"), *((n, "zo_sgd") for n in names)]:
        estimator = zo.forward_difference(DISTRIBUTIONS[name], 8)
        run = zo.ask_tell(start, optimizers[optimizer], estimator)
        for value in values:
            run.ask()
            run.tell(value)
        result[f"{name} {optimizer}"] = np.asarray(run.params)
    return result


def elsewhere(
    python: str, flags: str, processors: int | None, what: Any = computed
) -> dict[str, Any]:
    """Runs a computation of this module in another process: its arrays, by name."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "computed.npz"
        environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
        call = f"np.savez({str(path)!r}, **bits.{what.__name__}())"
        code = f"import numpy as np; from campaigns import bits; {call}"
        command = [python, "-c", code]
        if processors is not None:
            command = ["taskset", "-c", "0", *command]
        subprocess.run(command, env=environment, cwd=RESEARCH, check=True)
        with np.load(path, allow_pickle=False) as file:
            return dict(file)


def compared(found: dict[str, Any], right: dict[str, Any]) -> dict[str, str]:
    """Compares each array with the one computed elsewhere."""
    result = {}
    for name, expected in right.items():
        difference = np.abs(found[name] - expected).max() / np.abs(expected).max()
        equal = found[name].tobytes() == expected.tobytes()
        result[name] = "equal" if equal else f"{difference:.0e}"
    return result


def rows(systems: dict[str, dict[str, str]]) -> list[dict[str, str]]:
    """Returns a row for each kind and distribution."""
    names = next(iter(systems.values()))
    made = []
    for name in names:
        what, _, distribution = name.rpartition(" ")
        made.append(
            {"what": what, "distribution": distribution}
            | {system: found[name] for system, found in systems.items()}
        )
    return sorted(made, key=lambda row: list(names).index(f"{row['what']} sphere"))


def measured(processes: dict[str, tuple[Any, ...]]) -> list[dict[str, str]]:
    right = elsewhere(sys.executable, *SYSTEMS["as it is"])
    return rows({n: compared(elsewhere(*p), right) for n, p in processes.items()})


@campaign(__doc__)
@click.option(
    "--python", "pythons", multiple=True, help="NAME=PATH of another; can be repeated."
)
def main(pythons: Sequence[str]) -> Campaign:
    others = {n: (sys.executable, *s) for n, s in SYSTEMS.items() if n != "as it is"}
    for text in pythons:
        name, python = text.split("=", 1)
        others[name] = (python, "", None)
    return Campaign([({}, functools.partial(measured, others))])


if __name__ == "__main__":
    main()
