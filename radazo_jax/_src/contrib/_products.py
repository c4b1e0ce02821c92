"""Inner products of directions, over all coordinates."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from radazo_jax._src.directions.distribution import Direction, whole
from radazo_jax._src.directions.layout import Layout
from radazo_jax._src.xla import on_any_mesh

_EXACT = lax.Precision.HIGHEST


def inner(directions: Direction, layout: Layout, tree: Any) -> jax.Array:
    """⟨uₖ, w⟩ of each direction with a tree w like the parameters: float32, [K]."""

    def program(directions: Direction, tree: Any) -> jax.Array:
        total = jnp.zeros(len(directions.scale), jnp.float32)
        for i, w in enumerate(jax.tree.leaves(tree)):
            flat = w.astype(jnp.float32).reshape(-1)
            us = _rows(directions, layout, i)
            total += jnp.matmul(us, flat, precision=_EXACT)
        return total

    return on_any_mesh(program, jax.P())(directions, tree)


def gram(
    directions: Sequence[Direction], layout: Layout, trees: Sequence[Any] = ()
) -> jax.Array:
    """The inner products of all pairs of directions and trees: float32, [n, n].

    The elements of one leaf of all of them are alive at a time.

    Args:
      directions: Directions, each stacked; n counts them all, and the trees.
      layout: The layout of the parameters.
      trees: Trees like the parameters, each stacked; they follow the directions.
    """

    def program(directions: Sequence[Direction], trees: Sequence[Any]) -> jax.Array:
        leaves = [jax.tree.leaves(tree) for tree in trees]
        products = []
        for i in range(len(layout.leaves)):
            us = [_rows(u, layout, i) for u in directions]
            ws = [tree[i].astype(jnp.float32) for tree in leaves]
            rows = jnp.concatenate([*us, *(w.reshape(len(w), -1) for w in ws)])
            products.append(jnp.matmul(rows, rows.T, precision=_EXACT))
        return functools.reduce(jnp.add, products)

    return on_any_mesh(program, jax.P())(directions, trees)


def squared_norm(tree: Any) -> jax.Array:
    """⟨w, w⟩ over all leaves: float32, shape ()."""

    def program(tree: Any) -> jax.Array:
        squares = [jnp.sum(w.astype(jnp.float32) ** 2) for w in jax.tree.leaves(tree)]
        return jnp.sum(jnp.stack(squares))

    return on_any_mesh(program, jax.P())(tree)


def _rows(directions: Direction, layout: Layout, i: int) -> jax.Array:
    """The elements of leaf i of all directions: float32, [K, size]."""
    leaf = layout.leaves[i]
    if directions.cached is not None:
        us = jax.vmap(lambda held: held.values())(directions.cached[i])
    else:
        us = jax.vmap(lambda u: whole(u, leaf, layout.dimension))(directions)
    return directions.scale[:, None] * us.reshape(len(directions.scale), -1)


_EXACT = jax.lax.Precision.HIGHEST

Kernel = Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, jax.Array]]


def square_root(squares: jax.Array) -> jax.Array:
    """√x, whose derivative at 0 is 0: distances vanish on the diagonal and at θ."""
    positive = squares > 0
    return jnp.where(positive, jnp.sqrt(jnp.where(positive, squares, 1)), 0)


def _squared_exponential(
    squares: jax.Array, away: jax.Array, scale: jax.Array
) -> tuple[jax.Array, jax.Array]:
    from_theta = jnp.sum(away**2, axis=1)
    along = jnp.exp(-from_theta / (2 * scale**2)) / scale**2
    return jnp.exp(-squares / (2 * scale**2)), along[:, None] * away


def _matern(
    squares: jax.Array, away: jax.Array, scale: jax.Array
) -> tuple[jax.Array, jax.Array]:
    r = square_root(5 * squares) / scale
    from_theta = square_root(5 * jnp.sum(away**2, axis=1)) / scale
    along = 5 / (3 * scale**2) * (1 + from_theta) * jnp.exp(-from_theta)
    return (1 + r + r**2 / 3) * jnp.exp(-r), along[:, None] * away


KERNELS: dict[str, Kernel] = {
    "matern": _matern,
    "squared_exponential": _squared_exponential,
}


def features(
    key: jax.Array, size: int, away: jax.Array, scale: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The same for the kernel of `size` random Fourier features."""
    of_directions, of_phases = jax.random.split(key)
    shape, dtype = (size, away.shape[1]), away.dtype
    frequencies = jax.random.normal(of_directions, shape, dtype) / scale
    phases = jax.random.uniform(of_phases, (size,), dtype, maxval=2 * math.pi)
    angles = jnp.matmul(away, frequencies.T, precision=_EXACT) + phases[None]
    phis = math.sqrt(2 / size) * jnp.cos(angles)
    rows = jnp.matmul(phis, phis.T, precision=_EXACT)
    at_theta = -math.sqrt(2 / size) * jnp.sin(phases)
    slopes = jnp.matmul(phis * at_theta[None], frequencies, precision=_EXACT)
    return rows, slopes
