"""Examples as tokens: batches of them."""

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from radazo_llm.examples.tokens import Example, encode
from radazo_llm.formats import tokenizers
from research import corpus


def assert_batch(batch, **expected):
    for name, value in batch._asdict().items():
        assert value.dtype == (np.float32 if name == "mask" else np.int32)
        np.testing.assert_array_equal(value, expected[name], name)


def test_candidates_of_several_tokens_have_sequences_of_their_own(checkpoint):
    examples = [
        Example("a b", (" a", " bb"), 1),
        Example("a b a b a b a b", (" b b", " a"), 0),
    ]
    tokenizer = tokenizers.load(checkpoint)
    batch = encode(tokenizer, examples, max_length=10, vocab_size=9)
    long = [2, 4, 8, 7, 8, 7, 8, 7, 8]
    assert_batch(
        batch,
        tokens=[
            [[2, 4, 8, *[1] * 7], [2, 4, 8, 8, *[1] * 6]],
            [[*long, 8], [*long, 1]],  # No longer than `max_length`.
        ],
        positions=[[[2, 0], [2, 3]], [[8, 9], [8, 0]]],
        targets=[[[7, 1], [8, 5]], [[8, 8], [7, 1]]],
        mask=[[[1, 0], [1, 1]], [[1, 1], [1, 0]]],
        label=[1, 0],
    )


@pytest.mark.parametrize(("length", "padded"), [(64, 8), (4, 4), (11, 8)])
def test_candidates_of_one_token_share_a_sequence(length, padded, checkpoint):
    examples = [Example("a", (" a", " b"), 0), Example("bab", (" a", "b"), 1)]
    tokenizer = tokenizers.load(checkpoint)
    batch = encode(tokenizer, examples, max_length=length, vocab_size=9)
    assert_batch(
        batch,
        tokens=[[[2, 4, *[1] * (padded - 2)]], [[2, 5, 4, 5, *[1] * (padded - 4)]]],
        positions=[[[1], [1]], [[3], [3]]],
        targets=[[[7], [8]], [[7], [5]]],
        mask=np.ones((2, 2, 1)),
        label=[0, 1],
    )


def test_a_sequence_and_its_targets_are_the_text(tokenizer):
    a, b, c = (corpus.reviews()[i::3][:20] for i in range(3))
    examples = [
        Example(f"{first} because", (f" {second}", f" {third}"), 0)
        for first, second, third in zip(a, b, c, strict=True)
    ]
    size = tokenizer.get_vocab_size()
    batch = encode(tokenizer, examples, max_length=256, vocab_size=size)
    for i, example in enumerate(examples):
        for j, candidate in enumerate(example.candidates):
            tokens, positions, targets, mask, _ = (x[i] for x in batch)
            size = int(mask[j].sum())
            prompt = tokens[j, : positions[j, 0] + 1]
            assert tokenizer.decode(prompt) == example.prompt
            assert tokenizer.decode(targets[j, :size]) == candidate
            # Each position but the first holds the target before its own.
            fed = tokens[j, positions[j, 1:size]]
            np.testing.assert_array_equal(fed, targets[j, : size - 1])


@pytest.mark.parametrize(
    ("example", "got"),
    [
        (("a b", (" a", ""), 0), r"got 3, and \[1, 0\] for the candidates"),
        (("a a a b", (" a",), 0), r"got 5, and \[1\] for"),
        (("a a b", (" a b",), 0), r"got 5, and \[2\] for"),
    ],
)
def test_what_cannot_be_encoded_is_named(example, got, checkpoint):
    tokenizer = tokenizers.load(checkpoint)
    examples = [Example("b", (" a",) * len(example[1]), 0), Example(*example)]
    with pytest.raises(ValueError, match=rf"example 1 \('a.*at most 4 tokens.*{got}"):
        encode(tokenizer, examples, max_length=4, vocab_size=9)


def test_a_tokenizer_of_another_family_puts_its_own_first_token(tmp_path):
    vocab = {"[UNK]": 0, "<bos>": 1, "a": 2, "b": 3}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", 1)]
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}', "utf-8")
    found = tokenizers.load(tmp_path)
    examples = [
        Example("a", (" a", " b"), 0),
        Example("a a", (" a", " b"), 1),
    ]
    batch = encode(found, examples, max_length=8, vocab_size=4)
    # Padded with 0, since there is no token for it.
    np.testing.assert_array_equal(batch.tokens[:, 0, :4], [[1, 2, 0, 0], [1, 2, 2, 0]])
    np.testing.assert_array_equal(batch.targets[:, :, 0], [[2, 3], [2, 3]])


def test_a_tokenizer_at_which_the_library_panics_is_refused(tmp_path, monkeypatch):
    """Its panics are no exceptions; found by files that were changed at random."""

    class Panic(BaseException):
        pass

    def panic(*paths):
        raise Panic("range end index 10 out of range")

    for name in ("vocab.json", "merges.txt"):
        (tmp_path / name).write_text("{}", "utf-8")
    monkeypatch.setattr(tokenizers.models.BPE, "from_file", panic)
    with pytest.raises(ValueError, match="that can be read: Panic: range end index"):
        tokenizers.load(tmp_path)
