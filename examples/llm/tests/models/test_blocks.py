"""Matrices in K-quants: a file whose stacks have two kinds, as Q4_K_M files have."""

import functools
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from radazo_llm.formats import gguf_model, stored
from radazo_llm.formats import load as loading
from radazo_llm.models import blocks, quantization

from .. import tables, tiny

WIDTH, VOCABULARY = 256, 300
KINDS = {
    "token_embd": "Q6_K",
    "blk.1.ffn_down": "Q6_K",
    "blk.0.attn_v": "Q5_K",
    "": "Q4_K",
}


LAYERS, HEADS = 2, 4
# Places of the float16 scales in a block.
SCALES = {"Q6_K": (208,)}


def shapes():
    """The shapes of a Llama of two layers, whose matrices are square."""
    found = {"token_embd": (VOCABULARY, WIDTH), "output_norm": (WIDTH,)}
    for i in range(LAYERS):
        parts = [f"attn_{part}" for part in ("q", "k", "v", "output")]
        for part in (*parts, *(f"ffn_{part}" for part in ("gate", "up", "down"))):
            found[f"blk.{i}.{part}"] = WIDTH, WIDTH
        found |= {f"blk.{i}.{part}_norm": (WIDTH,) for part in ("attn", "ffn")}
    return found


def random_blocks(kind, shape, rng):
    """Rows of blocks with any integers, and values of about 0.02."""
    layout = blocks.LAYOUTS[kind]
    count = shape[0], shape[1] // layout.values, layout.num_bytes
    found = rng.integers(0, 256, count, dtype=np.uint8)
    for start in SCALES.get(kind, (0, 2)):
        scale = np.full((*count[:2], 1), 2e-5, np.float16)
        found[..., start : start + 2] = scale.view(np.uint8)
    return found.reshape(shape[0], -1)


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    gguf = pytest.importorskip("gguf")
    path, rng = tmp_path_factory.mktemp("k") / "k.gguf", np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(64)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(WIDTH)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    for name, shape in shapes().items():
        if "norm" in name:
            writer.add_tensor(f"{name}.weight", np.ones(shape, np.float32))
            continue
        kind = next(kind for part, kind in KINDS.items() if part in name)
        number = gguf.GGMLQuantizationType[kind]
        data = random_blocks(kind, shape, rng)
        writer.add_tensor(f"{name}.weight", data, raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def models(file):
    kept = loading.load(file, dtype=jnp.float32, keep_blocks=True)
    return kept, loading.load(file, dtype=jnp.float32)


def num_bytes(model):
    return sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(model)))


def test_a_model_takes_little_more_than_its_file(models, file):
    kept, _ = models
    assert quantization.blocks_notes(kept) == []
    assert kept.layers.down_proj.rows.kinds == ("Q4_K", "Q6_K")
    data = sum(tensor.data.nbytes for tensor in gguf_model.read(file).tensors.values())
    assert data < num_bytes(kept) < 1.15 * data


def test_logits_are_those_of_the_dequantized_matrices(models):
    found, expected = map(tiny.logits, models)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


def test_products_in_pieces_are_those_of_the_matrix(models, monkeypatch):
    """Seven rows at once, and six that are left; and rows that are picked."""
    kept, dense = models
    hidden = np.random.default_rng(0).standard_normal((2, 3, WIDTH)).astype(np.float32)
    monkeypatch.setattr(blocks, "_PIECE", 7 * WIDTH)

    @tables.jit
    def products(hidden):
        picked = kept.logits_of(hidden[:, -1], tiny.TOKENS[:, :3])
        return kept.logits(hidden), picked

    found, picked = products(hidden)
    expected = hidden @ np.asarray(dense.embed_tokens.embedding[...]).T
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)
    expected = np.take_along_axis(expected[:, -1], tiny.TOKENS[:, :3], axis=1)
    np.testing.assert_allclose(picked, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("keep_blocks", [False, True])
def test_loading_takes_a_part_of_a_tensor_more(keep_blocks, file, monkeypatch):
    monkeypatch.setattr(stored, "_PART", 1 << 14)
    gguf_model.read(file)
    tracemalloc.start()
    model = loading.load(file, dtype=jnp.float32, keep_blocks=keep_blocks)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < num_bytes(model) + (1 << 21)


def test_a_part_of_a_row_is_not_read():
    parts = list(stored.parts(5, 3 << 21))
    assert parts == [slice(i, i + 1) for i in range(5)]
    assert list(stored.parts(0, 4)) == []
    rows = functools.partial(stored.parts, 10)
    assert [part.stop for part in rows(1 << 20)] == [4, 8, 10]
