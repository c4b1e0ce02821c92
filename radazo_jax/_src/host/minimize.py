"""`minimize`: any Python function, from its values alone."""

from collections.abc import Callable
from concurrent import futures
from contextlib import ExitStack
from typing import Any

import jax
import numpy as np
import optax

from radazo_jax._src.base import checks
from radazo_jax._src.base.names import checks_names
from radazo_jax._src.estimates.external import External
from radazo_jax._src.host import begin
from radazo_jax._src.host.run import MethodRun
from radazo_jax._src.host.table import Evaluations, Table, TableFile
from radazo_jax._src.methods.contract import Method
from radazo_jax._src.methods.policy import untuned
from radazo_jax._src.runs import loop
from radazo_jax._src.runs.budget import Budget
from radazo_jax._src.runs.lines import Path
from radazo_jax._src.runs.results import Report, Result
from radazo_jax._src.steps.box import BoundsLike
from radazo_jax._src.steps.states import Policy


@checks_names
def minimize(
    fun: Callable[[Any], Any],
    params: optax.Params,
    method: Method = untuned(),
    *,
    bounds: BoundsLike | None = None,
    step: Any = None,
    workers: int | None = None,
    executor: futures.Executor | Callable[[], futures.Executor] | None = None,
    batched: bool = False,
    timeout: float | None = None,
    retries: int = 0,
    max_evaluations: int | None = None,
    max_seconds: float | None = None,
    target: float | None = None,
    patience: int | None = None,
    key: jax.typing.ArrayLike = 0,
    evaluations: Evaluations | None = None,
    journal: Path | None = None,
    on_failure: str = "drop",
    max_consecutive_failures: int = 10,
    callback: Callable[[Report], object] | None = None,
    progress: bool = True,
) -> Result:
    """Minimizes any Python function of up to 10,000 numbers from its values alone.

    A method on the host chooses points by the values so far. The default method needs
    no settings: it finds out from the first values whether the function is smooth,
    noisy, piecewise constant or badly scaled. Use `train` for a network or a language
    model, and for a loss on minibatches.

    A run is a table of evaluations. What the table knows is not evaluated again, so the
    same call with the same `journal` continues a run that was killed, that ended in an
    outage, or that had another budget. The result is the same as the result of a run
    with the last budget alone.

    Args:
      fun: `fun(params)` gets a tree of NumPy arrays and returns a number, or a pair of
        a number and anything else. An array of one element is a number. The arrays are
        its own. The dtype of the first values sets their resolution. For a function of
        JAX, pass `jax.jit(fun)`, or `jax.jit(jax.vmap(fun))` with `batched`.
      params: The starting point, a tree of floating-point arrays. Not modified. NumPy's
        float64 is kept, also if JAX has 64 bits disabled, and Python's floats are
        float64.
      method: The method: `methods.untuned()`, another one of `methods`, or a generator
        function of your design.
      bounds: A tuple `(lower, upper)` of numbers, or of trees like the parameters, or a
        `scipy.optimize.Bounds`: the box in which all points stay. A list of pairs, one
        for each element of an array of parameters, is read as SciPy reads it. `None` is
        no bound.
      step: Spacing of the values of parameters: a number of at least 0, or a tree like
        the parameters of numbers and arrays that broadcast to the leaves. 1 is for
        whole numbers, and 0 for continuous parameters. All points are multiples of it
        in the dtype of the parameters, and so are the bounds once they are rounded
        inward. A start that is no multiple is rounded, with a warning.
      workers: As in `external`: the number of processes that evaluate points. `None`
        evaluates them in turn, unless an executor is given.
      executor: As in `external`: an executor, or a function that makes one.
      batched: As in `external`: whether `fun` takes several points at once, a tree of
        arrays [n, …]. n differs between calls.
      timeout: As in `external`: seconds after which points that run have failed. Their
        later values are dropped.
      retries: As in `external`: the number of further evaluations of a failed point.
      max_evaluations: The most evaluations that the run uses, of this call or of
        earlier ones. If a run has seen noise, a tenth of them compares its best points
        at the end. Retries are not counted.
      max_seconds: The most seconds from the start of this call. The run ends after the
        first evaluation that ends later.
      target: A finite number. The run ends after the first evaluation whose value is
        not above it; if the run has seen noise, once the mean of four further values at
        the best point is not above it.
      patience: The run ends after so many steps in a row without a new lowest value. A
        step is what a method asks for at once.
      key: The key of the run: a key of JAX, or an integer.
      evaluations: The `evaluations` of an earlier result or report, from which this
        call continues.
      journal: The path of a file to which each evaluation is added when its value
        arrives; the same call continues from it. Failures after its last finite value
        are evaluated again, once. One known point is evaluated again, and another value
        is a warning. `pandas.read_json(path, lines=True,
        precise_float=True)` reads the file, whose first line describes the run.
      on_failure: The treatment of points at which `fun` raises an error, or returns
        anything but a finite number. "drop": the method goes around them. "raise": the
        run ends.
      max_consecutive_failures: The number of steps in a row without a value that ends
        the run; d + 1 failures in a row count as a step. Before the first value, so
        many errors in a row end it.
      callback: `callback(report)`, called after each step with new evaluations. A true
        return value, or StopIteration, ends the run.
      progress: Whether to show progress: a `tqdm` bar if that is installed, else lines
        on stderr.

    Returns:
      The result, of NumPy arrays. The first Ctrl-C ends the run after the evaluation
      that runs. A second one raises `KeyboardInterrupt`.

    Raises:
      TypeError, ValueError: If an argument is not valid; if the journal is damaged, or
        of a run with another start, key, dtype, box or grid.
      RunError: If `fun` fails by a mistake in it, or too often; if a method breaks its
        contract; if a point could not be evaluated or written. As with any error of
        `callback` and with `KeyboardInterrupt`, `error.result` is the result so far.

    Examples:
      >>> import numpy as np
      >>> import radazo_jax as zo
      >>> def fun(x):
      ...     return (x[0] - 1) ** 2 + 100 * (x[1] - x[0] ** 2) ** 2
      >>> result = zo.minimize(fun, np.zeros(2), max_evaluations=90, progress=False)
      >>> result.best.params.round(2)
      array([1., 1.])
    """
    budget = Budget(
        None, max_evaluations, max_seconds, target, patience, default_steps=None
    )
    policy = Policy.of(on_failure, max_consecutive_failures)
    evaluator = External(workers, executor, batched, timeout, retries)
    checks.check_fun(fun)
    begin.check_method(method)
    checks.check_callback(callback)
    begin.check_evaluations(evaluations, journal)
    given = begin.problem(method, params, bounds, step, key)
    with ExitStack() as stack:
        file = None
        if journal is not None:
            file = stack.enter_context(TableFile(journal).opened())
        table = Table(file, evaluations)
        questions = begin.questions(method, given, limited=not budget.is_open)
        given.vectors.warn_of_rounding(questions.start.params)
        budget.start(1, 0, np.float64)
        table.begin(given.line)
        calls = stack.enter_context(
            evaluator.open(
                fun,
                residuals=begin.has_residuals(method),
                interrupted=stack.enter_context(loop.interruptible()),
            )
        )
        path = None if file is None else file.path
        of_run = method, questions, given.vectors, table, budget, calls, policy, path
        return loop.run(MethodRun(*of_run), policy, callback, progress)
