"""The job of `radazo-llm chat`: texts of a model, after a prompt or in a chat."""

import sys
from pathlib import Path

import jax
import numpy as np
from flax import nnx

from radazo_llm.formats import adapters as of_peft
from radazo_llm.formats import chat_template, config, find, load, tokenizers
from radazo_llm.models import decode
from radazo_llm.models.model import LanguageModel

_MULTIPLE = 64  # Of tokens, so that prompts of many lengths share a program.


def chat(
    *,
    model: str,
    adapters: Path | None,
    prompt: str | None,
    system: str | None,
    dtype: str | None,
    seed: int,
    max_tokens: int,
    temperature: float,
) -> None:
    """Continues a prompt or, without one, each line of the standard input.

    An empty line ends the chat. A model with a chat template gets the turns in it;
    another gets plain text.

    Args:
      model: A name that `find.model` takes.
      adapters: The folder of adapters that `tune` or peft wrote.
      prompt: The text to continue.
      system: The first turn of a chat, which says how to reply.
      dtype: The dtype of the model; by default, of the present backend.
      seed: The seed of drawn tokens.
      max_tokens: The largest number of tokens of a reply.
      temperature: 0 takes the likeliest token; above, tokens are drawn.

    Raises:
      ValueError: If the model, the template or an option is not valid.
    """
    folder = find.model(model)
    config.read(folder)  # Its errors come before errors of larger files.
    tokenizer = tokenizers.load(folder)
    stop = tuple(sorted(chat_template.ends(folder, tokenizer)))
    template = chat_template.load(folder)
    loaded = load.load(folder, dtype=dtype or config.default_dtype())
    if adapters is not None:
        of_peft.load(loaded, adapters)
    keys = nnx.Rngs(seed)

    def say(text: str, special: bool) -> str:
        tokens = tokenizer.encode(text, add_special_tokens=special).ids
        ids = replied(loaded, tokens, max_tokens, keys(), temperature, stop)
        told = tokenizer.decode(ids)
        print(told, flush=True)
        return told

    if prompt is not None:
        print(prompt, end="", flush=True)
        say(prompt, True)
        return
    turns = [] if system is None else [{"role": "system", "content": system}]
    for line in sys.stdin:
        if not line.strip():
            return
        turns.append({"role": "user", "content": line.strip()})
        [(text, _)] = template.render([chat_template.Chat(turns)])
        plain = template.source is None  # A template puts special tokens itself.
        turns.append({"role": "assistant", "content": say(text, plain).strip()})


def replied(
    model: LanguageModel,
    tokens: list[int],
    number: int,
    key: jax.Array,
    temperature: float,
    stop: tuple[int, ...],
) -> list[int]:
    """The tokens of a reply to some tokens, fewer if the model has no positions."""
    room = model.config.max_position_embeddings
    rounded = -(-len(tokens) // _MULTIPLE) * _MULTIPLE
    width = max(len(tokens), min(rounded, room - number))  # Padding takes positions.
    if not 0 < len(tokens) < room or max(tokens) >= model.config.vocab_size:
        raise ValueError(
            f"The text must have from 1 to {room - 1} tokens with embeddings; got "
            f"{len(tokens)}."
        )
    padded = np.zeros((1, width), np.int32)
    padded[0, : len(tokens)] = tokens
    graphdef, state = nnx.split(model)
    found = decode.replies_of(
        *(graphdef, (state,), padded, np.array([len(tokens)], np.int32), key),
        num_tokens=min(number, room - width),
        temperature=temperature,
        stop=stop,
    )
    return np.asarray(found.tokens)[0, : int(found.lengths[0])].tolist()
