"""Units of parameters: the sizes of their typical changes.

A run in units takes place in z = θ / S: its estimator, its optimizer, its search and
its bounds get z, and states hold θ. The function is evaluated at points around θ, whose
displacements are multiplied by S.

S is a power of two for each parameter, so that neither θ nor z is rounded on the way:
the run takes the steps of a run of f(S z) from θ₀ / S, bit for bit. A size need not be
more exact.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from radazo_jax._src.base import Points
from radazo_jax._src.steps import box
from radazo_jax._src.steps.box import Bounds
from radazo_jax._src.trees import at_least_float32, filled, wide

# Powers of two: a number, or a tree like the parameters of numbers and of arrays that
# broadcast to the leaves.
Units = Any

_EXPECTED = "scale must be finite numbers > 0, the sizes of typical changes of params"


def as_units(scale: Any) -> Units | None:
    """The closest powers of two, of a scale as callers give it.

    Raises:
      TypeError: If it has something other than known real numbers.
      ValueError: If a number is not positive or not finite.
    """
    return jax.tree_util.tree_map_with_path(_power, scale)


def _power(path: Any, size: Any) -> Any:
    place = f"scale{jax.tree_util.keystr(path)}"
    # JAX's hierarchy of dtypes rather than NumPy's, which leaves out bfloat16.
    kinds = jnp.floating, jnp.integer
    if isinstance(size, jax.core.Tracer) or not any(
        jnp.issubdtype(np.asarray(size).dtype, kind) for kind in kinds
    ):
        got = " ".join(repr(size).split())
        raise TypeError(f"{_EXPECTED}; got {got} at {place}. Give known numbers.")
    sizes = np.asarray(size).astype(np.float64)
    wrong = sizes[~((sizes > 0) & (sizes < np.inf))]
    if wrong.size:
        raise ValueError(
            f"{_EXPECTED}; got {wrong.flat[0]} at {place}. Give 1 for a parameter "
            "whose size is not known."
        )
    powers = np.ldexp(1.0, np.rint(np.log2(sizes)).astype(np.int64))
    return powers if powers.ndim else float(powers)


def as_trees(units: Units, params: optax.Params) -> Any:
    """The units as a tree like the parameters, of arrays that broadcast to its leaves.

    The unit of a leaf that has a single one has the shape ().
    """

    def like(p: Any, unit: Any) -> jax.Array:
        unit = jnp.asarray(unit, at_least_float32(p.dtype))
        if np.broadcast_shapes(unit.shape, p.shape) != p.shape:
            raise ValueError(f"shapes {unit.shape} and {p.shape}")
        missing = p.ndim - unit.ndim if unit.ndim else 0
        return unit.reshape((1,) * missing + unit.shape)

    return jax.tree.map(like, params, filled(units, params))


def check_units(units: Units | None, params: optax.Params) -> None:
    """Raises unless these are units of the parameters, in which these can be written.

    Values that are traced cannot be compared.
    """
    if units is None:
        return
    with jax.ensure_compile_time_eval():
        try:
            tree = as_trees(units, params)
        except (TypeError, ValueError) as error:
            shapes = " ".join(repr(jax.tree.map(np.shape, units)).split())
            raise ValueError(
                "scale must be a number, or a tree like params of numbers or of arrays "
                f"that broadcast to its leaves; got one of the shapes {shapes}. Give a "
                "size for each array of params."
            ) from error
        leaves = jax.tree_util.tree_leaves_with_path(params)
        for (path, p), unit in zip(leaves, jax.tree.leaves(tree), strict=True):
            if not _are_usable(unit, p):
                raise ValueError(
                    f"scale must be numbers in whose units {p.dtype} can hold params; "
                    f"got {np.max(unit):.3g} at params"
                    f"{jax.tree_util.keystr(path)}. Give sizes closer to params, or a "
                    "wider dtype."
                )


def _are_usable(unit: jax.Array, p: Any) -> bool:
    """Whether units, their inverses, and a leaf in them do not overflow."""
    least = float(jnp.finfo(unit.dtype).tiny)
    usable = bool(jnp.all((unit >= least) & (unit <= 1 / least)))
    if not usable or isinstance(p, jax.core.Tracer):
        return usable
    return bool(jnp.all(jnp.isfinite(_divided(p, unit)) | ~jnp.isfinite(p)))


def to_units(units: Units | None, tree: Any) -> Any:
    """θ / S, or bounds likewise; as it is without units."""
    if units is None:
        return tree
    return jax.tree.map(_divided, tree, as_trees(units, tree))


def _divided(p: jax.Array, unit: jax.Array) -> jax.Array:
    return (wide(p) / unit).astype(p.dtype)


def from_units(units: Units | None, tree: Any) -> Any:
    """S z; as it is without units."""
    if units is None:
        return tree
    return jax.tree.map(
        lambda z, unit: (wide(z) * unit).astype(z.dtype), tree, as_trees(units, tree)
    )


def bounds_in(
    units: Units | None, bounds: Bounds | None, params: optax.Params
) -> Bounds | None:
    """The bounds of z, trees like the parameters; `None` without."""
    if bounds is None:
        return None
    lower, upper = box.as_trees(bounds, params)
    return to_units(units, lower), to_units(units, upper)


def around(units: Units | None, params: optax.Params, points: Points) -> Points:
    """The points of a step as points around θ, at which they are evaluated."""
    if units is None:
        return points
    placed: Points = dataclasses.replace(points, units=as_trees(units, params))
    return placed


def loss_in(
    units: Units | None, loss: Callable[[optax.Params], Any] | None
) -> Callable[[optax.Params], Any] | None:
    """The loss as a function of z, `None` if JAX does not evaluate it."""
    if loss is None or units is None:
        return loss
    return lambda z: loss(from_units(units, z))
