"""The precision that numbers are kept in."""

from typing import Any

import jax.numpy as jnp


def at_least_float32(dtype: Any) -> jnp.dtype:
    """`dtype`, or float32 for the floating-point types narrower than it.

    Written without `jnp.promote_types`, which refuses bfloat16 with float32 under
    strict promotion.
    """
    dtype = jnp.dtype(dtype)
    return dtype if dtype.itemsize >= 4 else jnp.dtype(jnp.float32)
