"""Directions whose numbers are drawn once and stored."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from radazo_jax._src import fusion
from radazo_jax._src.directions import (
    Direction,
    Draw,
    Factors,
    Law,
    Leaf,
    Signs,
    layout,
    num_coordinates,
)

# Up to this many terms, a weighted sum of directions is one expression, which fuses
# into whatever consumes it; beyond, it is a product that is stored.
_MAX_TERMS = 16


class Kept(NamedTuple):
    """A direction whose numbers have been drawn and stored.

    Attributes:
      draws: For each leaf of the parameters its elements, a float32 array, or what
        makes them.
      scale: What the elements are multiplied by, float32, shape ().
    """

    draws: list[Draw]
    scale: jax.Array


def keep(law: Law, keys: jax.Array, params: Any) -> Kept:
    """Samples several directions and stores them, drawing each number once.

    Args:
      law: The law to sample from.
      keys: Typed keys, [K]; they are consumed.
      params: The tree of arrays to sample for.

    Returns:
      The directions that `law.sample` samples, with a leading axis K.
    """
    leaves = layout(params)
    total = num_coordinates(leaves)

    def numbers(key: jax.Array) -> Any:
        direction = Direction(key, jnp.ones((), jnp.float32), law)
        return law.numbers(direction, leaves, total)

    stored = fusion.compute_once(jax.vmap(numbers), keys, keys)
    draws = jax.vmap(functools.partial(law.draws, leaves=leaves))(stored)
    return Kept(draws, jax.vmap(law.normalization)(draws))


def elements(draw: Draw, shape: tuple[int, ...]) -> jax.Array:
    """The elements of a leaf of this shape before they are scaled: float32."""
    if isinstance(draw, Signs):
        return draw.elements(shape)
    return draw.product() if isinstance(draw, Factors) else draw


def combine(coefficients: jax.Array, kept: Kept, params: Any) -> Any:
    """Σₖ coefficientsₖ uₖ, as a tree like `params` of float32 arrays.

    Args:
      coefficients: float32, [K].
      kept: Directions with a leading axis K.
      params: The tree of arrays they were sampled for.
    """
    exact = lax.Precision.HIGHEST

    def of_leaf(draw: Draw, leaf: Leaf) -> jax.Array:
        if not isinstance(draw, Factors):
            us = jax.vmap(functools.partial(elements, shape=leaf.shape))(draw)
            return _weighted_sum(coefficients * kept.scale, us, exact)
        # One product over k and ρ together: [rows, K r] with [K r, columns].
        weighted = coefficients.reshape((-1,) + (1,) * (draw.a.ndim - 1)) * draw.a
        a, b = (jnp.moveaxis(x, 0, -1) for x in (weighted, draw.b))
        a, b = (x.reshape(*x.shape[:-2], -1) for x in (a, b))
        return _outer(a, b, exact)

    blocks = [
        of_leaf(draw, leaf)
        for draw, leaf in zip(kept.draws, layout(params), strict=True)
    ]
    return jax.tree.unflatten(jax.tree.structure(params), blocks)


def _weighted_sum(
    weights: jax.Array, terms: jax.Array, precision: lax.Precision
) -> jax.Array:
    """Σₖ weightsₖ termsₖ."""
    if len(weights) > _MAX_TERMS:
        return jnp.tensordot(weights, terms, 1, precision=precision)
    return functools.reduce(
        jnp.add, [weights[k] * terms[k] for k in range(len(weights))]
    )


def _outer(a: jax.Array, b: jax.Array, precision: lax.Precision) -> jax.Array:
    """Σ_ρ a[…, ρ] b[…, ρ] where the two share no axis along which both vary."""
    names = [chr(ord("a") + i) for i in range(a.ndim)]

    def squeezed(x: jax.Array) -> tuple[str, jax.Array]:
        axes = [i for i in range(x.ndim) if x.shape[i] > 1 or i == x.ndim - 1]
        return "".join(names[i] for i in axes), x.reshape([x.shape[i] for i in axes])

    shape = jnp.broadcast_shapes(a.shape, b.shape)[:-1]
    if a.shape[-1] <= _MAX_TERMS:
        terms = [a[..., j] * b[..., j] for j in range(a.shape[-1])]
        return functools.reduce(jnp.add, terms)
    (names_a, a), (names_b, b) = squeezed(a), squeezed(b)
    out = "".join(names[i] for i, size in enumerate(shape) if size > 1)
    spec = f"{names_a},{names_b}->{out}"
    return jnp.einsum(spec, a, b, precision=precision).reshape(shape)
