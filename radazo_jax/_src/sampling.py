"""Directions of an estimate: how many of them are stored, and their weighted sum."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from radazo_jax._src import counter, directions, kept
from radazo_jax._src.directions import Direction, Factors, Law, Leaf
from radazo_jax._src.kept import Kept

# Up to this many directions taken in turn, the gradient is one expression, which
# fuses into whatever consumes it; beyond, a loop with one accumulator.
_MAX_UNROLLED = 8

# Directions that are alive together are kept from the evaluations to the gradient up
# to this many elements (64 MiB); beyond, they are drawn again.
_MAX_KEPT = 2**24

# Directions that take at most this fraction of the parameters are stored for the
# gradient, and from the evaluations on where they are all alive then.
_SMALL = 8


def sample(
    law: Law, key: jax.Array, params: Any, num_directions: int, batch_size: int | None
) -> Direction | Kept:
    """Directions k = 0 … K-1, stacked: each depends on the key and on k alone."""
    keys = counter.fold_in(key, jnp.arange(num_directions, dtype=jnp.uint32))
    stored, few = _stored(law, num_directions, params)
    at_once = together(num_directions, batch_size)
    # In turn, those of the others would be alive during every evaluation.
    few = few and (at_once or num_directions == 1)
    if few or (at_once and stored <= _MAX_KEPT):
        return kept.keep(law, keys, params)
    return batched_map(lambda k: law.sample(k, params), keys, batch_size)


def combine(coefficients: jax.Array, sampled: Direction | Kept, params: Any) -> Any:
    """Σₖ coefficientsₖ uₖ, a tree like `params`, with the shardings of its types."""
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.explicit_axes:
        return _combine(coefficients, sampled, params)
    specs = jax.tree.map(lambda p: jax.typeof(p).sharding.spec, params)
    in_auto_mode = jax.sharding.auto_axes(
        _combine, axes=mesh.explicit_axes, out_sharding=specs
    )
    return in_auto_mode(coefficients, sampled, params)


def _combine(coefficients: jax.Array, sampled: Direction | Kept, params: Any) -> Any:
    coefficients = coefficients.astype(jnp.float32)
    if isinstance(sampled, Kept):
        gradient = kept.combine(coefficients, sampled, params)
    else:
        gradient = _combine_in_turn(coefficients, sampled, params)
    return jax.tree.map(lambda g, p: g.astype(jnp.result_type(p)), gradient, params)


def shares_products(
    sampled: Direction | Kept, params: Any, batch_size: int | None
) -> bool:
    """Whether all evaluations are products with the same parameters, but for a few."""
    if not isinstance(sampled, Kept) or not together(len(sampled.scale), batch_size):
        return False
    sizes = [
        (jnp.size(p), d)
        for p, d in zip(jax.tree.leaves(params), sampled.draws, strict=True)
    ]
    dense = sum(size for size, draw in sizes if not isinstance(draw, Factors))
    return dense * _SMALL <= sum(size for size, _ in sizes)


def together(num_directions: int, batch_size: int | None) -> bool:
    """Whether all directions are alive at the same time anyway."""
    return num_directions > 1 and (batch_size is None or batch_size >= num_directions)


def batched_map(fun: Callable[[Any], Any], xs: Any, batch_size: int | None) -> Any:
    """`jax.lax.map` whose `batch_size=None` is all at once."""
    size = len(jax.tree.leaves(xs)[0])
    if together(size, batch_size):
        return jax.vmap(fun)(xs)
    return lax.map(fun, xs, batch_size=None if batch_size in (None, 1) else batch_size)


def _stored(law: Law, num_directions: int, params: Any) -> tuple[int, bool]:
    """How many numbers make the directions, and whether those are few."""
    leaves = directions.layout(params)
    stored = num_directions * sum(law.num_stored(leaf) for leaf in leaves)
    return stored, stored * _SMALL <= directions.num_coordinates(leaves)


def _combine_in_turn(coefficients: jax.Array, sampled: Direction, params: Any) -> Any:
    # Drawn again rather than kept: without the barrier the compiler would see that it
    # has drawn these before, and keep them through the evaluations.
    coefficients, sampled = lax.optimization_barrier((coefficients, sampled))
    law, size = sampled.law, len(coefficients)
    leaves = directions.layout(params)
    stored, few = _stored(law, size, params)
    # The loops below have accumulators of the size of the parameters.
    in_a_loop = size > _MAX_UNROLLED
    total = directions.num_coordinates(leaves)
    if few or (in_a_loop and stored <= total):
        drawn = kept.keep(law, sampled.key, params)
        return kept.combine(coefficients, drawn, params)

    def term(k: Any, leaf: Leaf) -> jax.Array:
        direction = jax.tree.map(lambda x: x[k], sampled)
        if size == 1:
            return coefficients[k] * law.whole(direction, leaf, total)
        # One by one: of the words of random signs, the CPU would hold all K.
        indices = counter.block(leaf.shape)
        return coefficients[k] * law.block(direction, leaf, indices, total)

    def of_leaf(leaf: Leaf) -> jax.Array:
        def add(k: Any, gradient: jax.Array) -> jax.Array:
            return gradient + term(k, leaf)

        if in_a_loop:
            # A loop for each: an optimizer may have used one before the next is made.
            return lax.fori_loop(1, size, add, term(0, leaf))
        return functools.reduce(lambda g, k: add(k, g), range(1, size), term(0, leaf))

    return jax.tree.unflatten(jax.tree.structure(params), map(of_leaf, leaves))
