"""Results of runs, and what a callback is told of them."""

from typing import Any, NamedTuple

import numpy as np
import optax

from radazo_jax._src.base import shown
from radazo_jax._src.base.names import says_attributes
from radazo_jax._src.measure.learning_rate import LearningRate
from radazo_jax._src.runs.history import History
from radazo_jax._src.steps.states import SolverState


class Stage(NamedTuple):
    """A stage of a method that consists of several.

    Attributes:
      step: The number of the step with which it begins.
      method: The method that takes its steps, in words.
      reason: The reason for which it follows the stage before.
    """

    step: int
    method: str
    reason: str


class Best(NamedTuple):
    """The best of all evaluated points.

    Attributes:
      params: The point, a tree of NumPy arrays; the start if none has a value. `None`
        in a compiled run, which keeps no points.
      value: Its value, infinite if none has one. In a compiled run, it is the lowest
        loss before a step.
      number: The number of its evaluation in the run, from 0; -1 if none has a value.
      info: The second result of a Python function; `None` if it was evaluated in a part
        of the run that was read from a journal.
      num_values: The number of evaluations of which `value` is the mean: 1, unless
        the function is noisy.
    """

    params: optax.Params
    value: float = np.inf
    number: int = -1
    info: Any = None
    num_values: int = 1

    def __repr__(self) -> str:
        return shown.on_a_line(
            self,
            params=shown.params(self.params),
            value=shown.number(self.value),
            number=str(self.number),
            info=shown.tree(self.info),
            num_values=str(self.num_values),
        )


@says_attributes
class Result(NamedTuple):
    """The result of a run.

    The runs of Python functions and of workers have NumPy arrays, of the dtypes that
    the caller gave.

    Attributes:
      params: The parameters after the last step; with a method, the best point.
      best: The best of all evaluated points. A compiled run keeps only its value, which
        may be below the loss at `params`.
      values: The value of each step's estimate, the loss before the step: [steps],
        in the widest dtype of the parameters. In `train` without a journal, only
        the steps of this call count.
      num_evaluations: Number of evaluated points, including failed ones and those that
        measured the learning rate before the first step.
      state: The state of the run, which counts what failed; pass it as `state` to
        continue. `None` for a run of `minimize`, which continues from `evaluations`.
      history: The records of each step.
      stopped: The reason for which the run ended: "target", "patience", "num_steps",
        "max_evaluations", "max_seconds", "converged", "diverged", "callback" or
        "interrupted"; the first one in this order, if there are several. "converged" is
        the end of a method, and "diverged" one whose values fall without end. It is
        "failure" in the result of an error.
      reason: The reason for which a method ended, in words; empty if it did not end.
      stages: The stages of a method, and why each of them followed; empty unless it
        reports them, as `methods.untuned` does.
      workers: The part of each worker of `distribute`, by address.
      learning_rate: The learning rate that `train` measured before the run, or found in
        the journal; otherwise `None`.
      evaluations: The table of all evaluations of `minimize`; otherwise `None`.
      fit: The fit of a method of least squares; otherwise `None`.
      unused: Names of parameters that changed no value wherever the method moved them.
    """

    params: optax.Params
    best: Best
    values: np.ndarray
    num_evaluations: int
    state: SolverState | None
    history: History
    stopped: str
    reason: str = ""
    stages: tuple[Stage, ...] = ()
    # Never modified.
    workers: dict[str, Any] = {}  # noqa: RUF012
    learning_rate: LearningRate | None = None
    evaluations: Any = None
    fit: Any = None
    unused: tuple[str, ...] = ()

    def __repr__(self) -> str:
        failed, rate = int(np.nansum(self.history.failed)), self.learning_rate
        fields = {
            "params": shown.params(self.params),
            "best": repr(self.best),
            "values": shown.series(self.values),
            "num_evaluations": str(self.num_evaluations),
            "history": repr(self.history),
            "failed": str(failed or ""),
            "stopped": self.stopped,
            "state": repr(self.state or ""),
            "stages": ", then ".join(stage.method for stage in self.stages),
            "reason": repr(self.reason),
            "unused": shown.some_names(self.unused),
            "workers": shown.some_names(list(self.workers)),
            "learning_rate": "" if rate is None else shown.number(rate.learning_rate),
        }
        known = {name: x for name, x in fields.items() if x not in ("", "''", "[]")}
        return shown.on_lines(self, **known)


class Report(NamedTuple):
    """News for a callback, after each step or after each chunk of a compiled run.

    Attributes:
      step: The number of steps that the run has taken.
      values: The loss before each step of the chunk, float32 [chunk]; in runs of Python
        functions and of workers, the values at the points of the step, [n].
      points: The points of the step, a tree of NumPy arrays, [n, …]; `None` in compiled
        runs and in runs of workers.
      best: The best so far.
      state: The state of the run. The next chunk of a compiled run reuses its arrays:
        copy what you keep. The state of `distribute` has no parameters. `None` in runs
        of `minimize`.
      evaluations: The table of all evaluations of `minimize` so far; otherwise `None`.
    """

    step: int
    values: np.ndarray
    points: Any
    best: Best
    state: SolverState | None
    evaluations: Any = None
