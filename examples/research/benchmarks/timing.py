"""Steps of radazo_jax, by hand and of evosax, timed in turn."""

import functools
import importlib.util
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

Loss = Callable[[Any], jax.Array]
Step = Callable[[Any, jax.Array], Any]  # (carry, number) -> carry


def key_of(i: jax.Array) -> jax.Array:
    return jax.random.fold_in(jax.random.key(0), i)


def naive(
    loss: Loss,
    optimizer: optax.GradientTransformationExtraArgs,
    num_directions: int,
    smoothing: float,
) -> Step:
    """The step by hand: draws of ``jax.random``, copies by ``tree_map``, ``vmap``."""

    def step(carry: Any, i: jax.Array) -> Any:
        params, state = carry
        base = loss(params)

        def term(key: jax.Array) -> Any:
            u = optax.tree.random_like(key, params, jax.random.normal)
            moved = jax.tree.map(lambda p, v: p + smoothing * v, params, u)
            slope = (loss(moved) - base) / smoothing
            return jax.tree.map(lambda v: slope * v, u)

        terms = jax.vmap(term)(jax.random.split(key_of(i), num_directions))
        gradient = jax.tree.map(lambda v: jnp.mean(v, axis=0), terms)
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state

    return step


def evosax(
    loss: Loss, params: Any, learning_rate: float, population: int, smoothing: float
) -> tuple[Step, Any] | None:
    """A step of Open_ES, in antithetic pairs, by Adam, and its start, if installed."""
    if not importlib.util.find_spec("evosax"):
        return None
    from evosax.algorithms import Open_ES

    adam, schedule = optax.adam(learning_rate), optax.constant_schedule(smoothing)
    strategy = Open_ES(population, params, optimizer=adam, std_schedule=schedule)
    settings = strategy.default_params

    def ask_and_tell(state: Any, i: jax.Array) -> Any:
        ask_key, tell_key = jax.random.split(key_of(i))
        points, state = strategy.ask(ask_key, state, settings)
        values = jax.vmap(loss)(points)
        return strategy.tell(tell_key, points, values, state, settings)[0]

    return ask_and_tell, strategy.init(jax.random.key(0), params, settings)


def by_turns(times: Mapping[str, Iterator[float]], repeats: int) -> dict[str, float]:
    """The median of each, taken by turns so that drifts hit all alike.

    Args:
      times: Named iterators, each of which does something and yields how long it took.
      repeats: Number of times of each that count, after one that does not.
    """
    for each in times.values():
        next(each)
    taken: dict[str, list[float]] = {name: [] for name in times}
    for _ in range(repeats):
        for name, each in times.items():
            taken[name].append(next(each))
    return {name: statistics.median(values) for name, values in taken.items()}


def seconds_of(run: Callable[[], Any]) -> Iterator[float]:
    """The seconds of a run that returns arrays, or ``None`` when it is done."""
    while True:
        start = time.perf_counter()
        jax.block_until_ready(run())
        yield time.perf_counter() - start


def medians(runs: Mapping[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Median seconds of each run, taken by turns."""
    return by_turns({name: seconds_of(run) for name, run in runs.items()}, repeats)


def scanned(step: Step, carry: Any, num_steps: int) -> Callable[[], Any]:
    """A run of ``num_steps`` steps ``(carry, i) -> carry`` as one program."""

    @jax.jit
    def run(carry: Any) -> Any:
        numbers = jnp.arange(num_steps, dtype=jnp.uint32)
        return lax.scan(lambda c, i: (step(c, i), None), carry, numbers)[0]

    return functools.partial(run, carry)
