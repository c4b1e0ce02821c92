"""The loop of all runs: `zo.train`, with a journal and evaluations between steps.

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
from radazo_llm.settings import REWARD, Settings

# One evaluation after another, so that memory does not grow with their number.
_ONE_BY_ONE = zo.vectorized(batch_size=1)
_TIMED = 3  # Earlier steps compile; this one is timed.


@dataclasses.dataclass(frozen=True)
class Job:
    """The work of a run: a loss, and its evaluations.

    Attributes:
      fun: The loss, `fun(params, xi)`.
      params: The tuned parameters, at the start.
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
      job: The work of the run.
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
    train = functools.partial(
        zo.train, job.fun, job.params, *method, evaluator=job.evaluator, **options
    )
    end = settings.num_steps

    after = _After(settings, job, log, folder, done, workers is None)
    _fill(log, folder, done, settings.command == REWARD)
    if done == 0 and eval_first:
        after.measure(job.params, 0)
    if done and after.is_due(done) and not log.is_measured(done):
        # The run was cut before. Steps in the journal are taken without evaluations.
        after.measure(train(num_steps=done).params, done)
    try:
        with contextlib.ExitStack() as stack:
            if workers is not None:
                client = stack.enter_context(connected(workers))
                train = functools.partial(
                    zo.distribute, job.make, None, *method, client=client, **options
                )
            result = train(num_steps=end, callback=after)
    except zo.runs.RunError as error:
        failed = error.result is not None and error.result.stopped == "failure"
        if job.drops or not failed or workers is not None:
            raise
        step = int(error.result.state.step)
        raise FloatingPointError(log.diverged("loss", float("nan"), step)) from error
    if result.stopped == "interrupted":
        raise KeyboardInterrupt
    params = jax.tree.map(jnp.asarray, result.params)
    after.measure(params, end)
    return params


@dataclasses.dataclass
class _After:
    """The work after each step: lines of the log, and evaluations.

    Attributes:
      settings, job, log, folder, done: As of `run`.
      measures: Whether the parameters are here, to be measured between steps.
    """

    settings: Settings
    job: Job
    log: Log
    folder: Path
    done: int
    measures: bool
    last: float = 0.0  # The time of the latest step.

    def __call__(self, report: zo.runs.Report) -> None:
        step, row = report.step, self.job.row
        self.log.step(step - 1, row() if row else {"loss": _mean(report.values)})
        before, self.last = self.last, time.perf_counter()
        if step == self.done + _TIMED:
            left = self.settings.num_steps - step
            print(usage.told(self.last - before, left, self.folder), flush=True)
        if self.is_due(step):
            self.measure(report.state.params, step)

    def is_due(self, step: int) -> bool:
        """Whether the parameters are measured between two steps."""
        within = self.measures and step < self.settings.num_steps
        return within and step % self.settings.eval_every == 0

    def measure(self, params: Any, step: int) -> None:
        """Measures parameters, unless that is done."""
        if not self.log.is_measured(step):
            self.log.evaluation(step, self.job.measure(params, step))


def _fill(log: Log, folder: Path, done: int, rewards: bool) -> None:
    """Writes lines of steps that the journal has, and a run that was cut did not."""
    number = len(log.rows) - len(log.evaluations())
    if number >= done:
        return
    history = zo.runs.History.from_journal(folder / JOURNAL)
    for step in range(number, done):
        value = float(np.float32(history.value[step]))
        log.write(step, {"reward": -value} if rewards else {"loss": value})


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
        Client(cluster, direct_to_workers=True) as client,
    ):
        yield client
