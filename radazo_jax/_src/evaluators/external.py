"""Values of points by calls of a Python function: here, in threads or in processes."""

import dataclasses
import functools
import inspect
import math
import reprlib
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from radazo_jax._src import checks
from radazo_jax._src.contracts import Evaluator, Points, Values
from radazo_jax._src.evaluators import pools
from radazo_jax._src.evaluators.sending import Failed, copy, failed


class Mistake(TypeError):
    """A mistake in a function, which fails at every point. Its cause is the error."""


class Outcome(NamedTuple):
    """Results and failures at some points.

    Attributes:
      values: The values, float64, [n]; NaN at points that failed. If the function
        returned several for a point: [n, G].
      infos: The other results of the function, or `None`, n of them.
      failures: Texts about the points that failed, by number.
    """

    values: np.ndarray
    infos: list[Any]
    failures: dict[int, str]


@dataclasses.dataclass(frozen=True, repr=False)
class External(Evaluator):
    """See `external`."""

    _constructor = "external"
    compiled = False

    workers: int | None = None
    executor: futures.Executor | Callable[[], futures.Executor] | None = None
    batched: bool = False
    timeout: float | None = None
    retries: int = 0

    def __post_init__(self) -> None:
        if self.workers is not None:
            checks.check_int_at_least("workers", self.workers, 1)
            if self.executor is not None:
                raise ValueError(
                    "workers must be None if an executor is given; got "
                    f"{self.workers}. Give one of them."
                )
        pools.check_executor(self.executor)
        if not isinstance(self.batched, bool):
            raise TypeError(f"batched must be True or False; got {self.batched!r}.")
        checks.check_int_at_least("retries", self.retries, 0)
        if self.timeout is None:
            return
        checks.check_positive("timeout", self.timeout)
        if self.workers is None and self.executor is None:
            raise ValueError(
                "timeout must be None if points are evaluated in turn; got "
                f"{self.timeout!r}. Pass workers=1, or "
                "executor=lambda: ThreadPoolExecutor(1)."
            )

    @property
    def in_turn(self) -> bool:
        """Whether each point is evaluated before the next one is chosen."""
        return self.workers is None and self.executor is None and not self.batched

    @contextmanager
    def open(
        self,
        fun: Callable[[optax.Params], Any],
        *,
        vector_valued: bool = False,
        context: Callable[[], AbstractContextManager[Any]] = nullcontext,
        interrupted: Callable[[], bool] = lambda: False,
    ) -> Iterator["Calls"]:
        """Opens what evaluates points; workers that it started end with it.

        Args:
          fun: `fun(params)` returns a number, or a pair of a number and anything.
          vector_valued: Whether `fun` may return several numbers for a point.
          context: Makes the context of calls in this thread.
          interrupted: Asked now and then whether to stop.
        """
        if self.workers is None and self.executor is None:
            run = functools.partial(_in_turn, fun, context, interrupted)
            yield Calls(self, run, vector_valued)
            return
        pool = pools.Pool(fun, self.workers, self.executor, self.timeout, interrupted)
        try:
            yield Calls(self, pool.run, vector_valued, pool)
        finally:
            pool.close()

    def cache(self, points: Points) -> Points:
        return points

    def evaluate(
        self,
        fun: Callable[[optax.Params], Any],
        params: optax.Params,
        points: Points,
        has_aux: bool,
    ) -> tuple[Values, Any]:
        raise TypeError(
            f"fun must be evaluated outside of compiled programs by {self!r}; got a "
            "call within one. Pass it to train."
        )


def external(
    workers: int | None = None,
    executor: futures.Executor | Callable[[], futures.Executor] | None = None,
    batched: bool = False,
    timeout: float | None = None,
    retries: int = 0,
) -> Evaluator:
    """Evaluates points by calls of a Python function that JAX need not trace.

    Without workers and without an executor, points are evaluated in turn in this
    process. It is an evaluator of `train`; `minimize_black_box` has arguments of the
    same names.

    Args:
      workers: Number of processes that evaluate points, which the package `loky` starts
        at the first step and ends with the run. `fun` may be any function that
        `cloudpickle` can store, such as a lambda. Each process gets it once, as it is
        when the run starts. If a process dies or hangs, its point
        has failed, and all of the processes are replaced.
      executor: A `concurrent.futures.Executor`, which is used as it is; or a function
        without arguments that makes one, which is called again if a worker has died or
        hangs.
      batched: Whether `fun` takes all n points of a step at once, a tree of arrays with
        an additional first axis, and returns n values, or a pair of these and n other
        objects, or `None` instead of the objects; n is the same in all steps.
      timeout: Seconds; needs workers or an executor. If no point ends for this long,
        those that run have failed, and those that wait are evaluated by replaced
        workers. A thread that hangs keeps running. An executor that cannot be
        replaced keeps what hangs; all points of the step have then failed.
      retries: Number of further evaluations of a point that failed.

    Returns:
      The evaluator. Equal ones are equal if they have the same executor.

    Raises:
      TypeError, ValueError: If an argument is not valid, or two exclude each other.

    Examples:
      >>> import radazo_jax as zo
      >>> zo.external(workers=8, timeout=60)
      external(workers=8, timeout=60)
    """
    return External(workers, executor, batched, timeout, retries)


class Calls:
    """Evaluates points by calls of one function."""

    def __init__(
        self,
        evaluator: External,
        run: Callable[[list[Any]], list[Any] | None],
        vector_valued: bool,
        pool: pools.Pool | None = None,
    ):
        """Describes the calls.

        Args:
          evaluator: The evaluator.
          run: Calls the function at points; `None` if it was interrupted.
          vector_valued: Whether the function may return several numbers for a point.
          pool: The executor or the workers; `None` if points are evaluated in turn.
        """
        self._evaluator, self._run, self._pool = evaluator, run, pool
        self._vector_valued = vector_valued
        self._begun = self._works = False

    @property
    def workers(self) -> int:
        """The number of calls side by side, as far as it is known."""
        if self._pool is None or self._evaluator.batched:
            return 1
        return self._pool.workers

    @property
    def room(self) -> int | None:
        """The number of points that are evaluated together at most; `None` for all."""
        return 1 if self._evaluator.in_turn else self._evaluator.workers

    def evaluate(self, candidates: optax.Params) -> Outcome | None:
        """Evaluates points, and those that are the same once, unless `batched`.

        Each call gets a copy of its point, so the function may write to its argument.

        Args:
          candidates: The points, a tree of NumPy arrays, [n, …].

        Returns:
          The outcome at all points, or `None` if it was interrupted.

        Raises:
          Mistake: If the function has not returned a number yet, and fails at all
            points by errors that do not depend on them. At the first call of all, the
            first point is enough if points are evaluated in turn.
        """
        leaves = jax.tree.leaves(candidates)
        keys: list[Any] = list(range(len(leaves[0])))
        if not self._evaluator.batched:
            keys = [tuple(leaf[i].tobytes() for leaf in leaves) for i in keys]
        first = self._evaluator.in_turn and not self._begun
        return self._evaluated(candidates, keys, [1] if first else [])

    def repeat(self, candidates: optax.Params) -> Outcome | None:
        """Evaluates points, also those that are the same, as `evaluate` does once."""
        keys = range(len(jax.tree.leaves(candidates)[0]))
        return self._evaluated(candidates, keys, [])

    def _evaluated(
        self, candidates: optax.Params, keys: Sequence[Any], looks: list[int]
    ) -> Outcome | None:
        """The outcome at points, which are equal if their keys are.

        Args:
          candidates: The points.
          keys: A key for each point.
          looks: The numbers of points after which mistakes are looked for, before the
            last point.
        """
        results: dict[Any, _Result] = {}
        for end in (*looks, len(keys)):
            some = enumerate(keys[:end])
            missing = {key: i for i, key in some if key not in results}
            for _ in range(1 + self._evaluator.retries):
                found = self._called(candidates, list(missing.values()))
                if found is None:
                    return None
                results.update(zip(missing, found, strict=True))
                failed = {key: i for key, i in missing.items() if results[key].problem}
                if not failed:
                    break
                missing = missing if self._evaluator.batched else failed
            self._check_mistake(candidates, list(results.values()))
        return _outcome([results[key] for key in keys])

    def _check_mistake(
        self, candidates: optax.Params, results: "list[_Result]"
    ) -> None:
        """Raises if the function has done nothing so far but fail by mistakes."""
        self._begun = True
        self._works = self._works or any(x.mistake is None for x in results)
        if self._works:
            return
        n, problem = len(results), results[0].problem.removeprefix("returned ")
        where = f"all of the first {n} points" if n > 1 else "the first point"
        is_list = isinstance(candidates, list)
        advice = " fun gets a list, as params is: pass np.array(params)." * is_list
        raise Mistake(
            f"fun must return a number at {where}; got {problem.rstrip('.')}.{advice} "
            "Correct fun: this error is a mistake in it, which ends the run."
        ) from results[0].mistake

    def _called(
        self, candidates: optax.Params, numbers: list[int]
    ) -> "list[_Result] | None":
        """The results at points by number; at all of them if they are `batched`."""
        batched = self._evaluator.batched
        points = [jax.tree.map(lambda x, i=i: x[i], candidates) for i in numbers]
        called = self._run([candidates] if batched else points)
        if called is None:
            return None
        if batched:
            called = _split(called[0], len(numbers))
        return [_read(result, self._vector_valued) for result in called]


def _in_turn(
    fun: Callable[[optax.Params], Any],
    context: Callable[[], AbstractContextManager[Any]],
    interrupted: Callable[[], bool],
    points: list[Any],
) -> list[Any] | None:
    """Calls a function at points, within a context, which is the caller's."""
    results: list[Any] = []
    for point in points:
        if interrupted():
            return None
        try:
            with context():
                results.append(fun(copy(point)))
        except Exception as error:
            results.append(failed(error))
    return None if interrupted() else results


class _Result(NamedTuple):
    """The result at a point.

    Attributes:
      value: The value or values.
      info: The other result of the function.
      problem: A text if the point failed.
      mistake: The error if the function is wrong, and not the point.
    """

    value: Any
    info: Any
    problem: str
    mistake: BaseException | None = None


def _outcome(results: list[_Result]) -> Outcome:
    """The results; a point has failed if it has another number of values."""
    failures = {i: result.problem for i, result in enumerate(results) if result.problem}
    shape = next((np.shape(x.value) for x in results if np.ndim(x.value)), ())
    values = np.full((len(results), *shape), np.nan)
    for i, result in enumerate(results):
        found = np.shape(result.value)
        if found == shape:
            values[i] = result.value
        else:
            failures.setdefault(i, f"returned shape {found}, another point {shape}")
    return Outcome(values, [result.info for result in results], failures)


def _split(result: Any, n: int) -> list[Any]:
    """The result of a batch, point by point."""
    if isinstance(result, Failed):
        return [result] * n
    try:
        values, infos = _pair(result, n)
        listed = values if isinstance(values, list | tuple) else np.asarray(values)
        return list(zip(listed, [None] * n if infos is None else infos, strict=True))
    except Exception:
        problem = f"returned {_described(result)} for {n} points"
        return [Failed(problem, TypeError(f"fun {problem}"))] * n


def _pair(result: Any, n: int) -> tuple[Any, Any]:
    """The values of a batch and the objects, which a tuple of two may hold."""
    infos = None
    if isinstance(result, tuple) and len(result) == 2:
        first = result[0]
        if np.ndim(first) and len(first) == n:
            result, infos = result
    if len(result) != n:
        raise ValueError
    return result, infos


def _read(result: Any, vector_valued: bool) -> _Result:
    """Reads what a function returned for a point."""
    if isinstance(result, Failed):
        return _Result(np.nan, None, *result)
    pair = isinstance(result, tuple) and len(result) == 2
    value, info = result if pair else (result, None)
    try:
        if vector_valued and np.ndim(value) == 1:
            return _vector(value, info)
        number = _number(value)
    except Exception:  # Reading a value calls methods of its library.
        if isinstance(value, jax.core.Tracer):
            inside = (
                "because the run was called inside of jax.jit, jax.vmap or jax.grad"
            )
            return _wrong(f"a traced array, {inside}", info)
        return _wrong(f"{_described(value)}, which cannot be read as a number", info)
    if number is None:
        return _wrong(f"{_described(value)}, not a number", info)
    return _Result(number, info, "" if np.isfinite(number) else f"returned {number}")


def _number(value: Any) -> float | None:
    """A real number, or an array of one, of any library; `None` if it is neither."""
    shape = np.shape(value)
    is_one = hasattr(value, "__float__") or hasattr(value, "item")
    if not is_one or math.prod(shape) != 1:
        return None
    if shape and hasattr(value, "item"):
        value, shape = value.item(), ()
    for _ in shape:  # Not all libraries convert an array that has axes.
        value = value[0]
    # NumPy reads numbers from texts, and drops imaginary parts.
    is_complex = "complex" in str(getattr(value, "dtype", ""))
    if is_complex or isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        return None
    return float(value)


def _wrong(returned: str, info: Any) -> _Result:
    """The result of a function that returned something else than a number."""
    problem = f"returned {returned}"
    return _Result(np.nan, info, problem, TypeError(f"fun {problem}"))


def _vector(values: Any, info: Any) -> _Result:
    """Reads several values of a point."""
    array = np.asarray(values)
    if array.dtype.kind not in "fiub" or not array.size:
        return _wrong(f"{_described(values)}, not numbers", info)
    failed = int(np.sum(~np.isfinite(array)))
    problem = f"returned {failed} values of {array.size} that are not finite"
    return _Result(array.astype(np.float64), info, problem if failed else "")


def _described(value: Any) -> str:
    if inspect.iscoroutine(value):
        value.close()  # Python warns of one that was not awaited.
        return "a coroutine of an async function"
    if hasattr(value, "dtype") and np.ndim(value) > 0:
        return f"an array of shape {np.shape(value)} and dtype {value.dtype}"
    text = " ".join(reprlib.repr(value).split())
    return f"{text[:40]}{'…' if len(text) > 40 else ''} of type {type(value).__name__}"
