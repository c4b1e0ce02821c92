"""A program of the zoo: a function to perturb, and its properties for the tests."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Program:
    """An entry of the zoo.

    Attributes:
      build: Returns `(fun, params, *args)`.
      differentiable: Whether `jax.grad` of it means something.
      tolerance: Largest error, relative to the largest value of the result.
      flax: Whether Flax runs in it, which mixes dtypes and ranks.
      selected: Whether it is among the few that all distributions are tried on.
    """

    build: Callable[[], tuple[Any, ...]]
    differentiable: bool = True
    tolerance: float = 2e-5
    flax: bool = False
    selected: bool = False

    @contextlib.contextmanager
    def context(self) -> Iterator[None]:
        """The promotion that the program needs."""
        if not self.flax:
            yield
            return
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            yield


PROGRAMS: dict[str, Program] = {}

# A leaf of 16 bits holds p + s·u rounded once; the definition rounds u, s·u and the
# sum. Three roundings of half a unit in the last place, and the layers amplify them.
BFLOAT16 = 8 * 2**-8


def program(**known: Any) -> Callable[[Callable[[], tuple[Any, ...]]], Any]:
    """Puts a builder into the table."""

    def add(build: Callable[[], tuple[Any, ...]]) -> Any:
        PROGRAMS[build.__name__] = Program(build, **known)
        return build

    return add


def normal(*shape: int, dtype: Any = jnp.float32) -> jax.Array:
    """Numbers that depend on the shape alone."""
    rng = np.random.RandomState(sum(shape) * 7 + len(shape))
    return jnp.asarray(rng.normal(size=shape), dtype) * jnp.asarray(0.5, dtype)


def tokens(*shape: int, below: int) -> jax.Array:
    return jnp.asarray(np.random.RandomState(3).randint(0, below, shape), jnp.int32)
