"""A run on a worker, which evaluates points and takes the steps of received values.

Nothing here depends on the engine that carries the messages.
"""

import pickle
import sys
import traceback
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from radazo_jax._src.base import checks, programs, trees, xla
from radazo_jax._src.estimates.contracts import Points
from radazo_jax._src.estimates.vectorized import values_by_number, vectorized
from radazo_jax._src.runs.journal import line_of_run
from radazo_jax._src.steps import step
from radazo_jax._src.steps.states import Run, SolverState
from radazo_jax._src.train.stepper import Stepper, begin


class Description(NamedTuple):
    """The run of a worker.

    Attributes:
      line: The first line of the run's journal.
      names: The names of the numbers of a step.
      value: The value at the first point of the run.
    """

    line: dict[str, Any]
    names: tuple[str, ...]
    value: np.floating[Any]


class Reply(NamedTuple):
    """The answer of a worker.

    Attributes:
      checksums: The checksums of the parameters before each of the steps that it took,
        and after the last: uint32, [steps + 1].
      numbers: The numbers of these steps: [steps, k].
      failures: The counts of `Failures`, in their order.
      values: The values at the members, [m].
    """

    checksums: list[int]
    numbers: np.ndarray
    failures: tuple[int, ...]
    values: np.ndarray


class Replica:
    """The function of a run, and the state after the steps taken so far."""

    def __init__(self, versions: str, recipe: bytes):
        """Keeps a recipe, which is read if the versions are the driver's.

        Args:
          versions: The versions of the driver, on which the recipe depends.
          recipe: The pickled arguments of `_built`.
        """
        self._versions, self._recipe = versions, recipe
        self._stepper: Any = None  # A `Stepper`, once the run is built.

    def describe(self) -> Description | str:
        """Builds the run, compiles all programs, and describes it.

        Returns:
          Its description, or a text if that failed.
        """
        if self._versions != (here := versions()):
            return f"it has {here}, and the driver has {self._versions}."
        try:
            return self._built(*pickle.loads(self._recipe))
        except Exception:
            return traceback.format_exc()

    def _built(
        self, make_fun: Any, params: Any, run: Run, size: int, key: np.ndarray
    ) -> Description:
        """Builds the run of a recipe."""
        made = make_fun()
        if params is None and not (isinstance(made, tuple) and len(made) == 2):
            raise TypeError(
                "make_fun must return a pair (fun, params) if params is None; got "
                f"{made!r}."
            )
        fun, params = made if params is None else (made, params)
        if not callable(fun):
            raise TypeError(
                f"make_fun must return a function of the parameters; got {fun!r}."
            )
        typed = jax.random.wrap_key_data(jnp.asarray(key), impl="threefry2x32")
        begun = begin(run := run._replace(fun=fun), params, typed)
        run = step.with_traced_functions(run, begun)
        self._stepper, self._size = Stepper(run, begun), size
        self._points = programs.of(_points, run, begun)
        # Not by its arguments: each batch of points is as large.
        self._values = programs.of(_values_at, run)
        (value,) = self.evaluate(np.zeros(1, np.int32))
        line = line_of_run(begun, run)
        # A copy, since steps are taken in place.
        copy = Stepper(run, trees.copies(begun))
        copy.take(np.full(line["points"], value))
        jax.block_until_ready(copy.state)
        return Description(line, self._stepper.names, value)

    def answer(
        self, first: int, values: np.ndarray, members: np.ndarray
    ) -> Reply | str:
        """Takes steps, then evaluates.

        Args:
          first: The number of the first step to take.
          values: The values of the steps, [steps, n].
          members: The numbers of the points to evaluate: int32, [m].

        Returns:
          The answer, or a text if the function or a step failed.

        Raises:
          RuntimeError: If this replica has taken other steps.
        """
        stepper, sums, numbers = self._stepper, [], []
        if stepper is None or stepper.step != first:
            raise RuntimeError(f"it has lost the run before step {first}.")
        try:
            for row in values:
                # The memory may have changed since the last step.
                sums.append(trees.checksum_of(stepper.state.params))
                numbers.append(jax.block_until_ready(stepper.take(row)))
            found = self.evaluate(members)
            sums.append(trees.checksum_of(stepper.state.params))
            counts = tuple(map(int, stepper.state.failures))
            return Reply([int(x) for x in sums], np.array(numbers), counts, found)
        except Exception:
            return traceback.format_exc()

    def params(self) -> Any:
        """Returns the parameters after the last step."""
        return self._stepper.params

    def evaluate(self, members: np.ndarray) -> np.ndarray:
        """Returns the values at some points of the step, [m]."""
        state, size = self._stepper.state, self._size
        values = np.empty(len(members), trees.widest(state.params))
        points = self._points(state) if len(members) else None
        for first in range(0, len(members), size):
            some = members[first : first + size]
            # Each call evaluates as many points, so that one program serves all.
            padded = np.pad(some, (0, size - len(some)), mode="edge")
            found = self._values(state, points, padded)
            values[first : first + size] = np.asarray(found)[: len(some)]
        return values


def versions() -> str:
    """Returns the versions by which a pickled recipe can be read."""
    of_python = ".".join(map(str, sys.version_info[:2]))
    return f"radazo_jax {sys.modules['radazo_jax'].__version__}, Python {of_python}"


def _points(run: Run, state: SolverState) -> Points:
    """Returns the points of a step, of which no elements are stored."""
    run = run._replace(evaluator=vectorized(1))
    return step.points_at(run, state, step.loss_at(run, state))[0]


def _values_at(
    run: Run, state: SolverState, points: Points, numbers: jax.Array
) -> jax.Array:
    """Returns the values at some points of a step, all under one `vmap`.

    This program defines the values of a distributed run: a value depends on the size
    of the batch, and not on the worker or on the other points of the batch.
    """
    loss = checks.checked_loss(step.loss_at(run, state), False)
    found = values_by_number(loss, state.params, points, numbers, None)
    return xla.rounded(found).astype(trees.widest(state.params))
