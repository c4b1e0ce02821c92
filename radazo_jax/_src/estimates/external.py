"""Values of points by calls of a Python function: here, in threads or in processes."""

import dataclasses
import functools
import inspect
import math
import reprlib
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
import optax

from radazo_jax._src.base import checks
from radazo_jax._src.base.names import checks_names
from radazo_jax._src.estimates import pools
from radazo_jax._src.estimates.contracts import Evaluator, Points, Values
from radazo_jax._src.estimates.pools import Failed, copy, failed


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
        residuals: bool = False,
        context: Callable[[], AbstractContextManager[Any]] = nullcontext,
        interrupted: Callable[[], bool] = lambda: False,
    ) -> Iterator["Calls"]:
        """Opens what evaluates points; workers that it started end with it.

        Args:
          fun: `fun(params)` returns a number, or a pair of a number and anything.
          vector_valued: Whether `fun` may return several numbers for a point.
          residuals: Whether `fun` returns residuals: an array, or a tree of arrays.
          context: Makes the context of calls in this thread.
          interrupted: Asked now and then whether to stop.
        """
        read: Callable[[Any], Reply] = _read_residuals
        if not residuals:
            read = functools.partial(_read, vector_valued=vector_valued)
        if self.workers is None and self.executor is None:
            call = functools.partial(_called, fun, context)
            yield Calls(self, read, interrupted, call=call)
            return
        pool = pools.Pool(fun, self.workers, self.executor, self.timeout, interrupted)
        try:
            yield Calls(self, read, interrupted, pool=pool)
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


@checks_names
def external(
    workers: int | None = None,
    executor: futures.Executor | Callable[[], futures.Executor] | None = None,
    batched: bool = False,
    timeout: float | None = None,
    retries: int = 0,
) -> Evaluator:
    """Evaluates points by calls of a Python function that JAX need not trace.

    Without workers and without an executor, points are evaluated in turn in this
    process. It is an evaluator of `train`; `minimize` has arguments of the
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
    """Evaluates points by calls of one function.

    Attributes:
      works: Whether the function is known to do more than fail by mistakes.
    """

    def __init__(
        self,
        evaluator: External,
        read: Callable[[Any], "Reply"],
        interrupted: Callable[[], bool],
        call: Callable[[Any], Any] | None = None,
        pool: pools.Pool | None = None,
    ):
        """Describes the calls.

        Args:
          evaluator: The evaluator.
          read: Reads what the function returned for a point.
          interrupted: Asked before each call whether to stop.
          call: Calls the function at a point in this thread.
          pool: The executor or the workers; `None` if points are evaluated in turn.
        """
        self._evaluator, self._read, self._interrupted = evaluator, read, interrupted
        self._call, self._pool = call, pool
        self.works = False

    def each(
        self,
        count: int,
        one: Callable[[int], Any],
        together: Callable[[], Any],
        arrived: Callable[[int, "Reply"], object],
    ) -> bool:
        """Evaluates points, and passes each reply on when it arrives.

        Args:
          count: The number of points, n.
          one: `one(i)` makes a point, which the function may write to.
          together: Makes all points, [n, …], for `batched` functions.
          arrived: `arrived(i, reply)`, called in this thread once a point has a value
            or has failed for the last time. If it returns True, no further point is
            begun; those that run are waited for.

        Returns:
          Whether it was not interrupted.

        Raises:
          Mistake: If the function has not returned a number yet, and fails at all
            points by errors that do not depend on them. The first point is enough if
            points are evaluated in turn. Nothing has arrived then.
        """
        held: list[tuple[int, Reply]] = []

        def passed(i: int, reply: Reply) -> bool:
            held.append((i, reply))
            self.works = self.works or reply.mistake is None
            if not self.works:
                return self._evaluator.in_turn
            ends = [arrived(*each) for each in held]
            held.clear()
            return any(ends)

        if self._evaluator.batched:
            completes = self._batch(count, together, passed)
        elif self._call is not None:
            completes = self._in_turn(count, one, self._call, passed)
        else:
            completes = self._on_pool(count, one, passed)
        if held and completes:
            _raise_mistake(one(0), [reply for _, reply in held])
        return completes

    def _in_turn(
        self,
        count: int,
        one: Callable[[int], Any],
        call: Callable[[Any], Any],
        passed: Callable[[int, "Reply"], bool],
    ) -> bool:
        """`each` in this thread."""
        for i in range(count):
            begun = time.perf_counter()
            for _ in range(1 + self._evaluator.retries):
                if self._interrupted():
                    return False
                reply = self._read(call(one(i)))
                if not reply.problem:
                    break
            if passed(i, Reply(*reply[:-1], time.perf_counter() - begun)):
                break
        return True

    def _batch(
        self,
        count: int,
        together: Callable[[], Any],
        passed: Callable[[int, "Reply"], bool],
    ) -> bool:
        """`each` of a function that takes all points at once."""
        begun, found = time.perf_counter(), []

        def whole(i: int, result: Any, seconds: float) -> bool:
            del i, seconds
            found.append(result)
            return False

        for _ in range(1 + self._evaluator.retries):
            if self._interrupted():
                return False
            if self._call is not None:
                found.append(self._call(together()))
            elif self._pool is None or not self._pool.run([together()], whole):
                return False
            replies = [self._read(part) for part in _split(found[-1], count)]
            if not any(reply.problem for reply in replies):
                break
        seconds = (time.perf_counter() - begun) / count
        for i, reply in enumerate(replies):
            passed(i, reply._replace(seconds=seconds))
        return True

    def _on_pool(
        self,
        count: int,
        one: Callable[[int], Any],
        passed: Callable[[int, "Reply"], bool],
    ) -> bool:
        """`each` on an executor."""
        assert self._pool is not None
        left, ends = list(range(count)), False
        for attempt in range(1 + self._evaluator.retries):
            which, left = left, []
            is_last = attempt == self._evaluator.retries

            def arrived(
                j: int,
                result: Any,
                seconds: float,
                which: list[int] = which,
                left: list[int] = left,
                is_last: bool = is_last,
            ) -> bool:
                nonlocal ends
                reply = self._read(result)._replace(seconds=seconds)
                if reply.problem and not is_last:
                    left.append(which[j])
                else:
                    ends = passed(which[j], reply) or ends
                return ends

            if not self._pool.run([one(i) for i in which], arrived):
                return False
            if ends or not left:
                break
        return True

    def evaluate(
        self, candidates: optax.Params, distinct: bool = True
    ) -> Outcome | None:
        """Evaluates points, and those that are the same once, unless `batched`.

        Each call gets a copy of its point, so the function may write to its argument.

        Args:
          candidates: The points, a tree of NumPy arrays, [n, …].
          distinct: Whether points that are the same are evaluated once.

        Returns:
          The outcome at all points, or `None` if it was interrupted.

        Raises:
          Mistake: As `each`.
        """
        leaves = jax.tree.leaves(candidates)
        keys: list[Any] = list(range(len(leaves[0])))
        if distinct and not self._evaluator.batched:
            keys = [tuple(leaf[i].tobytes() for leaf in leaves) for i in keys]
        places = {key: i for i, key in reversed(list(enumerate(keys)))}
        which, replies = sorted(places.values()), {}
        if not self.each(
            len(which),
            lambda j: jax.tree.map(lambda x: np.array(x[which[j]]), candidates),
            lambda: copy(candidates),
            lambda j, reply: replies.update({which[j]: reply}),
        ):
            return None
        return _outcome([replies[places[key]] for key in keys])


def _called(
    fun: Callable[[optax.Params], Any],
    context: Callable[[], AbstractContextManager[Any]],
    point: Any,
) -> Any:
    """Calls a function at a point, within a context, which is the caller's."""
    try:
        with context():
            return fun(point)
    except (Exception, SystemExit) as error:
        return failed(error)


class Reply(NamedTuple):
    """The reply of a function at a point.

    Attributes:
      value: The value or values.
      info: The other result of the function.
      problem: A text if the point failed.
      mistake: The error if the function is wrong, and not the point.
      raised: Whether the function returned nothing.
      dtype: The name of the dtype of the value if it is narrower than float64.
      seconds: Duration, from the submission to an executor.
    """

    value: Any
    info: Any
    problem: str
    mistake: BaseException | None = None
    raised: bool = False
    dtype: str = ""
    seconds: float = 0.0


def _raise_mistake(params: Any, replies: "list[Reply]") -> NoReturn:
    """Raises the error of a function that has failed at all points by mistakes.

    Args:
      params: A point.
      replies: The replies.
    """
    n, problem = len(replies), replies[0].problem.removeprefix("returned ")
    where = f"all of the first {n} points" if n > 1 else "the first point"
    advice = ""
    if isinstance(params, list):
        advice = " fun gets a list, as params is: pass np.array(params)."
    elif "numpy.ndarray' object has no attribute 'at'" in problem:
        advice = " fun gets NumPy arrays: pass jax.jit(fun)."
    elif "cannot pickle" in problem:
        advice = " Results return from processes: the second one must be picklable."
    elif problem.startswith("an array of shape"):
        advice = (
            " Return one number: the sum of squares is np.sum(r**2). For residuals, "
            "pass methods.least_squares()."
        )
    raise Mistake(
        f"fun must return a number at {where}; got {problem.rstrip('.')}.{advice} "
        "Correct fun: this error is a mistake in it, which ends the run."
    ) from replies[0].mistake


def _outcome(results: list[Reply]) -> Outcome:
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
        listed = values if isinstance(values, list | tuple) else unmasked(values)
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


def _read(result: Any, vector_valued: bool) -> Reply:
    """Reads what a function returned for a point."""
    if type(result) is float and math.isfinite(result):  # The usual case.
        return Reply(result, None, "")
    if isinstance(result, Failed):
        return Reply(np.nan, None, result.problem, result.error, raised=True)
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
    problem = "" if np.isfinite(number) else f"returned {number}"
    return Reply(number, info, problem, dtype=narrow(value))


def _read_residuals(result: Any) -> Reply:
    """Reads residuals: a number, an array, or a tree of them."""
    pair = isinstance(result, tuple) and len(result) == 2
    value, info = result if pair else (result, None)
    is_number = np.ndim(value) == 0 and not isinstance(value, dict)
    if isinstance(result, Failed) or is_number:
        return _read(result, vector_valued=False)
    try:
        leaves = [np.ravel(unmasked(x)) for x in jax.tree.leaves(value)]
        return _vector(np.concatenate(leaves), info)
    except Exception:
        return _wrong(f"{_described(value)}, not residuals", info)


def unmasked(values: Any) -> np.ndarray:
    """Values as an array, in which masked ones, which have failed, are NaN."""
    if isinstance(values, np.ma.MaskedArray):
        return np.ma.filled(values.astype(np.float64), np.nan)
    return np.asarray(values)


def narrow(value: Any) -> str:
    """The name of a floating-point dtype that is narrower than float64."""
    dtype = getattr(value, "dtype", None)
    if dtype is None or getattr(dtype, "itemsize", 8) >= 8:
        return ""
    return str(dtype) if jnp.issubdtype(dtype, jnp.floating) else ""


def _number(value: Any) -> float | None:
    """A real number, or an array of one, of any library; `None` if it is neither."""
    if isinstance(value, np.ma.MaskedArray):
        value = unmasked(value)
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


def _wrong(returned: str, info: Any) -> Reply:
    """The result of a function that returned something else than a number."""
    problem = f"returned {returned}"
    return Reply(np.nan, info, problem, TypeError(f"fun {problem}"))


def _vector(values: Any, info: Any) -> Reply:
    """Reads several values of a point."""
    array = unmasked(values)
    if array.dtype.kind not in "fiub" or not array.size:
        return _wrong(f"{_described(values)}, not numbers", info)
    failed = int(np.sum(~np.isfinite(array)))
    problem = f"returned {failed} values of {array.size} that are not finite"
    wide = array.astype(np.float64)
    return Reply(wide, info, problem if failed else "", dtype=narrow(array))


def _described(value: Any) -> str:
    if inspect.iscoroutine(value):
        value.close()  # Python warns of one that was not awaited.
        return "a coroutine of an async function"
    if hasattr(value, "dtype") and np.ndim(value) > 0:
        return f"an array of shape {np.shape(value)} and dtype {value.dtype}"
    text = " ".join(reprlib.repr(value).split())
    return f"{text[:40]}{'…' if len(text) > 40 else ''} of type {type(value).__name__}"
