"""BFGS: gradients multiplied by an approximate inverse Hessian."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from radazo_jax._src import checks, compiler
from radazo_jax._src.base import GradientTransformationExtraArgs
from radazo_jax._src.trees import as_flat, like_tree, number, size, widest

# If the slope along a step does not rise, the next step is so many times as long.
_LONGER = 4.0

# Under bounds, the first step may be so many times as long as the parameters.
_FARTHER = 2.0

# A curvature below this share of |s| |y| is rounding.
_ROUNDED = 1e-10


class ScaleByBfgsState(NamedTuple):
    """State of `scale_by_bfgs`.

    Arrays have the widest dtype of the parameters, at least float32.

    Attributes:
      inverse: H, the inverse of the approximate Hessian: [d, d].
      known: Whether H has a scale: bool, shape ().
      params: The latest parameters, infinite before the first update: [d].
      gradient: The gradient there: [d].
    """

    inverse: jax.Array
    known: jax.Array
    params: jax.Array
    gradient: jax.Array


def scale_by_bfgs() -> GradientTransformationExtraArgs:
    """Multiplies gradients by the inverse Hessian of BFGS.

    With the displacement s = θₜ − θₜ₋₁, the change y = gₜ − gₜ₋₁ and ρ = 1/⟨s, y⟩,

        H ← (I − ρ s yᵀ) H (I − ρ y sᵀ) + ρ s sᵀ,    uₜ = H gₜ

    H has d² elements: use it with at most a few hundred parameters and a gradient
    without noise, as `full_difference` estimates it. For more parameters use
    `optax.scale_by_lbfgs`.

    The first update is |f| g/|g|², along which the loss falls by |f| according to its
    slope, but not longer than θ, or 1. Under bounds, the least loss is seldom near 0:
    the first update is g, but not longer than 2θ, or 2. If s is not 0, H is then scaled
    to ⟨s, y⟩/|y|² I. If ⟨s, y⟩ is not positive, H is multiplied by 4 instead, because
    the steps are too short. If s is 0, the latest step led nowhere, and H is forgotten.

    Under bounds, coordinates at a bound that the gradient pushes outward are fixed. The
    remaining ones take the update H_FF − H_FA H_AA⁻¹ H_AF of fixed coordinates A
    and free ones F. The gradient replaces an update that is not one of ascent.

    Returns:
      A transformation whose `update(updates, state, params, value=...)` needs the loss
      as value. Optional are `bounds`, a pair of trees like the parameters, and `known`,
      bool, [d]: elements of the gradient that are not known are replaced by the latest
      gradient and H⁻¹ s. `solver` passes them. Its state is a `ScaleByBfgsState`.

    Raises:
      ValueError: From the update, if `params` or `value` is missing.

    Examples:
      >>> import jax, jax.numpy as jnp, optax
      >>> import radazo_jax as zo
      >>> optimizer = optax.chain(zo.scale_by_bfgs(), optax.scale(-1.0))
      >>> result = zo.minimize(
      ...     lambda x: (1 - x[0]) ** 2 + 100 * (x[1] - x[0] ** 2) ** 2,
      ...     jnp.array([-1.2, 1.0]),
      ...     optimizer,
      ...     zo.full_difference(),
      ...     zo.search.backtracking(),
      ...     num_steps=60,
      ...     progress=False,
      ... )
      >>> bool(result.values.min() < 1e-2)
      True

    References:
      Nocedal & Wright, Numerical Optimization, 2006, eqs. (6.17) and (6.20).
    """

    def init_fn(params: optax.Params) -> ScaleByBfgsState:
        d, dtype = size(params), widest(params)
        return ScaleByBfgsState(
            inverse=jax.device_put(np.eye(d, dtype=dtype)),
            known=number(False, jnp.bool_),
            params=jnp.full(d, jnp.inf, dtype),
            gradient=jnp.zeros(d, dtype),
        )

    def update_fn(
        updates: optax.Updates,
        state: ScaleByBfgsState,
        params: optax.Params | None = None,
        *,
        value: jax.typing.ArrayLike | None = None,
        bounds: tuple[Any, Any] | None = None,
        known: jax.Array | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, ScaleByBfgsState]:
        del extra_args
        checks.check_passed(params=params, value=value)
        at, gradient = as_flat(params), as_flat(updates)

        def revised(
            state: ScaleByBfgsState, at: jax.Array, gradient: jax.Array
        ) -> tuple[jax.Array, jax.Array, jax.Array]:
            if known is not None:
                gradient = _completed(state, at, gradient, known)
            return (gradient, *_updated(state, at, gradient))

        # By itself, because a loop that encloses the sums would round them otherwise.
        gradient, inverse, scaled = compiler.compute_once(revised, state, at, gradient)
        fixed = _fixed(at, gradient, bounds)
        free = jnp.where(fixed, 0, gradient)
        loss = jnp.asarray(value).astype(at.dtype)
        square = jnp.sum(free**2)
        length = jnp.where(loss == 0, 1, abs(loss)) / square
        most = jnp.maximum(1, jnp.linalg.norm(at)) / jnp.sqrt(square)
        if bounds is not None:
            first = ~jnp.all(jnp.isfinite(state.params))
            length = jnp.where(first, 1, length)
            most = jnp.where(first, _FARTHER, 1) * most
        length = jnp.where(square > 0, jnp.minimum(length, most), 0)
        new = _times(inverse, gradient, fixed)
        # By rounding, or by bounds that were not there before.
        ascends = jnp.sum(new * gradient) > 0
        new = jnp.where(
            scaled & ascends & jnp.all(jnp.isfinite(new)), new, length * free
        )
        after = ScaleByBfgsState(inverse, scaled, at, gradient)
        return like_updates(new, updates), after

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _completed(
    state: ScaleByBfgsState, at: jax.Array, gradient: jax.Array, known: jax.Array
) -> jax.Array:
    """The gradient, with elements that are not known as H predicts them.

    The prediction is the latest gradient and H⁻¹ s, so that they do not change H.
    """
    first = ~jnp.all(jnp.isfinite(state.params))
    s = jnp.where(first, 0, at - state.params)

    def predicted() -> jax.Array:
        change = jnp.linalg.solve(state.inverse, s)
        change = jnp.where(state.known & jnp.isfinite(change), change, 0)
        return jnp.where(known, gradient, state.gradient + change)

    return jax.lax.cond(jnp.all(known), lambda: gradient, predicted)


def _updated(
    state: ScaleByBfgsState, at: jax.Array, gradient: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """H after the latest step, and whether it has a scale."""
    first = ~jnp.all(jnp.isfinite(state.params))
    s = jnp.where(first, 0, at - state.params)
    y = gradient - state.gradient
    curved = jnp.sum(s * y)
    square = jnp.sum(y**2)
    norms = jnp.linalg.norm(s) * jnp.linalg.norm(y)
    upward = (curved > _ROUNDED * norms) & jnp.isfinite(curved / square)
    moved = jnp.any(s != 0)
    # Without a scale, H is chosen so that the step is as long as the latest one.
    fall = -jnp.sum(s * state.gradient)
    guess = jnp.where(upward, curved / square, jnp.sum(s**2) / fall)
    eye = jnp.eye(s.size, dtype=s.dtype)
    inverse = jnp.where(state.known, state.inverse, guess * eye)
    rho = jnp.where(upward, 1 / curved, 0)
    left = eye - rho * jnp.outer(s, y)
    following = left @ inverse @ left.T + rho * jnp.outer(s, s)
    following = jnp.where(upward, following, _LONGER * inverse)
    usable = moved & jnp.all(jnp.isfinite(following))
    return jnp.where(usable, following, eye), usable


def _fixed(
    at: jax.Array, gradient: jax.Array, bounds: tuple[Any, Any] | None
) -> jax.Array:
    """The coordinates that the gradient pushes out of the box: bool, [d]."""
    if bounds is None:
        return jnp.zeros(at.shape, jnp.bool_)
    low, high = (as_flat(bound) for bound in bounds)
    return ((at <= low) & (gradient > 0)) | ((at >= high) & (gradient < 0))


def _times(inverse: jax.Array, gradient: jax.Array, fixed: jax.Array) -> jax.Array:
    """The product with the inverse of the Hessian of the free coordinates."""
    whole = inverse @ jnp.where(fixed, 0, gradient)

    def projected() -> jax.Array:
        both = fixed[:, None] & fixed[None, :]
        block = jnp.where(both, inverse, jnp.eye(fixed.size, dtype=inverse.dtype))
        force = jnp.linalg.solve(block, jnp.where(fixed, whole, 0))
        return jnp.where(fixed, 0, whole - inverse @ jnp.where(fixed, force, 0))

    return jax.lax.cond(jnp.any(fixed), projected, lambda: whole)


def like_updates(flat: jax.Array, updates: Any) -> Any:
    """A vector, [d], as a tree with the shapes and dtypes of another."""
    tree = like_tree(flat, updates)
    return jax.tree.map(lambda x, u: x.astype(u.dtype), tree, updates)
