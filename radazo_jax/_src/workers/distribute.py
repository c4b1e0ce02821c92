"""Runs on workers that hold the model."""

from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from radazo_jax._src.base import checks, keys
from radazo_jax._src.base.names import checks_names
from radazo_jax._src.estimates.contracts import GradientEstimator
from radazo_jax._src.runs import history, loop
from radazo_jax._src.runs.budget import Budget
from radazo_jax._src.runs.journal import Journal, Record, lowest
from radazo_jax._src.runs.lines import Path
from radazo_jax._src.runs.results import Best, Report, Result
from radazo_jax._src.steps import states
from radazo_jax._src.steps.box import BoundsLike, as_bounds
from radazo_jax._src.steps.states import Failures, Policy, Run, SolverState
from radazo_jax._src.workers.engines import Dask, Ray
from radazo_jax._src.workers.fleet import Fleet
from radazo_jax._src.workers.replica import versions


@checks_names
def distribute(
    make_fun: Callable[[], object],
    params: optax.Params | None,
    optimizer: optax.GradientTransformation,
    estimator: GradientEstimator,
    *,
    client: object,
    num_steps: int | None = None,
    key: jax.typing.ArrayLike = 0,
    max_evaluations: int | None = None,
    max_seconds: float | None = None,
    target: float | None = None,
    patience: int | None = None,
    sample: Callable[[jax.Array], object] | None = None,
    bounds: BoundsLike | None = None,
    batch_size: int = 1,
    timeout: float = 300.0,
    on_failure: str = "drop",
    max_consecutive_failures: int = 10,
    journal: Path | None = None,
    fetch_params: bool = True,
    progress: bool = True,
    callback: Callable[[Report], object] | None = None,
) -> Result:
    """Minimizes a function on workers that hold the model, to which scalars are sent.

    Each worker builds the function and the parameters once, and takes every step of
    the run itself, from the values that all workers computed. In each step it evaluates
    some of the points. A message has the values of a step and the numbers of the points
    to evaluate, so that its size does not depend on the size of the model. Workers may
    join, die and return at any step: a worker that joins gets the values of the steps
    before.

    Use it if evaluations take milliseconds or longer and the machines have no fast
    connection, or are not always there. On devices of one machine or of one cluster
    with a fast network, `train` with `sharded` needs no messages. For functions that
    JAX cannot trace, use `train` with `external` and an executor.

    Args:
      make_fun: `make_fun()` is called on each worker and returns the loss, a function
        that JAX can trace, as `loss` of `train`. It may read a checkpoint of the
        worker's machine. Large arrays of the loss that are not optimized belong in a
        `jax.tree_util.Partial(fun, arrays)`.
      params: The starting point, a tree of floating-point arrays, which is sent to each
        worker once; or `None` if `make_fun` returns a pair `(fun, params)`.
      optimizer: An Optax transformation, such as `radazo(1e-3)`. It gets no `value_fn`.
      estimator: An estimator, such as `forward_difference()`.
      client: A `distributed.Client`, not an asynchronous one; best with
        `direct_to_workers=True`, which needs to reach the addresses of the workers. Or
        the module `ray`, after `ray.init()`: each GPU of the cluster is a worker, and
        each node without GPUs.
      num_steps: Number of steps; with a journal, of the whole run. By default 1000,
        also with a `target`, which may never be reached, and 2³¹ − 2 with another
        budget.
      key: The key of the whole run; it is consumed.
      max_evaluations: Largest number of points. The run ends before the step that would
        exceed it.
      max_seconds: Seconds after which the run ends, counted from the first step of this
        call. The step is completed.
      target: A finite number. The run ends after the first step at which a value at a
        point is not above it.
      patience: The run ends after so many steps in a row without a lowest value.
      sample: As in `train`; it runs on the workers.
      bounds: As in `ask_tell`.
      batch_size: Number of points that a worker evaluates together, under `jax.vmap`.
      timeout: Seconds after which a worker that has not answered is dropped, in
        addition to the time that it is expected to take. If there are no workers for
        as long, the run ends. The points of a late worker go to others earlier.
      on_failure: "drop" or "raise", as in `train`.
      max_consecutive_failures: Number of steps skipped in a row that ends the run.
      journal: The path of a file on the driver's machine to which the values of each
        step are added. The same call resumes the run from the end of the file, and
        `replay` rebuilds the state from it.
      fetch_params: Whether a worker sends the parameters at the end.
      progress: Whether to show progress, as in `train`.
      callback: `callback(report)`, called after every step with a `Report` of it. A
        true return value, or StopIteration, ends the run.

    Returns:
      The result. Ctrl-C ends the run before the step that is being evaluated.

    Raises:
      TypeError, ValueError: If an argument is not valid, there are no workers, a worker
        that was there from the beginning cannot build the run, or builds one that
        differs from the run of another worker, or the journal is of another run. A
        worker that takes longer than `timeout` to build the run ends it only if no
        other worker has built it.
      RunError: If too many evaluations failed, all workers are lost for `timeout`
        seconds, or they compute different parameters or values. The journal is
        complete: the same call resumes the run. The state of the error has no
        parameters.

    Examples:
      >>> import jax.numpy as jnp
      >>> import radazo_jax as zo
      >>> def make_fun():
      ...     return lambda x: jnp.sum((x - 1.0) ** 2)
      >>> from distributed import Client  # doctest: +SKIP
      >>> client = Client("tcp://scheduler:8786")  # doctest: +SKIP
      >>> result = zo.distribute(
      ...     make_fun,
      ...     jnp.zeros(8),
      ...     zo.radazo(1e-2),
      ...     zo.forward_difference(zo.rademacher()),
      ...     client=client,
      ...     num_steps=300,
      ...     journal="run.jsonl",
      ... )  # doctest: +SKIP
    """
    checks.check_callback(callback)
    if not callable(make_fun):
        raise TypeError(
            f"make_fun must be a function without arguments; got {make_fun!r}."
        )
    states.check_run(optimizer, estimator)
    budget = Budget(num_steps, max_evaluations, max_seconds, target, patience)
    checks.check_int_at_least("batch_size", batch_size, 1)
    checks.check_positive("timeout", timeout)
    policy = Policy.of(on_failure, max_consecutive_failures)
    engine = _engine(client)
    if params is not None:
        checks.warn_of_float32(params)
        params = jax.tree.map(np.asarray, checks.as_params(params))
    typed = keys.as_key(key)
    run = Run(None, sample, optimizer, estimator, bounds=as_bounds(bounds))
    data = np.asarray(jax.random.key_data(typed))
    recipe = engine.dumps((make_fun, params, run, batch_size, data))
    with ExitStack() as stack:
        ends = stack.enter_context(loop.interruptible())
        fleet = Fleet(engine, (versions(), recipe), batch_size, float(timeout), ends)
        stack.callback(fleet.close)
        opened = nullcontext() if journal is None else Journal(journal).opened()
        file = stack.enter_context(opened)
        if not fleet.until(lambda: fleet.run is not None):
            raise KeyboardInterrupt
        steps = DistributedSteps(fleet, typed, budget, policy, file, fetch_params)
        result = loop.run(steps, policy, callback, progress)
    return result._replace(workers=fleet.reports)


def _engine(client: Any) -> Dask | Ray:
    """Returns the engine that holds the workers of a client."""
    if hasattr(client, "nthreads") and not client.asynchronous:
        return Dask(client)
    if getattr(client, "__name__", "") == "ray" and client.is_initialized():
        return Ray(client)
    raise TypeError(
        "client must be a distributed.Client, not asynchronous, or the module ray "
        f"after ray.init(); got {client!r}."
    )


class DistributedSteps(loop.Steps):
    """The steps of workers, with the journal and without the parameters."""

    def __init__(
        self,
        fleet: Fleet,
        key: jax.Array,
        budget: Budget,
        policy: Policy,
        file: Journal | None,
        fetches: bool,
    ):
        super().__init__(budget)
        line = fleet.run.line
        budget.start(line["points"], 0, np.dtype(line["dtype"]))
        if file is not None:
            file.begin(line)
        self._fleet, self._key, self._policy = fleet, key, policy
        self._file, self._fetches = file, fetches

    def resume(self) -> None:
        """Begins after the steps of a journal, as far as the budgets allow."""
        records = [] if self._file is None else self._file.records
        allowed = self.budget.allowed([len(x.values) for x in records])
        self._fleet.resume(records[:allowed])
        for record in records[:allowed]:
            self._count(record)
        self._limits = self._policy.limits(self.failures)

    def take(self) -> bool:
        record = self._fleet.evaluate(self.budget.size)
        self._check()
        if record is not None:
            if self._file is not None:
                self._file.append(record)
            self._fleet.records.append(record)
            self._count(record)
        return record is not None

    def _check(self) -> None:
        """Raises if too much has failed before the current step."""
        self._policy.check(self.failures, self.number, self._limits, self.last_failure)

    def _count(self, record: Record) -> None:
        """Counts a step."""
        i, value = lowest(record.values)
        if value < self.best.value:
            self.best = Best(None, float(value), self.budget.evaluations + i)
        self.last_failure = (self.last_failure, *record.failures)[-1]
        self.budget.count_step(value, len(record.values))
        self.rows.append(history.of_record(record))

    def figures(self) -> dict[str, str]:
        latest = self._fleet.records[-1]
        rate = len(latest.values) / max(latest.seconds, 1e-9)
        return {"lowest": f"{self.best.value:.6g}", "evaluations/s": f"{rate:.3g}"}

    def report(self) -> Report:
        return Report(self.number, self._fleet.values, None, self.best, self.state)

    def history(self) -> history.History:
        """Returns the numbers of all steps; of the last only once workers took it."""
        for step, numbers in self._fleet.numbers.items():
            self.rows[step] |= zip(self._fleet.run.names, numbers, strict=True)
        return super().history()

    @property
    def state(self) -> SolverState:
        """The state of the run, without its trees."""
        done = jnp.array(len(self._fleet.records), jnp.int32)
        failures = Failures(*(jnp.int32(x) for x in self._fleet.failures))
        return SolverState(None, None, None, self._key, done, failures)

    def params(self, stopped: str) -> optax.Params | None:
        """Fetches the parameters after the last step, whose numbers come with them."""
        if stopped in ("interrupted", "failure") or not self._fleet.records:
            return None
        params = self._fleet.params(self._fetches)
        self._check()
        usable = self.has_used(self.budget.steps)
        self._policy.check_used(usable, self.budget.steps, self.last_failure)
        return params
