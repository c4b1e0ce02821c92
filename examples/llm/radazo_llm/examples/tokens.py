"""Examples as tokens: arrays of one shape."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from tokenizers import Encoding, Tokenizer

from radazo_llm.formats import tokenizers

_MULTIPLE = 8  # Sequences are padded to a multiple of it, which suits a TPU's tiles.


class Example(NamedTuple):
    """A prompt, and what may follow it.

    Attributes:
      prompt: The text.
      candidates: The texts that may follow.
      label: The place of the text that follows.
      place: The file and the line, if messages name them.
      spans: The parts of prompt and candidate that are scored, as places of characters;
        by default the candidate.
    """

    prompt: str
    candidates: tuple[str, ...]
    label: int
    place: str = ""
    spans: tuple[tuple[int, int], ...] = ()


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


class Splits(NamedTuple):
    """The examples of a run.

    Attributes:
      batches: Those to train on, to evaluate on and, if there are any, of the test.
      summary: The number of examples of each, in a few lines.
    """

    batches: tuple[Batch, ...]
    summary: str


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
      max_length: The number of tokens that the model accepts. Sequences are as long as
        the longest, rounded up to a multiple of 8 if that fits.
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
    rows = [encoded[i + 1 : i + 1 + number] for i in range(0, len(texts), number + 1)]
    ids = [[found.ids for found in row] for row in rows]
    places = [
        [_scored(example, len(prompt.ids), found) for found in row]
        for example, prompt, row in zip(
            examples, encoded[:: number + 1], rows, strict=True
        )
    ]
    largest = max((max(x, default=0) for row in ids for x in row), default=0)
    if largest >= vocab_size:
        raise ValueError(
            f"tokenizer must have ids below the model's vocab_size ({vocab_size}); got "
            f"{largest}"
        )
    ends = np.array([[len(x) - 1 for x in row] for row in ids])
    sizes = np.array([[len(place) for place in row] for row in places])
    for i, example in enumerate(examples):
        if sizes[i].min() < 1 or ends[i].max() > max_length:
            place = f"{example.place}: " if example.place else ""
            raise ValueError(
                f"{place}example {i} ({example.prompt[:40]!r}...) must have at most "
                f"{max_length} tokens, and some for each candidate; got "
                f"{ends[i].max()}, and {sizes[i].tolist()} for the candidates. Shorten "
                "it, or leave out long ones (--skip-long)."
            )
    length = min(max_length, -(-ends.max() // _MULTIPLE) * _MULTIPLE)
    shared = all(x[:-1] == row[0][:-1] for row in ids for x in row)
    pad = tokenizer.token_to_id(tokenizers.PAD) or 0  # Any does: nothing looks at it.
    shape = *sizes.shape, sizes.max()
    tokens = np.full((shape[0], 1 if shared else shape[1], length), pad, np.int32)
    positions = np.zeros(shape, np.int32)
    targets = np.full(shape, pad, np.int32)
    mask = np.zeros(shape, np.float32)
    for (b, c), size in np.ndenumerate(sizes):
        row, place = np.array(ids[b][c]), places[b][c]
        tokens[b, 0 if shared else c, : ends[b, c]] = row[:-1]
        positions[b, c, :size] = place - 1
        targets[b, c, :size] = row[place]
        mask[b, c, :size] = 1
    label = np.array([example.label for example in examples], np.int32)
    return Batch(tokens, positions, targets, mask, label)


def _scored(example: Example, start: int, found: Encoding) -> np.ndarray:
    """The places of the tokens that are scored, from 1."""
    if not example.spans:
        return np.arange(start, len(found.ids))
    return np.array(
        [
            i
            for i, (begin, end) in enumerate(found.offsets)
            if i and any(a < end and begin < b for a, b in example.spans)
        ],
        np.int64,
    )


def classes(examples: Sequence[Example]) -> str:
    """A line on how many examples have each candidate, if all choose from the same."""
    words = examples[0].candidates
    if len(words) < 2 or any(example.candidates != words for example in examples):
        return ""
    counts = Counter(example.label for example in examples)
    found = ", ".join(f"{w.strip()} {counts[i]:,}" for i, w in enumerate(words))
    return f" Classes: {found:.200}."


def shown(
    tokenizer: Tokenizer, examples: Sequence[Example], special: bool
) -> Iterator[str]:
    """Yields examples as a model sees them, with their tokens."""
    for example in examples:
        ids = tokenizer.encode(example.prompt, add_special_tokens=special).ids
        prompt = tokenizer.decode(ids, skip_special_tokens=False)
        yield f"\n{example.place}: {len(ids)} tokens\n{prompt}"
        for place, text in enumerate(example.candidates):
            whole = tokenizer.encode(example.prompt + text, add_special_tokens=special)
            mark = "->" if place == example.label else "  "
            count = len(_scored(example, len(ids), whole))
            yield f"{mark} {text!r}, {count} token{'s' * (count != 1)}"


def sizes(totals: Mapping[str, int]) -> str:
    """The number of rows of each split, in a few words."""
    return ", ".join(f"{name} {number:,}" for name, number in totals.items())
