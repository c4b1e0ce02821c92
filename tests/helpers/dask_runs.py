"""Runs for Dask's workers, which import this module."""

import contextlib
import os
import pathlib

import jax
import jax.numpy as jnp
import numpy as np

import radazo_jax as zo
from tests.helpers.compare import Hashed

VOCABULARY, WIDTH, LENGTH = 32, 16, 24
TOKENS = (np.arange(4 * (LENGTH + 1)).reshape(4, -1) * 7 % 29 % VOCABULARY).astype(int)


def language_model():
    """A decoder of one layer, and its parameters."""
    rng = np.random.default_rng(0)
    shapes = {
        "embedding": (VOCABULARY, WIDTH),
        "attention": (WIDTH, 3 * WIDTH),
        "up": (WIDTH, 4 * WIDTH),
        "down": (4 * WIDTH, WIDTH),
    }
    params = {
        name: (rng.normal(size=shape) / np.sqrt(shape[0])).astype(np.float32)
        for name, shape in shapes.items()
    }
    return language_loss, params


def language_loss(params):
    """The cross-entropy of the next token."""
    hidden = params["embedding"][TOKENS[:, :-1]]
    query, key, value = jnp.split(hidden @ params["attention"], 3, axis=-1)
    scores = jnp.einsum("bid,bjd->bij", query, key) / WIDTH**0.5
    mask = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))[None]
    weights = jax.nn.softmax(jnp.where(mask, scores, -1e9))
    hidden = hidden + jnp.einsum("bij,bjd->bid", weights, value)
    hidden = hidden + jnp.tanh(hidden @ params["up"]) @ params["down"]
    logits = jax.nn.log_softmax(hidden @ params["embedding"].T)
    picked = jnp.take_along_axis(logits, TOKENS[:, 1:, None], axis=-1)
    return -jnp.mean(picked)


LANGUAGE = {
    "make_fun": language_model,
    "params": None,
    "optimizer": zo.radazo(1e-3),
    "estimator": zo.forward_difference(zo.rademacher(), 15),
}


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


def fails():
    raise FileNotFoundError("checkpoint.npz")


def differs():
    """Other parameters in each process."""
    params = np.full(3, os.getpid(), np.float32)
    return square, params
