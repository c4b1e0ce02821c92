"""Whole runs: of functions that JAX traces, and of any Python function."""

import functools
import math
from collections.abc import Callable
from concurrent import futures
from contextlib import ExitStack
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from radazo_jax._src import checks, trees
from radazo_jax._src.base import (
    Evaluator,
    GradientEstimator,
    Objective,
    Search,
    check_evaluator,
)
from radazo_jax._src.evaluators.external import External
from radazo_jax._src.evaluators.vectorized import vectorized
from radazo_jax._src.runs import learning_rate, loop
from radazo_jax._src.runs.called import CalledSteps
from radazo_jax._src.runs.chunks import Chunks
from radazo_jax._src.runs.lost import warn_of_rounding
from radazo_jax._src.runs.one_by_one import OneByOne, TracedSteps
from radazo_jax._src.runs.results import Report, Result
from radazo_jax._src.runs.stop import Budget
from radazo_jax._src.steps import states, step, units
from radazo_jax._src.steps.box import BoundsLike, as_bounds
from radazo_jax._src.steps.defaults import FEW, is_staged, method
from radazo_jax._src.steps.records import Path
from radazo_jax._src.steps.stages import Stages, of_state, with_tolerance
from radazo_jax._src.steps.states import Policy, Run, SolverState, resumed


def minimize(
    fun: Objective,
    params: optax.Params,
    optimizer: optax.GradientTransformation | None = None,
    estimator: GradientEstimator | None = None,
    search: Search | None = None,
    *,
    evaluator: Evaluator = vectorized(),
    num_steps: int | None = None,
    key: jax.typing.ArrayLike = 0,
    max_evaluations: int | None = None,
    max_seconds: float | None = None,
    target: float | None = None,
    patience: int | None = None,
    tolerance: float | None = None,
    restarts: int | None = None,
    sample: Callable[[jax.Array], object] | None = None,
    bounds: BoundsLike | None = None,
    scale: Any = None,
    state: SolverState | None = None,
    chunk_size: int | None = None,
    progress: bool = True,
    callback: Callable[[Report], object] | None = None,
    on_failure: str = "drop",
    max_consecutive_failures: int = 10,
    has_aux: bool = False,
    journal: Path | None = None,
) -> Result:
    """Minimizes a function from its values alone.

    The steps run on the device in chunks. A chunk is one compiled loop whose length is
    an argument, so any number of steps compiles once. The random numbers of a step
    depend only on the key and the number of the step; chunks and interruptions do not
    change them.

    Args:
      fun: The loss, `fun(params)`, or `fun(params, xi)` if `sample` is given;
        a real scalar. With `has_aux`, a pair of it and anything else. With the
        evaluator `external`, any Python function, as in `minimize_black_box`.
      params: The starting point, a tree of floating-point arrays. Not modified.
      optimizer: An Optax transformation, such as `radazo(1e-3)`. It gets `value`,
        `grad`, `slope` (along `grad`), `value_fn` and `measured` (whether the loss at
        the parameters is finite; if not, `value` replaces it) as extra arguments, if
        it takes any. By default nothing is tuned: `bfgs()` up to 100 parameters, and
        `optax.sgd(1.0)` for more or if an estimator is named. If neither estimator nor
        search is named, `estimators.cma()` follows `bfgs()` under noise, on functions
        in steps, and once gradients lead nowhere; see `stages` of the result. If
        `sample` is given, it is R-AdaZO at the learning rate that
        `find_learning_rate` measures before the first step, with the smoothing of an
        estimator that names none. The rate falls linearly to 0 over the run; without
        `num_steps` and `max_evaluations`, it falls as 1/√(1 + t/100). Above 2²⁴
        parameters its moments are replayed.
      estimator: An estimator; by default `full_difference()` with the default `bfgs()`,
        else `adaptive_difference(orthonormal(), K)`, with K = √d, but at least 10 and
        at most 32. It is `accelerated` unless an optimizer is named. For
        minibatches it is `forward_difference(orthonormal())`.
      search: A search, which finds the length of the steps and may reject them. It is
        `search.whole()` if an optimizer is named, whose steps are taken as they are; by
        default `search.backtracking()` with the default `bfgs()`, `search.parabolic()`
        otherwise, and `search.whole()` for minibatches.
      num_steps: The number of steps in this call; with a journal, of the whole run. By
        default 1000, or fewer if the default method converges, also with a `target`;
        with another budget, at most 2³¹ − 2 for the whole run. A run at a learning rate
        that was measured ends once this rate is 0, at the latest.
      key: The key of the whole run; it is consumed.
      evaluator: The evaluator of the points: `vectorized(batch_size)` or
        `sharded(axis_name)` for functions that JAX traces, or `external(...)` for
        Python functions, as in `minimize_black_box`.
      max_evaluations: The most evaluations of `fun` in this call; with a journal, in
        the whole run. The run ends before the step that would exceed it. Counted are
        the points of the estimator, as in `history.evaluations`, and those that measure
        the learning rate, but not what an optimizer evaluates by `value_fn`.
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
      tolerance: τ, a number in [0, 1), if the default method runs, up to 100
        parameters. Its first stage, which follows slopes, is over once a step has
        changed the value f by at most τ max(|f|, |f(θ₀)|), and each parameter by at
        most τ max(|θᵢ|, sᵢ), with its size sᵢ: its `scale`, times the size that the run
        has found, if any. The run then ends, or restarts. With or without a tolerance,
        the stage is over once slopes are too small to lower the value any further.
      restarts: The number of searches for another minimum, likewise. The first search
        is over at a minimum of the first stage, or once `estimators.cma()`, which
        follows it otherwise, has nothing more to tell. A restart is `cma`, with twice
        the population of any before. After the last one, the run ends with
        `stopped="converged"`, unless a budget ends it before. By default 0 without a
        budget, and any number with one; a `target` is no budget.
      sample: `sample(key) -> xi` draws the random variable ξ of the loss, such as a
        minibatch, once a step: all evaluations of the step share it.
      bounds: A tuple `(lower, upper)` of numbers, or of trees like the parameters, or a
        `scipy.optimize.Bounds`: the box in which the parameters and all points stay.
      scale: S, the size of a typical change of each parameter: a positive number, or a
        tree like the parameters of numbers and of arrays that broadcast to its leaves.
        With any method, the run takes the steps in which it would minimize f(S z) from
        z = θ₀/S: smoothing, learning rates and weight decay are in units of S. S is
        rounded to powers of two, so that it rounds nothing else. Results, states and
        `bounds` are in the units of the parameters. By default 1. Up to 100 parameters,
        the default method then finds sizes by itself if it needs them, from finite
        bounds or from values.
      state: A state to continue from, as returned by a previous call or passed to
        `callback`. Its parameters and key replace `params` and `key`, and it holds the
        learning rate that was measured.
      chunk_size: Number of steps per chunk; by default, so many that a chunk takes
        about half a second.
      progress: Whether to show progress: a `tqdm` bar if that is installed, else one
        line per chunk on stderr.
      callback: `callback(report)`, called after every chunk with a `Report` of its
        steps. A true return value, or StopIteration, ends the run. The next chunk
        reuses the arrays of `report.state`: copy what you keep.
      on_failure: The treatment of values that are not finite. "drop": their directions
        are left out of the estimate, and a step without any is skipped: neither
        parameters nor optimizer state move. If the loss at the parameters is not
        finite, the mean of the other values replaces it. "raise": the run ends.
      max_consecutive_failures: The number of steps skipped in a row that ends the run.
      has_aux: Whether `fun` returns a pair, of which the second part is dropped.
      journal: The path of a journal, as in `minimize_black_box`. Steps are then taken
        one by one, and `optimizer` gets no `value_fn`. A learning rate that was
        measured is in its first line.

    Returns:
      The result. Its `learning_rate` is the one that was measured. Ctrl-C takes effect
      between chunks; the result then holds the steps done so far. A second Ctrl-C
      raises `KeyboardInterrupt`.

    Raises:
      TypeError, ValueError: If an argument is not valid, or processes hold
        different keys.
      RunError: If `max_consecutive_failures` steps in a row were skipped, or all steps
        of the run, or a value failed and `on_failure` is "raise". `error.result` is
        the result so far.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> import radazo_jax as zo
      >>> result = zo.minimize(
      ...     lambda p: jnp.sum((p - 1.0) ** 2),
      ...     jnp.zeros(8),
      ...     zo.radazo(1e-2),
      ...     zo.forward_difference(),
      ...     num_steps=300,
      ...     key=jax.random.key(0),
      ...     progress=False,
      ... )
      >>> result.values.shape, bool(result.values[-1] < 1e-2)
      ((300,), True)

    References:
      Shu et al., Refining Adaptive Zeroth-Order Optimization at Ease, ICML 2025,
      algorithms 1 and 2.
    """
    return _run(
        _Call(
            *(fun, params, optimizer, estimator, search, evaluator),
            Budget(num_steps, max_evaluations, max_seconds, target, patience),
            Policy.of(on_failure, max_consecutive_failures),
            *(tolerance, restarts),
            *(key, sample, bounds, scale, state, chunk_size),
            *(progress, callback, has_aux, journal),
        )
    )


def minimize_black_box(
    fun: Objective,
    params: optax.Params,
    optimizer: optax.GradientTransformation | None = None,
    estimator: GradientEstimator | None = None,
    search: Search | None = None,
    *,
    num_steps: int | None = None,
    key: jax.typing.ArrayLike = 0,
    max_evaluations: int | None = None,
    max_seconds: float | None = None,
    target: float | None = None,
    patience: int | None = None,
    tolerance: float | None = None,
    restarts: int | None = None,
    workers: int | None = None,
    executor: futures.Executor | Callable[[], futures.Executor] | None = None,
    batched: bool = False,
    timeout: float | None = None,
    retries: int = 0,
    bounds: BoundsLike | None = None,
    scale: Any = None,
    on_failure: str = "drop",
    max_consecutive_failures: int = 10,
    journal: Path | None = None,
    state: SolverState | None = None,
    progress: bool = True,
    callback: Callable[[Report], object] | None = None,
) -> Result:
    """Minimizes any Python function from its values alone.

    It is `minimize` with the evaluator `external(workers, executor, batched, timeout,
    retries)`.

    Args:
      fun: `fun(params)` gets a tree of NumPy arrays and returns a number, or a pair of
        a number and anything else. An array of one element is a number. Each call gets
        a copy of the point, so `fun` may write to it. A point that a step has twice is
        evaluated once. An estimator such as `evolution_strategy` also takes several
        numbers for a point, such as one for each prompt: an array of shape [G].
      params: The starting point, a tree of floating-point arrays. NumPy's float64 is
        kept, also if JAX has 64 bits disabled, and Python's floats are float64. `fun`
        and `callback` are called under the caller's setting.
      optimizer: As in `minimize`; it gets no `value_fn`. Calls with the same
        `optimizer` and `estimator` objects compile once.
      estimator: As in `minimize`; it chooses the points.
      search: As in `minimize`.
      num_steps: The number of steps in this call; with a journal, of the whole run. By
        default 1000, or fewer if the default method converges, also with a `target`;
        with another budget, at most 2³¹ − 2 for the whole run.
      key: The key of the whole run; it is consumed. It takes the steps of `minimize`.
      max_evaluations: The most evaluations in this call; with a journal, in the whole
        run. The run ends before the step that could exceed it. Counted are the points,
        as in `num_evaluations`; a retry is not counted, and neither is a point that
        was not evaluated.
      max_seconds: The most seconds from the start of this call. The run ends after the
        first step that ends later. Not for runs of several processes.
      target: A finite number. The run ends after the first step after which
        `best.value` is not above it, in the dtype of the values at the points.
      patience: The run ends after so many steps in a row that do not lower
        `best.value`, in this call; with a journal, in the whole run.
      tolerance: As in `minimize`.
      restarts: As in `minimize`.
      workers: Number of processes that evaluate the points of a step, as in `external`;
        needs the package `loky`. `None` evaluates them in turn, unless an executor is
        given. If the value at θ rejects the latest step, as with
        `search.backtracking`, the other points of the step are then not evaluated; the
        steps are the same.
      executor: A `concurrent.futures.Executor` on which the points of a step are
        evaluated, or a function without arguments that makes one, which is called
        again if workers died or hang.
      batched: Whether `fun` takes all n points of a step at once, a tree of arrays
        with an additional first axis, and returns n values, or a pair of these and n
        other objects; n is the same in all steps.
      timeout: Seconds; needs workers or an executor. If no point ends for this long,
        those that run have failed, and the workers are replaced, unless the executor
        is the caller's.
      retries: Number of further evaluations of a point that failed.
      bounds: As in `ask_tell`.
      scale: As in `minimize`. Repeat it to continue from a state or a journal.
      on_failure: The treatment of a point at which `fun` raises, or returns anything
        but a finite number. "drop": its direction is left out of the estimate, and a
        step without any is skipped: neither parameters nor optimizer state move. If θ
        has failed, the mean of the other values replaces its value. "raise": the run
        ends.
      max_consecutive_failures: The number of steps skipped in a row that ends the run.
      journal: The path of a file to which the values of each step are added. The same
        call resumes the run from the end of the file; `replay` rebuilds it. One of its
        points is then evaluated again, and another value is a warning. At most
        `num_steps` and `max_evaluations` are read; the other budgets end the run
        at the end of the file, at the earliest.
      state: A state to continue from. Its parameters and key replace `params` and
        `key`; it must have the dtypes of `params`.
      progress: Whether to show progress, as in `minimize`.
      callback: `callback(report)`, called after every step with a `Report` of it. A
        true return value, or StopIteration, ends the run. The state is a copy, in NumPy
        arrays.

    Returns:
      The result. Ctrl-C ends the run before the step that is being evaluated; the
      result then holds the earlier steps. A second Ctrl-C raises `KeyboardInterrupt`.

    Raises:
      TypeError, ValueError: If an argument is not valid, `fun` cannot be
        evaluated on the executor, the journal is of another run, or it is damaged.
      RunError: If `max_consecutive_failures` steps in a row were skipped, or all steps
        of the run, or a point failed and `on_failure` is "raise", or a step could not
        be evaluated or written. `error.result` is the result so far.

    Examples:
      >>> import numpy as np
      >>> import radazo_jax as zo
      >>> def fun(x):
      ...     return float(np.sum(np.abs(x - 1.0)))
      >>> result = zo.minimize_black_box(
      ...     fun,
      ...     np.zeros(4, np.float32),
      ...     zo.radazo(3e-2),
      ...     zo.central_difference(),
      ...     num_steps=100,
      ...     key=0,
      ...     progress=False,
      ... )
      >>> result.values.shape, bool(result.best.value < 0.3)
      ((100,), True)
    """
    evaluator = External(workers, executor, batched, timeout, retries)
    return _run(
        _Call(
            *(fun, params, optimizer, estimator, search, evaluator),
            Budget(num_steps, max_evaluations, max_seconds, target, patience),
            Policy.of(on_failure, max_consecutive_failures),
            *(tolerance, restarts),
            *(key, None, bounds, scale, state, None),
            *(progress, callback, False, journal),
        )
    )


class _Call(NamedTuple):
    """The arguments of `minimize`."""

    fun: Any
    params: Any
    optimizer: Any
    estimator: Any
    search: Any
    evaluator: Any
    budget: Budget
    policy: Policy
    tolerance: Any
    restarts: Any
    key: Any
    sample: Any
    bounds: Any
    scale: Any
    state: Any
    chunk_size: Any
    progress: bool
    callback: Any
    has_aux: bool
    journal: Any


def _run(call: _Call) -> Result:
    """Runs a call whose budgets and policy are checked."""
    if not callable(call.fun):
        raise TypeError(f"fun must be a function of params; got {call.fun!r}.")
    check_evaluator(call.evaluator, traces=False)
    if call.state is not None:
        checks.check_not_deleted("state", call.state)
    if call.evaluator.compiled:
        return _traced(call)
    return _called(call)


def _traced(call: _Call) -> Result:
    """A run of a function that JAX traces."""
    fun, path, budget = call.fun, call.journal, call.budget
    if call.chunk_size is not None:
        checks.check_int_at_least("chunk_size", call.chunk_size, 1)
    if path is not None and not (call.state is None and call.chunk_size is None):
        raise ValueError(
            "state and chunk_size must be None with a journal, which says where to go "
            f"on, and takes steps one by one; got chunk_size={call.chunk_size!r}."
        )
    initial = call.params if call.state is None else call.state.params
    loss = functools.partial(step.without_aux, fun) if call.has_aux else fun
    run = _run_of(call, initial, loss)
    state = _begun(call, run, call.params)
    budget.start(run, state, np.float32)
    if any(leaf.dtype.itemsize < 4 for leaf in jax.tree.leaves(state.params)):
        points, _ = step.points_at(run, state, step.loss_at(run, state))
        placed = units.around(run.units, state.params, points)
        warn_of_rounding(placed, state.params)
    run = step.traced(run, state)
    rate = None
    if call.sample is not None and call.optimizer is None:
        if call.scale is not None:
            raise ValueError(
                "scale must be None on minibatches without an optimizer, whose "
                f"learning rate is measured; got {call.scale!r}. Name an optimizer."
            )
        given = budget, call.state is None, path
        run, state, rate = learning_rate.of_run(run, state, *given)
    stages = Stages(run, state, _restarts_of(call))
    with ExitStack() as stack:
        interrupted = stack.enter_context(loop.interruptible())
        steps: Chunks | OneByOne
        if path is None:
            of_chunk = call.policy, call.chunk_size, interrupted
            steps = Chunks(stages, state, budget, *of_chunk)
        else:
            steps = TracedSteps(stages, state, budget, interrupted)
            state = stack.enter_context(steps.resumed(path, fun, state, rate))
            steps.warn_of_another_function(state, path)
        report = stack.enter_context(loop.progress_bar(call.progress, budget))
        options = loop.Options(budget, call.policy, call.callback, report, rate=rate)
        return loop.run(steps, state, options, steps.last_failure)


def _called(call: _Call) -> Result:
    """A run of a Python function."""
    _check_called(call)
    fun, path, budget, evaluator = call.fun, call.journal, call.budget, call.evaluator
    params = trees.with_float64(call.params)
    if call.state is not None:
        _check_precision(params, call.state)
    initial = params if call.state is None else call.state.params
    run = _run_of(call._replace(evaluator=vectorized()), initial, None)
    # Functions of the caller run under the caller's setting.
    of_caller = functools.partial(jax.enable_x64, trees.has_x64())
    with ExitStack() as stack:
        stack.enter_context(trees.precision_of(initial))
        state = _begun(call, run, params)
        budget.start(run, state, trees.widest(state.params))
        calls = evaluator.open(
            fun,
            vector_valued=step.abstract_points(run, state).vector_valued,
            context=of_caller,
            interrupted=stack.enter_context(loop.interruptible()),
        )
        stages = Stages(run, state, _restarts_of(call))
        given = stages, state, budget, evaluator
        steps = CalledSteps(*given, stack.enter_context(calls))
        state = stack.enter_context(steps.resumed(path, fun, state))
        if path is not None:
            with loop.failing_with_result(steps):
                steps.warn_of_another_function(state, path)
        report = stack.enter_context(loop.progress_bar(call.progress, budget))
        options = loop.Options(budget, call.policy, call.callback, report, of_caller)
        return loop.run(steps, state, options, steps.last_failure)


def _run_of(call: _Call, params: optax.Params, loss: Any) -> Run:
    """The run of a call: of a state's stage, if it continues one.

    Args:
      call: The call.
      params: The parameters to begin with.
      loss: The function that JAX traces, `None` if there is none.
    """
    minibatches = call.sample is not None
    named = call.optimizer, call.estimator, call.search
    chosen = method(*named, params, minibatches)
    staged = is_staged(*named, params, minibatches)
    run = Run(loss, call.sample, *chosen, call.evaluator, as_bounds(call.bounds))
    run = run._replace(staged=staged, units=units.as_units(call.scale))
    _check_staged(call, staged)
    if staged:
        run = with_tolerance(run, call.tolerance)
    if staged and isinstance(call.state, SolverState):
        return of_state(run, call.state)
    return run


def _check_staged(call: _Call, staged: bool) -> None:
    """Raises if arguments of the default method's stages are wrong, or not used."""
    if call.tolerance is not None:
        checks.check_unit_interval("tolerance", call.tolerance)
    if call.restarts is not None:
        checks.check_int_at_least("restarts", call.restarts, 0)
    for name, value in (("tolerance", call.tolerance), ("restarts", call.restarts)):
        if value is not None and not staged:
            raise ValueError(
                f"{name} must be None unless the default method runs, with at most "
                f"{FEW} parameters; got {value!r}. Give patience, or another budget."
            )


def _restarts_of(call: _Call) -> float:
    """The number of restarts after which a run ends."""
    if call.restarts is not None:
        return int(call.restarts)
    return 0 if call.budget.is_open else math.inf


def _begun(call: _Call, run: Run, params: optax.Params) -> SolverState:
    """The state to begin with, of which the caller keeps a copy: steps are in place."""
    state = call.state
    if state is None:
        state = step.start(run, params, call.key)
    else:
        states.check_state(run, state, leaves=True)
        units.check_units(run.units, state.params)
    states.check_known(state)
    return trees.copy(resumed(state))


def _check_called(call: _Call) -> None:
    """Raises if an argument is only for functions that JAX traces."""
    for name, value in (("sample", call.sample), ("chunk_size", call.chunk_size)):
        if value is not None:
            raise ValueError(
                f"{name} must be None with an evaluator of Python functions; got "
                f"{value!r}."
            )
    if call.has_aux:
        raise ValueError(
            "has_aux must be False with an evaluator of Python functions, whose pairs "
            "are recognized; got True."
        )
    if call.state is not None and call.journal is not None:
        raise ValueError(
            "state must be None with a journal, which says where to continue; got a "
            "state. Give one of them."
        )


def _check_precision(params: optax.Params, state: SolverState) -> None:
    """Raises if a state has other dtypes than the parameters that it replaces."""
    pairs = zip(jax.tree.leaves(params), jax.tree.leaves(state.params), strict=False)
    for p, q in pairs:
        if hasattr(p, "dtype") and p.dtype != q.dtype:
            raise ValueError(
                f"state must have the dtypes of params, {p.dtype}; got {q.dtype}. "
                "Begin another run from state.params in the dtype that you need."
            )
