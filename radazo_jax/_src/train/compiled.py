"""Steps of a compiled run, in chunks."""

import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from radazo_jax._src.base import programs, trees
from radazo_jax._src.runs.budget import Budget, RunProgress
from radazo_jax._src.runs.history import names_of_numbers, numbers
from radazo_jax._src.runs.journal import lowest
from radazo_jax._src.runs.loop import Steps
from radazo_jax._src.runs.results import Best, Report
from radazo_jax._src.steps import states, step
from radazo_jax._src.steps.states import Policy, Run, SolverState, exceeds

# Without a given chunk size, chunks aim at this many seconds: long enough that what
# is done between them does not count, short enough for a progress bar and Ctrl-C.
_CHUNK_SECONDS = 0.5
_MAX_CHUNK = 8192


class Compiled(Steps):
    """Steps in chunks: a chunk is one compiled loop of any length."""

    def __init__(
        self,
        run: Run,
        state: SolverState,
        budget: Budget,
        policy: Policy,
        size: int | None,
        interrupted: Callable[[], bool],
    ):
        """Compiles nothing yet.

        Args:
          run: The run, with traced functions.
          state: The state before the first step, whose arrays are reused.
          budget: The budgets, which have started.
          policy: The rule by which failures end the run.
          size: The number of steps of a chunk; by default, so many that one takes about
            half a second.
          interrupted: Asked before each chunk whether to stop.
        """
        super().__init__(budget)
        self._run, self._state, self._interrupted = run, state, interrupted
        self._size, self._given = size or 1, size is not None
        self._latest = 0  # The number of rows before the latest chunk.
        self._names = names_of_numbers(state)
        none, self._limits = np.int32(0), policy.limits(state.failures)
        self._program = programs.of(
            _take_chunk, run, state, budget.progress, none, self._limits, donate=[0]
        )

    @property
    def state(self) -> SolverState:
        return self._state

    def take(self) -> bool:
        if self._interrupted():
            return False
        self._latest, start = len(self.rows), time.perf_counter()
        length = min(self._size, self.budget.steps_left())
        for first in range(0, length, _MAX_CHUNK):
            wanted = min(_MAX_CHUNK, length - first)
            if self._part(wanted) < wanted or self.budget.reason():
                break
        if not self._given:
            seconds = time.perf_counter() - start
            self._size = _next_size(length, seconds, self.budget.seconds_left())
        return True

    def _part(self, wanted: int) -> int:
        """Takes at most so many steps; returns their number."""
        before, begun = int(self._state.step), time.perf_counter()
        self._state, reached, buffer = self._program(
            self._state, self.budget.progress, np.int32(wanted), self._limits
        )
        states.check_known(buffer)  # The optimizer may hold traced numbers.
        # This waits: on CPUs, too many queued collectives end the process.
        columns = np.asarray(buffer)[: int(self._state.step) - before].T
        taken = columns.shape[1]
        found = dict(zip(self._names, columns, strict=True))
        found["step"] = before + np.arange(taken)
        found["seconds"] = np.full(taken, (time.perf_counter() - begun) / taken)
        self.rows.append(found)
        i, value = lowest(found["value"])
        if value < self.best.value:
            number = self.budget.evaluations + int(np.sum(found["evaluations"][:i]))
            self.best = Best(None, float(value), number)
        evaluations = int(np.sum(found["evaluations"]))
        self.budget.count_chunk(taken, evaluations, jax.device_get(reached))
        return taken

    def figures(self) -> dict[str, str]:
        return {"loss": f"{self.rows[-1]['value'][-1]:.6g}"}

    def report(self) -> Report:
        values = np.concatenate([row["value"] for row in self.rows[self._latest :]])
        return Report(int(self._state.step), values, None, self.best, self._state)

    def params(self, stopped: str) -> optax.Params:
        del stopped
        return self._state.params


def _take_chunk(
    run: Run,
    state: SolverState,
    progress: RunProgress,
    length: jax.Array,
    limits: jax.Array,
) -> tuple[SolverState, RunProgress, jax.Array]:
    """Takes `length` steps in place; returns their numbers in a buffer.

    Args:
      run: The run.
      state: The state to start from.
      progress: The progress of the run before: fewer steps are done if it ends.
      length: The number of steps, at most `_MAX_CHUNK`.
      limits: The limits of the policy: fewer steps are done if the failures reach one.
    """
    first = state.step

    def continues(carry: tuple[SolverState, RunProgress, jax.Array]) -> jax.Array:
        state, progress, _ = carry
        stops = exceeds(state, limits) | progress.ends()
        return (state.step - first < length) & ~stops

    def body(
        carry: tuple[SolverState, RunProgress, jax.Array],
    ) -> tuple[SolverState, RunProgress, jax.Array]:
        state, progress, buffer = carry
        i = state.step - first
        state, info = step.take(run, state, step.loss_at(run, state))
        found = numbers(info, state)
        buffer = lax.dynamic_update_index_in_dim(buffer, found, i, 0)
        return state, progress.after(found[0]), buffer

    dtype = trees.widest(state.params)
    buffer = jnp.zeros((_MAX_CHUNK, len(names_of_numbers(state))), dtype)
    return lax.while_loop(continues, body, (state, progress, buffer))


def _next_size(length: int, seconds: float, left: float) -> int:
    """Returns the length of the next chunk, at most four times the last one's."""
    aim = min(_CHUNK_SECONDS, max(left, 0.0))
    wanted = int(length * min(aim / max(seconds, 1e-9), 4.0))
    return max(1, min(wanted, _MAX_CHUNK))
