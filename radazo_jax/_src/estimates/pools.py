"""Calls of a function on an executor: what is sent, and failures brought back."""

import builtins
import concurrent.futures as futures
import contextlib
import functools
import importlib
import inspect
import math
import multiprocessing
import operator
import os
import pickle
import queue
import tempfile
import textwrap
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

_LONGEST = 1000  # Characters of a message that are kept.
_POLL = 0.1  # Seconds between looks whether a wait was interrupted.
_MOST_BROKEN = 4  # An executor may break so many times before a point ends.
_GUARD = 'A script that starts processes must stand below if __name__ == "__main__":.'

# A worker process gets this as text, because a function of this module would make each
# worker import JAX, which takes seconds. It reads the function from a file at its first
# call, or before, and keeps it.
_LOAD = """
import pickle, sys
kept = vars(sys).setdefault("_radazo_jax", {})
if path not in kept:
    kept.clear()
    with open(path, "rb") as file:
        kept[path] = pickle.load(file)
"""

# An error is returned as text, because this process may be unable to read it, which
# breaks an executor.
_CALL = f"""
try:{textwrap.indent(_LOAD, "    ")}
    result = kept[path](point), None
except BaseException as error:
    import traceback
    kinds = type(error).__mro__
    names = [kind.__name__ for kind in kinds if kind.__module__ == "builtins"]
    told = type(error).__name__, f"{{error}}", names[0], traceback.format_exc()
    result = None, told
"""

# Gets the number of a point and its result; returns whether no further point is begun.
Returned = Callable[[int, object], bool]

# Calls a function at points; returns whether it was not interrupted.
Runner = Callable[[Sequence[optax.Params], Returned], bool]

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


class Output(NamedTuple):
    """The output of a function at a point.

    Attributes:
      value: The value or values.
      info: The other result of the function.
      problem: A text if the point failed.
      mistake: The error if the function is wrong, and not the point.
      raised: Whether the function returned nothing.
      dtype: The name of the dtype of the value if it is narrower than float64.
      seconds: Duration, from the first submission to an executor.
    """

    value: float | np.ndarray
    info: object = None
    problem: str = ""
    mistake: BaseException | None = None
    raised: bool = False
    dtype: str = ""
    seconds: float = 0.0


def _has_processes(pool: futures.Executor | None) -> bool:
    """Returns whether an executor has processes here: Python's, or loky's."""
    return any(kind.__name__ == "ProcessPoolExecutor" for kind in type(pool).__mro__)


def failed(error: BaseException) -> Output:
    """Returns the failure of a point by an error."""
    mistake = error if isinstance(error, _MISTAKES) else None
    return Output(np.nan, None, in_words(error), mistake, raised=True)


def _failed_there(name: str, message: str, kind: str, trace: str) -> Output:
    """Returns the failure of a point by an error of another process."""
    error: BaseException | None = None
    if issubclass(found := getattr(builtins, kind), _MISTAKES):
        error = found(message)
        error.add_note(f"In another process:\n{trace}")
    problem = _on_a_line(f"{name}: {message}")
    return Output(np.nan, None, problem, error, raised=True)


def in_words(error: BaseException) -> str:
    """Returns the type and the message of an error, on a line."""
    try:
        return _on_a_line(f"{type(error).__name__}: {error}")
    except Exception:  # The message is a method of the user's.
        return type(error).__name__


def _on_a_line(text: str) -> str:
    return " ".join(text[:_LONGEST].split())


# A worker process ends with the run that started it, also if the run was killed. It
# gets this as text, because a function of this module would import JAX.
_WATCH = """
import os, threading, time
def watch():
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)
threading.Thread(target=watch, daemon=True).start()
"""


class _Lost(Output):
    """A point that ran when its executor broke."""


class _Unasked(Output):
    """A point that waited for others, which hang."""


class _Refused(_Unasked):
    """A point that an executor did not take, because it was broken."""


class Pool:
    """An executor on which a function is called, made again if that is possible.

    Processes get the function once each.
    """

    def __init__(
        self,
        fun: Callable[[optax.Params], object],
        workers: int | None,
        executor: futures.Executor | Callable[[], futures.Executor] | None,
        timeout: float | None,
        interrupted: Callable[[], bool],
    ):
        """Checks that the function can be called; makes nothing yet.

        Args:
          fun: The function of a point.
          workers: The number of processes to start, if no executor is given.
          executor: An executor, or a function that makes one.
          timeout: Seconds. Points that run while none ends for this long have failed.
          interrupted: Asked now and then whether to stop.
        """
        self._fun, self._workers, self._timeout = fun, workers, timeout
        self._interrupted = interrupted
        self._pool: Any = None
        self._make: Callable[[], futures.Executor] | None = None
        # So many points are submitted together: with `workers`, all of them run.
        self._most = math.inf if workers is None else workers
        self._hanging: set[futures.Future] = set()
        self._works, self._broken = False, 0
        self._folder: tempfile.TemporaryDirectory[str] | None = None  # Of the function.
        self._on_dask: Any = None  # The function as a result that Dask sends.
        if workers is not None:
            self._make = _loky(workers)
            self._store("cloudpickle", "Use threads:")
        elif callable(executor):
            self._make = executor
        else:
            self._begin(executor)

    def _store(self, pickler: str, advice: str) -> None:
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
            self._folder.cleanup()
            if isinstance(error, OSError):  # Of the disk.
                raise
            raise TypeError(
                f"fun must be picklable to run in processes; got {self._fun!r} "
                f"({in_words(error)}). {advice} executor=ThreadPoolExecutor(8)."
            ) from error

    def _begin(self, pool: futures.Executor | None) -> None:
        """Makes the function known to an executor, and uses it."""
        client: Any = getattr(pool, "_client", None)
        if _has_processes(pool):
            loky = type(pool).__module__.startswith("loky")
            pickler = "cloudpickle" if loky else "pickle"
            self._store(pickler, "Pass workers=, which stores more, or threads:")
        elif hasattr(client, "get_executor"):
            with warnings.catch_warnings():
                # Dask warns of a large argument, which it sends to a worker once.
                warnings.simplefilter("ignore")
                stored = importlib.import_module("cloudpickle").dumps(self._fun)
                self._on_dask = client.submit(pickle.loads, stored)
        self._pool = pool

    def run(self, points: Sequence[optax.Params], returned: Returned) -> bool:
        """Calls the function at points.

        Args:
          points: The points.
          returned: `returned(i, result)`, called in this thread with each result or
            `Output`; if it returns True, no further point is submitted.

        Returns:
          Whether it was not interrupted.

        Raises:
          RuntimeError: If the executor is broken and cannot be made again.
        """
        groups, stops = [list(range(len(points)))], False

        def passed(i: int, result: object) -> bool:
            nonlocal stops
            stops = returned(i, result) or stops
            return stops

        while groups and not stops:
            group = groups.pop()
            self._prepare()
            found = self._submitted({i: points[i] for i in group}, passed)
            if found is None:
                return False
            lost = [i for i in group if isinstance(found.get(i), _Lost)]
            unasked = [i for i in group if isinstance(found.get(i), _Unasked)]
            ended = len(lost) + len(unasked) < len(group)
            self._works = self._works or ended
            kinds = _Lost | _Refused
            broken = [x.problem for x in found.values() if isinstance(x, kinds)]
            if broken:
                progressed = ended or (self._works and lost)
                self._broken = 0 if progressed else self._broken + 1
                self._check_broken(broken[0])
                self._end(hangs=False)
            groups += [unasked] if unasked else []
            # What breaks an executor alone has failed.
            if len(group) > 1:
                middle = len(lost) // 2
                groups += [part for part in (lost[:middle], lost[middle:]) if part]
            elif lost:
                passed(group[0], found[group[0]])
        return True

    def close(self) -> None:
        """Ends what was made; waits for nothing that hangs."""
        if self._make is not None and self._pool is not None:
            self._end(hangs=any(not future.done() for future in self._hanging))
        if self._folder is not None:
            self._folder.cleanup()

    def _prepare(self) -> None:
        """Makes an executor if there is none."""
        if self._pool is None and self._make is not None:
            pool = self._make()
            check_executor(pool)
            self._begin(pool)
            if self._timeout is not None and self._workers is not None:
                # The start of processes, and what the function imports, take no part
                # of the time of a call. What fails here fails again in the call.
                names = {"path": self._path}
                waiting = {
                    pool.submit(exec, _LOAD, names) for _ in range(self._workers)
                }
                while waiting and not self._interrupted():
                    waiting = futures.wait(waiting, _POLL).not_done

    def _end(self, hangs: bool) -> None:
        """Ends the executor, which was made here, without waiting for it."""
        pool, self._pool, self._on_dask = self._pool, None, None
        self._hanging.clear()
        kills = "kill_workers" in inspect.signature(pool.shutdown).parameters
        if kills and (hangs or self._workers is not None):
            pool.shutdown(kill_workers=True)
            return
        processes = list((getattr(pool, "_processes", None) or {}).values())
        pool.shutdown(wait=False)
        if not hangs:
            return
        for process in processes:
            process.kill()
        # At its exit, the interpreter waits for threads that are listed here.
        listed = vars(importlib.import_module("concurrent.futures.thread"))
        for thread in getattr(pool, "_threads", ()):
            listed.get("_threads_queues", {}).pop(thread, None)

    def _check_broken(self, problem: str) -> None:
        """Raises if an executor that is broken cannot, or must not, be made again."""
        if self._make is None:
            raise RuntimeError(
                f"executor is broken: a worker died ({problem}). Pass workers=, or a "
                "function that makes an executor, and it is made again."
                + ("" if self._works else f" {_GUARD}")
            )
        if self._broken == _MOST_BROKEN:
            name, advice = "executor", _GUARD
            if self._workers is not None:
                name, advice = "workers", "Call fun in this process to see why."
            raise RuntimeError(
                f"{name} broke {self._broken} times before fun returned once "
                f"({problem}). {advice}"
            )

    def _submitted(
        self, points: dict[int, optax.Params], passed: Returned
    ) -> dict[int, object] | None:
        """Returns the results of points that are submitted together, by number."""
        self._waiting = list(points.items())[::-1]
        self._results: dict[int, object] = {}
        self._running: dict[futures.Future, int] = {}
        self._done: queue.SimpleQueue[futures.Future] = queue.SimpleQueue()
        since, ends = time.monotonic(), False
        poll = _POLL if self._timeout is None else min(_POLL, self._timeout)
        while self._waiting or self._running:
            threads = isinstance(self._pool, futures.ThreadPoolExecutor)
            if self._waiting and self._make is not None and threads:
                _in_daemon(self._submit_waiting)
            else:
                self._submit_waiting()
            with contextlib.suppress(queue.Empty):
                future = self._done.get(timeout=poll) if self._running else None
                while future is not None:
                    if future in self._running:  # It was not cancelled.
                        i, since = self._running.pop(future), time.monotonic()
                        result = self._results[i] = self._result(future)
                        if not isinstance(result, _Lost) and passed(i, result):
                            self._waiting.clear()
                    future = self._done.get_nowait()
            if self._interrupted() and not ends:
                # What runs is waited for, unless Ctrl-C is pressed again.
                ends = True
                self._waiting.clear()
                self._running = {
                    x: i for x, i in self._running.items() if not x.cancel()
                }
                self._hanging |= self._running.keys()
            if self._timeout is not None and time.monotonic() - since >= self._timeout:
                self._give_up(passed)
                break
        return None if ends else self._results

    def _submit_waiting(self) -> None:
        """Submits the last points that wait, as many as may run."""
        while self._waiting and len(self._running) < self._most:
            i, point = self._waiting.pop()
            future = self._submit(point)
            if isinstance(future, Output):
                self._results[i] = future
                continue
            self._running[future] = i
            future.add_done_callback(self._done.put)

    def _submit(self, point: optax.Params) -> futures.Future | Output:
        """Submits a copy of a point; returns its future, or why there is none."""
        call: Callable[..., object] = self._fun
        given: list[object] = [jax.tree.map(np.copy, point)]
        if _has_processes(self._pool):
            names = {"path": self._path, "point": given[0]}
            text = "exec(call, names) or names['result']"
            call, given = eval, [text, {"call": _CALL, "names": names}]
        elif self._on_dask is not None:
            call, given = operator.call, [self._on_dask, *given]
        try:
            return self._pool.submit(call, *given)
        except (futures.BrokenExecutor, OSError) as error:
            # OSError: its processes died a moment ago, and their pipe is closed.
            return _Refused(np.nan, None, in_words(error))
        except RuntimeError as error:
            kind = RuntimeError if self._works else ValueError
            raise kind(
                f"executor must be running; got {self._pool!r}: {error}."
            ) from error

    def _result(self, future: futures.Future) -> object:
        """Returns the result of a call, or why there is none."""
        try:
            error = future.exception()
        except futures.CancelledError as cancelled:
            error = cancelled
        if isinstance(error, futures.BrokenExecutor):
            return _Lost(np.nan, None, in_words(error), raised=True)
        if error is not None:
            return failed(error)
        if not _has_processes(self._pool):
            return future.result()
        result, problem = future.result()
        return result if problem is None else _failed_there(*problem)

    def _give_up(self, passed: Returned) -> None:
        """Gives up points that hang, and the executor if it can be replaced."""
        problem = f"no result within {self._timeout} s"
        hung = Output(np.nan, None, problem, raised=True)
        waited = {future for future in self._running if future.cancel()}
        hanging = self._running.keys() - waited
        replaced = self._make is not None and hanging
        if replaced:
            self._end(hangs=True)
        elif self._make is None:
            still = any(not future.done() for future in self._hanging)
            if still and not self._results:
                raise RuntimeError(
                    f"executor hangs: no point ended within {self._timeout} s, and an "
                    "earlier one still runs. Pass workers=, or a function that makes "
                    "an executor, and it is replaced."
                )
            self._hanging |= hanging
        unasked = [self._running[x] for x in waited] + [i for i, _ in self._waiting]
        self._results |= dict.fromkeys(unasked, _Unasked(np.nan))
        for i in [self._running[x] for x in hanging] + ([] if replaced else unasked):
            self._results[i] = hung
            passed(i, hung)


def check_executor(executor: object) -> None:
    """Raises unless this is an executor, a function that makes one, or `None`."""
    if executor is None or callable(executor):
        return
    is_client = hasattr(executor, "get_executor")
    if is_client or not hasattr(executor, "submit"):
        got = (
            "a Dask client. Pass client.get_executor()" if is_client else repr(executor)
        )
        raise TypeError(
            "executor must be a concurrent.futures.Executor, or a function that makes "
            f"one; got {got}."
        )
    if not isinstance(executor, futures.ProcessPoolExecutor):
        return
    context = getattr(executor, "_mp_context", None) or multiprocessing
    if context.get_start_method() == "fork":
        raise ValueError(
            "executor must not fork, for JAX has threads and a forked process may "
            "hang; got a ProcessPoolExecutor that forks. Pass workers=, or make it "
            'with mp_context=multiprocessing.get_context("spawn").'
        )


def _loky(workers: int) -> Callable[[], futures.Executor]:
    """Returns a function that makes a pool of processes."""
    try:
        loky, _ = map(importlib.import_module, ("loky", "cloudpickle"))
    except ImportError as error:
        raise ImportError(
            f"workers must be None unless loky is installed; got {workers}. Run pip "
            "install loky, or pass an executor."
        ) from error
    watch = {"parent": os.getpid()} if hasattr(os, "fork") else None
    return functools.partial(
        loky.ProcessPoolExecutor,
        workers,
        initializer=exec,
        initargs=(_WATCH if watch else "", watch or {}),
    )


def _in_daemon(call: Callable[[], None]) -> None:
    """Calls in a daemon thread: the threads that it starts are daemons, too.

    The interpreter exits without waiting for them.
    """
    done: futures.Future[None] = futures.Future()

    def run() -> None:
        try:
            call()
            done.set_result(None)
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    done.result()
