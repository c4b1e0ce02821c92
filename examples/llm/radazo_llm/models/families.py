"""The families of decoders: their differences and configurations.

`FAMILIES` is the table: an entry for each `model_type` of a `config.json`.
"""

import dataclasses
import functools
import json
import math
from collections.abc import Mapping
from typing import Any, NamedTuple, Self

import jax

from radazo_llm.models import rotary
from radazo_llm.models.model import check_sizes, one_of, positive

# What `config.json` may leave out: the defaults of transformers.
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
_QWEN = {"use_sliding_window": False, "max_window_layers": 28}
_GEMMA = {
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
_GEMMA_3 = _GEMMA_2 | {
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131_072,
    "final_logit_softcapping": None,
    "attn_logit_softcapping": None,
    "sliding_window_pattern": 6,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
}
_GRANITE = dict.fromkeys(
    (
        "embedding_multiplier",
        "attention_multiplier",
        "residual_multiplier",
        "logits_scaling",
    ),
    1.0,
)


class Family(NamedTuple):
    """The differences of a family from Llama.

    Attributes:
      defaults: Entries that `config.json` may leave out, if they are not Llama's.
      biased: The projections that have a bias, whatever the configuration says.
      output_bias: Whether `attention_bias` gives one to the output, too.
      query_norm: Whether queries and keys are normalized: "heads", each by itself;
        "all" together; or not, "".
      norms_before: Whether a norm is before attention and feed-forward network.
      norms_after: Whether a norm is after them.
      fused: Whether queries, keys and values are one matrix, and so gate and up.
      slides: The layers with a window, without `layer_types`: "none", "all" if there
        is a window, the "last" ones of Qwen, "period" of Gemma.
    """

    defaults: Mapping[str, Any] = {}
    biased: tuple[str, ...] = ()
    output_bias: bool = True
    query_norm: str = ""
    norms_before: bool = True
    norms_after: bool = False
    fused: bool = False
    slides: str = "none"


_QKV = "q_proj", "k_proj", "v_proj"
FAMILIES: dict[str, Family] = {
    "llama": Family(),
    "mistral": Family({"sliding_window": 4096}, slides="all"),
    "qwen2": Family(_QWEN, biased=_QKV, output_bias=False, slides="last"),
    "qwen3": Family(_QWEN | {"head_dim": 128}, query_norm="heads", slides="last"),
    "gemma": Family(_GEMMA),
    "gemma2": Family(_GEMMA_2, norms_after=True, slides="period"),
    "gemma3_text": Family(
        _GEMMA_3, query_norm="heads", norms_after=True, slides="period"
    ),
    "phi3": Family({"rms_norm_eps": 1e-5}, fused=True, slides="all"),
    "granite": Family(_GRANITE),
    "olmo2": Family(
        {"rms_norm_eps": 1e-5}, query_norm="all", norms_before=False, norms_after=True
    ),
    "smollm3": Family(
        _QWEN
        | {
            "rope_theta": 2e6,
            "tie_word_embeddings": True,
            "no_rope_layers": None,
            "no_rope_layer_interval": 4,
        },
        slides="last",
    ),
}
# Models of texts and images, of which the text part is read.
MULTIMODAL = {"gemma3": "gemma3_text"}
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
    gemma: bool  # Norms scale by 1 + weight.
    query_norm: str  # As `Family` has it, and so the next three.
    norms_before: bool
    norms_after: bool
    fused: bool
    embedding_scale: float
    residual_scale: float
    logits_scale: float
    attention_scale: float
    attention_cap: float | None
    logits_cap: float | None
    windows: tuple[int | None, ...]  # Of each layer: how many positions a token sees.
    # Of each layer: θ, and a scaling's numbers; nothing if positions do not matter.
    rope: tuple[tuple[float, ...], ...]
    multimodal: bool  # Whether it is the text part of a model.
    source: str  # The `config.json`, or the text part of it.

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The configuration in a `config.json`; entries that do not matter are ignored.

        Raises:
          ValueError: If it is of another architecture, or a value is not possible.
        """
        known = FAMILIES | MULTIMODAL
        name = one_of(known, "model_type", values.get("model_type"))
        multimodal = name in MULTIMODAL
        if multimodal:
            name, values = MULTIMODAL[name], _text_part(values, MULTIMODAL[name])
        family, gemma = FAMILIES[name], name.startswith("gemma")
        v = _COMMON | dict(family.defaults) | dict(values)
        _check_kinds(v)
        if v["num_key_value_heads"] is None:
            v["num_key_value_heads"] = v["num_attention_heads"]
        sizes = {
            field.name: v.get(field.name)
            for field in dataclasses.fields(cls)
            if field.type in (int, "int") and field.name != "head_dim"
        }
        head_dim = _checked_head_dim(sizes, v["head_dim"])
        for switch in ("mlp_bias", "use_bidirectional_attention"):
            if v[switch]:
                raise ValueError(f"{switch} must be False; got {v[switch]!r:.80}.")
        activation = v["hidden_activation" if gemma else "hidden_act"]
        if activation is None:
            activation = "gelu_pytorch_tanh"
        one_of(ACTIVATIONS, "hidden_act", activation)
        slides = _sliding(v, family)
        turned = _turned(v, len(slides))
        scalar = _positive_or_none(v, "query_pre_attn_scalar") or head_dim
        multiplier = {name: _positive_or_none(v, name) or 1.0 for name in _GRANITE}
        scale = multiplier["attention_multiplier"]
        return cls(
            **sizes,
            head_dim=head_dim,
            rms_norm_eps=positive(v, "rms_norm_eps"),
            activation=activation,
            tie_word_embeddings=bool(v["tie_word_embeddings"]),
            biased=_biased(v, family),
            gemma=gemma,
            query_norm=family.query_norm,
            norms_before=family.norms_before,
            norms_after=family.norms_after,
            fused=family.fused,
            embedding_scale=(
                math.sqrt(v["hidden_size"])
                if gemma
                else multiplier["embedding_multiplier"]
            ),
            residual_scale=multiplier["residual_multiplier"],
            logits_scale=1 / multiplier["logits_scaling"],
            attention_scale=scale if name == "granite" else scalar**-0.5,
            attention_cap=_positive_or_none(v, "attn_logit_softcapping"),
            logits_cap=_positive_or_none(v, "final_logit_softcapping"),
            windows=tuple(v["sliding_window"] if s else None for s in slides),
            rope=tuple(
                rotary.read(v, s) if t else ()
                for s, t in zip(slides, turned, strict=True)
            ),
            multimodal=multimodal,
            source=json.dumps(dict(values)),
        )

    def to_dict(self) -> dict[str, Any]:
        """The entries of the model's `config.json`."""
        return json.loads(self.source)


def _checked_head_dim(sizes: Mapping[str, Any], head_dim: Any) -> int:
    """The size of a head, by default the width divided among the heads.

    Raises:
      ValueError: If a size is not possible.
    """
    check_sizes(sizes)
    if sizes["num_hidden_layers"] > _MOST_LAYERS:
        raise ValueError(
            f"num_hidden_layers must be at most {_MOST_LAYERS}; got "
            f"{sizes['num_hidden_layers']}."
        )
    heads = sizes["num_attention_heads"]
    if head_dim is None:
        head_dim = sizes["hidden_size"] // heads
    check_sizes({"head_dim": head_dim})
    check_sizes({"num_attention_heads × head_dim": heads * head_dim})
    if heads % sizes["num_key_value_heads"] or head_dim % 2:
        raise ValueError(
            "num_attention_heads must be a multiple of num_key_value_heads, and "
            f"head_dim even; got {heads}, {sizes['num_key_value_heads']} and "
            f"{head_dim}."
        )
    return int(head_dim)


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


def _text_part(values: Mapping[str, Any], family: str) -> dict[str, Any]:
    """The configuration of the text part, as of a model of its own."""
    found = values.get("text_config")
    if not isinstance(found, dict):
        raise ValueError(f"text_config must be an object; got {found!r:.80}.")
    return found | {"model_type": family}


def _biased(v: Mapping[str, Any], family: Family) -> tuple[str, ...]:
    """The projections that have a bias."""
    if family.biased or not v["attention_bias"]:
        return family.biased
    return (*_QKV, "qkv_proj", "o_proj") if family.output_bias else _QKV


def _turned(v: Mapping[str, Any], number: int) -> list[bool]:
    """Whether each layer has rotary positions."""
    listed, period = v.get("no_rope_layers"), v.get("no_rope_layer_interval")
    if listed is None and period is None:
        return [True] * number
    if listed is None:
        check_sizes({"no_rope_layer_interval": period})
        return [(i + 1) % period != 0 for i in range(number)]
    valid = isinstance(listed, list) and len(listed) == number
    if not valid or any(type(x) not in (int, bool) or x not in (0, 1) for x in listed):
        raise ValueError(
            f"no_rope_layers must have 0 or 1 for each of {number} layers; got "
            f"{listed!r:.80}."
        )
    return [bool(x) for x in listed]


def _sliding(v: Mapping[str, Any], family: Family) -> list[bool]:
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
    elif family.slides == "last":
        used, full = v["use_sliding_window"], v["max_window_layers"]
        if type(full) is not int:
            raise ValueError(f"max_window_layers must be an integer; got {full!r:.80}.")
        slides = [bool(used) and i >= full for i in range(number)]
    elif family.slides == "period":
        period = v.get("sliding_window_pattern", 2)
        check_sizes({"sliding_window_pattern": period})
        slides = [(i + 1) % period != 0 for i in range(number)]
    else:
        slides = [family.slides == "all" and v["sliding_window"] is not None] * number
    if any(slides):
        check_sizes({"sliding_window": v["sliding_window"]})
    return slides
