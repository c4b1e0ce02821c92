"""The stages of a run of the default method, of which each is an ordinary run.

What the values have said so far decides which method takes the next steps:

===============  =========================================  ==========================
method           is over                                    what follows
===============  =========================================  ==========================
slopes           f(θ) has changed: noise                    an evolution strategy, wide
slopes           long differences of a function in steps    an evolution strategy, wide
                 lead nowhere
slopes           the gradient is as small as at a minimum   a restart: a strategy
slopes           five gradients in a row led to a jump      a strategy of medium width
slopes           three gradients in a row led nowhere       a narrow strategy
evolution        its points have nothing to tell            a restart with twice the
                                                            population
===============  =========================================  ==========================

If no restart is left, the run ends before one. By default there is none without a
budget, and any number with one. What follows depends on the state of the run alone, so
that a journal replays it.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from radazo_jax._src import programs, trees
from radazo_jax._src.base import GradientEstimator
from radazo_jax._src.estimators import scales
from radazo_jax._src.estimators.cma import cma
from radazo_jax._src.estimators.covariance import CmaState
from radazo_jax._src.estimators.full import full_difference
from radazo_jax._src.estimators.gathered import FullDifferenceState
from radazo_jax._src.search.whole import whole
from radazo_jax._src.steps import defaults, step, units
from radazo_jax._src.steps.states import Earlier, Run, SolverState

# The first step sizes of a strategy: at a start, next to a jump, and once slopes have
# led nowhere.
_WIDE, _ACROSS, _NARROW = 0.3, 0.1, 0.03

# The classes of functions that slopes show.
NOISY, IN_STEPS, SCALED, SMOOTH = "noisy", "in steps", "scaled", "smooth"


class Stage(NamedTuple):
    """A stage of a run of the default method.

    Attributes:
      step: The number of its first step.
      method: Its estimator, in words.
      reason: The reason for which it follows the one before.
    """

    step: int
    method: str
    reason: str


class Stages:
    """The run that takes the next step, and what follows when it is over.

    Attributes:
      run: The run.
      done: The stages so far, the latest last; empty if a method was named.
    """

    run: Run

    def __init__(self, run: Run, state: SolverState, restarts: float = math.inf):
        """The stages of a run.

        Args:
          run: The stage of the state; others may follow if it is `staged`.
          state: The state to begin with.
          restarts: The number of restarts after which the run ends, before its budgets
            do.
        """
        self.run = run
        self.done: list[Stage] = []
        self._restarts_left = restarts
        if run.staged:
            begun = Stage(0, repr(run.estimator), "")
            if state.earlier is not None:
                reason = "the run continues from a state of this stage"
                begun = begun._replace(step=int(state.earlier.step), reason=reason)
            self.done.append(begun)

    def is_over(self, state: SolverState) -> bool:
        """Whether the stage of a state can take no further step that is worth it."""
        return self.run.staged and bool(is_over(self.run, state))

    def ended(self, state: SolverState) -> str:
        """The reason for which the run ends with this state, or an empty string."""
        if not self.is_over(state):
            return ""
        ends = self._restarts_left <= 0 and _is_searched(state)
        return "converged" if ends or _is_fixed(state) else ""

    def stands_at(self, state: SolverState) -> Any:
        """The parameters of a stage that is over, before any step that is not judged.

        Args:
          state: The state after the latest step.
        """
        judges = self.run.search.judges
        return step.before(self.run, state) if judges else state.params

    def following(self, state: SolverState) -> SolverState:
        """The state in which the next step begins: of the next stage, if one is over.

        Args:
          state: The state after the latest step.
        """
        return self._next(state) if self.is_over(state) else state

    def _next(self, state: SolverState) -> SolverState:
        """The state in which the next stage begins."""
        params = self.stands_at(state)
        earlier = _earlier(state, params)
        self._restarts_left -= _is_searched(state)
        estimator, scale, reason = _following(self.run, state, params)
        self.run = _with(self.run, estimator)
        self.done.append(Stage(int(state.step), repr(estimator), reason))
        begun = step.begun(self.run, params, state.key)
        strategy = begun.estimator_state._replace(scale=scale)
        return trees.copy(
            begun._replace(
                estimator_state=strategy,
                step=state.step,
                failures=state.failures,
                earlier=earlier,
            )
        )

    def last_params(self, state: SolverState) -> Any:
        """The parameters after the last step, or the best ones at the end of a stage.

        Args:
          state: The state after the last step.
        """
        if state.earlier is None:
            return step.last_params(self.run, state)
        value = programs.of(step.value_after, self.run, state)(state)
        # Of equal values, the first one: on a plateau, later parameters just drift.
        return state.params if value < state.earlier.value else state.earlier.params


def is_over(run: Run, state: SolverState) -> jax.Array:
    """Whether further steps of a stage would teach nothing: bool, shape ()."""
    estimator, search = run.estimator, run.search
    over = estimator.exhausted(state.estimator_state)
    return jnp.logical_or(over, search.exhausted(state.search_state))


def _earlier(state: SolverState, params: Any) -> Earlier:
    """The stages up to the end of one, which ends at these parameters."""
    value = _value_of(state.estimator_state)
    found = Earlier(state.step, value, params)
    if state.earlier is None or value < state.earlier.value:
        return found
    return state.earlier._replace(step=state.step)


def _is_searched(state: SolverState) -> bool:
    """Whether a stage that is over has completed a search for a minimum.

    Slopes have not if they led nowhere: a strategy continues their search.
    """
    found = state.estimator_state
    if isinstance(found, CmaState):
        return True
    return bool(found.is_small) and kind_of(found) not in (NOISY, IN_STEPS)


def kind_of(found: FullDifferenceState) -> str:
    """The class to which a function belongs, as far as its slopes have shown."""
    if found.noise > 0:
        return NOISY
    if found.in_steps:
        return IN_STEPS
    return SCALED if found.sizes.known else SMOOTH


def _is_fixed(state: SolverState) -> bool:
    """Whether the bounds of all parameters are equal, so that nothing can move."""
    found = state.estimator_state
    return not isinstance(found, CmaState) and not bool(jnp.any(found.steps != 0))


def of_state(run: Run, state: SolverState) -> Run:
    """The stage of the default method to which a state belongs.

    Args:
      run: The first stage.
      state: The state of any stage.
    """
    found = state.estimator_state
    if not isinstance(found, CmaState):
        return run
    return _with(run, cma(len(found.normals), _WIDE))


def with_tolerance(run: Run, tolerance: float | None) -> Run:
    """The first stage, which is over within a tolerance."""
    return run._replace(estimator=full_difference(tolerance=tolerance))


def _with(run: Run, estimator: GradientEstimator) -> Run:
    """The run with a strategy, whose steps are taken as they are."""
    return run._replace(
        optimizer=defaults.whole_steps(), estimator=estimator, search=whole()
    )


def _following(
    run: Run, state: SolverState, params: Any
) -> tuple[GradientEstimator, jax.Array, str]:
    """The strategy that follows a stage, the scale of its points, and the reason."""
    found = state.estimator_state
    if isinstance(found, CmaState):
        size = 2 * len(found.normals)
        return cma(size, _WIDE), found.scale, "its points had nothing more to tell"
    z = units.to_units(run.units, params)
    scale = scales.units(
        trees.as_flat(z), units.bounds_in(run.units, run.bounds, params)
    )
    kind = kind_of(found)
    if kind == NOISY:
        return cma(step_size=_WIDE), scale, "the value at one point changed"
    if kind == IN_STEPS:
        return cma(step_size=_WIDE), scale, "the function is one of steps"
    if found.is_small:  # Of many minima, another one may be lower.
        return cma(step_size=_WIDE), scale, "gradients ended at a minimum"
    if found.sizes.known:
        scale = found.sizes.guesses
    if state.search_state.at_jumps:
        return cma(step_size=_ACROSS), scale, "gradients led to a jump"
    return cma(step_size=_NARROW), scale, "gradients led nowhere"


def _value_of(found: Any) -> jax.Array:
    """The value at the end of a stage, infinite if there is none: shape ()."""
    value = found.level if isinstance(found, CmaState) else found.base
    return jnp.where(jnp.isfinite(value), value, jnp.inf).astype(value.dtype)
