"""Text and a tokenizer for a small language model, without downloads.

The text is the prose that every Python brings along: the language reference that
`help()` shows, and the docstrings, comments and license of the standard library, whose
sources are parsed and never run. What is not prose (code, tables, doctests) is left
out.

The training split of the sentiment set is part of it, because it has words that
Python's documentation does not have. Its labels are not, and neither is
the prompt (" It was great"): the model gets to know words, and what they say about a
review is left to the fine-tuning. The split for evaluation is not read.
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

from radazo_llm.formats import tokenizers

SENTIMENT = Path(__file__).parent / "sentiment"
SPECIAL_TOKENS = (
    "<s>",
    tokenizers.PAD,
    tokenizers.BOS,
    "<unk>",
)  # In the order of OPT's ids.

_REPEAT_REVIEWS = 20  # They are few compared with the documentation.
# To the tokenizer alone these are so frequent that they become single tokens.
_PROMPTS = [" It was terrible It was great"] * 2000
_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests"}
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_COMMENTS = re.compile(r"(?:^[ \t]*#.*\n)+", re.MULTILINE)


def text() -> list[str]:
    """All paragraphs, each on one line: the same ones for a version of Python."""
    parts = (p for block in _documentation() for p in re.split(r"\n\s*\n", block))
    lines = (" ".join(part.split()) for part in parts)
    return [*dict.fromkeys(filter(_is_prose, lines)), *reviews() * _REPEAT_REVIEWS]


def reviews() -> list[str]:
    """The sentences of the sentiment set to train on, without their labels."""
    lines = (SENTIMENT / "train.tsv").read_text("utf-8").splitlines()[1:]
    return [line.partition("\t")[0].strip() for line in lines]


def _is_prose(line: str) -> bool:
    """Whether there are six words, no doctest, and few characters of code."""
    words = line.split(" ")
    plain = sum(char.isalpha() or char in " ,.'-" for char in line)
    return len(words) >= 6 and plain >= 0.93 * len(line) and ">>>" not in words


def _documentation() -> Iterator[str]:
    """Blocks of text; without Python's sources, only its reference."""
    with contextlib.suppress(ImportError):  # Some systems package it apart.
        yield from importlib.import_module("pydoc_data.topics").topics.values()
    library = Path(sysconfig.get_path("stdlib"))
    for name in ("LICENSE.txt", "LICENSE"):
        if (library / name).is_file():
            yield (library / name).read_text("utf-8", errors="replace")
    for path in sorted(library.rglob("*.py")):
        if _LEFT_OUT.isdisjoint(path.relative_to(library).parts):
            yield from _docstrings_and_comments(path.read_bytes())


def _docstrings_and_comments(source: bytes) -> Iterator[str]:
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
    tokenizer = tokenizers.byte_level(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*lines, *_PROMPTS], trainer)
    return tokenizers.start_with_bos(tokenizer, "corpus")


def token_stream(tokenizer: Tokenizer, lines: Iterable[str]) -> np.ndarray:
    """The tokens of all lines, one after the other, each with `</s>` before: int32."""
    encodings = tokenizer.encode_batch(list(lines))
    return np.concatenate([np.array(e.ids, np.int32) for e in encodings])


def windows(
    stream: np.ndarray, seed: int, step: int, batch_size: int, length: int
) -> np.ndarray:
    """The batch of a step: tokens from random places of the stream, int32 [B, length].

    Nothing but the arguments decides it. A language model is fed all but the last
    token of each, and predicts all but the first.
    """
    rng = np.random.default_rng((seed, step))
    starts = rng.integers(len(stream) - length + 1, size=batch_size)
    return stream[starts[:, None] + np.arange(length)]
