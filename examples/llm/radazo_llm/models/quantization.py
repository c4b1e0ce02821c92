"""Frozen matrices in 8 or 4 bits, by Qwix or as a GGUF file has them.

No gradient goes through rounding. Forward passes tune adapters next
to the matrices (as QLoRA does) or their scales (as QZO does).
"""

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from radazo_llm.formats.gguf_file import BLOCK_SIZE, Blocks
from radazo_llm.models.model import LanguageModel

GROUP = 128  # At most this many inputs share a scale.
_SMALLEST_GROUP = 16  # The scales of smaller ones take as much memory as the integers.


class Quantized(nnx.Variable):
    """The integers of a matrix."""


class QuantizationScale(nnx.Variable):
    """Their scales. No `nnx.Param`, so that they can be tuned alone."""


class QuantizationMinimum(nnx.Variable):
    """The numbers that are added to the products."""


class QuantizedLinear(nnx.Module):
    """A linear layer, or a stack of them, whose matrix is an array of Qwix."""

    def __init__(self, base: nnx.Linear, qvalue: Any, scale: Any) -> None:
        self.in_features, self.out_features = base.in_features, base.out_features
        self.preferred_element_type = base.preferred_element_type
        self.qvalue = Quantized(qvalue)
        self.scale = QuantizationScale(scale)
        self.bias = base.bias

    def stored(self) -> tuple[Any, ...]:
        """Returns the arrays of which `dequantized` makes the matrix."""
        return self.qvalue[...], self.scale[...]

    def dequantized(self, dtype: Any, steps: Any, scale: Any) -> jax.Array:
        import qwix  # Here, since it takes seconds, and few runs need it.

        return qwix.dequantize(qwix.QArray(steps, scale.astype(dtype)))

    def __call__(self, x: jax.Array) -> jax.Array:
        # In a loop over evaluations, XLA would compute before the loop, and keep, what
        # is made of the matrix alone.
        *stored, x = jax.lax.optimization_barrier((*self.stored(), x))
        matrix = self.dequantized(x.dtype, *stored)
        kind = self.preferred_element_type or x.dtype
        # Later operations must not choose the layout of the matrix: XLA's TPU backend
        # would copy the stack of them, transposed, and keep both.
        y = jax.lax.optimization_barrier(
            jnp.dot(x, matrix, preferred_element_type=kind)
        )
        if self.bias is None:
            return y
        return y + self.bias[...].reshape((1,) * (y.ndim - 1) + (-1,))


class BlockLinear(QuantizedLinear):
    """A linear layer, or a stack of them, whose matrix is in the blocks of a file.

    The matrix is computed in float32, and so is the one that dequantizing the file
    gives, rounded to the dtype of the inputs.

    Args:
      base: The layer that has the sizes and the bias.
      layers: Rows [outputs, inputs] of the matrix of each layer.
      kinds: Their kinds in the file. All must be in `TOGETHER` of one of them.
      stacked: Whether the layers are a stack. If not, there is one.
    """

    def __init__(
        self,
        base: nnx.Linear,
        layers: Iterator[Blocks],
        kinds: Sequence[str],
        stacked: bool,
    ) -> None:
        dtype, offset = _STEPS[max(kinds)], max(kinds) == "Q4_1"
        inputs, outputs = base.in_features, base.out_features
        groups = inputs // BLOCK_SIZE
        steps = np.empty((len(kinds), inputs, outputs), dtype)
        scale = np.empty((len(kinds), groups, outputs), np.float16)
        minimum = np.empty_like(scale) if offset else None
        for i, blocks in enumerate(layers):
            lowest, found = blocks.minimum, blocks.steps
            if offset and lowest is None:  # Q4_0 in a stack of Q4_1.
                lowest, found = -8 * blocks.scale, found + np.int8(8)
            steps[i], scale[i] = found.T, blocks.scale.T
            if minimum is not None:
                minimum[i] = lowest.T
        arrays = steps, scale, minimum
        if not stacked:
            arrays = tuple(None if array is None else array[0] for array in arrays)
        steps, scale, minimum = jax.tree.map(jnp.asarray, arrays)
        super().__init__(base, steps, scale)
        self.minimum = nnx.data(
            None if minimum is None else QuantizationMinimum(minimum)
        )

    def stored(self) -> tuple[Any, ...]:
        return *super().stored(), None if self.minimum is None else self.minimum[...]

    def dequantized(
        self, dtype: Any, steps: Any, scale: Any, minimum: Any = None
    ) -> jax.Array:
        blocks = steps.astype(jnp.float32).reshape(-1, BLOCK_SIZE, steps.shape[-1])
        blocks = blocks * scale.astype(jnp.float32)[:, None]
        if minimum is not None:
            blocks = blocks + minimum.astype(jnp.float32)[:, None]
        return blocks.reshape(steps.shape).astype(dtype)


_STEPS = {"Q4_0": jnp.int4, "Q4_1": jnp.uint4, "Q8_0": jnp.int8}
# Kinds of blocks that one stack can have.
TOGETHER = ({"Q4_0", "Q4_1"}, {"Q8_0"})


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
      scale_dtype: The dtype of the scales. Products have the model's dtype, so that
        only scales that are tuned need more.
    """
    for module, name, linear in list(_matrices(model)):
        setattr(module, name, _quantized(linear, qtype, scale_dtype))


def _quantized(linear: nnx.Linear, qtype: str, scale_dtype: Any) -> QuantizedLinear:
    import qwix

    kernel = linear.kernel[...]
    quantize = functools.partial(
        qwix.quantize,
        qtype=jnp.dtype(qtype),
        channelwise_axes=[1],
        tiled_axes={0: group_size(linear.in_features)},
    )
    # Layer by layer, since what lies between is float32.
    one = jax.jit(lambda matrix: quantize(matrix.astype(jnp.float32)))
    found = jax.lax.map(one, kernel) if kernel.ndim == 3 else one(kernel)
    return QuantizedLinear(linear, found.qvalue, found.scale.astype(scale_dtype))


def blocks_notes(model: LanguageModel) -> list[str]:
    """Returns a line if a file's blocks could not be kept for all matrices.

    Raises:
      ValueError: If none is kept.
    """
    dense = sorted({name for _, name, _ in _matrices(model)})
    if not any(isinstance(m, BlockLinear) for _, m in nnx.iter_modules(model)):
        raise ValueError(
            "--quantize file must be given with a GGUF file that has matrices in "
            f"{', '.join(_STEPS)}; got none."
        )
    if not dense:
        return []
    known = ", ".join(_STEPS)
    return [f"Dequantized, because not all layers have {known}: {', '.join(dense)}."]


def widen_scales(model: LanguageModel) -> None:
    """Makes the scales float32, in place, so that they can be tuned."""
    for _, module in nnx.iter_modules(model):
        if isinstance(module, QuantizedLinear):
            module.scale[...] = module.scale[...].astype(jnp.float32)


def _matrices(model: LanguageModel) -> Iterator[tuple[nnx.Module, str, nnx.Linear]]:
    """Yields the matrices that can be quantized, with their owners and names."""
    for module in (model.layers, model):
        for name, child in nnx.iter_children(module):
            if isinstance(child, nnx.Linear):
                yield module, name, child
