"""Steps on values from elsewhere: by hand, from workers or from a journal."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import numpy as np
import optax

from radazo_jax._src.base import checks, programs, shown, trees
from radazo_jax._src.estimates.contracts import Loss
from radazo_jax._src.estimates.points import candidates
from radazo_jax._src.runs import history
from radazo_jax._src.runs.journal import Record, lowest, of_points
from radazo_jax._src.runs.results import Best
from radazo_jax._src.steps import box, states, step
from radazo_jax._src.steps.states import Run, SolverState

_PART = 1000  # Steps of a journal.


class Stepper:
    """Steps of a run on the device, in place, whose values come from elsewhere.

    Attributes:
      run: The run.
      state: The state after the latest step.
      checksum: The checksum of its parameters, on the device.
      names: The names of the numbers of a step.
      size: The number of points of a step.
      evaluations: The number of values so far.
    """

    def __init__(self, run: Run, state: SolverState):
        """Compiles nothing yet.

        Args:
          run: The run, with traced functions.
          state: The state to begin with, whose arrays are reused.
        """
        self.run, self.state = run, state
        self.checksum = trees.checksum_of(state.params)
        self.names = history.names_of_numbers(state)
        self.size, self.evaluations = step.num_points(run, state), 0
        self._points: Callable[[SolverState], optax.Params] | None = None
        self._takes: Callable[..., Any] | None = None

    @property
    def step(self) -> int:
        """The number of steps that were taken."""
        return int(self.state.step)

    @property
    def params(self) -> optax.Params:
        """The parameters, a tree of NumPy arrays."""
        return trees.as_numpy(self.state.params)

    @property
    def dtype(self) -> np.dtype:
        """The dtype of values."""
        return trees.widest(self.state.params)

    def points(self) -> optax.Params:
        """Returns the points of the next step, on the device."""
        if self._points is None:
            self._points = programs.of(_points_of_step, self.run, self.state)
        points = self._points(self.state)
        states.check_known(points)
        return points

    def take(self, values: np.ndarray) -> jax.Array:
        """Takes a step; returns its numbers, which `names` names."""
        if self._takes is None:
            self._takes = programs.of(
                take_with_values, self.run, self.state, values, donate=[0]
            )
        self.state, numbers, self.checksum = self._takes(self.state, values)
        self.evaluations += len(values)
        states.check_known(numbers)  # The optimizer may hold traced numbers.
        return numbers

    def row(self, record: Record, numbers: jax.Array | np.ndarray) -> dict[str, float]:
        """Returns the numbers of a step for a `History`, by name."""
        row = dict(zip(self.names, np.asarray(numbers), strict=True))
        row |= {"step": record.step, "seconds": record.seconds}
        return row | {"evaluations": len(record.values)}

    def rebuild(
        self, records: Sequence[Record], exact: bool = True
    ) -> list[dict[str, float]]:
        """Takes the steps of records, without an evaluation.

        Args:
          records: The values of the steps.
          exact: Whether to compare the parameters with the checksums of the records.

        Returns:
          The numbers of each step for a `History`, by name.

        Raises:
          ValueError: If the parameters differ from the run's. The steps were taken.
        """
        rows: list[dict[str, float]] = []
        on_cpu = jax.default_backend() == "cpu"
        # Part by part: what lies on the device takes a hundred times the memory.
        for first in range(0, len(records), _PART):
            part = records[first : first + _PART]
            sums, numbers = [], []
            for record in part:
                sums.append(self.checksum)
                numbers.append(self.take(record.values))
                if on_cpu:
                    # Several hundred queued steps with collectives end the process
                    # there.
                    jax.block_until_ready(self.checksum)
            for checksum, record in zip(jax.device_get(sums), part, strict=True):
                if exact and record.params not in (0, int(checksum)):
                    raise ValueError(
                        "journal must be rebuilt by the optimizer, the versions and "
                        "the kind of machine that it was written with; got other "
                        f"parameters before step {record.step}. With exact=False, "
                        "replay rebuilds it up to rounding." + checks.refer_to("replay")
                    )
            rows += map(self.row, part, jax.device_get(numbers))
        return rows


class AskTellOptimizer:
    """A run of an optimizer that asks for points and is told their values.

    Attributes:
      best: The best of the points that were asked for: a `Best`.
    """

    def __init__(self, stepper: Stepper, best: Best | None = None):
        """Begins with the steps.

        Args:
          stepper: Makes points, and takes steps.
          best: The best so far; the start without a value if it is `None`.
        """
        self._stepper, self.best = stepper, best or Best(stepper.params)
        self._asked: optax.Params = None  # Once they are asked for.
        self._values: list[np.ndarray] = []  # The values that were told.
        self._following: optax.Params = None  # The next points, computed meanwhile.

    def __repr__(self) -> str:
        return shown.on_a_line(
            self,
            step=str(self._stepper.step),
            params=shown.tree(self.params),
            best=repr(self.best),
        )

    @property
    def state(self) -> SolverState:
        """The state of the run, to continue from: a copy in NumPy arrays."""
        found: SolverState = trees.as_numpy(self._stepper.state)
        return found

    @property
    def params(self) -> optax.Params:
        """The parameters, a tree of NumPy arrays."""
        return self._stepper.params

    def ask(self) -> optax.Params:
        """Returns the points of the step whose values are missing.

        Another call returns the same points. They are the caller's.

        Returns:
          A tree like the parameters of NumPy arrays with one additional axis, the
          first, of size n.
        """
        if self._asked is None:
            with self._precision():
                asked = self._following
                asked = self._stepper.points() if asked is None else asked
                self._asked = jax.tree.map(np.asarray, asked)
        done = sum(map(len, self._values))
        return jax.tree.map(lambda x: np.array(x[done:]), self._asked)

    def _precision(self) -> AbstractContextManager[object]:
        """Returns the context in which the parameters keep their precision."""
        return trees.precision_of(self._stepper.state.params)

    def tell(self, values: jax.typing.ArrayLike | Sequence[object]) -> None:
        """Takes the step once the values at all of its points are known.

        Args:
          values: The values at the first points of `ask`, [m], NaN for points that
            failed. If they are not all, `ask` returns the others. An estimator such as
            `evolution_strategy` also takes several values for each point, [m, G].

        Raises:
          TypeError, ValueError: If the values are no numbers, are too many or have
            another shape; if their points were not asked for or have been told already.
        """
        if self._asked is None:
            raise ValueError(
                "values must follow an ask, and be told once; got values whose points "
                "were not asked for, or were told already."
            )
        number = self._stepper.step
        states.check_room(number)
        given = checks.as_values(values, self._stepper.dtype)
        n = self._stepper.size - sum(map(len, self._values))
        alike = all(given.shape[1:] == told.shape[1:] for told in self._values)
        if not (given.ndim and 0 < len(given) <= n and alike):
            raise ValueError(
                f"values must have one value per point, shape ({n},); got shape "
                f"{given.shape}."
            )
        if len(given) < n:
            self._values.append(given)
            return
        with self._precision():
            so_far = np.concatenate([*self._values, given])
            self.take(Record(number, so_far, 0, np.nan))

    def take(
        self,
        record: Record,
        values: np.ndarray | None = None,
        infos: Sequence[object] | None = None,
    ) -> dict[str, float]:
        """Takes a step that was asked for.

        Args:
          record: The values.
          values: The values as they were returned, if they may be rounded otherwise.
          infos: The objects that came with them.

        Returns:
          The numbers of the step for a `History`, by name.
        """
        self.note(record.values if values is None else values, infos)
        numbers = self._stepper.take(record.values)
        self._following = self._stepper.points()  # Computed meanwhile.
        return self._stepper.row(record, numbers)

    def note(self, values: np.ndarray, infos: Sequence[object] | None = None) -> None:
        """Compares the points of the step with the best; others are asked for next.

        Args:
          values: The values at all points.
          infos: The objects that came with them.
        """
        i, value = lowest(of_points(values.astype(np.float64)))
        if value < self.best.value:
            point = jax.tree.map(lambda x: np.array(x[i]), self._asked)
            info = None if infos is None else infos[i]
            self.best = Best(point, float(value), self._stepper.evaluations + i, info)
        self._asked, self._following, self._values = None, None, []


def begin(
    run: Run,
    params: optax.Params,
    key: jax.typing.ArrayLike,
    state: SolverState | None = None,
) -> SolverState:
    """Returns the state to begin with, a copy, because steps are taken in place.

    Args:
      run: The run.
      params: The parameters of the caller.
      key: The key of the caller.
      state: A state to continue from instead.
    """
    if state is None:
        state = step.start(run, params, key)
    else:
        states.check_state(run, state, leaves=True)
        states.check_params_of(state, params)
    states.check_known(state)
    checks.check_not_deleted("state", state)
    return trees.copies(state)


def _points_of_step(run: Run, state: SolverState) -> optax.Params:
    """Returns the points of a step, a tree like the parameters: [n, …]."""
    states.check_state(run, state)
    points, _ = step.points_at(run, state, _traced_loss(run, state))
    asked = candidates(points, state.params)
    return jax.vmap(lambda params: box.project(run.bounds, params))(asked)


def take_with_values(
    run: Run, state: SolverState, values: jax.Array
) -> tuple[SolverState, jax.Array, jax.Array]:
    """Takes a step, given its values.

    Args:
      run: The run.
      state: The state before.
      values: The values, [n] or [n, G].

    Returns:
      The state after, the numbers of the step, and the checksum of the parameters.
    """
    states.check_state(run, state)
    asked = step.points_at(run, state, _traced_loss(run, state))
    state, info = step.advance(run, state, asked, asked[0].split(values))
    return state, history.numbers(info, state), trees.checksum(state.params)


def _traced_loss(run: Run, state: SolverState) -> Loss | None:
    """Returns the loss if JAX evaluates it, from which `low_rank` learns."""
    return None if run.fun is None else step.loss_at(run, state)
