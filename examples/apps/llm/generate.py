"""Texts of a model: after a prompt, or in a chat.

    python -m examples.apps.llm.generate --model FOLDER --prompt "It was"
    python -m examples.apps.llm.generate --model FOLDER --adapters FOLDER

Without `--prompt`, each line of the standard input is a turn of a chat, and an empty
one ends it. A model with a chat template gets the turns in it; another gets plain text.
"""

import argparse
import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jinja2.exceptions import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from examples.apps.llm import data, gguf_file, gguf_model, gguf_tokenizer, weights
from examples.apps.llm.attention import Cache
from examples.apps.llm.main import DTYPES, find_model
from examples.apps.llm.model import LanguageModel
from examples.common.cli import Parser
from examples.common.files import json_object, model_file

_MULTIPLE = 64  # Of tokens, so that prompts of many lengths share a program.


def generate(
    model: LanguageModel,
    tokens: Sequence[int],
    *,
    max_tokens: int = 64,
    temperature: float = 0.0,
    key: jax.Array,
    stop: Sequence[int] = (),
) -> Iterator[int]:
    """The tokens that follow, one by one.

    Args:
      model: A model of any family, with adapters or a soft prompt or without.
      tokens: The tokens to continue.
      max_tokens: The largest number; fewer if the model has no positions for them.
      temperature: 0 takes the likeliest token; above, tokens are drawn with logits
        divided by it.
      key: The key of the draws, consumed.
      stop: Tokens that end it, and are not returned.

    Raises:
      ValueError: If there is no token to continue, or no position for another, or
        the model has no embedding for a token.
    """
    longest = model.config.max_position_embeddings
    behind = 0 if model.prompt is None else len(model.prompt[...])
    number = len(tokens)
    if not 0 < number < longest - behind:
        raise ValueError(
            f"tokens must be from 1 to {longest - behind - 1}; got {number}."
        )
    if max(tokens) >= model.config.vocab_size:
        raise ValueError(
            "tokens must have ids below the model's vocab_size "
            f"({model.config.vocab_size}); got {max(tokens)}."
        )
    graphdef, state = nnx.split(model)
    total = min(behind + number + max_tokens, longest)
    padded = np.zeros((1, min(_rounded(number), longest - behind)), np.int32)
    padded[0, :number] = tokens
    room = max(_rounded(total), behind + padded.shape[1])
    step = functools.partial(_step, graphdef, state)
    cache, heat = model.empty_cache(1, room), jnp.float32(temperature)
    at, last = 0, behind + number - 1
    for i in range(total - behind - number):
        token, cache = step(
            padded, at, last - at, cache, heat, jax.random.fold_in(key, i), at == 0
        )
        if int(token) in stop:
            return
        yield int(token)
        at = last = last + 1
        padded = token.reshape(1, 1)


def _rounded(number: int) -> int:
    return -(-number // _MULTIPLE) * _MULTIPLE


@functools.partial(jax.jit, static_argnames="first", donate_argnames="cache")
def _step(
    graphdef: Any,
    state: Any,
    tokens: jax.Array,
    start: jax.Array,
    last: jax.Array,
    cache: Cache,
    temperature: jax.Array,
    key: jax.Array,
    first: bool,
) -> tuple[jax.Array, Cache]:
    """The token after number `last` of these."""
    model = nnx.merge(graphdef, state)
    x = model.embed(tokens)
    # Over the padding of the prompt.
    cache = dataclasses.replace(cache, slot=jnp.asarray(start, jnp.int32))
    x, cache = model.run(model.after_prompt(x) if first else x, start, cache)
    logits = model.logits(jnp.take(x[0], last, axis=0))
    drawn = jax.random.categorical(key, logits / jnp.maximum(temperature, 1e-6))
    return jnp.where(temperature > 0, drawn, logits.argmax()).astype(jnp.int32), cache


# --- Text -------------------------------------------------------------------------


def written(tokenizer: Tokenizer, tokens: Iterator[int]) -> Iterator[str]:
    """The text of tokens, as soon as it is certain."""
    stream = DecodeStream(skip_special_tokens=True)
    for token in tokens:
        yield stream.step(tokenizer, token) or ""


def ends(folder: Path, tokenizer: Tokenizer) -> set[int]:
    """The tokens that end a text."""
    if gguf_file.is_gguf(folder):
        return set(gguf_model.config(gguf_model.read(folder))["eos_token_id"])
    found = {tokenizer.token_to_id(data.BOS)}  # OPT's, which is its end as well.
    for name in ("config.json", "generation_config.json"):
        path = model_file(folder, name)
        if path.is_file():
            ids = json_object(path).get("eos_token_id")
            ids = ids if isinstance(ids, list) else [] if ids is None else [ids]
            if any(type(token) is not int for token in ids):
                raise ValueError(f"{path}: eos_token_id must be ids; got {ids!r:.80}.")
            found |= set(ids)
    return found - {None}


def conversation(folder: Path) -> Callable[[list[dict[str, str]]], str]:
    """Returns a function that makes one text of the turns of a chat.

    The template comes with the model, so it is rendered in a sandbox.

    Raises:
      ValueError: If the template cannot be rendered.
    """
    path = model_file(folder, "chat_template.jinja")
    config = model_file(folder, "tokenizer_config.json")
    if gguf_file.is_gguf(folder):
        names = gguf_tokenizer.config(gguf_model.read(folder))
    else:
        names = json_object(config) if config.is_file() else {}
    source = path.read_text("utf-8") if path.is_file() else names.get("chat_template")
    if not isinstance(source, str):
        return lambda turns: "\n".join(turn["content"] for turn in turns)
    special = {
        name: token.get("content") if isinstance(token, dict) else token
        for name in ("bos_token", "eos_token")
        if (token := names.get(name)) is not None
    }

    def refuse(message: str) -> None:
        raise TemplateError(message)

    def render(turns: list[dict[str, str]]) -> str:
        sandbox = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        sandbox.globals["raise_exception"] = refuse
        try:
            return sandbox.from_string(source).render(
                messages=turns, add_generation_prompt=True, **special
            )
        except Exception as error:  # A template can divide by zero, say.
            raise ValueError(
                f"{folder}: the chat template cannot be rendered: "
                f"{' '.join(str(error).split()):.200}"
            ) from None

    return render


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(
        prog="examples.apps.llm.generate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--model", required=True, help="a folder, or a name in the local cache")
    add("--adapters", type=Path, help="what examples.apps.llm.main or peft wrote")
    add("--prompt", help="what to go on from; a chat without")
    add("--max-tokens", type=int, default=64)
    add("--temperature", type=float, default=0.0, help="0: the likeliest token")
    add("--seed", type=int, default=0)
    add("--dtype", choices=DTYPES, default=DTYPES[0])
    options = parser.parse_args(argv)
    try:
        folder = find_model(options.model)
        weights.read_config(folder)  # Its errors come before errors of larger files.
        tokenizer = data.load_tokenizer(folder)
        stop, render = ends(folder, tokenizer), conversation(folder)
        model = weights.load(folder, dtype=options.dtype)
        if options.adapters is not None:
            weights.load_adapters(model, options.adapters)
        keys = nnx.Rngs(options.seed)

        def say(text: str, special: bool) -> str:
            tokens = tokenizer.encode(text, add_special_tokens=special).ids
            told = generate(
                model,
                tokens,
                max_tokens=options.max_tokens,
                temperature=options.temperature,
                key=keys(),
                stop=stop,
            )
            parts = []
            for part in written(tokenizer, told):
                parts.append(part)
                print(part, end="", flush=True)
            print()
            return "".join(parts)

        if options.prompt is not None:
            print(options.prompt, end="", flush=True)
            say(options.prompt, True)
            return
        turns: list[dict[str, str]] = []
        for line in sys.stdin:
            if not line.strip():
                return
            turns.append({"role": "user", "content": line.strip()})
            text = render(turns)
            # A template puts special tokens itself.
            plain = text == "\n".join(turn["content"] for turn in turns)
            turns.append({"role": "assistant", "content": say(text, plain).strip()})
    except (ValueError, OSError) as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        parser.exit(130, "\n")


if __name__ == "__main__":
    main()
