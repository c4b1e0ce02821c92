"""Distributions of random directions, and the directions sampled from them.

Import from here to write a custom distribution. Its numbers are drawn with
`radazo_jax.random`.
"""

from radazo_jax._src.directions.dense import coordinate, gaussian, sphere
from radazo_jax._src.directions.distribution import Direction, Distribution
from radazo_jax._src.directions.layout import MatrixAxes
from radazo_jax._src.directions.low_rank import low_rank
from radazo_jax._src.directions.signs import orthonormal, rademacher

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
