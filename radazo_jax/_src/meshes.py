"""Programs on meshes, with explicit axes too."""

from collections.abc import Callable
from typing import Any

import jax
import optax


def on_any_mesh(program: Callable[..., Any], out_sharding: Any) -> Callable[..., Any]:
    """The program, whose arrays the compiler shards if a mesh has explicit axes.

    Args:
      program: A function of arrays.
      out_sharding: The sharding of its results, for these axes.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.explicit_axes:
        return program
    return jax.sharding.auto_axes(
        program, axes=mesh.explicit_axes, out_sharding=out_sharding
    )


def specs_of(params: optax.Params) -> Any:
    """The partition specs of arrays by their types, a tree like `params`."""
    return jax.tree.map(lambda p: jax.typeof(p).sharding.spec, params)
