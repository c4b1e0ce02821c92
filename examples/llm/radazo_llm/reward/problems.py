"""Problems to reward answers to: a user's, sums, or datasets of `reasoning-gym`."""

import random
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Tokenizer

from radazo_llm.examples.forms import Item

_ARGUMENTS = ("prompts", "completions")  # Of reward functions, besides columns.
GYM = "gym:"  # Before the name of a dataset of reasoning-gym.


class Problem(NamedTuple):
    """A question, and the columns that reward functions get.

    Attributes:
      question: The text.
      columns: A value for each name.
      before: The turns of a conversation that come before the question.
    """

    question: str
    columns: Mapping[str, Any]
    before: tuple[dict[str, str], ...] = ()


class Prompts(NamedTuple):
    """Questions as arrays."""

    tokens: np.ndarray  # int32 [N, T], padded on the right with 0.
    lengths: np.ndarray  # int32 [N]


def make(task: str, number: int, seed: int, *, held_out: bool = False) -> list[Problem]:
    """Problems of a task, the same ones for a seed.

    Args:
      task: "sum", or "gym:" and a dataset of reasoning-gym.
      number: Number of problems.
      seed: A seed.
      held_out: Whether to make problems to evaluate on. One sum in five is such a
        problem, and never among the others; of other tasks they have another seed.

    Raises:
      ValueError: If there is no such task, or reasoning-gym is not installed.
    """
    if task == "sum":
        rng = random.Random(seed)
        return [_sum(rng, held_out) for _ in range(number)]
    if not task.startswith(GYM):
        raise ValueError(f"--task must be sum, or {GYM} and a dataset; got {task!r}.")
    try:
        import reasoning_gym
    except ImportError as error:
        raise ValueError(
            f"--task {task} needs `pip install reasoning-gym` ({error})."
        ) from None
    name = task.removeprefix(GYM)
    try:
        seed = 2 * seed + held_out
        dataset = reasoning_gym.create_dataset(name, size=number, seed=seed)
    except (ValueError, KeyError) as error:
        raise ValueError(
            f"--task must name a dataset of reasoning-gym; got {name!r} "
            f"({error!s:.100})."
        ) from None
    return [
        Problem(
            entry["question"],
            {"answer": entry["answer"], "dataset": name, "entry": entry},
        )
        for entry in dataset
    ]


def _sum(rng: random.Random, held_out: bool) -> Problem:
    a = b = -1
    while a < 0 or ((a + 2 * b) % 5 == 0) != held_out:
        a, b = rng.randrange(100), rng.randrange(100)
    return Problem(f"{a}+{b}=", {"answer": str(a + b)})


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
    return Problem(last["content"], columns, tuple(before))


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
