"""Whole runs: of functions that JAX traces, and of any Python function."""

import functools
from collections.abc import Callable
from concurrent import futures
from contextlib import AbstractContextManager, ExitStack
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from radazo_jax._src import checks, trees
from radazo_jax._src.contracts import (
    Evaluator,
    GradientEstimator,
    Objective,
    check_evaluator,
)
from radazo_jax._src.estimators.differences import forward_difference
from radazo_jax._src.evaluators.external import Calls, External
from radazo_jax._src.evaluators.vectorized import vectorized
from radazo_jax._src.methods.contract import Method
from radazo_jax._src.methods.policy import untuned
from radazo_jax._src.names import checks_names
from radazo_jax._src.runs import loop, rates
from radazo_jax._src.runs.asked import ByProgram, Evaluate, MethodSteps, Shared
from radazo_jax._src.runs.asker import MethodState, begun
from radazo_jax._src.runs.journal import Journal, Path, line_of_method, line_of_run
from radazo_jax._src.runs.learning_rate import LearningRate
from radazo_jax._src.runs.one_by_one import Called, Traced
from radazo_jax._src.runs.results import Best, Report, Result
from radazo_jax._src.runs.rising import Rising
from radazo_jax._src.runs.steps import Compiled
from radazo_jax._src.runs.stop import Budget
from radazo_jax._src.runs.told import Stepper, Told, begin, is_method
from radazo_jax._src.runs.vectors import refuse_step, resolution_of
from radazo_jax._src.steps import draws, states, step
from radazo_jax._src.steps.box import Bounds, BoundsLike, as_bounds
from radazo_jax._src.steps.lost import warn_of_rounding
from radazo_jax._src.steps.states import Policy, Run, SolverState
from radazo_jax._src.steps.step import without_aux

# Up to so many parameters, the default is a method on the host.
MOST = 10_000

# The number of steps of a method without a budget, which usually ends before.
MOST_STEPS = 10_000


@checks_names
def minimize(
    fun: Objective,
    params: optax.Params,
    optimizer: optax.GradientTransformation | Method | None = None,
    estimator: GradientEstimator | None = None,
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
    step: Any = None,
    scale: Any = None,
    state: SolverState | MethodState | None = None,
    chunk_size: int | None = None,
    progress: bool = True,
    callback: Callable[[Report], object] | None = None,
    on_failure: str = "drop",
    max_consecutive_failures: int = 10,
    has_aux: bool = False,
    journal: Path | None = None,
) -> Result:
    """Minimizes a function from its values alone.

    Up to 10,000 parameters, nothing needs to be named: a method on the host,
    `methods.untuned()`, chooses points by the values so far. With an optimizer or an
    estimator, on minibatches, or for more parameters, each step estimates a gradient in
    one program, and an Optax optimizer uses it.

    The steps of an optimizer on a function that JAX traces run on the device in chunks.
    A chunk is one compiled loop whose length is an argument, so any number of steps
    compiles once. Methods, Python functions and journals take steps one by one. Random
    numbers depend only on the key and the steps before; chunks and interruptions do not
    change them.

    Args:
      fun: The loss, `fun(params)`, or `fun(params, xi)` if `sample` is given;
        a real scalar. With `has_aux`, a pair of it and anything else. With the
        evaluator `external`, any Python function, as in `minimize_black_box`, without
        `sample`, `has_aux` and `chunk_size`.
      params: The starting point, a tree of floating-point arrays. Not modified.
      optimizer: A method, such as `methods.evolution()`, or an Optax transformation,
        such as `radazo(1e-3)`. The latter gets `value`, `grad`, `slope` (along `grad`)
        and `value_fn` as extra arguments, if it takes any. By default,
        `methods.untuned(tolerance, restarts, scale)` if no estimator and no `sample` is
        given and there are at most 10,000 parameters. Otherwise it is R-AdaZO at the
        learning rate that `find_learning_rate` measures before the first step, with the
        smoothing of an estimator that names none. The rate falls linearly to 0 over the
        run; without `num_steps` and `max_evaluations`, it falls as 1/√(1 + t/100).
        Above 2²⁴ parameters its moments are replayed.
      estimator: An estimator, if an Optax transformation takes the steps; by default
        `forward_difference()`, and `forward_difference(orthonormal())` at a measured
        learning rate.
      num_steps: The number of steps in this call; with a journal, of the whole run. In
        a step, a method asks for points once, and gets all of their values. By
        default 1000, or 10,000 with a method, which usually ends before. If
        `max_evaluations`, `max_seconds` or `patience` is given, no default limits the
        steps. At the latest, a run ends at step 2³¹ − 2, or once a learning rate that
        was measured is 0.
      key: The key of the whole run; it is consumed.
      evaluator: The evaluator of the points: `vectorized(batch_size)` or
        `sharded(axis_name)` for functions that JAX traces, or `external(...)` for
        Python functions, as in `minimize_black_box`.
      max_evaluations: The most evaluations of `fun` in this call; with a journal, in
        the whole run. The run ends before the step that would exceed it, and with a
        method, within the step. If a method has seen noise, a tenth is kept to evaluate
        its best points again. Counted are the points, as in `history.evaluations`, and
        those that measure the learning rate, but not retries, points that idle workers
        evaluate in advance, and what an optimizer evaluates by `value_fn`.
      max_seconds: The most seconds from the start of this call, with compilation. The
        run ends after the first chunk that ends later, or after the first such step if
        steps are taken one by one. Without `chunk_size`, chunks get shorter toward this
        time. Not for runs of several processes.
      target: A finite number. The run ends after the first step whose value, as in
        `values`, is not above it, in float32. The value is the loss before the update
        of the step. With `external` or a method it is `best.value`; if a method has
        seen noise, it is the mean of four further values at that point.
      patience: The run ends after so many steps in a row whose value is not below the
        lowest before, in this call; with a journal, in the whole run. Steps without a
        finite value count as well. With `external` or a method, the value is
        `best.value`.
      tolerance: As in `methods.untuned`, if nothing else is named.
      restarts: As in `methods.untuned`, likewise. By default 0 without a budget, and
        any number with one; a `target` is no budget.
      sample: `sample(key) -> xi` draws the random variable ξ of the loss, such as a
        minibatch, once a step: all evaluations of the step share it.
      bounds: A tuple `(lower, upper)` of numbers, or of trees like the parameters, or a
        `scipy.optimize.Bounds`: the box in which the parameters and all points stay.
        A list of pairs, one for each element of an array of parameters, is read as
        SciPy reads it. `None` is no bound.
      step: Spacing of the values of parameters, if a method takes the steps: a number
        of at least 0, or a tree like the parameters of numbers and arrays that
        broadcast to the leaves. 1 is for whole numbers, and 0 for continuous
        parameters. All points, and `best.params`, are multiples of it in the dtype of
        the parameters, and so are the bounds once they are rounded inward. A start that
        is none is rounded, with a warning.
      scale: As in `methods.untuned`, likewise.
      state: A state to continue from, as returned by a previous call or passed to
        `callback`. Its parameters and key replace `params` and `key`, and it holds the
        learning rate that was measured. With `external`, it must have the dtypes of
        `params`. A method that a budget has ended continues as with a budget.
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
        With a method, d + 1 evaluations that fail in a row count as a step.
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
    checks.check_callback(callback)
    calls = not evaluator.compiled
    _check_used(calls, state, journal, chunk_size, sample, has_aux)
    if calls:
        params = trees.with_float64(params)
        _check_precision(params, state)
    loss = functools.partial(without_aux, fun) if has_aux else fun
    settings = {"tolerance": tolerance, "restarts": restarts, "scale": scale}
    initial = params if state is None else state.params
    method = _method(optimizer, estimator, initial, sample, settings)
    # Functions of the caller run under the caller's setting.
    context = functools.partial(jax.enable_x64, trees.has_x64())
    with ExitStack() as stack:
        if calls:
            stack.enter_context(trees.precision_of(initial))
        file = None
        if journal is not None:
            file = stack.enter_context(Journal(journal).opened())
        given = loss, params, key, as_bounds(bounds), state, evaluator
        call = _Call(stack, budget, policy, file, context, *given)
        if method is not None:
            begun = _steps_of_method(call, method, step)
        else:
            refuse_step(step)
            begun = _steps_of_optimizer(call, optimizer, estimator, sample, chunk_size)
        steps, rate, rising = begun
        return loop.run(steps, policy, callback, progress, context, rate, rising)


# Steps, the learning rate that was measured for them, and what warns of a rise.
_Begun = tuple[loop.Steps, LearningRate | None, Rising | None]


class _Call(NamedTuple):
    """A call of `minimize`: what it has opened, and arguments that are checked.

    Attributes:
      stack: Closes what was opened.
      budget: The budgets.
      policy: The rule by which failures end the run.
      file: The journal, open; `None` without one.
      context: Makes the context in which functions of the caller run.
      fun: The function, without auxiliary output.
      params: As in `minimize`, like the others.
      key: As in `minimize`.
      bounds: As in `minimize`.
      state: As in `minimize`.
      evaluator: As in `minimize`.
    """

    stack: ExitStack
    budget: Budget
    policy: Policy
    file: Journal | None
    context: Callable[[], AbstractContextManager[Any]]
    fun: Callable[..., Any]
    params: optax.Params
    key: jax.typing.ArrayLike
    bounds: Bounds | None
    state: Any
    evaluator: Any

    @property
    def initial(self) -> optax.Params:
        """The parameters before the first step."""
        return self.params if self.state is None else self.state.params

    def interrupted(self) -> Callable[[], bool]:
        """Makes the first Ctrl-C a flag to read."""
        return self.stack.enter_context(loop.interruptible())

    def calls(self, vector_valued: bool) -> Calls:
        """Opens what calls a Python function."""
        opened = self.evaluator.open(
            self.fun,
            vector_valued=vector_valued,
            context=self.context,
            interrupted=self.interrupted(),
        )
        calls: Calls = self.stack.enter_context(opened)
        return calls


def _method(
    optimizer: Any,
    estimator: Any,
    params: optax.Params,
    sample: Any,
    settings: dict[str, Any],
) -> Method | None:
    """The method of a run, `None` if an Optax transformation takes its steps."""
    checks.check_params(params)
    few = sample is None and optax.tree.size(params) <= MOST
    named = optimizer is not None or estimator is not None
    for name, value in settings.items():
        if value is not None and (named or not few):
            raise ValueError(
                f"{name} must be None unless the default method runs; got {value!r}. "
                f"Pass it to a method, as in methods.untuned({name}={value!r})."
            )
    if named or not few:
        return optimizer if is_method(optimizer, estimator) and named else None
    if settings["scale"] is None:
        settings["scale"] = 1.0
    return untuned(**settings)


def _steps_of_method(call: _Call, method: Method, spacing: Any) -> _Begun:
    """Steps of a method, on a function of any kind."""
    budget, file = call.budget, call.file
    initial = checks.as_params(call.initial)
    fun = None
    if call.evaluator.compiled:
        fun, _ = step.traced_functions(call.fun, None, initial, jax.random.key(0))
    resolution = resolution_of(fun, initial)
    budget.limit_steps(MOST_STEPS)
    limited = not budget.is_open
    given = call.params, call.key, call.bounds, resolution, limited, call.state, spacing
    asker = begun(method, *given)
    budget.start(1, asker.step, np.float64)
    if file is not None:
        file.begin(line_of_method(asker, call.bounds))
    evaluate: Evaluate
    if fun is None:
        evaluate = call.calls(vector_valued=False)
    else:
        evaluate = ByProgram(fun, initial, call.evaluator, call.interrupted())
    if jax.process_count() > 1:
        evaluate = Shared(evaluate)
    told = Told(asker, Best(asker.params))
    return MethodSteps(told, budget, file, evaluate), None, None


def _steps_of_optimizer(
    call: _Call, optimizer: Any, estimator: Any, sample: Any, chunk_size: int | None
) -> _Begun:
    """Steps of an optimizer."""
    calls, budget, file = not call.evaluator.compiled, call.budget, call.file
    size = optax.tree.size(call.initial)
    if optimizer is None and calls:
        raise ValueError(
            "optimizer must be given for a Python function with an estimator, or with "
            f"more than {MOST:,} parameters, whose learning rate cannot be measured; "
            "got None. Pass a method such as methods.many(), or radazo(1e-3)."
        )
    if optimizer is None:
        chosen = rates.default(size, estimator)
    else:
        chosen = optimizer, forward_difference() if estimator is None else estimator
    states.check_run(*chosen)
    fun, evaluator = (None, vectorized()) if calls else (call.fun, call.evaluator)
    run = Run(fun, sample, *chosen, evaluator, call.bounds)
    begun = states.resumed(begin(run, call.params, call.key, call.state))
    budget.start(step.num_points(run, begun), begun.step, trees.widest(begun.params))
    rate = None
    if not calls:
        run = step.traced(run, begun)
    if optimizer is None:
        run, begun, rate = rates.of_run(run, begun, budget, call.state is None, file)
    if run.estimator is chosen[1]:  # Another one has a smoothing that was measured.
        at_first = None if calls else step.loss_at(run, begun)
        draw = draws.draw_of(begun.key, begun.step)._replace(fun=at_first)
        warn_of_rounding(run.estimator, draw, begun.params, begun.estimator_state)
    if file is not None:
        file.begin(line_of_run(begun, run, rate))
    if calls:
        opened = call.calls(step.abstract_points(run, begun).vector_valued)
        told = Told(Stepper(run, begun), Best(trees.as_numpy(begun.params)))
        return Called(told, budget, file, call.evaluator, opened), rate, None
    interrupted, rising = call.interrupted(), None
    if sample is not None:
        advice = rates.Advice(run, call.initial, call.key, budget.total, rate)
        rising = Rising(budget.total, advice.text)
    if file is not None:
        told = Told(Stepper(run, begun))
        return Traced(told, budget, file, interrupted), rate, rising
    of_chunk = call.policy, chunk_size, interrupted
    return Compiled(run, begun, budget, *of_chunk), rate, rising


@checks_names
def minimize_black_box(
    fun: Objective,
    params: optax.Params,
    optimizer: optax.GradientTransformation | Method | None = None,
    estimator: GradientEstimator | None = None,
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
    named = optimizer, estimator
    return minimize(fun, params, *named, evaluator=evaluator, **options)


def _check_used(
    calls: bool,
    state: Any,
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
    for name, value in (("state", state), ("chunk_size", chunk_size)):
        if journal is not None and value is not None:
            given = f"{value!r}" if name == "chunk_size" else type(value).__name__
            raise ValueError(
                f"{name} must be None with a journal, which says where to continue, "
                f"and takes steps one by one; got {given}."
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


def _check_precision(params: optax.Params, state: Any) -> None:
    """Raises if a state has other dtypes than the parameters that it replaces."""
    leaves = () if state is None else jax.tree.leaves(state.params)
    for p, q in zip(jax.tree.leaves(params), leaves, strict=False):
        if hasattr(p, "dtype") and p.dtype != q.dtype:
            raise ValueError(
                f"state must have the dtypes of params, {p.dtype}; got {q.dtype}. "
                "Begin another run from state.params in the dtype that you need."
            )
