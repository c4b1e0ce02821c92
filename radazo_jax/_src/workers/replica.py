"""A run on a worker, which evaluates points and takes the steps of received values."""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from radazo_jax._src import checks, programs, trees, xla
from radazo_jax._src.contracts import GradientEstimator, Points
from radazo_jax._src.evaluators.vectorized import values_by_number, vectorized
from radazo_jax._src.runs.journal import Record, line_of_run
from radazo_jax._src.runs.told import Stepper, Told, begin
from radazo_jax._src.steps import states, step
from radazo_jax._src.steps.box import Bounds
from radazo_jax._src.steps.states import Run, SolverState
from radazo_jax._src.workers.messages import (
    NO_NUMBERS,
    NO_VALUES,
    Reply,
    Request,
    failed,
)


class Recipe(NamedTuple):
    """The arguments of `distribute` from which a worker builds its run.

    Attributes:
      make_fun: As in `distribute`.
      params: As in `distribute`.
      optimizer: As in `distribute`.
      estimator: As in `distribute`.
      sample: As in `distribute`.
      bounds: As in `distribute`.
      batch_size: As in `distribute`.
      key: The data of the run's key: uint32, [2].
    """

    make_fun: Callable[[], Any]
    params: Any
    optimizer: optax.GradientTransformation
    estimator: GradientEstimator
    sample: Callable[[jax.Array], Any] | None
    bounds: Bounds | None
    batch_size: int
    key: np.ndarray


class Description(NamedTuple):
    """The run of a worker, in numbers and texts.

    Attributes:
      line: The first line of the run's journal.
      names: The names of the numbers of a step.
      size: The bytes of a state.
      seconds: Duration of the evaluations of a batch.
      seconds_per_step: Duration of a step without its evaluations.
      value: The value at the first point of the run.
    """

    line: dict[str, Any]
    names: tuple[str, ...]
    size: int
    seconds: float
    seconds_per_step: float
    value: np.floating[Any]


class Replica:
    """The function of a run, and the state after the steps taken so far."""

    def __init__(self, recipe: Recipe):
        self._recipe = recipe
        fun, params = self._made()
        if not callable(fun):
            raise TypeError(
                f"make_fun must return a function of the parameters; got {fun!r}."
            )
        run = Run(
            fun, recipe.sample, recipe.optimizer, recipe.estimator, bounds=recipe.bounds
        )
        states.check_run(run.optimizer, run.estimator)
        self._seconds = self._seconds_per_step = 0.0
        begun = self._start(params)
        self._run = step.traced(run, begun)
        self._held: Stepper | None = Stepper(self._run, begun)
        self._names = self._held.names
        self._points = programs.of(_points, self._run, begun)
        # Not by its arguments: each batch of points is as large.
        self._values = programs.of(values_of, self._run)

    def describe(self) -> Description:
        """Compiles all programs, and describes the run."""
        # The second time, the program is compiled.
        for _ in range(2):
            values = self.evaluate(np.zeros(1, np.int32))
        begun = self._state
        line = line_of_run(begun, self._run)
        size = sum(x.nbytes for x in jax.tree.leaves(begun))
        for _ in range(2):
            copy = Stepper(self._run, trees.copy(begun))
            start = time.perf_counter()
            copy.tell(np.full(line["points"], values[0], values.dtype))
            jax.block_until_ready(copy.state)
            self._seconds_per_step = time.perf_counter() - start
        seconds = self._seconds, self._seconds_per_step
        return Description(line, self._names, size, *seconds, values[0])

    def answer(self, request: Request) -> Reply:
        """Takes steps, then evaluates."""
        if request.restarts:
            self._held = None
        try:
            numbers = self._advance(request)
        except ValueError:
            # The parameters differ from the run's, and some steps were taken in place.
            self._held = None
            return failed("")._replace(drifted=True)
        values = self.evaluate(request.members)
        return self._reply(numbers, values)

    def leaves(self) -> list[np.ndarray]:
        """Returns the arrays of the state."""
        return [np.asarray(trees.words(x)) for x in jax.tree.leaves(self._state)]

    def copy(self, leaves: list[np.ndarray]) -> Reply:
        """Continues from the state of another worker."""
        found, treedef = jax.tree.flatten(self._state)
        copied = [_like(x, mine) for x, mine in zip(leaves, found, strict=True)]
        self._held = Stepper(self._run, jax.tree.unflatten(treedef, copied))
        return self._reply()

    def params(self) -> Any:
        """Returns the parameters after the last step."""
        return trees.as_numpy(self._state.params)

    def evaluate(self, members: np.ndarray) -> np.ndarray:
        """Returns the values at some points of the step, [m]."""
        state, size = self._state, self._recipe.batch_size
        values = np.empty(len(members), trees.widest(state.params))
        if not len(members):
            return values
        points, start = self._points(state), time.perf_counter()
        for first in range(0, len(members), size):
            some = members[first : first + size]
            # Each call evaluates as many points, so that one program serves all.
            padded = np.pad(some, (0, size - len(some)), mode="edge")
            found = self._values(state, points, padded)
            values[first : first + size] = np.asarray(found)[: len(some)]
        self._seconds = (time.perf_counter() - start) / -(-len(members) // size)
        return values

    def _advance(self, request: Request) -> np.ndarray:
        """Takes the steps of a request that were not taken yet."""
        state = self._state
        known = int(state.step) - request.first
        if known < 0:
            raise RuntimeError(
                f"steps must begin at {int(state.step)}; got {request.first}."
            )
        values = request.values.astype(trees.widest(state.params))
        pairs = zip(values, request.checksums, strict=True)
        records = [
            Record(request.first + i, values, int(checksum), 0.0)
            for i, (values, checksum) in enumerate(pairs)
        ][known:]
        if not records:
            return np.zeros((0, len(self._names)), np.float32)
        start = time.perf_counter()
        # The memory may have changed since the last step.
        self._stepper.checksum = trees.checksum_of(state.params)
        rows = Told(self._stepper).rebuild(records)
        self._seconds_per_step = (time.perf_counter() - start) / len(records)
        columns = [[row[name] for name in self._names] for row in rows]
        return np.array(columns, trees.widest(state.params))

    def _reply(
        self, numbers: np.ndarray = NO_NUMBERS, values: np.ndarray = NO_VALUES
    ) -> Reply:
        state = self._state
        evaluations, skipped, in_a_row = map(int, state.failures)
        return Reply(
            int(state.step),
            int(trees.checksum_of(state.params)),
            (evaluations, skipped, in_a_row),
            self._seconds_per_step,
            numbers,
            values,
        )

    @property
    def _state(self) -> SolverState:
        """The state after the steps; the first one if it was dropped."""
        return self._stepper.state

    @property
    def _stepper(self) -> Stepper:
        """Takes the steps, from the beginning if they were dropped."""
        if self._held is None:
            self._held = Stepper(self._run, self._start(self._made()[1]))
        return self._held

    def _start(self, params: Any) -> SolverState:
        recipe = self._recipe
        key = jax.random.wrap_key_data(jnp.asarray(recipe.key), impl="threefry2x32")
        method = recipe.optimizer, recipe.estimator
        run = Run(None, None, *method, bounds=recipe.bounds)
        return begin(run, params, key)

    def _made(self) -> tuple[Any, Any]:
        """The function and the base parameters."""
        made = self._recipe.make_fun()
        if self._recipe.params is not None:
            return made, self._recipe.params
        if not (isinstance(made, tuple) and len(made) == 2):
            raise TypeError(
                "make_fun must return a pair (fun, params) if params is None; got "
                f"{made!r}."
            )
        return made


def _points(run: Run, state: SolverState) -> Points:
    """The points of a step, of which no elements are stored."""
    run = run._replace(evaluator=vectorized(1))
    return step.points_at(run, state, step.loss_at(run, state))[0]


def values_of(
    run: Run, state: SolverState, points: Points, numbers: jax.Array
) -> jax.Array:
    """The values at some points of a step, all under one `vmap`.

    This program defines the values of a distributed run: a value depends on the size
    of the batch, and not on the worker or on the other points of the batch.
    """
    loss = checks.checked_loss(step.loss_at(run, state), False)
    found = values_by_number(loss, state.params, points, numbers, None)
    dtype = trees.widest(state.params)
    return xla.rounded(found).astype(dtype)


def _like(x: np.ndarray, mine: jax.Array) -> jax.Array:
    """An array of another worker, on the devices of the array that it replaces."""
    array = trees.of_words(jnp.array(x), mine)
    # Programs are compiled again if their arguments are bound to a device and were not.
    return jax.device_put(array, mine.sharding) if mine.committed else array
