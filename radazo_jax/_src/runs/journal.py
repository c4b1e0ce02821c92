"""The journal of a run: what it belongs to, and how the run is rebuilt from it."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from radazo_jax._src import checks, programs, trees
from radazo_jax._src.base import (
    Evaluator,
    GradientEstimator,
    Objective,
    Search,
    check_evaluator,
)
from radazo_jax._src.evaluators.vectorized import vectorized
from radazo_jax._src.runs import identity
from radazo_jax._src.runs.learning_rate import LearningRate
from radazo_jax._src.runs.stop import Budget
from radazo_jax._src.steps import ask_tell, history, records, step
from radazo_jax._src.steps.box import BoundsLike, as_bounds
from radazo_jax._src.steps.defaults import is_staged, method
from radazo_jax._src.steps.records import Path, Record
from radazo_jax._src.steps.stages import Stages, with_tolerance
from radazo_jax._src.steps.states import Run, SolverState
from radazo_jax._src.steps.units import Units, as_units

_PART = 1000  # Steps of a journal.
_PACKAGES = ("radazo_jax", "jax", "jaxlib", "optax")


class Done(NamedTuple):
    """A step that was taken.

    Attributes:
      record: Its values.
      numbers: The numbers of the step for a `History`, by name.
    """

    record: Record
    numbers: dict[str, Any]

    @classmethod
    def of(cls, record: Record, names: Sequence[str], numbers: np.ndarray) -> "Done":
        """A step, by the names of what was recorded of it."""
        named = dict(zip(names, numbers, strict=True))
        named["evaluations"] = len(record.values)
        return cls(record, {"step": record.step, "seconds": record.seconds} | named)


class Teller:
    """Takes the steps of a run, given their values.

    Attributes:
      stages: The stages of the run.
      names: The names of the numbers of a step.
    """

    def __init__(self, stages: Stages, state: SolverState):
        """Compiles nothing yet.

        Args:
          stages: The stages, with traced functions.
          state: The state before the first step.
        """
        self.stages = stages
        self._begin(state)

    def _begin(self, state: SolverState) -> None:
        """Begins a stage: what depends on its method."""
        self.names = history.names(state)
        self._take = ask_tell.teller(self.stages.run, state)

    def begin(self, state: SolverState) -> SolverState:
        """The state in which the next step begins: of the next stage, if one is over.

        Args:
          state: The state after the latest step.
        """
        following = self.stages.following(state)
        if following is not state:
            self._begin(following)
        return following

    def tell(
        self, state: SolverState, values: Any
    ) -> tuple[SolverState, jax.Array, jax.Array]:
        """Takes a step in place.

        Args:
          state: The state in which the step begins.
          values: The values at its points.

        Returns:
          The state after, the numbers of the step, and the checksum of the parameters.
        """
        return self._take(state, values)


@contextmanager
def resumed(
    path: Path | None,
    fun: Any,
    state: SolverState,
    budget: Budget,
    teller: Teller,
    before_each: Callable[[Sequence[Record]], Callable[[SolverState], None]],
    rate: LearningRate | None = None,
) -> Iterator[tuple[SolverState, list[Done], Callable[[Record], None]]]:
    """Takes the steps that a journal holds, and opens it for further steps.

    Args:
      path: The journal; without one, nothing is read or written.
      fun: The function, of which the journal keeps an identity.
      state: The state before the first step.
      budget: Limits the number of steps to read.
      teller: Takes the steps.
      before_each: Given the steps, returns a function to call before each of them.
      rate: The learning rate that was found before the first step.

    Yields:
      The state, the steps, and a function that writes a record.
    """
    if path is None:
        yield state, [], lambda record: None
        return
    run = line_of_run(fun, state, teller.stages.run, rate)
    with records.opened(path) as file:
        done: list[Done] = []
        if file.found is not None:
            check_same_run(path, file.found.run, run)
            found = file.found.records
            found = found[: budget.allowed([len(record.values) for record in found])]
            state, done = rebuild(state, found, teller, before_each(found))
        file.begin(run)
        yield state, done, file.append


def rebuild(
    state: SolverState,
    found: Sequence[Record],
    teller: Teller,
    before: Callable[[SolverState], None] | None = None,
    exact: bool = True,
) -> tuple[SolverState, list[Done]]:
    """Takes the steps of records, without an evaluation.

    Args:
      state: The state before the first step.
      found: The values of the steps.
      teller: Takes the steps.
      before: Called with the state before each step.
      exact: Whether to compare the parameters with the checksums of the run.

    Returns:
      The state after the last, and the steps.

    Raises:
      ValueError: If the parameters differ from the run's.
    """
    total = ask_tell.checksum_of(state.params)
    done: list[Done] = []
    on_cpu = jax.default_backend() == "cpu"
    # Part by part: what lies on the device takes a hundred times the memory.
    for first in range(0, len(found), _PART):
        part = found[first : first + _PART]
        sums, numbers, names = [], [], []
        for record in part:
            state = teller.begin(state)
            names.append(teller.names)
            if before is not None:
                before(state)
            sums.append(total)
            state, of_step, total = teller.tell(state, record.values)
            numbers.append(of_step)
            if on_cpu:
                # Several hundred queued steps with collectives end the process there.
                jax.block_until_ready(total)
        for checksum, record in zip(jax.device_get(sums), part, strict=True):
            if exact and record.params not in (0, int(checksum)):
                raise ValueError(
                    "journal must be rebuilt by the params, optimizer, estimator, "
                    "versions and kind of machine that it was written with; got other "
                    f"parameters before step {record.step}. With exact=False, replay "
                    "rebuilds it up to rounding." + checks.refer_to("replay")
                )
        steps = zip(part, names, jax.device_get(numbers), strict=True)
        done += [Done.of(*of_step) for of_step in steps]
    return state, done


def line_of_run(
    fun: Any, state: SolverState, run: Run, rate: LearningRate | None = None
) -> dict[str, Any]:
    """The first line of a journal, which identifies the run."""
    points = programs.of(step.points_without_loss, run.estimator, state)(state)
    leaves = jax.tree_util.tree_leaves_with_path(state.params)
    shapes = {
        jax.tree_util.keystr(path): f"{leaf.dtype}{list(leaf.shape)}"
        for path, leaf in leaves
    }
    device = jax.devices()[0]
    line = {
        "fun": identity.name(fun) if callable(fun) else None,
        "format": records.FORMAT,
        "captured": identity.captured(fun) if callable(fun) else {},
        "key": np.asarray(jax.random.key_data(state.key)).tolist(),
        "params": shapes,
        "start": f"{int(ask_tell.checksum_of(state.params)):08x}",
        "distribution": repr(points.directions.distribution),
        "scales": np.asarray(points.scales[0]).tolist(),
        "points": points.num_points,
        "learning_rate": None if rate is None else rate._asdict(),
        "scale": _text_of(run.units),
        "dtype": str(trees.widest(state.params)),
        "versions": {name: _version(name) for name in _PACKAGES},
        "device": f"{device.platform} {device.device_kind}",
    }
    if run.staged:
        tolerance = getattr(run.estimator, "tolerance", None)
        line |= {"staged": True, "tolerance": tolerance}
    return line


def _text_of(units: Units | None) -> dict[str, str | None] | None:
    """The units of a run, by their paths in `scale`."""
    found = {
        jax.tree_util.keystr(path): identity.text_of(unit)
        for path, unit in jax.tree_util.tree_leaves_with_path(units)
    }
    return found or None


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def check_same_run(path: Path, found: dict[str, Any], run: dict[str, Any]) -> None:
    """Raises if a journal belongs to another run."""
    # Devices may differ: the checksums of the parameters compare what they compute.
    skipped = ("device", "captured")
    pairs = [(name, run[name], found.get(name)) for name in run if name not in skipped]
    captured, others = run["captured"], found["captured"]
    pairs += [
        (f"captured {name}", captured.get(name), others.get(name))
        for name in sorted({*captured, *others})
    ]
    for name, value, other in pairs:
        if other != value:
            raise ValueError(
                f"journal {os.fspath(path)} must be of this run; its {name} is "
                f"{other!r}, that of the call is {value!r}. Give another path, or the "
                "arguments that it was written with."
            )


def to_evaluate_again(found: Sequence[Record]) -> tuple[Record, int] | None:
    """The last step with a finite value, and the first point that has one."""
    for record in reversed(found):
        finite = np.isfinite(records.of_points(record.values))
        if finite.any():
            return record, int(np.argmax(finite))
    return None


def warn_of_another_value(path: Path, record: Record, point: int, value: Any) -> None:
    """Warns if a point of a journal has another value now than it had then."""
    before = record.values[point]
    finite = np.isfinite(record.values)
    with np.errstate(all="ignore"):
        scale = np.max(np.abs(record.values), initial=0, where=finite)
        rounding = trees.rounding(before) * scale
        same = np.shape(value) == np.shape(before)
        if same and np.all(np.abs(value - before) <= rounding):
            return
    old, new = (records.of_points(np.array([x]))[0] for x in (before, value))
    checks.warn(
        f"journal {os.fspath(path)} has the value {old:.9g} at a point of step "
        f"{record.step}, at which fun now returns {new:.9g}. Unless fun is noisy, it "
        "is another function: give another path, or the function that wrote it."
    )


def replay(
    journal: Path,
    params: optax.Params,
    optimizer: optax.GradientTransformation | None = None,
    estimator: GradientEstimator | None = None,
    search: Search | None = None,
    *,
    evaluator: Evaluator = vectorized(),
    fun: Objective | None = None,
    sample: Callable[[jax.Array], object] | None = None,
    bounds: BoundsLike | None = None,
    scale: Any = None,
    exact: bool = True,
) -> SolverState:
    """Rebuilds a run from the values in its journal, without an evaluation.

    Args:
      journal: The file that `minimize` or `minimize_black_box` wrote.
      params: The starting point of the run.
      optimizer: The optimizer of the run, `None` if the run named none. With the
        default method on minibatches, pass
        `*default_method(params, found.learning_rate, found.num_steps,
        found.smoothing)`, in which `found` is the result's `learning_rate`.
      estimator: The estimator, likewise.
      search: The search, likewise.
      evaluator: The evaluator of the run. It evaluates nothing here, but determines how
        directions are stored, and so how their sums are rounded.
      fun: The function, if `minimize` wrote the journal. It is traced and not
        evaluated: `low_rank` perturbs the matrices that it multiplies.
      sample: As in `minimize`, with `fun`.
      bounds: As in `minimize_black_box`.
      scale: As in `minimize`.
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
      ...     result = zo.minimize(
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
    found = records.read(journal)
    if found is None:
        raise ValueError(f"journal must be a file with a run; got {journal!r}.")
    check_evaluator(evaluator)
    named = optimizer, estimator, search
    with jax.enable_x64(trees.has_x64() or found.run["dtype"] == "float64"):
        given = *named, params, sample is not None
        run = Run(fun, sample, *method(*given), evaluator, as_bounds(bounds))
        run = run._replace(staged=is_staged(*given), units=as_units(scale))
        if run.staged:
            run = with_tolerance(run, found.run.get("tolerance"))
        state = _replay(journal, found, params, run, exact)
        # Without a function that JAX can trace, the run is one of NumPy arrays.
        return state if fun is not None else trees.as_numpy(state)


def _replay(
    journal: Path, found: records.Journal, params: Any, run: Run, exact: bool
) -> SolverState:
    key = jax.random.wrap_key_data(jnp.array(found.run["key"], jnp.uint32))
    state = step.start(run, params, key)
    if exact:
        line = line_of_run(run.fun, state, run)
        # The checksums of the parameters compare learning rates.
        line["learning_rate"] = found.run.get("learning_rate")
        if run.fun is None:
            line |= {name: found.run[name] for name in ("fun", "captured")}
        check_same_run(journal, found.run, line)
    state = trees.copy(state)
    teller = Teller(Stages(step.traced(run, state), state), state)
    state, _ = rebuild(state, found.records, teller, exact=exact)
    return state
