"""The end of runs in which too many evaluations fail."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from radazo_jax._src import checks
from radazo_jax._src.optimize.states import SolverState


class RunError(RuntimeError):
    """A run that cannot continue, with its results so far.

    Attributes:
      state: The state after the last step that was done: pass it as `state` to
        continue.
    """

    def __init__(self, message: str, state: SolverState):
        super().__init__(message)
        self.state = state


class Policy(NamedTuple):
    """The rule by which failures end a run.

    Attributes:
      on_failure: "drop", "raise" or "retry".
      max_consecutive_failures: The number of steps skipped in a row.
    """

    on_failure: str
    max_consecutive_failures: int

    @classmethod
    def of(cls, on_failure: Any, max_consecutive_failures: Any) -> "Policy":
        """Returns the policy of these arguments, checked."""
        if on_failure not in ("drop", "raise", "retry"):
            raise ValueError(
                f"on_failure must be 'drop', 'raise' or 'retry'; got {on_failure!r}."
            )
        checks.check_int_at_least(
            "max_consecutive_failures", max_consecutive_failures, 1
        )
        return cls(on_failure, max_consecutive_failures)

    def limits(self, state: SolverState) -> np.ndarray:
        """The failures that end a run from here: in all, and in a row; int32, [2]."""
        so_far = int(state.failures.evaluations)
        most = so_far if self.on_failure == "raise" else np.iinfo(np.int32).max - 1
        return np.array([most + 1, self.max_consecutive_failures], np.int32)

    def check_used(self, state: SolverState, steps: int, last: str = "") -> None:
        """Raises a RunError if none of the steps of a run had a value to use."""
        if not steps or int(state.failures.in_a_row) < steps:
            return
        cause = f" The last failure: {last}." if last else ""
        raise RunError(
            f"fun had no finite value to use in any of the run's {steps} steps.{cause} "
            "The error's state continues the run."
            + checks.refer_to("minimize_black_box"),
            state,
        )

    def check(self, state: SolverState, limits: np.ndarray, last: str = "") -> None:
        """Raises a RunError if the failures have reached the limits."""
        failures = jax.device_get(state.failures)
        if failures.evaluations < limits[0] and failures.in_a_row < limits[1]:
            return
        cause = f" The last failure: {last}." if last else ""
        if self.on_failure == "raise":
            raise RunError(
                f"fun failed at step {int(state.step) - 1}, and on_failure is 'raise'."
                f"{cause} The error's state is the run without what failed."
                + checks.refer_to("minimize_black_box"),
                state,
            )
        raise RunError(
            f"fun had no finite value to use in {failures.in_a_row} steps "
            f"in a row (max_consecutive_failures), up to step {int(state.step) - 1}."
            f"{cause} The error's state continues the run."
            + checks.refer_to("minimize_black_box"),
            state,
        )


def exceeds(state: SolverState, limits: jax.Array) -> jax.Array:
    """Whether the failures have reached the limits of a policy."""
    reached = jnp.stack([state.failures.evaluations, state.failures.in_a_row])
    return jnp.any(reached >= limits)


def resumed(state: SolverState) -> SolverState:
    """The state to start a call with: what failed in a row before does not count."""
    none = jnp.zeros((), jnp.int32)
    return state._replace(failures=state.failures._replace(in_a_row=none))


def failure_counts(state: SolverState) -> dict[str, str]:
    """The failures so far, for a progress bar."""
    evaluations, skipped, _ = (int(count) for count in state.failures)
    shown = {"failed": evaluations, "skipped": skipped}
    return {name: str(count) for name, count in shown.items() if count}
