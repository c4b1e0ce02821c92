"""The learning rate of a run whose settings have none: it is measured at its start."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import radazo_jax as zo
from radazo_llm.tune.data import Batch
from radazo_llm.tune.settings import Settings
from radazo_llm.tune.train import Job, State, loss_fn

_BATCHES = 8  # Of examples that the minibatches of the probe are drawn from.


def before_rate(settings: Settings) -> Settings:
    """The settings that a measured rate is for: a run must start with them.

    `zo.find_learning_rate` is for steps with bias correction: without it, the first
    step is 10 times as long, and a short run leaves the region that was measured.
    """
    if settings.learning_rate or settings.method != "radazo":
        return settings
    return dataclasses.replace(settings, bias_correction=True)


def with_rate(
    settings: Settings, job: Job, state: State, parts: Sequence[Batch]
) -> Settings:
    """The settings with a learning rate, which falls to 0 over the run.

    It depends on the untuned model, the data and the settings alone, so that a run that
    resumes finds it again.

    Args:
      settings: The settings; a rate of 0 is measured.
      job: The data of the steps.
      state: The state before the first step.
      parts: The examples to train on, in buckets.

    Raises:
      ValueError: If the method is not R-AdaZO, or `zo.find_learning_rate` finds none.
    """
    if settings.learning_rate:
        return settings
    if settings.method != "radazo":
        raise ValueError(
            f"learning_rate must be positive with the method {settings.method}; got 0. "
            "It is measured for radazo alone."
        )
    if settings.num_steps < 2:
        raise ValueError(
            f"learning_rate must be positive in a run of {settings.num_steps} step; "
            "got 0. It is measured for 2 steps or more."
        )
    try:
        found = zo.find_learning_rate(
            _loss_of(settings, job),
            state.params,
            settings.num_steps,
            sample=_sample_of(settings, max(parts, key=lambda part: len(part.label))),
            b1=settings.b1,
            key=job.key,
            distribution=settings.estimator().distribution,
        )
    except ValueError as error:
        raise ValueError(
            "--learning-rate must be given if none can be measured, as of a model that "
            f"has not learned anything: {error!s:.120}... Give --learning-rate 1e-3, "
            "and a smaller one if the loss rises."
        ) from error
    print(f"{found}\n")
    return dataclasses.replace(
        settings, learning_rate=found.learning_rate, schedule="cosine"
    )


def _loss_of(settings: Settings, job: Job) -> Any:
    # The accuracy moves in jumps: the loss of the same choices measures its rate.
    jumps = settings.objective == "accuracy"
    objective = "classification" if jumps else settings.objective

    def loss(params: nnx.State, batch: Batch) -> jax.Array:
        model = nnx.merge(job.graphdef, params, job.rest)
        return loss_fn(model, batch, objective)

    return loss


def _sample_of(settings: Settings, part: Batch) -> Any:
    """A function from a key to a minibatch of some examples of a bucket."""
    size, total = settings.batch_size, len(part.label)
    rng = np.random.default_rng((settings.seed, 1 << 31))
    rows = rng.permutation(total)[: _BATCHES * size]
    some = Batch(*(np.asarray(values[rows]) for values in part))

    def sample(key: jax.Array) -> Batch:
        chosen = jax.random.permutation(key, len(rows))[:size]
        return jax.tree.map(lambda x: jnp.asarray(x)[chosen], some)

    return sample
