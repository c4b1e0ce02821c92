"""Sentences of movie reviews, from the source distribution of `vaderSentiment`.

    pip download --no-deps --no-binary :all: vaderSentiment

The archive contains another one, with 10,605 sentences of Rotten Tomatoes and the mean
of 20 people's ratings from −4 to 4 (Hutto and Gilbert, 2014; MIT license). The label is
the sign of the rating. Ratings between −0.5 and 0.5 are left out.
"""

import functools
import io
import math
import tarfile
from pathlib import Path

import numpy as np

_INNER = "hutto_ICWSM_2014.tar.gz"
_SENTENCES = "movieReviewSnippets_GroundTruth.txt"
_LARGEST = 1 << 26  # Bytes of a member.
_CLEAR = 0.5  # The least absolute rating.
SIZES = {"test": 1000, "dev": 500}  # What is left is for training.


def split(archive: Path, name: str) -> list[tuple[str, int]]:
    """Returns the sentences and labels (1 is positive) of a split.

    The splits are the same for all runs.

    Args:
      archive: The source distribution.
      name: "train", "dev" or "test".

    Raises:
      ValueError: If the archive has no such sentences.
    """
    rows = _rows(archive)
    order = np.random.default_rng(0).permutation(len(rows))
    start = 0
    for other, size in SIZES.items():
        if other == name:
            return [rows[i] for i in order[start : start + size]]
        start += size
    return [rows[i] for i in order[start:]]


@functools.cache
def _rows(archive: Path) -> list[tuple[str, int]]:
    try:
        outer = _member(archive.read_bytes(), _INNER)
        content = _member(outer, _SENTENCES).decode()
    except (ValueError, EOFError, IsADirectoryError, tarfile.TarError) as error:
        raise ValueError(
            f"{archive} must be vaderSentiment's source distribution: {error!s:.80}"
        ) from None
    found = []
    for number, line in enumerate(content.splitlines(), 1):
        try:
            _, rating, sentence = line.split("\t")
            value = float(rating)
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            raise ValueError(
                f"{archive}: line {number} of {_SENTENCES} must be a number, a rating "
                f"and a sentence; got {line!r:.80}"
            )
        if abs(value) >= _CLEAR:
            found.append((sentence.strip(), int(value > 0)))
    if len(found) <= sum(SIZES.values()):
        raise ValueError(f"{archive} has too few sentences: {len(found)}.")
    return found


def _member(archive: bytes, name: str) -> bytes:
    """The content of a member of a compressed archive."""
    with tarfile.open(fileobj=io.BytesIO(archive), mode="r:gz") as file:
        for member in file:
            if Path(member.name).name == name and member.isfile():
                if member.size > _LARGEST:
                    raise ValueError(f"{name} is too large")
                return file.extractfile(member).read()
    raise ValueError(f"it has no {name}")
