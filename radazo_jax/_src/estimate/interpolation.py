"""Gradients that interpolate differences linearly."""

import jax
import jax.numpy as jnp

# Eigenvalues below this share of the largest are taken for zero: directions that are
# nearly combinations of others would amplify rounding.
_CUTOFF = 1e-4


def interpolated(among: jax.Array, slopes: jax.Array, used: jax.Array) -> jax.Array:
    """The c of the shortest g = Σₖ cₖ aₖ with ⟨g, aₖ⟩ = slopesₖ.

    If the slopes are those of a linear function, g is the projection of its gradient
    on the span of the aₖ.

    Args:
      among: The inner products ⟨aᵢ, aⱼ⟩, [K, K].
      slopes: The differences along aₖ, [K].
      used: Which of them are known: bool, [K]. The c of the others is zero.
    """
    squares = jnp.diagonal(among)
    used = used & (squares > 0)
    # Of length one each, so that the cutoff compares like with like.
    inverse = jnp.where(used, jax.lax.rsqrt(jnp.where(used, squares, 1)), 0)
    scaled = inverse[:, None] * inverse[None] * among
    eigenvalues, vectors = jnp.linalg.eigh(scaled)
    kept = eigenvalues > _CUTOFF * eigenvalues[-1]
    inverted = jnp.where(kept, 1 / jnp.where(kept, eigenvalues, 1), 0)
    exact = jax.lax.Precision.HIGHEST
    rotated = jnp.matmul(vectors.T, inverse * slopes, precision=exact)
    return inverse * jnp.matmul(vectors, inverted * rotated, precision=exact)
