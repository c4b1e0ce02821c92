"""A step of a run: points, their values, the update.

The points are evaluated between `points_at` and `advance`, so that the same steps are
taken by a compiled run, a run whose function is evaluated elsewhere, and a run that is
rebuilt from its journal.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.tree_util import Partial

from radazo_jax._src import checks, shown
from radazo_jax._src.estimate import estimator as estimators
from radazo_jax._src.estimate.estimator import GradientEstimator, check_estimator
from radazo_jax._src.estimate.gradients import of_params
from radazo_jax._src.estimate.points import Draw, Estimate, Points, Values
from radazo_jax._src.estimate.vectorized import Evaluator, check_evaluator, vectorized
from radazo_jax._src.numbers import keys
from radazo_jax._src.optimize import box, revert
from radazo_jax._src.optimize.box import Bounds
from radazo_jax._src.optimize.in_place import InPlaceUpdate, unchanged

MOST_STEPS = np.iinfo(np.int32).max


class Failures(NamedTuple):
    """Counts of evaluations and steps that could not be used.

    Attributes:
      evaluations: The number of values that were not finite: int32, shape (). It ends
        at 2³¹ - 2, which means so many or more.
      skipped: The number of skipped steps: int32, shape ().
      in_a_row: The number of skipped steps since the last one that was not skipped:
        int32, shape ().
    """

    evaluations: jax.Array
    skipped: jax.Array
    in_a_row: jax.Array

    def __repr__(self) -> str:
        counts = {name: shown.number(x) for name, x in self._asdict().items()}
        return shown.on_a_line(self, **counts)


class Run(NamedTuple):
    """The definition of a run.

    `trees.partition` splits it into its arrays and a hashable remainder, which is
    static under `jit`.

    Attributes:
      fun: The loss, a function of the parameters and of a batch; `None` if JAX does
        not evaluate it.
      sample: A function from a key to a batch, a tuple of arguments; `None` without.
      optimizer: An Optax transformation.
      estimator: An estimator.
      evaluator: The evaluator of the points.
      bounds: The box in which parameters and points stay; `None` without.
    """

    fun: Callable[..., Any] | None
    sample: Callable[[jax.Array], Any] | None
    optimizer: optax.GradientTransformation
    estimator: GradientEstimator
    evaluator: Evaluator = vectorized()
    bounds: Bounds | None = None


class StepInfo(NamedTuple):
    """The values and the outcome of a step.

    Attributes:
      value: The value at θ, or a substitute for it: at least float32, shape ().
      slope: The derivative along the estimate, according to the values: shape ().
      values: The values at the points, θ first: [n], or [n, G] if the function returns
        several.
      failed: Number of values that were not finite, without those that were not
        needed: int32, shape ().
      skipped: Whether the step was skipped because no value could be used: bool,
        shape ().
      reverted: Whether the step reverted the previous one instead: bool, shape ().
    """

    value: jax.Array
    slope: jax.Array
    values: jax.Array
    failed: jax.Array
    skipped: jax.Array
    reverted: jax.Array


class SolverState(NamedTuple):
    """The state of a run: everything that is needed to continue it.

    Attributes:
      params: The parameters.
      optimizer_state: The state of the Optax transformation.
      estimator_state: The state of the estimator.
      key: The key of the run, typed, shape (); it does not change.
      step: The number of steps done: int32, shape ().
      failures: The evaluations that failed.
    """

    params: optax.Params
    optimizer_state: optax.OptState
    estimator_state: Any
    key: jax.Array
    step: jax.Array
    failures: Failures

    def __repr__(self) -> str:
        return shown.on_a_line(
            self,
            step=shown.number(self.step),
            params=shown.tree(self.params),
            optimizer_state=shown.count(self.optimizer_state),
            estimator_state=shown.count(self.estimator_state),
            failures=shown.number(getattr(self.failures, "evaluations", None)),
        )


def check_known(state: SolverState) -> None:
    """Raises if the arrays of a run are traced."""
    if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(state)):
        raise TypeError(
            "params, key and state must be known arrays; got traced ones. A run "
            "compiles its own loop, so call it outside of jax.jit, jax.vmap and "
            "jax.grad; inside, take value_and_grad or estimate_gradient."
        )
    checks.check_not_deleted("state", state)


def check_state(run: Run, state: Any, *, leaves: bool = False) -> None:
    """Raises if a state is not of this run.

    Args:
      run: The run.
      state: The state, which may be traced.
      leaves: Whether to compare dtypes and shapes too, which a compiled loop keeps.
    """
    if not isinstance(state, SolverState):
        raise TypeError(
            f"state must be a SolverState, made by init; got {type(state).__name__}."
        )
    for name, init, got in (
        ("optimizer", run.optimizer.init, state.optimizer_state),
        ("estimator", run.estimator.init, state.estimator_state),
    ):
        expected = jax.eval_shape(init, state.params)
        pair = _difference(expected, got, leaves)
        if pair is not None:
            raise ValueError(
                f"state must be of this {name} and these params, with {pair[0]}; got "
                f"{pair[1]}. Continue with the {name} that made it, or start another "
                "run from state.params."
            )


def _difference(expected: Any, got: Any, leaves: bool) -> tuple[str, str] | None:
    """The difference of two trees: their structures, or their first unequal leaves."""
    structures: list[Any] = [jax.tree.structure(x) for x in (expected, got)]
    if structures[0] != structures[1]:
        return f"a tree {structures[0]}", f"a tree {structures[1]}"
    if leaves:
        paired = zip(
            jax.tree_util.tree_leaves_with_path(expected),
            jax.tree.leaves(got),
            strict=True,
        )
        for (path, x), y in paired:
            if (jnp.shape(x), jnp.result_type(x)) != (jnp.shape(y), jnp.result_type(y)):
                place = jax.tree_util.keystr(path)
                return f"{shown.tree(x)} at {place}", f"{shown.tree(y)} there"
    return None


def room(done: Any) -> int:
    """Returns the number of steps that can still be counted, at least 1."""
    return max(MOST_STEPS - 1 - int(done), 1)


def check_room(done: Any, num_steps: int = 1) -> None:
    """Raises if a run would be longer than its steps can be counted."""
    if num_steps > MOST_STEPS - int(done):
        raise ValueError(
            f"num_steps must end a run before 2^31 steps; got {num_steps} after "
            f"{int(done)}. A step draws by its number: begin another run, with "
            "another key."
        )


def check_run(optimizer: Any, estimator: Any, evaluator: Any = vectorized()) -> None:
    """Raises unless these are what they are named."""
    if not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
        raise TypeError(
            "optimizer must be an Optax transformation such as radazo(1e-3); got "
            f"{optimizer!r}."
        )
    check_estimator(estimator)
    check_evaluator(evaluator)


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
            "minimize_black_box." + checks.refer_to("api/black_boxes")
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
    return estimators.points_of(
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
    values, _ = estimators.values_at(run.evaluator, loss, state.params, points)
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
    needed = points.join(values._replace(along=jnp.where(rejected, 0, values.along)))
    failed = jnp.sum(~jnp.isfinite(needed), dtype=jnp.int32)
    estimate, estimator_state = estimators.reduced(
        run.estimator, points, values, state.params, state.estimator_state
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
    value = jnp.where(rejected, values.base, estimate.value)
    info = StepInfo(value, estimate.slope, all_values, failed, skipped, back)
    return state, info


def is_rejected(state: SolverState, base: jax.Array) -> jax.Array:
    """Whether the value at θ alone reverts the latest step: bool, shape ().

    The other values of the step are then not needed.
    """
    limit = revert.limit(state.optimizer_state)
    if limit is None:
        return jnp.zeros((), jnp.bool_)
    return jnp.isfinite(limit) & ~(base.astype(limit.dtype) < limit)


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
        args = estimators.extra_args(estimate, None, value_fn, bounds)
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
    args = others | estimators.extra_args(estimate, gradient, value_fn, bounds)
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
    value = estimators.mean_value(loss(state.params))
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
