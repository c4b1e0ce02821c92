"""Evaluations spread over the devices along a mesh axis."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from radazo_jax._src import checks, sampling
from radazo_jax._src import perturb as perturb_lib
from radazo_jax._src.directions import Direction
from radazo_jax._src.kept import Kept

AxisName = str | tuple[str, ...]


def check_axis_name(axis_name: Any) -> None:
    """Raises unless ``axis_name`` is a name, or a tuple of different names."""
    names = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    if not names or not all(isinstance(name, str) for name in names):
        raise TypeError(
            "axis_name must be the name of a mesh axis, or a tuple of names; got "
            f"{axis_name!r}."
        )
    if len(set(names)) < len(names):
        raise ValueError(f"axis_name must name each axis once; got {axis_name!r}.")


def spread(
    fun: Callable[[Any], Any],
    has_aux: bool,
    params: Any,
    sampled: Direction | Kept,
    indices: np.ndarray,
    scales: jax.Array,
    axis_name: AxisName,
    batch_size: int | None,
) -> jax.Array:
    """The losses at n points, each evaluated on one of the devices along an axis.

    Each device evaluates ⌈n / devices⌉ of the points; the losses are gathered, and
    nothing else is sent.

    Args:
      fun: The loss, or a pair of the loss and what is not needed if ``has_aux``. The
        arrays in it, where it is a ``jax.tree_util.Partial``, may be sharded over
        other axes.
      has_aux: Whether ``fun`` returns a pair.
      params: The parameters, not sharded over the axis.
      sampled: Directions, stacked.
      indices: For each point the index of its direction, int [n].
      scales: What that is multiplied by, float32 [n].
      axis_name: A mesh axis, or several.
      batch_size: How many points a device evaluates together.

    Returns:
      The losses, [n], the same on all devices.
    """
    names = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    mesh = _mesh_with(names)
    num_points, num_devices = len(indices), math.prod(mesh.shape[n] for n in names)
    share = -(-num_points // num_devices)
    arrays, rebuild = _arrays_of(fun)
    _check_free(names, {"params": params, "the arguments of fun": arrays})

    def on_device(
        params: Any, sampled: Any, scales: jax.Array, arrays: Any
    ) -> jax.Array:
        loss = checks.checked_loss(rebuild(arrays), has_aux)

        def evaluate(i: jax.Array) -> jax.Array:
            direction = jax.tree.map(lambda x: x[jnp.asarray(indices)[i]], sampled)
            return perturb_lib.perturb(loss)(params, direction, scales[i])[0]

        first = lax.axis_index(names) * share
        # Beyond the last point, that one again.
        mine = jnp.minimum(first + jnp.arange(share), num_points - 1)
        values = sampling.batched_map(evaluate, mine, batch_size)
        return lax.all_gather(values, names, tiled=True)

    if not set(names) <= set(mesh.manual_axes):
        on_device = jax.shard_map(
            on_device,
            in_specs=jax.P(),
            out_specs=jax.P(),
            axis_names=set(names),
            check_vma=False,
        )
    if mesh.explicit_axes:
        # The boundary of a shard_map over some axes gathers what is sharded over
        # others by its type; what the compiler has sharded, it leaves as it is.
        on_device = jax.sharding.auto_axes(
            on_device, axes=mesh.explicit_axes, out_sharding=jax.P()
        )
    return on_device(params, sampled, scales, arrays)[:num_points]


def _mesh_with(names: tuple[str, ...]) -> jax.sharding.AbstractMesh:
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        raise ValueError(
            f"axis_name names {_listed(names)}, and there is no mesh: call under "
            "jax.set_mesh(mesh)."
        )
    missing = [name for name in names if name not in mesh.axis_names]
    if missing:
        raise ValueError(
            f"axis_name must name axes of the mesh; got {_listed(missing)}, and it has "
            f"{_listed(mesh.axis_names)}."
        )
    return mesh


def _check_free(names: tuple[str, ...], trees: dict[str, Any]) -> None:
    """Raises where an array is known to be sharded over one of the axes already."""
    for where, tree in trees.items():
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            sharding = getattr(leaf, "sharding", None) or jax.typeof(leaf).sharding
            used = [
                axis
                for entry in getattr(sharding, "spec", ())
                for axis in (entry if isinstance(entry, tuple) else (entry,))
                if axis in names
            ]
            if used:
                raise ValueError(
                    f"axis_name must name axes that nothing else is sharded over; got "
                    f"{_listed(used)}, over which {where}{jax.tree_util.keystr(path)} "
                    f"is sharded as {sharding.spec}."
                )


def _listed(names: Any) -> str:
    return ", ".join(repr(name) for name in names)


def _arrays_of(
    fun: Callable[[Any], Any],
) -> tuple[list[Any], Callable[[list[Any]], Callable[[Any], Any]]]:
    """The arrays that a ``Partial`` holds, and what makes it of others."""
    if not isinstance(fun, jax.tree_util.Partial):
        return [], lambda arrays: fun
    leaves, treedef = jax.tree.flatten(fun)
    is_array = [isinstance(leaf, jax.Array | np.ndarray) for leaf in leaves]
    arrays = [leaf for leaf, is_one in zip(leaves, is_array, strict=True) if is_one]

    def rebuild(arrays: list[Any]) -> Callable[[Any], Any]:
        found = iter(arrays)
        merged = [
            next(found) if is_one else leaf
            for leaf, is_one in zip(leaves, is_array, strict=True)
        ]
        return jax.tree.unflatten(treedef, merged)

    return arrays, rebuild
