"""A run by backpropagation, to compare with: AdamW on the loss of `radazo-llm tune`."""

import functools
from typing import Any

import jax
import numpy as np
import optax
from tqdm import tqdm

from radazo_llm.settings import Settings
from radazo_llm.tune.job import Tuned

PASSES = 3  # Of a step: a backward pass counts as two.


def adamw(settings: Settings, made: Tuned) -> list[dict[str, Any]]:
    """The evaluations of a run, with the batches of the same settings elsewhere."""
    job, rows = made.job, list[dict[str, Any]]()
    rates = jax.numpy.asarray(settings.rates(None, [settings.num_steps]))
    optimizer = optax.adamw(lambda count: rates[count], settings.b1, settings.b2)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params: Any, state: Any, key: jax.Array) -> tuple[Any, Any]:
        gradient = jax.grad(job.fun)(params, job.sample(key))
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state

    params = jax.tree.map(lambda x: x.copy(), job.params)
    state = optimizer.init(params)
    for i in tqdm(range(settings.num_steps), desc="AdamW", unit="step"):
        params, state = step(params, state, jax.random.fold_in(job_key(settings), i))
        done = i + 1
        if done % settings.eval_every == 0 or done == settings.num_steps:
            rows.append({"step": done} | job.measure(params, done))
            if not np.isfinite(rows[-1]["dev_loss"]):
                break
    return rows


def job_key(settings: Settings) -> jax.Array:
    return jax.random.key(settings.seed)
