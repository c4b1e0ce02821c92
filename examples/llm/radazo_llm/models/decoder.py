"""The decoders of Llama, Mistral, Qwen, Gemma, Phi-3, Granite, OLMo-2 and SmolLM3.

    config = Config.from_dict(json.load(open("config.json")))
    model = Decoder(config, rngs=nnx.Rngs(0))
    logits = model(tokens)

All have norms by the root mean square, rotary positions, attention whose heads may
share keys and values, and a gated feed-forward network. `families.FAMILIES` is a table
of what differs.
"""

import functools
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from radazo_llm.models import families, rotary
from radazo_llm.models.attention import Cache, apart, attend
from radazo_llm.models.families import ACTIVATIONS
from radazo_llm.models.model import INIT, LanguageModel, kinds, stacked


class Config(families.Config):
    """The sizes of a model and how its family computes."""

    def build(self, **kwargs: Any) -> "Decoder":
        """A model of these sizes."""
        return Decoder(self, **kwargs)


class RMSNorm(nnx.Module):
    """Computed in float32 whatever the dtype of parameters and inputs."""

    def __init__(self, config: Config, size: int, dtype: Any) -> None:
        self.epsilon, self.offset = config.rms_norm_eps, float(config.gemma)
        self.scale = nnx.Param(jnp.full((size,), 1 - self.offset, dtype))

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        mean = jnp.mean(wide**2, axis=-1, keepdims=True)
        scale = self.offset + self.scale[...].astype(jnp.float32)
        scale = scale.reshape((1,) * (x.ndim - 1) + scale.shape)
        return (wide * jax.lax.rsqrt(mean + self.epsilon) * scale).astype(x.dtype)


class Layer(nnx.Module):
    """Self-attention and a feed-forward network, each with a residual connection."""

    def __init__(self, config: Config, dtype: Any, rngs: nnx.Rngs) -> None:
        self.config = config
        width, inner = config.hidden_size, config.intermediate_size
        head = config.head_dim
        queries, keys = config.num_attention_heads, config.num_key_value_heads
        shapes = {
            "q_proj": (width, queries * head),
            "k_proj": (width, keys * head),
            "v_proj": (width, keys * head),
            "o_proj": (queries * head, width),
            "gate_proj": (width, inner),
            "up_proj": (width, inner),
            "down_proj": (inner, width),
        }
        if config.fused:
            shapes = {
                "qkv_proj": (width, (queries + 2 * keys) * head),
                "o_proj": (queries * head, width),
                "gate_up_proj": (width, 2 * inner),
                "down_proj": (inner, width),
            }
        for name, shape in shapes.items():
            bias = name in config.biased
            linear = functools.partial(nnx.Linear, use_bias=bias, kernel_init=INIT)
            setattr(self, name, linear(*shape, **kinds(dtype, rngs)))
        norm = functools.partial(RMSNorm, config, dtype=dtype)
        if config.norms_before:
            self.input_layernorm = norm(width)
        self.post_attention_layernorm = norm(width)
        if config.norms_after:
            if config.norms_before:
                self.pre_feedforward_layernorm = norm(width)
            self.post_feedforward_layernorm = norm(width)
        if config.query_norm:
            # Of each head, or of all of them.
            wide = config.query_norm == "all"
            self.q_norm = norm(queries * head if wide else head)
            self.k_norm = norm(keys * head if wide else head)

    def __call__(
        self,
        x: jax.Array,
        positions: jax.Array,
        cache: Cache | None,
        number: jax.Array,
        turns: jax.Array,
        window: jax.Array,
    ) -> tuple[jax.Array, Cache | None]:
        before, scale = self.config.norms_before, self.config.residual_scale
        y = self.input_layernorm(x) if before else x
        y, cache = self._attention(y, positions, cache, number, turns, window)
        # With norms after each part, this norm stands after the attention, otherwise
        # before the feed-forward network.
        if not self.config.norms_after:
            x = x + scale * y
            y = self._feed_forward(self.post_attention_layernorm(x))
            return x + scale * y, cache
        x = x + self.post_attention_layernorm(y)
        y = self._feed_forward(self.pre_feedforward_layernorm(x) if before else x)
        return x + self.post_feedforward_layernorm(y), cache

    def _attention(
        self,
        x: jax.Array,
        positions: jax.Array,
        cache: Cache | None,
        number: jax.Array,
        turns: jax.Array,
        window: jax.Array,
    ) -> tuple[jax.Array, Cache | None]:
        config, heads = self.config, (*x.shape[:-1], -1, self.config.head_dim)
        q, k, v = self._projected(x)
        if cache is not None:
            q, k, v = apart(q, k, v)
        if config.query_norm == "all":
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (h.reshape(heads) for h in (q, k, v))
        if config.query_norm == "heads":
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = (rotary.rotated(h, positions, turns) for h in (q, k))
        mixed, cache = attend(
            q,
            k,
            v,
            positions,
            cache,
            number,
            scale=config.attention_scale,
            window=window,
            cap=config.attention_cap,
        )
        return self.o_proj(mixed), cache

    def _projected(self, x: jax.Array) -> list[jax.Array]:
        """Queries, keys and values, heads side by side."""
        if not self.config.fused:
            return [f(x) for f in (self.q_proj, self.k_proj, self.v_proj)]
        queries = self.config.num_attention_heads * self.config.head_dim
        keys = self.config.num_key_value_heads * self.config.head_dim
        return jnp.split(self.qkv_proj(x), [queries, queries + keys], axis=-1)

    def _feed_forward(self, x: jax.Array) -> jax.Array:
        if self.config.fused:
            gate, up = jnp.split(self.gate_up_proj(x), 2, axis=-1)
        else:
            gate, up = self.gate_proj(x), self.up_proj(x)
        return self.down_proj(ACTIVATIONS[self.config.activation](gate) * up)


class Decoder(LanguageModel):
    """A decoder of the families above, with tied embeddings or a head of its own."""

    PREFIX = "model"
    PARENTS: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj", "q_norm", "k_norm"),
        "self_attn",
    ) | dict.fromkeys(("gate_proj", "up_proj", "gate_up_proj", "down_proj"), "mlp")

    def __init__(
        self,
        config: Config,
        *,
        dtype: Any = jnp.bfloat16,
        remat: bool = False,
        rngs: nnx.Rngs,
    ) -> None:
        super().__init__(config, dtype, remat, rngs)
        self.layers = stacked(
            config.num_hidden_layers, lambda rngs: Layer(config, dtype, rngs), rngs
        )
        self.norm = RMSNorm(config, config.hidden_size, dtype)
        if not config.tie_word_embeddings:
            self.lm_head = nnx.Linear(
                config.hidden_size,
                config.vocab_size,
                use_bias=False,
                kernel_init=INIT,
                preferred_element_type=jnp.float32,
                **kinds(dtype, rngs),
            )

    @property
    def cache_shape(self) -> tuple[int, int, int]:
        config = self.config
        return config.num_hidden_layers, config.num_key_value_heads, config.head_dim

    def embed(self, tokens: jax.Array) -> jax.Array:
        x = super().embed(tokens)
        return x * jnp.asarray(self.config.embedding_scale, x.dtype)

    def of_layers(self) -> tuple[Any, ...]:
        longest = self.config.max_position_embeddings
        windows = [window or longest for window in self.config.windows]
        turns = rotary.frequencies(self.config.rope, self.config.head_dim)
        return turns, np.array(windows, np.int32)

    def normalized(self, x: jax.Array) -> jax.Array:
        return self.norm(x)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """The logits of hidden states [..., width], float32 [..., vocab]."""
        tied = self.config.tie_word_embeddings
        return self._capped(super().logits(hidden) if tied else self.lm_head(hidden))

    def logits_of(self, hidden: jax.Array, tokens: jax.Array) -> jax.Array:
        """The logits of some tokens int32 [B, C], for states [B, width]."""
        if self.config.tie_word_embeddings:
            return self._capped(super().logits_of(hidden, tokens))
        return jnp.take_along_axis(self.logits(hidden), tokens, axis=1)

    def _capped(self, logits: jax.Array) -> jax.Array:
        cap, logits = self.config.logits_cap, logits * self.config.logits_scale
        return logits if cap is None else cap * jnp.tanh(logits / cap)
