"""Sends a function and its points to an executor, and brings failures back."""

import builtins
import importlib
import operator
import pickle
import tempfile
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

_LONGEST = 1000  # Characters of a message that are kept.

# A worker process reads the function before its first call, whose time is limited.
LOAD = """
import pickle, sys
kept = vars(sys).setdefault("_radazo_jax", {})
if path not in kept:
    kept.clear()
    with open(path, "rb") as file:
        kept[path] = pickle.load(file)
"""

# A worker process gets this as text, because a function of this module would make each
# worker import JAX, which takes seconds. It reads the function from a file at its first
# call, and keeps it. An error is returned as text, because this process may be unable
# to read it, which breaks an executor.
_CALL = """
try:
    import sys
    kept = vars(sys).setdefault("_radazo_jax", {})
    if path not in kept:
        import pickle
        kept.clear()
        with open(path, "rb") as file:
            kept[path] = pickle.load(file)
    result = kept[path](point), None
except BaseException as error:
    import traceback
    kinds = type(error).__mro__
    names = [kind.__name__ for kind in kinds if kind.__module__ == "builtins"]
    told = type(error).__name__, f"{error}", names[0], traceback.format_exc()
    result = None, told
"""

# Errors that do not depend on the point: mistakes in the function.
_MISTAKES = (
    AttributeError,
    ImportError,
    LookupError,
    NameError,
    NotImplementedError,
    SyntaxError,
    TypeError,
    pickle.PicklingError,
)


class Failed(NamedTuple):
    """A point that gave no result.

    Attributes:
      problem: The reason.
      error: The error if it is a mistake in the function; otherwise `None`.
    """

    problem: str
    error: BaseException | None = None


class Sender:
    """Calls of a function on executors, whose processes get the function once each."""

    def __init__(self, fun: Callable[[Any], Any]):
        """Stores nothing yet.

        Args:
          fun: The function of a point.
        """
        self._fun = fun
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._path = ""
        self._held: Any = None

    def store(self, pickler: str, advice: str) -> None:
        """Writes the function to a file, if that was not done before.

        Args:
          pickler: The name of the module that stores it.
          advice: Advice if the function cannot be stored.

        Raises:
          TypeError: If the function cannot be stored.
        """
        if self._folder is not None:
            return
        self._folder = tempfile.TemporaryDirectory(prefix="radazo_jax_")
        self._path = f"{self._folder.name}/fun"
        try:
            with open(self._path, "wb") as file:
                importlib.import_module(pickler).dump(self._fun, file)
        except Exception as error:
            self.close()
            if isinstance(error, OSError):  # Of the disk.
                raise
            raise TypeError(
                f"fun must be picklable to run in processes; got {self._fun!r} "
                f"({in_words(error)}). {advice} executor=ThreadPoolExecutor(8)."
            ) from error

    def prepare(self, pool: Any) -> None:
        """Makes the function known to an executor that follows another one."""
        client = getattr(pool, "_client", None)
        self._held = None
        if _has_processes(pool):
            loky = type(pool).__module__.startswith("loky")
            pickler = "cloudpickle" if loky else "pickle"
            self.store(pickler, "Pass workers=, which stores more, or threads:")
        elif hasattr(client, "get_executor"):
            self._held = _held(client, self._fun)

    def submit(self, pool: Any, point: Any) -> Any:
        """Submits a copy of a point, and returns its future."""
        point = copy(point)
        if self._held is not None:
            return pool.submit(operator.call, self._held, point)
        if not _has_processes(pool):
            return pool.submit(self._fun, point)
        names = {"path": self._path, "point": point}
        text = "exec(call, names) or names['result']"
        return pool.submit(eval, text, {"call": _CALL, "names": names})

    def load(self, pool: Any) -> Any:
        """Reads the function in a process, and returns the future of it."""
        return pool.submit(exec, LOAD, {"path": self._path})

    def result(self, pool: Any, future: Any) -> Any:
        """The result of a future without an error, or a `Failed`."""
        result = future.result()
        if not _has_processes(pool):
            return result
        result, told = result
        return result if told is None else _failed_there(*told)

    def close(self) -> None:
        """Deletes what was stored."""
        if self._folder is not None:
            self._folder.cleanup()


def _has_processes(pool: Any) -> bool:
    """Whether an executor has processes on this machine: Python's, or loky's."""
    return any(kind.__name__ == "ProcessPoolExecutor" for kind in type(pool).__mro__)


def _held(client: Any, fun: Callable[[Any], Any]) -> Any:
    """A function as a result that Dask sends to a worker once, and makes again."""
    with warnings.catch_warnings():
        # Dask warns of a large argument.
        warnings.simplefilter("ignore")
        stored = importlib.import_module("cloudpickle").dumps(fun)
        return client.submit(pickle.loads, stored)


def copy(point: Any) -> Any:
    """A copy of a point, since the function may write to its argument."""
    return jax.tree.map(np.copy, point)


def failed(error: BaseException) -> Failed:
    """The failure of a point by an error."""
    mistake = error if isinstance(error, _MISTAKES) else None
    return Failed(in_words(error), mistake)


def _failed_there(name: str, message: str, kind: str, trace: str) -> Failed:
    """The failure of a point by an error of another process."""
    error: BaseException | None = None
    if issubclass(found := getattr(builtins, kind), _MISTAKES):
        error = found(message)
        error.add_note(f"In another process:\n{trace}")
    return Failed(_on_a_line(f"{name}: {message}"), error)


def in_words(error: BaseException) -> str:
    """The type and the message of an error, on a line."""
    try:
        return _on_a_line(f"{type(error).__name__}: {error}")
    except Exception:  # The message is a method of the user's.
        return type(error).__name__


def _on_a_line(text: str) -> str:
    return " ".join(text[:_LONGEST].split())
