"""Prompts, the files they are read from, and batches of them."""

import collections
import json
import re

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from radazo_llm.formats import tokenizers
from radazo_llm.tune import data
from research import corpus

PREMISE = {"premise": "The dog barked.", "choice1": "A cat came.", "choice2": "I ate."}
SST2 = "sentence\tlabel\n"
HEADER = "FILE:1: must be the header sentence, a tab and label, .* got "
ROW = "must be a sentence, a tab, and the label 0 or 1; got "
COPA = "must be a JSON object with the texts premise, choice1 and .*; got "


def written(folder, name, content):
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_sst2_is_prompted_as_by_mezo(tmp_path):
    # GLUE's sentences end with a space, and may hold quotes and odd separators.
    content = 'sentence\tlabel\r\na "fine\u2028film .\t 1\r\n  flat . \t0\n'
    examples = data.sst2(written(tmp_path, "train.tsv", content))
    candidates = (" terrible", " great")
    assert examples == [
        data.Example('a "fine\u2028film . It was', candidates, 1),
        data.Example("flat . It was", candidates, 0),
    ]


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"question": "cause"}, ("The dog barked because", " a cat came.", " I ate.")),
        ({"question": "effect"}, ("The dog barked so", " a cat came.", " I ate.")),
        (
            # Of several periods the last goes; what else ends a sentence stays.
            {"premise": "Why.. ", "question": "effect", "choice2": "It's I."},
            ("Why. so", " a cat came.", " it's I."),
        ),
        (
            {"premise": "Hey!", "question": "cause", "choice1": "Anna Bell left."},
            ("Hey! because", " anna Bell left.", " I ate."),
        ),
    ],
)
@pytest.mark.parametrize("label", [0, 1])
def test_copa_is_prompted_as_by_mezo(changed, expected, label, tmp_path):
    line = json.dumps(PREMISE | {"label": label, "idx": 7} | changed)
    prompt, *candidates = expected
    example = data.Example(prompt, tuple(candidates), label)
    assert data.copa(written(tmp_path, "val.jsonl", line)) == [example]


def copa_line(**changed):
    record = PREMISE | {"question": "cause", "label": 0} | changed
    return json.dumps({name: v for name, v in record.items() if v is not None})


@pytest.mark.parametrize(
    ("task", "content", "message"),
    [
        ("sst2", "", f"{HEADER}''"),
        ("sst2", "\n\n", f"{HEADER}''"),
        ("sst2", SST2, rf"{HEADER}'sentence\\tlabel'"),
        ("sst2", "index\tsentence\n0\tfine\n", rf"{HEADER}'index\\tsentence'"),
        ("sst2", "fine\t1\n", rf"{HEADER}'fine\\t1'"),
        ("sst2", SST2 + "good\t1\n \t1\n", rf"FILE:3: {ROW}' \\t1'"),
        ("sst2", SST2 + "good\t1\ngood\n", f"FILE:3: {ROW}'good'"),
        ("sst2", SST2 + "good\t1\n\nbad\t0\n", f"FILE:3: {ROW}''"),
        ("sst2", SST2 + "a\tb\t1\n", rf"FILE:2: {ROW}'a\\tb\\t1'"),
        ("sst2", SST2 + "good\t2\n", rf"FILE:2: {ROW}'good\\t2'"),
        ("sst2", SST2 + "good\t\n", rf"FILE:2: {ROW}'good\\t'"),
        ("sst2", SST2 + "good\t-1\n", rf"FILE:2: {ROW}'good\\t-1'"),
        ("sst2", SST2.encode() + b"g\xff\t1\n", "FILE:2: must be UTF-8: .*"),
        ("copa", "", f"FILE:1: {COPA}''"),
        ("copa", copa_line() + "\n{'a'}\n", f"FILE:2: {COPA}\"{{'a'}}\""),
        ("copa", copa_line() + '\n{"premise": ', f"FILE:2: {COPA}.*"),
        ("copa", copa_line() + "\n\n", f"FILE:2: {COPA}''"),
        ("copa", "[1]", rf"FILE:1: {COPA}'\[1\]'"),
        ("copa", copa_line(premise=None), f"FILE:1: {COPA}.*"),
        ("copa", copa_line(choice2=None), f"FILE:1: {COPA}.*"),
        ("copa", copa_line(choice1=" "), f"FILE:1: {COPA}.*"),
        ("copa", copa_line(choice1=3), f"FILE:1: {COPA}.*"),
        ("copa", copa_line(question="why"), f"FILE:1: {COPA}.*"),
        ("copa", copa_line(question=[]), f"FILE:1: {COPA}.*"),
        ("copa", copa_line(label=None), f"FILE:1: {COPA}.*"),
        ("copa", copa_line(label=-1), f"FILE:1: {COPA}.*"),
        ("copa", copa_line(label="1"), f"FILE:1: {COPA}.*"),
        ("copa", copa_line(label=True), f"FILE:1: {COPA}.*"),
    ],
)
def test_what_is_wrong_with_a_file_is_said_in_one_line(
    task, content, message, tmp_path
):
    path = written(tmp_path, "file", content)
    with pytest.raises(ValueError) as error:
        data.TASKS[task].read(path)
    assert re.fullmatch(message.replace("FILE", re.escape(str(path))), str(error.value))


@pytest.mark.parametrize("task", data.TASKS.values(), ids=data.TASKS)
def test_a_file_that_is_not_there(task, tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        task.read(tmp_path / "nowhere" / task.dev)


def assert_batch(batch, **expected):
    for name, value in batch._asdict().items():
        assert value.dtype == (np.float32 if name == "mask" else np.int32)
        np.testing.assert_array_equal(value, expected[name], name)


def test_candidates_of_several_tokens_have_sequences_of_their_own(checkpoint):
    examples = [
        data.Example("a b", (" a", " bb"), 1),
        data.Example("a b a b a b a b", (" b b", " a"), 0),
    ]
    tokenizer = tokenizers.load(checkpoint)
    batch = data.encode(tokenizer, examples, max_length=10, vocab_size=9)
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
    examples = [data.Example("a", (" a", " b"), 0), data.Example("bab", (" a", "b"), 1)]
    tokenizer = tokenizers.load(checkpoint)
    batch = data.encode(tokenizer, examples, max_length=length, vocab_size=9)
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
        data.Example(f"{first} because", (f" {second}", f" {third}"), 0)
        for first, second, third in zip(a, b, c, strict=True)
    ]
    size = tokenizer.get_vocab_size()
    batch = data.encode(tokenizer, examples, max_length=256, vocab_size=size)
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
    examples = [data.Example("b", (" a",) * len(example[1]), 0), data.Example(*example)]
    with pytest.raises(ValueError, match=rf"example 1 \('a.*at most 4 tokens.*{got}"):
        data.encode(tokenizer, examples, max_length=4, vocab_size=9)


def numbered(size):
    """A batch in which all of an example's entries are its number."""
    column = np.arange(size, dtype=np.int32)[:, None, None]
    return data.Batch(
        column, column, column, column.astype(np.float32), column[:, 0, 0]
    )


@pytest.mark.parametrize(("size", "batch_size"), [(7, 3), (6, 2), (3, 8), (1, 1)])
def test_batches_are_cut_from_one_epoch_after_the_other(size, batch_size):
    queue = collections.deque()
    for epoch in range(40):
        queue.extend(np.random.default_rng((5, epoch)).permutation(size))
    examples = numbered(size)
    for step in range(40 * size // batch_size):
        batch = data.batch_at(examples, 5, step, batch_size)
        expected = [queue.popleft() for _ in range(batch_size)]
        for values in batch:
            assert values.shape[0] == batch_size
            np.testing.assert_array_equal(values.ravel(), expected)


def test_a_seed_and_a_step_decide_the_batch():
    examples = numbered(50)
    one, same, step, seed = (
        data.batch_at(examples, *place, 20).label.tolist()
        for place in ((0, 3), (0, 3), (0, 4), (1, 3))
    )
    assert one == same
    assert one != step and one != seed


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
        data.Example("a", (" a", " b"), 0),
        data.Example("a a", (" a", " b"), 1),
    ]
    batch = data.encode(found, examples, max_length=8, vocab_size=4)
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
    with pytest.raises(ValueError, match="that can be read: range end index 10"):
        tokenizers.load(tmp_path)
