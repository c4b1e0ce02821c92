"""Problems to reward answers to, of a user's file."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Tokenizer

from radazo_llm.examples.forms import Item
from radazo_llm.formats.chat_template import Chat, Turn

_ARGUMENTS = ("prompts", "completions")  # Of reward functions, besides columns.


class Problem(NamedTuple):
    """A question, and the columns that reward functions get.

    Attributes:
      question: The text.
      columns: A value for each name.
      before: The turns of a conversation before the question; None for plain text.
      tools: The tools that the model may call, in a conversation.
    """

    question: str
    columns: Mapping[str, Any]
    before: tuple[Turn, ...] | None = None
    tools: Any = None

    def chat(self) -> Chat:
        """The conversation up to the reply."""
        turns = [*(self.before or ()), {"role": "user", "content": self.question}]
        return Chat(turns, self.tools)


class Prompts(NamedTuple):
    """Questions as arrays."""

    tokens: np.ndarray  # int32 [N, T], padded on the right with 0.
    lengths: np.ndarray  # int32 [N]


def of_item(item: Item) -> Problem:
    """The problem of a row: its prompt, and its columns with the right `answer`."""
    columns = {k: v for k, v in item.columns.items() if k not in _ARGUMENTS}
    if item.candidates:
        columns["answer"] = item.candidates[item.label].strip()
    if not item.turns:
        return Problem(item.prompt, columns)
    *before, last = item.turns
    if last["role"] != "user":
        raise ValueError(
            f"{item.place}: messages must have a turn of the user before the reply; "
            f"got one of the {last['role']}."
        )
    return Problem(last["content"], columns, tuple(before), item.tools)


def columns(problems: Sequence[Problem]) -> dict[str, list[Any]]:
    """The columns of several problems; None for a value that one lacks."""
    names = dict.fromkeys(name for p in problems for name in p.columns)
    return {name: [p.columns.get(name) for p in problems] for name in names}


def encode(
    tokenizer: Tokenizer,
    texts: Sequence[str],
    *,
    special: bool,
    vocab_size: int,
    most: int,
) -> Prompts:
    """Texts as tokens.

    Args:
      tokenizer: The model's.
      texts: Prompts.
      special: Whether the tokenizer adds its special tokens.
      vocab_size: The model's.
      most: The largest number of tokens that leaves room for a reply.

    Raises:
      ValueError: If a text is too long, empty, or has tokens that the model lacks.
    """
    rows = [
        e.ids for e in tokenizer.encode_batch(list(texts), add_special_tokens=special)
    ]
    for text, row in zip(texts, rows, strict=True):
        if not 1 <= len(row) <= most:
            raise ValueError(
                f"prompts must have from 1 to {most} tokens, to leave room for the "
                f"reply (--tokens); got {len(row)}: {text!r:.60}."
            )
        if max(row) >= vocab_size:
            raise ValueError(
                f"prompts must have tokens below the model's vocab_size, {vocab_size}; "
                f"got {max(row)}: {text!r:.60}."
            )
    lengths = np.array([len(row) for row in rows], np.int32)
    tokens = np.zeros((len(rows), lengths.max()), np.int32)
    for padded, row in zip(tokens, rows, strict=True):
        padded[: len(row)] = row
    return Prompts(tokens, lengths)
