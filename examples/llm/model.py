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
    """The sizes of a model; the names and defaults are those of its `config.json`."""

    vocab_size: int = 50272
    hidden_size: int = 768
    num_hidden_layers: int = 12
    ffn_dim: int = 3072
    num_attention_heads: int = 12
    max_position_embeddings: int = 2048

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            if type(value) is not int or value < 1:
                raise ValueError(f"{name} must be a positive integer; got {value!r}.")
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
    )
    for name, width, layers, heads in (
        ("125m", 768, 12, 12),
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
        kinds, width = _kinds(dtype, rngs), config.hidden_size
        linear = functools.partial(nnx.Linear, kernel_init=INIT, **kinds)
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
        x = x + self._attention(self.self_attn_layer_norm(x))
        return x + self.fc2(jax.nn.relu(self.fc1(self.final_layer_norm(x))))

    def _attention(self, x: jax.Array) -> jax.Array:
        heads = (*x.shape[:-1], self.num_heads, x.shape[-1] // self.num_heads)
        q, k, v = (f(x).reshape(heads) for f in (self.q_proj, self.k_proj, self.v_proj))
        with jax.numpy_dtype_promotion("standard"):  # Its softmax is in float32.
            mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        return self.out_proj(mixed.reshape(x.shape))


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
        self.config, self.dtype, self.remat = config, dtype, remat
        embedding = functools.partial(
            nnx.Embed,
            features=config.hidden_size,
            embedding_init=INIT,
            **_kinds(dtype, rngs),
        )
        self.embed_tokens = embedding(config.vocab_size)
        longest = config.max_position_embeddings
        self.embed_positions = embedding(longest + POSITION_OFFSET)
        self.layers = stacked(
            config.num_hidden_layers, lambda rngs: Layer(config, dtype, rngs), rngs
        )
        self.final_layer_norm = LayerNorm(config, dtype, rngs)
        # Embeddings put before those of the tokens, [P, width]; see lora.py.
        self.prompt: nnx.Variable | None = nnx.data(None)

    def hidden(self, tokens: jax.Array) -> jax.Array:
        """The final hidden states of tokens int32 [B, T], [B, T, width].

        Raises:
          ValueError: If T is more than the model has positions.
        """
        x = self.embed_tokens(tokens)
        if self.prompt is not None:
            prompt = self.prompt[...].astype(x.dtype)
            prompt = jnp.broadcast_to(prompt[None], (len(x), *prompt.shape))
            x = jnp.concatenate([prompt, x], axis=1)
        x = self._run_layers(x + self._positions(x.shape[1])[None])
        return self.final_layer_norm(x[:, x.shape[1] - tokens.shape[1] :])

    def logits(self, hidden: jax.Array) -> jax.Array:
        """The logits of hidden states [..., width], float32 [..., vocab]."""
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
