"""Frozen matrices in 8 or 4 bits, by Qwix.

No gradient goes through rounding. What is tuned by forward passes are adapters beside
the matrices (QLoRA's way) or their scales (QZO's).
"""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from examples.apps.llm.model import LanguageModel

GROUP = 128  # At most this many inputs share a scale.
_SMALLEST_GROUP = 16  # The scales of smaller ones take as much memory as the integers.


class Quantized(nnx.Variable):
    """The integers of a matrix."""


class QuantizationScale(nnx.Variable):
    """What they are multiplied by. No `nnx.Param`, so that it can be tuned alone."""


class QuantizedLinear(nnx.Module):
    """A linear layer, or a stack of them, whose matrix is an array of Qwix."""

    def __init__(self, base: nnx.Linear, qtype: str, scale_dtype: Any) -> None:
        self.in_features, self.out_features = base.in_features, base.out_features
        self.preferred_element_type = base.preferred_element_type
        import qwix  # Here, since it takes seconds, and few runs need it.

        kernel = base.kernel[...]
        quantize = functools.partial(
            qwix.quantize,
            qtype=jnp.dtype(qtype),
            channelwise_axes=[1],
            tiled_axes={0: group_size(self.in_features)},
        )
        # Layer by layer, since what lies between is float32.
        one = jax.jit(lambda matrix: quantize(matrix.astype(jnp.float32)))
        found = jax.lax.map(one, kernel) if kernel.ndim == 3 else one(kernel)
        self.qvalue = Quantized(found.qvalue)
        self.scale = QuantizationScale(found.scale.astype(scale_dtype))
        self.bias = base.bias

    def __call__(self, x: jax.Array) -> jax.Array:
        import qwix

        # In a loop over evaluations, XLA would compute before the loop, and keep, what
        # is made of the matrix alone.
        held = self.qvalue[...], self.scale[...], x
        steps, scale, x = jax.lax.optimization_barrier(held)
        matrix = qwix.QArray(steps, scale.astype(x.dtype))
        kind = self.preferred_element_type or x.dtype
        # What follows is not to choose how the matrix lies in memory: XLA's TPU backend
        # would copy the stack of them, transposed, and keep both.
        y = jax.lax.optimization_barrier(
            jnp.dot(x, qwix.dequantize(matrix), preferred_element_type=kind)
        )
        if self.bias is None:
            return y
        return y + self.bias[...].reshape((1,) * (y.ndim - 1) + (-1,))


def group_size(inputs: int) -> int:
    """Returns how many inputs share a scale: the largest divisor up to `GROUP`.

    Qwix has only groups of one size. If that would be less than 16, all inputs share
    one scale.
    """
    largest = max(n for n in range(1, GROUP + 1) if inputs % n == 0)
    return largest if largest >= min(inputs, _SMALLEST_GROUP) else inputs


def notes(model: LanguageModel) -> list[str]:
    """Returns a line for each number of inputs that `GROUP` does not divide."""
    sizes = {linear.in_features for _, _, linear in _matrices(model)}
    lines = []
    for inputs in sorted(size for size in sizes if size > GROUP and size % GROUP):
        group = group_size(inputs)
        line = f"Groups of {group} of {inputs} inputs share a scale"
        if group == inputs:
            line = f"All {inputs} inputs share a scale, which rounds coarsely"
        lines.append(f"{line}, because {GROUP} does not divide {inputs}.")
    return lines


def quantize(model: LanguageModel, qtype: str, scale_dtype: Any = jnp.float32) -> None:
    """Quantizes the matrices of all layers and of an own head, in place.

    Args:
      model: A model without adapters.
      qtype: "int8" or "int4".
      scale_dtype: Of the scales. Products are computed in that of the model, so that
        only scales that are tuned need more.
    """
    for module, name, linear in list(_matrices(model)):
        setattr(module, name, QuantizedLinear(linear, qtype, scale_dtype))


def _matrices(model: LanguageModel) -> Iterator[tuple[nnx.Module, str, nnx.Linear]]:
    """Yields the matrices that can be quantized, with their owners and names."""
    for module in (model.layers, model):
        for name, child in nnx.iter_children(module):
            if isinstance(child, nnx.Linear):
                yield module, name, child
