"""Worker processes of Dask on this machine, and what they train."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import distributed
import jax
import jax.numpy as jnp
import numpy as np

import radazo_jax as zo
from common import RESEARCH, decoder

SIZES = decoder.Sizes(2, 32, 4, 64, 32, "float32")
TOKENS = np.random.default_rng(0).integers(0, 64, (4, 32))
ONE_THREAD = "--xla_cpu_multi_thread_eigen=false"


def language_model() -> tuple[Any, Any]:
    """A decoder of 31,000 parameters, as each worker builds it."""
    params = jax.jit(lambda key: decoder.init(key, SIZES))(jax.random.key(0))
    return lambda params: decoder.loss_fn(params, TOKENS, SIZES.heads), params


def square(dimension: int) -> tuple[Any, Any]:
    return lambda x: jnp.sum(x**2), jnp.linspace(-1, 1, dimension)


def run_of(num_members: int, make_fun: Any = language_model) -> dict[str, Any]:
    return {
        "make_fun": make_fun,
        "params": None,
        "optimizer": zo.radazo(1e-3),
        "estimator": zo.forward_difference(zo.rademacher(), num_members - 1),
    }


@contextlib.contextmanager
def scheduler(folder: Path) -> Iterator[tuple[distributed.Client, "Processes"]]:
    """A scheduler, and the means to start worker processes."""
    with distributed.LocalCluster(
        n_workers=0, dashboard_address="127.0.0.1:0", silence_logs=100
    ) as cluster:
        processes = Processes(cluster.scheduler_address, folder)
        with distributed.Client(cluster) as client:
            try:
                yield client, processes
            finally:
                for process in processes.alive.values():
                    process.kill()


class Processes:
    """Worker processes without a nanny, by name; what they compile is kept."""

    def __init__(self, address: str, folder: Path):
        self.alive: dict[str, subprocess.Popen[bytes]] = {}
        self._address, self._count = address, 0
        self._environment = os.environ | {
            "PYTHONPATH": str(RESEARCH),
            "XLA_FLAGS": ONE_THREAD,
            "JAX_COMPILATION_CACHE_DIR": str(folder / "cache"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }

    def start(self, cpu: int | None = None) -> str:
        name, self._count = f"worker{self._count}", self._count + 1
        pinned = [] if cpu is None else ["taskset", "-c", str(cpu)]
        module = [sys.executable, "-m", "distributed.cli.dask_worker"]
        options = ["--no-nanny", "--nthreads", "1", "--name", name, "--no-dashboard"]
        self.alive[name] = subprocess.Popen(
            [*pinned, *module, self._address, *options],
            env=self._environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        return name

    def kill(self, name: str) -> None:
        process = self.alive.pop(name)
        process.kill()
        process.wait()


def serving(client: distributed.Client, names: Any) -> list[str]:
    """The workers that have built the run."""
    known = client.scheduler_info(n_workers=-1)["workers"]
    built = client.run(serves, on_error="ignore")
    found = {known[x]["name"] for x in known if built.get(x)}
    return [name for name in names if name in found]


def serves(dask_worker: Any) -> bool:
    """Whether a worker has built the run."""
    return "radazo_jax_step" in dask_worker.handlers
