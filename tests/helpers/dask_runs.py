"""Runs for Dask's workers, which import this module."""

import contextlib
import os
import pathlib
import sys

import jax.numpy as jnp
import numpy as np

import radazo_jax as zo
from tests.helpers.compare import Hashed


def square(params):
    return jnp.sum(params**2)


def make_square(dimension):
    """A function of any dimension, which compiles at once."""
    return {
        "make_fun": lambda: (square, np.linspace(-1, 1, dimension, dtype=np.float32)),
        "params": None,
        "optimizer": zo.zo_sgd(1e-2 / dimension),
        "estimator": zo.forward_difference(Hashed(), 15),
    }


def listening():
    """The sockets of this process that wait for connections: addresses and ports."""
    found = set()
    for path in pathlib.Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found.add(os.readlink(path))
    sockets = []
    for name in ("tcp", "tcp6"):
        for line in pathlib.Path(f"/proc/self/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in found:
                sockets.append(fields[1])
    return sorted(sockets)


def remove_package():
    """Makes this process one in which the package is not installed."""
    names = [name for name in sys.modules if name.split(".")[0] == "radazo_jax"]
    for name in names:
        del sys.modules[name]
    sys.modules["radazo_jax"] = None


def fails():
    raise FileNotFoundError("checkpoint.npz")


def differs():
    """Other parameters in each process."""
    params = np.full(3, os.getpid(), np.float32)
    return square, params
