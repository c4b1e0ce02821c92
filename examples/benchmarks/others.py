"""Steps of other libraries on the same function: evosax's and torchzero's."""

import importlib.util
from collections.abc import Callable
from typing import Any

import jax
import optax


def installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def open_es(
    loss: Callable[[Any], jax.Array],
    params: Any,
    population_size: int,
    smoothing: float,
    learning_rate: float,
) -> tuple[Callable[[Any, jax.Array], Any], Any]:
    """A step of evosax's Open_ES with Adam, and its first state.

    It evaluates ``population_size`` points, in antithetic pairs of Gaussian directions.
    """
    from evosax.algorithms import Open_ES

    strategy = Open_ES(
        population_size,
        params,
        optimizer=optax.adam(learning_rate),
        std_schedule=optax.constant_schedule(smoothing),
    )
    settings = strategy.default_params
    start = strategy.init(jax.random.key(0), params, settings)

    def step(state: Any, key: jax.Array) -> Any:
        ask_key, tell_key = jax.random.split(key)
        population, state = strategy.ask(ask_key, state, settings)
        values = jax.vmap(loss)(population)
        return strategy.tell(tell_key, population, values, state, settings)[0]

    return step, start


def torchzero(
    loss: Callable[[list[Any]], Any],
    params: list[Any],
    num_directions: int,
    central: bool,
    smoothing: float,
    learning_rate: float,
) -> Callable[[], None]:
    """A step of torchzero's RDSA (Gaussian directions) with Adam.

    Args:
      loss: A function of a list of tensors to a scalar tensor.
      params: The tensors, as NumPy arrays.
      num_directions: How many directions a step takes.
      central: Whether it takes central rather than forward differences.
      smoothing: How far it evaluates from the parameters.
      learning_rate: Adam's.
    """
    import torch
    import torchzero as tz

    tensors = [torch.tensor(p, requires_grad=True) for p in params]
    optimizer = tz.Optimizer(
        tensors,
        tz.m.RDSA(
            h=smoothing,
            n_samples=num_directions,
            formula="central2" if central else "forward2",
        ),
        tz.m.Adam(),
        tz.m.LR(learning_rate),
    )

    def closure(backward: bool = True) -> Any:
        del backward
        return loss(tensors)

    def step() -> None:
        with torch.no_grad():
            optimizer.step(closure)

    return step
