"""The job of `radazo-llm tune`: a model, its data, a run, and exports."""

import contextlib
import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from radazo_llm.formats import config, find, load
from radazo_llm.run import exports, folder, session
from radazo_llm.settings import Settings
from radazo_llm.tune.batches import bounds, buckets
from radazo_llm.tune.job import Tuned, loss_of, parts_of, tuned, with_objective


def tune(
    settings: Settings,
    *,
    model: str,
    source: Any,
    output: Path,
    dtype: str | None = None,
    adapters: Path | None = None,
    metrics: Sequence[str] = (),
    workers: str | None = None,
    resume: bool = False,
    to: exports.Exports,
    **options: Any,
) -> None:
    """Tunes a model on examples, and exports it.

    Args:
      settings: The settings of the run.
      model: A name that `find.model` takes.
      source: The examples, `splits.Own`.
      output: The folder of the run.
      dtype: The dtype of the model; by default, of the present backend.
      adapters: The folder of adapters to start from.
      metrics: Reward functions of what the model writes, which are measured too.
      workers: The address of a scheduler, or a number of processes.
      resume: Whether to continue the run in the folder.
      to: The paths of exports.
      options: Other options of `session.execute`.

    Raises:
      ValueError: If an argument is wrong, or the folder has another run.
      FloatingPointError: If the loss is not finite.
      RunError: If the workers are lost.
    """
    path = find.model(model)
    config.read(path)  # Its errors come before errors of larger files.
    exports.check(settings, path, to)
    _check_together(settings, workers, metrics)
    source = dataclasses.replace(source, now=folder.started(output, resume))
    # Errors in the small files are reported before the large ones are read.
    splits = source.read(path)
    settings = with_objective(settings, splits.batches[0])
    print(splits.summary, flush=True)
    dtype = dtype or config.default_dtype()

    def prepare(loaded: Any, stack: contextlib.ExitStack) -> Tuned:
        made = tuned(
            settings,
            loaded,
            splits.batches,
            frozen_folder=output / "frozen",
            start=adapters,
        )
        here = source.absolute(), path.resolve(), dtype, adapters
        job = dataclasses.replace(
            made.job, make=functools.partial(on_worker, settings, *here)
        )
        if metrics:
            job = _with_metrics(
                settings, job, made, path, source, metrics, output, stack
            )
        return made._replace(job=job)

    notes = {
        "data": source.path,
        "metrics": list(metrics),
        "started": source.now,
    }
    session.execute(
        settings,
        prepare,
        model=model,
        path=path,
        output=output,
        notes=notes,
        to=to,
        dtype=dtype,
        workers=workers,
        resume=resume,
        **options,
    )


def _with_metrics(
    settings: Settings,
    job: Any,
    made: Tuned,
    path: Path,
    source: Any,
    metrics: Sequence[str],
    output: Path,
    stack: contextlib.ExitStack,
) -> Any:
    """The job whose evaluations have metrics of what the model writes, too."""
    from radazo_llm.reward import problems
    from radazo_llm.reward.pool import RewardPool
    from radazo_llm.reward.task import Task

    splits = {
        name: [problems.of_item(item) for item in items]
        for name, items in source.problems().items()
        if items and name != "train"
    }
    weights = dict.fromkeys(metrics, 1.0)
    pool = stack.enter_context(RewardPool(weights, timeout=settings.timeout))
    task = Task(settings, made.parts, path, splits, pool, output, source.now)

    def measure(params: Any, step: int) -> dict[str, Any]:
        written = task.measure(params, step)
        rewards = {k: v for k, v in written.items() if not k.endswith("_reward")}
        return job.measure(params, step) | rewards

    return dataclasses.replace(job, measure=measure)


def _check_together(
    settings: Settings, workers: str | None, metrics: Sequence[str]
) -> None:
    """Raises a ValueError if the last layers alone do not do for an option."""
    for option, given in (("--workers", workers), ("--metric", metrics)):
        if given and settings.last_layers:
            raise ValueError(
                f"--last-layers must be 0 with {option}; got {settings.last_layers}."
            )


def on_worker(
    settings: Settings,
    source: Any,
    model: Path,
    dtype: str,
    start: Path | None,
) -> tuple[Any, Any]:
    """The loss and the tuned parameters, which a worker builds from its own files."""
    train, *_ = source.read(model).batches
    kept = settings.quantize == "file"
    loaded = load.load(model, dtype=dtype, keep_blocks=kept)
    parts = parts_of(settings, loaded, start)
    data = buckets(train, bounds(train, settings.num_buckets))
    return loss_of(settings, parts, data), parts.params
