"""The loop of all runs: `zo.minimize`, with a journal and evaluations between steps.

A run is a function of its settings, its model and its data. The journal has the values
of its steps, from which the parameters are rebuilt. So a run may end at any moment, and
resumes to the same end, bit for bit, the file of metrics included.
"""

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import radazo_jax as zo
from radazo_llm.run import usage
from radazo_llm.run.folder import JOURNAL
from radazo_llm.run.log import Log
from radazo_llm.settings import Settings

# One evaluation after another, so that memory does not grow with their number.
_ONE_BY_ONE = zo.vectorized(batch_size=1)
_TIMED = 3  # Earlier steps compile; this one is timed.


@dataclasses.dataclass(frozen=True)
class Job:
    """What a run minimizes.

    Attributes:
      fun: The loss, `fun(params, xi)`.
      params: What is tuned, at the start.
      sample: Draws ξ.
      measure: The numbers of an evaluation, for parameters and a step.
      evaluator: Evaluates the points of a step.
      row: The numbers of the latest step; by default, its mean loss.
      make: Builds `fun` and `params` on a worker, if that is possible.
      drops: Whether points that are not finite are left out; they end the run
        otherwise.
    """

    fun: Any
    params: Any
    sample: Callable[[jax.Array], Any]
    measure: Callable[[Any, int], dict[str, Any]]
    evaluator: Any = _ONE_BY_ONE
    row: Callable[[], dict[str, Any]] | None = None
    make: Callable[[], tuple[Any, Any]] | None = None
    drops: bool = False


def run(
    settings: Settings,
    job: Job,
    rates: np.ndarray,
    log: Log,
    *,
    folder: Path,
    done: int = 0,
    eval_first: bool = True,
    workers: str | None = None,
) -> Any:
    """Takes the steps that are left, and returns the tuned parameters.

    Args:
      settings: The settings of the run.
      job: What is minimized.
      rates: η of each step.
      log: Gets the numbers of steps and evaluations.
      folder: The folder of the journal.
      done: The number of steps in the journal.
      eval_first: Whether to measure before the first step.
      workers: The address of a scheduler, or a number of processes.

    Raises:
      FloatingPointError: If the loss is not finite.
      KeyboardInterrupt: If the run was interrupted.
      RunError: If the workers are lost, or too many evaluations failed.
    """
    method = settings.optimizer(rates), settings.estimator()
    options = {
        "key": settings.seed,
        "sample": job.sample,
        "journal": folder / JOURNAL,
        "on_failure": "drop" if job.drops else "raise",
        "progress": False,
    }
    minimize = functools.partial(
        zo.minimize, job.fun, job.params, *method, evaluator=job.evaluator, **options
    )
    # The steps in the journal are taken without an evaluation.
    again = functools.partial(minimize, num_steps=done)
    end = settings.num_steps

    def measure(params: Any, step: int) -> None:
        if not log.is_measured(step):
            log.evaluation(step, job.measure(params, step))

    _fill(log, folder, done)
    if done == 0 and eval_first:
        measure(job.params, 0)
    is_due = 0 < done < end and done % settings.eval_every == 0
    if is_due and workers is None and not log.is_measured(done):
        measure(again().params, done)  # The run was cut before.
    clock = [0.0, 0.0]

    def after(report: zo.runs.Report) -> None:
        step = report.step
        values = {"loss": _mean(report.values)} if job.row is None else job.row()
        log.step(step - 1, values)
        clock[:] = clock[1], time.perf_counter()
        if step == done + _TIMED:
            usage.tell(settings, clock[1] - clock[0], step, folder)
        if step % settings.eval_every == 0 and step < end and workers is None:
            measure(report.state.params, step)

    try:
        if workers is None:
            result = minimize(num_steps=end, callback=after)
        else:
            with connected(workers) as client:
                result = zo.distribute(
                    *(job.make, None, *method),
                    **options,
                    client=client,
                    num_steps=end,
                    callback=after,
                )
    except zo.runs.RunError as error:
        failed = error.result is not None and error.result.stopped == "failure"
        if job.drops or not failed or workers is not None:
            raise
        step = int(error.result.state.step)
        raise FloatingPointError(log.diverged("loss", float("nan"), step)) from error
    if result.stopped == "interrupted":
        raise KeyboardInterrupt
    params = jax.tree.map(jnp.asarray, result.params)
    measure(params, end)
    return params


def _fill(log: Log, folder: Path, done: int) -> None:
    """Writes lines of steps that the journal has, and a run that was cut did not."""
    number = len(log.rows) - len(log.evaluations())
    if number >= done:
        return
    history = zo.runs.History.from_journal(folder / JOURNAL)
    for step in range(number, done):
        log.step(step, {"loss": float(np.float32(history.value[step]))})


def _mean(values: np.ndarray) -> float:
    """The mean of the values of a step, as a journal's history has it."""
    values = np.asarray(values)
    return float(values.sum() / np.asarray(values.size, values.dtype))


@contextlib.contextmanager
def connected(workers: str) -> Iterator[Any]:
    """A client of a scheduler, or of processes of this machine."""
    try:
        from distributed import Client, LocalCluster  # An optional package.
    except ImportError:
        raise ValueError(
            "--workers must be given with distributed installed; it is not. Run, in a "
            'clone of radazo_jax: pip install "./examples/llm[workers]"'
        ) from None
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
