"""Frozen matrices in few bits, by Qwix or as a GGUF file has them.

No gradient goes through rounding. Forward passes tune adapters next
to the matrices (as QLoRA does) or their scales (as QZO does).
"""

import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from radazo_llm.models import blocks
from radazo_llm.models.model import Embedding, LanguageModel

GROUP = 128  # At most this many inputs share a scale.
_SMALLEST_GROUP = 16  # The scales of smaller ones take as much memory as the integers.


class Quantized(nnx.Variable):
    """The integers of a matrix."""


class QuantizationScale(nnx.Variable):
    """Their scales. No `nnx.Param`, so that they can be tuned alone."""


class QuantizedLinear(nnx.Module):
    """A linear layer, or a stack of them, whose matrix is dequantized at each use.

    A subclass has `stored` and `product`.
    """

    def __init__(self, base: nnx.Linear) -> None:
        self.in_features, self.out_features = base.in_features, base.out_features
        self.preferred_element_type = base.preferred_element_type
        self.bias = base.bias

    def stored(self) -> Any:
        """Returns the arrays of the matrix."""
        raise NotImplementedError

    def product(self, x: jax.Array, stored: Any, dtype: Any) -> jax.Array:
        """Returns the products of inputs and the matrix in a dtype."""
        raise NotImplementedError

    def __call__(self, x: jax.Array) -> jax.Array:
        # In a loop over evaluations, XLA would compute before the loop, and keep, what
        # is made of the matrix alone.
        stored, x = jax.lax.optimization_barrier((self.stored(), x))
        # Later operations must not choose the layout of the matrix: XLA's TPU backend
        # would copy the stack of them, transposed, and keep both.
        y = jax.lax.optimization_barrier(
            self.product(x, stored, self.preferred_element_type or x.dtype)
        )
        if self.bias is None:
            return y
        return y + self.bias[...].reshape((1,) * (y.ndim - 1) + (-1,))


class QwixLinear(QuantizedLinear):
    """Matrices that are arrays of Qwix."""

    def __init__(self, base: nnx.Linear, qvalue: Any, scale: Any) -> None:
        super().__init__(base)
        self.qvalue = Quantized(qvalue)
        self.scale = QuantizationScale(scale)

    def stored(self) -> Any:
        return self.qvalue[...], self.scale[...]

    def product(self, x: jax.Array, stored: Any, dtype: Any) -> jax.Array:
        import qwix  # Here, since it takes seconds, and few runs need it.

        steps, scale = stored
        matrix = qwix.dequantize(qwix.QArray(steps, scale.astype(x.dtype)))
        return jnp.dot(x, matrix, preferred_element_type=dtype)


class Rows(nnx.Module):
    """The rows of a matrix, or of a stack of them, in the blocks of a file.

    A stack may have several kinds of blocks. Each matrix then takes the bytes of the
    largest.

    Args:
      inputs: The number of values of a row.
      data: Rows of bytes, uint8 [outputs, bytes], with an axis of layers before if it
        is a stack.
      kinds: The kinds of the blocks of each layer.
    """

    def __init__(self, inputs: int, data: jax.Array, kinds: Sequence[str]) -> None:
        self.inputs, self.kinds = inputs, tuple(sorted(set(kinds)))
        self.data = Quantized(data)
        self.kind = nnx.data(None)
        if len(self.kinds) > 1:
            numbers = [self.kinds.index(kind) for kind in kinds]
            self.kind = Quantized(jnp.asarray(numbers, jnp.int32))
        # Float32, if they are tuned.
        self.scale: nnx.Variable | None = nnx.data(None)

    def stored(self) -> Any:
        """Returns the arrays of the rows, and the kind."""
        scale = None if self.scale is None else self.scale[...]
        return (self.data[...], scale), None if self.kind is None else self.kind[...]

    def dequantized(self, rows: Any, kind: jax.Array | None) -> jax.Array:
        """Returns the values of rows, float32 [rows, inputs]."""
        known = [
            functools.partial(blocks.dequantized, name, inputs=self.inputs)
            for name in self.kinds
        ]
        return known[0](*rows) if kind is None else jax.lax.switch(kind, known, *rows)

    def product(self, x: jax.Array, stored: Any, dtype: Any) -> jax.Array:
        rows, kind = stored
        dequantize = functools.partial(self.dequantized, kind=kind)
        return blocks.product(x, rows, dequantize, dtype)

    def widen(self) -> None:
        """Makes the scales parameters of their own, in place."""
        group = min(blocks.LAYOUTS[kind].group for kind in self.kinds)

        def scales(data: jax.Array, kind: jax.Array | None = None) -> jax.Array:
            known = [
                functools.partial(blocks.scales, name, inputs=self.inputs, group=group)
                for name in self.kinds
            ]
            return known[0](data) if kind is None else jax.lax.switch(kind, known, data)

        arguments = [v[...] for v in (self.data, self.kind) if v is not None]
        one = jax.vmap(scales) if arguments[0].ndim == 3 else scales
        self.scale = QuantizationScale(one(*arguments))


class BlockLinear(QuantizedLinear):
    """Matrices in the blocks of a file.

    They are computed in float32, and so are those that dequantizing the file gives,
    rounded to the dtype of the inputs.
    """

    def __init__(self, base: nnx.Linear, rows: Rows) -> None:
        super().__init__(base)
        self.rows = rows

    def stored(self) -> Any:
        return self.rows.stored()

    def product(self, x: jax.Array, stored: Any, dtype: Any) -> jax.Array:
        return self.rows.product(x, stored, dtype)


class BlockEmbedding(nnx.Module):
    """Embeddings of tokens in the blocks of a file; see `model.Embedding`."""

    def __init__(self, base: Embedding, rows: Rows) -> None:
        self.dtype, self.rows = base.dtype, rows

    def __call__(self, tokens: jax.Array) -> jax.Array:
        rows, kind = self.rows.stored()
        picked = jax.tree.map(lambda array: array[tokens.reshape(-1)], rows)
        found = self.rows.dequantized(picked, kind).astype(self.dtype)
        return found.reshape(*tokens.shape, -1)

    def logits(self, hidden: jax.Array) -> jax.Array:
        stored, hidden = jax.lax.optimization_barrier((self.rows.stored(), hidden))
        return self.rows.product(hidden, stored, jnp.float32)


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
    return QwixLinear(linear, found.qvalue, found.scale.astype(scale_dtype))


def blocks_notes(model: LanguageModel) -> list[str]:
    """Returns a line if a file's blocks could not be kept for all matrices.

    Raises:
      ValueError: If none is kept.
    """
    dense = sorted({name for _, name, _ in _matrices(model)})
    if not any(isinstance(m, Rows) for _, m in nnx.iter_modules(model)):
        raise ValueError(
            "--quantize file must be given with a GGUF file that has matrices in "
            f"{', '.join(blocks.LAYOUTS)}; got none."
        )
    if not dense:
        return []
    known = ", ".join(blocks.LAYOUTS)
    return [f"Dequantized, because not all layers have {known}: {', '.join(dense)}."]


def num_parameters(model: LanguageModel) -> int:
    """Returns the number of a model's parameters, of packed matrices too."""
    packed = [m for _, m in nnx.iter_modules(model) if isinstance(m, Rows)]
    number = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model)))
    for rows in packed:
        number -= sum(leaf.size for leaf in jax.tree.leaves(nnx.state(rows)))
        number += math.prod(rows.data.shape[:-1]) * rows.inputs
    return number


def widen_scales(model: LanguageModel) -> None:
    """Makes the scales float32, in place, so that they can be tuned."""
    for _, module in nnx.iter_modules(model):
        if isinstance(module, BlockLinear):
            module.rows.widen()


def _matrices(model: LanguageModel) -> Iterator[tuple[nnx.Module, str, nnx.Linear]]:
    """Yields the matrices that can be quantized, with their owners and names."""
    for module in (model.layers, model):
        for name, child in nnx.iter_children(module):
            if isinstance(child, nnx.Linear):
                yield module, name, child
