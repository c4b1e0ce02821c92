"""Values of points evaluated on the devices along a mesh axis."""

import dataclasses
import math
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
import optax
from jax import lax

from radazo_jax._src.base import checks, shown, trees
from radazo_jax._src.base.trees import Tree
from radazo_jax._src.base.xla import on_any_mesh
from radazo_jax._src.estimates.contracts import Evaluator, Points, Values
from radazo_jax._src.estimates.points import shifted
from radazo_jax._src.estimates.vectorized import (
    checked_batch_size,
    use_of,
    values_by_number,
    with_stored,
)
from radazo_jax._src.perturb import transform

AxisName = str | tuple[str, ...]


@dataclasses.dataclass(frozen=True, repr=False)
class Sharded(Evaluator):
    """See `sharded`."""

    _constructor = "sharded"

    axis_name: AxisName
    batch_size: int | None

    @property
    def _names(self) -> tuple[str, ...]:
        return _as_tuple(self.axis_name)

    def cache(self, points: Points) -> Points:
        return with_stored(points, use_of(len(points.scales), self.batch_size))

    def check_free(self, params: optax.Params, fun: Callable[..., Tree]) -> None:
        """Raises if an array is known to be sharded over one of the axes already."""
        arrays, _ = trees.partition(fun)
        _check_free(self._names, {"params": params, "the arguments of fun": arrays})

    def evaluate(
        self,
        fun: Callable[[optax.Params], Tree],
        params: optax.Params,
        points: Points,
        has_aux: bool,
    ) -> tuple[Values, Tree]:
        if not has_aux:
            values = _values(fun, params, points, False, self._names, self.batch_size)
            return points.split(values), None
        # All devices evaluate the first point, because its aux is returned.
        loss = checks.checked_loss(fun, has_aux, points.vector_valued)
        if points.includes_params:
            value, aux = loss(params)
            rest = dataclasses.replace(points, includes_params=False)
            values = _values(fun, params, rest, True, self._names, self.batch_size)
            return Values(value, rest.split(values).along), aux
        first = jax.tree.map(lambda x: x[0], points.directions)
        scale = points.scales[0, 0]
        t = None if points.shifts is None else points.shifts[0, 0]
        at = shifted(params, points.shift, t)
        _, aux = transform.evaluate(loss, at, points.layout, first, scale)
        values = _values(fun, params, points, True, self._names, self.batch_size)
        return points.split(values), aux


@checks.checks_names
def sharded(axis_name: AxisName, batch_size: int | None = None) -> Evaluator:
    """Evaluates points on the devices along a mesh axis, under `jax.set_mesh`.

    Each device evaluates ⌈n / devices⌉ of the n points. The values are gathered, and
    nothing else is sent; every device makes the same estimate of them. Parameters and
    minibatch may be sharded over other axes.

    Args:
      axis_name: The mesh axis, or a tuple of axes.
      batch_size: Number of points that a device evaluates together; `None` for all of
        its points.

    Returns:
      The evaluator. It raises a ValueError, when called, if there is no such axis in
      the mesh, or an array is sharded over it already.

    Raises:
      TypeError: If `axis_name` is neither a string nor a tuple of strings.
      ValueError: If `axis_name` names an axis twice, or `batch_size` is not positive.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> import radazo_jax as zo
      >>> value_and_grad = jax.jit(
      ...     zo.value_and_grad(
      ...         lambda x: jnp.sum(x**2),
      ...         zo.forward_difference(),
      ...         evaluator=zo.sharded("k"),
      ...     )
      ... )
      >>> with jax.set_mesh(jax.make_mesh((jax.device_count(),), ("k",))):
      ...     value, gradient = value_and_grad(jax.random.key(0), jnp.ones(3))
      >>> float(value)
      3.0
    """
    names = _as_tuple(axis_name)
    if not names or not all(isinstance(name, str) for name in names):
        raise TypeError(
            "axis_name must be the name of a mesh axis, or a tuple of names; got "
            f"{shown.given(axis_name)}."
        )
    if len(set(names)) < len(names):
        raise ValueError(f"axis_name must name each axis once; got {axis_name!r}.")
    # One axis is the same, by its name or as a tuple.
    axis_name = names[0] if len(names) == 1 else names
    return Sharded(axis_name, checked_batch_size(batch_size))


def _as_tuple(axis_name: AxisName) -> tuple[str, ...]:
    return axis_name if isinstance(axis_name, tuple) else (axis_name,)


def _values(
    fun: Callable[[optax.Params], Tree],
    params: optax.Params,
    points: Points,
    has_aux: bool,
    names: tuple[str, ...],
    batch_size: int | None,
) -> jax.Array:
    """Returns the values, [n] or [n, G], the same on all devices; aux is dropped."""
    mesh = _mesh_with(names)
    num_points, num_devices = points.num_points, math.prod(mesh.shape[n] for n in names)
    share = -(-num_points // num_devices)
    # The arrays of a Partial. Other functions are traced with their closures.
    is_tree = isinstance(fun, jax.tree_util.Partial)
    arrays, static = trees.partition(fun) if is_tree else ([], None)
    _check_free(names, {"params": params, "the arguments of fun": arrays})
    evaluator = f"sharded({names if names[1:] else names[0]!r}, "

    def losses(
        mine: jax.Array, params: optax.Params, points: Points, arrays: Tree
    ) -> jax.Array:
        given = fun if static is None else static.merge(arrays)
        loss = checks.checked_loss(given, has_aux, points.vector_valued)
        return values_by_number(loss, params, points, mine, batch_size, evaluator)

    def numbers(device: jax.Array | int, of_devices: int) -> jax.Array:
        # Beyond the last point, that one again.
        mine = device * share + jnp.arange(of_devices * share)
        return jnp.minimum(mine, num_points - 1)

    def on_device(*args: Tree) -> jax.Array:
        values = losses(numbers(lax.axis_index(names), 1), *args)
        return lax.all_gather(values, names, tiled=True)

    def on_all(*args: Tree) -> jax.Array:
        mine = numbers(0, num_devices).reshape(num_devices, share)
        mine = lax.with_sharding_constraint(mine, jax.P(names))
        vmapped = jax.vmap(losses, (0, *(None for _ in args)), spmd_axis_name=names)
        values = lax.with_sharding_constraint(vmapped(mine, *args), jax.P(names))
        return lax.with_sharding_constraint(lax.collapse(values, 0, 2), jax.P())

    manual = set(mesh.manual_axes)
    program = on_device
    if not set(names) <= manual:
        rest = set(mesh.axis_names) - manual - set(names)
        if any(mesh.shape[name] > 1 for name in rest):
            # A compiler that is left some of the axes of a shard_map dies on a lookup
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
    return on_any_mesh(program, jax.P())(params, points, arrays)[:num_points]


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


def _check_free(names: tuple[str, ...], trees: dict[str, Tree]) -> None:
    """Raises if an array is known to be sharded over one of the axes already."""
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


def _listed(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in names)
