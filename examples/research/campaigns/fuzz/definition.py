"""The definition of `perturb`, which programs are compared with.

It is the function itself, at leaves that are displaced densely: p + s · u with u from
`Distribution.materialize`.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import radazo_jax as zo
from common.distributions import DISTRIBUTIONS

# Leaves of fewer elements are perturbed before a program, not inside of it.
LARGE = 2**16 + 1


class Flips(zo.Distribution):
    """Signs that depend on key and position, and cost nothing to compile."""

    def factor(self, dimension: int) -> float:
        return 1.0

    def draw(self, key: jax.Array, number: jax.Array, at: Any) -> jax.Array:
        word = (at.lo + jax.random.key_data(key)[1]) * np.uint32(2654435761)
        return jnp.where(word < np.uint32(2**31), jnp.float32(1), jnp.float32(-1))


def stored(distribution: zo.Distribution) -> zo.Distribution:
    """The distribution with all elements of its directions stored, as in estimators."""

    class Stored(type(distribution)):
        def sample(self, key: jax.Array, params: Any) -> Any:
            draw = zo.estimators.Draw.once(key)
            points = zo.estimators.sample_points(distribution, draw, 1, [1.0], params)
            cached = zo.vectorized().cache(points).directions
            return jax.tree.map(lambda x: x[0], cached)

    fields = (field.name for field in dataclasses.fields(distribution))
    return Stored(**{name: getattr(distribution, name) for name in fields})


# What a distribution of factors adds to a product is summed in another order.
FACTORS = {"low_rank": zo.low_rank(), "low_rank(2)": zo.low_rank(2)}
DENSE = {name: one for name, one in DISTRIBUTIONS.items() if name not in FACTORS} | {
    "coordinate in turn": zo.coordinate(replace=False),
    "orthonormal": zo.orthonormal(),
}
SIGNS = {"flips": Flips(), "flips stored": stored(Flips())}
DIRECTIONS: dict[str, zo.Distribution] = FACTORS | DENSE | SIGNS


def perturbed(
    fun: Callable[[Any], Any], distribution: str, scale: float
) -> Callable[[Any, jax.Array], Any]:
    def run(params: Any, key: jax.Array) -> Any:
        direction = DIRECTIONS[distribution].sample(key, params)
        return zo.perturb(fun)(params, direction, scale)

    return run


def defined(
    fun: Callable[[Any], Any], distribution: str, scale: float
) -> Callable[[Any, jax.Array], Any]:
    """p + s · u is computed in float32 at least, and rounded once."""

    def run(params: Any, key: jax.Array) -> Any:
        direction = DIRECTIONS[distribution].sample(key, params)
        wide = jax.tree.map(lambda p: p.astype(_wide(p.dtype)), params)
        u = DIRECTIONS[distribution].materialize(direction, wide)
        moved = jax.tree.map(
            lambda p, x, u: (x + jnp.asarray(scale, x.dtype) * u).astype(p.dtype),
            *(params, wide, u),
        )
        return fun(moved)

    return run


def _wide(dtype: Any) -> Any:
    return dtype if dtype.itemsize >= 4 else jnp.dtype("float32")


def enlarged(
    fun: Callable[[Any], Any], params: Sequence[jax.Array]
) -> tuple[Callable[[Any], Any], tuple[jax.Array, ...]]:
    """The function of large leaves, and the leaves, followed by rows of zeros."""

    def of_large(large: Sequence[jax.Array]) -> Any:
        pairs = zip(large, params, strict=True)
        return fun(tuple(x[: len(p)] if p.ndim else x[0] for x, p in pairs))

    return of_large, tuple(map(_with_rows, params))


def _with_rows(x: jax.Array) -> jax.Array:
    rows = np.atleast_1d(np.asarray(x))
    width = max(1, int(np.prod(rows.shape[1:])))
    missing = max(0, -(-LARGE // width) - len(rows))
    return jnp.asarray(np.pad(rows, [(0, missing)] + [(0, 0)] * (rows.ndim - 1)))
