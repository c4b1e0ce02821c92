"""A step of a run: points, their values, the update.

The points are evaluated between `points_at` and `advance`, so that the same steps are
taken by a compiled run, a run whose function is evaluated elsewhere, and a run that is
rebuilt from its journal. States hold parameters θ; estimators, optimizers and searches
get z, which is θ in the units of the run.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.tree_util import Partial

from radazo_jax._src import checks, programs, trees
from radazo_jax._src.base import (
    Descent,
    Estimate,
    GradientEstimator,
    Points,
    Values,
)
from radazo_jax._src.estimators import gradients
from radazo_jax._src.estimators.differences import mean_of_finite
from radazo_jax._src.estimators.gradients import of_params
from radazo_jax._src.numbers import keys
from radazo_jax._src.steps import box, draws, states, units
from radazo_jax._src.steps.box import Bounds
from radazo_jax._src.steps.states import (
    MOST_STEPS,
    Failures,
    Outcome,
    Run,
    SolverState,
    StepInfo,
)
from radazo_jax._src.transforms.in_place import InPlaceUpdate, unchanged


def start(run: Run, params: optax.Params, key: jax.typing.ArrayLike) -> SolverState:
    """The state before the first step.

    Args:
      run: The run.
      params: The parameters.
      key: The key of the run.
    """
    arrays = checks.as_params(params)
    checks.warn_of_float32(params)
    params = arrays
    box.check_bounds(run.bounds, params)
    units.check_units(run.units, params)
    # A start on a bound may be off it by rounding.
    params = box.project(run.bounds, params)
    return begun(run, params, keys.check_same_key(key))


def begun(run: Run, params: optax.Params, key: jax.Array) -> SolverState:
    """The state before the first step, of arguments that are checked.

    Args:
      run: The run.
      params: The parameters, within the bounds.
      key: The typed key of the run.
    """
    count = trees.number(0, jnp.int32)
    z = units.to_units(run.units, params)
    return SolverState(
        params,
        run.optimizer.init(z),
        run.estimator.init(z),
        run.search.init(z),
        key,
        count,
        Failures(count, count, count),
    )


def traced(run: Run, state: SolverState) -> Run:
    """The run with its functions as they are now, for states like this one."""
    fun = run.fun
    # Without programs, functions get arrays and not tracers.
    if fun is None or programs.are_disabled():
        return run
    fun, sample = traced_functions(fun, run.sample, state.params, state.key)
    return run._replace(fun=fun, sample=sample)


def traced_functions(
    fun: Callable[..., Any],
    sample: Callable[[jax.Array], Any] | None,
    params: optax.Params,
    key: jax.Array,
) -> tuple[programs.Traced, programs.Traced | None]:
    """A loss and the function that samples its batches as they are now."""
    batch: tuple[Any, ...] = ()
    of_keys = None if sample is None else programs.traced(sample, key)
    if of_keys is not None:
        batch = (of_keys.output,)

    def loss(params: optax.Params, *batch: Any) -> Any:
        return _of_traced_params(fun, None, batch, {}, params)

    return programs.traced(loss, params, *batch), of_keys


def loss_at(run: Run, state: SolverState) -> Callable[[Any], Any]:
    """The loss of a step as a function of the parameters."""
    if run.sample is None:
        return loss_of(run, (), {})
    batch = run.sample(draws.key_of(state.key, state.step, draws.BATCH))
    return loss_of(run, (batch,), {})


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
    except gradients.UNTRACEABLE as error:
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
    bounds = units.bounds_in(run.units, run.bounds, state.params)
    draw = draws.draw_of(state.key, state.step)._replace(fun=loss, bounds=bounds)
    z = units.to_units(run.units, state.params)
    return gradients.points_of(
        run.estimator, run.evaluator, draw, z, state.estimator_state
    )


def take(
    run: Run,
    state: SolverState,
    loss: Callable[[optax.Params], Any],
    has_aux: bool = False,
) -> tuple[SolverState, StepInfo]:
    """Evaluates the points of a step, and takes it."""
    scalar = Partial(without_aux, loss) if has_aux else loss
    asked = points_at(run, state, scalar)
    placed = units.around(run.units, state.params, asked[0])
    values, aux = gradients.values_at(
        run.evaluator, loss, state.params, placed, has_aux
    )
    after, info = advance(run, state, asked, values, scalar)
    return after, info._replace(aux=aux)


def without_aux(fun: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The first of the pair that a function returns."""
    return checks.as_pair(fun(*args, **kwargs))[0]


def points_without_loss(estimator: GradientEstimator, state: SolverState) -> Points:
    """The points of a step as far as they do not depend on the loss."""
    draw = draws.draw_of(state.key, state.step)
    return estimator.points(draw, state.params, state.estimator_state)[0]


def num_points(run: Run, state: SolverState) -> int:
    """The number of points of a step, which is the same in all steps."""
    return abstract_points(run, state).num_points


def abstract_points(run: Run, state: SolverState) -> Points:
    """The points of a step without their arrays, of which only shapes are known."""
    arrays, static = trees.partition(run.estimator)
    return jax.eval_shape(_points_of, static, arrays, state)


# A run asks for the shapes several times, and JAX traces the function once.
@partial(jax.jit, static_argnums=0)
def _points_of(static: trees.Static, arrays: list[Any], state: SolverState) -> Points:
    return points_without_loss(static.merge(arrays), state)


def advance(
    run: Run,
    state: SolverState,
    asked: tuple[Points, Any],
    values: Values,
    loss: Callable[[optax.Params], Any] | None = None,
) -> tuple[SolverState, StepInfo]:
    """Takes a step whose values are known: judges, estimates, and moves.

    Args:
      run: The run.
      state: The state before the step.
      asked: The points of the step, and the state after them, from `points_at`.
      values: The values at the points; those that are not finite have failed.
      loss: The loss, for searches and optimizers that evaluate it.

    Returns:
      The state after the step, and what happened.
    """
    points, asked_state = asked
    here = value_here(points, values)
    accepted, search_state = judge(run, state, here)
    known = values
    if run.search.stops_early:
        # Whether the others were evaluated or not, the run is the same.
        along = jnp.where(accepted, values.along, jnp.nan)
        known = values._replace(along=along)
    z = units.to_units(run.units, state.params)
    estimate, estimator_state = gradients.reduced(
        run.estimator, points, known, z, asked_state
    )
    if run.search.stops_early:
        estimator_state = optax.tree.where(accepted, estimator_state, asked_state)
    outcome = jnp.where(accepted, outcome_of(estimate, known), Outcome.REJECTED)
    moved = _moved(run, state, search_state, (estimate, here, outcome), loss)
    failed = _num_failed(points, known, accepted | (not run.search.stops_early))
    params, optimizer_state, search_state = moved
    after = state._replace(
        params=params,
        optimizer_state=optimizer_state,
        estimator_state=estimator_state,
        search_state=search_state,
        step=optax.safe_increment(state.step),
        failures=_counted(state.failures, failed, outcome),
    )
    # A rejected step reports the value at its parameters, whatever it is.
    value = estimate.value
    if run.search.judges:
        value = jnp.where(accepted, value, _mean_here(points, values))
    return after, StepInfo(value, estimate.slope, points.join(values), failed, outcome)


def judge(run: Run, state: SolverState, value: jax.Array) -> tuple[jax.Array, Any]:
    """Whether the run may stay at its parameters, and the state of its search.

    Args:
      run: The run.
      state: The state.
      value: The loss at its parameters, NaN if it failed: shape ().
    """
    z = units.to_units(run.units, state.params)
    found = run.search.judge(state.search_state, z, value)
    ones = jax.ShapeDtypeStruct((), jnp.bool_)
    _check_found(found, (ones, state.search_state), "judge(state, params, value)")
    return found


def is_rejected(run: Run, state: SolverState, value: Any) -> bool:
    """Whether a value at θ alone decides a step, which then needs no further values."""
    if not run.search.stops_early:
        return False
    value = jnp.asarray(value, trees.widest(state.params))
    accepted, _ = judge(run, state, _finite(value))
    return not bool(accepted)


def outcome_of(estimate: Estimate, values: Values) -> jax.Array:
    """The outcome of a step that no search rejects: int32, shape ()."""
    # Squares of large differences overflow in a slope although no value failed.
    failed = jnp.any(~jnp.isfinite(values.along)) & ~jnp.isfinite(estimate.slope)
    skipped = (estimate.num_values == 0) | failed
    outcome = jnp.where(estimate.complete, Outcome.TAKEN, Outcome.INCOMPLETE)
    return jnp.where(skipped, Outcome.SKIPPED, outcome).astype(jnp.int32)


def _mean_here(points: Points, values: Values) -> jax.Array:
    """The value at θ, or the mean of the values around it: shape ()."""
    if points.includes_params:
        return jnp.mean(values.base)
    return mean_of_finite(values.along)


def value_here(points: Points, values: Values) -> jax.Array:
    """The value at θ, NaN if it is not finite: shape ()."""
    return _finite(_mean_here(points, values))


def _finite(value: jax.Array) -> jax.Array:
    return jnp.where(jnp.isfinite(value), value, jnp.nan)


def _moved(
    run: Run,
    state: SolverState,
    search_state: Any,
    found: tuple[Estimate, jax.Array, jax.Array],
    loss: Callable[[optax.Params], Any] | None,
) -> tuple[optax.Params, Any, Any]:
    """Parameters, and the states of optimizer and search, after a step.

    Args:
      run: The run.
      state: The state before the step.
      search_state: The state of the search after its judgment.
      found: The estimate, the value at θ, and the outcome.
      loss: The loss, or `None`.
    """
    search, (estimate, here, outcome) = run.search, found
    bounds = units.bounds_in(run.units, run.bounds, state.params)
    project = partial(box.project, bounds)
    of_z = units.loss_in(run.units, loss)
    args = estimate, here, of_z, bounds

    def taken(z: Any, optimizer_state: Any, search_state: Any) -> Any:
        direction, gradient, optimizer_state = direction_of(
            run.optimizer, optimizer_state, z, *args
        )
        mean = None if of_z is None else partial(_mean_loss, of_z)
        descent = Descent(direction, gradient, estimate, here, project, mean)
        moved = search.move(search_state, z, descent)
        _check_found(moved, (z, search_state), "move(state, params, descent)")
        return moved[0], optimizer_state, moved[1]

    def taken_in_place(z: Any, optimizer_state: Any, search_state: Any) -> Any:
        # The gradient is not built, nor a direction.
        extra = gradients.extra_args(estimate, None, here, of_z, bounds)
        z, optimizer_state = run.optimizer.update.apply(
            unchanged, optimizer_state, z, **extra
        )
        return project(z), optimizer_state, search_state

    def rejected(z: Any, optimizer_state: Any, search_state: Any) -> Any:
        moved = search.back(search_state, z, project)
        _check_found(moved, (z, search_state), "back(state, params, project)")
        return moved[0], optimizer_state, moved[1]

    def of_params(update: Callable[..., Any], params: Any, *held: Any) -> Any:
        z, *others = update(units.to_units(run.units, params), *held)
        return units.from_units(run.units, z), *others

    in_place = isinstance(run.optimizer.update, InPlaceUpdate) and not search.judges
    held = state.params, state.optimizer_state, search_state
    if search.judges:
        held = _if(outcome == Outcome.REJECTED, partial(of_params, rejected), held)
    update = partial(of_params, taken_in_place if in_place else taken)
    return _if(outcome == Outcome.TAKEN, update, held)


def direction_of(
    optimizer: optax.GradientTransformation,
    optimizer_state: optax.OptState,
    params: optax.Params,
    estimate: Estimate,
    here: jax.Array,
    loss: Callable[[optax.Params], Any] | None,
    bounds: Bounds | None = None,
    **others: Any,
) -> tuple[optax.Updates, optax.Updates, optax.OptState]:
    """The direction of an optimizer, the gradient, and the state after it."""
    gradient = estimate.gradient.materialize(params)
    args = others | gradients.extra_args(estimate, gradient, here, loss, bounds)
    direction, optimizer_state = optax.with_extra_args_support(optimizer).update(
        gradient, optimizer_state, params, **args
    )
    return direction, gradient, optimizer_state


def _mean_loss(loss: Callable[[optax.Params], Any], params: optax.Params) -> Any:
    return gradients.mean_value(loss(params))


def _if(condition: jax.Array, update: Callable[..., Any], held: Any) -> Any:
    """The held trees, updated if the condition holds.

    Conditionals of two branches, one after the other, work in place. A choice between
    before and after, or a switch, holds another copy of the parameters.
    """
    return lax.cond(condition, partial(_like, update, held), lambda *x: x, *held)


def _like(update: Callable[..., Any], before: Any, *held: Any) -> Any:
    """The result of an update, in the dtypes before it, which a loop keeps."""
    after = update(*held)
    structures: list[Any] = [jax.tree.structure(x) for x in (before, after)]
    if structures[0] != structures[1]:
        return after  # The error of `cond` names what differs.
    return jax.tree.map(lambda x, y: jnp.asarray(x, y.dtype), after, before)


def _check_found(found: Any, expected: tuple[Any, Any], call: str) -> None:
    """Raises unless a method of a search has returned what it must."""
    method = call.partition("(")[0]
    if type(found) is tuple and len(found) == 2:
        pair = states.difference(expected, found, leaves=True)
        if pair is None:
            return
    else:
        pair = "a pair", type(found).__name__
    raise TypeError(
        f"{method} of the search must return {pair[0]}; got {pair[1]}. It is called as "
        f"{call}."
    )


def _counted(failures: Failures, failed: jax.Array, outcome: jax.Array) -> Failures:
    """The counts of failures after a step."""
    one = (outcome == Outcome.SKIPPED).astype(jnp.int32)
    return Failures(
        jnp.minimum(failures.evaluations, MOST_STEPS - 1 - failed) + failed,
        failures.skipped + one,
        one * (failures.in_a_row + 1),
    )


def _num_failed(
    points: Points, values: Values, needed: jax.typing.ArrayLike
) -> jax.Array:
    """The number of values that are not finite, but needed: int32, shape ()."""
    unneeded = jnp.broadcast_to(~jnp.asarray(needed), points.scales.shape)
    if points.shifts is None:  # A point that is not moved is θ.
        unneeded |= points.includes_params & (points.scales == 0)
    unneeded = unneeded.reshape(unneeded.shape + (1,) * (values.along.ndim - 2))
    counted = values._replace(along=jnp.where(unneeded, 0, values.along))
    return jnp.sum(~jnp.isfinite(points.join(counted)), dtype=jnp.int32)


def last_params(run: Run, state: SolverState) -> optax.Params:
    """The parameters after the latest step, or before it if it would be rejected.

    The next step would reject it. At the end of a run there is no next step, so that
    the loss is evaluated once more to find out.
    """
    if not run.search.judges:
        return state.params
    return programs.of(_last_params, run, state)(state)


def value_after(run: Run, state: SolverState) -> jax.Array:
    """The value at the parameters of a state, NaN if it failed: shape ()."""
    return _finite(_mean_loss(loss_at(run, state), state.params))


def _last_params(run: Run, state: SolverState) -> optax.Params:
    value = value_after(run, state)
    accepted, _ = judge(run, state, value)
    return optax.tree.where(accepted, state.params, before(run, state))


def before(run: Run, state: SolverState) -> optax.Params:
    """The parameters before the latest step, which a search has kept."""
    return units.from_units(run.units, state.search_state.before)
