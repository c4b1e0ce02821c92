"""The generator of a method, and checks of the points that it asks for."""

import random
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import jax
import numpy as np

from radazo_jax._src.base import shown
from radazo_jax._src.host.vectors import Vectors
from radazo_jax._src.methods.contract import Ask, Box, End, Method, Start, check
from radazo_jax._src.runs.results import Stage
from radazo_jax._src.steps.states import RunError

_LOST = ". If values fall without end, check the sign of fun, or pass bounds"


class Questions:
    """The points that a method asks for.

    Attributes:
      start: The problem as the method gets it.
      asked: The latest points of the method, and what else it says of them.
      end: The end of the method, `None` before.
      stages: The stages that the method has reported.
      step: The number of steps: how often the method received values.
    """

    def __init__(
        self, method: Method, vectors: Vectors, box: Box, key: jax.Array, limited: bool
    ):
        """Begins the method, for values in float64.

        Args:
          method: The method.
          vectors: The start and the grid.
          box: The bounds.
          key: The typed key of the run.
          limited: Whether a budget ends the run.
        """
        self._method = method
        self._seed = np.asarray(jax.random.key_data(key)).tolist()
        self.start = Start(
            box.clip(vectors.round(vectors.flat(vectors.tree))),
            box,
            np.random.default_rng(self._seed),
            float(np.finfo(np.float64).eps),
            vectors.step,
            vectors.round,
            vectors.flat,
            limited,
            self._report,
        )
        # Built-in methods draw from `start.rng` alone.
        self._is_built_in = type(method).__module__.startswith("radazo_jax.")
        if self._is_built_in:
            check(method, self.start)
        self.begin(self.start.resolution)

    def begin(self, resolution: float) -> None:
        """Begins the method anew, for values with this relative spacing."""
        self.start = self.start._replace(
            rng=np.random.default_rng(self._seed), resolution=resolution
        )
        self.asked = Ask(np.zeros((0, len(self.start.params))))
        self.end: End | None = None
        self.stages: list[Stage] = []
        self.step = 0
        self._problem: RunError | None = None
        self._globals = None if self._is_built_in else Globals(self._seed)
        with self._calling():
            self._generator = self._method(self.start)
        if not hasattr(self._generator, "send"):
            raise TypeError(
                f"method must be a generator function; got {self._method!r}, which "
                f"returned {type(self._generator).__name__}. The methods of this "
                "package are in zo.methods."
            )
        self._send(None)

    def answer(self, values: np.ndarray, resolution: float) -> bool:
        """Sends the values at the latest points, and receives the next ones.

        Args:
          values: The values.
          resolution: The relative spacing of the values so far; 0 if all failed.

        Returns:
          Whether the method has begun anew instead: the first values say how values
          are rounded.
        """
        if self.step == 0 and resolution not in (0, self.start.resolution):
            self.begin(resolution)
            return True
        self.step += 1
        self._send(values)
        return False

    @property
    def reason(self) -> str:
        """The reason for which the method has ended, or an empty string."""
        return "" if self.end is None else self.end.reason

    @property
    def fit(self) -> Any:
        """The latest fit of a method of least squares; otherwise `None`."""
        return self.asked.fit if self.end is None else self.end.fit

    def check(self) -> None:
        """Raises the error of the method, if there is one.

        An error is raised once more points are needed, so that the run up to there is
        complete.
        """
        if self._problem is not None:
            raise self._problem

    def _send(self, values: Any) -> None:
        try:
            with self._calling():
                asked = self._generator.send(values)
            self.asked = self._checked(asked)
        except StopIteration as stop:
            if isinstance(stop.value, End):
                # A reason says that the method has ended, so it is never empty.
                reason = stop.value.reason or "the method has ended"
                self.end = stop.value._replace(reason=reason)
            else:
                got = type(stop.value).__name__
                self._problem = self._error(f"must return an End; got {got}")
        except RunError as error:
            self._problem = error
        if self._problem is not None:
            self.asked = self.asked._replace(points=self.asked.points[:0])

    def _report(self, method: str, reason: str) -> None:
        """Notes a stage."""
        self.stages.append(Stage(self.step, method, reason))

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
        named = f"the method {shown.part(self._method)} {what}."
        return RunError(f"{named} The error's result is the run so far.")

    def _checked(self, asked: Any) -> Ask:
        """Returns what a method yields, if its points are as they must be."""
        if not isinstance(asked, Ask):
            asked = Ask(asked)
        points, center = self._checked_points(asked.points), asked.center
        if center is not None:
            center = self.start.round(self.start.box.clip(center))
        return asked._replace(points=points, center=center)

    def _checked_points(self, points: Any) -> np.ndarray:
        """Returns the points of a method as an array, if they are as they must be."""
        d, box = len(self.start.params), self.start.box
        try:
            found = np.array(points, np.float64)
        except (TypeError, ValueError):
            found = np.zeros(())
        if found.ndim != 2 or found.shape[1] != d or not len(found):
            got = getattr(points, "shape", None) or type(points).__name__
            problem = f"points of shape (n, {d}), with n of at least 1; got {got}"
        elif not np.isfinite(found).all():
            problem = "finite points; got one with NaN or infinity" + _LOST
        elif (found < box.lower).any() or (found > box.upper).any():
            problem = "points within the bounds, as start.box.clip makes them"
        elif (self.start.round(found) != found).any():
            problem = "rounded points, as start.round makes them"
        else:
            return found
        raise self._error(f"must yield {problem}")


class Globals:
    """States of the global generators of NumPy and Python for one method."""

    def __init__(self, seed: list[int]):
        self._numpy = np.random.RandomState(seed).get_state()
        self._python = random.Random(repr(seed)).getstate()

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Uses them instead of the caller's."""
        outer = np.random.get_state(), random.getstate()
        np.random.set_state(self._numpy)
        random.setstate(self._python)
        try:
            yield
        finally:
            self._numpy, self._python = np.random.get_state(), random.getstate()
            np.random.set_state(outer[0])
            random.setstate(outer[1])
