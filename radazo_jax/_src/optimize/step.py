"""One step of a run: points, their values, the update.

What evaluates the points is between the two functions here, so that a compiled run, one
whose function is evaluated elsewhere, and one that is rebuilt from its journal take the
same steps.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.tree_util import Partial

from radazo_jax._src import checks, shown
from radazo_jax._src.estimate.estimator import (
    GradientEstimator,
    check_estimator,
    extra_args,
    held_points,
)
from radazo_jax._src.estimate.gradients import of_params
from radazo_jax._src.estimate.points import Points
from radazo_jax._src.numbers import keys
from radazo_jax._src.optimize import history
from radazo_jax._src.optimize.box import Bounds, into

_MAX_STEPS = np.iinfo(np.int32).max


class Failures(NamedTuple):
    """What of a run could not be used.

    Attributes:
      evaluations: The number of values that were not finite: int32, shape (). It ends
        at 2³¹ - 2, which means so many or more.
      skipped: The number of steps that had no value to use: int32, shape ().
      in_a_row: The number of those that were the latest: int32, shape ().
    """

    evaluations: jax.Array
    skipped: jax.Array
    in_a_row: jax.Array

    def __repr__(self) -> str:
        counts = {name: shown.number(x) for name, x in self._asdict().items()}
        return shown.on_a_line(self, **counts)


class MinimizeState(NamedTuple):
    """The state of a run: everything that is needed to continue it.

    Attributes:
      params: The parameters.
      optimizer_state: The state of the Optax transformation.
      estimator_state: The state of the estimator.
      key: The key of the run, typed, shape (); it does not change.
      step: The number of steps done: int32, shape ().
      failures: The evaluations that failed.
    """

    params: Any
    optimizer_state: Any
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


def check_known(state: MinimizeState) -> None:
    """Raises if a run is to be traced."""
    if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(state)):
        raise TypeError(
            "params, key and state must be known arrays; got traced ones. A run "
            "compiles its own loop, so call it outside of jax.jit, jax.vmap and "
            "jax.grad; inside, take value_and_grad or estimate_gradient."
        )
    checks.check_not_deleted("state", state)


def check_trees(
    state: MinimizeState,
    optimizer: optax.GradientTransformation,
    estimator: GradientEstimator,
    *,
    leaves: bool = False,
) -> None:
    """Raises if a state is not of this optimizer and this estimator.

    Args:
      state: The state, which may be traced.
      optimizer: An Optax transformation.
      estimator: An estimator.
      leaves: Whether to compare dtypes and shapes, too, which a compiled loop keeps.
    """
    for name, init, got in (
        ("optimizer", optimizer.init, state.optimizer_state),
        ("estimator", estimator.init, state.estimator_state),
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
    """Two trees where they differ: their structures, or their first such leaves."""
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


def check_room(state: MinimizeState, num_steps: int = 1) -> None:
    """Raises if a run would be longer than its steps can be counted."""
    if num_steps > _MAX_STEPS - int(state.step):
        raise ValueError(
            f"num_steps must end a run before 2^31 steps; got {num_steps} after "
            f"{int(state.step)}. A step draws by its number: begin another run, with "
            "another key."
        )


def check_run(optimizer: Any, estimator: Any) -> None:
    """Raises unless these are an Optax transformation and an estimator."""
    if not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
        raise TypeError(
            "optimizer must be an Optax transformation such as radazo(1e-3); got "
            f"{optimizer!r}."
        )
    check_estimator(estimator)


def start(
    params: Any,
    optimizer: optax.GradientTransformation,
    estimator: GradientEstimator,
    key: jax.typing.ArrayLike,
) -> MinimizeState:
    """The state before the first step; called by what a user calls."""
    arrays = checks.as_params(params)
    checks.warn_of_float32(params, stacklevel=3)
    params = arrays
    count = jnp.zeros((), jnp.int32)
    return MinimizeState(
        params,
        optimizer.init(params),
        estimator.init(params),
        keys.check_same_key(key),
        count,
        Failures(count, count, count),
    )


def loss_at(
    state: MinimizeState,
    fun: Callable[..., Any],
    sample: Callable[[jax.Array], Any] | None,
) -> Callable[[Any], Any]:
    """The loss of a step as a function of the parameters."""
    _, key = _keys(state)
    xi = () if sample is None else (sample(key),)
    return Partial(_of_traced_params, fun, xi, {})


def _of_traced_params(
    fun: Callable[..., Any], xi: tuple[Any, ...], kwargs: dict[str, Any], params: Any
) -> Any:
    """`of_params`, with an error that names what fits where JAX cannot trace `fun`."""
    try:
        return of_params(fun, xi, kwargs, params)
    except (
        jax.errors.ConcretizationTypeError,
        jax.errors.TracerArrayConversionError,
        jax.errors.TracerIntegerConversionError,
    ) as error:
        raise TypeError(
            "fun must be a function that JAX can trace; got one that turns params into "
            "a Python number or a NumPy array. Use jax.numpy in it, or pass it to "
            "minimize_black_box." + checks.see("api/black_boxes")
        ) from error


def points_at(
    state: MinimizeState,
    estimator: GradientEstimator,
    loss: Callable[[Any], Any] | None = None,
) -> Points:
    """The points of a step; `loss` as `fun` in `held_points`."""
    key, _ = _keys(state)
    return held_points(estimator, key, state.params, state.estimator_state, loss)


def advance(
    state: MinimizeState,
    points: Points,
    values: jax.Array,
    optimizer: optax.GradientTransformation,
    estimator: GradientEstimator,
    *,
    bounds: Bounds | None = None,
    value_fn: Callable[[Any], Any] | None = None,
) -> tuple[MinimizeState, jax.Array]:
    """Takes a step, or skips it where no value can be used.

    Args:
      state: The state before.
      points: The points of this step.
      values: The values at them, [n]; those that are not finite have failed.
      optimizer: An Optax transformation.
      estimator: The estimator of the points.
      bounds: A box in which the parameters stay.
      value_fn: The loss, for transformations that evaluate it.

    Returns:
      The state after, and the numbers of the step, float32, [`history.names`]: the
      value of the estimate is the first.
    """
    estimate, estimator_state = estimator.reduce(
        points, values, state.params, state.estimator_state
    )
    failed = jnp.sum(~jnp.isfinite(values), dtype=jnp.int32)
    unusable = (failed > 0) & ~jnp.isfinite(estimate.slope)
    skipped = (estimate.num_values == 0) | unusable
    one = skipped.astype(jnp.int32)

    def update(params: Any, optimizer_state: Any) -> tuple[Any, Any]:
        estimate, _ = estimator.reduce(points, values, params, state.estimator_state)
        gradient = estimate.gradient
        if takes_back(optimizer_state):
            # Its own members of the chain see a skipped step, without NaN.
            gradient = jax.tree.map(
                lambda g: jnp.where(skipped, jnp.zeros_like(g), g), gradient
            )
        args = extra_args(estimate._replace(gradient=gradient), value_fn)
        updates, optimizer_state = optax.with_extra_args_support(optimizer).update(
            gradient, optimizer_state, params, **args
        )
        return into(bounds, optax.apply_updates(params, updates)), optimizer_state

    if takes_back(state.optimizer_state):
        params, after = update(state.params, state.optimizer_state)
        # A gradient from where a step is taken back belongs to no average either.
        optimizer_state = _unless(
            skipped | _took_back(after), state.optimizer_state, after
        )
    else:
        params, optimizer_state = _times(
            1 - one, update, state.params, state.optimizer_state
        )
    most = _MAX_STEPS - 1 - failed
    failures = Failures(
        jnp.minimum(state.failures.evaluations, most) + failed,
        state.failures.skipped + one,
        one * (state.failures.in_a_row + 1),
    )
    step = optax.safe_increment(state.step)
    state = MinimizeState(
        params, optimizer_state, estimator_state, state.key, step, failures
    )
    return state, history.numbers(values, estimate, state)


def last_params(
    state: MinimizeState,
    optimizer: optax.GradientTransformation,
    loss: Callable[[Any], Any],
) -> Any:
    """The parameters after the latest step, or before it where it is taken back.

    The next step would see to that; at the end of a run, it takes an evaluation.
    """
    # Along no direction, all that an update can do is to take the latest step back.
    none = jax.tree.map(lambda p: jnp.full_like(p, jnp.nan), state.params)
    updates, _ = optax.with_extra_args_support(optimizer).update(
        none,
        state.optimizer_state,
        state.params,
        value=loss(state.params),
        grad=none,
        slope=jnp.nan,
        value_fn=loss,
    )
    # What another member makes of no direction is no update.
    updates = jax.tree.map(lambda u: jnp.where(jnp.isnan(u), 0, u), updates)
    return optax.apply_updates(state.params, updates)


def takes_back(optimizer_state: Any) -> bool:
    """Whether a member of the chain is to see steps that have no value.

    It has `took_back` in its state: after a step to where the loss is not finite, it
    alone can return.
    """
    return bool(_that_take_back(optimizer_state))


def _took_back(optimizer_state: Any) -> jax.Array:
    """Whether the latest update took a step back."""
    members = _that_take_back(optimizer_state)
    return jnp.any(jnp.stack([member.took_back for member in members]))


def _that_take_back(optimizer_state: Any) -> list[Any]:
    """The states of the members of a chain that can take a step back."""
    nodes = jax.tree.leaves(optimizer_state, is_leaf=_takes_back)
    return [node for node in nodes if _takes_back(node)]


def _takes_back(node: Any) -> bool:
    return hasattr(node, "took_back")


def _unless(condition: jax.Array, before: Any, after: Any) -> Any:
    """The state after; under a condition, that of the others is as before."""
    return jax.tree.map(
        lambda old, new: (
            new if _takes_back(old) else optax.tree.where(condition, old, new)
        ),
        before,
        after,
        is_leaf=_takes_back,
    )


def _times(
    count: jax.Array, update: Callable[..., tuple[Any, Any]], params: Any, state: Any
) -> tuple[Any, Any]:
    """Calls `update` once or not at all.

    By a loop, which works in place. A conditional, or a choice between before and
    after, holds two copies of the parameters more.
    """

    def body(carry: tuple[jax.Array, Any, Any]) -> tuple[jax.Array, Any, Any]:
        i, *rest = carry
        return i + 1, *update(*rest)

    start = (jnp.zeros((), jnp.int32), params, state)
    _, params, state = lax.while_loop(lambda carry: carry[0] < count, body, start)
    return params, state


def _keys(state: MinimizeState) -> tuple[jax.Array, jax.Array]:
    """The keys of a step: that of its directions, and that of its sample."""
    estimate_key, sample_key = jax.random.split(
        jax.random.fold_in(state.key, state.step)
    )
    return estimate_key, sample_key
