"""Text, a tokenizer and batches for a small language model, without downloads.

The text is the prose that every Python brings along: the language reference that
`help()` shows, and the docstrings, comments and license of the standard library, whose
sources are parsed and never run. What is not prose (code, tables, doctests) is left
out.

The sentences of the shipped sentiment set's training split are part of it, for the
words that reviews use and Python's documentation does not. Their labels are not, and
neither is the prompt (" It was great"): the model gets to know words, and what they
say about a review is left to the fine-tuning. The split for evaluation is not read.
"""

import ast
import contextlib
import importlib
import re
import sysconfig
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from examples.llm import data

SENTIMENT = Path(__file__).parent / "sentiment"
SPECIAL_TOKENS = ("<s>", data.PAD, data.BOS, "<unk>")  # In the order of OPT's ids.

_REPEAT_REVIEWS = 20  # They are few beside the documentation.
# To the tokenizer alone these are so frequent that they become single tokens.
_PROMPT = " It was terrible It was great"
_REPEAT_PROMPT = 2000

# What a paragraph of prose has: so many words, and so few characters of code.
_MIN_WORDS = 6
_PLAIN = 0.93
_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests"}
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_COMMENTS = re.compile(r"(?:^[ \t]*#.*\n)+", re.MULTILINE)


def text() -> list[str]:
    """All paragraphs, each on one line: the same ones for a version of Python."""
    paragraphs = (p for block in _documentation() for p in _prose(block))
    return [*dict.fromkeys(paragraphs), *reviews() * _REPEAT_REVIEWS]


def reviews() -> list[str]:
    """The sentences of the sentiment set to train on, without their labels."""
    return [sentence for sentence, _ in data.sst2_rows(SENTIMENT / "train.tsv")]


def _prose(block: str) -> Iterator[str]:
    for part in re.split(r"\n\s*\n", block):
        words = part.split()
        line = " ".join(words)
        plain = sum(char.isalpha() or char in " ,.'-" for char in line)
        prose = len(words) >= _MIN_WORDS and plain >= _PLAIN * len(line)
        if prose and ">>>" not in words:
            yield line


def _documentation() -> Iterator[str]:
    """What there is: a Python without sources still has the reference, or nothing."""
    with contextlib.suppress(ImportError):  # Some systems package it apart.
        yield from importlib.import_module("pydoc_data.topics").topics.values()
    library = Path(sysconfig.get_path("stdlib"))
    for name in ("LICENSE.txt", "LICENSE"):
        if (library / name).is_file():
            yield (library / name).read_text("utf-8", errors="replace")
    for path in sorted(library.rglob("*.py")):
        folders = path.relative_to(library).parts
        if _LEFT_OUT.isdisjoint(folders):
            yield from _docstrings_and_comments(path)


def _docstrings_and_comments(path: Path) -> Iterator[str]:
    source = path.read_bytes()
    try:
        with warnings.catch_warnings():  # Of old escape sequences.
            warnings.simplefilter("ignore")
            tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return  # Templates and the like.
    for node in ast.walk(tree):
        if isinstance(node, _DOCUMENTED) and (docstring := ast.get_docstring(node)):
            yield docstring
    for block in _COMMENTS.findall(source.decode("utf-8", errors="replace")):
        yield re.sub(r"^[ \t]*#+", "", block, flags=re.MULTILINE)


def train_tokenizer(lines: Iterable[str], vocab_size: int = 4096) -> Tokenizer:
    """A byte-level BPE as OPT's, in which the prompt's words are single tokens."""
    tokenizer = data.byte_level(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*lines, *[_PROMPT] * _REPEAT_PROMPT], trainer)
    return data.start_with_bos(tokenizer, "the trained tokenizer")


def token_stream(tokenizer: Tokenizer, lines: Iterable[str]) -> np.ndarray:
    """The tokens of all lines, one after the other, each with `</s>` before: int32."""
    encodings = tokenizer.encode_batch(list(lines))
    return np.concatenate([np.array(e.ids, np.int32) for e in encodings])


def prepare(vocab_size: int = 4096) -> tuple[Tokenizer, np.ndarray]:
    """A tokenizer, and the tokens of all the text there is."""
    lines = text()
    tokenizer = train_tokenizer(lines, vocab_size)
    return tokenizer, token_stream(tokenizer, lines)


def windows(
    stream: np.ndarray, seed: int, step: int, batch_size: int, length: int
) -> np.ndarray:
    """The batch of a step: tokens from random places of the stream, int32 [B, length].

    Nothing but the arguments decides it. A language model is fed all but the last
    token of each, and predicts all but the first.
    """
    if not 1 <= length <= len(stream):
        raise ValueError(
            f"length must be from 1 to that of the text, {len(stream)}; got {length}"
        )
    rng = np.random.default_rng((seed, step))
    starts = rng.integers(len(stream) - length + 1, size=batch_size)
    return stream[starts[:, None] + np.arange(length)]
