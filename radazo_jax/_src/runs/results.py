"""Results of runs whose function JAX does not see."""

from typing import Any, NamedTuple

import numpy as np
import optax

from radazo_jax._src import shown
from radazo_jax._src.runs.history import History
from radazo_jax._src.runs.states import SolverState


class Best(NamedTuple):
    """The best of all evaluated points.

    Attributes:
      params: The point, a tree of NumPy arrays; the start if none has a value.
      value: Its value.
      number: The number of its evaluation in the run, from 0; -1 if none has a value.
      info: The second result of the function; `None` if it was evaluated in a part of
        the run that was read from a journal.
    """

    params: optax.Params
    value: float
    number: int
    info: Any

    def __repr__(self) -> str:
        return shown.on_a_line(
            self,
            params=shown.params(self.params),
            value=shown.number(self.value),
            number=str(self.number),
            info=shown.tree(self.info),
        )


class BlackBoxResult(NamedTuple):
    """The result of `minimize_black_box`.

    Attributes:
      params: The parameters after the last step, at which `fun` was not evaluated: a
        tree of NumPy arrays, in the dtypes of the start.
      values: The value of each step's estimate: float32, [steps].
      best: The best of all evaluated points.
      num_evaluations: Number of evaluated points, including failed ones.
      state: The state of the run, in NumPy arrays, which counts what failed.
      history: The records of each step; `history.plot()` draws it.
      stopped: The reason for which the run ended, as in `MinimizeResult`, or "failure"
        in the result of a `RunError`.
    """

    params: optax.Params
    values: np.ndarray
    best: Best
    num_evaluations: int
    state: SolverState
    history: History
    stopped: str

    def __repr__(self) -> str:
        return shown.on_lines(
            self,
            params=shown.params(self.params),
            values=shown.series(self.values),
            best=repr(self.best),
            num_evaluations=str(self.num_evaluations),
            state=repr(self.state),
            history=repr(self.history),
            stopped=self.stopped,
        )
