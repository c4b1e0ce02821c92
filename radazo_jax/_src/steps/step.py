"""A step of a run: points, their values, the update.

The points are evaluated between `points_at` and `advance`, so that the same steps are
taken by a compiled run, a run whose function is evaluated elsewhere, and a run that is
rebuilt from its journal.
"""

import functools
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.tree_util import Partial

from radazo_jax._src.base import checks, keys, programs, shown, trees, xla
from radazo_jax._src.directions import generator
from radazo_jax._src.estimates import gradients
from radazo_jax._src.estimates.contracts import (
    Draw,
    Estimate,
    GradientEstimator,
    Loss,
    Objective,
    Points,
    Values,
)
from radazo_jax._src.estimates.gradients import of_params
from radazo_jax._src.optimizers import rounding
from radazo_jax._src.optimizers.in_place import InPlaceUpdate, keep_update
from radazo_jax._src.steps import box, states
from radazo_jax._src.steps.box import Bounds
from radazo_jax._src.steps.states import (
    MOST_STEPS,
    Failures,
    Run,
    SolverState,
    StepInfo,
)

T = TypeVar("T")

# Parameters, and the state of an optimizer.
Pair = tuple[optax.Params, optax.OptState]


def start(run: Run, params: optax.Params, key: jax.typing.ArrayLike) -> SolverState:
    """Returns the state before the first step.

    Args:
      run: The run.
      params: The parameters.
      key: The key of the run.
    """
    typed = keys.check_same_key(key)
    given, params = params, checks.as_params(params)
    checks.warn_of_float32(given)
    checks.warn_of_statistics(given)
    box.check_bounds(run.bounds, params)
    # A start on a bound may be off it by rounding.
    params = box.project(run.bounds, params)
    count = trees.as_scalar(0, jnp.int32)
    return SolverState(
        params,
        run.optimizer.init(params),
        run.estimator.init(params),
        typed,
        count,
        Failures(count, count, count),
    )


def with_traced_functions(run: Run, state: SolverState) -> Run:
    """Traces the functions of a run as they are now, for states like this one."""
    fun = run.fun
    # Without programs, functions get arrays and not tracers.
    if fun is None or programs.are_disabled():
        return run
    fun, sample = traced_functions(fun, run.sample, state.params, state.key)
    return run._replace(fun=fun, sample=sample)


def traced_functions(
    fun: Objective,
    sample: Callable[[jax.Array], object] | None,
    params: optax.Params,
    key: jax.Array,
) -> tuple[programs.TracedFunction, programs.TracedFunction | None]:
    """Traces a loss, and the function that samples its batches, as they are now."""
    checks.check_fun(fun)
    if sample is not None and not callable(sample):
        raise TypeError(
            "sample must be a function of a key that returns a batch; got "
            f"{shown.tree(sample)}. Draw from it, as by lambda key: "
            "jax.random.choice(key, data, (32,))."
        )
    states.check_known((params, key))
    batch: tuple[object, ...] = ()
    of_keys = None if sample is None else traced_sample(sample, key)
    if of_keys is not None:
        batch = (of_keys.output,)

    def loss(params: optax.Params, *batch: object) -> object:
        return _of_traced_params(fun, None, batch, {}, params)

    found = programs.trace(loss, params, *batch), of_keys
    states.check_known(found, "fun must close over")
    checks.check_floating(found[0].output)
    return found


def traced_sample(
    sample: Callable[[jax.Array], object], key: jax.Array
) -> programs.TracedFunction:
    """Traces the function that samples batches; warns if all would be alike."""
    found = programs.trace(sample, key)
    if jax.tree.leaves(found.output) and not found.uses_arguments:
        checks.warn(
            "sample must draw by its key; got one whose batch does not depend on it. "
            "JAX traces sample once, so that all steps have the same batch. Draw by "
            "jax.random.choice(key, data, (32,)), or close over the batch in fun."
        )
    return found


def loss_at(run: Run, state: SolverState) -> Loss:
    """Returns the loss of a step as a function of the parameters."""
    if run.sample is None:
        return loss_of(run, (), {})
    batch = run.sample(key_of(state.key, state.step, BATCH))
    return loss_of(run, (batch,), {})


def loss_of(run: Run, batch: tuple[object, ...], kwargs: dict[str, object]) -> Loss:
    """Returns the loss on a batch as a function of the parameters within the bounds."""
    return Partial(_of_traced_params, run.fun, run.bounds, batch, kwargs)


def _of_traced_params(
    fun: Callable[..., T],
    bounds: Bounds | None,
    batch: tuple[object, ...],
    kwargs: dict[str, object],
    params: optax.Params,
) -> T:
    """Calls `of_params` within bounds."""
    return of_params(fun, batch, kwargs, box.project(bounds, params))


def points_at(
    run: Run, state: SolverState, loss: Loss | None
) -> tuple[Points, optax.OptState]:
    """Returns the points of a step, and the state of the estimator after them.

    Args:
      run: The run.
      state: The state before the step.
      loss: The loss of the step if JAX can trace it, else `None`.
    """
    draw = draw_of(state.key, state.step)._replace(fun=loss)
    return gradients.points_of(
        run.estimator, run.evaluator, draw, state.params, state.estimator_state
    )


def take(
    run: Run,
    state: SolverState,
    loss: Loss,
    has_aux: bool = False,
) -> tuple[SolverState, StepInfo]:
    """Evaluates the points of a step, and takes it."""
    scalar = Partial(without_aux, loss) if has_aux else loss
    asked = points_at(run, state, scalar)
    values, aux = gradients.values_at(
        run.evaluator, loss, state.params, asked[0], has_aux
    )
    after, info = advance(run, state, asked, values, scalar)
    return after, info._replace(aux=aux)


def without_aux(
    fun: Callable[..., object], *args: object, **kwargs: object
) -> jax.Array:
    """Returns the first of the pair that a function returns."""
    return checks.as_pair(fun(*args, **kwargs))[0]


def points_without_loss(estimator: GradientEstimator, state: SolverState) -> Points:
    """Returns the points of a step as far as they do not depend on the loss."""
    draw = draw_of(state.key, state.step)
    return estimator.points(draw, state.params, state.estimator_state)[0]


def num_points(run: Run, state: SolverState) -> int:
    """Returns the number of points of a step, the same in all steps."""
    return abstract_points(run, state).num_points


def abstract_points(run: Run, state: SolverState) -> Points:
    """Returns the points of a step with shapes instead of arrays."""
    arrays, static = trees.partition(run.estimator)
    return jax.eval_shape(_points_of, static, arrays, state)


# A run asks for the shapes several times, and JAX traces the function once.
@partial(jax.jit, static_argnums=0)
def _points_of(
    static: trees.Static, arrays: list[jax.Array], state: SolverState
) -> Points:
    return points_without_loss(static.merge(arrays), state)


def advance(
    run: Run,
    state: SolverState,
    asked: tuple[Points, optax.OptState],
    values: Values,
    loss: Loss | None = None,
) -> tuple[SolverState, StepInfo]:
    """Takes a step whose values are known: estimates, and moves.

    Args:
      run: The run.
      state: The state before the step.
      asked: The points of the step, and the state after them, from `points_at`.
      values: The values at the points; those that are not finite have failed.
      loss: The loss, for optimizers that evaluate it.

    Returns:
      The state after the step, and what happened.
    """
    points, asked_state = asked
    estimate, estimator_state = gradients.reduced(
        run.estimator, points, values, state.params, asked_state
    )
    skipped = is_skipped(estimate, values)
    params, optimizer_state = _moved(run, state, estimate, skipped, loss)
    failed = jnp.sum(~jnp.isfinite(points.join(values)), dtype=jnp.int32)
    after = state._replace(
        params=params,
        optimizer_state=optimizer_state,
        estimator_state=estimator_state,
        step=optax.safe_increment(state.step),
        failures=_counted(state.failures, failed, skipped),
    )
    return after, StepInfo(
        estimate.value, estimate.slope, points.join(values), failed, skipped
    )


def is_skipped(estimate: Estimate, values: Values) -> jax.Array:
    """Returns whether no value of a step can be used: bool, shape ()."""
    # Squares of large differences overflow in a slope although no value failed.
    failed = jnp.any(~jnp.isfinite(values.along)) & ~jnp.isfinite(estimate.slope)
    return (estimate.num_values == 0) | failed


def _moved(
    run: Run,
    state: SolverState,
    estimate: Estimate,
    skipped: jax.Array,
    loss: Loss | None,
) -> tuple[optax.Params, optax.OptState]:
    """Returns parameters and the state of the optimizer after a step."""

    def taken(params: optax.Params, optimizer_state: optax.OptState) -> Pair:
        direction, optimizer_state = direction_of(
            run.optimizer, optimizer_state, params, estimate, loss
        )
        # Only some processors round a product and a sum together.
        direction = jax.tree.map(xla.rounded, direction)
        after = optax.apply_updates(params, direction)
        return box.project(run.bounds, after), optimizer_state

    def taken_in_place(params: optax.Params, optimizer_state: optax.OptState) -> Pair:
        # The gradient is not built, nor a direction.
        extra = gradients.extra_args(estimate, None, loss)
        params, optimizer_state = run.optimizer.update.apply(
            keep_update, optimizer_state, params, **extra
        )
        return box.project(run.bounds, params), optimizer_state

    in_place = isinstance(run.optimizer.update, InPlaceUpdate)
    held = state.params, state.optimizer_state
    update = partial(_like, taken_in_place if in_place else taken, held)
    # A conditional of two branches works in place. A choice between before and after
    # holds another copy of the parameters.
    return lax.cond(~skipped, update, lambda *x: x, *held)


def direction_of(
    optimizer: optax.GradientTransformation,
    optimizer_state: optax.OptState,
    params: optax.Params,
    estimate: Estimate,
    loss: Loss | None,
    **others: object,
) -> tuple[optax.Updates, optax.OptState]:
    """Returns the direction of an optimizer, and the state after it."""
    like = params
    if rounding.is_in(optimizer_state):
        # The products with a learning rate must not be lost before they are rounded.
        like = jax.tree.map(lambda p: p.astype(trees.with_range(p.dtype)), params)
    gradient = estimate.gradient.materialize(like)
    args = others | gradients.extra_args(estimate, gradient, loss)
    update = optax.with_extra_args_support(optimizer).update
    try:
        direction, optimizer_state = update(gradient, optimizer_state, params, **args)
    except gradients.UNTRACEABLE as error:
        raise TypeError(
            "optimizer must be one that JAX can trace; got one that turns a traced "
            "array into a Python value, as a schedule with `if` does. Use jnp.where, "
            "or optax.join_schedules."
        ) from error
    except TypeError as error:
        if "unexpected keyword argument" not in str(error):
            raise
        raise TypeError(
            "optimizer must take the extra arguments of Optax, which include the loss "
            f"as value_fn; got one that does not: {error}. optax.contrib.sam needs "
            "gradients of its own: use it with value_and_grad."
        ) from error
    return direction, optimizer_state


def _like(update: Callable[..., T], before: T, *held: optax.Params) -> T:
    """Calls an update, whose result has the dtypes before it, which a loop keeps."""
    after = update(*held)
    structures: list[Any] = [jax.tree.structure(x) for x in (before, after)]
    if structures[0] != structures[1]:
        return after  # The error of `cond` names what differs.
    return jax.tree.map(lambda x, y: jnp.asarray(x, y.dtype), after, before)


def _counted(failures: Failures, failed: jax.Array, skipped: jax.Array) -> Failures:
    """Returns the counts of failures after a step."""
    one = skipped.astype(jnp.int32)
    return Failures(
        jnp.minimum(failures.evaluations, MOST_STEPS - 1 - failed) + failed,
        failures.skipped + one,
        one * (failures.in_a_row + 1),
    )


# What a key is for, as the number that `jax.random.split` gives it.
DIRECTIONS, BATCH = 0, 1


def draw_of(key: jax.Array, step: jax.Array) -> Draw:
    """Returns the draw of a step of the run with this key."""
    # The key of the first step is the key of the run: no other step has it.
    run_key = key_of(key, jnp.zeros((), jnp.int32), DIRECTIONS)
    return Draw(key_of(key, step, DIRECTIONS), run_key, step)


# Traced once for all programs, which all have these equations.
@functools.partial(jax.jit, static_argnames=["use"], inline=True)
def key_of(key: jax.Array, step: jax.Array, use: int) -> jax.Array:
    """Returns the key of a step for its directions or for its batch.

    They are the keys of `jax.random.split(jax.random.fold_in(key, step))`.
    """

    def data(words: jax.Array, step: jax.Array) -> jax.Array:
        made = jax.random.wrap_key_data(words, impl=impl)
        for number in (step.astype(jnp.uint32), jnp.uint32(use)):
            made = generator.fold_in(made, number)
        return jax.random.key_data(made)

    impl = jax.random.key_impl(key)
    # Apart from the draws, each of which XLA would have compute the key anew.
    found = xla.in_one_kernel(data, jax.random.key_data(key), step)
    return jax.random.wrap_key_data(found, impl=impl)
