"""Distributions of random directions, and the directions sampled from them.

Import from here to write a custom distribution. Its numbers are drawn with
`radazo_jax.random`.
"""

from radazo_jax._src.directions.distribution import Direction, Distribution
from radazo_jax._src.directions.distributions import (
    coordinate,
    gaussian,
    low_rank,
    orthonormal,
    rademacher,
    sphere,
)
from radazo_jax._src.directions.layout import MatrixAxes

__all__ = [
    "Direction",
    "Distribution",
    "MatrixAxes",
    "coordinate",
    "gaussian",
    "low_rank",
    "orthonormal",
    "rademacher",
    "sphere",
]
