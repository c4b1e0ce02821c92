"""Programs compiled for devices that need not be there, and what they are made of.

The TPU compiler needs no TPU, only libtpu (the extra ``tpu-aot``).
"""

import os
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np
import optax
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import radazo_jax as zo
from benchmarks import gpus

ALL_AT_ONCE = zo.vectorized(2**30)
_CHIPS = {"tpu": "v5e:1x1", "v5e": "v5e:1x1", "v5p": "v5p:1x1x1"}


def without_tpu() -> None:
    """Keeps JAX and the TPU compiler from looking for a TPU: before either is used."""
    os.environ |= {
        "TPU_SKIP_MDS_QUERY": "1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TPU_LOG_DIR": "disabled",
    }
    jax.config.update("jax_platforms", "cpu")


def tpu_topology(name: str, bounds: tuple[int, ...] | None = None) -> list[Any]:
    """The chips of a topology such as ``v5e:2x4``.

    Args:
      name: Its name.
      bounds: Number of chips per host along each axis; None for the default.
    """
    without_tpu()
    options = {} if bounds is None else {"chips_per_host_bounds": bounds}
    return topologies.get_topology_desc(
        platform="tpu", topology_name=name, **options
    ).devices


def alone(target: str) -> tuple[Mesh, dict[str, Any] | None]:
    """A mesh of one CPU, TPU or GPU of `gpus`, and the options of its compiler."""
    if target == "cpu":
        device = jax.devices("cpu")[0]
    elif target in _CHIPS:
        device = tpu_topology(_CHIPS[target], (1, 1, 1))[0]
    else:
        device = gpus.devices(target)[0]
    options = gpus.OPTIONS if target in gpus.GPUS else None
    return Mesh(np.array([device]), ("one",)), options


def compiled_for(targets: Iterable[str]) -> str:
    """Names the kinds of devices, for a record."""
    meshes = (alone(target)[0] for target in targets)
    kinds = dict.fromkeys(mesh.devices.flat[0].device_kind for mesh in meshes)
    return f"compiled for {', '.join(kinds)}"


def placed(tree: Any, mesh: Mesh, spec: Callable[[Any], P]) -> Any:
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=NamedSharding(mesh, spec(x))
        ),
        tree,
    )


def compiled_on(
    mesh: Mesh,
    fun: Callable[..., Any],
    args: tuple[Any, ...],
    donate: Any = (),
    options: dict[str, Any] | None = None,
) -> Any:
    """``fun`` compiled, its results sharded as the arguments they replace, or not."""
    replicated = NamedSharding(mesh, P())
    by_shape = {x.shape: x.sharding for x in jax.tree.leaves(args) if x.ndim > 1}
    with jax.set_mesh(mesh):
        out = jax.tree.map(
            lambda x: by_shape.get(x.shape, replicated), jax.eval_shape(fun, *args)
        )
        jitted = jax.jit(fun, donate_argnums=donate, out_shardings=out)
        compiled = jitted.lower(*args).compile(options)
    for output in jax.tree.leaves(compiled.output_shardings):
        # Without every sharding given, JAX compiles for the CPU and does not say so.
        assert output.device_set == set(mesh.devices.flat), output
    return compiled


def num_bytes(tree: Any) -> int:
    """The bytes of a tree's arrays."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def held(memory: Any) -> int:
    """The main memory of a program: arguments, other results, temporary buffers."""
    held = memory.argument_size_in_bytes + memory.output_size_in_bytes
    return held - memory.alias_size_in_bytes + memory.temp_size_in_bytes


def step_of(
    loss: Callable[..., Any],
    estimator: zo.GradientEstimator,
    optimizer: optax.GradientTransformationExtraArgs,
    evaluator: zo.Evaluator = ALL_AT_ONCE,
) -> Callable[..., Any]:
    value_and_grad = zo.value_and_grad(loss, estimator, evaluator=evaluator)

    def step(params: Any, state: Any, key: jax.Array, batch: Any) -> Any:
        value, gradient = value_and_grad(key, params, batch)
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, value

    return step
