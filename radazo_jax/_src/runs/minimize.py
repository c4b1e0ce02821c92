"""Whole runs: of functions that JAX traces, and of any Python function."""

import functools
import math
from collections.abc import Callable
from concurrent import futures
from contextlib import ExitStack
from typing import Any

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
from radazo_jax._src.runs import loop, rates
from radazo_jax._src.runs.journal import Journal, Path, line_of_run
from radazo_jax._src.runs.lost import warn_of_rounding
from radazo_jax._src.runs.one_by_one import Called, OneByOne, Traced
from radazo_jax._src.runs.results import Best, Report, Result
from radazo_jax._src.runs.rising import Rising
from radazo_jax._src.runs.steps import Compiled
from radazo_jax._src.runs.stop import Budget
from radazo_jax._src.runs.told import Stepper, Told, begin
from radazo_jax._src.steps import defaults, states, step, units
from radazo_jax._src.steps.box import BoundsLike, as_bounds
from radazo_jax._src.steps.defaults import FEW
from radazo_jax._src.steps.stages import Stages, of_state, with_tolerance
from radazo_jax._src.steps.states import Policy, Run, SolverState


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

    The steps of a function that JAX traces run on the device in chunks. A chunk is one
    compiled loop whose length is an argument, so any number of steps compiles once.
    With the evaluator `external` or a journal, steps are taken one by one. The random
    numbers of a step depend only on the key and the number of the step; chunks and
    interruptions do not change them.

    Args:
      fun: The loss, `fun(params)`, or `fun(params, xi)` if `sample` is given;
        a real scalar. With `has_aux`, a pair of it and anything else. With the
        evaluator `external`, any Python function, as in `minimize_black_box`, without
        `sample`, `has_aux` and `chunk_size`.
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
        the learning rate, but not retries, points that were not evaluated, and what an
        optimizer evaluates by `value_fn`.
      max_seconds: The most seconds from the start of this call, with compilation. The
        run ends after the first chunk that ends later, or after the first such step if
        steps are taken one by one. Without `chunk_size`, chunks get shorter toward this
        time. Not for runs of several processes.
      target: A finite number. The run ends after the first step whose value, as in
        `values`, is not above it, in float32. The value is the loss before the update
        of the step. With `external`, it is `best.value`, in the dtype of the values.
      patience: The run ends after so many steps in a row whose value is not below the
        lowest before, in this call; with a journal, in the whole run. Steps without a
        finite value count as well. With `external`, the value is `best.value`.
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
        `bounds` are in the units of the parameters. Repeat it to continue from a state
        or a journal. By default 1. Up to 100 parameters,
        the default method then finds sizes by itself if it needs them, from finite
        bounds or from values.
      state: A state to continue from, as returned by a previous call or passed to
        `callback`. Its parameters and key replace `params` and `key`, and it holds the
        learning rate that was measured. With `external`, it must have the dtypes of
        `params`.
      chunk_size: Number of steps per chunk; by default, so many that a chunk takes
        about half a second.
      progress: Whether to show progress: a `tqdm` bar if that is installed, else one
        line per chunk on stderr.
      callback: `callback(report)`, called after every chunk or step with a `Report` of
        it. A true return value, or StopIteration, ends the run. The next chunk
        reuses the arrays of `report.state`: copy what you keep. With `external`, it is
        a copy, in NumPy arrays.
      on_failure: The treatment of values that are not finite, and of points at which a
        Python function raises or returns anything but a number. "drop": their
        directions are left out of the estimate, and a step without any is skipped:
        neither parameters nor optimizer state move. If the loss at the parameters is
        not finite, the mean of the other values replaces it. "raise": the run ends.
      max_consecutive_failures: The number of steps skipped in a row that ends the run.
      has_aux: Whether `fun` returns a pair, of which the second part is dropped.
      journal: The path of a file to which the values of each step are added. The same
        call resumes the run from the end of the file; `replay` rebuilds it. One of its
        points is then evaluated again, and another value is a warning: `fun` may have
        changed, and nothing else. At most `num_steps` and `max_evaluations` are read;
        the other budgets end the run at the end of the file, at the earliest.
        `optimizer` gets no `value_fn`. A learning rate that was measured is in the
        first line.

    Returns:
      The result. Its `learning_rate` is the one that was measured. Ctrl-C takes effect
      between chunks, or before the step that is being evaluated if steps are taken one
      by one; the result then holds the steps done so far. A second Ctrl-C raises
      `KeyboardInterrupt`.

    Raises:
      TypeError, ValueError: If an argument is not valid, or processes hold
        different keys; if `fun` cannot be evaluated on the executor; if the journal is
        damaged, or of a run with another method, start, bounds, scale, key or dtype.
      RunError: If `max_consecutive_failures` steps in a row were skipped, or all steps
        of the run, or a value failed and `on_failure` is "raise", or a step could not
        be evaluated or written. `error.result` is the result so far.

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
    budget = Budget(num_steps, max_evaluations, max_seconds, target, patience)
    policy = Policy.of(on_failure, max_consecutive_failures)
    if not callable(fun):
        raise TypeError(f"fun must be a function of params; got {fun!r}.")
    check_evaluator(evaluator, traces=False)
    calls = not evaluator.compiled
    _check_used(calls, state, journal, chunk_size, sample, has_aux)
    if calls:
        params = trees.with_float64(params)
        _check_precision(params, state)
    initial = params if state is None else state.params
    loss = functools.partial(step.without_aux, fun) if has_aux else fun
    method = optimizer, estimator, search, initial, sample is not None
    run = Run(
        *(None if calls else loss, sample, *defaults.method(*method)),
        *(vectorized() if calls else evaluator, as_bounds(bounds)),
        *(defaults.is_staged(*method), units.as_units(scale)),
    )
    run, most_restarts = _with_stages(run, state, budget, tolerance, restarts)
    # Functions of the caller run under the caller's setting.
    context = functools.partial(jax.enable_x64, trees.has_x64())
    with ExitStack() as stack:
        if calls:
            stack.enter_context(trees.precision_of(initial))
        begun = states.resumed(begin(run, params, key, state))
        budget.start(run, begun, trees.widest(begun.params) if calls else np.float32)
        file = rate = None
        if journal is not None:
            file = stack.enter_context(Journal(journal).opened())
        if not calls:
            warn_of_rounding(run, begun)
            run = step.traced(run, begun)
            if sample is not None and optimizer is None:
                _check_no_scale(scale)
                given = budget, state is None, file
                run, begun, rate = rates.of_run(run, begun, *given)
        interrupted = stack.enter_context(loop.interruptible())
        if file is not None:
            file.begin(line_of_run(begun, run, rate))
        stages = Stages(run, begun, most_restarts)
        steps: loop.Steps
        if calls:
            external: Any = evaluator
            opened = external.open(
                fun,
                vector_valued=step.abstract_points(run, begun).vector_valued,
                context=context,
                interrupted=interrupted,
            )
            told = Told(Stepper(stages, begun), Best(trees.as_numpy(begun.params)))
            of_calls = external, stack.enter_context(opened)
            steps = Called(told, budget, file, *of_calls)
        elif file is None:
            of_chunk = policy, chunk_size, interrupted
            steps = Compiled(stages, begun, budget, *of_chunk)
        else:
            steps = Traced(Told(Stepper(stages, begun)), budget, file, interrupted)
        if isinstance(steps, OneByOne):
            with loop.failing_with_result(steps, rate):
                steps.resume()
        show = stack.enter_context(loop.progress_bar(progress, budget))
        rising = None
        if sample is not None:
            advice = rates.Advice(run, initial, key, budget.total, rate)
            rising = Rising(budget.total, advice.text)
        return loop.run(steps, policy, callback, show, context, rate, rising)


def minimize_black_box(
    fun: Objective,
    params: optax.Params,
    optimizer: optax.GradientTransformation | None = None,
    estimator: GradientEstimator | None = None,
    search: Search | None = None,
    *,
    workers: int | None = None,
    executor: futures.Executor | Callable[[], futures.Executor] | None = None,
    batched: bool = False,
    timeout: float | None = None,
    retries: int = 0,
    **options: Any,
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
      workers: As in `external`: the number of processes that evaluate points. `None`
        evaluates them in turn, unless an executor is given.
      executor: As in `external`: an executor, or a function that makes one.
      batched: As in `external`: whether `fun` takes all points of a step at once.
      timeout: As in `external`: seconds after which points that run have failed.
      retries: As in `external`: the number of further evaluations of a failed point.
      **options: The other arguments of `minimize`, such as `num_steps`, `key`,
        `max_evaluations`, `bounds` and `journal`.

    Returns:
      The result, of NumPy arrays.

    Raises:
      TypeError, ValueError, RunError: As `minimize`.

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
    named = optimizer, estimator, search
    return minimize(fun, params, *named, evaluator=evaluator, **options)


def _with_stages(
    run: Run,
    state: SolverState | None,
    budget: Budget,
    tolerance: float | None,
    restarts: int | None,
) -> tuple[Run, float]:
    """The run in the stage of a state, and the number of restarts that end it."""
    if tolerance is not None:
        checks.check_unit_interval("tolerance", tolerance)
    if restarts is not None:
        checks.check_int_at_least("restarts", restarts, 0)
    for name, value in (("tolerance", tolerance), ("restarts", restarts)):
        if value is not None and not run.staged:
            raise ValueError(
                f"{name} must be None unless the default method runs, with at most "
                f"{FEW} parameters; got {value!r}. Give patience, or another budget."
            )
    if run.staged:
        run = with_tolerance(run, tolerance)
        if isinstance(state, SolverState):
            run = of_state(run, state)
    if restarts is not None:
        return run, int(restarts)
    return run, 0 if budget.is_open else math.inf


def _check_used(
    calls: bool,
    state: SolverState | None,
    journal: Path | None,
    chunk_size: int | None,
    sample: Any,
    has_aux: bool,
) -> None:
    """Raises if arguments exclude each other.

    Args:
      calls: Whether Python functions are called.
      state: As in `minimize`, like the others.
      journal: As in `minimize`.
      chunk_size: As in `minimize`.
      sample: As in `minimize`.
      has_aux: As in `minimize`.
    """
    if state is not None:
        checks.check_not_deleted("state", state)
    if chunk_size is not None and not calls:
        checks.check_int_at_least("chunk_size", chunk_size, 1)
    if journal is not None and not (state is None and chunk_size is None):
        raise ValueError(
            "state and chunk_size must be None with a journal, which says where to "
            f"continue, and takes steps one by one; got chunk_size={chunk_size!r}."
        )
    if not calls:
        return
    for name, value in (("sample", sample), ("chunk_size", chunk_size)):
        if value is not None:
            raise ValueError(
                f"{name} must be None with an evaluator of Python functions; got "
                f"{value!r}."
            )
    if has_aux:
        raise ValueError(
            "has_aux must be False with an evaluator of Python functions, whose pairs "
            "are recognized; got True."
        )


def _check_no_scale(scale: Any) -> None:
    if scale is not None:
        raise ValueError(
            "scale must be None on minibatches without an optimizer, whose "
            f"learning rate is measured; got {scale!r}. Name an optimizer."
        )


def _check_precision(params: optax.Params, state: SolverState | None) -> None:
    """Raises if a state has other dtypes than the parameters that it replaces."""
    leaves = () if state is None else jax.tree.leaves(state.params)
    for p, q in zip(jax.tree.leaves(params), leaves, strict=False):
        if hasattr(p, "dtype") and p.dtype != q.dtype:
            raise ValueError(
                f"state must have the dtypes of params, {p.dtype}; got {q.dtype}. "
                "Begin another run from state.params in the dtype that you need."
            )
