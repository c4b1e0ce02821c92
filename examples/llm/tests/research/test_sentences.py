"""Sentences and conversations in archives."""

import io
import json
import tarfile
import zipfile

import pytest

from research import sentences


def archive(path, lines, name="movieReviewSnippets_GroundTruth.txt"):
    """An archive in an archive, as vaderSentiment's."""

    def packed(name, content):
        to = io.BytesIO()
        with tarfile.open(fileobj=to, mode="w:gz") as file:
            member = tarfile.TarInfo(f"folder/{name}")
            member.size = len(content)
            file.addfile(member, io.BytesIO(content))
        return to.getvalue()

    inner = packed(name, "\n".join(lines).encode())
    path.write_bytes(packed("hutto_ICWSM_2014.tar.gz", inner))
    return path


LINES = [f"{i}\t{(-1) ** i * (0.4 + i % 3)}\tsentence {i}" for i in range(3000)]


def test_reviews_are_split_by_their_ratings(tmp_path):
    sentences.write(archive(tmp_path / "a.tar.gz", LINES), tmp_path / "out")
    found = {
        name: [
            tuple(json.loads(line).values())
            for line in (tmp_path / f"out/{name}.jsonl").read_text("utf-8").splitlines()
        ]
        for name in ("train", "dev", "test")
    }
    sizes = {name: len(rows) for name, rows in found.items()}
    assert sizes == {"train": 500, "dev": 500, "test": 1000}  # A third has |0.4|.
    together = [row for rows in found.values() for row in rows]
    expected = {
        (f"sentence {i}", 1 - i % 2) for i in range(3000) if abs(0.4 + i % 3) >= 0.5
    }
    assert set(together) == expected and len(together) == len(expected)


@pytest.mark.parametrize(
    ("lines", "name"), [(LINES, "other.txt"), ([*LINES, "1\t2"], None)]
)
def test_other_archives_are_refused(lines, name, tmp_path):
    path = archive(tmp_path / "a.tar.gz", lines, *([name] if name else []))
    with pytest.raises(ValueError):
        sentences.write(path, tmp_path)


CONVERSATIONS = """
conversations:
- [Hello, Hi]
- [a, b, c, d, e]
- [Hello, Hi]
- No list
- [long, "%s"]
"""


def test_conversations_are_written_once_and_end_with_a_reply(tmp_path):
    with zipfile.ZipFile(tmp_path / "x.whl", "w") as file:
        file.writestr("data/english/a.yml", CONVERSATIONS % ("x" * 200))
        file.writestr("data/german/a.yml", "conversations: [[Hallo, Tag]]")
    sentences.write_conversations(tmp_path / "x.whl", tmp_path / "x.jsonl")
    rows = map(json.loads, (tmp_path / "x.jsonl").read_text("utf-8").splitlines())
    chats = [[(x["role"], x["content"]) for x in row["messages"]] for row in rows]
    roles = "user", "assistant"
    assert chats == [
        [*zip(roles, ("Hello", "Hi"), strict=True)],
        [*zip(roles * 2, "abcd", strict=True)],
    ]
