"""A whole run, compiled in chunks of steps."""

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from radazo_jax._src import checks, shown, trees
from radazo_jax._src.base import Evaluator, GradientEstimator, check_evaluator
from radazo_jax._src.estimators.gradients import values_at
from radazo_jax._src.evaluators.vectorized import vectorized
from radazo_jax._src.runs import ask_tell, journal, loop, states, step
from radazo_jax._src.runs.box import BoundsLike, as_bounds
from radazo_jax._src.runs.defaults import method
from radazo_jax._src.runs.diagnose import warn_of_rounding
from radazo_jax._src.runs.history import History, losses, names, numbers
from radazo_jax._src.runs.journal import Done
from radazo_jax._src.runs.loop import Values, interruptible, progress_bar
from radazo_jax._src.runs.records import Path, Record
from radazo_jax._src.runs.standstill import Standstill
from radazo_jax._src.runs.states import (
    Policy,
    Run,
    SolverState,
    exceeds,
    failure_counts,
    resumed,
)
from radazo_jax._src.runs.stop import Budget, Progress
from radazo_jax._src.search import revert

# Without a given chunk size, chunks aim at this many seconds: long enough that what
# is done between them does not count, short enough for a progress bar and Ctrl-C.
_CHUNK_SECONDS = 0.5
_MAX_CHUNK = 8192


class MinimizeResult(NamedTuple):
    """The result of `minimize`.

    Attributes:
      params: The parameters after the last step, or before it if the optimizer reverts
        steps that go up, as the default ones do, and would revert this one. With such
        an optimizer the loss is evaluated once more to find out.
      values: The loss at each step done in this call: float32, [steps].
      state: The state of the run; pass it as `state` to continue.
      history: The records of each step; `history.plot()` draws them.
      stopped: The reason for which the run ended: "target", "patience", "num_steps",
        "max_evaluations", "max_seconds", "callback" or "interrupted"; the first one in
        this order, if there are several. It is "max_evaluations" if that allows fewer
        steps than `num_steps`.
    """

    params: optax.Params
    values: np.ndarray
    state: SolverState
    history: History
    stopped: str

    def __repr__(self) -> str:
        return shown.on_lines(
            self,
            params=shown.params(self.params),
            values=shown.series(self.values),
            state=repr(self.state),
            history=repr(self.history),
            stopped=self.stopped,
        )


def minimize(
    fun: Callable[..., jax.Array],
    params: optax.Params,
    optimizer: optax.GradientTransformation | None = None,
    estimator: GradientEstimator | None = None,
    num_steps: int | None = None,
    key: jax.typing.ArrayLike = 0,
    *,
    evaluator: Evaluator = vectorized(),
    max_evaluations: int | None = None,
    max_seconds: float | None = None,
    target: float | None = None,
    patience: int | None = None,
    sample: Callable[[jax.Array], Any] | None = None,
    bounds: BoundsLike | None = None,
    state: SolverState | None = None,
    chunk_size: int | None = None,
    progress: bool = True,
    callback: Callable[[SolverState, np.ndarray], Any] | None = None,
    on_failure: str = "drop",
    max_consecutive_failures: int = 10,
    journal: Path | None = None,
) -> MinimizeResult:
    """Minimizes a function from its values alone.

    The steps run on the device in chunks. A chunk is one compiled loop whose length is
    an argument, so any number of steps compiles once. The random numbers of a step
    depend only on the key and the number of the step; chunks and interruptions do not
    change them.

    Args:
      fun: The loss, `fun(params)`, or `fun(params, xi)` if `sample` is given;
        a real scalar.
      params: The starting point, a tree of floating-point arrays. Not modified.
      optimizer: An Optax transformation, such as `radazo(1e-3)`. It gets `value`,
        `grad`, `slope` (along `grad`), `value_fn` and `measured` (whether the loss at
        the parameters is finite; if not, `value` replaces it) as extra arguments, if
        it takes any. By default nothing is tuned: `bfgs()` for few parameters,
        `parabolic_sgd()` for more, or descent by `scale_by_minibatch_step()` if
        `sample` is given.
      estimator: An estimator; by default `full_difference()` for few parameters, of
        d + 1 evaluations, and `adaptive_difference(orthonormal(), K)` for more, with
        K = √d, but at least 10 and at most 32, all evaluated together. It is
        `accelerated` unless an optimizer is named. For minibatches it is
        `forward_difference(orthonormal())`.
      num_steps: The number of steps in this call; with a journal, of the whole run. By
        default 1000, also with a `target`, which may never be reached; with another
        budget, at most 2³¹ − 2 for the whole run.
      key: The key of the whole run; it is consumed.
      evaluator: The evaluator of the points: `vectorized(batch_size)`, or
        `sharded(axis_name)`.
      max_evaluations: The most evaluations of `fun` in this call; with a journal, in
        the whole run. The run ends before the step that would exceed it. Counted are
        the points of the estimator, as in `history.evaluations`, and not what an
        optimizer evaluates by `value_fn`.
      max_seconds: The most seconds from the start of this call, with compilation. The
        run ends after the first chunk that ends later, and with a journal after the
        first such step. Without `chunk_size`, chunks get shorter toward this time.
        Not for runs of several processes.
      target: A finite number. The run ends after the first step whose value, as in
        `values`, is not above it, in float32. The value is the loss before the update
        of the step.
      patience: The run ends after so many steps in a row whose value is not below the
        lowest before, in this call; with a journal, in the whole run. Steps without a
        finite value count as well.
      sample: `sample(key) -> xi` draws the random variable ξ of the loss, such as a
        minibatch, once a step: all evaluations of the step share it.
      bounds: A tuple `(lower, upper)` of numbers, or of trees like the parameters, or a
        `scipy.optimize.Bounds`: the box in which the parameters and all points stay.
      state: A state to continue from, as returned by a previous call or passed to
        `callback`. Its parameters and key replace `params` and `key`.
      chunk_size: Number of steps per chunk; by default, so many that a chunk takes
        about half a second.
      progress: Whether to show progress: a `tqdm` bar if that is installed, else one
        line per chunk on stderr.
      callback: `callback(state, values)`, called after every chunk with the chunk's
        values, float32 [chunk]. A true return value, or StopIteration, ends the run.
        The next chunk reuses the arrays of `state`: copy what you keep.
      on_failure: The treatment of values that are not finite. "drop": their directions
        are left out of the estimate, and a step without any is skipped: neither
        parameters nor optimizer state move. If the loss at the parameters is not
        finite, the mean of the other values replaces it. "raise": the run ends.
      max_consecutive_failures: The number of steps skipped in a row that ends the run.
      journal: The path of a journal, as in `minimize_black_box`. Steps are then taken
        one by one, and `optimizer` gets no `value_fn`, which the default one for
        minibatches needs.

    Returns:
      The result. Ctrl-C takes effect between chunks; the result then holds the steps
      done so far. A second Ctrl-C raises `KeyboardInterrupt`.

    Raises:
      TypeError, ValueError: If an argument is not valid, or processes hold
        different keys.
      RunError: If `max_consecutive_failures` steps in a row were skipped, or all steps
        of the run, or a value failed and `on_failure` is "raise". The error has the
        state.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> import radazo_jax as zo
      >>> result = zo.minimize(
      ...     lambda p: jnp.sum((p - 1.0) ** 2),
      ...     jnp.zeros(8),
      ...     zo.radazo(1e-2),
      ...     zo.forward_difference(),
      ...     300,
      ...     jax.random.key(0),
      ...     progress=False,
      ... )
      >>> result.values.shape, bool(result.values[-1] < 1e-2)
      ((300,), True)

    References:
      Shu et al., Refining Adaptive Zeroth-Order Optimization at Ease, ICML 2025,
      algorithms 1 and 2.
    """
    if not callable(fun):
        raise TypeError(f"fun must be a function of params; got {fun!r}.")
    if state is not None:
        checks.check_not_deleted("state", state)
    initial = params if state is None else state.params
    optimizer, estimator = method(optimizer, estimator, initial, sample is not None)
    budget = Budget(num_steps, max_evaluations, max_seconds, target, patience)
    if chunk_size is not None:
        checks.check_int_at_least("chunk_size", chunk_size, 1)
    policy = Policy.of(on_failure, max_consecutive_failures)
    if journal is not None and not (state is None and chunk_size is None):
        raise ValueError(
            "state and chunk_size must be None with a journal, which says where to go "
            f"on, and takes steps one by one; got chunk_size={chunk_size!r}."
        )
    check_evaluator(evaluator)
    run = Run(fun, sample, optimizer, estimator, evaluator, as_bounds(bounds))
    if state is None:
        state = step.start(run, params, key)
    else:
        states.check_state(run, state, leaves=True)
    state = resumed(state)
    states.check_known(state)
    budget.start(run, state, np.float32)
    if any(leaf.dtype.itemsize < 4 for leaf in jax.tree.leaves(state.params)):
        points, _ = step.points_at(run, state, step.loss_at(run, state))
        warn_of_rounding(points, state.params)
    # The chunks work in place on their state, so the caller keeps a copy of the first.
    state = jax.tree.map(jnp.copy, state)

    arrays, static = trees.partition(run)
    if journal is not None:
        return _one_by_one(
            state, fun, budget, policy, journal, progress, callback, arrays, static
        )
    run_chunk = functools.partial(_run_chunk, static=static)
    named = names(state)
    recorded: list[dict[str, Any]] = []
    limits = policy.limits(state)
    size = chunk_size or 1
    standstill = Standstill(state.step, stacklevel=2)
    with ExitStack() as stack:
        interrupted = stack.enter_context(interruptible())
        report = stack.enter_context(progress_bar(progress, 0, budget.total))
        while not (stopped := budget.reason()):
            if interrupted():
                stopped = "interrupted"
                break
            length = min(size, budget.num_steps - budget.steps)
            start = time.perf_counter()
            values = []
            for first in range(0, length, _MAX_CHUNK):
                wanted = min(_MAX_CHUNK, length - first)
                before, begun = int(state.step), time.perf_counter()
                state, reached, buffer = run_chunk(
                    state,
                    budget.progress,
                    np.int32(wanted),
                    limits,
                    arrays,
                )
                # This waits: on CPUs, too many queued collectives end the process.
                found = np.asarray(buffer)[: int(state.step) - before].T
                taken = found.shape[1]
                recorded.append(dict(zip(named, found, strict=True)))
                recorded[-1]["step"] = before + np.arange(taken)
                recorded[-1]["seconds"] = np.full(
                    taken, (time.perf_counter() - begun) / taken
                )
                values.append(found[0])
                budget.took(taken, jax.device_get(reached))
                report(taken, {"loss": f"{found[0, -1]:.6g}", **failure_counts(state)})
                policy.check(state, limits)
                standstill.saw_numbers(recorded[-1])
                if budget.reason():
                    break
            if chunk_size is None:
                seconds = time.perf_counter() - start
                size = _next_size(length, seconds, budget.seconds_left())
            if loop.ends(callback, state, np.concatenate(values)):
                stopped = budget.reason() or "callback"
                break
    policy.check_used(state, budget.steps)
    return _result(state, recorded, stopped, arrays, static)


def _result(
    state: SolverState,
    recorded: Sequence[Mapping[str, Any]],
    stopped: str,
    arrays: list[Any],
    static: trees.Static,
) -> MinimizeResult:
    params = state.params
    if revert.can_revert(state.optimizer_state):
        params = _final_params(state, arrays, static=static)
    history = History.of(recorded)
    values = losses(history)
    return MinimizeResult(params, values, state, history, stopped)


@functools.partial(jax.jit, static_argnames="static")
def _final_params(
    state: SolverState, arrays: list[Any], *, static: trees.Static
) -> Any:
    run = static.merge(arrays)
    return step.final_params(run, state, step.loss_at(run, state))


@functools.partial(jax.jit, static_argnames="static", donate_argnames="state")
def _run_chunk(
    state: SolverState,
    progress: Progress,
    length: jax.Array,
    limits: jax.Array,
    arrays: list[Any],
    *,
    static: trees.Static,
) -> tuple[SolverState, Progress, jax.Array]:
    """Does `length` steps in place; returns their numbers in a buffer.

    Args:
      state: The state to start from.
      progress: The progress of the run before: fewer steps are done if it ends.
      length: The number of steps, at most `_MAX_CHUNK`.
      limits: The limits of the policy: fewer steps are done if the failures reach one.
      arrays: The arrays of the run.
      static: The run without them.
    """
    run = static.merge(arrays)
    first = state.step

    def continues(carry: tuple[SolverState, Progress, jax.Array]) -> jax.Array:
        state, progress, _ = carry
        stops = exceeds(state, limits) | progress.ends()
        return (state.step - first < length) & ~stops

    def body(
        carry: tuple[SolverState, Progress, jax.Array],
    ) -> tuple[SolverState, Progress, jax.Array]:
        state, progress, buffer = carry
        i = state.step - first
        state, info = step.take(run, state, step.loss_at(run, state))
        found = numbers(info, state)
        return state, progress.after(found[0]), buffer.at[i].set(found)

    buffer = jnp.zeros((_MAX_CHUNK, len(names(state))), jnp.float32)
    return lax.while_loop(continues, body, (state, progress, buffer))


def _next_size(length: int, seconds: float, left: float) -> int:
    """The length of the next chunk, at most four times the last one's."""
    aim = min(_CHUNK_SECONDS, max(left, 0.0))
    wanted = int(length * min(aim / max(seconds, 1e-9), 4.0))
    return max(1, min(wanted, _MAX_CHUNK))


def _one_by_one(
    state: SolverState,
    fun: Callable[..., Any],
    budget: Budget,
    policy: Policy,
    path: Path,
    progress: bool,
    callback: Callable[[SolverState, np.ndarray], Any] | None,
    arrays: list[Any],
    static: trees.Static,
) -> MinimizeResult:
    """Steps whose values are written to a journal.

    The program that takes a step of them is the one that `replay` runs.
    """
    tell = ask_tell.teller(state, arrays, static)
    estimator = static.merge(arrays).estimator

    def before_each(records: Sequence[Record]) -> Callable[[SolverState], None]:
        chosen = journal.to_evaluate_again(records)

        def before(state: SolverState) -> None:
            if chosen is not None and int(state.step) == records[chosen[0]].step:
                record, i = records[chosen[0]], chosen[1]
                again = np.asarray(_values(state, arrays, static=static))[i]
                journal.warn_of_another_value(path, record, i, again, stacklevel=8)

        return before

    journaled = journal.resumed(path, fun, state, estimator, tell, budget, before_each)
    with ExitStack() as stack:
        interrupted = stack.enter_context(interruptible())
        state, steps, write = stack.enter_context(journaled)
        report = stack.enter_context(progress_bar(progress, len(steps), budget.total))
        for done in steps:
            budget.saw(done.numbers["value"], len(done.record.values))

        def evaluate(state: SolverState) -> Values | None:
            if interrupted():
                return None
            values = _values(state, arrays, static=static)
            found = np.asarray(values)
            bad = found[~np.isfinite(found)]
            return Values(found, [f"returned {value}" for value in bad])

        def after(state: SolverState, done: Done) -> Any:
            steps.append(done)
            value = done.numbers["value"]
            budget.saw(value, len(done.record.values))
            report(1, {"loss": f"{value:.6g}", **failure_counts(state)})
            last = np.array([value], np.float32)
            return loop.ends(callback, state, last)

        state, stopped = loop.run(
            state,
            evaluate,
            tell,
            budget,
            policy,
            write=write,
            after=after,
            last=loop.last_failure(steps),
            stacklevel=3,
        )
    return _result(state, [done.numbers for done in steps], stopped, arrays, static)


@functools.partial(jax.jit, static_argnames="static")
def _values(
    state: SolverState, arrays: list[Any], *, static: trees.Static
) -> jax.Array:
    """The values at the points of a step, [n]."""
    run = static.merge(arrays)
    loss = step.loss_at(run, state)
    points, _ = step.points_at(run, state, loss)
    values, _ = values_at(run.evaluator, loss, state.params, points)
    return points.join(values)
