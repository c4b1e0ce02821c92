"""`Told`: steps on values from elsewhere, by hand, from workers or from a journal."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from radazo_jax._src.base import checks, programs, shown, trees
from radazo_jax._src.base.names import checks_names
from radazo_jax._src.estimates.contracts import (
    Evaluator,
    GradientEstimator,
    Objective,
    check_evaluator,
)
from radazo_jax._src.estimates.points import candidates
from radazo_jax._src.estimates.vectorized import vectorized
from radazo_jax._src.runs import history
from radazo_jax._src.runs.journal import Journal, Record, line_of_run, lowest, of_points
from radazo_jax._src.runs.lines import Path
from radazo_jax._src.runs.results import Best
from radazo_jax._src.steps import box, states, step
from radazo_jax._src.steps.box import BoundsLike
from radazo_jax._src.steps.states import Run, SolverState
from radazo_jax._src.steps.step import traced
from radazo_jax._src.train import rates

_PART = 1000  # Steps of a journal.


class Stepper:
    """Steps of a run in the program: makes their points, and takes them in place.

    Attributes:
      run: The run.
      state: The state after the latest step.
      checksum: The checksum of its parameters, on the device.
      names: The names of the numbers of a step.
      size: The number of points of a step.
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
        self.size = step.num_points(run, state)
        self._asks: Callable[..., Any] | None = None
        self._takes: Callable[..., Any] | None = None

    @property
    def step(self) -> int:
        """The number of steps that were taken."""
        return int(self.state.step)

    @property
    def params(self) -> Any:
        """The parameters, a tree of NumPy arrays."""
        return trees.as_numpy(self.state.params)

    @property
    def dtype(self) -> Any:
        """The dtype of values."""
        return trees.widest(self.state.params)

    def ask(self) -> Any:
        """Returns the points of the next step, on the device."""
        if self._asks is None:
            self._asks = programs.of(candidates_of, self.run, self.state)
        points = self._asks(self.state)
        states.check_known(points)
        return points

    def tell(self, values: np.ndarray) -> jax.Array:
        """Takes a step; returns its numbers, which `names` names."""
        if self._takes is None:
            given = self.run, self.state, values
            self._takes = programs.of(take, *given, donate=[0])
        self.state, numbers, self.checksum = self._takes(self.state, values)
        states.check_known(numbers)  # The optimizer may hold traced numbers.
        return numbers


class Told:
    """A run that asks for points and is told their values, as `ask_tell` makes it.

    Attributes:
      best: The best of the points that were asked for: a `Best`.
    """

    def __init__(self, maker: Stepper, best: Best | None = None):
        """Begins with what makes the points.

        Args:
          maker: Makes points, and takes steps.
          best: The best so far; `None` if no points are asked for.
        """
        self.maker, self.best = maker, best or Best(None)
        self._evaluations = 0
        self._asked: Any = None  # The points of the step, once they are asked for.
        self._values: list[np.ndarray] = []  # Those that were told of them.
        self._following: Any = None  # The next points, computed meanwhile.

    def __repr__(self) -> str:
        return shown.on_a_line(
            self,
            step=str(self.maker.step),
            params=shown.tree(self.maker.params),
            best=repr(self.best),
        )

    @property
    def state(self) -> SolverState:
        """The state of the run, to continue from: a copy in NumPy arrays."""
        found: SolverState = trees.as_numpy(self.maker.state)
        return found

    @property
    def params(self) -> Any:
        """The parameters, a tree of NumPy arrays."""
        return self.maker.params

    def ask(self) -> Any:
        """Returns the points of the step that were not told yet.

        Another call returns the same points. They are the caller's.

        Returns:
          A tree like the parameters of NumPy arrays with one additional axis, the
          first, of size n.
        """
        if self._asked is None:
            with self._precision():
                asked = self._following
                asked = self.maker.ask() if asked is None else asked
                self._asked, self._following = jax.tree.map(np.asarray, asked), None
        done = sum(map(len, self._values))
        return jax.tree.map(lambda x: np.array(x[done:]), self._asked)

    def _precision(self) -> AbstractContextManager[Any]:
        """The context in which the parameters keep their precision."""
        return trees.precision_of(self.maker.state.params)

    def tell(self, values: Any) -> None:
        """Takes the step, once the values at all of its points are told.

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
        number = self.maker.step
        states.check_room(number)
        given = checks.as_values(values, self.maker.dtype)
        self._check(given)
        so_far = np.concatenate([*self._values, given])
        with self._precision():
            if len(so_far) == self.maker.size:
                self.take(Record(number, so_far, 0, np.nan))
                return
        self._values.append(given)

    def _check(self, values: np.ndarray) -> None:
        """Raises unless there are values for some of the points."""
        n = len(jax.tree.leaves(self._asked)[0]) - sum(map(len, self._values))
        alike = all(values.shape[1:] == told.shape[1:] for told in self._values)
        if not (values.ndim and 0 < len(values) <= n and alike):
            raise ValueError(
                f"values must have one value per point, shape ({n},); got shape "
                f"{values.shape}."
            )

    def take(
        self,
        record: Record,
        values: np.ndarray | None = None,
        infos: Sequence[Any] | None = None,
    ) -> dict[str, Any]:
        """Takes a step whose values are known.

        Args:
          record: The values.
          values: The values as they were returned, if they may be rounded otherwise.
          infos: The objects that came with them.

        Returns:
          The numbers of the step for a `History`, by name.
        """
        asks = self._asked is not None
        names, numbers = self._taken(record, values, infos)
        if asks:
            self._following = self.maker.ask()  # Computed meanwhile.
        return _row(record, names, np.asarray(numbers))

    def _taken(
        self,
        record: Record,
        values: np.ndarray | None = None,
        infos: Sequence[Any] | None = None,
    ) -> tuple[Sequence[str], jax.Array | np.ndarray]:
        names, numbers = self.maker.names, self.maker.tell(record.values)
        values = record.values if values is None else values
        before, self._evaluations = self._evaluations, self._evaluations + len(values)
        if self._asked is not None:
            i, value = lowest(of_points(values.astype(np.float64)))
            if value < self.best.value:
                point = jax.tree.map(lambda x: np.array(x[i]), self._asked)
                info = None if infos is None else infos[i]
                self.best = Best(point, float(value), before + i, info)
        self._asked, self._following, self._values = None, None, []
        return names, numbers

    def rebuild(
        self, records: Sequence[Record], exact: bool = True
    ) -> list[dict[str, Any]]:
        """Takes the steps of records, without an evaluation.

        Args:
          records: The values of the steps.
          exact: Whether to compare the parameters with the checksums of the records.

        Returns:
          The numbers of each step for a `History`, by name.

        Raises:
          ValueError: If the parameters differ from the run's. The steps were taken.
        """
        rows: list[dict[str, Any]] = []
        on_cpu = jax.default_backend() == "cpu"
        # Part by part: what lies on the device takes a hundred times the memory.
        for first in range(0, len(records), _PART):
            part = records[first : first + _PART]
            sums, names, numbers = [], [], []
            for record in part:
                sums.append(self.maker.checksum)
                of_step = self._taken(record)
                names.append(of_step[0])
                numbers.append(of_step[1])
                if on_cpu:
                    # Several hundred queued steps with collectives end the process
                    # there.
                    jax.block_until_ready(self.maker.checksum)
            for checksum, record in zip(jax.device_get(sums), part, strict=True):
                if exact and record.params not in (0, int(checksum)):
                    raise ValueError(
                        "journal must be rebuilt by the optimizer, the versions and "
                        "the kind of machine that it was written with; got other "
                        f"parameters before step {record.step}. With exact=False, "
                        "replay rebuilds it up to rounding." + checks.refer_to("replay")
                    )
            rows += map(_row, part, names, jax.device_get(numbers))
        return rows


def _row(record: Record, names: Sequence[str], numbers: np.ndarray) -> dict[str, Any]:
    """The numbers of a step for a `History`, by name."""
    row = dict(zip(names, numbers, strict=True))
    row |= {"step": record.step, "seconds": record.seconds}
    return row | {"evaluations": len(record.values)}


def begin(
    run: Run, params: optax.Params, key: jax.typing.ArrayLike, state: Any = None
) -> SolverState:
    """The state to begin with, of which the caller keeps a copy: steps are in place.

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


@checks_names
def replay(
    journal: Path,
    params: optax.Params,
    optimizer: optax.GradientTransformation | None = None,
    estimator: GradientEstimator | None = None,
    *,
    evaluator: Evaluator = vectorized(),
    fun: Objective | None = None,
    sample: Callable[[jax.Array], object] | None = None,
    bounds: BoundsLike | None = None,
    exact: bool = True,
) -> SolverState:
    """Rebuilds a run from the values in its journal, without an evaluation.

    Args:
      journal: The file that `train` wrote.
      params: The starting point of the run.
      optimizer: The optimizer of the run, `None` if the run named none: the journal has
        the learning rate and the smoothing that were measured.
      estimator: The estimator, likewise.
      evaluator: The evaluator of the run. It evaluates nothing here, but determines how
        directions are stored, and so how their sums are rounded.
      fun: The loss, if JAX traced it. It is traced and not evaluated: `low_rank`
        perturbs the matrices that it multiplies.
      sample: As in `train`, with `fun`.
      bounds: As in `train`.
      exact: Whether parameters must be bitwise equal to the run's before each step.
        They are equal with the same versions on the same kind of machine. Otherwise
        sums may be rounded in other ways, and an adaptive run amplifies it.

    Returns:
      The state after the last complete step of the journal.

    Raises:
      ValueError: If there is no journal, it is damaged, or it belongs to a run with
        other arguments.

    Examples:
      >>> import os, tempfile
      >>> import jax, jax.numpy as jnp
      >>> import radazo_jax as zo
      >>> run = dict(optimizer=zo.radazo(1e-2), estimator=zo.forward_difference())
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     path = os.path.join(folder, "run.jsonl")
      ...     result = zo.train(
      ...         lambda x: jnp.sum(x**2),
      ...         jnp.ones(3),
      ...         **run,
      ...         num_steps=20,
      ...         key=0,
      ...         progress=False,
      ...         journal=path,
      ...     )
      ...     state = zo.replay(path, jnp.ones(3), **run)
      >>> bool(jnp.all(state.params == result.params))
      True
    """
    found = Journal(journal).read()
    line = found.line
    if line is None:
        raise ValueError(f"journal must be a file with a run; got {journal!r}.")
    check_evaluator(evaluator)
    told: Told
    with jax.enable_x64(trees.has_x64() or line["dtype"] == "float64"):
        key = jax.random.wrap_key_data(
            jnp.array(line["key"], jnp.uint32), impl="threefry2x32"
        )
        rate = rates.of_line(line) if optimizer is None else None
        if rate is not None:
            optimizer, estimator = rates.default(trees.size(params), estimator)
        states.check_run(optimizer, estimator)
        of_run: Any = fun, sample, optimizer, estimator, evaluator
        run = Run(*of_run)._replace(bounds=box.as_bounds(bounds))
        state = begin(run, params, key)
        if rate is not None:
            state = rates.with_rate(state, rate)
            run = rates.with_smoothing(run, state)
        if exact:
            # The checksums of the parameters compare learning rates.
            kept = {"learning_rate": line.get("learning_rate")}
            found.check_same_run(line_of_run(state, run) | kept)
        told = Told(Stepper(traced(run, state), state))
        told.rebuild(found.records, exact)
        # Without a function that JAX can trace, the run is one of NumPy arrays.
        return told.maker.state if fun is not None else told.state


def candidates_of(run: Run, state: SolverState) -> Any:
    """The candidates of a step, a tree like the parameters: [n, …]."""
    states.check_state(run, state)
    points, _ = step.points_at(run, state, _traced_loss(run, state))
    asked = candidates(points, state.params)
    return jax.vmap(lambda params: box.project(run.bounds, params))(asked)


def take(
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


def _traced_loss(run: Run, state: SolverState) -> Callable[[Any], Any] | None:
    """The loss if JAX evaluates it: `low_rank` needs it in both kinds of programs."""
    return None if run.fun is None else step.loss_at(run, state)
