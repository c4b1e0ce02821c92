"""The learning rate and the smoothing of a run that names no optimizer."""

import dataclasses
from typing import Any, NamedTuple, TypeGuard

import optax

from radazo_jax._src import trees
from radazo_jax._src.base import GradientEstimator
from radazo_jax._src.directions.dense import sphere
from radazo_jax._src.directions.signs import orthonormal
from radazo_jax._src.estimators.differences import FiniteDifferences, forward_difference
from radazo_jax._src.numbers import keys
from radazo_jax._src.runs import learning_rate
from radazo_jax._src.runs.journal import Journal
from radazo_jax._src.runs.learning_rate import LearningRate
from radazo_jax._src.runs.smoothing import Evaluated
from radazo_jax._src.runs.stop import Budget
from radazo_jax._src.steps import step
from radazo_jax._src.steps.states import Run, SolverState
from radazo_jax._src.transforms import decayed

# Above so many parameters, moments are replayed, not stored.
_LARGE = 1 << 24


def default(
    size: int, estimator: GradientEstimator | None
) -> tuple[optax.GradientTransformation, GradientEstimator]:
    """R-AdaZO at a rate that is still to be measured, and an estimator.

    Args:
      size: The number of parameters.
      estimator: The estimator, if the caller names one.
    """
    chosen: Any = forward_difference(orthonormal()) if estimator is None else estimator
    most = max(getattr(chosen, "num_directions", 0), 64)
    return decayed.radazo_at(0.0, None, size > _LARGE, most), chosen


def of_run(
    run: Run, state: SolverState, budget: Budget, begins: bool, file: Journal | None
) -> tuple[Run, SolverState, LearningRate | None]:
    """A run that names no optimizer, with a learning rate and a smoothing.

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
        rate = _of_journal(file) or _found(run, state, budget)
        budget.spend(rate.num_evaluations)
        if rate.num_steps is None:
            rate = rate.over(budget.total)
        held = decayed.with_rate(
            state.optimizer_state, rate.learning_rate, rate.num_steps, rate.smoothing
        )
        state = state._replace(optimizer_state=held)
    end = decayed.end_of(state.optimizer_state)
    if end is not None:
        budget.end_at(end, int(state.step))
    far = decayed.smoothing_of(state.optimizer_state)
    if far is not None and _is_measured(run.estimator):
        run = run._replace(estimator=dataclasses.replace(run.estimator, smoothing=far))
    return run, state, rate


def _is_measured(estimator: GradientEstimator) -> TypeGuard[FiniteDifferences]:
    """Whether a run measures the smoothing of an estimator."""
    return isinstance(estimator, FiniteDifferences) and not estimator.is_named


def _of_journal(file: Journal | None) -> LearningRate | None:
    """The rate in the first line of a journal."""
    line = None if file is None else file.line
    fields = None if line is None else line.get("learning_rate")
    return None if fields is None else LearningRate(**fields)


def _found(run: Run, state: SolverState, budget: Budget) -> LearningRate:
    """The rate that is measured at the start of a run, for an unknown end."""
    directions = step.abstract_points(run, state).directions
    distribution = getattr(directions, "distribution", sphere())
    evaluated = Evaluated(run.fun, run.sample, distribution, run.evaluator, run.bounds)
    try:
        if budget.num_steps < 2:
            raise ValueError(f"num_steps must be ≥ 2; got {budget.num_steps}.")
        found = learning_rate.measured(evaluated, state.params, state.key)
        if _is_measured(run.estimator):
            return learning_rate.with_smoothing(
                found, evaluated, state.params, state.key
            )
        return found._replace(smoothing=getattr(run.estimator, "smoothing", None))
    except ValueError as error:
        raise ValueError(
            f"{error} Or name an optimizer with a learning rate, such as radazo(1e-3)."
        ) from None


class Advice(NamedTuple):
    """A rate and a smoothing to try if the loss of a run rises.

    Attributes:
      run: The run, with traced functions.
      params: The parameters at its start, as the caller keeps them.
      key: Its key.
      num_steps: The number of its steps, if it is known.
      rate: The learning rate that was measured before the first step, if one was.
    """

    run: Run
    params: Any
    key: Any
    num_steps: int | None
    rate: LearningRate | None

    def text(self) -> str:
        """A sentence with a rate and a smoothing, which are measured at the start."""
        if self.rate is not None:
            lower = self.rate.learning_rate / 3
            return f"Try a third of the rate that was measured: radazo({lower:.2g})."
        run = self.run
        distribution = getattr(run.estimator, "distribution", sphere())
        given = run.fun, run.sample, distribution, run.evaluator, run.bounds
        at = Evaluated(*given), trees.as_arrays(self.params), keys.as_key(self.key)
        try:
            found = learning_rate.with_smoothing(learning_rate.measured(*at), *at)
        except ValueError:
            return "Try a third of the learning rate."
        found = found.over(self.num_steps)
        return (
            f"Measured at the start: radazo({found.learning_rate:.2g}) with "
            f"smoothing={found.smoothing:.2g}. Without an optimizer and a smoothing, "
            "minimize takes these."
        )
