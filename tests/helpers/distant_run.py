"""The driver of a run on distant workers: ADDRESS WORKERS OUTPUT."""

import sys

import numpy as np
from distributed import Client

import radazo_jax as zo
from tests.helpers import dask_runs

STEPS = 30


def main():
    address, workers, output = sys.argv[1:]
    with Client(address, timeout=60) as client:
        client.wait_for_workers(int(workers), timeout=60)
        result = zo.distribute(
            **dask_runs.make_square(100),
            client=client,
            num_steps=STEPS,
            progress=False,
        )
    counts = [x.evaluations for x in result.workers.values()]
    failed = np.asarray(result.failures)
    seconds = result.history.seconds
    np.savez(
        output, params=result.params, counts=counts, failed=failed, seconds=seconds
    )


if __name__ == "__main__":
    main()
