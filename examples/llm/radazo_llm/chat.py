"""The job of `radazo-llm chat`: texts of a model, after a prompt or in a chat."""

import sys
from pathlib import Path
from typing import Any

from flax import nnx

from radazo_llm.formats import chat_template, find, tokenizers, weights
from radazo_llm.models.generate import generate, written


def chat(
    *,
    model: str,
    adapters: Path | None,
    prompt: str | None,
    dtype: str | None,
    seed: int,
    **options: Any,
) -> None:
    """Continues a prompt or, without one, each line of the standard input.

    An empty line ends the chat. A model with a chat template gets the turns in it;
    another gets plain text.

    Args:
      model: A name that `find.model` takes.
      adapters: The folder of adapters that `weights.save_adapters` or peft wrote.
      prompt: The text to continue.
      dtype: The dtype of the model; by default, of the present backend.
      seed: The seed of drawn tokens.
      options: Options of `generate`.

    Raises:
      ValueError: If the model, the template or an option is not valid.
    """
    folder = find.model(model)
    weights.read_config(folder)  # Its errors come before errors of larger files.
    tokenizer = tokenizers.load(folder)
    stop = chat_template.ends(folder, tokenizer)
    render = chat_template.conversation(folder)
    loaded = weights.load(folder, dtype=dtype or weights.default_dtype())
    if adapters is not None:
        weights.load_adapters(loaded, adapters)
    keys = nnx.Rngs(seed)

    def say(text: str, special: bool) -> str:
        tokens = tokenizer.encode(text, add_special_tokens=special).ids
        told = generate(loaded, tokens, key=keys(), stop=stop, **options)
        parts = []
        for part in written(tokenizer, told):
            parts.append(part)
            print(part, end="", flush=True)
        print()
        return "".join(parts)

    if prompt is not None:
        print(prompt, end="", flush=True)
        say(prompt, True)
        return
    turns: list[dict[str, str]] = []
    for line in sys.stdin:
        if not line.strip():
            return
        turns.append({"role": "user", "content": line.strip()})
        [text] = render([turns])
        # A template puts special tokens itself.
        plain = text == "\n".join(turn["content"] for turn in turns)
        turns.append({"role": "assistant", "content": say(text, plain).strip()})
