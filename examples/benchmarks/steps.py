"""Steps to be timed: ours, one written by hand, and that of another library."""

import importlib.util
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

import radazo_jax as zo
from examples.benchmarks.programs import step_of

Loss = Callable[[Any], jax.Array]
Step = Callable[[Any, jax.Array], Any]  # (carry, number) -> carry


def key_of(i: jax.Array) -> jax.Array:
    return jax.random.fold_in(jax.random.key(0), i)


def ours(
    loss: Loss,
    estimator: zo.GradientEstimator,
    optimizer: optax.GradientTransformationExtraArgs,
) -> Step:
    step = step_of(lambda params, batch: loss(params), estimator, optimizer)
    return lambda carry, i: step(*carry, key_of(i), None)[:2]


def naive(
    loss: Loss,
    optimizer: optax.GradientTransformationExtraArgs,
    num_directions: int,
    smoothing: float,
    central: bool = False,
    normalized: bool = False,
) -> Step:
    """The step by hand: draws of ``jax.random``, copies by ``tree_map``, ``vmap``."""

    def step(carry: Any, i: jax.Array) -> Any:
        params, state = carry
        base = loss(params)
        leaves, treedef = jax.tree.flatten(params)

        def term(key: jax.Array) -> Any:
            keys = list(jax.random.split(key, len(leaves)))
            keys = jax.tree.unflatten(treedef, keys)
            u = jax.tree.map(lambda k, p: jax.random.normal(k, p.shape), keys, params)
            if normalized:
                norm = optax.tree.norm(u)
                u = jax.tree.map(lambda v: v / norm, u)

            def value(scale: float) -> jax.Array:
                return loss(jax.tree.map(lambda p, v: p + scale * v, params, u))

            if central:
                slope = (value(smoothing) - value(-smoothing)) / (2 * smoothing)
            else:
                slope = (value(smoothing) - base) / smoothing
            return jax.tree.map(lambda v: slope * v, u)

        terms = jax.vmap(term)(jax.random.split(key_of(i), num_directions))
        factor = sum(leaf.size for leaf in leaves) if normalized else 1
        gradient = jax.tree.map(lambda v: factor * jnp.mean(v, axis=0), terms)
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state

    return step


def evosax(
    loss: Loss, optimizer: Any, params: Any, population: int, smoothing: float
) -> tuple[Step, Any] | None:
    """A step of Open_ES with antithetic pairs, and where it starts, if installed."""
    if not importlib.util.find_spec("evosax"):
        return None
    from evosax.algorithms import Open_ES

    schedule = optax.constant_schedule(smoothing)
    strategy = Open_ES(population, params, optimizer=optimizer, std_schedule=schedule)
    settings = strategy.default_params

    def ask_and_tell(state: Any, i: jax.Array) -> Any:
        ask_key, tell_key = jax.random.split(key_of(i))
        points, state = strategy.ask(ask_key, state, settings)
        values = jax.vmap(loss)(points)
        return strategy.tell(tell_key, points, values, state, settings)[0]

    return ask_and_tell, strategy.init(jax.random.key(0), params, settings)
