"""The tokenizers, the sentences to tune on, and the text to pretrain on."""

import dataclasses

import jax.numpy as jnp
import pytest
from tokenizers import Tokenizer

from radazo_llm.formats import load as loading
from radazo_llm.formats import tokenizers
from research import corpus, pretrain

# --- Tokenizers -------------------------------------------------------------------


def test_tokenizer_json_is_preferred_and_starts_with_bos(tokenizer, checkpoint):
    changed = Tokenizer.from_str(tokenizer.to_str())
    # Settings of other tools must not cut, fill or close the sequences.
    changed.enable_truncation(3)
    changed.enable_padding(length=32)
    changed.post_processor = None
    changed.save(str(checkpoint / "tokenizer.json"))
    loaded = tokenizers.load(checkpoint)
    text = "a warm film, naïve but 100% honest. It was great"
    ids = loaded.encode(text).ids
    assert ids == tokenizer.encode(text).ids
    assert ids[0] == 2 and 2 not in ids[1:]
    assert loaded.decode(ids) == text


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("README.md", "", "FOLDER must have tokenizer.json, or"),
        ("vocab.json", "{}", "FOLDER must have tokenizer.json, or"),
        ("tokenizer.json", "{", "FOLDER must have tokenizer.json, or"),
        (
            "tokenizer.json",
            '{"model": {"type": "BPE", "vocab": {}, "merges": []}}',
            "FOLDER: the tokenizer must have the token '</s>'",
        ),
    ],
)
def test_a_folder_without_a_tokenizer(name, content, message, tmp_path):
    (tmp_path / name).write_text(content, encoding="utf-8")
    with pytest.raises(ValueError) as raised:
        tokenizers.load(tmp_path)
    assert str(raised.value).startswith(message.replace("FOLDER", str(tmp_path)))
    assert "\n" not in str(raised.value)


def test_broken_merges(checkpoint):
    (checkpoint / "merges.txt").write_text("one two three\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"merges\.txt, that can be read: "):
        tokenizers.load(checkpoint)


def test_the_trained_tokenizer_has_opts_ids(tokenizer):
    ids = [tokenizer.token_to_id(name) for name in ("<s>", "<pad>", "</s>", "<unk>")]
    assert ids == [0, 1, 2, 3]
    # All bytes are tokens: nothing is unknown, and nothing is lost.
    text = "Ünknown → \U0001f600 \t\n\x00"
    ids = tokenizer.encode(text).ids
    assert 3 not in ids
    assert tokenizer.decode(ids) == text


# --- The sentences ------------------------------------------------------------------


def rows(split):
    lines = (corpus.SENTIMENT / f"{split}.tsv").read_text("utf-8").splitlines()[1:]
    return [tuple(line.split("\t")) for line in lines]


@pytest.mark.parametrize(("split", "size"), [("train", 320), ("dev", 80)])
def test_the_sentiment_set_is_balanced(split, size):
    labels = [int(label) for _, label in rows(split)]
    assert (len(labels), sum(labels)) == (size, size // 2)
    # They are not sorted.
    assert 0 < sum(labels[: size // 4]) < size // 4


# --- The text ---------------------------------------------------------------------


@pytest.mark.slow
def test_the_text_is_prose_and_reads_no_label():
    lines = corpus.text()
    assert all("\n" not in line and ">>>" not in line.split() for line in lines)
    train, dev = ({sentence for sentence, _ in rows(s)} for s in ("train", "dev"))
    assert train <= set(lines)
    assert not dev & set(lines)
    joined = "\n".join(lines)
    assert len(joined) > 1.5e6  # Python brings its sources along.
    assert "It was great" not in joined and "It was terrible" not in joined
    documentation = [line for line in lines if line not in train]
    assert len(set(documentation)) == len(documentation)

    # At the size that the example uses, words are tokens.
    tokenizer = corpus.train_tokenizer(lines)
    assert tokenizer.get_vocab_size() == 4096
    for word in (" It", " was", " great", " terrible", " boring", " the", " film"):
        assert len(tokenizer.encode(word, add_special_tokens=False)) == 1
    assert corpus.train_tokenizer(lines).to_str() == tokenizer.to_str()


@pytest.mark.slow
def test_pretraining_is_done_once(tmp_path, monkeypatch):
    calls = []

    def text():
        calls.append("text")
        return ["a good day. It was great"] * 20

    monkeypatch.setattr(corpus, "text", text)
    settings = dataclasses.replace(
        pretrain.FAST, vocab_size=300, hidden_size=16, num_steps=3, length=8
    )
    for _ in range(2):
        folder = pretrain.pretrained(tmp_path, settings)
    assert len(calls) == 1
    assert loading.load(folder, dtype=jnp.float32).config == settings.config()
    pretrain.pretrained(tmp_path, dataclasses.replace(settings, num_steps=4))
    assert len(calls) == 2
