"""Models in GGUF: configuration, tokenizer and tensors, in Hugging Face's terms.

llama.cpp names tensors by their place, permutes the rows of Llama's queries and keys,
and adds one to Gemma's norms.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from radazo_llm.formats import gguf_file
from radazo_llm.formats.gguf_file import File
from radazo_llm.models import blocks, rotary

# Architectures, as llama.cpp and as transformers name them.
ARCHITECTURES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
    "phi3": "phi3",
    "granite": "granite",
    "olmo2": "olmo2",
    "smollm3": "smollm3",
}
# The rows of their queries and keys are interleaved.
PERMUTED = "llama", "granite", "smollm3"
_TOP = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_LAYER_WITH_NORMS_AFTER = _LAYER | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_LAYER_OF_OLMO_2 = {
    name: path for name, path in _LAYER.items() if name not in ("attn_norm", "ffn_norm")
} | {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_LAYER_OF_PHI_3 = _LAYER | {
    "attn_qkv": "self_attn.qkv_proj",
    "ffn_up": "mlp.gate_up_proj",
}
_LAYERS = {
    "gemma2": _LAYER_WITH_NORMS_AFTER,
    "gemma3": _LAYER_WITH_NORMS_AFTER,
    "olmo2": _LAYER_OF_OLMO_2,
    "phi3": _LAYER_OF_PHI_3,
}
_ROPE_FACTORS = "rope_freqs.weight"
# Entries of `config.json`, and of the metadata after the architecture's name.
_ENTRIES = {
    "num_hidden_layers": "block_count",
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "sliding_window": "attention.sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "attention_multiplier": "attention.scale",
    "logits_scaling": "logit_scale",
}
# Layers of the Gemmas whose attention is scaled by the width of all heads.
_GEMMAS_OF_27B = {("gemma2", 46), ("gemma3", 62)}
# Numbers of Llama 3's rotary positions that the file does not have.
_LLAMA_3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


class Stored(NamedTuple):
    """A tensor of a file, under Hugging Face's name."""

    kind: str  # As safetensors names data types; "F32" if it is dequantized.
    shape: tuple[int, ...]
    # Returns a part of the tensor, by a slice of its first axis.
    read: Callable[[slice], np.ndarray]
    # Its rows of bytes and their kind, if the file has it in blocks.
    rows: Callable[[slice], np.ndarray] | None = None
    block_kind: str = ""


def read(path: Path) -> File:
    """Reads the header of a file with a model.

    Raises:
      ValueError: If it is damaged, or has no model of a known architecture.
    """
    file = gguf_file.read(path)
    found = file.metadata.get("general.architecture")
    if file.metadata.get("general.type", "model") != "model":
        raise ValueError(f"{path} must have a model; got an adapter.")
    if not isinstance(found, str) or found not in ARCHITECTURES:
        raise ValueError(
            f"{path}: general.architecture must be one of "
            f"{', '.join(ARCHITECTURES)}; got {found!r:.80}."
        )
    return file


def config(file: File) -> dict[str, Any]:
    """Returns the entries of the model's `config.json`."""
    family = file.metadata["general.architecture"]
    values: dict[str, Any] = {"model_type": ARCHITECTURES[family]}
    for name, entry in _ENTRIES.items():
        value = file.metadata.get(f"{family}.{entry}")
        if isinstance(value, np.ndarray):
            raise ValueError(f"{file.path}: {entry} must be the same in all layers.")
        if value is not None and (name, value) != ("sliding_window", 0):
            values[name] = value
    embedding = file.tensors.get("token_embd.weight")
    if embedding is not None:
        values["vocab_size"] = embedding.shape[0]
    values["tie_word_embeddings"] = "output.weight" not in file.tensors
    values["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
    if "gemma" in family:
        values["hidden_activation"] = "gelu_pytorch_tanh"
    if family == "gemma3":
        values |= {"rope_local_base_freq": 1e4, "sliding_window_pattern": 6}
        values.setdefault("rope_theta", 1e6)
    if (family, values.get("num_hidden_layers")) in _GEMMAS_OF_27B:
        heads = values.get("num_attention_heads") or 1
        values["query_pre_attn_scalar"] = values.get("hidden_size", 0) // heads
    elif family in ("gemma2", "gemma3"):
        values["query_pre_attn_scalar"] = None  # The width of a head.
    values |= _partial_rotation(file, values)
    scaling = file.metadata.get(f"{family}.rope.scaling.type", "none")
    if scaling != "none":
        factor = file.metadata.get(f"{family}.rope.scaling.factor")
        values["rope_scaling"] = {"rope_type": scaling, "factor": factor}
    if _ROPE_FACTORS in file.tensors:
        values["rope_scaling"] = _llama_3(file, values)
    special = {
        name: file.metadata.get(f"tokenizer.ggml.{name}")
        for name in ("bos_token_id", "eos_token_id", "eot_token_id")
    }
    ends = {special["eos_token_id"], special.pop("eot_token_id")} - {None}
    pad = file.metadata.get("tokenizer.ggml.padding_token_id")
    special |= {} if pad is None else {"pad_token_id": pad}
    return values | special | {"eos_token_id": sorted(ends)}


def _partial_rotation(file: File, values: dict[str, Any]) -> dict[str, Any]:
    """The share of a head that is rotated, if it is not all of it."""
    family = file.metadata["general.architecture"]
    rotated = file.metadata.get(f"{family}.rope.dimension_count")
    heads, width = values.get("num_attention_heads"), values.get("hidden_size")
    head = values.get("head_dim")
    if head is None and type(heads) is int and heads and type(width) is int:
        head = width // heads
    if type(rotated) is not int or type(head) is not int or rotated == head:
        return {}
    return {"partial_rotary_factor": rotated / head if head else 0}


def _llama_3(file: File, values: dict[str, Any]) -> dict[str, Any]:
    """The scaling by which Llama 3 divides frequencies, from its quotients."""
    tensor = file.tensors[_ROPE_FACTORS]
    found = gguf_file.values(tensor.kind, tensor.data).ravel().astype(np.float64)
    scaling = {"rope_type": "llama3", "factor": float(found.max())} | _LLAMA_3
    theta = values.get("rope_theta", 1e4)
    numbers = (theta, *list(scaling.values())[1:])
    plain, scaled = rotary.frequencies([(theta,), numbers], 2 * len(found))
    if not np.allclose(plain / scaled, found, rtol=1e-4):
        raise ValueError(f"{file.path}: {_ROPE_FACTORS} must be those of Llama 3.")
    return scaling


def tensors(file: File) -> dict[str, Stored]:
    """Returns the model's tensors, by their names in safetensors."""
    family, heads = file.metadata["general.architecture"], {}
    for module, entry in (("attn_q", "head_count"), ("attn_k", "head_count_kv")):
        heads[module] = file.metadata.get(f"{family}.attention.{entry}")
    heads["attn_k"] = heads["attn_k"] or heads["attn_q"]
    layer, stored = layer_names(family), {}
    for name, tensor in file.tensors.items():
        if name == _ROPE_FACTORS:
            continue
        match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
        number, module, leaf = match.groups() if match else (None, "", "")
        known = (_TOP if number is None else layer).get(module)
        if known is None:
            raise ValueError(f"{file.path} has the unexpected tensor {name!r:.200}.")
        prefix = "" if number is None else f"model.layers.{int(number)}."
        rows = None
        if family in PERMUTED and module in heads:
            rows = _rows(file, name, tensor, heads[module])
        offset = 1.0 if "gemma" in family and "norm" in module else 0.0
        stored[f"{prefix}{known}.{leaf}"] = _stored(tensor, rows, offset)
    return stored


def layer_names(family: str) -> dict[str, str]:
    """Returns the parts of a layer, as llama.cpp and as transformers name them."""
    return _LAYERS.get(family, _LAYER)


def _rows(file: File, name: str, tensor: gguf_file.Tensor, heads: Any) -> np.ndarray:
    """Places of the rows of queries or keys: llama.cpp interleaves pairs that turn."""
    size = tensor.shape[0]
    if type(heads) is not int or heads < 1 or size % (2 * heads):
        raise ValueError(
            f"{file.path}: {name} must have rows for {heads!r:.80} heads; got {size}."
        )
    return np.arange(size).reshape(heads, -1, 2).swapaxes(1, 2).ravel()


def permuted(heads: int, matrix: np.ndarray) -> np.ndarray:
    """Returns rows of queries or keys in llama.cpp's order, [rows, ...]."""
    pairs = matrix.reshape(heads, 2, -1, *matrix.shape[1:])
    return pairs.swapaxes(1, 2).reshape(matrix.shape)


def _stored(tensor: gguf_file.Tensor, rows: np.ndarray | None, offset: float) -> Stored:
    kind, shape, data = tensor
    if len(shape) == 1 and rows is not None:
        data = data.reshape(shape[0], -1)

    def ordered(part: slice) -> np.ndarray:
        return data[part] if rows is None else data[rows[part]]

    def read(part: slice) -> np.ndarray:
        flat = len(data) != shape[0]  # A vector, which is one row.
        used = data if flat else ordered(part)
        # Scales may be no numbers.
        with np.errstate(invalid="ignore", over="ignore"):
            values = gguf_file.values(kind, used)
        gguf_file.let_go(data)
        values = values.reshape(-1, *shape[1:])
        values = values[part] if flat else values
        return values - np.float32(offset) if offset else values

    if kind not in blocks.LAYOUTS or len(shape) != 2:
        return Stored("F32", shape, read)
    return Stored("F32", shape, read, ordered, kind)
