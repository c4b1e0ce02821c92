"""Random numbers by position, of which distributions of directions are made.

The number at a position depends on the key and the position alone, so that any part of
a large array can be drawn, and drawn again, by itself.

Examples:
  >>> import jax
  >>> from radazo_jax import random
  >>> key = jax.random.key(0)
  >>> at = random.positions((4,), offset=2)
  >>> bool((random.normal(key, at) == jax.random.normal(key, (6,))[2:]).all())
  True
"""

from radazo_jax._src.base.keys import check_same_key
from radazo_jax._src.directions.generator import (
    Positions,
    bits,
    normal,
    positions,
    uniform,
)

__all__ = ["Positions", "bits", "check_same_key", "normal", "positions", "uniform"]
