"""A small OPT, pretrained by backpropagation, so that there is something to tune."""

import contextlib
import dataclasses
import hashlib
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from tqdm import tqdm

from radazo_llm.formats import save
from radazo_llm.formats.files import json_object, model_file
from radazo_llm.models.opt import OPT, Config
from research import corpus

RECORD = "pretraining.json"


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of the model and of its training: equal ones give equal models."""

    vocab_size: int = 4096
    hidden_size: int = 256
    num_hidden_layers: int = 6
    num_attention_heads: int = 4
    max_position_embeddings: int = 256
    length: int = 32  # Of a sequence, in tokens.
    batch_size: int = 16
    num_steps: int = 1000
    learning_rate: float = 1e-3  # The highest: up from 0 at first, then down to it.
    warm_up: float = 0.1  # The part of the steps that goes up.
    seed: int = 0

    def config(self) -> Config:
        names = {field.name for field in dataclasses.fields(Config)}
        sizes = {k: v for k, v in dataclasses.asdict(self).items() if k in names}
        return Config(**sizes, ffn_dim=4 * self.hidden_size)


FAST = Settings(vocab_size=1024, hidden_size=64, num_hidden_layers=2, num_steps=20)


def pretrained(folder: Path, settings: Settings) -> Path:
    """Makes tokenizer and model in a folder, unless they are there; returns it."""
    record = folder / RECORD
    wanted = {"settings": dataclasses.asdict(settings)}
    if record.is_file():
        # What does not agree with its record, or cannot be read, is made anew.
        with contextlib.suppress(ValueError, OSError):
            if json_object(record) == wanted | {"files": _digests(folder)}:
                return folder
    folder.mkdir(parents=True, exist_ok=True)
    record.unlink(missing_ok=True)
    lines = corpus.text()
    tokenizer = corpus.train_tokenizer(lines, settings.vocab_size)
    tokenizer.save(str(folder / "tokenizer.json"))
    save.save(_train(settings, corpus.token_stream(tokenizer, lines)), folder)
    # Last, so that what is cut short is not taken for done.
    wanted["files"] = _digests(folder)
    record.write_text(json.dumps(wanted, indent=1) + "\n")
    return folder


def _digests(folder: Path) -> dict[str, str]:
    """The SHA-256 of each file but the record."""
    result = {}
    for name in ("tokenizer.json", "config.json", "model.safetensors"):
        with model_file(folder, name).open("rb") as file:
            result[name] = hashlib.file_digest(file, "sha256").hexdigest()
    return result


def _train(settings: Settings, tokens: np.ndarray) -> OPT:
    model = OPT(settings.config(), dtype=jnp.float32, rngs=nnx.Rngs(settings.seed))
    steps, rate = settings.num_steps, settings.learning_rate
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, rate, int(settings.warm_up * steps), steps
    )
    adam = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(schedule))
    optimizer = nnx.Optimizer(model, adam, wrt=nnx.Param)

    def loss_fn(model: OPT, batch: jax.Array) -> jax.Array:
        logits, targets = model(batch[:, :-1]), batch[:, 1:]
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

    @nnx.jit
    def step(model: OPT, optimizer: nnx.Optimizer, batch: np.ndarray) -> jax.Array:
        loss, gradient = nnx.value_and_grad(loss_fn)(model, batch)
        # The count of steps is an integer, and Optax multiplies it by numbers.
        with jax.numpy_dtype_promotion("standard"):
            optimizer.update(model, gradient)
        return loss

    shape = settings.batch_size, settings.length + 1
    for i in (bar := tqdm(range(steps), desc="Pretraining", unit="step")):
        batch = corpus.windows(tokens, settings.seed, i, *shape)
        loss = step(model, optimizer, batch)
        if i % 10 == 0:
            bar.set_postfix(loss=f"{loss:.3f}", refresh=False)
    return model
