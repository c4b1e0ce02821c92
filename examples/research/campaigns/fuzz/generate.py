"""A random program for each seed."""

import random

import jax

from . import calls, elementwise, look_ups, matrices, meshes, moves, randomness, sums
from .build import COMPLEX, FLOATS, Builder, Maker
from .program import Program

__all__ = ["calls", "elementwise", "generate", "look_ups", "matrices", "meshes"]
__all__ += ["moves", "randomness", "sums"]

# Up to so many makers.
LENGTH = 6


def generate(
    seed: int, wide: bool = False, kinds: dict[str, float] | None = None
) -> Program:
    """A program of one to three leaves, by makers of these kinds."""
    rng = random.Random(seed)
    with jax.enable_x64(wide):
        builder = _start(rng, wide, kinds)
        builder.grow(rng.randint(1, LENGTH))
        return builder.program()


def _start(
    rng: random.Random, wide: bool, kinds: dict[str, float] | None = None
) -> Builder:
    builder = Builder(rng, wide, kinds)
    for _ in range(rng.randint(1, 3)):
        dtypes = FLOATS if rng.random() < 0.93 else COMPLEX
        builder.param(builder.shape(), builder.dtype(dtypes))
    return builder


def with_maker(one: Maker, seed: int, wide: bool = False) -> Program | None:
    """A program that this maker has added to, or `None` if it has not."""
    with jax.enable_x64(wide):
        builder = _start(random.Random(seed), wide)
        return builder.program() if builder.step(one) else None
