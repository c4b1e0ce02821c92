"""A model, its problems and their rewards: what all methods share."""

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import radazo_jax as zo
from radazo_llm.formats import tokenizers
from radazo_llm.formats.chat_template import conversation, ends
from radazo_llm.models import lora
from radazo_llm.models.decode import Replies, generate_tokens
from radazo_llm.models.model import LanguageModel
from radazo_llm.reward import problems
from radazo_llm.reward.log import Log
from radazo_llm.reward.rewards import RewardPool

JOURNAL = "journal.jsonl"
# To train on, and held out.
Problems = tuple[list[problems.Problem], list[problems.Problem]]


class Task:
    """Prompts for a model, and the rewards of its replies.

    Args:
      settings: The settings of the run.
      model: The model, consumed.
      source: The model's folder, with its tokenizer.
      name: The name of the problems, or those to train on and those held out.
      pool: The processes that score.
      folder: The folder of the run.

    Attributes:
      graphdef, params, rest: The model; `params` are tuned.
      problems: The problems to train on.
      prompts: Their questions as arrays.
      stop: Tokens that end a reply.
    """

    def __init__(
        self,
        settings: Any,
        model: LanguageModel,
        source: Path,
        name: str | Problems,
        pool: RewardPool,
        folder: Path,
    ) -> None:
        if settings.tune == "lora":
            rngs = nnx.Rngs(settings.seed)
            rank, alpha = settings.lora_rank, settings.lora_alpha
            lora.add_lora(model, rank=rank, alpha=alpha, rngs=rngs)
        tuned = lora.FILTERS[settings.tune]
        self.graphdef, self.params, self.rest = nnx.split(model, tuned, ...)
        tokenizer, render = tokenizers.load(source), conversation(source)
        self.stop = tuple(sorted(ends(source, tokenizer)))
        self.num_tokens = settings.num_tokens
        self.temperature = settings.eval_temperature

        positions = model.config.max_position_embeddings
        room = positions - settings.num_tokens
        if room < 1:
            raise ValueError(
                f"--tokens must be below the model's {positions} positions, to leave "
                f"room for a prompt; got {settings.num_tokens}."
            )

        def made(number: int, held_out: bool) -> tuple[Any, problems.Prompts]:
            if isinstance(name, str):
                found = problems.make(name, number, settings.seed, held_out=held_out)
            else:
                found = name[held_out]
            made = [
                p._replace(question=settings.instruction + p.question) for p in found
            ]
            turns = [[*p.before, {"role": "user", "content": p.question}] for p in made]
            plain = render(turns)
            texts = ["\n".join(turn["content"] for turn in chat) for chat in turns]
            encoded = problems.encode(
                tokenizer,
                plain,
                special=plain == texts,  # A template has special tokens itself.
                vocab_size=model.config.vocab_size,
                most=room,
            )
            return made, jax.tree.map(jnp.asarray, encoded)

        self.problems, self.prompts = made(settings.num_problems, False)
        self.held_out, self.held_out_prompts = made(settings.eval_problems, True)
        resumed = steps_done(folder)
        self.log = Log(folder, tokenizer, pool, resumed=resumed)
        if not resumed:
            self.measure(self.params, 0)

    def model(self, params: Any) -> LanguageModel:
        """The model with other parameters."""
        return nnx.merge(self.graphdef, params, self.rest)

    def losses(self, which: np.ndarray, replies: Replies) -> np.ndarray:
        """The negative rewards of replies to some problems, and a line in the log.

        Args:
          which: The problems, [..., B]; members of a population have the same ones.
          replies: [..., B].
        """
        members = np.asarray(replies.tokens).shape[:-2]
        rows = np.broadcast_to(which, (*members, np.shape(which)[-1]))
        return -self.log.step(self.problems, rows, Replies(*map(np.asarray, replies)))

    def measure(self, params: Any, step: int) -> None:
        """Logs the rewards of replies to held-out problems, once."""
        if step in self.log.measured:
            return
        args = params, self.rest, self.held_out_prompts
        drawing = jnp.uint32(step), self.temperature
        found = _replies(self.graphdef, *args, *drawing, self.num_tokens, self.stop)
        rows = np.arange(len(self.held_out))
        self.log.held_out(self.held_out, rows, Replies(*map(np.asarray, found)), step)


@functools.partial(
    jax.jit, static_argnames=("graphdef", "temperature", "num_tokens", "stop")
)
def _replies(
    graphdef: Any,
    params: Any,
    rest: Any,
    prompts: Any,
    seed: jax.Array,
    temperature: float,
    num_tokens: int,
    stop: Any,
) -> Replies:
    model, key = nnx.merge(graphdef, params, rest), jax.random.key(seed)
    return generate_tokens(model, *prompts, num_tokens, key, temperature, stop=stop)


def steps_done(folder: Path) -> int:
    """The number of steps in a run's journal."""
    path = folder / JOURNAL
    return len(zo.runs.History.from_journal(path).step) if path.exists() else 0
