"""Values of points by calls of a Python function: here, in threads or in processes."""

import dataclasses
import functools
import inspect
import math
import reprlib
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import optax

from radazo_jax._src.base import checks
from radazo_jax._src.base.names import checks_names
from radazo_jax._src.estimates import pools
from radazo_jax._src.estimates.contracts import Evaluator, Points
from radazo_jax._src.estimates.pools import Output, failed


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
    """The evaluator that `external` makes."""

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
        fun: Callable[[optax.Params], object],
        *,
        vector_valued: bool = False,
        residuals: bool = False,
        context: Callable[[], AbstractContextManager[object]] = nullcontext,
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
        read = functools.partial(
            _read, vector_valued=vector_valued, residuals=residuals
        )

        def here(points: Sequence[optax.Params], returned: pools.Returned) -> bool:
            try:
                with context():
                    result = fun(points[0])
            except (Exception, SystemExit) as error:
                result = failed(error)
            returned(0, result)
            return True

        if self.workers is None and self.executor is None:
            yield Calls(self, read, here, interrupted)
            return
        pool = pools.Pool(fun, self.workers, self.executor, self.timeout, interrupted)
        try:
            yield Calls(self, read, pool.run, interrupted)
        finally:
            pool.close()

    def cache(self, points: Points) -> Points:
        return points

    def evaluate(
        self,
        fun: Callable[[optax.Params], object],
        params: optax.Params,
        points: Points,
        has_aux: bool,
    ) -> NoReturn:
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
    """Calls of one function, which evaluate points.

    Attributes:
      works: Whether the function is known to do more than fail by mistakes.
    """

    def __init__(
        self,
        evaluator: External,
        read: Callable[[object], Output],
        run: pools.Runner,
        interrupted: Callable[[], bool],
    ):
        """Describes the calls.

        Args:
          evaluator: The evaluator.
          read: Reads what the function returned for a point.
          run: Calls the function at points, as `Pool.run`.
          interrupted: Asked before each call whether to stop.
        """
        self._evaluator, self._read = evaluator, read
        self._run, self._interrupted = run, interrupted
        self.works = False

    def each(
        self,
        count: int,
        points: Callable[[int | slice], optax.Params],
        arrived: Callable[[int, Output], object],
    ) -> bool:
        """Evaluates points, and passes each output on when it arrives.

        Args:
          count: The number of points, n.
          points: `points(i)` makes a point, which the function may write to, and
            `points(slice(None))` all of them, [n, …], for `batched` functions.
          arrived: `arrived(i, output)`, called in this thread once a point has a value
            or has failed for the last time. If it returns True, no further point is
            begun; those that run are waited for.

        Returns:
          Whether it was not interrupted.

        Raises:
          Mistake: If the function has not returned a number yet, and fails at all
            points by errors that do not depend on them. The first point is enough if
            points are evaluated in turn. Nothing has arrived then.
        """
        held: list[tuple[int, Output]] = []
        in_turn, ends = self._evaluator.in_turn, False

        def passed(i: int, output: Output) -> bool:
            nonlocal ends
            held.append((i, output))
            self.works = self.works or output.mistake is None
            if self.works:
                found = [arrived(*each) for each in held]
                ends = any(found) or ends
                held.clear()
            return ends or (in_turn and not self.works)

        everything = list(range(count))
        for group in [[i] for i in everything] if in_turn else [everything]:
            if not self._group(group, points, passed):
                return False
            if ends or (in_turn and held):
                break
        if held:
            _raise_mistake(points(0), [output for _, output in held])
        return True

    def _group(
        self,
        group: Sequence[int],
        points: Callable[[int | slice], optax.Params],
        passed: Callable[[int, Output], bool],
    ) -> bool:
        """Evaluates points together, and those that failed again."""
        begun, ends = time.perf_counter(), False
        batched, retries = self._evaluator.batched, self._evaluator.retries
        left = list(group)

        def returned(j: int, result: object) -> bool:
            nonlocal ends
            which = group if batched else group[j : j + 1]
            results = _split(result, len(which)) if batched else [result]
            outputs = list(map(self._read, results))
            if retries and any(output.problem for output in outputs):
                left.extend(which)
                return ends
            seconds = (time.perf_counter() - begun) / len(which)
            for i, output in zip(which, outputs, strict=True):
                ends = passed(i, output._replace(seconds=seconds)) or ends
            return ends

        while left and not ends:
            group, left = left, []
            made = [points(slice(None))] if batched else [points(i) for i in group]
            if self._interrupted() or not self._run(made, returned):
                return False
            retries -= 1
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
        keys: list[object] = list(range(len(leaves[0])))
        if distinct and not self._evaluator.batched:
            keys = [tuple(leaf[i].tobytes() for leaf in leaves) for i in keys]
        places = {key: i for i, key in reversed(list(enumerate(keys)))}
        which = np.array(sorted(places.values()))
        found: dict[int, Output] = {}
        if not self.each(
            len(which),
            lambda j: jax.tree.map(lambda x: np.array(x[which[j]]), candidates),
            lambda j, output: found.update({which[j]: output}),
        ):
            return None
        outputs = [found[places[key]] for key in keys]
        failures = {i: x.problem for i, x in enumerate(outputs) if x.problem}
        shape = next((np.shape(x.value) for x in outputs if np.ndim(x.value)), ())
        values = np.full((len(outputs), *shape), np.nan)
        for i, output in enumerate(outputs):
            got = np.shape(output.value)
            if got == shape:
                values[i] = output.value
            else:  # It has another number of values.
                failures.setdefault(i, f"returned shape {got}, another point {shape}")
        return Outcome(values, [output.info for output in outputs], failures)


def _raise_mistake(params: optax.Params, outputs: Sequence[Output]) -> NoReturn:
    """Raises the error of a function that has failed at all points by mistakes.

    Args:
      params: A point.
      outputs: The outputs at all points.
    """
    n, problem = len(outputs), outputs[0].problem.removeprefix("returned ")
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
    ) from outputs[0].mistake


def _split(result: Any, n: int) -> list[Any]:
    """Returns the result of a batch point by point, in pairs with the objects."""
    if isinstance(result, Output):
        return [result] * n
    try:
        values, infos = result, None
        pair = isinstance(result, tuple) and len(result) == 2
        if pair and np.ndim(result[0]) and len(result[0]) == n:
            values, infos = result
        listed = values if isinstance(values, list | tuple) else unmasked(values)
        return list(zip(listed, [None] * n if infos is None else infos, strict=True))
    except Exception:
        problem = f"returned {_described(result)} for {n} points"
        return [Output(np.nan, None, problem, TypeError(f"fun {problem}"), True)] * n


def _read(result: Any, vector_valued: bool, residuals: bool) -> Output:
    """Reads what a function returned for a point.

    Args:
      result: The result, or an `Output` if it failed.
      vector_valued: Whether it may have returned several numbers.
      residuals: Whether it may have returned a tree of them.
    """
    if type(result) is float and math.isfinite(result):  # The usual case.
        return Output(result)
    if isinstance(result, Output):
        return result
    pair = isinstance(result, tuple) and len(result) == 2
    value, info = result if pair else (result, None)
    several = residuals and value is not None
    try:
        is_array = several and jax.tree_util.all_leaves([value])
        several = several and not (is_array and np.ndim(value) == 0)
        if several:
            leaves = [np.ravel(unmasked(x)) for x in jax.tree.leaves(value)]
            return _vector(np.concatenate(leaves), info)
        if vector_valued and np.ndim(value) == 1:
            return _vector(value, info)
        number = _number(value)
    except Exception:  # Reading a value calls methods of its library.
        problem = f"{_described(value)}, which cannot be read as a number"
        if several:
            problem = f"{_described(value)}, not residuals"
        elif isinstance(value, jax.core.Tracer):
            problem = (
                "a traced array, because the run was called inside of jax.jit, "
                "jax.vmap or jax.grad"
            )
        return _wrong(problem, info)
    if number is None:
        return _wrong(f"{_described(value)}, not a number", info)
    problem = "" if np.isfinite(number) else f"returned {number}"
    return Output(number, info, problem, dtype=narrow(value))


def unmasked(values: npt.ArrayLike) -> np.ndarray:
    """Returns values as an array, in which masked ones, which have failed, are NaN."""
    if isinstance(values, np.ma.MaskedArray):
        return np.ma.filled(values.astype(np.float64), np.nan)
    return np.asarray(values)


def narrow(value: object) -> str:
    """Returns the name of a floating-point dtype that is narrower than float64."""
    dtype = getattr(value, "dtype", None)
    if dtype is None or getattr(dtype, "itemsize", 8) >= 8:
        return ""
    return str(dtype) if jnp.issubdtype(dtype, jnp.floating) else ""


def _number(value: Any) -> float | None:
    """Reads a real number, or an array of one, of any library; else returns `None`."""
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


def _wrong(returned: str, info: object) -> Output:
    """Returns the output of a function that returned something else than a number."""
    problem = f"returned {returned}"
    return Output(np.nan, info, problem, TypeError(f"fun {problem}"))


def _vector(values: npt.ArrayLike, info: object) -> Output:
    """Reads several values of a point."""
    array = unmasked(values)
    if array.dtype.kind not in "fiub" or not array.size:
        return _wrong(f"{_described(values)}, not numbers", info)
    failed = int(np.sum(~np.isfinite(array)))
    problem = f"returned {failed} values of {array.size} that are not finite"
    wide = array.astype(np.float64)
    return Output(wide, info, problem if failed else "", dtype=narrow(array))


def _described(value: Any) -> str:
    if inspect.iscoroutine(value):
        value.close()  # Python warns of one that was not awaited.
        return "a coroutine of an async function"
    if hasattr(value, "dtype") and np.ndim(value) > 0:
        return f"an array of shape {np.shape(value)} and dtype {value.dtype}"
    text = " ".join(reprlib.repr(value).split())
    return f"{text[:40]}{'…' if len(text) > 40 else ''} of type {type(value).__name__}"
