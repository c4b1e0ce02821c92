"""A small model that learned to add from solved sums, many of which are wrong.

    python -m research.warm_up runs/sums

A share of the solutions forget the carry. The model imitates both ways to add, by
backpropagation, and prefers the more frequent one. A reward of right answers says which
is right. A reward says nothing to a model that is never right. Sums to train and to
evaluate on are written next to the model.
"""

import dataclasses
import json
import random
from pathlib import Path

import click
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from tqdm import tqdm

from radazo_llm.formats import save, tokenizers
from radazo_llm.formats.files import json_object
from radazo_llm.models.opt import OPT, Config
from radazo_llm.reward.problems import Problem

RECORD = "warm_up.json"
_CHARACTERS = "0123456789+="
_ROOM = 12  # Tokens of a solved sum, at most.


@dataclasses.dataclass(frozen=True)
class Settings:
    """The model and its training."""

    hidden_size: int = 128
    num_hidden_layers: int = 2
    num_attention_heads: int = 4
    num_steps: int = 600
    without_carry: float = 0.6  # The share of solutions that forget the carry.
    batch_size: int = 128
    learning_rate: float = 2e-3
    seed: int = 0


FAST = Settings(hidden_size=16, num_steps=20)


def warmed_up(folder: Path, settings: Settings) -> Path:
    """Makes tokenizer and model in a folder, unless they are there; returns it."""
    record, wanted = folder / RECORD, dataclasses.asdict(settings)
    if record.is_file() and json_object(record) == wanted:
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    record.unlink(missing_ok=True)
    characters = tokenizer()
    characters.save(str(folder / "tokenizer.json"))
    save.save(_train(settings, characters), folder)
    record.write_text(json.dumps(wanted) + "\n")  # Last: all is there.
    return folder


def tokenizer() -> Tokenizer:
    """A token for each character, and `</s>` around a solved sum."""
    special = ["<s>", tokenizers.PAD, tokenizers.BOS, "<unk>"]
    ids = {token: i for i, token in enumerate([*special, *_CHARACTERS])}
    made = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    made.decoder = decoders.Fuse()
    made.add_special_tokens(special)
    pair = [(tokenizers.BOS, ids[tokenizers.BOS])]
    made.post_processor = TemplateProcessing(
        single=f"{tokenizers.BOS} $A", special_tokens=pair
    )
    return made


def _train(settings: Settings, tokenizer: Tokenizer) -> OPT:
    config = Config(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=settings.hidden_size,
        ffn_dim=4 * settings.hidden_size,
        num_hidden_layers=settings.num_hidden_layers,
        num_attention_heads=settings.num_attention_heads,
        max_position_embeddings=32,
    )
    model = OPT(config, dtype=jnp.float32, rngs=nnx.Rngs(settings.seed))
    rate = optax.warmup_cosine_decay_schedule(
        0.0, settings.learning_rate, settings.num_steps // 10, settings.num_steps
    )
    optimizer = nnx.Optimizer(model, optax.adam(rate), wrt=nnx.Param)
    end = tokenizer.token_to_id(tokenizers.BOS)

    def loss_fn(model: OPT, tokens: jax.Array, mask: jax.Array) -> jax.Array:
        losses = optax.softmax_cross_entropy_with_integer_labels(
            model(tokens[:, :-1]), tokens[:, 1:]
        )
        return jnp.sum(losses * mask) / jnp.sum(mask)

    @nnx.jit
    def step(model: OPT, optimizer: nnx.Optimizer, *batch: np.ndarray) -> jax.Array:
        loss, gradient = nnx.value_and_grad(loss_fn)(model, *batch)
        with jax.numpy_dtype_promotion("standard"):
            optimizer.update(model, gradient)
        return loss

    for i in (bar := tqdm(range(settings.num_steps), desc="Warm-up", unit="step")):
        seed = settings.seed * settings.num_steps + i
        batch = solved(tokenizer, settings, seed, end)
        loss = step(model, optimizer, *batch)
        if i % 20 == 0:
            bar.set_postfix(loss=f"{loss:.3f}", refresh=False)
    return model


def sums(number: int, seed: int, *, held_out: bool = False) -> list[Problem]:
    """Sums, the same ones for a seed. One sum in five is held out, and never drawn."""
    rng, found = random.Random(seed), list[Problem]()
    while len(found) < number:
        a, b = rng.randrange(100), rng.randrange(100)
        if ((a + 2 * b) % 5 == 0) == held_out:
            found.append(Problem(f"{a}+{b}=", {"answer": str(a + b)}))
    return found


def write_sums(folder: Path, seed: int = 0) -> None:
    """Writes sums as `radazo-llm reward --data` reads them."""
    for name, number in (("train", 2048), ("dev", 256)):
        lines = [
            json.dumps({"prompt": x.question, **x.columns})
            for x in sums(number, seed, held_out=name == "dev")
        ]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n", "utf-8")


def without_carry(question: str) -> str:
    """The answer to a sum of one who forgets to carry the one to the tens."""
    a, b = map(int, question.removesuffix("=").split("+"))
    return str(a + b - 10 * (a % 10 + b % 10 > 9))


def solved(
    tokenizer: Tokenizer, settings: Settings, seed: int, end: int
) -> tuple[np.ndarray, np.ndarray]:
    """Solved sums, and which targets belong to an answer: [B, T] and [B, T − 1]."""
    number = settings.batch_size
    tokens = np.zeros((number, _ROOM), np.int32)
    mask = np.zeros((number, _ROOM - 1), np.float32)
    forgets = np.random.default_rng(seed).random(number) < settings.without_carry
    for i, problem in enumerate(sums(number, seed)):
        question = tokenizer.encode(problem.question).ids
        answer = problem.columns["answer"]
        if forgets[i]:
            answer = without_carry(problem.question)
        row = [*question, *tokenizer.encode(answer, add_special_tokens=False).ids, end]
        tokens[i, : len(row)] = row
        mask[i, len(question) - 1 : len(row) - 1] = 1
    return tokens, mask


@click.command(help=__doc__)
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--fast", is_flag=True, help="A smaller model, trained for 20 steps.")
def main(folder: Path, fast: bool) -> None:
    print(f"The model is in {warmed_up(folder, FAST if fast else Settings())}.")
    write_sums(folder)


if __name__ == "__main__":
    main()
