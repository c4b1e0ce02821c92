"""The last layers of a model, on cached outputs of the others."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tables import every, slow

from examples.apps.llm import frozen, lora, weights
from examples.apps.llm.run import run

from . import tiny
from .test_decoder import loaded

MODELS = {
    "opt": tiny.model,
    "llama": lambda: loaded("llama"),
    # Its layers have other rotary positions and windows than each other.
    "gemma3_text": lambda: loaded("gemma3_text"),
}
TOKENS = np.arange(24, dtype=np.int32).reshape(2, 12)


def outputs(first, folder):
    batch = tiny.examples(2, 1)._replace(tokens=TOKENS[:, None])
    return frozen.outputs(first, batch, folder, "x", batch_size=2).tokens[:, 0]


@pytest.mark.parametrize("name", every(MODELS, "llama"))
@pytest.mark.slow
def test_the_last_layers_on_outputs_of_the_first_are_the_model(name, tmp_path):
    expected = tiny.logits(MODELS[name](), TOKENS)
    first, last = frozen.split(MODELS[name](), 1)
    lora.add_lora(last, rank=2, rngs=nnx.Rngs(0))
    found = tiny.logits(last, outputs(first, tmp_path))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)
    b = last.layers.q_proj.lora.lora_b
    b[...] = jax.random.normal(jax.random.key(1), b.shape)
    tuned = tiny.logits(last, outputs(first, tmp_path))
    assert np.abs(tuned - expected).max() > 1e-3
    whole = frozen.joined(first, last)
    assert whole.config == MODELS[name]().config
    assert lora.adapted_layers(whole) == [1]
    np.testing.assert_allclose(tiny.logits(whole, TOKENS), tuned, rtol=0, atol=1e-5)


@pytest.mark.parametrize("keep", [True, slow(False)])
def test_a_split_model_is_joined_bit_for_bit(keep):
    pytest.importorskip("gguf")
    path = tiny.GOLDEN / "gguf" / "llama.gguf"

    def load():
        return weights.load(path, dtype=jnp.float32, keep_blocks=keep)

    one, two = tiny.arrays(load()), tiny.arrays(frozen.joined(*frozen.split(load(), 1)))
    assert one.keys() == two.keys()
    for key, values in one.items():
        assert values.dtype == two[key].dtype
        np.testing.assert_array_equal(values, two[key])


def damaged(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))


def truncated(path):
    path.write_bytes(path.read_bytes()[:-4])


def gone(path):
    path.unlink()


@pytest.mark.parametrize("harm", [None, damaged, truncated, gone])
def test_outputs_are_computed_once_unless_their_file_is_damaged(
    harm, tmp_path, monkeypatch
):
    first, _ = frozen.split(tiny.model(), 1)
    before = np.array(outputs(first, tmp_path))
    (path,) = tmp_path.glob("*.outputs")
    if harm is not None:
        harm(path)
    written, write = [], frozen._write
    monkeypatch.setattr(
        frozen, "_write", lambda *args: (written.append(args), write(*args))
    )
    after = outputs(first, tmp_path)
    assert isinstance(after, np.memmap)
    np.testing.assert_array_equal(after, before)
    assert len(written) == (harm is not None)


@pytest.mark.parametrize("last", [0, 2, -1])
def test_a_part_must_be_smaller_than_the_model(last):
    with pytest.raises(ValueError, match=f"last_layers must be from 1 to 1 .*{last}"):
        frozen.split(tiny.model(), last)


SETTINGS = dataclasses.replace(
    tiny.SETTINGS,
    last_layers=1,
    num_buckets=2,
    schedule="cosine",
    warmup_steps=2,
    learning_rate=1e-2,
)


@pytest.mark.slow
def test_a_run_of_the_last_layers_resumes_to_the_same_end(tmp_path, monkeypatch):
    whole = run(
        dataclasses.replace(tiny.SETTINGS, num_steps=1),
        tiny.model(),
        tiny.TRAIN,
        tiny.DEV,
        tiny.DEV,
    ).evaluations[0]
    arguments = tiny.model, tiny.TRAIN, tiny.DEV, tiny.DEV

    def start(folder, **options):
        model, *data = arguments
        return run(SETTINGS, model(), *data, folder=folder, **options)

    uncut = start(tmp_path / "uncut")
    for name in ("train_loss", "dev_loss", "dev_accuracy", "test_loss"):
        assert uncut.evaluations[0][name] == pytest.approx(whole[name], rel=1e-5)
    measured = ["test_loss" in row for row in uncut.evaluations]
    assert measured == [True, False, False, True]
    rate = SETTINGS.learning_rate_at

    def dying(self, step):
        if step == 7:
            raise KeyboardInterrupt
        return rate(step)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(type(SETTINGS), "learning_rate_at", dying)
        start(tmp_path / "cut")
    resumed = start(tmp_path / "cut", resume=True)
    assert resumed.evaluations == uncut.evaluations
    one, two = tiny.arrays(uncut.model), tiny.arrays(resumed.model)
    for key, values in one.items():
        np.testing.assert_array_equal(values, two[key])
    longer = dataclasses.replace(SETTINGS, num_steps=20)
    with pytest.raises(ValueError, match="num_steps"):
        model, *data = arguments
        run(longer, model(), *data, folder=tmp_path / "cut", resume=True)
