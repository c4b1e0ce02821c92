"""Random GGUF files whose matrices are in blocks, to measure and to test with."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from radazo_llm.models import blocks

LAYERS, HEADS = 2, 4
# Places of the float16 scales in a block.
_SCALES = {"Q6_K": (208,), "Q8_0": (0,), "Q4_0": (0,), "Q5_0": (0,)}


def shapes(width: int, vocabulary: int) -> dict[str, tuple[int, ...]]:
    """The shapes of a Llama of two layers, whose matrices are square."""
    found: dict[str, tuple[int, ...]] = {
        "token_embd": (vocabulary, width),
        "output_norm": (width,),
    }
    for i in range(LAYERS):
        for part in ("q", "k", "v", "output"):
            found[f"blk.{i}.attn_{part}"] = width, width
        for part in ("gate", "up", "down"):
            found[f"blk.{i}.ffn_{part}"] = width, width
        found |= {f"blk.{i}.{part}_norm": (width,) for part in ("attn", "ffn")}
    return found


def random_blocks(
    kind: str, shape: tuple[int, ...], rng: np.random.Generator
) -> np.ndarray:
    """Rows of blocks with any integers, and values of about 0.02."""
    layout = blocks.LAYOUTS[kind]
    count = shape[0], shape[1] // layout.values, layout.num_bytes
    found = rng.integers(0, 256, count, dtype=np.uint8)
    small = 2e-5 if kind.endswith("K") else 2e-4 if kind == "Q8_0" else 2e-3
    for start in _SCALES.get(kind, (0, 2)):
        scale = np.full((*count[:2], 1), small, np.float16)
        found[..., start : start + 2] = scale.view(np.uint8)
    return found.reshape(shape[0], -1)


def write(path: Path, kinds: Mapping[str, str], width: int, vocabulary: int) -> None:
    """Writes a model.

    Args:
      path: The file.
      kinds: The kind of a tensor, of the first name that the tensor's name contains.
      width: The width, a multiple of 256 for K-quants.
      vocabulary: The number of tokens.
    """
    import gguf

    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(64)
    writer.add_embedding_length(width)
    writer.add_feed_forward_length(width)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    for name, shape in shapes(width, vocabulary).items():
        if "norm" in name:
            writer.add_tensor(f"{name}.weight", np.ones(shape, np.float32))
            continue
        kind = next(kind for part, kind in kinds.items() if part in name)
        number = gguf.GGMLQuantizationType[kind]
        data = random_blocks(kind, shape, rng)
        writer.add_tensor(f"{name}.weight", data, raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
