"""Frozen matrices in few bits, as a GGUF file has them.

No gradient goes through rounding. Forward passes tune adapters next to the matrices.
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


class Quantized(nnx.Variable):
    """The integers of a matrix."""


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

    def stored(self) -> Any:
        """Returns the bytes of the rows, and the kind."""
        return self.data[...], None if self.kind is None else self.kind[...]

    def dequantized(self, rows: jax.Array, kind: jax.Array | None) -> jax.Array:
        """Returns the values of rows, float32 [rows, inputs]."""
        known = [
            functools.partial(blocks.dequantized, name, inputs=self.inputs)
            for name in self.kinds
        ]
        return known[0](rows) if kind is None else jax.lax.switch(kind, known, rows)

    def product(self, x: jax.Array, stored: Any, dtype: Any) -> jax.Array:
        rows, kind = stored
        dequantize = functools.partial(self.dequantized, kind=kind)
        return blocks.product(x, rows, dequantize, dtype)


class BlockLinear(nnx.Module):
    """Linear layers whose matrices are in the blocks of a file.

    They are computed in float32, and so are those that dequantizing the file gives,
    rounded to the dtype of the inputs.
    """

    def __init__(self, base: nnx.Linear, rows: Rows) -> None:
        self.in_features, self.out_features = base.in_features, base.out_features
        self.preferred_element_type = base.preferred_element_type
        self.bias, self.rows = base.bias, rows

    def __call__(self, x: jax.Array) -> jax.Array:
        # In a loop over evaluations, XLA would compute before the loop, and keep, what
        # is made of the matrix alone.
        stored, x = jax.lax.optimization_barrier((self.rows.stored(), x))
        # Later operations must not choose the layout of the matrix: XLA's TPU backend
        # would copy the stack of them, transposed, and keep both.
        dtype = self.preferred_element_type or x.dtype
        y = jax.lax.optimization_barrier(self.rows.product(x, stored, dtype))
        if self.bias is None:
            return y
        return y + self.bias[...].reshape((1,) * (y.ndim - 1) + (-1,))


class BlockEmbedding(nnx.Module):
    """Embeddings of tokens in the blocks of a file; see `model.Embedding`."""

    def __init__(self, base: Embedding, rows: Rows) -> None:
        self.dtype, self.rows = base.dtype, rows

    def __call__(self, tokens: jax.Array) -> jax.Array:
        rows, kind = self.rows.stored()
        picked = rows[tokens.reshape(-1)]
        found = self.rows.dequantized(picked, kind).astype(self.dtype)
        return found.reshape(*tokens.shape, -1)

    def logits(self, hidden: jax.Array) -> jax.Array:
        stored, hidden = jax.lax.optimization_barrier((self.rows.stored(), hidden))
        return self.rows.product(hidden, stored, jnp.float32)


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


def _matrices(model: LanguageModel) -> Iterator[tuple[nnx.Module, str, nnx.Linear]]:
    """Yields the matrices that are not in blocks, with their owners and names."""
    for module in (model.layers, model):
        for name, child in nnx.iter_children(module):
            if isinstance(child, nnx.Linear):
                yield module, name, child
