"""A step of a run: points, their values, the update.

The points are evaluated between `points_at` and `advance`, so that the same steps are
taken by a compiled run, a run whose function is evaluated elsewhere, and a run that is
rebuilt from its journal.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.tree_util import Partial

from radazo_jax._src import checks, program
from radazo_jax._src.base import (
    Draw,
    Estimate,
    Evaluator,
    GradientEstimator,
    Points,
    Values,
)
from radazo_jax._src.estimators import gradients
from radazo_jax._src.estimators.gradients import of_params
from radazo_jax._src.evaluators.vectorized import vectorized
from radazo_jax._src.numbers import keys
from radazo_jax._src.runs import box, states
from radazo_jax._src.runs.box import Bounds, BoundsLike, as_bounds
from radazo_jax._src.runs.states import MOST_STEPS, Failures, Run, SolverState, StepInfo
from radazo_jax._src.search import revert
from radazo_jax._src.transforms.in_place import InPlaceUpdate, unchanged


def start(run: Run, params: optax.Params, key: jax.typing.ArrayLike) -> SolverState:
    """The state before the first step; called by what a user calls."""
    arrays = checks.as_params(params)
    checks.warn_of_float32(params, stacklevel=3)
    params = arrays
    box.check_bounds(run.bounds, params)
    count = jnp.zeros((), jnp.int32)
    return SolverState(
        params,
        run.optimizer.init(params),
        run.estimator.init(params),
        keys.check_same_key(key),
        count,
        Failures(count, count, count),
    )


def traced(run: Run, state: SolverState) -> Run:
    """The run with its functions as they are now, for states like this one."""
    fun = run.fun
    # Without programs, functions get arrays and not tracers.
    if fun is None or program.are_disabled():
        return run
    batch: tuple[Any, ...] = ()
    sample = run.sample
    if sample is not None:
        sample = program.traced(sample, state.key)
        batch = (sample.output,)

    def loss(params: optax.Params, *batch: Any) -> Any:
        return _of_traced_params(fun, None, batch, {}, params)

    return run._replace(fun=program.traced(loss, state.params, *batch), sample=sample)


def loss_at(run: Run, state: SolverState) -> Callable[[Any], Any]:
    """The loss of a step as a function of the parameters."""
    _, key = _keys(state.key, state.step)
    batch = () if run.sample is None else (run.sample(key),)
    return loss_of(run, batch, {})


def loss_of(
    run: Run, batch: tuple[Any, ...], kwargs: dict[str, Any]
) -> Callable[[Any], Any]:
    """The loss on a batch as a function of the parameters, within the bounds."""
    return Partial(_of_traced_params, run.fun, run.bounds, batch, kwargs)


def _of_traced_params(
    fun: Callable[..., Any],
    bounds: Bounds | None,
    batch: tuple[Any, ...],
    kwargs: dict[str, Any],
    params: optax.Params,
) -> Any:
    """`of_params` within bounds; names what fits a function that JAX cannot trace."""
    try:
        return of_params(fun, batch, kwargs, box.project(bounds, params))
    except (
        jax.errors.ConcretizationTypeError,
        jax.errors.TracerArrayConversionError,
        jax.errors.TracerIntegerConversionError,
    ) as error:
        raise TypeError(
            "fun must be a function that JAX can trace; got one that turns params into "
            "a Python number or a NumPy array. Use jax.numpy in it, or pass it to "
            "minimize_black_box." + checks.refer_to("minimize_black_box")
        ) from error


def points_at(
    run: Run, state: SolverState, loss: Callable[[optax.Params], Any] | None
) -> tuple[Points, Any]:
    """The points of a step, and the state of the estimator after them.

    Args:
      run: The run.
      state: The state before the step.
      loss: The loss of the step if JAX can trace it, else `None`.
    """
    draw = draw_of(state.key, state.step)._replace(fun=loss)
    if run.bounds is not None:
        draw = draw._replace(bounds=box.as_trees(run.bounds, state.params))
    return gradients.points_of(
        run.estimator, run.evaluator, draw, state.params, state.estimator_state
    )


def draw_of(key: jax.Array, step: jax.Array) -> Draw:
    """The draw of a step of the run with this key."""
    # The key of the first step is the key of the run: no other step has it.
    run_key, _ = _keys(key, jnp.zeros((), jnp.int32))
    step_key, _ = _keys(key, step)
    return Draw(step_key, run_key, step)


def take(
    run: Run, state: SolverState, loss: Callable[[optax.Params], Any]
) -> tuple[SolverState, StepInfo]:
    """Evaluates the points of a step, and takes it."""
    points, estimator_state = points_at(run, state, loss)
    values, _ = gradients.values_at(run.evaluator, loss, state.params, points)
    state = state._replace(estimator_state=estimator_state)
    return advance(run, state, points, values, loss)


def points_without_loss(state: SolverState, estimator: GradientEstimator) -> Points:
    """The points of a step as far as they do not depend on the loss."""
    draw = draw_of(state.key, state.step)
    return estimator.points(draw, state.params, state.estimator_state)[0]


def num_points(run: Run, state: SolverState) -> int:
    """The number of points of a step, which is the same in all steps."""
    return abstract_points(run, state).num_points


def abstract_points(run: Run, state: SolverState) -> Points:
    """The points of a step without their arrays, of which only shapes are known."""
    points = partial(points_without_loss, estimator=run.estimator)
    shapes: Points = jax.eval_shape(points, state)
    return shapes


def advance(
    run: Run,
    state: SolverState,
    points: Points,
    values: Values,
    value_fn: Callable[[optax.Params], Any] | None = None,
) -> tuple[SolverState, StepInfo]:
    """Takes a step, or skips it if no value can be used.

    Args:
      run: The run.
      state: The state before the step, with the estimator's state after `points_at`.
      points: The points of the step.
      values: The values at them; those that are not finite have failed.
      value_fn: The loss, for transformations that evaluate it.

    Returns:
      The state after the step, and what happened.
    """
    all_values = points.join(values)
    rejected = is_rejected(state, values.base)
    # Whether they were evaluated or not, the run is the same.
    values = values._replace(along=jnp.where(rejected, jnp.nan, values.along))
    failed = _num_failed(points, values, rejected)
    estimate, estimator_state = gradients.reduced(
        run.estimator, points, values, state.params, state.estimator_state
    )
    if revert.limit(state.optimizer_state) is not None:
        # Differences that were not needed have not failed.
        estimator_state = optax.tree.where(
            rejected, state.estimator_state, estimator_state
        )
    unusable = is_unusable(estimate, values)
    bounds = None
    if run.bounds is not None:
        bounds = box.as_trees(run.bounds, state.params)

    def update(
        params: optax.Params, optimizer_state: optax.OptState
    ) -> tuple[Any, Any]:
        params, optimizer_state = _updated(
            run.optimizer,
            estimate,
            unusable,
            optimizer_state,
            params,
            value_fn,
            bounds,
        )
        return box.project(run.bounds, params), optimizer_state

    params, optimizer_state = update_unless(
        unusable, update, state.params, state.optimizer_state
    )
    params = box.project(run.bounds, params)
    skipped = unusable & ~rejected
    one = skipped.astype(jnp.int32)
    most = MOST_STEPS - 1 - failed
    failures = Failures(
        jnp.minimum(state.failures.evaluations, most) + failed,
        state.failures.skipped + one,
        one * (state.failures.in_a_row + 1),
    )
    step = optax.safe_increment(state.step)
    state = SolverState(
        params, optimizer_state, estimator_state, state.key, step, failures
    )
    back = revert.reverted(optimizer_state)
    # A run in which values can be rejected has one value per point.
    value = jnp.where(rejected, jnp.mean(values.base), estimate.value)
    info = StepInfo(value, estimate.slope, all_values, failed, skipped, back)
    return state, info


def _num_failed(points: Points, values: Values, rejected: jax.Array) -> jax.Array:
    """The number of values that are not finite, but needed: int32, shape ()."""
    unneeded = jnp.broadcast_to(rejected, points.scales.shape)
    if points.shifts is None:  # A point that is not moved is θ.
        unneeded |= points.includes_params & (points.scales == 0)
    unneeded = unneeded.reshape(unneeded.shape + (1,) * (values.along.ndim - 2))
    needed = values._replace(along=jnp.where(unneeded, 0, values.along))
    return jnp.sum(~jnp.isfinite(points.join(needed)), dtype=jnp.int32)


def is_rejected(state: SolverState, base: jax.Array) -> jax.Array:
    """Whether the value at θ alone reverts the latest step: bool, shape ().

    The other values of the step are then not needed.
    """
    limit = revert.limit(state.optimizer_state)
    if limit is None:
        return jnp.zeros((), jnp.bool_)
    return jnp.isfinite(limit) & ~(jnp.mean(base).astype(limit.dtype) < limit)


def is_unusable(estimate: Estimate, values: Values) -> jax.Array:
    """Whether a step must be skipped because values failed: bool, shape ()."""
    # Squares of large differences overflow in a slope although no value failed.
    failed = jnp.any(~jnp.isfinite(values.along))
    return (estimate.num_values == 0) | (failed & ~jnp.isfinite(estimate.slope))


def _updated(
    optimizer: optax.GradientTransformation,
    estimate: Estimate,
    skipped: jax.Array,
    state: Any,
    params: optax.Params,
    value_fn: Callable[[optax.Params], Any] | None,
    bounds: Bounds | None,
) -> tuple[Any, Any]:
    """Parameters and optimizer state after an update."""
    if isinstance(optimizer.update, InPlaceUpdate):
        # The gradient is not built.
        args = gradients.extra_args(estimate, None, value_fn, bounds)
        return optimizer.update.apply(unchanged, state, params, **args)
    updates, state = optimizer_update(
        optimizer, estimate, skipped, state, params, value_fn, bounds
    )
    return optax.apply_updates(params, updates), state


def optimizer_update(
    optimizer: optax.GradientTransformation,
    estimate: Estimate,
    skipped: jax.Array,
    optimizer_state: optax.OptState,
    params: optax.Params,
    value_fn: Callable[[optax.Params], Any] | None,
    bounds: Bounds | None = None,
    **others: Any,
) -> tuple[Any, Any]:
    """The updates of an optimizer for an estimate, whose gradient is built here."""
    gradient = estimate.gradient.materialize(params)
    if revert.can_revert(optimizer_state):
        # Members of the chain take part in skipped steps, so they must not get NaN.
        gradient = jax.tree.map(
            lambda g: jnp.where(skipped, jnp.zeros_like(g), g), gradient
        )
    args = others | gradients.extra_args(estimate, gradient, value_fn, bounds)
    return optax.with_extra_args_support(optimizer).update(
        gradient, optimizer_state, params, **args
    )


def update_unless(
    skipped: jax.Array,
    update: Callable[..., tuple[Any, Any]],
    params: optax.Params,
    state: Any,
) -> tuple[Any, Any]:
    """Parameters and optimizer state after an update, unless the step is skipped.

    An optimizer that can revert steps takes part in skipped steps too: after a step to
    parameters without a finite loss, it alone can return.
    """
    if not revert.can_revert(state):
        return _times(1 - skipped.astype(jnp.int32), update, params, state)
    new_params, after = update(params, state)
    keep = skipped | revert.reverted(after)
    # Other members of a partition take no step: their gradient is not used.
    new_params = optax.tree.where(keep, params, new_params)
    new_params = revert.retried(after, new_params)
    return new_params, revert.keep_others(keep, state, after)


def final_params(
    run: Run, state: SolverState, loss: Callable[[optax.Params], Any]
) -> optax.Params:
    """The parameters after the latest step, or before it if it would be reverted.

    The next step would revert it. At the end of a run there is no next step, so that
    the loss is evaluated once more to find out.
    """
    # The decision does not depend on the gradient.
    zeros = jax.tree.map(jnp.zeros_like, state.params)
    value = gradients.mean_value(loss(state.params))
    _, after = optax.with_extra_args_support(run.optimizer).update(
        zeros,
        state.optimizer_state,
        state.params,
        value=value,
        grad=zeros,
        slope=jnp.zeros_like(value),
        value_fn=loss,
    )
    return revert.restored(after, state.params)


def _times(
    count: jax.Array,
    update: Callable[..., tuple[Any, Any]],
    params: optax.Params,
    state: Any,
) -> tuple[Any, Any]:
    """Calls `update` once or not at all.

    A loop works in place. A conditional, or a choice between before and after, holds
    two more copies of the parameters.
    """

    def body(carry: tuple[jax.Array, Any, Any]) -> tuple[jax.Array, Any, Any]:
        i, *rest = carry
        return i + 1, *update(*rest)

    start = (jnp.zeros((), jnp.int32), params, state)
    _, params, state = lax.while_loop(lambda carry: carry[0] < count, body, start)
    return params, state


def _keys(key: jax.Array, step: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The keys of a step: for its directions, and for its batch."""
    estimate_key, sample_key = jax.random.split(jax.random.fold_in(key, step))
    return estimate_key, sample_key


class StepFn(Protocol):
    """The `step` of a `Solver`."""

    def __call__(
        self, state: SolverState, *batch: Any, **kwargs: Any
    ) -> tuple[SolverState, StepInfo]:
        """Returns the state after a step, and what happened in it."""
        ...


class Solver(NamedTuple):
    """Pure functions that begin a run and take its steps.

    Attributes:
      init: `init(params, key) -> state`, a `SolverState`. The key is consumed.
      step: `step(state, *batch, **kwargs) -> (state, info)`, with a `StepInfo`. The
        batch is passed to the function after the parameters.
    """

    init: Callable[[Any, jax.typing.ArrayLike], SolverState]
    step: StepFn


def solver(
    fun: Callable[..., Any],
    optimizer: optax.GradientTransformation,
    estimator: GradientEstimator,
    evaluator: Evaluator = vectorized(),
    *,
    sample: Callable[[jax.Array], Any] | None = None,
    bounds: BoundsLike | None = None,
) -> Solver:
    """Combines a function, an optimizer and an estimator into one pure step.

    A step samples points, evaluates the function at them, estimates the gradient, and
    updates the parameters. `jit` compiles it to one program. It works under `lax.scan`,
    under `vmap` over keys, learning rates and starting points, on sharded parameters,
    and with a donated state. Use it for custom training loops; `minimize` is a loop
    around the same step, and takes the same steps bit for bit.

    A step in which no value can be used is skipped: neither the parameters nor the
    state of the optimizer change. `state.failures` counts what failed.

    Args:
      fun: `fun(params, *batch, **kwargs)` returns a real scalar. It need not be
        differentiable.
      optimizer: An Optax transformation, such as `radazo(1e-3)`. It gets `value`,
        `grad`, `slope`, `value_fn` and `combination` as extra arguments.
      estimator: An estimator, such as `forward_difference()`.
      evaluator: The evaluator of the points: `vectorized(batch_size)`, or
        `sharded(axis_name)`.
      sample: `sample(key)` draws the batch of a step, one argument of `fun` after the
        parameters. `step` then takes no batch.
      bounds: A tuple `(lower, upper)` of numbers, or of trees like the parameters, or a
        `scipy.optimize.Bounds`: the box in which the parameters and all points stay.

    Returns:
      The `Solver`. `default_method(params)` gives an optimizer and an estimator
      without a learning rate.

    Raises:
      TypeError, ValueError: If an argument has the wrong type; from `init`, if the
        parameters are not floating-point or lie outside of the bounds; from `step`, if
        the structure of the state differs from `init`'s, or the function does not
        return a real scalar.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> import radazo_jax as zo
      >>> def loss(params, target):
      ...     return jnp.sum((params - target) ** 2)
      >>> init, step = zo.solver(loss, zo.radazo(1e-2), zo.forward_difference())
      >>> state, step = init(jnp.zeros(4), jax.random.key(0)), jax.jit(step)
      >>> for _ in range(300):
      ...     state, info = step(state, jnp.ones(4))
      >>> bool(info.value < 0.05)
      True

      Eight runs with different keys, in one program:

      >>> target = jnp.ones(4)
      >>> def run(key):
      ...     state = init(jnp.zeros(4), key)
      ...     state, infos = jax.lax.scan(
      ...         lambda state, _: step(state, target), state, length=300
      ...     )
      ...     return infos.value[-1]
      >>> values = jax.jit(jax.vmap(run))(jax.random.split(jax.random.key(0), 8))
      >>> values.shape
      (8,)
    """
    if not callable(fun):
        raise TypeError(f"fun must be a function of params; got {fun!r}.")
    states.check_run(optimizer, estimator, evaluator)
    run = Run(fun, sample, optimizer, estimator, evaluator, as_bounds(bounds))

    def init(params: optax.Params, key: jax.typing.ArrayLike) -> SolverState:
        # No two leaves share a buffer, and none is the caller's, so that the state can
        # be donated.
        return jax.tree.map(jnp.copy, start(run, params, key))

    def step(
        state: SolverState, *batch: Any, **kwargs: Any
    ) -> tuple[SolverState, StepInfo]:
        states.check_state(run, state)
        if sample is None:
            return take(run, state, loss_of(run, batch, kwargs))
        if batch or kwargs:
            raise TypeError(
                "step must get no batch if sample draws it; got "
                f"{len(batch) + len(kwargs)} further arguments."
            )
        return take(run, state, loss_at(run, state))

    return Solver(init, step)
