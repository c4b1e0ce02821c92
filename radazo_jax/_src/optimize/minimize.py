"""A whole run, compiled in chunks of steps."""

import functools
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.tree_util import Partial

from radazo_jax._src import checks, trees
from radazo_jax._src.estimate.estimator import GradientEstimator, check_estimator
from radazo_jax._src.estimate.gradients import of_params
from radazo_jax._src.numbers import keys

# Without a given chunk size, chunks aim at this many seconds: long enough that what
# is done between them does not count, short enough for a progress bar and Ctrl-C.
_CHUNK_SECONDS = 0.5
_MAX_CHUNK = 8192


class MinimizeState(NamedTuple):
    """The state of a run: everything that is needed to continue it.

    Attributes:
      params: The parameters.
      optimizer_state: The state of the Optax transformation.
      estimator_state: The state of the estimator.
      key: The key of the run, typed, shape (); it does not change.
      step: The number of steps done: int32, shape ().
    """

    params: Any
    optimizer_state: Any
    estimator_state: Any
    key: jax.Array
    step: jax.Array


class MinimizeResult(NamedTuple):
    """What `minimize` returns.

    Attributes:
      params: The parameters after the last step.
      values: The loss at each step done in this call: float32, [steps].
      state: The state of the run; pass it as `state` to continue.
    """

    params: Any
    values: np.ndarray
    state: MinimizeState


def minimize(
    fun: Callable[..., jax.Array],
    params: Any,
    optimizer: optax.GradientTransformation,
    estimator: GradientEstimator,
    num_steps: int,
    key: jax.typing.ArrayLike,
    *,
    sample: Callable[[jax.Array], Any] | None = None,
    state: MinimizeState | None = None,
    chunk_size: int | None = None,
    progress: bool = True,
    callback: Callable[[MinimizeState, np.ndarray], Any] | None = None,
) -> MinimizeResult:
    """Minimizes a function from its values alone.

    The steps run on the device in chunks. A chunk is one compiled loop whose length is
    an argument, so any number of steps compiles once. The random numbers of a step
    depend only on the key and the number of the step; chunks and interruptions do not
    change them.

    Args:
      fun: The loss, `fun(params)`, or `fun(params, xi)` where `sample` is given;
        a real scalar.
      params: The starting point, a tree of floating-point arrays. Not modified.
      optimizer: An Optax transformation, such as `radazo(1e-3)`. It gets `value`,
        `grad` and `value_fn` as extra arguments, where it takes any.
      estimator: An estimator, such as `forward_difference()`.
      num_steps: The number of steps in this call.
      key: The key of the whole run; it is consumed.
      sample: `sample(key) -> xi` draws the random variable ξ of the loss, such as a
        minibatch, once a step: all evaluations of the step share it.
      state: A state to continue from, as returned by a previous call or passed to
        `callback`. Its parameters and key replace `params` and `key`.
      chunk_size: How many steps a chunk has; by default, so many that it takes about
        half a second.
      progress: Whether to show progress: a `tqdm` bar where that is installed, else one
        line per chunk on stderr.
      callback: `callback(state, values)`, called after every chunk with the chunk's
        values, float32 [chunk]. A true return value ends the run. The next chunk reuses
        the arrays of `state`: copy what you keep.

    Returns:
      The result. Ctrl-C takes effect between chunks; the result then holds the steps
      done so far. A second Ctrl-C raises `KeyboardInterrupt`.

    Raises:
      TypeError, ValueError: If an argument is not as described, or processes hold
        different keys.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> import radazo_jax as zo
      >>> result = zo.minimize(
      ...     lambda p: jnp.sum((p - 1.0) ** 2),
      ...     jnp.zeros(8),
      ...     zo.radazo(1e-2),
      ...     zo.forward_difference(),
      ...     300,
      ...     jax.random.key(0),
      ...     progress=False,
      ... )
      >>> result.values.shape, bool(result.values[-1] < 1e-2)
      ((300,), True)

    References:
      Shu et al., Refining Adaptive Zeroth-Order Optimization at Ease, ICML 2025,
      algorithms 1 and 2.
    """
    _check_arguments(fun, optimizer, estimator)
    checks.check_int_at_least("num_steps", num_steps, 1)
    if chunk_size is not None:
        checks.check_int_at_least("chunk_size", chunk_size, 1)
    if state is None:
        params = checks.as_params(params)
        state = MinimizeState(
            params,
            optimizer.init(params),
            estimator.init(params),
            keys.check_same_key(key),
            jnp.zeros((), jnp.int32),
        )
    # The chunks work in place on their state, so the caller keeps a copy of the first.
    state = jax.tree.map(jnp.copy, state)

    arrays, static = trees.partition((fun, sample))
    run_chunk = functools.partial(
        _run_chunk, static=static, optimizer=optimizer, estimator=estimator
    )
    values = [np.zeros(0, np.float32)]
    done, size = 0, chunk_size or 1
    with _interruptible() as interrupted, _progress_bar(progress, num_steps) as report:
        while done < num_steps and not interrupted():
            length = min(size, num_steps - done)
            start = time.perf_counter()
            parts = []
            for first in range(0, length, _MAX_CHUNK):
                part = min(_MAX_CHUNK, length - first)
                state, buffer = run_chunk(state, np.int32(part), arrays)
                parts.append(np.asarray(buffer)[:part])
                report(part, float(parts[-1][-1]))
            values.append(np.concatenate(parts))
            done += length
            if chunk_size is None:
                size = _next_size(length, time.perf_counter() - start)
            if callback is not None and callback(state, values[-1]):
                break
    return MinimizeResult(state.params, np.concatenate(values), state)


def _check_arguments(fun: Any, optimizer: Any, estimator: Any) -> None:
    if not callable(fun):
        raise TypeError(f"fun must be a function of params; got {fun!r}.")
    if not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
        raise TypeError(
            "optimizer must be an Optax transformation such as radazo(1e-3); got "
            f"{optimizer!r}."
        )
    check_estimator(estimator)


@functools.partial(
    jax.jit,
    static_argnames=("static", "optimizer", "estimator"),
    donate_argnames="state",
)
def _run_chunk(
    state: MinimizeState,
    length: jax.Array,
    arrays: list[Any],
    *,
    static: trees.Static,
    optimizer: optax.GradientTransformation,
    estimator: GradientEstimator,
) -> tuple[MinimizeState, jax.Array]:
    """Does `length` steps in place; returns their values in a buffer.

    Args:
      state: Where to start.
      length: How many steps, at most `_MAX_CHUNK`.
      arrays: The arrays that the loss and the sampling function hold.
      static: The two without their arrays.
      optimizer: As in `minimize`.
      estimator: As in `minimize`.
    """
    fun, sample = static.merge(arrays)
    tx = optax.with_extra_args_support(optimizer)

    def body(
        i: jax.Array, carry: tuple[MinimizeState, jax.Array]
    ) -> tuple[MinimizeState, jax.Array]:
        state, buffer = carry
        state, value = _step(state, fun, tx, estimator, sample)
        return state, buffer.at[i].set(value)

    return lax.fori_loop(
        0, length, body, (state, jnp.zeros((_MAX_CHUNK,), jnp.float32))
    )


def _step(
    state: MinimizeState,
    fun: Callable[..., jax.Array],
    tx: optax.GradientTransformationExtraArgs,
    estimator: GradientEstimator,
    sample: Callable[[jax.Array], Any] | None,
) -> tuple[MinimizeState, jax.Array]:
    key = jax.random.fold_in(state.key, state.step)
    estimate_key, sample_key = jax.random.split(key)
    xi = () if sample is None else (sample(sample_key),)

    loss = Partial(of_params, fun, xi, {})
    (value, gradient), estimator_state = estimator.estimate(
        loss, estimate_key, state.params, state.estimator_state
    )
    updates, optimizer_state = tx.update(
        gradient,
        state.optimizer_state,
        state.params,
        value=value,
        grad=gradient,
        value_fn=loss,
    )
    params = optax.apply_updates(state.params, updates)
    step = optax.safe_increment(state.step)
    state = MinimizeState(params, optimizer_state, estimator_state, state.key, step)
    return state, value.astype(jnp.float32)


def _next_size(length: int, seconds: float) -> int:
    """The length of the next chunk, at most four times the last one's."""
    wanted = int(length * min(_CHUNK_SECONDS / max(seconds, 1e-9), 4.0))
    return max(1, min(wanted, _MAX_CHUNK))


@contextmanager
def _interruptible() -> Iterator[Callable[[], bool]]:
    """Makes the first Ctrl-C a flag to read, where signals can be handled."""
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    received: list[int] = []
    previous = signal.getsignal(signal.SIGINT)

    def handle(signum: int, frame: Any) -> None:
        del frame
        if received:
            raise KeyboardInterrupt
        received.append(signum)

    signal.signal(signal.SIGINT, handle)
    try:
        yield lambda: bool(received)
    finally:
        signal.signal(signal.SIGINT, previous)


@contextmanager
def _progress_bar(
    progress: bool, num_steps: int
) -> Iterator[Callable[[int, float], None]]:
    """Yields `report(steps, value)`."""
    if not progress:
        yield lambda steps, value: None
        return
    try:
        from tqdm.auto import tqdm
    except ImportError:
        done = 0

        def line(steps: int, value: float) -> None:
            nonlocal done
            done += steps
            print(f"step {done}/{num_steps}: loss {value:.6g}", file=sys.stderr)

        yield line
        return
    with tqdm(total=num_steps, unit="step") as bar:

        def show(steps: int, value: float) -> None:
            bar.set_postfix(loss=f"{value:.6g}", refresh=False)
            bar.update(steps)

        yield show
