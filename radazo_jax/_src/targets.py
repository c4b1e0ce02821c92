"""Programs that depend on the devices they are compiled for."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core
from jax.interpreters import mlir


def of_one_device(ctx: mlir.LoweringRuleContext) -> bool:
    """Whether an equation is lowered for the program of a single device."""
    return getattr(ctx.module_context.axis_context, "num_devices", None) == 1


def on_one_gpu(fun: Callable[[], Any], otherwise: Callable[[], Any]) -> Any:
    """`fun()` in the program of a single GPU, else `otherwise()`.

    Args:
      fun: A function of no arguments.
      otherwise: A function of no arguments, to the same shapes and dtypes.

    Returns:
      The result of one of them.
    """

    def on_gpu() -> Any:
        # The compiler removes the branch that is never taken.
        return lax.cond(_one_device_p.bind(), fun, otherwise)

    return lax.platform_dependent(cpu=otherwise, tpu=otherwise, default=on_gpu)


# A primitive, because only its lowering sees what the program is for.
_one_device_p = core.Primitive("one_device")
_one_device_p.def_impl(lambda: jnp.zeros((), jnp.bool_))
_one_device_p.def_abstract_eval(lambda: jax.typeof(np.bool_(False)))
mlir.register_lowering(
    _one_device_p, lambda ctx: [mlir.ir_constant(np.bool_(of_one_device(ctx)))]
)
