"""SST-2 and COPA as MeZO prompts them, tokenized into arrays of one shape.

An example is a prompt and the candidates that may follow it. A model chooses the one
that it gives the higher score: the sum of the log-probabilities of its tokens, or their
mean. Prompts, candidates and what counts as a candidate's tokens are as in MeZO's code
(Malladi et al., 2023).

The files are those that GLUE and SuperGLUE publish: `train.tsv` and `dev.tsv` of SST-2,
`train.jsonl` and `val.jsonl` of COPA. An error names the file and the line.
"""

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer

from radazo_llm.formats import (
    tokenizers,
    weights,
)
from radazo_llm.tune import reviews

_MULTIPLE = 8  # Sequences are padded to a multiple of it, which suits a TPU's tiles.
_CONJUNCTIONS = {"cause": "because", "effect": "so"}


class Example(NamedTuple):
    prompt: str
    candidates: tuple[str, ...]  # What may follow the prompt.
    label: int  # Which of them does.
    place: str = ""  # The file and the line, if messages name them.


class Task(NamedTuple):
    read: Callable[[Path], list[Example]]
    train: str  # Names of files.
    dev: str
    # As MeZO trains: "classification" is the cross-entropy over the scores of the
    # candidates, "language_model" the language model's loss of the right one.
    objective: str
    test: str | None = None  # A split that only the end of a run is measured on.


class Splits(NamedTuple):
    """The examples of a run.

    Attributes:
      batches: Those to train on, to evaluate on and, if there are any, of the test.
      summary: The number of examples of each, in one line.
    """

    batches: tuple["Batch", ...]
    summary: str


class Batch(NamedTuple):
    """Examples as arrays, with C candidates of length L.

    Tokens are padded on the right, targets likewise. If the candidates of each
    example differ in nothing that is fed to the model (they are single tokens, say),
    they share one sequence, and the second axis of `tokens` is 1.
    """

    tokens: np.ndarray  # int32 [B, C or 1, T]
    positions: np.ndarray  # int32 [B, C, L]: of the tokens that predict the targets.
    targets: np.ndarray  # int32 [B, C, L]: the tokens of the candidates.
    mask: np.ndarray  # float32 [B, C, L]: 1 for a target, 0 for padding.
    label: np.ndarray  # int32 [B]


def sst2(path: Path) -> list[Example]:
    """Reads GLUE's `train.tsv` or `dev.tsv`: is a review's sentence a positive one?"""
    candidates = (" terrible", " great")
    return [
        Example(f"{sentence} It was", candidates, label)
        for sentence, label in sst2_rows(path)
    ]


def movie_reviews(path: Path) -> list[Example]:
    """Reads a split of movie reviews, with the prompt of SST-2.

    Args:
      path: The archive (see `reviews.py`), followed by the split: train, dev or test.
    """
    return [
        Example(f"{sentence} It was", (" terrible", " great"), label)
        for sentence, label in reviews.split(path.parent, path.name)
    ]


def sst2_rows(path: Path) -> list[tuple[str, int]]:
    """The sentences and labels of a file of SST-2."""
    (where, header), *lines = _lines(path)
    if header != "sentence\tlabel" or not lines:
        raise ValueError(
            f"{where}: must be the header sentence, a tab and label, with examples "
            f"after it, as in train.tsv and dev.tsv; got {header!r:.80}"
        )
    rows = []
    for where, line in lines:
        sentence, *label = (column.strip() for column in line.split("\t"))
        if not sentence or label not in (["0"], ["1"]):
            raise ValueError(
                f"{where}: must be a sentence, a tab, and the label 0 or 1; got "
                f"{line!r:.80}"
            )
        rows.append((sentence, int(label[0])))
    return rows


def copa(path: Path) -> list[Example]:
    """Reads SuperGLUE's `train.jsonl` or `val.jsonl`: which is the cause or effect?"""
    return [_copa_example(where, line) for where, line in _lines(path)]


def _copa_example(where: str, line: str) -> Example:
    try:
        record = json.loads(line)
        premise, *choices = (
            record[name].strip() for name in ("premise", "choice1", "choice2")
        )
        conjunction, label = _CONJUNCTIONS[record["question"]], record["label"]
        valid = premise and all(choices) and type(label) is int and label in (0, 1)
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError):
        valid = False
    if not valid:
        raise ValueError(
            f"{where}: must be a JSON object with the texts premise, choice1 and "
            "choice2, the question cause or effect, and the label 0 or 1, as in "
            f"train.jsonl and val.jsonl; got {line!r:.80}"
        )
    prompt = f"{premise.removesuffix('.')} {conjunction}"
    return Example(prompt, tuple(map(_continuation, choices)), label)


def _continuation(choice: str) -> str:
    """The choice as a continuation in the middle of a sentence."""
    first, *rest = choice.split(" ")
    return " " + " ".join([first if first == "I" else first.lower(), *rest])


def _lines(path: Path) -> list[tuple[str, str]]:
    """The lines of a text file, each with its place for messages."""
    # Not `splitlines`, which breaks at characters that a sentence may hold.
    content = path.read_bytes().removesuffix(b"\n").split(b"\n")
    result = []
    for number, line in enumerate(content, 1):
        where = f"{path}:{number}"
        try:
            result.append((where, line.decode().removesuffix("\r")))
        except UnicodeDecodeError as error:
            raise ValueError(f"{where}: must be UTF-8: {error.reason}") from None
    return result


TASKS = {
    "sst2": Task(sst2, "train.tsv", "dev.tsv", "classification"),
    "copa": Task(copa, "train.jsonl", "val.jsonl", "language_model"),
    "reviews": Task(movie_reviews, "train", "dev", "classification", test="test"),
}


def encode(
    tokenizer: Tokenizer,
    examples: Sequence[Example],
    *,
    max_length: int,
    vocab_size: int,
    special: bool = True,
) -> Batch:
    """Makes one batch of all examples.

    The last token of a candidate is predicted and predicts nothing, and so it is not
    among `tokens`. The tokens of a candidate are the tokens by which prompt and
    candidate together are longer than the prompt.

    Args:
      tokenizer: From `tokenizers.load`.
      examples: With equally many candidates each.
      max_length: The number of tokens that the model accepts: its context without a
        soft prompt. Sequences are as long as the longest, rounded up to a
        multiple of 8 if that fits.
      vocab_size: The number of tokens with embeddings.
      special: Whether the tokenizer adds its special tokens.

    Raises:
      ValueError: If an example is too long, a candidate has no tokens, or the model no
        embedding for a token.
    """
    number = len(examples[0].candidates)
    texts = [
        example.prompt + text
        for example in examples
        for text in ("", *example.candidates)
    ]
    encoded = tokenizer.encode_batch(texts, add_special_tokens=special)
    prompts = [[len(found.ids)] for found in encoded[:: number + 1]]
    rows = [
        [found.ids for found in encoded[i + 1 : i + 1 + number]]
        for i in range(0, len(encoded), number + 1)
    ]
    largest = max((max(ids, default=0) for row in rows for ids in row), default=0)
    if largest >= vocab_size:
        raise ValueError(
            f"tokenizer must have ids below the model's vocab_size ({vocab_size}); got "
            f"{largest}"
        )
    ends = np.array([[len(ids) - 1 for ids in row] for row in rows])
    sizes = ends + 1 - np.array(prompts)
    for i, example in enumerate(examples):
        if sizes[i].min() < 1 or ends[i].max() > max_length:
            where = f"{example.place}: " if example.place else ""
            raise ValueError(
                f"{where}example {i} ({example.prompt[:40]!r}...) must have at most "
                f"{max_length} tokens, and some for each candidate; got "
                f"{ends[i].max()}, and {sizes[i].tolist()} for the candidates. Shorten "
                "it, or leave out long ones (--skip-long)."
            )
    longest = ends.max()
    length = min(max_length, -(-longest // _MULTIPLE) * _MULTIPLE)
    shared = all(ids[:-1] == row[0][:-1] for row in rows for ids in row)
    pad = tokenizer.token_to_id(tokenizers.PAD) or 0  # Any does: nothing looks at it.
    shape = *sizes.shape, sizes.max()
    tokens = np.full((shape[0], 1 if shared else shape[1], length), pad, np.int32)
    positions = np.zeros(shape, np.int32)
    targets = np.full(shape, pad, np.int32)
    mask = np.zeros(shape, np.float32)
    for (b, c), size in np.ndenumerate(sizes):
        ids, end = rows[b][c], ends[b, c]
        tokens[b, 0 if shared else c, :end] = ids[:-1]
        positions[b, c, :size] = np.arange(end - size, end)
        targets[b, c, :size] = ids[-size:]
        mask[b, c, :size] = 1
    label = np.array([example.label for example in examples], np.int32)
    return Batch(tokens, positions, targets, mask, label)


def batch_at(data: Batch, seed: int, step: int, batch_size: int) -> Batch:
    """Returns the batch of a step, if all steps have batches of one size.

    See `examples_at`: nothing but the arguments decides it.
    """
    return examples_at(data, seed, step * batch_size, batch_size)


def examples_at(data: Batch, seed: int, first: int, number: int) -> Batch:
    """Returns the next `number` examples from a place in the order of a run.

    The examples come in one endless row, epoch after epoch, each in an order of its
    own. So all are seen equally often, and a run that resumes continues as if it had
    not stopped.
    """
    size = len(data.label)
    place = np.arange(first, first + number)
    epochs, within = np.divmod(place, size)
    orders = {
        epoch: np.random.default_rng((seed, epoch)).permutation(size)
        for epoch in np.unique(epochs)
    }
    rows = [orders[epoch][i] for epoch, i in zip(epochs, within, strict=True)]
    return Batch(*(values[rows] for values in data))


@dataclasses.dataclass(frozen=True)
class TaskFiles:
    """The files of a known task: a source of examples, as `splits.Own`."""

    name: str  # In `TASKS`.
    folder: Path

    @property
    def eval_examples(self) -> None:
        """The number that an evaluation measures by default: all of them."""
        return None

    def objective(self) -> str:
        """The objective that MeZO has for the task."""
        return TASKS[self.name].objective

    def absolute(self) -> "TaskFiles":
        """The same files, from any folder."""
        return dataclasses.replace(self, folder=self.folder.resolve())

    def read(self, model: Path, *limits: int | None) -> Splits:
        """The examples, as `read` returns them."""
        task = TASKS[self.name]
        found = read(task, self.folder, model, *limits)
        sizes = [len(split.label) for split in found]
        return Splits(
            tuple(found),
            f"{task.train}: {sizes[0]} examples; {task.dev}: {sizes[1]}; at most "
            f"{found[0].tokens.shape[-1]} tokens.",
        )


def read(
    task: Task,
    folder: Path,
    model: Path,
    prompt_length: int = 0,
    train_examples: int | None = None,
    eval_examples: int | None = None,
) -> list[Batch]:
    """The examples to train on and those to evaluate, encoded for a model.

    At random, the same ones for all runs. At most 1000 and 500 by default, as in MeZO;
    if the task has a test split, all of it.
    """
    config = weights.read_config(model)
    length = config.max_position_embeddings - prompt_length
    tokenizer = tokenizers.load(model)
    result = []
    limits = {task.train: train_examples or 1000, task.dev: eval_examples or 500}
    if task.test is not None:
        limits[task.test] = None
    for name, limit in limits.items():
        examples = task.read(folder / name)
        chosen = np.random.default_rng(0).permutation(len(examples))[:limit]
        examples = [examples[i] for i in sorted(chosen)]
        batch = encode(
            tokenizer, examples, max_length=length, vocab_size=config.vocab_size
        )
        result.append(batch)
    return result
