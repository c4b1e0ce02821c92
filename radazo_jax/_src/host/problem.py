"""The problem of a run on the host, and what its method asks for."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import numpy as np
import numpy.typing as npt
import optax

from radazo_jax._src.base import checks, keys, shown, trees
from radazo_jax._src.estimates.contracts import GradientEstimator
from radazo_jax._src.host.vectors import Vectors
from radazo_jax._src.methods.contract import Ask, Box, End, Method, Start, check
from radazo_jax._src.methods.policy import Untuned
from radazo_jax._src.runs.results import Stage
from radazo_jax._src.steps import box
from radazo_jax._src.steps.box import BoundsLike
from radazo_jax._src.steps.states import RunError

_LOST = ". If values fall without end, check the sign of fun, or pass bounds"

# Up to so many parameters, the default method runs.
MOST = 10_000


class Problem(NamedTuple):
    """The problem of a run.

    Attributes:
      method: The method.
      vectors: The start and the grid.
      box: The bounds as vectors.
      seed: The words of the key.
    """

    method: Method
    vectors: Vectors
    box: Box
    seed: list[int]

    @property
    def residuals(self) -> bool:
        """Whether the method takes arrays of residuals."""
        return bool(getattr(self.method, "residuals", False))

    def value(self, found: float | np.ndarray) -> float:
        """Converts what a row of the table has to a number."""
        if not self.residuals:
            return float(found)
        method: Any = self.method  # Methods of residuals have `value`, others do not.
        return float(method.value(np.reshape(found, (1, -1)))[0])

    @classmethod
    def of(
        cls,
        method: Method,
        params: optax.Params,
        bounds: BoundsLike | None,
        step: optax.Params | None,
        key: jax.typing.ArrayLike,
    ) -> "Problem":
        """Returns the problem of these arguments, which it checks.

        Raises:
          TypeError, ValueError: If an argument is not valid.
        """
        _check_method(method)
        if jax.process_count() > 1:
            raise ValueError(
                "minimize must run in one process; got a run of "
                f"{jax.process_count()} processes. Call it in one of them with workers "
                "or an executor, or use train."
            )
        params = trees.with_float64(params)
        with trees.precision_of(params):
            initial = checks.as_params(params)
            typed = keys.as_key(key)
            if trees.is_traced((initial, typed)):
                raise TypeError(
                    "params and key must be known arrays with a method, which runs on "
                    "the host; got traced ones. Call it outside of jax.jit, jax.vmap "
                    "and jax.grad; inside, use solver or value_and_grad."
                )
            checks.check_all_finite(initial)
            size = trees.size(initial)
            if isinstance(method, Untuned) and size > MOST:
                raise ValueError(
                    f"method must be named for more than {MOST:,} parameters; got "
                    f"{method!r} for {size:,}. Pass methods.many(), or pass a loss to "
                    "train."
                )
            checks.warn_of_statistics(params)
            given = box.as_bounds(bounds)
            box.check_bounds(given, initial)
            vectors = Vectors(initial, step)
            seed = np.asarray(jax.random.key_data(typed)).tolist()
            return cls(method, vectors, vectors.box(given), seed)


def _check_method(method: object) -> None:
    """Raises unless this is a method."""
    expected = "method must be a method such as methods.untuned()"
    if isinstance(method, GradientEstimator) or hasattr(method, "update"):
        kind = "estimator" if isinstance(method, GradientEstimator) else "optimizer"
        raise TypeError(
            f"{expected}; got an {kind}. Pass an optimizer and an estimator to train."
        )
    checks.check_called(method, "method")
    if not callable(method):
        raise TypeError(f"{expected}; got {shown.given(method)}.")


class Questions:
    """The points that a method asks for.

    Attributes:
      start: The problem as the method gets it.
      asked: The latest points of the method, and what else it says of them.
      end: The end of the method, `None` before.
      stages: The stages that the method has reported.
      step: The number of steps: how often the method received values.
    """

    def __init__(self, problem: Problem, limited: bool):
        """Begins the method, for values in float64.

        Args:
          problem: The problem.
          limited: Whether a budget ends the run.
        """
        self._method, vectors, box, self._seed = problem
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
        self._is_built_in = type(self._method).__module__.startswith("radazo_jax.")
        if self._is_built_in:
            check(self._method, self.start)
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
        python = random.Random(repr(self._seed)).getstate()
        self._globals = np.random.RandomState(self._seed).get_state(), python
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
    def fit(self) -> object:
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
        """Sends values to the generator, and keeps what it asks for or returns."""
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
        outer = np.random.get_state(), random.getstate()
        if not self._is_built_in:
            _set_globals(self._globals)
        try:
            yield
        except StopIteration:
            raise
        except Exception as error:
            text = f"{type(error).__name__}: {' '.join(str(error).split())}"
            raise self._error(f"raised {text.rstrip('.')}") from error
        finally:
            if not self._is_built_in:
                self._globals = np.random.get_state(), random.getstate()
                _set_globals(outer)

    def _error(self, what: str) -> RunError:
        """Returns the error of a method that breaks its contract."""
        named = f"the method {shown.part(self._method)} {what}."
        return RunError(f"{named} The error's result is the run so far.")

    def _checked(self, asked: np.ndarray | Ask) -> Ask:
        """Returns what a method yields, if its points are as they must be."""
        if not isinstance(asked, Ask):
            asked = Ask(asked)
        points, center = self._checked_points(asked.points), asked.center
        if center is not None:
            center = self.start.round(self.start.box.clip(center))
        return asked._replace(points=points, center=center)

    def _checked_points(self, points: npt.ArrayLike) -> np.ndarray:
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


def _set_globals(states: tuple[Any, Any]) -> None:
    """Sets the states of the global generators of NumPy and Python."""
    np.random.set_state(states[0])
    random.setstate(states[1])
