"""The learning rate and the smoothing of a run that names no optimizer."""

import dataclasses
import functools
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
import optax

from radazo_jax._src.base import keys, trees
from radazo_jax._src.directions.distributions import orthonormal, sphere
from radazo_jax._src.estimates.contracts import (
    GradientEstimator,
    GradientTransformationExtraArgs,
)
from radazo_jax._src.estimates.differences import FiniteDifferences, forward_difference
from radazo_jax._src.measure.learning_rate import (
    DecayedRate,
    LearningRate,
    endless_rate,
    with_measured_smoothing,
)
from radazo_jax._src.measure.smoothing import Probe
from radazo_jax._src.optimizers.in_place import chain_in_place
from radazo_jax._src.optimizers.moments import scale_by_radazo
from radazo_jax._src.optimizers.replayed import scale_by_replayed_radazo
from radazo_jax._src.runs.budget import Budget
from radazo_jax._src.runs.journal import Journal
from radazo_jax._src.steps import step
from radazo_jax._src.steps.states import Run, SolverState

# Above so many parameters, moments are replayed, not stored.
_LARGE = 1 << 24


def default(
    size: int, estimator: GradientEstimator | None
) -> tuple[optax.GradientTransformation, GradientEstimator]:
    """Returns R-AdaZO, whose rate is measured later, and an estimator.

    Args:
      size: The number of parameters.
      estimator: The estimator, if the caller names one.
    """
    chosen: Any = forward_difference(orthonormal()) if estimator is None else estimator
    most = max(getattr(chosen, "num_directions", 0), 64)
    return radazo_at_measured_rate(size > _LARGE, most), chosen


def of_run(
    run: Run, state: SolverState, budget: Budget, begins: bool, file: Journal | None
) -> tuple[Run, SolverState, LearningRate | None]:
    """Gives a run that names no optimizer a learning rate and a smoothing.

    The smoothing is measured unless the estimator has one of its own. The budget gets
    an end at which the rate is 0. A run that continues keeps its rate and its
    smoothing: the state has them, or the line of the journal.

    Args:
      run: The run, with traced functions.
      state: The state before the first step.
      budget: The budgets, which have started.
      begins: Whether the run begins here, and not with a state of the caller.
      file: The journal, if there is one.

    Returns:
      The run with the smoothing; the state with the rate; and the rate, if it was found
      here or in the journal.
    """
    rate = None
    if begins:
        line = None if file is None else file.line
        rate = of_line(line) or _found(run, state, budget)
        budget.spend(rate.num_evaluations)
        if rate.num_steps is None:
            rate = rate.over(budget.total)
        state = with_rate(state, rate)
    kept = _of_state(state)
    if kept is not None and kept.num_steps:
        budget.end_at(int(kept.num_steps), int(state.step))
    return with_smoothing(run, state), state, rate


def with_rate(state: SolverState, rate: LearningRate) -> SolverState:
    """Returns the state before the first step with a rate and a smoothing."""
    held = DecayedRate.of(rate.learning_rate, rate.num_steps, rate.smoothing)
    return state._replace(optimizer_state=(*state.optimizer_state[:-1], held))


def with_smoothing(run: Run, state: SolverState) -> Run:
    """Gives a run the smoothing of its state, unless the caller named another one."""
    kept = _of_state(state)
    if kept is None or jnp.isnan(kept.smoothing) or not _is_measured(run.estimator):
        return run
    far = float(kept.smoothing)
    return run._replace(estimator=dataclasses.replace(run.estimator, smoothing=far))


def _of_state(state: SolverState) -> DecayedRate | None:
    """Returns the rate in a state, if it was measured."""
    held = state.optimizer_state
    is_measured = isinstance(held, tuple) and held and isinstance(held[-1], DecayedRate)
    return held[-1] if is_measured else None


def _is_measured(estimator: GradientEstimator) -> TypeGuard[FiniteDifferences]:
    """Returns whether a run measures the smoothing of an estimator."""
    return isinstance(estimator, FiniteDifferences) and not estimator.is_named


def of_line(line: dict[str, Any] | None) -> LearningRate | None:
    """Reads the rate that was measured in the first line of a journal."""
    fields = None if line is None else line.get("learning_rate")
    return None if fields is None else LearningRate(**fields)


def _found(run: Run, state: SolverState, budget: Budget) -> LearningRate:
    """Measures the rate at the start of a run, for an unknown end."""
    directions = step.abstract_points(run, state).directions
    probe = _probe(run, state.params, state.key)
    probe = probe._replace(distribution=directions.distribution)
    try:
        if budget.num_steps < 2:
            raise ValueError(f"num_steps must be ≥ 2; got {budget.num_steps}.")
        found = endless_rate(probe)
        if _is_measured(run.estimator):
            return with_measured_smoothing(found, probe)
        return found._replace(smoothing=getattr(run.estimator, "smoothing", None))
    except ValueError as error:
        raise ValueError(f"{error} Or name an optimizer with a rate.") from None


def _probe(run: Run, params: optax.Params, key: jax.Array) -> Probe:
    """Returns the probe of a run with traced functions."""
    distribution = getattr(run.estimator, "distribution", sphere())
    return Probe(
        run.fun, run.sample, params, key, distribution, run.evaluator, run.bounds
    )


def advice(
    run: Run,
    params: optax.Params,
    key: jax.typing.ArrayLike,
    num_steps: int | None,
    rate: LearningRate | None,
) -> str:
    """Returns what to try if the loss of a run rises, measured at its start.

    Args:
      run: The run, with traced functions.
      params: The parameters at its start, as the caller keeps them.
      key: Its key.
      num_steps: The number of its steps, if it is known.
      rate: The learning rate that was measured before the first step, if one was.
    """
    if rate is not None:
        lower = rate.learning_rate / 3
        return f"Try a third of the rate that was measured: radazo({lower:.2g})."
    probe = _probe(run, trees.as_arrays(params), keys.as_key(key))
    try:
        found = with_measured_smoothing(endless_rate(probe), probe).over(num_steps)
    except ValueError:
        return "Try a third of the learning rate."
    return (
        f"Measured at the start: radazo({found.learning_rate:.2g}) with "
        f"smoothing={found.smoothing:.2g}. Without an optimizer and a smoothing, "
        "train takes these."
    )


def _scale(
    updates: optax.Updates,
    state: DecayedRate,
    params: optax.Params | None = None,
    **extra_args: object,
) -> tuple[optax.Updates, DecayedRate]:
    del params, extra_args
    rate = state.now()
    updates = jax.tree.map(lambda u: -rate.astype(u.dtype) * u, updates)
    count = optax.safe_increment(state.count)
    return updates, state._replace(count=count, learning_rate=rate)


# The same object at each call, so that runs compile once.
@functools.cache
def radazo_at_measured_rate(
    replayed: bool, max_directions: int
) -> GradientTransformationExtraArgs:
    """Builds R-AdaZO with bias correction, at the rate in its state, 0 at first.

    Runs at other rates or of other numbers of steps share a program.

    Args:
      replayed: Whether moments are replayed.
      max_directions: The largest number of directions per step, with replayed moments.
    """

    def unknown(params: optax.Params) -> DecayedRate:
        del params
        return DecayedRate.of(0.0, None)

    rate = optax.GradientTransformationExtraArgs(unknown, _scale)
    if replayed:
        moments = scale_by_replayed_radazo(
            bias_correction=True, max_directions=max_directions
        )
        return chain_in_place(moments, rate)
    return optax.chain(scale_by_radazo(bias_correction=True), rate)
