"""Runs on workers that hold the model."""

import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from radazo_jax._src import checks, shown
from radazo_jax._src.base import GradientEstimator
from radazo_jax._src.numbers import keys
from radazo_jax._src.runs import history, records, states
from radazo_jax._src.runs.box import BoundsLike, as_bounds
from radazo_jax._src.runs.history import History
from radazo_jax._src.runs.journal import check_same_run
from radazo_jax._src.runs.loop import interruptible, progress_bar
from radazo_jax._src.runs.records import Path, Record
from radazo_jax._src.runs.standstill import Standstill
from radazo_jax._src.runs.states import (
    Failures,
    Policy,
    RunError,
    SolverState,
    failure_counts,
)
from radazo_jax._src.runs.stop import Budget
from radazo_jax._src.workers.cluster import Cluster
from radazo_jax._src.workers.fleet import Fleet
from radazo_jax._src.workers.replica import Recipe
from radazo_jax._src.workers.roster import WorkerReport
from radazo_jax._src.workers.signs import signs_of


class DistributedResult(NamedTuple):
    """The result of `distribute`.

    Attributes:
      params: The parameters after the last step, a tree of NumPy arrays, as in
        `MinimizeResult`; `None` if they were not fetched.
      values: The value of each step's estimate: float32, [steps].
      num_evaluations: The number of points of all steps, with those that failed.
      failures: The counts of failed evaluations and steps.
      history: Records of each step; `history.plot()` draws it.
      stopped: The reason for which the run ended, as in `MinimizeResult`.
      workers: The part of each worker in this call, by address.
    """

    params: Any
    values: np.ndarray
    num_evaluations: int
    failures: Failures
    history: History
    stopped: str
    workers: dict[str, WorkerReport]

    def __repr__(self) -> str:
        return shown.on_lines(
            self,
            params=shown.tree(self.params),
            values=shown.series(self.values),
            num_evaluations=str(self.num_evaluations),
            failures=repr(self.failures),
            history=repr(self.history),
            stopped=self.stopped,
            workers=shown.names(list(self.workers)),
        )


def distribute(
    make_fun: Callable[[], Any],
    params: Any,
    optimizer: optax.GradientTransformation,
    estimator: GradientEstimator,
    client: Any,
    num_steps: int | None = None,
    key: jax.typing.ArrayLike = 0,
    *,
    max_evaluations: int | None = None,
    max_seconds: float | None = None,
    target: float | None = None,
    patience: int | None = None,
    sample: Callable[[jax.Array], Any] | None = None,
    bounds: BoundsLike | None = None,
    batch_size: int = 1,
    values: str = "exact",
    timeout: float = 300.0,
    on_failure: str = "drop",
    max_consecutive_failures: int = 10,
    journal: Path | None = None,
    fetch_params: bool = True,
    progress: bool = True,
    callback: Callable[[int, np.ndarray], Any] | None = None,
) -> DistributedResult:
    """Minimizes a function on workers that hold the model, to which scalars are sent.

    Each worker builds the function and the parameters once, and takes every step of
    the run itself, from the values that all workers computed. In each step it evaluates
    some of the points. A message has the values of a step and the numbers of the points
    to evaluate, so that its size does not depend on the size of the model. Workers may
    join, die and return at any step: the values of the steps before are sent to a
    worker that joins, or it copies the state of another worker if that is faster.

    Use it if evaluations take milliseconds or longer and the machines have no fast
    connection, or are not always there. On devices of one machine or of one cluster
    with a fast network, `minimize` with `sharded` needs no messages. For functions that
    JAX cannot trace, use `minimize_black_box` with an executor.

    Args:
      make_fun: `make_fun()` is called on each worker and returns the loss, a function
        that JAX can trace, as `fun` of `minimize`. It may read a checkpoint of the
        worker's machine. Large arrays of the loss that are not optimized belong in a
        `jax.tree_util.Partial(fun, arrays)`.
      params: The starting point, a tree of floating-point arrays, which is sent to each
        worker once; or `None` if `make_fun` returns a pair `(fun, params)`.
      optimizer: An Optax transformation, such as `radazo(1e-3)`. It gets no `value_fn`.
      estimator: An estimator, such as `forward_difference()`.
      client: A `distributed.Client`, not an asynchronous one. It must reach the
        addresses of the workers.
      num_steps: Number of steps; with a journal, of the whole run. By default 1000,
        also with a `target`, which may never be reached; with another budget, at most
        2³¹ − 2.
      key: The key of the whole run; it is consumed.
      max_evaluations: Largest number of points. The run ends before the step that would
        exceed it.
      max_seconds: Seconds after which the run ends, counted from the first step of this
        call. The step is completed.
      target: A finite number. The run ends after the first step at which a value at a
        point is not above it.
      patience: The run ends after so many steps in a row without a lowest value.
      sample: As in `minimize`; it runs on the workers.
      bounds: As in `ask_tell`.
      batch_size: Number of points that a worker evaluates together, under `jax.vmap`.
      values: The values by which workers take a step. "exact": the values themselves,
        4 bytes each. "signs": 1 for the higher value of an antithetic pair and −1 for
        the lower, or 0 for both: 1.6 bits per pair in a message. The optimizer sees the
        signs. Workers answer with the values at the points. The journal holds the signs
        and the mean of these values, which is the loss in the history.
      timeout: Seconds after which a worker that has not answered is dropped, in
        addition to the time that it is expected to take. If there are no workers for
        as long, the run ends. The points of a late worker go to other workers earlier.
      on_failure: "drop" or "raise", as in `minimize`.
      max_consecutive_failures: Number of steps skipped in a row that ends the run.
      journal: The path of a file on the driver's machine to which the values of each
        step are added. The same call resumes the run from the end of the file, and
        `replay` rebuilds the state from it.
      fetch_params: Whether a worker sends the parameters at the end.
      progress: Whether to show progress, as in `minimize`.
      callback: `callback(step, values)`, called after every step with its number and
        the values at its points, [n]. A true return value ends the run.

    Returns:
      The result. Ctrl-C ends the run before the step that is being evaluated.

    Raises:
      TypeError, ValueError: If an argument is not valid, there are no workers, a worker
        that was there from the beginning cannot build the run, or builds one that
        differs from the run of another worker, or the journal is of another run.
      RunError: If too many evaluations failed, all workers are lost for `timeout`
        seconds, or they compute different parameters. The journal is complete: the same
        call resumes the run. The state of the error has no parameters.

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
      ...     client,
      ...     300,
      ...     journal="run.jsonl",
      ... )  # doctest: +SKIP
    """
    if not callable(make_fun):
        raise TypeError(
            f"make_fun must be a function without arguments; got {make_fun!r}."
        )
    states.check_run(optimizer, estimator)
    budget = Budget(num_steps, max_evaluations, max_seconds, target, patience)
    checks.check_int_at_least("batch_size", batch_size, 1)
    checks.check_positive("timeout", timeout)
    policy = Policy.of(on_failure, max_consecutive_failures)
    if values not in ("exact", "signs"):
        raise ValueError(f"values must be 'exact' or 'signs'; got {values!r}.")
    if values == "signs" and (target is not None or patience is not None):
        raise ValueError(
            "target and patience must be None if values is 'signs', of which none is "
            f"lowest; got {target!r} and {patience!r}."
        )
    _check_client(client)
    if params is not None:
        checks.warn_of_float32(params, stacklevel=2)
        params = jax.tree.map(np.asarray, checks.as_params(params))
    typed = keys.as_key(key)
    recipe = Recipe(
        make_fun,
        params,
        optimizer,
        estimator,
        sample,
        as_bounds(bounds),
        batch_size,
        np.asarray(jax.random.key_data(typed)),
    )
    signs = values == "signs"
    driver = _Driver(Cluster(client), recipe, float(timeout), policy, typed, signs)
    return driver.run(journal, budget, fetch_params, progress, callback)


class _Driver:
    """The loop of a run: it holds the journal, and no parameters."""

    def __init__(
        self,
        cluster: Any,
        recipe: Recipe,
        timeout: float,
        policy: Policy,
        key: jax.Array,
        signs: bool = False,
    ):
        self._cluster, self._policy, self._key = cluster, policy, key
        self._signs = signs
        # Workers tell runs apart by this number.
        number = int(np.random.SeedSequence().generate_state(1)[0])
        self._fleet = Fleet(cluster, recipe, number, timeout)

    def run(
        self,
        path: Path | None,
        budget: Budget,
        fetch_params: bool,
        progress: bool,
        callback: Callable[[int, np.ndarray], Any] | None,
    ) -> DistributedResult:
        """Takes the steps."""
        fleet, sync = self._fleet, self._cluster.sync
        params = None
        with ExitStack() as stack:
            interrupted = stack.enter_context(interruptible())
            file = None if path is None else stack.enter_context(records.opened(path))
            stack.callback(sync, fleet.close)
            description = sync(fleet.start, interrupted)
            if description is None:
                raise KeyboardInterrupt
            line = description.line
            if self._signs:
                _check_pairs(line)
                line = line | {"values": "signs"}
            budget.start_points(line["points"], 0, np.dtype(line["dtype"]))
            write = _resumed(path, file, line, budget, fleet)
            bar = progress_bar(progress, budget.steps, budget.total)
            report = stack.enter_context(bar)
            stopped = self._steps(budget, write, report, interrupted, callback)
            if stopped != "interrupted" and fleet.records:
                params = self._finish(budget, interrupted, fetch_params)
        numbers, names = fleet.numbers, description.names
        rows = [_row(record, numbers, names) for record in fleet.records]
        recorded = History.of(rows)
        return DistributedResult(
            params,
            history.losses(recorded),
            sum(len(record.values) for record in fleet.records),
            _failures(fleet),
            recorded,
            stopped,
            dict(fleet.reports),
        )

    def _steps(
        self,
        budget: Budget,
        write: Callable[[Record], None],
        report: Callable[[int, dict[str, str]], None],
        interrupted: Callable[[], bool],
        callback: Callable[[int, np.ndarray], Any] | None,
    ) -> str:
        fleet = self._fleet
        limits = self._policy.limits(self._state())
        standstill = Standstill(len(fleet.records), stacklevel=4)
        last = next((r.failures[-1] for r in fleet.records[::-1] if r.failures), "")
        while not (stopped := budget.reason()):
            number, start = len(fleet.records), time.perf_counter()
            try:
                found = self._wait_for(fleet.evaluate, interrupted)
                # The failures of the steps before are known now.
                self._policy.check(self._state(), limits, last)
                if found is None:
                    return "interrupted"
                values = found.values
                failures = [found.failures[i] for i in sorted(found.failures)]
                failures += [
                    f"returned {value}"
                    for i, value in enumerate(values)
                    if not np.isfinite(value) and i not in found.failures
                ]
                last = failures[-1] if failures else last
                seconds = time.perf_counter() - start
                checksum = found.agreed() or 0
                record = Record(number, values, checksum, seconds, tuple(failures))
                finite = values[np.isfinite(values)]
                if self._signs:
                    mean = float(finite.mean()) if finite.size else None
                    record = record._replace(values=signs_of(values), mean=mean)
                write(record)
            except RunError:
                raise
            except (RuntimeError, OSError) as error:
                raise RunError(
                    f"step {number} could not be taken: {error} Its journal, if there "
                    "is one, is complete: the same call resumes the run.",
                    self._state(),
                ) from error
            fleet.records.append(record)
            lowest = finite.min(initial=np.inf)
            budget.saw(lowest, len(values))
            standstill.saw_values(values)
            rate = len(values) / max(seconds, 1e-9)
            figures = {"lowest": f"{lowest:.6g}", "evaluations/s": f"{rate:.3g}"}
            report(1, figures | failure_counts(self._state()))
            if callback is not None and callback(number, values):
                return budget.reason() or "callback"
        return stopped

    def _finish(
        self, budget: Budget, interrupted: Callable[[], bool], fetch_params: bool
    ) -> Any:
        """The parameters; the numbers of the last step come with them."""
        try:
            params = self._wait_for(self._fleet.finish, interrupted, fetch_params)
        except (RuntimeError, OSError) as error:
            raise RunError(
                f"params could not be fetched: {error} replay rebuilds them from the "
                "journal.",
                self._state(),
            ) from error
        last = self._fleet.records[-1].failures
        state = self._state()
        self._policy.check(state, self._policy.limits(state), last[-1] if last else "")
        self._policy.check_used(state, budget.steps, last[-1] if last else "")
        return params

    def _state(self) -> SolverState:
        """The state of the run, without its trees."""
        done = jnp.array(len(self._fleet.records), jnp.int32)
        return SolverState(None, None, None, self._key, done, _failures(self._fleet))

    def _wait_for(self, function: Callable[..., Any], *args: Any) -> Any:
        """Runs a coroutine of the fleet, and warns of what it reports."""
        try:
            return self._cluster.sync(function, *args)
        finally:
            for note in self._fleet.notes():
                warnings.warn(note, stacklevel=5)


def _resumed(
    path: Path | None,
    file: records.File | None,
    line: dict[str, Any],
    budget: Budget,
    fleet: Fleet,
) -> Callable[[Record], None]:
    """Gives the steps of a journal to the fleet; returns a function that adds one."""
    if path is None or file is None:
        return lambda record: None
    if file.found is not None:
        # Other runs have no entry of what their values are.
        exact = {"values": None}
        check_same_run(path, exact | file.found.run, exact | line)
        found = file.found.records
        fleet.resume(found[: budget.allowed([len(x.values) for x in found])])
        for record in fleet.records:
            budget.saw(record.lowest, len(record.values))
    file.begin(line)
    return file.append


def _row(
    record: Record, numbers: dict[int, np.ndarray], names: tuple[str, ...]
) -> dict[str, Any]:
    """The numbers of a step for a history."""
    row = history.of_record(record)
    known = numbers.get(record.step)
    if known is None:
        return row
    told = dict(zip(names, known, strict=True))
    return row | told | ({} if record.mean is None else {"value": record.mean})


def _failures(fleet: Fleet) -> Failures:
    evaluations, skipped, in_a_row = (jnp.int32(x) for x in fleet.failures)
    return Failures(evaluations, skipped, in_a_row)


def _check_client(client: Any) -> None:
    needed = ("scheduler", "rpc", "run", "sync")
    if not all(hasattr(client, name) for name in needed):
        raise TypeError(f"client must be a distributed.Client; got {client!r}.")
    if client.asynchronous:
        raise ValueError(
            "client must not be asynchronous; got one made with asynchronous=True. "
            "distribute waits for the whole run."
        )


def _check_pairs(line: dict[str, Any]) -> None:
    scales, n = line["scales"], line["points"]
    if n % 2 or len(scales) != 2 or scales[0] != -scales[1]:
        raise ValueError(
            "values must be 'exact' unless the points are antithetic pairs; got "
            f"'signs' with {n} points, at the distances {scales} along a direction. "
            "central_difference and evolution_strategy have pairs."
        )
