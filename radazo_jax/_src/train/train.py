"""Whole runs of an optimizer and an estimator: `train`, and `replay` of a journal."""

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

import jax
import jax.numpy as jnp
import optax

from radazo_jax._src.base import checks, trees
from radazo_jax._src.base.names import checks_names
from radazo_jax._src.estimates.contracts import (
    Evaluator,
    GradientEstimator,
    Objective,
    check_evaluator,
)
from radazo_jax._src.estimates.differences import forward_difference
from radazo_jax._src.estimates.external import External
from radazo_jax._src.estimates.vectorized import vectorized
from radazo_jax._src.measure.learning_rate import LearningRate
from radazo_jax._src.runs import loop
from radazo_jax._src.runs.budget import Budget
from radazo_jax._src.runs.journal import Journal, line_of_run
from radazo_jax._src.runs.lines import Path
from radazo_jax._src.runs.loop import Rising
from radazo_jax._src.runs.results import Report, Result
from radazo_jax._src.steps import states, step
from radazo_jax._src.steps.box import BoundsLike, as_bounds
from radazo_jax._src.steps.rounded_away import warn_of_rounding
from radazo_jax._src.steps.states import Policy, Run, SolverState
from radazo_jax._src.steps.step import without_aux
from radazo_jax._src.train import rates
from radazo_jax._src.train.compiled import Compiled
from radazo_jax._src.train.stepper import Stepper, begin
from radazo_jax._src.train.stepwise import StepwiseCalled, StepwiseTraced


@checks_names
def train(
    loss: Objective,
    params: optax.Params,
    optimizer: optax.GradientTransformation | None = None,
    estimator: GradientEstimator | None = None,
    *,
    sample: Callable[[jax.Array], object] | None = None,
    evaluator: Evaluator = vectorized(),
    num_steps: int | None = None,
    key: jax.typing.ArrayLike = 0,
    bounds: BoundsLike | None = None,
    max_evaluations: int | None = None,
    max_seconds: float | None = None,
    target: float | None = None,
    patience: int | None = None,
    state: SolverState | None = None,
    chunk_size: int | None = None,
    journal: Path | None = None,
    has_aux: bool = False,
    on_failure: str = "drop",
    max_consecutive_failures: int = 10,
    callback: Callable[[Report], object] | None = None,
    progress: bool = True,
) -> Result:
    """Minimizes a loss with gradients that are estimated from its values.

    Each step estimates a gradient and moves the parameters by an Optax optimizer, in
    one program. Nothing needs to be named: by default, R-AdaZO takes the steps, at a
    learning rate and a smoothing that are measured before the first step. Use it for
    networks and language models, on minibatches, and for any number of parameters. For
    a function of up to 10,000 numbers that is no network, `minimize` needs fewer
    evaluations.

    Steps on a loss that JAX traces run on the device in chunks. A chunk is one compiled
    loop whose length is an argument, so any number of steps compiles once. Python
    functions and journals take steps one by one. Random numbers depend only on the key
    and the steps before; chunks and interruptions do not change them.

    Args:
      loss: The loss, `loss(params)`, or `loss(params, xi)` if `sample` is given;
        a real scalar. With `has_aux`, a pair of it and anything else. With the
        evaluator `external`, any Python function: it gets a tree of NumPy arrays, and
        returns a number, or a pair of a number and anything else.
      params: The starting point, a tree of floating-point arrays. Not modified.
      optimizer: An Optax transformation, such as `radazo(1e-3)`. It gets `value`,
        `grad`, `slope` (along `grad`) and `value_fn` as extra arguments, if it takes
        any. By default, R-AdaZO at the learning rate that `find_learning_rate` measures
        before the first step, with the smoothing of an estimator that names none. The
        rate falls linearly to 0 over the run; without `num_steps` and
        `max_evaluations`, it falls as 1/√(1 + t/100). Above 2²⁴ parameters its moments
        are replayed. It must be named with `external`.
      estimator: An estimator; by default `forward_difference()`, and
        `forward_difference(orthonormal())` at a measured learning rate.
      sample: `sample(key) -> xi` draws the random variable ξ of the loss, such as a
        minibatch, once per step: all evaluations of the step share it. Not with
        `external`.
      evaluator: The evaluator of the points: `vectorized(batch_size)` or
        `sharded(axis_name)` for losses that JAX traces, or `external(...)` for Python
        functions.
      num_steps: The number of steps in this call; with a journal, of the whole run. By
        default 1000. If `max_evaluations`, `max_seconds` or `patience` is given, no
        default limits the steps. At the latest, a run ends at step 2³¹ − 2, or once a
        learning rate that was measured is 0.
      key: The key of the whole run; it is consumed.
      bounds: A tuple `(lower, upper)` of numbers, or of trees like the parameters, or a
        `scipy.optimize.Bounds`: the box in which the parameters and all points stay.
        A list of pairs, one for each element of an array of parameters, is read as
        SciPy reads it. `None` is no bound.
      max_evaluations: The most evaluations of `loss` in this call; with a journal, in
        the whole run. The run ends before the step that would exceed it. Counted are
        the points, as in `history.evaluations`, and those that measure the learning
        rate, but not retries, and not what an optimizer evaluates by `value_fn`.
      max_seconds: The most seconds from the start of this call, with compilation. The
        run ends after the first chunk that ends later, or after the first such step if
        steps are taken one by one. Without `chunk_size`, chunks get shorter toward this
        time. Not for runs of several processes.
      target: A finite number. The run ends after the first step whose value, as in
        `values`, is not above it, in float32. The value is the loss before the update
        of the step. With `external` it is `best.value`.
      patience: The run ends after so many steps in a row whose value is not below the
        lowest before, in this call; with a journal, in the whole run. Steps without a
        finite value count as well. With `external`, the value is `best.value`.
      state: A state to continue from, as returned by a previous call or passed to
        `callback`. Its parameters and key replace `params` and `key`, and it holds the
        learning rate that was measured. With `external`, it must have the dtypes of
        `params`.
      chunk_size: Number of steps per chunk; by default, so many that a chunk takes
        about half a second. Not with `external` or a journal.
      journal: The path of a file to which the values of each step are added. The same
        call resumes the run from the end of the file; `replay` rebuilds it. One of its
        points is then evaluated again, and another value is a warning: `loss` may have
        changed, and nothing else. At most `num_steps` and `max_evaluations` are read;
        the other budgets end the run at the end of the file, at the earliest.
        `optimizer` gets no `value_fn`. A learning rate that was measured is in the
        first line.
      has_aux: Whether `loss` returns a pair, of which the second part is dropped. Not
        with `external`, which recognizes pairs.
      on_failure: The treatment of values that are not finite, and of points at which a
        Python function raises or returns anything but a number. "drop": their
        directions are left out of the estimate, and a step without any is skipped:
        neither parameters nor optimizer state move. If the loss at the parameters is
        not finite, the mean of the other values replaces it. "raise": the run ends.
      max_consecutive_failures: The number of steps skipped in a row that ends the run.
      callback: `callback(report)`, called after every chunk or step with a `Report` of
        it. A true return value, or StopIteration, ends the run. The next chunk
        reuses the arrays of `report.state`: copy what you keep. With `external`, it is
        a copy, in NumPy arrays.
      progress: Whether to show progress: a `tqdm` bar if that is installed, else one
        line per chunk on stderr.

    Returns:
      The result. Its `learning_rate` is the one that was measured. Ctrl-C takes effect
      between chunks, or before the step that is being evaluated if steps are taken one
      by one; the result then holds the steps done so far. A second Ctrl-C raises
      `KeyboardInterrupt`.

    Raises:
      TypeError, ValueError: If an argument is not valid, or processes hold
        different keys; if `loss` cannot be evaluated on the executor; if the journal is
        damaged, or of a run with another start, key, dtype, bounds or settings.
      RunError: If `max_consecutive_failures` steps in a row were skipped, or all steps
        of the run, or a value failed and `on_failure` is "raise", or a step could not
        be evaluated or written. `error.result` is the result so far.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> import radazo_jax as zo
      >>> result = zo.train(
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
    checks.check_fun(loss, "loss")
    check_evaluator(evaluator, traces=False)
    checks.check_callback(callback)
    calls = isinstance(evaluator, External)
    _check_used(calls, state, journal, chunk_size, sample, has_aux)
    params = _with_precision(params, state) if calls else params
    initial = params if state is None else state.params
    checks.check_params(initial)
    chosen = _chosen(optimizer, estimator, initial, calls)
    fun = functools.partial(without_aux, loss) if has_aux else loss
    # Functions of the caller run under the caller's setting.
    context = functools.partial(jax.enable_x64, trees.has_x64())
    with ExitStack() as stack:
        stack.enter_context(trees.precision_of(initial) if calls else nullcontext())
        opened = nullcontext() if journal is None else Journal(journal).opened()
        file = stack.enter_context(opened)
        run = Run(None, None, *chosen, bounds=as_bounds(bounds))
        if not calls:
            run = run._replace(fun=fun, sample=sample, evaluator=evaluator)
        begun = begin(run, params, key, state)
        measures = optimizer is None, state is None
        run, begun, rate = _begun(run, begun, budget, file, *measures)
        interrupted = stack.enter_context(loop.interruptible())
        steps: loop.Steps
        if isinstance(evaluator, External):
            steps = stack.enter_context(
                _calling(evaluator, fun, context, run, begun, budget, file, interrupted)
            )
        elif file is not None:
            steps = StepwiseTraced(Stepper(run, begun), budget, file, interrupted)
        else:
            steps = Compiled(run, begun, budget, policy, chunk_size, interrupted)
        advice = functools.partial(rates.advice, run, initial, key, budget.total, rate)
        rising = None if sample is None else Rising(budget.total, advice)
        return loop.run(steps, policy, callback, progress, context, rate, rising)


@contextmanager
def _calling(
    evaluator: External,
    fun: Objective,
    context: Callable[[], AbstractContextManager[None]],
    run: Run,
    state: SolverState,
    budget: Budget,
    file: Journal | None,
    interrupted: Callable[[], bool],
) -> Iterator[StepwiseCalled]:
    """Yields the steps of a Python function, whose workers end with them."""
    vector_valued = step.abstract_points(run, state).vector_valued
    with evaluator.open(
        fun, vector_valued=vector_valued, context=context, interrupted=interrupted
    ) as calls:
        stepper = Stepper(run, state)
        yield StepwiseCalled(stepper, budget, file, interrupted, evaluator, calls)


def _chosen(
    optimizer: optax.GradientTransformation | None,
    estimator: GradientEstimator | None,
    params: optax.Params,
    calls: bool,
) -> tuple[optax.GradientTransformation, GradientEstimator]:
    """Returns the optimizer and the estimator of a run: the named ones, or defaults.

    Args:
      optimizer: As in `train`.
      estimator: As in `train`.
      params: The parameters before the first step.
      calls: Whether Python functions are called.
    """
    if optimizer is None and calls:
        raise ValueError(
            "optimizer must be given with an evaluator of Python functions, whose "
            "learning rate is not measured; got None. Pass radazo(1e-3), or pass the "
            "function to minimize, which needs no learning rate."
        )
    if optimizer is None:
        optimizer, estimator = rates.default(optax.tree.size(params), estimator)
    elif estimator is None:
        estimator = forward_difference()
    return states.check_run(optimizer, estimator)


def _begun(
    run: Run,
    state: SolverState,
    budget: Budget,
    file: Journal | None,
    measures: bool,
    begins: bool,
) -> tuple[Run, SolverState, LearningRate | None]:
    """Returns the run with traced functions, its state, and the rate if measured.

    Args:
      run: The run as the caller describes it.
      state: The state before the first step.
      budget: The budgets, which start here.
      file: The journal, open; `None` without one. It begins here.
      measures: Whether the run has a learning rate that is measured.
      begins: Whether the run begins here, and not with a state of the caller.
    """
    named, rate = run.estimator, None
    state = states.resumed(state)
    budget.start(step.num_points(run, state), state.step, trees.widest(state.params))
    run = step.with_traced_functions(run, state)
    if measures:
        run, state, rate = rates.of_run(run, state, budget, begins, file)
    if run.estimator is named:  # Another one has a smoothing that was measured.
        loss = None if run.fun is None else step.loss_at(run, state)
        draw = step.draw_of(state.key, state.step)._replace(fun=loss)
        warn_of_rounding(run.estimator, draw, state.params, state.estimator_state)
    if file is not None:
        file.begin(line_of_run(state, run, rate))
    return run, state, rate


def _check_used(
    calls: bool,
    state: SolverState | None,
    journal: Path | None,
    chunk_size: int | None,
    sample: Callable[[jax.Array], object] | None,
    has_aux: bool,
) -> None:
    """Raises if arguments exclude each other.

    Args:
      calls: Whether Python functions are called.
      state: As in `train`, like the others.
      journal: As in `train`.
      chunk_size: As in `train`.
      sample: As in `train`.
      has_aux: As in `train`.
    """
    if state is not None:
        checks.check_not_deleted("state", state)
    if chunk_size is not None:
        checks.check_int_at_least("chunk_size", chunk_size, 1)
    for name, value in (("state", state), ("chunk_size", chunk_size)):
        if journal is not None and value is not None:
            text = f"{value!r}" if name == "chunk_size" else type(value).__name__
            raise ValueError(
                f"{name} must be None with a journal, which says where to continue, "
                f"and takes steps one by one; got {text}."
            )
    not_called = {"sample": sample, "chunk_size": chunk_size, "has_aux": has_aux}
    for name, given in not_called.items() if calls else ():
        if given is not None and given is not False:
            is_aux = name == "has_aux"
            raise ValueError(
                f"{name} must be {False if is_aux else None} with an evaluator of "
                f"Python functions; got {given!r}.{' Pairs are recognized.' * is_aux}"
            )


def _with_precision(params: optax.Params, state: SolverState | None) -> optax.Params:
    """Returns the parameters of a Python function, whose Python numbers are float64.

    Raises:
      ValueError: If a state has other dtypes than the parameters that it replaces.
    """
    params = trees.with_float64(params)
    leaves = () if state is None else jax.tree.leaves(state.params)
    for p, q in zip(jax.tree.leaves(params), leaves, strict=False):
        if hasattr(p, "dtype") and p.dtype != q.dtype:
            raise ValueError(
                f"state must have the dtypes of params, {p.dtype}; got {q.dtype}. "
                "Begin another run from state.params in the dtype that you need."
            )
    return params


@checks_names
def replay(
    journal: Path,
    params: optax.Params,
    optimizer: optax.GradientTransformation | None = None,
    estimator: GradientEstimator | None = None,
    *,
    evaluator: Evaluator = vectorized(),
    fun: Objective | None = None,
    sample: Callable[[jax.Array], object] | None = None,
    bounds: BoundsLike | None = None,
    exact: bool = True,
) -> SolverState:
    """Rebuilds a run from the values in its journal, without an evaluation.

    Args:
      journal: The file that `train` wrote.
      params: The starting point of the run.
      optimizer: The optimizer of the run, `None` if the run named none: the journal has
        the learning rate and the smoothing that were measured.
      estimator: The estimator, likewise.
      evaluator: The evaluator of the run. It evaluates nothing here, but determines how
        directions are stored, and so how their sums are rounded.
      fun: The loss, if JAX traced it. It is traced and not evaluated: `low_rank`
        perturbs the matrices that it multiplies.
      sample: As in `train`, with `fun`.
      bounds: As in `train`.
      exact: Whether parameters must be bitwise equal to the run's before each step.
        They are equal with the same versions on the same kind of machine. Otherwise
        sums may be rounded in other ways, and an adaptive run amplifies it.

    Returns:
      The state after the last complete step of the journal.

    Raises:
      ValueError: If there is no journal, it is damaged, or it belongs to a run with
        other arguments.

    Examples:
      >>> import os, tempfile
      >>> import jax, jax.numpy as jnp
      >>> import radazo_jax as zo
      >>> run = dict(optimizer=zo.radazo(1e-2), estimator=zo.forward_difference())
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     path = os.path.join(folder, "run.jsonl")
      ...     result = zo.train(
      ...         lambda x: jnp.sum(x**2),
      ...         jnp.ones(3),
      ...         **run,
      ...         num_steps=20,
      ...         key=0,
      ...         progress=False,
      ...         journal=path,
      ...     )
      ...     state = zo.replay(path, jnp.ones(3), **run)
      >>> bool(jnp.all(state.params == result.params))
      True
    """
    found = Journal(journal).read()
    line = found.line
    if line is None:
        raise ValueError(f"journal must be a file with a run; got {journal!r}.")
    check_evaluator(evaluator)
    with jax.enable_x64(trees.has_x64() or line["dtype"] == "float64"):
        key = jax.random.wrap_key_data(
            jnp.array(line["key"], jnp.uint32), impl="threefry2x32"
        )
        rate = rates.of_line(line) if optimizer is None else None
        if rate is not None:
            optimizer, estimator = rates.default(trees.size(params), estimator)
        chosen = states.check_run(optimizer, estimator)
        run = Run(fun, sample, *chosen, evaluator, as_bounds(bounds))
        state = begin(run, params, key)
        if rate is not None:
            state = rates.with_rate(state, rate)
            run = rates.with_smoothing(run, state)
        if exact:
            # The checksums of the parameters compare learning rates.
            kept = {"learning_rate": line.get("learning_rate")}
            found.check_same_run(line_of_run(state, run) | kept)
        stepper = Stepper(step.with_traced_functions(run, state), state)
        stepper.rebuild(found.records, exact)
        # Without a function that JAX can trace, the run is one of NumPy arrays.
        return stepper.state if fun is not None else trees.as_numpy(stepper.state)
