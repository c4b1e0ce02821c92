"""`Asker`: the points of a method on the host, from the values that it was told."""

import zlib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from radazo_jax._src import checks, shown, trees
from radazo_jax._src.methods.contract import Ask, End, Method, Start, check
from radazo_jax._src.numbers import keys
from radazo_jax._src.runs.globals import Globals
from radazo_jax._src.runs.processes import from_first
from radazo_jax._src.runs.vectors import Vectors
from radazo_jax._src.steps import box
from radazo_jax._src.steps.box import Bounds
from radazo_jax._src.steps.states import Failures, RunError

_MOST_COUNTED = np.iinfo(np.int32).max - 1

_LOST = ". If values fall without end, check the sign of fun, or pass bounds"

# Two values of a point are equal up to so many roundings.
_EQUAL = 8

# The number of the lowest points that are compared at the end of a noisy run.
_CANDIDATES = 5


class MethodState(NamedTuple):
    """State of a run with a method: what the method was told.

    Attributes:
      params: The best point so far, a tree of NumPy arrays.
      start: The starting point, likewise.
      key: The key of the run, typed, shape ().
      values: The values so far, in the order of their evaluation: float64, shape [n].
      step: The number of steps: how often the method was sent the values of all of
        its points: int32, shape ().
      failures: Counts of evaluations that failed. A step is skipped if all of its
        evaluations failed; d + 1 failures in a row count as one step in a row.
    """

    params: optax.Params
    start: optax.Params
    key: jax.Array
    values: np.ndarray
    step: np.ndarray
    failures: Failures

    def __repr__(self) -> str:
        return shown.on_a_line(
            self,
            step=shown.number(self.step),
            params=shown.tree(self.params),
            values=shown.series(self.values, "evaluations"),
            failures=shown.number(self.failures.evaluations),
        )


class Candidate(NamedTuple):
    """A point that may be the best one of a noisy run.

    Attributes:
      number: Number of its evaluation; a negative number if it was not evaluated.
      point: The point, shape [d].
      value: Its value.
    """

    number: int
    point: np.ndarray
    value: float


class Stage(NamedTuple):
    """A stage of a method that consists of several.

    Attributes:
      step: The number of its first step.
      method: The method that takes its steps, in words.
      reason: The reason for which it follows the stage before.
    """

    step: int
    method: str
    reason: str


class Asker:
    """Makes the points of a run by a method, and tells the method their values.

    Attributes:
      method: The method.
      vectors: Converts points.
      best: The best point so far, its value and the number of its evaluation.
      end: The end of the method, `None` before.
      asked: The latest points of the method, what else it says of them, and the number
        of those whose values are known.
      noisy: Whether a point had two different values.
      lowest: The points with the lowest values, the lowest first.
      stages: The stages that the method has reported.
      step: The number of steps, each of which ends once all of its values are told.
      dtype: The dtype of values.
    """

    names = ("value", "value_std", "failed")
    dtype = np.dtype(np.float64)

    def __init__(
        self,
        method: Method,
        params: optax.Params,
        key: jax.Array,
        bounds: Bounds | None,
        resolution: float,
        limited: bool,
        step: Any = None,
    ):
        """Begins the method.

        Args:
          method: The method.
          params: The starting point, within the bounds.
          key: The typed key of the run.
          bounds: Bounds of the run.
          resolution: Relative spacing of the values.
          limited: Whether a budget ends the run.
          step: As in `minimize`.
        """
        self.method, self.key = method, key
        self.vectors, self.resolution = Vectors(params, step), resolution
        seed = np.asarray(jax.random.key_data(key)).tolist()
        self._box = self.vectors.box(bounds)
        # Built-in methods draw from `start.rng` alone.
        built_in = type(method).__module__.startswith("radazo_jax.")
        self._globals = None if built_in else Globals(seed)
        start = Start(
            self._box.clip(self.vectors.round(self.vectors.flat(self.vectors.tree))),
            self._box,
            np.random.default_rng(seed),
            resolution,
            self.vectors.step,
            self.vectors.round,
            self.vectors.flat,
            limited,
            self._report,
        )
        self.best: tuple[np.ndarray, float, int] = (start.params, np.inf, -1)
        self.end: End | None = None
        self.noisy = False
        self.lowest: list[Candidate] = []
        self.stages: list[Stage] = []
        self.step = self._count = self._failed = self._skipped = self._in_a_row = 0
        self._values: list[np.ndarray] = []
        self._told: list[np.ndarray] = []  # Values at the first of the asked points.
        self._seen: dict[bytes, float] = {}  # First values of the step, and the best.
        self.asked = self._none = Ask(np.zeros((0, self.vectors.dimension)))
        self._problem: RunError | None = None
        check(method, start)
        with self._calling():
            self._generator = method(start)
        if not hasattr(self._generator, "send"):
            raise TypeError(
                "optimizer must be a generator function if it is a method; got "
                f"{method!r}, which returned {type(self._generator).__name__}."
            )
        self._send(None)

    def _report(self, method: str, reason: str) -> None:
        """Notes a stage."""
        self.stages.append(Stage(self.step, method, reason))

    def _send(self, values: Any) -> None:
        """Sends the values of the latest points, and receives the next ones.

        An error of the method is raised once more points are needed, so that the run
        up to there is complete.
        """
        point, value, _ = self.best
        self._seen = {point.tobytes(): value} if np.isfinite(value) else {}
        self._told, self.asked = [], self._none
        # Bits of LAPACK differ between machines: the method runs in one of them.
        if jax.process_index() == 0:
            self._call(values)
        if jax.process_count() > 1:
            self._follow()

    def _follow(self) -> None:
        """Takes what the method of process 0 has answered, in all processes."""
        given = {name: x for name, x in self.asked._asdict().items() if x is not None}
        if self.end is not None:
            given |= {"end": self.end.params, "value": self.end.value}
            given["reason"] = self.end.reason
        given |= {"problem": str(self._problem or ""), "stages": self.stages}
        found = from_first({name: np.asarray(x) for name, x in given.items()})
        if jax.process_index() == 0:
            return
        self.asked = Ask(found["points"], found.get("center"))
        self.stages = [Stage(int(i), *map(str, words)) for i, *words in found["stages"]]
        if "end" in found:
            value, reason = float(found["value"]), str(found["reason"])
            self.end = End(found["end"], value, reason)
        if problem := str(found["problem"]):
            self._problem = RunError(problem, self.state)

    def _call(self, values: Any) -> None:
        """Sends values to the method, and receives its answer."""
        try:
            with self._calling():
                asked = self._generator.send(values)
            self.asked = self._checked(asked)
        except StopIteration as stop:
            if isinstance(stop.value, End):
                # A reason tells that the method has ended, so it is never empty.
                reason = stop.value.reason or "the method has ended"
                self.end = stop.value._replace(reason=reason)
            else:
                got = type(stop.value).__name__
                self._problem = self._error(f"must return an End; got {got}")
        except RunError as error:
            self._problem = error

    def _raise(self) -> None:
        """Raises the error of the method, if there is one."""
        if self._problem is not None:
            raise self._problem

    @contextmanager
    def _calling(self) -> Iterator[None]:
        """Names the method in its errors, and isolates the global generators."""
        try:
            with nullcontext() if self._globals is None else self._globals.swapped():
                yield
        except StopIteration:
            raise
        except Exception as error:
            text = f"{type(error).__name__}: {' '.join(str(error).split())}"
            raise self._error(f"raised {text.rstrip('.')}") from error

    def _error(self, what: str) -> RunError:
        named = f"the method {shown.part(self.method)} {what}."
        return RunError(f"{named} The error's result is the run so far.", self.state)

    def _checked(self, asked: Any) -> Ask:
        """Returns what a method yields, if its points are as they must be."""
        if not isinstance(asked, Ask):
            asked = Ask(asked)
        center = asked.center
        return Ask(
            self._checked_points(asked.points),
            None if center is None else self.vectors.round(self._box.clip(center)),
        )

    def _checked_points(self, points: Any) -> np.ndarray:
        """Returns the points of a method as an array, if they are as they must be."""
        d = self.vectors.dimension
        try:
            found = np.array(points, np.float64)
        except (TypeError, ValueError):
            found = np.zeros(())
        if found.ndim != 2 or found.shape[1] != d or not len(found):
            got = getattr(points, "shape", None) or type(points).__name__
            problem = f"points of shape (n, {d}), with n of at least 1; got {got}"
        elif not np.all(np.isfinite(found)):
            problem = "finite points; got one with NaN or infinity" + _LOST
        elif np.any(found < self._box.lower) or np.any(found > self._box.upper):
            problem = "points within the bounds, as start.box.clip makes them"
        elif np.any(self.vectors.round(found) != found):
            problem = "rounded points, as start.round makes them"
        else:
            return found
        raise self._error(f"must yield {problem}")

    @property
    def state(self) -> MethodState:
        """The state of the run."""
        return MethodState(
            self.params,
            self.vectors.tree,
            self.key,
            np.concatenate([*self._values, np.zeros(0)]),
            np.array(self.step, np.int32),
            self.failures,
        )

    @property
    def failures(self) -> Failures:
        """Counts of evaluations that failed."""
        counts = self._failed, self._skipped, self._in_a_row // (self.dimension + 1)
        ends: Any = (np.array(min(count, _MOST_COUNTED), np.int32) for count in counts)
        return Failures(*ends)

    @property
    def params(self) -> Any:
        """The best point so far, a tree of NumPy arrays."""
        return self.vectors.one(self.best[0])

    @property
    def dimension(self) -> int:
        """d, the number of parameters."""
        return self.vectors.dimension

    @property
    def checksum(self) -> int:
        """A checksum of the points that the method has asked for."""
        return zlib.crc32(np.ascontiguousarray(self.asked.points).tobytes())

    @property
    def size(self) -> int:
        """The number of points whose values are not known yet."""
        return len(self.asked.points) - sum(map(len, self._told))

    @property
    def told(self) -> np.ndarray:
        """The values of the step so far, at its first points: [n]."""
        return np.concatenate([*self._told, np.zeros(0)])

    @property
    def points(self) -> np.ndarray:
        """The points whose values are not known yet, [n, d]."""
        return self.asked.points[sum(map(len, self._told)) :]

    def ask(self) -> Any:
        """Returns the points whose values are not known yet, a tree: [n, …].

        Raises:
          RunError: If the method has failed.
        """
        self._raise()
        return self.vectors.trees(self.points)

    def tell(self, values: np.ndarray) -> np.ndarray:
        """Takes the values at the first of the points, in any parts.

        Returns:
          Numbers, which `names` names: of the step so far, and the failures.
        """
        self._raise()
        points, finite = self.points[: len(values)], np.isfinite(values)
        values = np.where(finite, values, np.nan).astype(np.float64)
        before, self._count = self._count, self._count + len(values)
        if not self.noisy:
            self._see_noise(points, values)
        lowest = np.where(finite, values, np.inf)
        self._keep(points, lowest, before)
        i = int(np.argmin(lowest))
        if lowest[i] < self.best[1]:
            self.best = points[i], float(lowest[i]), before + i
        self._values.append(values)
        self._told.append(values)
        of_step = self.told
        self._failed += int(np.sum(~finite))
        after = int(np.argmax(finite[::-1]))  # Failures after the last finite value.
        self._in_a_row = after if finite.any() else self._in_a_row + len(values)
        used = of_step[np.isfinite(of_step)]
        if not self.size:
            self.step += 1
            self._skipped += not len(used)
            self._send(of_step)
        numbers = np.nan, np.nan
        if len(used):
            with np.errstate(all="ignore"):
                numbers = used.min(), np.std(used)
        return np.array([*numbers, np.sum(~finite)])

    def _see_noise(self, points: np.ndarray, values: np.ndarray) -> None:
        """Looks whether a point that was evaluated twice has two values."""
        for point, value in zip(points, values, strict=True):
            before = self._seen.setdefault(point.tobytes(), value)
            limit = _EQUAL * self.resolution * abs(value)
            if np.isfinite(before) and abs(before - value) > limit:
                self.noisy = True

    def _keep(self, points: np.ndarray, values: np.ndarray, before: int) -> None:
        """Keeps the lowest points, which may be compared at the end of a noisy run."""
        found = {candidate.point.tobytes(): candidate for candidate in self.lowest}
        for i in np.argsort(values, kind="stable"):
            if len(found) >= 2 * _CANDIDATES or not np.isfinite(values[i]):
                break
            new = Candidate(before + int(i), points[i], float(values[i]))
            name = points[i].tobytes()
            found[name] = min(found.get(name, new), new, key=lambda x: x.value)
        self.lowest = sorted(found.values(), key=lambda x: x.value)[:_CANDIDATES]


def begun(
    method: Method,
    params: optax.Params,
    key: jax.typing.ArrayLike,
    bounds: Bounds | None,
    resolution: float,
    limited: bool,
    state: Any = None,
    step: Any = None,
) -> Asker:
    """Begins a run, or continues it from a state.

    Args:
      method: The method.
      params: The starting point.
      key: The key of the run.
      bounds: Bounds of the run.
      resolution: Relative spacing of the values.
      limited: Whether a budget ends the run.
      state: A state to continue from instead of `params` and `key`.
      step: As in `minimize`.

    Raises:
      TypeError, ValueError: If an argument is not valid, or the state belongs to
        another method.
    """
    if state is not None and not isinstance(state, MethodState):
        raise TypeError(
            "state must be the state of a run with a method; got "
            f"{type(state).__name__}. Continue it with the optimizer that made it."
        )
    params = params if state is None else state.start
    params = checks.as_params(params)
    typed = keys.check_same_key(key) if state is None else state.key
    if trees.is_traced((params, typed)):
        raise TypeError(
            "params and key must be known arrays with a method, which runs on the "
            "host; got traced ones. Call it outside of jax.jit, jax.vmap and jax.grad; "
            "inside, use solver or value_and_grad."
        )
    checks.check_all_finite(params)
    checks.warn_of_statistics(params)
    box.check_bounds(bounds, params)
    values = np.zeros(0) if state is None else state.values
    # A run with a budget restarts at the end of one without, and continues so.
    for is_limited in (limited, True):
        asker = Asker(method, params, typed, bounds, resolution, is_limited, step)
        if state is None:
            asker.vectors.warn_of_rounding(asker.best[0])
        rest = values
        while len(rest) and asker.end is None:
            count = min(asker.size, len(rest))
            asker.tell(rest[:count])
            rest = rest[count:]
        if not len(rest):
            return asker
    raise ValueError(
        f"state must be of the method {shown.part(method)}; got one with {len(rest)} "
        "more values than this method asked for."
    )
