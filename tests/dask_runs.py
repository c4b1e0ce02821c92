"""Functions that run on Dask's workers in tests, which import this module."""

import os

import jax
import jax.numpy as jnp
import numpy as np

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


def fails():
    raise FileNotFoundError("checkpoint.npz")


def differs():
    """Other parameters in each process."""
    fun, params = language_model()
    return fun, params | {"up": params["up"] + np.float32(os.getpid())}
