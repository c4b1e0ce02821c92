"""Llama, Qwen and Gemma in Flax NNX, for forward passes: one decoder, five choices.

    config = Config.from_dict(json.load(open("config.json")))
    model = Decoder(config, rngs=nnx.Rngs(0))
    logits = model(tokens)

All have norms by the root mean square, rotary positions, attention whose heads may
share keys and values, and a gated feed-forward network. They differ in biases, in
norms of queries and keys and after each part, in soft caps, and in how far a layer
sees.
"""

import dataclasses
import functools
import json
import math
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from radazo_llm.models import rotary
from radazo_llm.models.attention import Cache, apart, attend
from radazo_llm.models.model import (
    INIT,
    LanguageModel,
    check_sizes,
    kinds,
    one_of,
    positive,
    stacked,
)

# What `config.json` may leave out, by family: the defaults of transformers.
_COMMON = {
    "num_key_value_heads": None,  # As many as of queries.
    "head_dim": None,  # The width, divided among the heads of queries.
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "rope_scaling": None,
    "rope_parameters": None,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "layer_types": None,
    "sliding_window": None,
    "use_bidirectional_attention": None,
}
_QWEN = _COMMON | {"use_sliding_window": False, "max_window_layers": 28}
_GEMMA = _COMMON | {
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
}
_GEMMA_2 = _GEMMA | {
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": 50.0,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": _COMMON,
    "qwen2": _QWEN,
    "qwen3": _QWEN | {"head_dim": 128},
    "gemma": _GEMMA,
    "gemma2": _GEMMA_2,
    "gemma3_text": _GEMMA_2
    | {
        "final_logit_softcapping": None,
        "attn_logit_softcapping": None,
        "sliding_window_pattern": 6,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
    },
}
ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu_pytorch_tanh": functools.partial(jax.nn.gelu, approximate=True),
}
_SWITCHES = (
    "attention_bias",
    "mlp_bias",
    "tie_word_embeddings",
    "use_bidirectional_attention",
    "use_sliding_window",
)
_TABLES = "rope_parameters", "rope_scaling"
_MOST_LAYERS = 1 << 16  # A configuration has some numbers of each.


@dataclasses.dataclass(frozen=True)
class Config:
    """The sizes of a model and how its family computes.

    A name of an entry of `config.json` has the same meaning.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    activation: str
    tie_word_embeddings: bool
    biased: tuple[str, ...]  # The projections that have a bias.
    gemma: bool  # Embeddings times √width, and norms that scale by 1 + weight.
    query_norm: bool  # Queries and keys are normalized, head by head.
    norms_after: bool  # Attention and feed-forward network end in a norm, too.
    attention_scale: float
    attention_cap: float | None
    logits_cap: float | None
    windows: tuple[int | None, ...]  # Of each layer: how many positions a token sees.
    rope: tuple[tuple[float, ...], ...]  # Of each layer: θ, and a scaling's numbers.
    source: str  # The `config.json`.

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Config":
        """The configuration in a `config.json`; entries that do not matter are ignored.

        Raises:
          ValueError: If it is of another architecture, or a value is not possible.
        """
        family = one_of(FAMILIES, "model_type", values.get("model_type"))
        v = FAMILIES[family] | dict(values)
        gemma, later_gemma = family.startswith("gemma"), ["gemma2", "gemma3_text"]
        _check_kinds(v)
        if v["num_key_value_heads"] is None:
            v["num_key_value_heads"] = v["num_attention_heads"]
        sizes = {
            field.name: v.get(field.name)
            for field in dataclasses.fields(cls)
            if field.type in (int, "int") and field.name != "head_dim"
        }
        check_sizes(sizes)
        if sizes["num_hidden_layers"] > _MOST_LAYERS:
            raise ValueError(
                f"num_hidden_layers must be at most {_MOST_LAYERS}; got "
                f"{sizes['num_hidden_layers']}."
            )
        heads, head_dim = v["num_attention_heads"], v["head_dim"]
        if head_dim is None:
            head_dim = v["hidden_size"] // heads
        check_sizes({"head_dim": head_dim})
        check_sizes({"num_attention_heads × head_dim": heads * head_dim})
        if heads % v["num_key_value_heads"] or head_dim % 2:
            raise ValueError(
                "num_attention_heads must be a multiple of num_key_value_heads, and "
                f"head_dim even; got {heads}, {sizes['num_key_value_heads']} and "
                f"{head_dim}."
            )
        for name in ("mlp_bias", "use_bidirectional_attention"):
            if v[name]:
                raise ValueError(f"{name} must be False; got {v[name]!r:.80}.")
        activation = v["hidden_activation" if gemma else "hidden_act"]
        if activation is None:
            activation = "gelu_pytorch_tanh"
        one_of(ACTIVATIONS, "hidden_act", activation)
        bias = ("q_proj", "k_proj", "v_proj")
        bias = bias if family == "qwen2" else (*bias, "o_proj")
        slides = _sliding(v, family)
        scalar = _positive_or_none(v, "query_pre_attn_scalar") or head_dim
        return cls(
            **sizes,
            head_dim=head_dim,
            rms_norm_eps=positive(v, "rms_norm_eps"),
            activation=activation,
            tie_word_embeddings=bool(v["tie_word_embeddings"]),
            biased=bias if v["attention_bias"] or family == "qwen2" else (),
            gemma=gemma,
            query_norm=family in ("qwen3", "gemma3_text"),
            norms_after=family in later_gemma,
            attention_scale=scalar**-0.5,
            attention_cap=_positive_or_none(v, "attn_logit_softcapping"),
            logits_cap=_positive_or_none(v, "final_logit_softcapping"),
            windows=tuple(v["sliding_window"] if s else None for s in slides),
            rope=tuple(rotary.read(v, s) for s in slides),
            source=json.dumps(dict(values)),
        )

    def to_dict(self) -> dict[str, Any]:
        """The entries of the model's `config.json`."""
        return json.loads(self.source)

    def build(self, **kwargs: Any) -> "Decoder":
        """A model of these sizes."""
        return Decoder(self, **kwargs)


def _check_kinds(v: Mapping[str, Any]) -> None:
    """Raises a ValueError unless switches are true or false, and tables are tables."""
    for name in _SWITCHES:
        if not isinstance(v.get(name), bool | None):
            raise ValueError(f"{name} must be true or false; got {v[name]!r:.80}.")
    for name in _TABLES:
        if not isinstance(v[name], dict | None):
            raise ValueError(f"{name} must be an object; got {v[name]!r:.80}.")


def _positive_or_none(values: Mapping[str, Any], name: str) -> float | None:
    return None if values.get(name) is None else positive(values, name)


def _sliding(v: Mapping[str, Any], family: str) -> list[bool]:
    """Whether each layer sees no farther than the window."""
    number, types = v["num_hidden_layers"], v["layer_types"]
    if types is not None:
        known = "sliding_attention", "full_attention"
        listed = isinstance(types, list) and len(types) == number
        if not listed or any(kind not in known for kind in types):
            raise ValueError(
                f"layer_types must have {' or '.join(known)} for each of {number} "
                f"layers; got {types!r:.80}."
            )
        slides = [kind == known[0] for kind in types]
    elif family.startswith("qwen"):
        used, full = v["use_sliding_window"], v["max_window_layers"]
        if type(full) is not int:
            raise ValueError(f"max_window_layers must be an integer; got {full!r:.80}.")
        slides = [bool(used) and i >= full for i in range(number)]
    elif family in ("gemma2", "gemma3_text"):
        period = v.get("sliding_window_pattern", 2)
        check_sizes({"sliding_window_pattern": period})
        slides = [(i + 1) % period != 0 for i in range(number)]
    else:
        slides = [False] * number
    if any(slides):
        check_sizes({"sliding_window": v["sliding_window"]})
    return slides


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
        for name, shape in shapes.items():
            bias = name in config.biased
            linear = functools.partial(nnx.Linear, use_bias=bias, kernel_init=INIT)
            setattr(self, name, linear(*shape, **kinds(dtype, rngs)))
        norm = functools.partial(RMSNorm, config, dtype=dtype)
        self.input_layernorm = norm(width)
        self.post_attention_layernorm = norm(width)
        if config.norms_after:
            self.pre_feedforward_layernorm = norm(width)
            self.post_feedforward_layernorm = norm(width)
        if config.query_norm:
            self.q_norm, self.k_norm = norm(head), norm(head)

    def __call__(
        self,
        x: jax.Array,
        positions: jax.Array,
        cache: Cache | None,
        number: jax.Array,
        turns: jax.Array,
        window: jax.Array,
    ) -> tuple[jax.Array, Cache | None]:
        y = self.input_layernorm(x)
        y, cache = self._attention(y, positions, cache, number, turns, window)
        # In the later Gemmas this norm stands after the attention, elsewhere before
        # the feed-forward network.
        if not self.config.norms_after:
            x = x + y
            return x + self._feed_forward(self.post_attention_layernorm(x)), cache
        x = x + self.post_attention_layernorm(y)
        y = self._feed_forward(self.pre_feedforward_layernorm(x))
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
        q, k, v = (f(x) for f in (self.q_proj, self.k_proj, self.v_proj))
        if cache is not None:
            q, k, v = apart(q, k, v)
        q, k, v = (h.reshape(heads) for h in (q, k, v))
        if config.query_norm:
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

    def _feed_forward(self, x: jax.Array) -> jax.Array:
        gate = ACTIVATIONS[self.config.activation](self.gate_proj(x))
        return self.down_proj(gate * self.up_proj(x))


class Decoder(LanguageModel):
    """A decoder of the families above, with tied embeddings or a head of its own."""

    PREFIX = "model"
    PARENTS: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"), "self_attn"
    ) | dict.fromkeys(("gate_proj", "up_proj", "down_proj"), "mlp")

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
        scale = math.sqrt(self.config.hidden_size) if self.config.gemma else 1.0
        return x * jnp.asarray(scale, x.dtype)

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
        cap = self.config.logits_cap
        return logits if cap is None else cap * jnp.tanh(logits / cap)
