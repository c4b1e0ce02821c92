"""Values of points evaluated outside of JAX: any Python function, on any executor."""

import concurrent.futures as futures
import math
import multiprocessing
import pickle
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

# How often a wait looks whether it was interrupted, in seconds.
_POLL = 0.1

_GUARD = 'A script that starts processes must stand below if __name__ == "__main__":.'

# A function that makes executors makes this many for a step before its points are
# submitted one at a time, so that only the one that breaks them fails.
_TOGETHER = 2


class Outcome(NamedTuple):
    """Results and failures of some points.

    Attributes:
      values: The values, float64, [n]; NaN at points that failed. If the function
        returned several for a point: [n, G].
      infos: The other results of the function, or `None`, n of them.
      failures: Texts about the points that failed, by number.
    """

    values: np.ndarray
    infos: list[Any]
    failures: dict[int, str]


Evaluate = Callable[[Any, int], Outcome | None]


@contextmanager
def outside(
    fun: Callable[[optax.Params], Any],
    executor: Any,
    *,
    batched: bool = False,
    vector_valued: bool = False,
    timeout: float | None = None,
    retries: int = 0,
    interrupted: Callable[[], bool] = lambda: False,
) -> Iterator[Evaluate]:
    """Evaluates trees of NumPy arrays by a function, on an executor.

    Each call gets a copy of its point, so the function may write to its argument.

    Args:
      fun: `fun(params)` returns a number, or a pair of a number and anything.
      executor: A `concurrent.futures.Executor`, a function that makes one, or `None`.
      batched: Whether `fun` takes all points at once.
      vector_valued: Whether `fun` may return several numbers for a point.
      timeout: Seconds. Points that run while none ends for this long have failed.
      retries: Number of further evaluations of a point that failed.
      interrupted: Asked now and then whether to stop.

    Yields:
      `evaluate(candidates, n)`, with `None` for the outcome if it was interrupted.
    """
    pools: list[Any] = []
    if executor is None:
        run = _in_turn(fun)
    elif callable(executor):
        run = _submitting(fun, executor, pools, timeout)
    else:
        check_executor(executor, fun)
        run = _submitting(fun, None, [executor], timeout)

    def evaluate(candidates: optax.Params, n: int) -> Outcome | None:
        values: list[Any] = [np.nan] * n
        infos: list[Any] = [None] * n
        failures: dict[int, str] = {}
        pending = list(range(n))
        for _ in range(1 + retries):
            points = (
                [candidates] if batched else [_point(candidates, i) for i in pending]
            )
            found = run(points, interrupted)
            if found is None:
                return None
            if batched:
                found = _split(found[0], n)
            for i, result in zip(pending, found, strict=True):
                failures.pop(i, None)
                values[i], infos[i], problem = _parsed(result, vector_valued)
                if problem:
                    failures[i] = problem
            pending = list(range(n)) if batched else list(failures)
            if not failures:
                break
        return Outcome(_stacked(values, failures), infos, failures)

    try:
        yield evaluate
    finally:
        for pool in pools:
            pool.shutdown(wait=False)


def distinct(evaluate: Evaluate) -> Evaluate:
    """Evaluates points once that are the same."""

    def once(candidates: optax.Params, n: int) -> Outcome | None:
        leaves = jax.tree.leaves(candidates)
        # Of each point, its place among those that are evaluated.
        places: dict[tuple[bytes, ...], int] = {}
        where = [
            places.setdefault(tuple(leaf[i].tobytes() for leaf in leaves), len(places))
            for i in range(n)
        ]
        if len(places) == n:
            return evaluate(candidates, n)
        chosen = [where.index(place) for place in range(len(places))]
        found = evaluate(jax.tree.map(lambda x: x[chosen], candidates), len(chosen))
        if found is None:
            return None
        failures = {
            i: found.failures[place]
            for i, place in enumerate(where)
            if place in found.failures
        }
        infos = [found.infos[place] for place in where]
        return Outcome(found.values[where], infos, failures)

    return once


def in_two_parts(
    evaluate: Evaluate, candidates: Any, n: int, needs_all: Callable[[float], bool]
) -> Outcome | None:
    """Evaluates the first point, and the others if its value needs them.

    Args:
      evaluate: Evaluates points.
      candidates: The points.
      n: The number of points.
      needs_all: Whether the others are needed, given the first value.

    Returns:
      The outcome of all points, or of the first one.
    """
    first = evaluate(jax.tree.map(lambda x: x[:1], candidates), 1)
    if first is None or not needs_all(first.values[0]):
        return first
    # What is the same as the first is not evaluated again.
    leaves = jax.tree.leaves(candidates)
    others = [
        i
        for i in range(1, n)
        if any(leaf[i].tobytes() != leaf[0].tobytes() for leaf in leaves)
    ]
    rest = evaluate(jax.tree.map(lambda x: x[others], candidates), len(others))
    if rest is None:
        return None
    places = np.zeros(n, int)
    places[others] = 1 + np.arange(len(others))
    found = [first.failures.get(0)] + [rest.failures.get(i) for i in range(len(others))]
    infos = [*first.infos, *rest.infos]
    return Outcome(
        np.concatenate([first.values, rest.values])[places],
        [infos[place] for place in places],
        {i: text for i, place in enumerate(places) if (text := found[place])},
    )


class _Failed(NamedTuple):
    """A point that gave no result."""

    problem: str


class _Broken(_Failed):
    """The failure of a point whose executor broke before it gave a result."""


_Run = Callable[[list[Any], Callable[[], bool]], list[Any] | None]


def _in_turn(fun: Callable[[optax.Params], Any]) -> _Run:
    def run(points: list[Any], interrupted: Callable[[], bool]) -> list[Any] | None:
        results: list[Any] = []
        for point in points:
            if interrupted():
                return None
            try:
                results.append(fun(_own(point)))
            except Exception as error:
                results.append(_Failed(_in_words(error)))
        return None if interrupted() else results

    return run


def _submitting(
    fun: Callable[[optax.Params], Any],
    make: Callable[[], Any] | None,
    pools: list[Any],
    timeout: float | None,
) -> _Run:
    """Submits to the executor in `pools`, which is made if there is none."""
    works = False

    def run(points: list[Any], interrupted: Callable[[], bool]) -> list[Any] | None:
        nonlocal works
        results: list[Any] = [None] * len(points)
        missing, broken = list(range(len(points))), 0
        while missing:
            if not pools and make is not None:
                pools.append(make())
                check_executor(pools[0], fun)
            # The one that breaks an executor fails with it: alone, in the end.
            batch = missing if broken < _TOGETHER else missing[:1]
            found = _wait(
                fun, pools[0], [points[i] for i in batch], timeout, interrupted
            )
            if found is None:
                return None
            lost = [
                i for i, x in zip(batch, found, strict=True) if isinstance(x, _Broken)
            ]
            if lost and make is None:
                raise RuntimeError(
                    "executor is broken: a worker died "
                    f"({found[batch.index(lost[0])].problem}). Give a function that "
                    "makes an executor, and it is made again."
                    + ("" if works else f" {_GUARD}")
                )
            works = works or len(lost) < len(batch)
            if lost:
                pools.pop().shutdown(wait=False)
                broken += 1
            # Together, one point can break it before another returns.
            if broken == 2 * _TOGETHER and not works:
                raise RuntimeError(
                    f"executor broke {broken} times before fun returned once "
                    f"({found[0].problem}). {_GUARD}"
                )
            for i, result in zip(batch, found, strict=True):
                results[i] = result
            again = lost if len(batch) > 1 else []
            missing = again + missing[len(batch) :]
        return results

    return run


def _wait(
    fun: Callable[[optax.Params], Any],
    pool: futures.Executor,
    points: list[Any],
    timeout: float | None,
    interrupted: Callable[[], bool],
) -> list[Any] | None:
    submitted: list[Any] = []
    for point in points:
        try:
            submitted.append(pool.submit(fun, _own(point)))
        except (futures.BrokenExecutor, OSError) as error:
            # OSError: its processes died a moment ago, and their pipe is closed.
            submitted.append(_Broken(_in_words(error)))
        except RuntimeError as error:
            raise ValueError(
                f"executor must be running; got {pool!r}: {error}."
            ) from error
    pending = {f for f in submitted if not isinstance(f, _Broken)}
    since = time.monotonic()
    # Woken by the last alone: each time costs the workers a turn of the interpreter.
    poll = _POLL if timeout is None else min(_POLL, timeout)
    while pending:
        left = len(pending)
        pending = futures.wait(pending, poll).not_done
        if len(pending) < left:
            since = time.monotonic()
        stop = interrupted()
        if stop or (timeout is not None and time.monotonic() - since >= timeout):
            for future in pending:
                future.cancel()
            if stop:
                return None
            break

    def result(future: Any) -> Any:
        if isinstance(future, _Broken):
            return future
        if future in pending:
            return _Failed(f"no result within {timeout} s")
        try:
            return future.result()
        except futures.BrokenExecutor as error:
            return _Broken(_in_words(error))
        except Exception as error:
            return _Failed(_in_words(error))

    return [result(future) for future in submitted]


def check_executor(executor: Any, fun: Callable[[optax.Params], Any]) -> None:
    """Raises if `fun` cannot be evaluated on the executor."""
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
            "hang; got a ProcessPoolExecutor that forks. Make it with "
            'mp_context=multiprocessing.get_context("spawn").'
        )
    try:
        pickle.dumps(fun)
    except Exception as error:
        raise TypeError(
            f"fun must be picklable to run in processes; got {fun!r} ({error}). Define "
            "it at the top level of a module, or use a ThreadPoolExecutor."
        ) from error


def _point(candidates: optax.Params, i: int) -> Any:
    return jax.tree.map(lambda x: x[i], candidates)


def _own(point: Any) -> Any:
    """A copy of a point, since the function may write to its argument."""
    return jax.tree.map(np.copy, point)


def _split(result: Any, n: int) -> list[Any]:
    """The result of a batch, point by point."""
    if isinstance(result, _Failed):
        return [result] * n
    values, infos = result if isinstance(result, tuple) else (result, [None] * n)
    try:
        listed = list(np.asarray(values))
    except Exception:
        listed = []
    if len(listed) != n or len(infos) != n:
        return [_Failed(f"returned {_described(values)} for {n} points")] * n
    return list(zip(listed, infos, strict=True))


def _parsed(result: Any, vector_valued: bool) -> tuple[Any, Any, str]:
    """The value or values, what came with them, and what is wrong with them."""
    if isinstance(result, _Failed):
        return np.nan, None, result.problem
    pair = isinstance(result, tuple) and len(result) == 2
    value, info = result if pair else (result, None)
    if vector_valued and np.ndim(value) == 1:
        return _vector(value, info)
    # Numbers and arrays of all libraries have this method.
    shape = np.shape(value)
    if not hasattr(value, "__float__") or math.prod(shape) != 1:
        return np.nan, info, f"returned {_described(value)}, not a number"
    try:
        for _ in shape:  # Not all libraries convert an array that has axes.
            value = value[0]
        number = float(value)
    except Exception as error:
        return np.nan, info, _in_words(error)
    return number, info, "" if np.isfinite(number) else f"returned {number}"


def _vector(values: Any, info: Any) -> tuple[Any, Any, str]:
    """Several values of a point, as `_parsed` returns them."""
    array = np.asarray(values)
    if array.dtype.kind not in "fiub" or not array.size:
        return np.nan, info, f"returned {_described(values)}, not numbers"
    failed = int(np.sum(~np.isfinite(array)))
    problem = f"returned {failed} values of {array.size} that are not finite"
    return array.astype(np.float64), info, problem if failed else ""


def _stacked(values: list[Any], failures: dict[int, str]) -> np.ndarray:
    """The values of all points; NaN, with a failure, for a point with another number.

    Args:
      values: A number or a vector for each point.
      failures: Texts about the points that failed, by number; more are added.
    """
    shape = next((np.shape(x) for x in values if np.ndim(x)), ())
    stacked = np.full((len(values), *shape), np.nan)
    for i, value in enumerate(values):
        if np.shape(value) == shape:
            stacked[i] = value
        else:
            message = f"returned shape {np.shape(value)}, another point {shape}"
            failures.setdefault(i, message)
    return stacked


def _described(value: Any) -> str:
    if hasattr(value, "__array__") and np.ndim(value) > 0:
        return f"an array of shape {np.shape(value)}"
    text = repr(value)
    return f"{text[:40]}{'…' if len(text) > 40 else ''} of type {type(value).__name__}"


def _in_words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
