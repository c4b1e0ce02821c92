"""Records of each step of a run: a few numbers, and their table."""

import csv
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from radazo_jax._src.base import shown, trees
from radazo_jax._src.base.names import checks_names
from radazo_jax._src.runs import journal
from radazo_jax._src.runs.lines import Path
from radazo_jax._src.steps.states import SolverState, StepInfo

# The numbers of each step, apart from the numbers in the states.
_OF_A_STEP = ("value", "value_std", "slope", "evaluations", "failed")


# The numbers of a step by name, or arrays of the numbers of several steps.
StepNumbers = Mapping[str, jax.typing.ArrayLike]


class History(NamedTuple):
    """The records of a run, step by step; NaN for what was not recorded.

    Attributes:
      step: The number of the step: float64, [steps], like the other fields.
      value: The loss.
      value_std: The standard deviation of all values at the points of the step.
      slope: The derivative along the estimated gradient, by the values: an estimate of
        the square of its norm.
      evaluations: The number of points.
      failed: The number of values that were not finite.
      seconds: Duration of the step; in a compiled run the average of its chunk.
      scalars: The `scalars` of the states of optimizer and estimator after the step, by
        name, such as "step_size": [steps] each.
    """

    step: np.ndarray
    value: np.ndarray
    value_std: np.ndarray
    slope: np.ndarray
    evaluations: np.ndarray
    failed: np.ndarray
    seconds: np.ndarray
    scalars: dict[str, np.ndarray]

    def __repr__(self) -> str:
        return shown.on_a_line(
            self,
            value=shown.series(self.value),
            scalars=shown.some_names(list(self.scalars)),
        )

    @classmethod
    def of(cls, parts: Sequence[StepNumbers]) -> "History":
        """Makes a history from the records of a custom loop.

        Args:
          parts: In their order; each has the numbers of a step by name, or arrays with
            the numbers of several steps. Missing numbers are NaN, and steps are
            counted from 0.
        """
        sizes = [np.size(next(iter(part.values()))) for part in parts]
        total = sum(sizes)
        columns = {name: np.full(total, np.nan) for part in parts for name in part}
        end = 0
        for part, size in zip(parts, sizes, strict=True):
            end += size
            for name, numbers in part.items():
                columns[name][end - size : end] = np.asarray(numbers)
        none = np.full(total, np.nan)
        known = {name: columns.pop(name, none) for name in cls._fields[:-1]}
        if known["step"] is none:
            known["step"] = np.arange(total, dtype=np.float64)
        return cls(**known, scalars=columns)

    @classmethod
    def from_journal(cls, path: Path) -> "History":
        """Reads the journal of an optimizer's run, also while it is running.

        Args:
          path: The file. It has no estimates: for the loss stands the mean of a
            step's values; slope and scalars are missing.

        Raises:
          ValueError: If there is no journal, or it is damaged.
        """
        found = journal.Journal(path).read()
        if found.line is None:
            raise ValueError(f"journal must be a file with a run; got {path!r}.")
        return cls.of([of_record(record) for record in found.records])

    def rows(self) -> Iterator[dict[str, float]]:
        """Yields the numbers of each step by name, for a writer like TensorBoard's."""
        columns = {**self._asdict(), **self.scalars}
        del columns["scalars"]
        for numbers in zip(*(x.tolist() for x in columns.values()), strict=True):
            yield dict(zip(columns, numbers, strict=True))

    def write_csv(self, path: Path) -> None:
        """Writes a table with a line for each step.

        Args:
          path: The file; it is overwritten.
        """
        with open(path, "w", encoding="utf-8", newline="") as file:
            names = [*self._fields[:-1], *self.scalars]
            writer = csv.DictWriter(file, names)
            writer.writeheader()
            writer.writerows(self.rows())


@checks_names
def scalars(state: object) -> dict[str, jax.Array | np.ndarray]:
    """Returns the floating-point numbers in a state, by name, to be logged.

    Args:
      state: The state of a run, of `ask_tell`, of an Optax chain or of an estimator.
        What lies in a tree like the parameters of a run is left out. So are counts,
        which are integers.

    Returns:
      Name -> a scalar, an array of shape (). The name is the name of the field, or the
      path if another field has this name. They are the state's own arrays: in a
      callback of `train`, copy what you keep by `jax.device_get`.

    Examples:
      >>> import jax.numpy as jnp, optax
      >>> import radazo_jax as zo
      >>> optimizer = optax.inject_hyperparams(zo.radazo)(learning_rate=0.5)
      >>> float(zo.runs.scalars(optimizer.init(jnp.zeros(3)))["learning_rate"])
      0.5
    """
    return _scalars(state, ())


def names_of_numbers(state: SolverState) -> tuple[str, ...]:
    """Returns the names of the elements of `numbers` for a state of a run."""
    return (*_OF_A_STEP, *_scalars(state, _OF_A_STEP))


def numbers(info: StepInfo, state: SolverState) -> jax.Array:
    """Returns the numbers of a step: [names], in the widest dtype of the parameters.

    Args:
      info: The values, the slope and the outcome of the step.
      state: The state of the run after the step.
    """
    known = {**of_values(info.values), "value": info.value, "slope": info.slope}
    known["failed"] = info.failed
    found = [known[name] for name in _OF_A_STEP]
    found += _scalars(state, _OF_A_STEP).values()
    dtype = trees.widest(state.params)
    return jnp.stack([jnp.asarray(x).astype(dtype) for x in found])


def of_values(values: jax.Array | np.ndarray) -> dict[str, jax.typing.ArrayLike]:
    """Returns mean, standard deviation and counts of the values of a step."""
    xp = jnp if isinstance(values, jax.Array) else np
    finite = xp.isfinite(values)
    count = finite.sum(dtype=values.dtype)
    with np.errstate(all="ignore"):
        mean = xp.where(finite, values, 0).sum() / count
        square = xp.where(finite, (values - mean) ** 2, 0).sum() / count
    return {
        "value": mean,
        "value_std": xp.sqrt(square),
        "evaluations": values.shape[0],
        "failed": values.size - count,
    }


def of_record(record: journal.Record) -> dict[str, jax.typing.ArrayLike]:
    """Returns the numbers of a step that its journal has, by name."""
    found = of_values(record.values)
    return found | {"step": record.step, "seconds": record.seconds}


def _scalars(state: object, taken: Sequence[str]) -> dict[str, jax.Array | np.ndarray]:
    """Returns `scalars`, with names other than those taken."""
    # A run has its parameters, of which moments and updates are trees.
    like: Any = jax.tree.structure(getattr(state, "params", None))

    def is_leaf(x: object) -> bool:
        return like.num_leaves > 0 and jax.tree.structure(x) == like

    found: dict[str, jax.Array | np.ndarray] = {}
    leaves = jax.tree_util.tree_leaves_with_path(state, is_leaf=is_leaf)
    for path, x in leaves:
        if isinstance(x, jax.Array | np.ndarray) and x.ndim == 0:
            if not jnp.issubdtype(x.dtype, jnp.floating):
                continue
            whole = jax.tree_util.keystr(path, simple=True, separator=".")
            name = whole.rpartition(".")[2]
            found[whole if name in found or name in taken else name] = x
    return found
