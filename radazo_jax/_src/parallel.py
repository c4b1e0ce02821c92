"""Evaluations spread over the devices along a mesh axis."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from radazo_jax._src import checks, sampling, trees
from radazo_jax._src import perturb as perturb_lib
from radazo_jax._src.directions import Direction
from radazo_jax._src.kept import Kept

AxisName = str | tuple[str, ...]


def check_axis_name(axis_name: Any) -> None:
    """Raises unless `axis_name` is a name, or a tuple of different names."""
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
      fun: The loss, or a pair of the loss and what is not needed if `has_aux`. The
        arrays in it, where it is a `jax.tree_util.Partial`, may be sharded over
        other axes.
      has_aux: Whether `fun` returns a pair.
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
    # Those of a Partial; other functions are traced with what they close over.
    is_tree = isinstance(fun, jax.tree_util.Partial)
    arrays, static = trees.partition(fun) if is_tree else ([], None)
    _check_free(names, {"params": params, "the arguments of fun": arrays})

    def losses(
        mine: jax.Array, params: Any, sampled: Any, scales: jax.Array, arrays: Any
    ) -> jax.Array:
        given = fun if static is None else static.combine(arrays)
        loss = checks.checked_loss(given, has_aux)

        def evaluate(i: jax.Array) -> jax.Array:
            direction = jax.tree.map(lambda x: x[jnp.asarray(indices)[i]], sampled)
            return perturb_lib.perturb(loss)(params, direction, scales[i])[0]

        return sampling.batched_map(evaluate, mine, batch_size)

    def points(device: jax.Array | int, of_devices: int) -> jax.Array:
        # Beyond the last point, that one again.
        numbers = device * share + jnp.arange(of_devices * share)
        return jnp.minimum(numbers, num_points - 1)

    def on_device(*args: Any) -> jax.Array:
        values = losses(points(lax.axis_index(names), 1), *args)
        return lax.all_gather(values, names, tiled=True)

    def on_all(*args: Any) -> jax.Array:
        mine = points(0, num_devices).reshape(num_devices, share)
        mine = lax.with_sharding_constraint(mine, jax.P(names))
        vmapped = jax.vmap(losses, (0, *(None for _ in args)), spmd_axis_name=names)
        values = lax.with_sharding_constraint(vmapped(mine, *args), jax.P(names))
        return lax.with_sharding_constraint(values.reshape(-1), jax.P())

    manual = set(mesh.manual_axes)
    program = on_device
    if not set(names) <= manual:
        rest = set(mesh.axis_names) - manual - set(names)
        if any(mesh.shape[name] > 1 for name in rest):
            # A compiler that is left some of the axes of a shard_map dies on a look-up
            # in what is sharded over them (XLA, as of JAX 0.10).
            program = on_all
        else:
            program = jax.shard_map(
                on_device,
                in_specs=jax.P(),
                out_specs=jax.P(),
                axis_names=set(names),
                check_vma=False,
            )
    if mesh.explicit_axes:
        program = jax.sharding.auto_axes(
            program, axes=mesh.explicit_axes, out_sharding=jax.P()
        )
    return program(params, sampled, scales, arrays)[:num_points]


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
