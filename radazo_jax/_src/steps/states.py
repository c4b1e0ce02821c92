"""`Run`, `SolverState` and `StepInfo`: runs, and their checks."""

from collections.abc import Callable
from typing import Any, NamedTuple, SupportsInt, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax

from radazo_jax._src.base import checks, shown, trees
from radazo_jax._src.estimates.contracts import (
    Evaluator,
    GradientEstimator,
    Objective,
    check_estimator,
    check_evaluator,
)
from radazo_jax._src.estimates.vectorized import vectorized
from radazo_jax._src.steps.box import Bounds

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

    A program is made of its functions as `step.with_traced_functions` traces them.

    Attributes:
      fun: The loss, a function of the parameters and of a batch; `None` if JAX does
        not evaluate it.
      sample: A function from a key to a batch, a tuple of arguments; `None` without.
      optimizer: An Optax transformation.
      estimator: An estimator.
      evaluator: The evaluator of the points.
      bounds: The box in which parameters and points stay; `None` without.
    """

    fun: Objective | None
    sample: Callable[[jax.Array], object] | None
    optimizer: optax.GradientTransformation
    estimator: GradientEstimator
    evaluator: Evaluator = vectorized()
    bounds: Bounds | None = None


class StepInfo(NamedTuple):
    """The values of a step, and what became of it.

    Attributes:
      value: The value at θ, or a substitute for it: at least float32, shape ().
      slope: The derivative along the estimate, according to the values: shape ().
      values: The values at the points, θ first: [n], or [n, G] if the function returns
        several.
      failed: Number of values that were not finite: int32, shape ().
      skipped: Whether no value could be used, so that neither the parameters nor the
        state of the optimizer changed: bool, shape ().
      aux: The auxiliary output at the first point; `None` without `has_aux`.
    """

    value: jax.Array
    slope: jax.Array
    values: jax.Array
    failed: jax.Array
    skipped: jax.Array
    aux: Any = None


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
    estimator_state: optax.OptState
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


def check_known(
    tree: object, what: str = "params, key, state, optimizer and estimator must hold"
) -> None:
    """Raises if arrays of a run are traced; `what` names them and says what to be."""
    if trees.is_traced(tree):
        raise TypeError(
            f"{what} known arrays; got traced ones. A run compiles its own loop, so "
            "call it outside of jax.jit, jax.vmap and jax.grad; inside, take "
            "value_and_grad or estimate_gradient."
        )


def check_state(run: Run, state: object, *, leaves: bool = False) -> None:
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
        pair = difference(expected, got, leaves)
        if pair is not None:
            raise ValueError(
                f"state must be of this {name} and these params, with {pair[0]}; got "
                f"{pair[1]}. Continue with the {name} that made it, or start another "
                "run from state.params."
            )


def check_params_of(state: SolverState, params: optax.Params) -> None:
    """Raises unless the parameters of a state have the tree and the shapes of others.

    Args:
      state: A state that replaces `params`.
      params: The parameters that the caller has passed with it.
    """
    expected, got = (
        [jax.tree.structure(x), *map(jnp.shape, jax.tree.leaves(x))]
        for x in (params, state.params)
    )
    if expected != got:
        raise ValueError(
            f"state must have parameters like params, {shown.tree(params)}; got "
            f"{shown.tree(state.params)}. Pass the params of its run, or begin another "
            "run without state."
        )


def difference(
    expected: optax.OptState, got: optax.OptState, leaves: bool
) -> tuple[str, str] | None:
    """Compares two trees; returns their structures, or their first unequal leaves."""
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


def room(done: SupportsInt) -> int:
    """Returns the number of steps that can still be counted, at least 1."""
    return max(MOST_STEPS - 1 - int(done), 1)


def check_room(done: SupportsInt, num_steps: int = 1) -> None:
    """Raises if a run would be longer than its steps can be counted."""
    if num_steps > MOST_STEPS - int(done):
        raise ValueError(
            f"num_steps must end a run before 2^31 steps; got {num_steps} after "
            f"{int(done)}. A step draws by its number: begin another run, with "
            "another key."
        )


def check_run(
    optimizer: object, estimator: object, evaluator: object = vectorized()
) -> tuple[optax.GradientTransformation, GradientEstimator]:
    """Returns an optimizer and an estimator; raises unless they are what is named."""
    checks.check_called(optimizer)
    if isinstance(optimizer, GradientEstimator):
        raise TypeError(
            "optimizer must be an Optax transformation such as radazo(1e-3); got a "
            "GradientEstimator. Are optimizer and estimator swapped?"
        )
    if not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
        advice = " Pass a method to minimize." * callable(optimizer)
        raise TypeError(
            "optimizer must be an Optax transformation such as radazo(1e-3); got "
            f"{shown.given(optimizer)}.{advice}"
        )
    check_estimator(estimator)
    check_evaluator(evaluator)
    return optimizer, cast(GradientEstimator, estimator)


class RunError(RuntimeError):
    """A run that cannot continue, with its results so far.

    Attributes:
      state: The state after the last step that was done: pass it as `state` to
        continue.
      result: The result up to there, as the function that was called returns it;
        `None` if there is none.
    """

    def __init__(
        self, message: str, state: SolverState | None = None, result: object = None
    ):
        super().__init__(message)
        self.state = state
        self.result: Any = result


class Policy(NamedTuple):
    """The rule by which failures end a run.

    Attributes:
      on_failure: "drop" or "raise".
      max_consecutive_failures: The number of steps skipped in a row.
    """

    on_failure: str
    max_consecutive_failures: int

    @classmethod
    def of(cls, on_failure: str, max_consecutive_failures: int) -> "Policy":
        """Returns the policy of these arguments, checked."""
        if on_failure not in ("drop", "raise"):
            raise ValueError(
                f"on_failure must be 'drop' or 'raise'; got {on_failure!r}."
            )
        checks.check_int_at_least(
            "max_consecutive_failures", max_consecutive_failures, 1
        )
        return cls(on_failure, max_consecutive_failures)

    def limits(self, failures: Failures) -> np.ndarray:
        """Returns the failures that end a run: in all, and in a row; int32, [2]."""
        so_far = int(failures.evaluations)
        most = so_far if self.on_failure == "raise" else np.iinfo(np.int32).max - 1
        return np.array([most + 1, self.max_consecutive_failures], np.int32)

    def check_used(self, usable: bool, steps: int, last: str = "") -> None:
        """Raises a RunError if none of the steps of a run had a value to use."""
        if not steps or usable:
            return
        what = f"fun had no finite value to use in any of the run's {steps} steps."
        raise _failed(what, last, "continues the run")

    def check(
        self, failures: Failures, steps: int, limits: np.ndarray, last: str = ""
    ) -> None:
        """Raises a RunError if the failures have reached the limits.

        Args:
          failures: The counts so far.
          steps: The number of steps of the whole run.
          limits: The limits.
          last: The last failure.
        """
        failures = jax.device_get(failures)
        if failures.evaluations < limits[0] and failures.in_a_row < limits[1]:
            return
        step = steps - 1
        if self.on_failure == "raise":
            what = f"fun failed at step {step}, and on_failure is 'raise'."
            raise _failed(what, last, "is the run without what failed")
        what = (
            f"fun had no finite value to use in {limits[1]} steps in a row "
            f"(max_consecutive_failures), up to step {step}."
        )
        raise _failed(what, last, "continues the run")


def _failed(what: str, last: str, meaning: str) -> RunError:
    """Returns the error of a run that failures end; `run` adds the result."""
    cause = f" The last failure: {last}." if last else ""
    return RunError(f"{what}{cause} The error's result {meaning}.")


def exceeds(state: SolverState, limits: jax.Array) -> jax.Array:
    """Returns whether the failures have reached the limits of a policy."""
    reached = jnp.stack([state.failures.evaluations, state.failures.in_a_row])
    return jnp.any(reached >= limits)


def resumed(state: SolverState) -> SolverState:
    """Returns the state to start a call with, which forgets failures in a row."""
    none = trees.as_scalar(0, jnp.int32)
    return state._replace(failures=state.failures._replace(in_a_row=none))


def failure_counts(failures: Failures) -> dict[str, str]:
    """Returns the failures so far, for a progress bar."""
    evaluations, skipped, _ = (int(count) for count in failures)
    shown = {"failed": evaluations, "skipped": skipped}
    return {name: str(count) for name, count in shown.items() if count}
