"""Writes sentences of movie reviews, or of news, as files to tune on.

    pip download --no-deps --no-binary :all: vaderSentiment
    python -m research.sentences vaderSentiment-3.3.2.tar.gz reviews

The archive, the source distribution of `vaderSentiment`, contains another one, with
10,605 sentences of Rotten Tomatoes, 5,190 of editorials of the New York Times, and the
mean of 20 people's ratings from −4 to 4 (Hutto and Gilbert, 2014; MIT license). The
label is the sign of the rating. Ratings between −0.5 and 0.5 are left out. 1,000
reviews are for the test, and 500 to evaluate on.
"""

import io
import json
import tarfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

import click
import numpy as np

ARCHIVE = Path("vaderSentiment-3.3.2.tar.gz")
WHEEL = Path("chatterbot_corpus-1.3.3-py2.py3-none-any.whl")
_INNER = "hutto_ICWSM_2014.tar.gz"
_FILES = {
    "reviews": "movieReviewSnippets_GroundTruth.txt",
    "news": "nytEditorialSnippets_GroundTruth.txt",
}
_CLEAR = 0.5  # The least absolute rating.
SIZES = {"test": 1000, "dev": 500, "train": None}
SMALL = {"test": 200, "dev": 40, "train": 240}
_LONGEST = 160  # Characters of a conversation.
# How `radazo-llm tune` reads the files, as MeZO prompts SST-2.
OPTIONS = {"labels": "great=1,terrible=0", "template": "{text} It was"}


def write(
    archive: Path,
    folder: Path,
    name: str = "reviews",
    sizes: Mapping[str, int | None] = SIZES,
) -> Path:
    """Writes a file for each split; the splits are the same at each call.

    Raises:
      ValueError: If the archive has no such sentences.
    """
    found = []
    content = _member(_member(archive.read_bytes(), _INNER), _FILES[name]).decode()
    for line in content.splitlines():
        _, rating, sentence = line.split("\t")
        if abs(float(rating)) >= _CLEAR:
            found.append({"text": sentence.strip(), "label": int(float(rating) > 0)})
    order = np.random.default_rng(0).permutation(len(found)).tolist()
    folder.mkdir(parents=True, exist_ok=True)
    for split, size in sizes.items():
        size = len(order) if size is None else size
        rows = [json.dumps(found[i], ensure_ascii=False) for i in order[:size]]
        order = order[size:]
        (folder / f"{split}.jsonl").write_text("\n".join(rows) + "\n", "utf-8")
    return folder


def _member(archive: bytes, name: str) -> bytes:
    """The content of a member of a compressed archive."""
    with tarfile.open(fileobj=io.BytesIO(archive), mode="r:gz") as file:
        for member in file:
            if Path(member.name).name == name and member.isfile():
                return file.extractfile(member).read()
    raise ValueError(f"the archive has no {name}")


def write_conversations(wheel: Path, path: Path) -> None:
    """Writes short English conversations of `chatterbot-corpus` (BSD license)."""
    import yaml  # Only here, and a requirement of Flax.

    rows: dict[str, None] = {}
    with zipfile.ZipFile(wheel) as files:
        for name in sorted(files.namelist()):
            if "/english/" not in name or not name.endswith(".yml"):
                continue
            for turns in yaml.safe_load(files.read(name))["conversations"]:
                if not isinstance(turns, list):
                    continue  # One of the files has a text there.
                texts = [str(turn) for turn in turns[: len(turns) // 2 * 2]]
                if texts and sum(map(len, texts)) <= _LONGEST:
                    roles = ("user", "assistant") * len(texts)
                    pairs = zip(roles, texts, strict=False)
                    chat = [{"role": role, "content": text} for role, text in pairs]
                    rows[json.dumps({"messages": chat}, ensure_ascii=False)] = None
    path.write_text("\n".join(rows) + "\n", "utf-8")


@click.command(help=__doc__)
@click.argument("archive", type=click.Path(exists=True, path_type=Path))
@click.argument("folder", type=click.Path(path_type=Path))
def main(archive: Path, folder: Path) -> None:
    print(f"The files are in {write(archive, folder)}.")


if __name__ == "__main__":
    main()
