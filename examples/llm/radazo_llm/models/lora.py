"""The tuned part of a model: all of it, or low-rank adapters."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from radazo_llm.models.model import LanguageModel, stacked
from radazo_llm.models.quantization import BlockLinear

# What is tuned, as the `wrt` of nnx. An adapter's parameters are `nnx.Param` too:
# "full" is for a model without adapters.
FILTERS = {"lora": nnx.LoRAParam, "full": nnx.Param}
ADAPTED = ("q_proj", "v_proj")  # The projections that get adapters by default.


class AdaptedLinear(nnx.Module):
    """A linear layer plus `scale` times a product of two low-rank matrices."""

    def __init__(self, base: nnx.Linear, lora: nnx.LoRA, scale: float) -> None:
        self.base, self.lora, self.scale = base, lora, scale

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.base(x)
        return (y.astype(jnp.float32) + self.scale * self.lora(x)).astype(y.dtype)


def add_lora(
    model: LanguageModel,
    *,
    rank: int = 8,
    alpha: float = 16.0,
    targets: Sequence[str] = ADAPTED,
    rngs: nnx.Rngs,
) -> None:
    """Adds adapters to projections of every layer, in place.

    Each is x ↦ α/r · (x A) B with A [layers, in, r] random and B [layers, r, out] zero,
    both float32, so nothing changes at first.

    Args:
      model: A model without adapters.
      rank: r.
      alpha: α.
      targets: Names of the projections.
      rngs: Source of the random A.

    Raises:
      ValueError: If rank is not positive, a target is no projection of the model, or
        the model has adapters already.
    """
    if adapted(model):
        raise ValueError("model must not have adapters already; got one that has.")
    known = projections(model)
    for name in targets:
        if name not in known or len(set(targets)) < len(targets):
            raise ValueError(
                f"--lora-targets must be different ones of {', '.join(known)}; got "
                f"{', '.join(map(str, targets)):.80}."
            )
    check_rank(model, rank, targets)
    for name in targets:
        base = getattr(model.layers, name)
        adapter = functools.partial(_adapter, base.in_features, rank, base.out_features)
        lora = stacked(model.config.num_hidden_layers, adapter, rngs)
        setattr(model.layers, name, AdaptedLinear(base, lora, alpha / rank))


def check_rank(
    model: LanguageModel, rank: int, targets: Sequence[str], name: str = "--lora-rank"
) -> None:
    """Raises a ValueError unless a rank is one that matrices can have."""
    for target in targets:
        base = getattr(model.layers, target)
        width = min(base.in_features, base.out_features)
        if not 0 < rank <= width:
            raise ValueError(
                f"{name} must be from 1 to {width}, the width of {target}; got {rank}."
            )


def projections(model: LanguageModel) -> list[str]:
    """Returns the names of the linear layers that a layer of the model has."""
    linear = nnx.Linear, BlockLinear, AdaptedLinear
    children = nnx.iter_children(model.layers)
    return [name for name, child in children if isinstance(child, linear)]


def adapted(model: LanguageModel) -> list[str]:
    """Returns the names of the projections that have adapters."""
    return [
        name
        for name in projections(model)
        if isinstance(getattr(model.layers, name), AdaptedLinear)
    ]


def adapted_layers(model: LanguageModel) -> list[int]:
    """Returns which of a model's layers have adapters that are not all zero."""
    found = [getattr(model.layers, name).lora.lora_a[...] for name in adapted(model)]
    used = jnp.any(jnp.stack([jnp.any(a != 0, axis=(1, 2)) for a in found]), axis=0)
    return [int(i) for i in jnp.flatnonzero(used)]


def sizes(model: LanguageModel) -> tuple[int, float]:
    """Returns the rank and α of a model's adapters."""
    adapter = getattr(model.layers, adapted(model)[0])
    rank = adapter.lora.lora_a.shape[-1]
    return rank, adapter.scale * rank


def _adapter(inputs: int, rank: int, outputs: int, rngs: nnx.Rngs) -> nnx.LoRA:
    # A as in Hu et al.'s code: uniform in ±1/√width.
    uniform = nnx.initializers.variance_scaling(1 / 3, "fan_in", "uniform")
    return nnx.LoRA(
        inputs, rank, outputs, dtype=jnp.float32, a_initializer=uniform, rngs=rngs
    )


def merge(model: LanguageModel) -> LanguageModel:
    """Adds the adapters' products to the matrices, in place, and removes them.

    The sums are rounded to the dtype of the matrices.
    """
    for name in adapted(model):
        layer = getattr(model.layers, name)
        a, b = layer.lora.lora_a[...], layer.lora.lora_b[...]
        product = jnp.einsum("lir,lro->lio", a, b, precision="highest")
        kernel = layer.base.kernel
        merged = kernel[...].astype(jnp.float32) + layer.scale * product
        kernel[...] = merged.astype(kernel.dtype)
        setattr(model.layers, name, layer.base)
    return model
