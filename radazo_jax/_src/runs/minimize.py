"""Whole runs of a method: of functions that JAX traces, and of Python functions."""

import functools
from collections.abc import Callable
from concurrent import futures
from contextlib import ExitStack
from typing import Any

import jax
import numpy as np
import optax

from radazo_jax._src import checks, trees
from radazo_jax._src.contracts import Evaluator, Objective, check_evaluator
from radazo_jax._src.evaluators.external import External
from radazo_jax._src.evaluators.vectorized import vectorized
from radazo_jax._src.methods.contract import Method, check_method
from radazo_jax._src.methods.policy import untuned
from radazo_jax._src.names import checks_names
from radazo_jax._src.runs import loop
from radazo_jax._src.runs.asked import ByProgram, Evaluate, MethodSteps, Shared
from radazo_jax._src.runs.asker import MethodState, begun
from radazo_jax._src.runs.journal import Journal, Path, line_of_method
from radazo_jax._src.runs.results import Best, Report, Result
from radazo_jax._src.runs.stop import Budget
from radazo_jax._src.runs.told import Told
from radazo_jax._src.runs.vectors import resolution_of
from radazo_jax._src.steps import step as of_program
from radazo_jax._src.steps.box import BoundsLike, as_bounds
from radazo_jax._src.steps.states import Policy

# Up to so many parameters, the default method runs.
MOST = 10_000

# The number of steps of a method without a budget, which usually ends before.
MOST_STEPS = 10_000


@checks_names
def minimize(
    fun: Objective,
    params: optax.Params,
    method: Method | None = None,
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
    bounds: BoundsLike | None = None,
    step: Any = None,
    scale: Any = None,
    state: MethodState | None = None,
    progress: bool = True,
    callback: Callable[[Report], object] | None = None,
    on_failure: str = "drop",
    max_consecutive_failures: int = 10,
    journal: Path | None = None,
) -> Result:
    """Minimizes a function from its values alone.

    A method on the host chooses points by the values so far. Nothing needs to be named:
    by default, it is `methods.untuned()`. Use it for functions of up to 10,000 numbers.
    For networks, minibatches and more parameters, use `train`.

    Args:
      fun: The function, `fun(params)`, a real scalar. With the evaluator `external`,
        any Python function, as in `minimize_black_box`.
      params: The starting point, a tree of floating-point arrays. Not modified.
      method: A method, such as `methods.evolution()`. By default,
        `methods.untuned(tolerance, restarts, scale)`, for at most 10,000 parameters.
      evaluator: The evaluator of the points: `vectorized(batch_size)` or
        `sharded(axis_name)` for functions that JAX traces, or `external(...)` for
        Python functions, as in `minimize_black_box`.
      num_steps: The number of steps in this call; with a journal, of the whole run. In
        a step, a method asks for points once, and gets all of their values. By
        default 10,000, unless another budget is given.
      key: The key of the whole run; it is consumed.
      max_evaluations: The most evaluations of `fun` in this call; with a journal, in
        the whole run. If a method has seen noise, a tenth is kept to evaluate its best
        points again. Counted are the points, as in `history.evaluations`, but neither
        retries nor points that idle workers evaluate in advance.
      max_seconds: The most seconds from the start of this call. The run ends after the
        first step that ends later. Not for runs of several processes.
      target: A finite number. The run ends once `best.value` is not above it; if a
        method has seen noise, once the mean of four further values at that point is.
      patience: The run ends after so many steps in a row whose value is not below the
        lowest before, in this call; with a journal, in the whole run.
      tolerance: As in `methods.untuned`, if no method is named.
      restarts: As in `methods.untuned`, likewise. By default 0 without a budget, and
        any number with one; a `target` is no budget.
      bounds: A tuple `(lower, upper)` of numbers, or of trees like the parameters, or a
        `scipy.optimize.Bounds`: the box in which the parameters and all points stay.
        A list of pairs, one for each element of an array of parameters, is read as
        SciPy reads it. `None` is no bound.
      step: Spacing of the values of parameters: a number of at least 0, or a tree like
        the parameters of numbers and arrays that broadcast to the leaves. 1 is for
        whole numbers, and 0 for continuous parameters. All points, and `best.params`,
        are multiples of it in the dtype of the parameters, and so are the bounds once
        they are rounded inward. A start that is none is rounded, with a warning.
      scale: As in `methods.untuned`, likewise.
      state: A state to continue from, as returned by a previous call or passed to
        `callback`. Its parameters and key replace `params` and `key`. A method that a
        budget has ended continues as with a budget.
      progress: Whether to show progress: a `tqdm` bar if that is installed, else one
        line per chunk on stderr.
      callback: `callback(report)`, called after every step with a `Report` of it. A
        true return value, or StopIteration, ends the run.
      on_failure: The treatment of values that are not finite, and of points at which a
        Python function raises or returns anything but a number. "drop": the method gets
        NaN. "raise": the run ends.
      max_consecutive_failures: The number of steps without a value that ends the run.
        d + 1 evaluations that fail in a row count as a step.
      journal: The path of a file to which the values of each step are added. The same
        call resumes the run from the end of the file; `replay` rebuilds it. One of its
        points is then evaluated again, and another value is a warning: `fun` may have
        changed, and nothing else.

    Returns:
      The result. Ctrl-C takes effect before the step that is being evaluated; the
      result then holds the steps done so far. A second Ctrl-C raises
      `KeyboardInterrupt`.

    Raises:
      TypeError, ValueError: If an argument is not valid, or processes hold
        different keys; if `fun` cannot be evaluated on the executor; if the journal is
        damaged, or of a run with another method, start, bounds, scale, key or dtype.
      RunError: If too many evaluations failed, or a step could not be evaluated or
        written. `error.result` is the result so far.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> import radazo_jax as zo
      >>> def fun(p):
      ...     return jnp.sum((p - 1.0) ** 2)
      >>> result = zo.minimize(fun, jnp.zeros(8), progress=False)
      >>> bool(result.best.value < 1e-6)
      True
    """
    budget = Budget(num_steps, max_evaluations, max_seconds, target, patience)
    policy = Policy.of(on_failure, max_consecutive_failures)
    if not callable(fun):
        raise TypeError(f"fun must be a function of params; got {fun!r}.")
    check_evaluator(evaluator, traces=False)
    checks.check_callback(callback)
    if state is not None:
        checks.check_not_deleted("state", state)
        if journal is not None:
            raise ValueError(
                "state must be None with a journal, which says where to continue; got "
                f"{type(state).__name__}."
            )
    calls = isinstance(evaluator, External)
    if calls:
        params = trees.with_float64(params)
    initial = params if state is None else state.params
    settings = {"tolerance": tolerance, "restarts": restarts, "scale": scale}
    chosen = _method(method, initial, settings)
    # Functions of the caller run under the caller's setting.
    context = functools.partial(jax.enable_x64, trees.has_x64())
    with ExitStack() as stack:
        if calls:
            stack.enter_context(trees.precision_of(initial))
        file = None
        if journal is not None:
            file = stack.enter_context(Journal(journal).opened())
        initial = checks.as_params(initial)
        traced: Any = None
        if not calls:
            at = None, initial, jax.random.key(0)
            traced, _ = of_program.traced_functions(fun, *at)
        budget.limit_steps(MOST_STEPS)
        box, resolution = as_bounds(bounds), resolution_of(traced, initial)
        given = params, key, box, resolution, not budget.is_open, state, step
        asker = begun(chosen, *given)
        budget.start(1, asker.step, np.float64)
        if file is not None:
            file.begin(line_of_method(asker, box))
        interrupted = stack.enter_context(loop.interruptible())
        evaluate: Evaluate
        if isinstance(evaluator, External):
            opened = evaluator.open(fun, context=context, interrupted=interrupted)
            evaluate = stack.enter_context(opened)
        else:
            evaluate = ByProgram(traced, initial, evaluator, interrupted)
        if jax.process_count() > 1:
            evaluate = Shared(evaluate)
        told = Told(asker, Best(asker.params))
        steps = MethodSteps(told, budget, file, evaluate)
        return loop.run(steps, policy, callback, progress, context)


def _method(method: Any, params: optax.Params, settings: dict[str, Any]) -> Method:
    """The method of a run: the caller's, or the default one with settings."""
    checks.check_params(params)
    if method is None:
        if optax.tree.size(params) > MOST:
            raise ValueError(
                f"method must be given for more than {MOST:,} parameters; got None "
                f"for {optax.tree.size(params):,}. Pass one, such as methods.many(), "
                "or pass a loss to train."
            )
        if settings["scale"] is None:
            settings["scale"] = 1.0
        return untuned(**settings)
    check_method(method)
    for name, value in settings.items():
        if value is not None:
            raise ValueError(
                f"{name} must be None unless the default method runs; got {value!r}. "
                f"Pass it to a method, as in methods.untuned({name}={value!r})."
            )
    found: Method = method
    return found


def minimize_black_box(
    fun: Objective,
    params: optax.Params,
    method: Method | None = None,
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
        evaluated once.
      params: The starting point, a tree of floating-point arrays. NumPy's float64 is
        kept, also if JAX has 64 bits disabled, and Python's floats are float64. `fun`
        and `callback` are called under the caller's setting.
      method: As in `minimize`.
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
      ...     np.zeros(4),
      ...     max_evaluations=200,
      ...     progress=False,
      ... )
      >>> bool(result.best.value < 1e-3)
      True
    """
    evaluator = External(workers, executor, batched, timeout, retries)
    return minimize(fun, params, method, evaluator=evaluator, **options)
