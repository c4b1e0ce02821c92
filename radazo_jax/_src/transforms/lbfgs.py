"""BFGS: gradients multiplied by an approximate inverse Hessian."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from radazo_jax._src import checks, xla
from radazo_jax._src.base import GradientTransformationExtraArgs
from radazo_jax._src.trees import as_flat, like_tree, number, size, widest

# By default, as many pairs as this are kept, or two for each parameter within limits.
_FEWEST, _MOST = 10, 40

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
      params: The latest parameters, infinite before the first update: [d].
      gradient: The gradient there: [d].
      displacements: The latest displacements s, the newest last, and 0 for pairs
        that do not exist yet: [m, d].
      changes: The changes y of the gradient along them: [m, d].
      scale: The scale γ of the inverse Hessian; 0 if it is not known: shape ().
    """

    params: jax.Array
    gradient: jax.Array
    displacements: jax.Array
    changes: jax.Array
    scale: jax.Array


def scale_by_bfgs(memory_size: int | None = None) -> GradientTransformationExtraArgs:
    """Multiplies gradients by the inverse Hessian of limited-memory BFGS.

    With the displacement s = θₜ − θₜ₋₁, the change y = gₜ − gₜ₋₁ and ρ = 1/⟨s, y⟩ of
    each of the latest m steps, the oldest first, from H = γ I,

        H ← (I − ρ s yᵀ) H (I − ρ y sᵀ) + ρ s sᵀ,    uₜ = H gₜ

    with γ = ⟨s, y⟩/|y|² of the newest pair: a scale that is found once, at the
    start, may be wrong by orders of magnitude later. Use it with gradients without
    noise, as `full_difference` estimates them. It differs from `optax.scale_by_lbfgs`
    in the first update and under bounds, and in that it needs no line search.

    The first update is |f| g/|g|², along which the loss falls by |f| according to its
    slope, but not longer than θ, or 1. Under bounds, the least loss is seldom near 0:
    the first update is g, but not longer than 2θ, or 2. A pair with ⟨s, y⟩ ≤ 0 is left
    out, and γ is multiplied by 4, because the steps are too short. If s is 0, the
    latest step led nowhere, and all pairs are forgotten.

    Under bounds, coordinates at a bound that the gradient pushes outward are fixed, and
    the products ⟨s, y⟩ leave them out. The gradient replaces an update that does not
    ascend.

    Args:
      memory_size: m, the number of pairs; by default 2d, but at least 10 and at most
        40. The state has 2 (m + 1) d elements.

    Returns:
      A transformation whose `update(updates, state, params, value=...)` needs the loss
      as value. Optional are `bounds`, a pair of trees like the parameters; `known`,
      bool, [d]: elements of the gradient that are not known are replaced by elements of
      the latest gradient; and `sizes`, [d], the units of the parameters. `solver`
      passes them. Its state is a `ScaleByBfgsState`.

    Raises:
      TypeError, ValueError: If `memory_size` is not a positive integer; from the
        update, if `params` or `value` is missing.

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
      Nocedal & Wright, Numerical Optimization, 2006, eqs. (7.19) and (7.20), and
      algorithm 7.4.
    """
    if memory_size is not None:
        checks.check_int_at_least("memory_size", memory_size, 1)

    def init_fn(params: optax.Params) -> ScaleByBfgsState:
        d, dtype = size(params), widest(params)
        m = min(max(2 * d, _FEWEST), _MOST) if memory_size is None else memory_size
        return ScaleByBfgsState(
            params=jnp.full(d, jnp.inf, dtype),
            gradient=jnp.zeros(d, dtype),
            displacements=jnp.zeros((m, d), dtype),
            changes=jnp.zeros((m, d), dtype),
            scale=number(0, dtype),
        )

    def update_fn(
        updates: optax.Updates,
        state: ScaleByBfgsState,
        params: optax.Params | None = None,
        *,
        value: jax.typing.ArrayLike | None = None,
        bounds: tuple[Any, Any] | None = None,
        known: jax.Array | None = None,
        sizes: jax.Array | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, ScaleByBfgsState]:
        del extra_args
        checks.check_passed(params=params, value=value)
        at, gradient = as_flat(params), as_flat(updates)
        if known is not None:
            gradient = jnp.where(known, gradient, state.gradient)
        unit = jnp.ones_like(at) if sizes is None else sizes.astype(at.dtype)

        def found(
            state: ScaleByBfgsState, at: jax.Array, gradient: jax.Array, unit: jax.Array
        ) -> tuple[jax.Array, ScaleByBfgsState]:
            after = _updated(state, at, gradient, unit)
            free = ~_fixed(at, gradient, bounds)
            scaled = jnp.where(free, unit * gradient, 0)
            return unit * _product(after, scaled, free, unit), after

        # By itself, because a loop that encloses the sums would round them otherwise.
        new, after = xla.compute_once(found, state, at, gradient, unit)
        free = jnp.where(_fixed(at, gradient, bounds), 0, gradient)
        scaled = unit * free
        known_sizes = jnp.any(unit != 1)
        reach = jnp.where(known_sizes, 0, jnp.linalg.norm(at))
        is_first = ~jnp.all(jnp.isfinite(state.params)) & ~known_sizes
        boxed = is_first if bounds is not None else jnp.zeros((), jnp.bool_)
        first = unit * _first_update(scaled, value, reach, boxed)
        # By rounding, or by bounds that were not there before.
        usable = (jnp.sum(new * free) > 0) & jnp.all(jnp.isfinite(new))
        new = jnp.where((after.scale > 0) & usable, new, first)
        return like_updates(new, updates), after

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _first_update(
    gradient: jax.Array, value: Any, reach: jax.Array, boxed: jax.Array
) -> jax.Array:
    """The update without a pair: [d].

    Args:
      gradient: The gradient, in units of the sizes of the parameters: [d].
      value: The loss.
      reach: The norm of the parameters, 0 if their sizes are known: shape ().
      boxed: Whether it is the first update within bounds whose sizes are not known:
        bool, shape ().
    """
    loss = jnp.asarray(value).astype(gradient.dtype)
    square = jnp.sum(gradient**2)
    length = jnp.where(loss == 0, 1, abs(loss)) / square
    length = jnp.where(boxed, 1, length)
    most = jnp.where(boxed, _FARTHER, 1) * jnp.maximum(1, reach) / jnp.sqrt(square)
    return jnp.where(square > 0, jnp.minimum(length, most), 0) * gradient


def _updated(
    state: ScaleByBfgsState, at: jax.Array, gradient: jax.Array, unit: jax.Array
) -> ScaleByBfgsState:
    """The state with the pair of the latest step."""
    first = ~jnp.all(jnp.isfinite(state.params))
    s = jnp.where(first, 0, at - state.params) / unit
    y = unit * (gradient - state.gradient)
    curved, square = jnp.sum(s * y), jnp.sum(y**2)
    norms = jnp.linalg.norm(s) * jnp.linalg.norm(y)
    upward = (curved > _ROUNDED * norms) & jnp.isfinite(curved / square)
    # Without a scale, the next step is longer than the latest one by the same factor.
    guess = jnp.sum(s**2) / -jnp.sum(s * unit * state.gradient)
    before = jnp.where(state.scale > 0, state.scale, guess)
    scale = jnp.where(upward, curved / square, _LONGER * before)
    usable = jnp.any(s != 0) & jnp.isfinite(scale) & (scale > 0)

    def with_pair(pairs: jax.Array, newest: jax.Array) -> jax.Array:
        longer = jnp.concatenate([pairs[1:], newest[None]])
        return jnp.where(usable, jnp.where(upward, longer, pairs), 0)

    return ScaleByBfgsState(
        params=at,
        gradient=gradient,
        displacements=with_pair(state.displacements, s * unit),
        changes=with_pair(state.changes, y / unit),
        scale=jnp.where(usable, scale, 0),
    )


def _fixed(
    at: jax.Array, gradient: jax.Array, bounds: tuple[Any, Any] | None
) -> jax.Array:
    """The coordinates that the gradient pushes out of the box: bool, [d]."""
    if bounds is None:
        return jnp.zeros(at.shape, jnp.bool_)
    low, high = (as_flat(bound) for bound in bounds)
    return ((at <= low) & (gradient > 0)) | ((at >= high) & (gradient < 0))


def _product(
    state: ScaleByBfgsState, g: jax.Array, free: jax.Array, unit: jax.Array
) -> jax.Array:
    """H g for the coordinates that are free, in units of their sizes: [d]."""
    s, y = (jnp.where(free, x, 0) for x in (state.displacements, state.changes))
    pairs = s / unit[None], y * unit[None]
    curved = jnp.sum(pairs[0] * pairs[1], axis=1)
    norms = jnp.linalg.norm(pairs[0], axis=1) * jnp.linalg.norm(pairs[1], axis=1)
    rho = jnp.where(curved > _ROUNDED * norms, 1 / curved, 0)
    oldest_first = (*pairs, rho)

    def before(q: jax.Array, pair: Any) -> tuple[jax.Array, jax.Array]:
        s, y, rho = pair
        alpha = rho * jnp.sum(s * q)
        return q - alpha * y, alpha

    def after(r: jax.Array, pair: Any) -> tuple[jax.Array, None]:
        (s, y, rho), alpha = pair
        return r + (alpha - rho * jnp.sum(y * r)) * s, None

    q, alphas = lax.scan(before, g, oldest_first, reverse=True)
    r, _ = lax.scan(after, state.scale * q, (oldest_first, alphas))
    return r


def like_updates(flat: jax.Array, updates: Any) -> Any:
    """A vector, [d], as a tree with the shapes and dtypes of another."""
    tree = like_tree(flat, updates)
    return jax.tree.map(lambda x, u: x.astype(u.dtype), tree, updates)
