"""Evaluation at a perturbed point."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from radazo_jax._src import directions, fusion
from radazo_jax._src.dtypes import at_least_float32


def perturb(fun: Callable[..., Any]) -> Callable[..., Any]:
    """Transforms ``fun`` into its evaluation at a perturbed point.

    Args:
      fun: A function whose first argument is a tree of arrays, the parameters.

    Returns:
      A function ``(params, direction, scale, *args, **kwargs)`` equal to rounding to
      ``fun(tree_map(lambda p, u: p + scale * u, params, u), *args, **kwargs)``, where
      ``u`` is ``direction`` materialized for ``params``. The sum is formed in float32
      (float64 for float64 leaves) and rounded once to the leaf's dtype.

    >>> import jax, jax.numpy as jnp
    >>> import radazo_jax as zo
    >>> def loss(params, x):
    ...     return jnp.sum((params["w"] * x) ** 2)
    >>> params, x = {"w": jnp.ones(3)}, jnp.array([1.0, 2.0, 3.0])
    >>> direction = zo.rademacher().sample(jax.random.key(0), params)
    >>> value = zo.perturb(loss)(params, direction, 0.5, x)
    >>> u = zo.rademacher().materialize(direction, params)
    >>> bool(jnp.allclose(value, loss({"w": params["w"] + 0.5 * u["w"]}, x)))
    True
    """

    @functools.wraps(fun)
    def perturbed(
        params: Any,
        direction: directions.Direction,
        scale: jax.typing.ArrayLike,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        return fun(_displace(params, direction, scale), *args, **kwargs)

    return perturbed


def _displace(
    params: Any,
    direction: directions.Direction | directions.Kept,
    scale: jax.typing.ArrayLike,
) -> Any:
    def displaced(direction: Any, scale: jax.Array) -> Any:
        return jax.tree.map(
            functools.partial(_add, scale),
            params,
            directions.elements(direction, params),
        )

    if isinstance(direction, directions.Kept):
        return displaced(direction, jnp.asarray(scale))
    return fusion.compute_once(displaced, direction.key, direction, jnp.asarray(scale))


def _add(scale: jax.Array, p: jax.typing.ArrayLike, u: jax.Array) -> jax.Array:
    p = jnp.asarray(p)
    dtype = at_least_float32(p.dtype)
    return (p.astype(dtype) + scale.astype(dtype) * u.astype(dtype)).astype(p.dtype)
