"""Stochastic rounding of updated parameters."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from radazo_jax._src.base import checks, keys, xla
from radazo_jax._src.base.trees import Tree, at_least_float32
from radazo_jax._src.directions import generator
from radazo_jax._src.directions.generator import Positions
from radazo_jax._src.directions.layout import layout_of
from radazo_jax._src.estimates.contracts import GradientTransformationExtraArgs


class StochasticRoundingState(NamedTuple):
    """State of `stochastic_rounding`.

    Attributes:
      key: The key: a typed key, shape (); it does not change.
      count: The number of updates so far: int32, shape ().
    """

    key: jax.Array
    # `count` is the name that Optax's states have; it hides a method of tuple.
    count: jax.Array  # type: ignore[assignment]


@checks.checks_names
def stochastic_rounding(key: jax.typing.ArrayLike) -> GradientTransformationExtraArgs:
    """Rounds updated parameters up or down at random: the last of a chain.

    A sum θ + u is rounded to the dtype of the parameters. An update below half of the
    spacing of its numbers is lost: bfloat16 parameters do not change if each update is
    less than 1/512 of the parameter. This transformation rounds to one of the two
    neighbors q₀ and q₁ of the sum instead,

        P(θ_new = q₁) = (θ + u − q₀) / (q₁ − q₀)

    so that the mean of the rounded sum is θ + u. The updates that it returns add up
    with the parameters to q₀ or q₁ exactly, in the arithmetic of
    `optax.apply_updates`. If |u| > |θ|, an update to the neighbor q₁ may not exist in
    this arithmetic, and the number after it replaces it, with half of its probability.
    An update in a wider dtype than the parameters is rounded at random, too, so that
    small values are kept in the mean. Gradients in float16 and narrower dtypes lose
    them when a small learning rate multiplies them: `solver`, `minimize` and
    `estimate_gradient(inner=...)` compute such gradients in float32 if this
    transformation follows; in other loops pass float32 gradients.

    Use it for parameters in bfloat16 or float16.
    The random number of an element depends on the key, the number of the update and
    the element's position, so that a run can be resumed, replayed and sharded.

    Args:
      key: A key; it is consumed. It must differ from the key of the run.

    Returns:
      An `optax.GradientTransformationExtraArgs`, whose state is a
      `StochasticRoundingState`. Chained by `chain_in_place`, it rounds block by block.

    Raises:
      TypeError: If the key is no key; by the update, if parameters are not real
        floating-point arrays.
      ValueError: If parameters are not passed to the update.

    Examples:
      >>> import jax, jax.numpy as jnp, optax
      >>> import radazo_jax as zo
      >>> optimizer = optax.chain(optax.sgd(2.0**-12), zo.stochastic_rounding(0))
      >>> params = jnp.ones(4096, jnp.bfloat16)
      >>> state = optimizer.init(params)
      >>> updates, state = optimizer.update(jnp.ones_like(params), state, params)
      >>> params = optax.apply_updates(params, updates)
      >>> loss_of_mean = 1 - params.astype("float32").mean()
      >>> round(float(loss_of_mean * 2**12), 1)
      1.0

    References:
      Croci et al., Stochastic Rounding: Implementation, Error Analysis and
      Applications, R. Soc. Open Sci. 2022, <https://doi.org/10.1098/rsos.211631>.
    """
    typed = keys.check_same_key(key)

    def init(params: optax.Params) -> StochasticRoundingState:
        del params
        return StochasticRoundingState(
            jax.random.clone(typed), jnp.zeros((), jnp.int32)
        )

    def update(
        updates: optax.Updates,
        state: StochasticRoundingState,
        params: optax.Params | None = None,
        *,
        positions: Tree = None,
        **extra_args: Tree,
    ) -> tuple[optax.Updates, StochasticRoundingState]:
        del extra_args
        checks.require_arguments(params=params)
        treedef: Any = jax.tree.structure(params)
        leaves = jax.tree.leaves(params)
        if positions is None:
            at = [
                generator.positions(leaf.shape, offset=leaf.offset)
                for leaf in layout_of(params).leaves
            ]
        else:
            at = treedef.flatten_up_to(positions)
        step_key = generator.fold_in(state.key, state.count.astype(jnp.uint32))
        rounded = [
            _rounded(step_key, *each)
            for each in zip(leaves, treedef.flatten_up_to(updates), at, strict=True)
        ]
        after = StochasticRoundingState(state.key, optax.safe_increment(state.count))
        return jax.tree.unflatten(treedef, rounded), after

    return optax.GradientTransformationExtraArgs(init, update)


def is_in(state: optax.OptState) -> bool:
    """Returns whether the state of an optimizer is one with stochastic rounding."""

    def rounds(x: Tree) -> bool:
        return isinstance(x, StochasticRoundingState)

    return any(map(rounds, jax.tree.leaves(state, is_leaf=rounds)))


def _rounded(key: jax.Array, p: Tree, u: Tree, at: Positions) -> jax.Array:
    """Returns the update of p that makes the sum one of the two neighbors of p + u.

    The error of rounding to the nearest one tells on which side the other one is, and
    how often to take that.
    """
    p = jnp.asarray(p)
    if not jnp.issubdtype(p.dtype, jnp.floating):
        raise TypeError(
            f"params must be real floating-point arrays; got {p.dtype}. Put them under "
            "optax.partition."
        )
    # Words as floats in [0, 1), of which small ones are as exact as large ones.
    word = generator.bits(key, at) >> np.uint32(1)
    drawn = word.astype(jnp.int32).astype(jnp.float32) * np.float32(2**-31)
    u, drawn = _narrowed(jnp.asarray(u), p.dtype, drawn)
    nearest, error = _add(p, u)
    # If |u| <= |p|, the distance from p to each neighbor of the sum is a number of the
    # dtype. Otherwise the update is u, or the number next to u, because u has the wider
    # spacing.
    wide = at_least_float32(p.dtype)
    smaller = abs(u) <= abs(p)

    def distance(q: jax.Array) -> jax.Array:
        return (q.astype(wide) - p.astype(wide)).astype(p.dtype)

    same = jnp.where(smaller & jnp.isfinite(p), distance(nearest), u)
    other = jnp.where(smaller, distance(_next(nearest, error)), _next(u, error))
    other = xla.rounded(other)
    beyond, _ = _add(p, other)
    share = error / (beyond.astype(wide) - nearest.astype(wide))
    return jnp.where(drawn < share.astype(jnp.float32), other, same)


def _narrowed(
    u: jax.Array, dtype: np.dtype, drawn: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the update in the dtype of the parameters, with its value as its mean.

    Args:
      u: The update.
      dtype: The dtype of the parameters.
      drawn: Uniform numbers in [0, 1).

    Returns:
      The update, and uniform numbers in [0, 1) that do not depend on it.
    """
    # Of its own dtype also inside of a fused program.
    nearest = xla.rounded(u.astype(dtype))
    wide = at_least_float32(u.dtype)
    if u.dtype == dtype or wide.itemsize <= dtype.itemsize:
        return nearest, drawn
    error = u.astype(wide) - nearest.astype(wide)
    other = xla.rounded(_next(nearest, error))
    share = error / (other.astype(wide) - nearest.astype(wide))
    share = share.astype(jnp.float32)
    takes = drawn < share
    drawn = jnp.where(takes, drawn / share, (drawn - share) / (1 - share))
    return jnp.where(takes, other, nearest), drawn


def _add(p: jax.Array, u: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the sum rounded to the dtype of both, and what rounding took, exactly.

    The second is at least float32. By Knuth's two-sum, for numbers of any size.
    """
    wide = at_least_float32(p.dtype)
    x, y = p.astype(wide), u.astype(wide)
    total = x + y
    part = total - x
    lost = (x - (total - part)) + (y - part)
    rounded = xla.rounded(total.astype(p.dtype))
    return rounded, (total - rounded.astype(wide)) + lost


def _next(x: jax.Array, towards: jax.Array) -> jax.Array:
    """Returns the number next to x, above it if `towards` is positive, else below."""
    # Four bits are the upper ones of a byte.
    bits, size = jnp.finfo(x.dtype).bits, 8 * x.dtype.itemsize
    unsigned, signed = f"uint{size}", f"int{size}"
    sign, spare = (np.dtype(unsigned).type(n) for n in (2 ** (size - 1), size - bits))
    words = lax.bitcast_convert_type(x, f"uint{bits}").astype(unsigned) << spare
    # As integers that are in the order of the numbers, of which 0 has one.
    negative = (words & sign) != 0
    ordered = jnp.where(negative, -(words & ~sign), words)
    step = 2 ** (size - bits)
    ordered = ordered + jnp.where(towards > 0, step, -step).astype(unsigned)
    below = lax.bitcast_convert_type(ordered, signed) < 0
    words = jnp.where(below, -ordered | sign, ordered) >> spare
    following = lax.bitcast_convert_type(words.astype(f"uint{bits}"), x.dtype)
    if np.isinf(np.array(np.inf).astype(x.dtype)):
        return following
    # In a dtype without infinities, the largest number has no next one.
    ends = (abs(x) == jnp.finfo(x.dtype).max) & ((towards > 0) == (x > 0))
    return jnp.where(ends, x, following)
