"""SST-2 and COPA as MeZO prompts them, tokenized into arrays of one shape.

An example is a prompt and the candidates that may follow it. A model chooses the one
that it gives the higher score: the sum of the log-probabilities of its tokens, or their
mean. Prompts, candidates and what counts as a candidate's tokens are as in MeZO's code
(Malladi et al., 2023).

The files are those that GLUE and SuperGLUE publish: `train.tsv` and `dev.tsv` of SST-2,
`train.jsonl` and `val.jsonl` of COPA. What is wrong with one is said in one line with
its name and the number of the line.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing

BOS = "</s>"  # With which every sequence starts, in OPT.
PAD = "<pad>"
_MULTIPLE = 8  # Of which sequences are as long as one, for the sake of tiles.
_CONJUNCTIONS = {"cause": "because", "effect": "so"}


class Example(NamedTuple):
    prompt: str
    candidates: tuple[str, ...]  # What may follow the prompt.
    label: int  # Which of them does.


class Task(NamedTuple):
    read: Callable[[Path], list[Example]]
    train: str  # Names of files.
    dev: str
    # As MeZO trains: by the cross-entropy over the scores of the candidates, or by the
    # language model's loss of the right one.
    train_as_classification: bool


class Batch(NamedTuple):
    """Examples as arrays, where C is the number of candidates and L their length.

    Tokens are padded on the right, targets likewise. Where the candidates of each
    example differ in nothing that is fed to the model (they are single tokens, say),
    they share one sequence, and the second axis of `tokens` is 1.
    """

    tokens: np.ndarray  # int32 [B, C or 1, T]
    positions: np.ndarray  # int32 [B, C, L]: of the tokens that predict the targets.
    targets: np.ndarray  # int32 [B, C, L]: the tokens of the candidates.
    mask: np.ndarray  # float32 [B, C, L]: 1 where there is a target, 0 for padding.
    label: np.ndarray  # int32 [B]


def sst2(path: Path) -> list[Example]:
    """Reads GLUE's `train.tsv` or `dev.tsv`: is a review's sentence a positive one?"""
    candidates = (" terrible", " great")
    return [
        Example(f"{sentence} It was", candidates, label)
        for sentence, label in sst2_rows(path)
    ]


def sst2_rows(path: Path) -> list[tuple[str, int]]:
    """The sentences and labels of a file of SST-2."""
    (_, header), *lines = _lines(path)
    columns = header.split("\t")
    if columns == ["index", "sentence"]:
        raise ValueError(f"{path}:1: SST-2's test split has no labels; use dev.tsv")
    if columns != ["sentence", "label"]:
        raise ValueError(
            f"{path}:1: the header must be 'sentence' and 'label', separated by a tab; "
            f"got {header!r}"
        )
    if not lines:
        raise ValueError(f"{path}: has a header and no examples")
    return [_sst2_row(where, line) for where, line in lines]


def _sst2_row(where: str, line: str) -> tuple[str, int]:
    columns = line.split("\t")
    if len(columns) != 2:
        raise ValueError(
            f"{where}: must have 2 columns, separated by a tab; got {len(columns)}"
        )
    sentence, label = (column.strip() for column in columns)
    if not sentence:
        raise ValueError(f"{where}: the sentence is empty")
    if label == "-1":
        raise ValueError(f"{where}: the example has no label (-1); use a labeled split")
    if label not in ("0", "1"):
        raise ValueError(f"{where}: the label must be 0 or 1; got {label!r}")
    return sentence, int(label)


def copa(path: Path) -> list[Example]:
    """Reads SuperGLUE's `train.jsonl` or `val.jsonl`: which is the cause or effect?"""
    return [_copa_example(where, line) for where, line in _lines(path)]


def _copa_example(where: str, line: str) -> Example:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{where}: broken JSON: {error.msg}, column {error.colno}"
        ) from None
    if not isinstance(record, dict):
        raise ValueError(f"{where}: must be a JSON object; got {line[:40]!r}")
    premise = _field(where, record, "premise").removesuffix(".")
    question = _field(where, record, "question")
    if question not in _CONJUNCTIONS:
        raise ValueError(
            f"{where}: 'question' must be 'cause' or 'effect'; got {question!r}"
        )
    choices = [_field(where, record, name) for name in ("choice1", "choice2")]
    label = record.get("label", -1)
    if label == -1:
        raise ValueError(
            f"{where}: the example has no label, as in the test split; use val.jsonl"
        )
    if type(label) is not int or label not in (0, 1):
        raise ValueError(f"{where}: 'label' must be 0 or 1; got {label!r}")
    prompt = f"{premise} {_CONJUNCTIONS[question]}"
    return Example(prompt, tuple(map(_continuation, choices)), label)


def _field(where: str, record: dict[str, Any], name: str) -> str:
    if name not in record:
        raise ValueError(f"{where}: the field {name!r} is missing")
    value = record[name]
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{where}: {name!r} must be a text; got {value!r}")
    return value.strip()


def _continuation(choice: str) -> str:
    """The choice as it goes on in the middle of a sentence."""
    first, *rest = choice.split(" ")
    return " " + " ".join([first if first == "I" else first.lower(), *rest])


def _lines(path: Path) -> list[tuple[str, str]]:
    """The lines of a text file, each with its place for messages."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise FileNotFoundError(f"{path}: no such file") from None
    if not content.strip():
        raise ValueError(f"{path}: the file is empty")
    result = []
    # Not `splitlines`, which breaks at characters that a sentence may hold.
    for number, line in enumerate(content.removesuffix(b"\n").split(b"\n"), 1):
        where = f"{path}:{number}"
        try:
            result.append((where, line.decode().removesuffix("\r")))
        except UnicodeDecodeError as error:
            raise ValueError(f"{where}: not UTF-8: {error.reason}") from None
    return result


TASKS = {
    "sst2": Task(sst2, "train.tsv", "dev.tsv", train_as_classification=True),
    "copa": Task(copa, "train.jsonl", "val.jsonl", train_as_classification=False),
}


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a checkpoint, which puts `</s>` first, as OPT's does.

    Args:
      folder: Holds `tokenizer.json`, or `vocab.json` and `merges.txt`.
    """
    whole, vocab, merges = (
        folder / name for name in ("tokenizer.json", "vocab.json", "merges.txt")
    )
    if whole.is_file():
        tokenizer = _open(Tokenizer.from_file, whole)
        tokenizer.no_truncation()  # The file may have either switched on.
        tokenizer.no_padding()
    elif vocab.is_file() and merges.is_file():
        tokenizer = byte_level(_open(models.BPE.from_file, vocab, merges))
    else:
        raise FileNotFoundError(
            f"{folder}: has neither tokenizer.json nor vocab.json with merges.txt"
        )
    return start_with_bos(tokenizer, folder)


def _open(read: Callable[..., Any], *paths: Path) -> Any:
    try:
        return read(*map(str, paths))
    except Exception as error:  # The library raises this very class.
        names, reason = " and ".join(map(str, paths)), " ".join(str(error).split())
        raise ValueError(f"{names}: not a tokenizer: {reason}") from None


def byte_level(model: models.BPE) -> Tokenizer:
    """GPT-2's way to split text, which is OPT's too."""
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def start_with_bos(tokenizer: Tokenizer, source: Path | str) -> Tokenizer:
    """Makes `</s>` and padding special, and puts `</s>` first and nothing last."""
    for name in (BOS, PAD):
        if tokenizer.token_to_id(name) is None:
            raise ValueError(f"{source}: lacks the token {name!r}, which OPT has")
    tokenizer.add_special_tokens([BOS, PAD])
    bos = (BOS, tokenizer.token_to_id(BOS))
    tokenizer.post_processor = TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[bos]
    )
    return tokenizer


class _Sequence(NamedTuple):
    tokens: list[int]  # Of the prompt and the candidate.
    size: int  # How many of them, at the end, are the candidate's.


def encode(
    tokenizer: Tokenizer,
    examples: Sequence[Example],
    *,
    max_length: int,
    length: int | None = None,
    truncate: bool = False,
) -> Batch:
    """Makes one batch of all examples.

    The last token of a candidate is predicted and predicts nothing, and so it is not
    among `tokens`. The tokens of a candidate are those by which prompt and candidate
    together are longer than the prompt.

    Args:
      tokenizer: From `load_tokenizer`.
      examples: With equally many candidates each.
      max_length: How many tokens the model can take: its context, less what a soft
        prompt takes of it.
      length: How long to make the sequences; by default, as long as the longest,
        rounded up to a multiple of 8.
      truncate: Whether to cut what is too long, as MeZO does: it drops the start of
        the prompt, after `</s>`. By default, that is an error.

    Raises:
      ValueError: If an example is too long, or a candidate has no tokens.
    """
    if not examples:
        raise ValueError("there are no examples to encode")
    limit = max_length if length is None else length
    if limit > max_length:
        raise ValueError(
            f"length must be at most max_length={max_length}; got {length}"
        )
    rows = [
        _sequences(tokenizer, index, example, limit, truncate)
        for index, example in enumerate(examples)
    ]
    longest = max(len(s.tokens) - 1 for row in rows for s in row)
    padded = length or min(max_length, -(-longest // _MULTIPLE) * _MULTIPLE)
    return _batch(rows, padded, tokenizer.token_to_id(PAD), examples)


def _sequences(
    tokenizer: Tokenizer, index: int, example: Example, limit: int, truncate: bool
) -> list[_Sequence]:
    prompt = len(tokenizer.encode(example.prompt).ids)
    result = []
    for candidate in example.candidates:
        tokens = tokenizer.encode(example.prompt + candidate).ids
        size = len(tokens) - prompt
        name = f"example {index} ({example.prompt[:40]!r}...)"
        if size < 1:
            raise ValueError(f"{name}: the candidate {candidate!r} has no tokens")
        excess = len(tokens) - 1 - limit
        if excess > 0 and (not truncate or excess >= prompt):
            raise ValueError(
                f"{name}: has {len(tokens) - 1} tokens, where at most {limit} fit"
            )
        result.append(_Sequence(tokens[:1] + tokens[1 + max(excess, 0) :], size))
    return result


def _batch(
    rows: list[list[_Sequence]], length: int, pad: int, examples: Sequence[Example]
) -> Batch:
    shared = all(s.tokens[:-1] == row[0].tokens[:-1] for row in rows for s in row)
    shape = len(rows), len(rows[0]), max(s.size for row in rows for s in row)
    tokens = np.full((shape[0], 1 if shared else shape[1], length), pad, np.int32)
    positions = np.zeros(shape, np.int32)
    targets = np.full(shape, pad, np.int32)
    mask = np.zeros(shape, np.float32)
    for b, row in enumerate(rows):
        for c, (ids, size) in enumerate(row):
            end = len(ids) - 1
            tokens[b, 0 if shared else c, :end] = ids[:-1]
            positions[b, c, :size] = np.arange(end - size, end)
            targets[b, c, :size] = ids[-size:]
            mask[b, c, :size] = 1
    label = np.array([example.label for example in examples], np.int32)
    return Batch(tokens, positions, targets, mask, label)


def batch_at(data: Batch, seed: int, step: int, batch_size: int) -> Batch:
    """The batch of a step, which nothing but the arguments decides.

    The examples come in one endless row, epoch after epoch, each in an order of its
    own, and each step takes the next `batch_size` of them. So all are seen equally
    often, and a run that resumes at a step goes on as if it had not stopped.
    """
    size = len(data.label)
    place = np.arange(step * batch_size, (step + 1) * batch_size)
    epochs, within = np.divmod(place, size)
    orders = {
        epoch: np.random.default_rng((seed, epoch)).permutation(size)
        for epoch in np.unique(epochs)
    }
    rows = [orders[epoch][i] for epoch, i in zip(epochs, within, strict=True)]
    return Batch(*(values[rows] for values in data))
