"""A run on workers that hold the model, to which only numbers are sent.

    radazo-llm tune --model MODEL … --workers tcp://scheduler:8786

Each worker reads the model and the data from the same paths on its own machine. The
machine of this program measures the model before and after the run.
"""

import contextlib
import functools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import radazo_jax as zo
from radazo_llm.models.model import LanguageModel
from radazo_llm.tune import train
from radazo_llm.tune.batches import bounds, buckets
from radazo_llm.tune.data import Batch
from radazo_llm.tune.rate import before_rate, with_rate
from radazo_llm.tune.report import METRICS
from radazo_llm.tune.run import Result, measure
from radazo_llm.tune.train import Settings, State

# Settings of the loop on one machine, at the values that they must have here.
FIXED = {"final_batch_size": 0, "num_buckets": 1, "last_layers": 0}


def run(
    settings: Settings,
    model: LanguageModel,
    train_split: Batch,
    dev: Batch,
    test: Batch | None = None,
    *,
    make: Callable[[], tuple[LanguageModel, Batch]],
    workers: str,
    folder: Path,
    resume: bool,
) -> Result:
    """Trains a model on workers.

    Args:
      settings: The settings of the run.
      model: The model, which is consumed.
      train_split: The examples to train on.
      dev: The examples whose accuracy is measured.
      test: Further examples to measure.
      make: Returns the model and the examples on a worker.
      workers: The address of a scheduler, or the number of processes to start here.
      folder: The folder of the journal and the metrics.
      resume: Whether to continue the journal in the folder.

    Raises:
      ValueError: If a setting is not for workers, or the folder has another run.
      RunError: If the workers are lost, or too many evaluations failed.
    """
    _check_settings(settings)
    path = folder / "journal.jsonl"
    if path.exists() and not resume:
        raise ValueError(
            f"{folder} has a run: resume it (--resume), or choose another folder "
            "(--output)."
        )
    splits = {"train": train_split, "dev": dev} | (
        {} if test is None else {"test": test}
    )
    ends = bounds(train_split, 1)
    data = {name: buckets(split, ends) for name, split in splits.items()}
    settings = before_rate(settings)
    job, state = train.start(settings, model)
    settings = with_rate(settings, job, state, data["train"])
    rates = [settings.learning_rate_at(i) for i in range(settings.num_steps)]
    with connected(workers) as client:
        rows = [{"step": 0} | measure(settings, job, state, data, True)]
        result = zo.distribute(
            functools.partial(make_fun, settings, make),
            None,
            settings.optimizer(functools.partial(_rate, tuple(rates)), settings.b1),
            settings.estimator(),
            client=client,
            num_steps=settings.num_steps,
            key=settings.seed,
            sample=functools.partial(
                _rows, len(train_split.label), settings.batch_size
            ),
            journal=path,
        )
    if result.params is not None:
        params = jax.tree.map(jnp.asarray, result.params)
        state = State(params, state.opt_state, jnp.int32(len(result.values)))
    last = measure(settings, job, state, data, False)
    rows.append({"step": int(state.step)} | last)
    losses = [
        {"step": i, "loss": float(value)} for i, value in enumerate(result.values)
    ]
    lines = [rows[0], *losses, rows[1]]
    text = "".join(f"{json.dumps(line)}\n" for line in lines)
    (folder / METRICS).write_text(text, encoding="utf-8")
    return Result(nnx.merge(job.graphdef, state.params, job.rest), state, rows)


@contextlib.contextmanager
def connected(workers: str) -> Iterator[Any]:
    """A client of a scheduler, or of processes of this machine."""
    from distributed import Client, LocalCluster  # Here, since few runs need it.

    if not workers.isdecimal():
        with Client(workers) as client:
            yield client
        return
    options = {"threads_per_worker": 1, "dashboard_address": "127.0.0.1:0"}
    with (
        LocalCluster(n_workers=int(workers), **options) as cluster,
        Client(cluster) as client,
    ):
        yield client


def _check_settings(settings: Settings) -> None:
    """Raises a ValueError if a setting is not for workers."""
    for name, value in FIXED.items():
        if getattr(settings, name) != value:
            raise ValueError(
                f"{name} must be {value} with workers; got {getattr(settings, name)}."
            )
    if settings.method == "adamw":
        raise ValueError("method must need no backpropagation with workers; got adamw.")


def make_fun(
    settings: Settings, make: Callable[[], tuple[LanguageModel, Batch]]
) -> tuple[Any, Any]:
    """The loss and the tuned parameters, which a worker builds."""
    model, data = make()
    [data] = buckets(data, bounds(data, 1))
    job, state = train.start(settings, model)
    loss = functools.partial(_loss, job.graphdef, settings.objective)
    arrays = job.rest, jax.tree.map(jnp.asarray, data)
    return jax.tree_util.Partial(loss, *arrays), state.params


def _loss(
    graphdef: Any,
    objective: str,
    rest: Any,
    data: Batch,
    params: Any,
    rows: jax.Array,
) -> jax.Array:
    batch = jax.tree.map(lambda x: x[rows], data)
    return train.loss_fn(nnx.merge(graphdef, params, rest), batch, objective)


def _rows(number: int, size: int, key: jax.Array) -> jax.Array:
    """The examples of a step, all different."""
    return jax.random.choice(key, number, (min(size, number),), replace=False)


def _rate(rates: tuple[float, ...], count: jax.Array) -> jax.Array:
    return jnp.asarray(np.array(rates, np.float32))[count]
