"""Files that several test modules read."""

import json

import pytest

from examples.apps.llm import corpus, weights

from . import tiny


@pytest.fixture(scope="session")
def tokenizer():
    return corpus.train_tokenizer(corpus.reviews(), vocab_size=700)


@pytest.fixture
def checkpoint(tmp_path):
    """OPT's two files, small enough to tokenize by hand: `Ġ` is a space."""
    vocab = ["<s>", "<pad>", "</s>", "<unk>", "a", "b", "Ġ", "Ġa", "Ġb"]
    ids = {token: i for i, token in enumerate(vocab)}
    (tmp_path / "vocab.json").write_text(json.dumps(ids), encoding="utf-8")
    merges = "#version: 0.2\nĠ a\nĠ b\n"
    (tmp_path / "merges.txt").write_text(merges, encoding="utf-8")
    return tmp_path


@pytest.fixture(scope="session")
def job(tmp_path_factory):
    """A folder with a tiny model, its tokenizer, and data of both tasks."""
    folder = tmp_path_factory.mktemp("job")
    lines = ["a good day. It was great", "a bad day. It was terrible"]
    tokenizer = corpus.train_tokenizer(lines * 10, 300)
    tokenizer.save(str(folder / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == tiny.CONFIG.vocab_size
    weights.save(tiny.model(), folder)
    rows = ["sentence\tlabel", *("a good day.\t1", "a bad day.\t0") * 10]
    record = {"premise": "It ran.", "choice1": "It hid.", "choice2": "I saw."}
    copa = [
        json.dumps(record | {"question": "effect", "label": i % 2}) for i in range(8)
    ]
    for name, content in (("train.tsv", rows), ("dev.tsv", rows)):
        (folder / name).write_text("\n".join(content) + "\n", encoding="utf-8")
    for name in ("train.jsonl", "val.jsonl"):
        (folder / name).write_text("\n".join(copa) + "\n", encoding="utf-8")
    return folder
