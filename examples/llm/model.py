"""The OPT language models in Flax NNX, for forward passes.

The layers are one stack of parameters that a scan runs over, so that a perturbed
evaluation (`radazo_jax.perturb`) builds no more than a layer at a time.

    model = OPT(CONFIGS["facebook/opt-125m"], rngs=nnx.Rngs(0))
    logits = model(tokens)
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

T = TypeVar("T", bound=nnx.Module)
INIT = nnx.initializers.normal(0.02)

# The first rows of OPT's table of positions are not used.
POSITION_OFFSET = 2
# What `config.json` says of every OPT model.
FIXED = {
    "model_type": "opt",
    "activation_function": "relu",
    "tie_word_embeddings": True,
}


@dataclasses.dataclass(frozen=True)
class Config:
    """The sizes of a model; the names and defaults are those of its `config.json`."""

    vocab_size: int = 50272
    hidden_size: int = 768
    num_hidden_layers: int = 12
    ffn_dim: int = 3072
    num_attention_heads: int = 12
    max_position_embeddings: int = 2048
    word_embed_proj_dim: int | None = None  # None: as wide as the hidden states.
    do_layer_norm_before: bool = True
    _remove_final_layer_norm: bool = False
    enable_bias: bool = True
    layer_norm_elementwise_affine: bool = True

    def __post_init__(self) -> None:
        if self.word_embed_proj_dim is None:
            object.__setattr__(self, "word_embed_proj_dim", self.hidden_size)
        for field in dataclasses.fields(self):
            name, value = field.name, getattr(self, field.name)
            kind = bool if isinstance(field.default, bool) else int
            if type(value) is not kind or (kind is int and value < 1):
                expected = "true or false" if kind is bool else "a positive integer"
                raise ValueError(f"{name} must be {expected}; got {value!r}.")
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"num_attention_heads must divide hidden_size ({self.hidden_size}); "
                f"got {self.num_attention_heads}."
            )

    @property
    def projects(self) -> bool:
        """Whether the embeddings have another width than the hidden states."""
        return self.word_embed_proj_dim != self.hidden_size

    @property
    def has_final_layer_norm(self) -> bool:
        return self.do_layer_norm_before and not self._remove_final_layer_norm

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Config":
        """The configuration in a `config.json`; entries of other models are ignored.

        Raises:
          ValueError: If it is of another architecture, or a value is not possible.
        """
        values = FIXED | {"model_type": None} | dict(values)
        for name, expected in FIXED.items():
            if values[name] != expected:
                raise ValueError(f"{name} must be {expected!r}; got {values[name]!r}.")
        names = {field.name for field in dataclasses.fields(cls)}
        return cls(**{k: v for k, v in values.items() if k in names})

    def to_dict(self) -> dict[str, Any]:
        """The entries of the model's `config.json`."""
        head = {"architectures": ["OPTForCausalLM"]} | FIXED
        return head | dataclasses.asdict(self)


CONFIGS = {
    f"facebook/opt-{name}": Config(
        hidden_size=width,
        ffn_dim=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        word_embed_proj_dim=512 if name == "350m" else None,
        do_layer_norm_before=name != "350m",
    )
    for name, width, layers, heads in (
        ("125m", 768, 12, 12),
        ("350m", 1024, 24, 16),
        ("1.3b", 2048, 24, 32),
        ("2.7b", 2560, 32, 32),
        ("6.7b", 4096, 32, 32),
        ("13b", 5120, 40, 40),
        ("30b", 7168, 48, 56),
    )
}


class LayerNorm(nnx.LayerNorm):
    """Flax's, computed in float32 whatever the dtype of parameters and inputs."""

    def __init__(self, config: Config, dtype: Any, rngs: nnx.Rngs) -> None:
        affine = config.layer_norm_elementwise_affine
        super().__init__(
            config.hidden_size,
            epsilon=1e-5,
            dtype=jnp.float32,
            param_dtype=dtype,
            use_bias=affine,
            use_scale=affine,
            use_fast_variance=False,
            rngs=rngs,
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        return super().__call__(x).astype(x.dtype)


class Layer(nnx.Module):
    """Self-attention and a feed-forward network, each with a residual connection."""

    def __init__(self, config: Config, dtype: Any, rngs: nnx.Rngs) -> None:
        linear = functools.partial(
            nnx.Linear,
            use_bias=config.enable_bias,
            kernel_init=INIT,
            **_kinds(dtype, rngs),
        )
        width = config.hidden_size
        self.norm_first = config.do_layer_norm_before
        self.num_heads = config.num_attention_heads
        self.self_attn_layer_norm = LayerNorm(config, dtype, rngs)
        self.q_proj = linear(width, width)
        self.k_proj = linear(width, width)
        self.v_proj = linear(width, width)
        self.out_proj = linear(width, width)
        self.final_layer_norm = LayerNorm(config, dtype, rngs)
        self.fc1 = linear(width, config.ffn_dim)
        self.fc2 = linear(config.ffn_dim, width)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self._residual(self._attention, self.self_attn_layer_norm, x)
        return self._residual(self._feed_forward, self.final_layer_norm, x)

    def _residual(
        self, block: Callable[[jax.Array], jax.Array], norm: LayerNorm, x: jax.Array
    ) -> jax.Array:
        return x + block(norm(x)) if self.norm_first else norm(x + block(x))

    def _attention(self, x: jax.Array) -> jax.Array:
        heads = (*x.shape[:-1], self.num_heads, x.shape[-1] // self.num_heads)
        q, k, v = (f(x).reshape(heads) for f in (self.q_proj, self.k_proj, self.v_proj))
        with jax.numpy_dtype_promotion("standard"):  # Its softmax is in float32.
            mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        return self.out_proj(mixed.reshape(x.shape))

    def _feed_forward(self, x: jax.Array) -> jax.Array:
        return self.fc2(jax.nn.relu(self.fc1(x)))


class OPT(nnx.Module):
    """A decoder with tied embeddings.

    Sequences are padded on the right: attention is causal, so that no mask is needed.

    Args:
      config: The sizes.
      dtype: Of parameters and activations. The softmax of the attention, layer norms
        and logits are float32.
      remat: Whether a gradient by backpropagation computes each layer anew, rather
        than keeping what is inside it.
      rngs: Where the random parameters come from.
    """

    def __init__(
        self,
        config: Config,
        *,
        dtype: Any = jnp.bfloat16,
        remat: bool = False,
        rngs: nnx.Rngs,
    ) -> None:
        width, embedded = config.hidden_size, config.word_embed_proj_dim
        self.config, self.dtype, self.remat = config, dtype, remat
        kinds, longest = _kinds(dtype, rngs), config.max_position_embeddings
        embedding = functools.partial(nnx.Embed, embedding_init=INIT, **kinds)
        self.embed_tokens = embedding(config.vocab_size, embedded)
        self.embed_positions = embedding(longest + POSITION_OFFSET, width)
        if config.projects:
            linear = functools.partial(
                nnx.Linear, use_bias=False, kernel_init=INIT, **kinds
            )
            self.project_in = linear(embedded, width)
            self.project_out = linear(width, embedded)
        self.layers = stacked(
            config.num_hidden_layers, lambda rngs: Layer(config, dtype, rngs), rngs
        )
        if config.has_final_layer_norm:
            self.final_layer_norm = LayerNorm(config, dtype, rngs)
        # Embeddings put before those of the tokens, [P, embedded]; see lora.py.
        self.prompt: nnx.Variable | None = nnx.data(None)

    def hidden(self, tokens: jax.Array) -> jax.Array:
        """The final hidden states of tokens int32 [B, T], [B, T, embedded].

        Raises:
          ValueError: If T is more than the model has positions.
        """
        x = self.embed_tokens(tokens)
        if self.prompt is not None:
            prompt = self.prompt[...].astype(x.dtype)
            prompt = jnp.broadcast_to(prompt[None], (len(x), *prompt.shape))
            x = jnp.concatenate([prompt, x], axis=1)
        if self.config.projects:
            x = self.project_in(x)
        x = self._run_layers(x + self._positions(x.shape[1])[None])
        x = x[:, x.shape[1] - tokens.shape[1] :]
        if self.config.has_final_layer_norm:
            x = self.final_layer_norm(x)
        return self.project_out(x) if self.config.projects else x

    def logits(self, hidden: jax.Array) -> jax.Array:
        """The logits of hidden states [..., embedded], float32 [..., vocab]."""
        embedding = self.embed_tokens.embedding[...]
        return jnp.dot(hidden, embedding.T, preferred_element_type=jnp.float32)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """The logits of tokens int32 [B, T], float32 [B, T, vocab]."""
        return self.logits(self.hidden(tokens))

    def _positions(self, length: int) -> jax.Array:
        longest = self.config.max_position_embeddings
        if length > longest:
            raise ValueError(
                f"tokens must be at most {longest} with the soft prompt "
                f"(max_position_embeddings); got {length}."
            )
        return self.embed_positions(jnp.arange(length) + POSITION_OFFSET)

    def _run_layers(self, x: jax.Array) -> jax.Array:
        graphdef, stack = nnx.split(self.layers)

        # Not nnx.scan, which would return the parameters, and so build perturbed ones.
        def body(x: jax.Array, parameters: nnx.State) -> tuple[jax.Array, None]:
            return nnx.merge(graphdef, parameters)(x), None

        x, _ = lax.scan(jax.checkpoint(body) if self.remat else body, x, stack)
        return x


def stacked(num: int, make: Callable[[nnx.Rngs], T], rngs: nnx.Rngs) -> T:
    """``num`` modules as one, whose parameters have a leading axis of that length."""
    return nnx.split_rngs(splits=num)(nnx.vmap(make))(rngs)


def _kinds(dtype: Any, rngs: nnx.Rngs) -> dict[str, Any]:
    return {"dtype": dtype, "param_dtype": dtype, "rngs": rngs}
