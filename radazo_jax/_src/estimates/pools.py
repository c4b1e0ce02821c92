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
import threading
import time
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


# How often a wait looks whether it was interrupted, in seconds.
_POLL = 0.1

_GUARD = 'A script that starts processes must stand below if __name__ == "__main__":.'

# An executor may break so many times in a row before a point ends.
_MOST_BROKEN = 4


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


class _Lost(Failed):
    """A point that ran when its executor broke."""


class _Unasked(Failed):
    """A point that waited for others, which hang."""


class _Refused(_Unasked):
    """A point that an executor did not take, because it was broken."""


class Pool:
    """An executor on which a function is called, made again if that is possible."""

    def __init__(
        self,
        fun: Callable[[Any], Any],
        workers: int | None,
        executor: Any,
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
        self._sender, self._workers, self._timeout = Sender(fun), workers, timeout
        self._interrupted = interrupted
        self._pool: Any = None
        self._make: Callable[[], Any] | None = None
        # So many points are submitted together: with `workers`, all of them run.
        self._most = math.inf if workers is None else workers
        self._hanging: set[Any] = set()
        self._works, self._broken = False, 0
        if workers is not None:
            self._make = _loky(workers)
            self._sender.store("cloudpickle", "Use threads:")
        elif callable(executor):
            self._make = executor
        else:
            self._pool = executor
            self._sender.prepare(executor)

    def run(
        self, points: list[Any], arrived: Callable[[int, Any, float], bool]
    ) -> bool:
        """Calls the function at points.

        Args:
          points: The points.
          arrived: `arrived(i, result, seconds)`, called in this thread with each result
            or `Failed`; if it returns True, no further point is submitted.

        Returns:
          Whether it was not interrupted.

        Raises:
          RuntimeError: If the executor is broken and cannot be made again.
        """
        groups, stops = [list(range(len(points)))], False
        while groups and not stops:
            group = groups.pop()
            begun = time.perf_counter()

            def passed(
                j: int, result: Any, group: list[int] = group, begun: float = begun
            ) -> bool:
                nonlocal stops
                seconds = time.perf_counter() - begun
                stops = arrived(group[j], result, seconds) or stops
                return stops

            self._prepare()
            found = self._submitted([points[i] for i in group], passed)
            if found is None:
                return False
            lost, unasked = [], []
            for i, result in zip(group, found, strict=True):
                if isinstance(result, _Unasked):
                    unasked.append(i)
                elif isinstance(result, _Lost):
                    lost.append(i)
            ended = len(lost) + len(unasked) < len(group)
            self._works = self._works or ended
            if any(isinstance(result, _Lost | _Refused) for result in found):
                progressed = ended or (self._works and lost)
                self._broken = 0 if progressed else self._broken + 1
                problem = found[group.index((lost + unasked)[0])].problem
                self._check_broken(problem)
                self._end(hangs=False)
            groups += [unasked] if unasked else []
            # What breaks an executor alone has failed.
            if len(group) > 1:
                groups += _halves(lost)
            elif lost:
                passed(0, found[0])
        return True

    def close(self) -> None:
        """Ends what was made; waits for nothing that hangs."""
        if self._make is not None and self._pool is not None:
            self._end(hangs=any(not future.done() for future in self._hanging))
        self._sender.close()

    def _prepare(self) -> None:
        """Makes an executor if there is none."""
        if self._pool is None and self._make is not None:
            pool = self._make()
            check_executor(pool)
            self._sender.prepare(pool)
            self._pool = pool
            if self._timeout is not None and self._workers is not None:
                # The start of processes, and what the function imports, take no part
                # of the time of a call. What fails here fails again in the call.
                waiting = {self._sender.load(pool) for _ in range(self._workers)}
                while waiting and not self._interrupted():
                    waiting = futures.wait(waiting, _POLL).not_done

    def _end(self, hangs: bool) -> None:
        if self._workers is None:
            _end(self._pool, hangs)
        else:
            self._pool.shutdown(kill_workers=True)
        self._pool = None
        self._hanging.clear()

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
        self, points: list[Any], passed: Callable[[int, Any], bool]
    ) -> list[Any] | None:
        """The results of points that are submitted together."""
        waiting = list(enumerate(points))[::-1]
        results: list[Any] = [None] * len(points)
        running: dict[Any, int] = {}
        done: queue.SimpleQueue[Any] = queue.SimpleQueue()
        since, ends = time.monotonic(), False
        poll = _POLL if self._timeout is None else min(_POLL, self._timeout)
        while waiting or running:
            self._submit_some(waiting, results, running, done)
            with contextlib.suppress(queue.Empty):
                future = done.get(timeout=poll) if running else None
                while future is not None:
                    if future in running:  # It was not cancelled.
                        i, since = running.pop(future), time.monotonic()
                        results[i] = self._result(future)
                        if not isinstance(results[i], _Lost) and passed(i, results[i]):
                            waiting.clear()
                    future = done.get_nowait()
            if self._interrupted() and not ends:
                # What runs is waited for, unless Ctrl-C is pressed again.
                ends = True
                waiting.clear()
                running = {x: i for x, i in running.items() if not x.cancel()}
                self._hanging |= running.keys()
            if self._timeout is not None and time.monotonic() - since >= self._timeout:
                found = self._hung(results, running, waiting, passed)
                return None if ends else found
        return None if ends else results

    def _submit_some(
        self,
        waiting: list[Any],
        results: list[Any],
        running: dict[Any, int],
        done: "queue.SimpleQueue[Any]",
    ) -> None:
        """Submits the last points that wait, as many as may run."""

        def submit() -> None:
            while waiting and len(running) < self._most:
                i, point = waiting.pop()
                future = self._submit(point)
                if isinstance(future, Failed):
                    results[i] = future
                    continue
                running[future] = i
                future.add_done_callback(done.put)

        threads = isinstance(self._pool, futures.ThreadPoolExecutor)
        if waiting and self._make is not None and threads:
            _in_daemon(submit)
        else:
            submit()

    def _submit(self, point: Any) -> Any:
        """The future of a point, or why there is none."""
        try:
            return self._sender.submit(self._pool, point)
        except (futures.BrokenExecutor, OSError) as error:
            # OSError: its processes died a moment ago, and their pipe is closed.
            return _Refused(in_words(error))
        except RuntimeError as error:
            kind = RuntimeError if self._works else ValueError
            raise kind(
                f"executor must be running; got {self._pool!r}: {error}."
            ) from error

    def _result(self, future: Any) -> Any:
        """The result of a call, or why there is none."""
        try:
            error = future.exception()
        except futures.CancelledError as cancelled:
            error = cancelled
        if isinstance(error, futures.BrokenExecutor):
            return _Lost(in_words(error))
        if error is not None:
            return failed(error)
        return self._sender.result(self._pool, future)

    def _hung(
        self,
        results: list[Any],
        running: dict[Any, int],
        waiting: list[Any],
        passed: Callable[[int, Any], bool],
    ) -> list[Any]:
        """The results if some points hang; the executor is replaced if it can be."""
        failed = Failed(f"no result within {self._timeout} s")
        waited = {future for future in running if future.cancel()}
        hanging = running.keys() - waited
        replaced = self._make is not None and hanging
        if replaced:
            self._end(hangs=True)
        elif self._make is None:
            still = any(not future.done() for future in self._hanging)
            if still and all(result is None for result in results):
                raise RuntimeError(
                    f"executor hangs: no point ended within {self._timeout} s, and an "
                    "earlier one still runs. Pass workers=, or a function that makes "
                    "an executor, and it is replaced."
                )
            self._hanging |= hanging
        unasked = [running[future] for future in waited] + [i for i, _ in waiting]
        for i in unasked:
            results[i] = _Unasked("waited")
        for i in [running[future] for future in hanging] + (
            [] if replaced else unasked
        ):
            results[i] = failed
            passed(i, failed)
        return results


def check_executor(executor: Any) -> None:
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


def _loky(workers: int) -> Callable[[], Any]:
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


def _halves(points: list[int]) -> list[list[int]]:
    """Two parts, of which none is empty."""
    middle = len(points) // 2
    return [part for part in (points[:middle], points[middle:]) if part]


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


def _end(pool: Any, hangs: bool) -> None:
    """Ends an executor that a function of the caller made, without waiting for it."""
    if not hangs:
        pool.shutdown(wait=False)
        return
    if "kill_workers" in inspect.signature(pool.shutdown).parameters:
        pool.shutdown(kill_workers=True)
        return
    processes = list((getattr(pool, "_processes", None) or {}).values())
    pool.shutdown(wait=False)
    for process in processes:
        process.kill()
    # At its exit, the interpreter waits for threads that are listed here.
    listed = vars(importlib.import_module("concurrent.futures.thread"))
    listed = listed.get("_threads_queues", {})
    for thread in getattr(pool, "_threads", ()):
        listed.pop(thread, None)
