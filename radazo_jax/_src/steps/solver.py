"""`solver`: the step of a run as a pure function."""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import jax
import optax

from radazo_jax._src.base import checks, trees
from radazo_jax._src.base.names import checks_names
from radazo_jax._src.estimates.contracts import Evaluator, GradientEstimator, Objective
from radazo_jax._src.estimates.vectorized import vectorized
from radazo_jax._src.steps import states
from radazo_jax._src.steps import step as steps
from radazo_jax._src.steps.box import BoundsLike, as_bounds
from radazo_jax._src.steps.rounded_away import warn_of_rounding
from radazo_jax._src.steps.states import Run, SolverState, StepInfo


class StepFn(Protocol):
    """The `step` of a `Solver`."""

    def __call__(
        self, state: SolverState, *batch: object, **kwargs: object
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

    init: Callable[[optax.Params, jax.typing.ArrayLike], SolverState]
    step: StepFn


@checks_names
def solver(
    fun: Objective,
    optimizer: optax.GradientTransformation,
    estimator: GradientEstimator,
    *,
    evaluator: Evaluator = vectorized(),
    sample: Callable[[jax.Array], object] | None = None,
    bounds: BoundsLike | None = None,
    has_aux: bool = False,
) -> Solver:
    """Combines a function, an optimizer and an estimator into one pure step.

    A step samples points, evaluates the function at them, estimates the gradient, and
    updates the parameters. `jit` compiles it to one program. It works under `lax.scan`,
    under `vmap` over keys, learning rates and starting points, on sharded parameters,
    and with a donated state. Use it for custom training loops; `train` is a loop
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
        A list of pairs, one for each element of an array of parameters, is read as
        SciPy reads it. `None` is no bound.
      has_aux: Whether `fun` returns a pair of a scalar and anything else, which is the
        `aux` of the `StepInfo`, as at the first point.

    Returns:
      The `Solver`.

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
    checks.check_fun(fun)
    states.check_run(optimizer, estimator, evaluator)
    run = Run(fun, sample, optimizer, estimator, evaluator, as_bounds(bounds))

    def init(params: optax.Params, key: jax.typing.ArrayLike) -> SolverState:
        # No two leaves share a buffer, and none is the caller's, so that the state can
        # be donated.
        state = trees.copies(steps.start(run, params, key))
        draw = steps.draw_of(state.key, state.step)
        warn_of_rounding(estimator, draw, state.params, state.estimator_state)
        return state

    def step(
        state: SolverState, *batch: object, **kwargs: object
    ) -> tuple[SolverState, StepInfo]:
        states.check_state(run, state)
        if sample is None:
            loss = steps.loss_of(run, batch, kwargs)
            return steps.take(run, state, loss, has_aux)
        if batch or kwargs:
            raise TypeError(
                "step must get no batch if sample draws it; got "
                f"{len(batch) + len(kwargs)} further arguments."
            )
        if trees.is_traced(state.key):  # Else each step calls it.
            steps.traced_sample(sample, state.key)
        return steps.take(run, state, steps.loss_at(run, state), has_aux)

    return Solver(init, step)
