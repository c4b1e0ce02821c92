"""The OPT language models in Flax NNX, for forward passes.

model = OPT(Config(), rngs=nnx.Rngs(0))
logits = model(tokens)
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from radazo_llm.models.attention import Cache, apart, attend
from radazo_llm.models.model import INIT, LanguageModel, check_sizes, kinds, stacked

# The first rows of OPT's table of positions are not used.
POSITION_OFFSET = 2
# What `config.json` says of every OPT model but opt-350m.
FIXED = {
    "model_type": "opt",
    "activation_function": "relu",
    "tie_word_embeddings": True,
    "do_layer_norm_before": True,
    "_remove_final_layer_norm": False,
    "enable_bias": True,
    "layer_norm_elementwise_affine": True,
}


@dataclasses.dataclass(frozen=True)
class Config:
    """The sizes of a model; names and defaults are as in its `config.json`."""

    vocab_size: int = 50272
    hidden_size: int = 768
    num_hidden_layers: int = 12
    ffn_dim: int = 3072
    num_attention_heads: int = 12
    max_position_embeddings: int = 2048

    def __post_init__(self) -> None:
        check_sizes(dataclasses.asdict(self))
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"num_attention_heads must divide hidden_size ({self.hidden_size}); "
                f"got {self.num_attention_heads}."
            )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Config":
        """The configuration in a `config.json`; entries of other models are ignored.

        Raises:
          ValueError: If it is of another architecture, or a value is not possible.
        """
        values = {"model_type": None} | dict(values)
        width = values.get("hidden_size", cls.hidden_size)
        for name, expected in (FIXED | {"word_embed_proj_dim": width}).items():
            if values.get(name, expected) != expected:
                raise ValueError(
                    f"{name} must be {expected!r}; got {values[name]!r:.80}."
                )
        names = {field.name for field in dataclasses.fields(cls)}
        return cls(**{k: v for k, v in values.items() if k in names})

    def to_dict(self) -> dict[str, Any]:
        """The entries of the model's `config.json`."""
        head = {"architectures": ["OPTForCausalLM"]} | FIXED
        return head | dataclasses.asdict(self)

    def build(self, **kwargs: Any) -> "OPT":
        """A model of these sizes."""
        return OPT(self, **kwargs)


class LayerNorm(nnx.LayerNorm):
    """Flax's, computed in float32 whatever the dtype of parameters and inputs."""

    def __init__(self, config: Config, dtype: Any, rngs: nnx.Rngs) -> None:
        super().__init__(
            config.hidden_size,
            epsilon=1e-5,
            dtype=jnp.float32,
            param_dtype=dtype,
            use_fast_variance=False,
            rngs=rngs,
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        return super().__call__(x).astype(x.dtype)


class Layer(nnx.Module):
    """Self-attention and a feed-forward network, each with a residual connection."""

    def __init__(self, config: Config, dtype: Any, rngs: nnx.Rngs) -> None:
        width = config.hidden_size
        linear = functools.partial(nnx.Linear, kernel_init=INIT, **kinds(dtype, rngs))
        self.num_heads = config.num_attention_heads
        self.self_attn_layer_norm = LayerNorm(config, dtype, rngs)
        self.q_proj = linear(width, width)
        self.k_proj = linear(width, width)
        self.v_proj = linear(width, width)
        self.out_proj = linear(width, width)
        self.final_layer_norm = LayerNorm(config, dtype, rngs)
        self.fc1 = linear(width, config.ffn_dim)
        self.fc2 = linear(config.ffn_dim, width)

    def __call__(
        self,
        x: jax.Array,
        positions: jax.Array,
        cache: Cache | None,
        number: jax.Array,
    ) -> tuple[jax.Array, Cache | None]:
        y = self.self_attn_layer_norm(x)
        width = x.shape[-1] // self.num_heads
        q, k, v = (f(y) for f in (self.q_proj, self.k_proj, self.v_proj))
        if cache is not None:
            q, k, v = apart(q, k, v)
        q, k, v = (h.reshape(*x.shape[:-1], -1, width) for h in (q, k, v))
        y, cache = attend(q, k, v, positions, cache, number, scale=width**-0.5)
        x = x + self.out_proj(y)
        x = x + self.fc2(jax.nn.relu(self.fc1(self.final_layer_norm(x))))
        return x, cache


class OPT(LanguageModel):
    """A decoder with tied embeddings and a table of positions."""

    PREFIX = "model.decoder"
    PARENTS: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("q_proj", "k_proj", "v_proj", "out_proj"), "self_attn"
    )

    def __init__(
        self,
        config: Config,
        *,
        dtype: Any = jnp.bfloat16,
        remat: bool = False,
        rngs: nnx.Rngs,
    ) -> None:
        super().__init__(config, dtype, remat, rngs)
        self.embed_positions = nnx.Embed(
            config.max_position_embeddings + POSITION_OFFSET,
            config.hidden_size,
            embedding_init=INIT,
            **kinds(dtype, rngs),
        )
        self.layers = stacked(
            config.num_hidden_layers, lambda rngs: Layer(config, dtype, rngs), rngs
        )
        self.final_layer_norm = LayerNorm(config, dtype, rngs)

    @property
    def cache_shape(self) -> tuple[int, int, int]:
        heads, width = self.config.num_attention_heads, self.config.hidden_size
        return self.config.num_hidden_layers, heads, width // heads

    def at_positions(self, x: jax.Array, positions: jax.Array) -> jax.Array:
        positions = positions.reshape(-1, positions.shape[-1])  # Of all rows, or each.
        return x + self.embed_positions(positions + POSITION_OFFSET)

    def normalized(self, x: jax.Array) -> jax.Array:
        return self.final_layer_norm(x)
