"""Weights of the members of a population: the shapings of `evolution_strategy`.

A shaping is a pure function from values, [members] or [members, prompts], to weights of
the same shape. Values are losses, so weights rise with them.
"""

from radazo_jax._src.estimates.shaping import (
    best_of,
    by_group,
    centered_ranks,
    pair_signs,
    z_score,
)

__all__ = ["best_of", "by_group", "centered_ranks", "pair_signs", "z_score"]
