"""Steps of a compiled run, in chunks."""

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from radazo_jax._src import programs
from radazo_jax._src.runs.loop import Staged, Taken
from radazo_jax._src.runs.results import Best
from radazo_jax._src.runs.stop import Budget, Progress
from radazo_jax._src.steps import step
from radazo_jax._src.steps.history import History, names, numbers
from radazo_jax._src.steps.records import lowest
from radazo_jax._src.steps.stages import Stages, is_over
from radazo_jax._src.steps.states import Policy, Run, SolverState, exceeds

# Without a given chunk size, chunks aim at this many seconds: long enough that what
# is done between them does not count, short enough for a progress bar and Ctrl-C.
_CHUNK_SECONDS = 0.5
_MAX_CHUNK = 8192


class Chunks(Staged):
    """`Steps` of a compiled run: a chunk is one compiled loop of any length.

    Attributes:
      best: See `Steps`.
      last_failure: The last failure so far: none is described.
    """

    def __init__(
        self,
        stages: Stages,
        state: SolverState,
        budget: Budget,
        policy: Policy,
        size: int | None,
        interrupted: Callable[[], bool],
    ):
        """Compiles nothing yet.

        Args:
          stages: The stages of the run, with traced functions.
          state: The state before the first step.
          budget: The budgets, which have started.
          policy: The rule by which failures end the run.
          size: The number of steps of a chunk; by default, so many that one takes about
            half a second.
          interrupted: Asked before each chunk whether to stop.
        """
        self.stages, self._budget, self._interrupted = stages, budget, interrupted
        self._size, self._given = size or 1, size is not None
        self._limits = policy.limits(state)
        self._recorded: list[dict[str, np.ndarray]] = []
        self._evaluations = 0
        self.best, self.last_failure = Best(None), ""
        self._begin(state)

    def _begin(self, state: SolverState) -> None:
        """Begins a stage: what depends on its method."""
        run, self._names = self.stages.run, names(state)
        given = state, self._budget.progress, np.int32(0), self._limits
        self._program = programs.of(_take_chunk, run, *given, donate=[0])

    def begin(self, state: SolverState) -> SolverState:
        """See `Steps`."""
        following = self.stages.following(state)
        if following is not state:
            self._begin(following)
            self._budget.size = step.num_points(self.stages.run, following)
        return following

    def take(self, state: SolverState) -> Taken | None:
        """See `Steps`."""
        if self._interrupted():
            return None
        begun, start = len(self._recorded), time.perf_counter()
        length = min(self._size, self._budget.steps_left())
        for first in range(0, length, _MAX_CHUNK):
            wanted = min(_MAX_CHUNK, length - first)
            state, taken = self._part(state, wanted)
            if taken < wanted or self._budget.reason():
                break
        if not self._given:
            seconds = time.perf_counter() - start
            self._size = _next_size(length, seconds, self._budget.seconds_left())
        parts = self._recorded[begun:]
        found = {name: np.concatenate([x[name] for x in parts]) for name in parts[0]}
        value = found["value"]
        return Taken(state, found, value, None, {"loss": f"{value[-1]:.6g}"})

    def _part(self, state: SolverState, wanted: int) -> tuple[SolverState, int]:
        """The state after at most so many steps, and their number."""
        before, begun = int(state.step), time.perf_counter()
        state, reached, buffer = self._program(
            state, self._budget.progress, np.int32(wanted), self._limits
        )
        # This waits: on CPUs, too many queued collectives end the process.
        columns = np.asarray(buffer)[: int(state.step) - before].T
        taken = columns.shape[1]
        found = dict(zip(self._names, columns, strict=True))
        found["step"] = before + np.arange(taken)
        found["seconds"] = np.full(taken, (time.perf_counter() - begun) / taken)
        self._recorded.append(found)
        evaluations = int(np.sum(found["evaluations"]))
        self._budget.took(taken, evaluations, jax.device_get(reached))
        self._see(found)
        return state, taken

    def _see(self, found: dict[str, np.ndarray]) -> None:
        """Looks for the best of some steps."""
        i, value = lowest(found["value"])
        if value < self.best.value:
            before = self._evaluations + int(np.sum(found["evaluations"][:i]))
            self.best = Best(None, float(value), before)
        self._evaluations += int(np.sum(found["evaluations"]))

    def history(self) -> History:
        """See `Steps`."""
        return History.of(self._recorded)

    def params(self, state: SolverState, stopped: str) -> Any:
        """See `Steps`."""
        del stopped
        return self.stages.last_params(state)

    def outside(self, state: SolverState) -> SolverState:
        """See `Steps`."""
        return state


def _take_chunk(
    run: Run,
    state: SolverState,
    progress: Progress,
    length: jax.Array,
    limits: jax.Array,
) -> tuple[SolverState, Progress, jax.Array]:
    """Does `length` steps in place; returns their numbers in a buffer.

    Args:
      run: The run.
      state: The state to start from.
      progress: The progress of the run before: fewer steps are done if it ends.
      length: The number of steps, at most `_MAX_CHUNK`.
      limits: The limits of the policy: fewer steps are done if the failures reach one.
    """
    first = state.step

    def continues(carry: tuple[SolverState, Progress, jax.Array]) -> jax.Array:
        state, progress, _ = carry
        stops = exceeds(state, limits) | progress.ends()
        if run.staged:
            stops |= is_over(run, state)
        return (state.step - first < length) & ~stops

    def body(
        carry: tuple[SolverState, Progress, jax.Array],
    ) -> tuple[SolverState, Progress, jax.Array]:
        state, progress, buffer = carry
        i = state.step - first
        state, info = step.take(run, state, step.loss_at(run, state))
        found = numbers(info, state)
        buffer = lax.dynamic_update_index_in_dim(buffer, found, i, 0)
        return state, progress.after(found[0]), buffer

    buffer = jnp.zeros((_MAX_CHUNK, len(names(state))), jnp.float32)
    return lax.while_loop(continues, body, (state, progress, buffer))


def _next_size(length: int, seconds: float, left: float) -> int:
    """The length of the next chunk, at most four times the last one's."""
    aim = min(_CHUNK_SECONDS, max(left, 0.0))
    wanted = int(length * min(aim / max(seconds, 1e-9), 4.0))
    return max(1, min(wanted, _MAX_CHUNK))
