"""Measures a step of `distribute`: its time, and bytes between driver and worker.

    python -m benchmarks.workers --output records/benchmarks/workers.json

The worker is a process of Dask on this machine, and evaluates all members. Linux counts
the bytes of the connection, with Dask's headers. The function takes next to no time.
"""

import functools
import socket
import struct
import time
from typing import Any

import distributed
import jax.numpy as jnp
import numpy as np

import radazo_jax as zo
from common.campaign import Campaign, campaign

STEPS = 10
# Dimension, and members.
SIZES = ((10**4, 64), (10**4, 16), (10**7, 16))


def traffic(client: distributed.Client) -> dict[str, np.ndarray]:
    """The bytes sent and received, by address, as Linux counts them."""
    found: dict[str, np.ndarray] = {}
    for group in (client.rpc.available, client.rpc.occupied):
        for address, comms in group.items():
            for comm in comms:
                info = comm.stream.socket.getsockopt(
                    socket.IPPROTO_TCP, socket.TCP_INFO, 136
                )
                counts = np.array(struct.unpack_from("<QQ", info, 120))
                found[address] = found.get(address, 0) + counts
    return found


def measured(dimension: int, num_members: int) -> dict[str, Any]:
    """Bytes and time per step of a worker that evaluates all members."""

    def make_fun() -> tuple[Any, Any]:
        return lambda x: jnp.sum(x**2), jnp.linspace(-1, 1, dimension)

    counted: list[dict[str, np.ndarray]] = []
    times: list[float] = []

    def callback(report: Any) -> None:
        times.append(time.perf_counter())
        counted.append(traffic(client))

    with (
        distributed.LocalCluster(
            n_workers=1, threads_per_worker=1, dashboard_address="127.0.0.1:0"
        ) as cluster,
        distributed.Client(cluster, direct_to_workers=True) as client,
    ):
        result = zo.distribute(
            make_fun,
            None,
            zo.radazo(1e-3),
            zo.forward_difference(zo.rademacher(), num_members - 1),
            client=client,
            num_steps=STEPS,
            progress=False,
            callback=callback,
        )
        (address,) = result.workers
    steps = np.diff([x[address] for x in counted[2:]], axis=0).mean(axis=0)
    return {
        "sent_bytes": float(steps[0]),
        "received_bytes": float(steps[1]),
        "allowed_bytes": 8 * num_members + 1000,
        "step_ms": 1e3 * float(np.median(np.diff(times[2:]))),
    }


@campaign(__doc__)
def main() -> Campaign:
    return Campaign(
        (
            {"table": "wire", "d": dimension, "members": num_members},
            functools.partial(measured, dimension, num_members),
        )
        for dimension, num_members in SIZES
    )


if __name__ == "__main__":
    main()
