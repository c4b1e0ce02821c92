"""The language-model example's data: prompts, tokens, batches and the offline text."""

import collections
import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from sklearn.feature_extraction.text import CountVectorizer
from sklearn.linear_model import LogisticRegression
from tokenizers import Tokenizer

from examples.llm import corpus, data

ROOT = Path(__file__).parents[1]
PREMISE = {"premise": "The dog barked.", "choice1": "A cat came.", "choice2": "I ate."}
SST2 = "sentence\tlabel\n"


def written(folder, name, content):
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


@pytest.fixture(scope="module")
def tokenizer():
    return corpus.train_tokenizer(corpus.reviews(), vocab_size=700)


@pytest.fixture
def checkpoint(tmp_path):
    """OPT's two files, small enough to tokenize by hand: `Ġ` is a space."""
    vocab = ["<s>", "<pad>", "</s>", "<unk>", "a", "b", "Ġ", "Ġa", "Ġb"]
    ids = {token: i for i, token in enumerate(vocab)}
    written(tmp_path, "vocab.json", json.dumps(ids))
    written(tmp_path, "merges.txt", "#version: 0.2\nĠ a\nĠ b\n")
    return tmp_path


# Prompts.


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
        ("sst2", "", "FILE: the file is empty"),
        ("sst2", "\n\n", "FILE: the file is empty"),
        ("sst2", SST2, "FILE: has a header and no examples"),
        ("sst2", "index\tsentence\n0\tfine\n", "FILE:1: .* no labels; use dev.tsv"),
        ("sst2", "fine\t1\n", r"FILE:1: the header must be .* got 'fine\\t1'"),
        ("sst2", SST2 + "good\t1\n \t1\n", "FILE:3: the sentence is empty"),
        ("sst2", SST2 + "good\t1\ngood\n", "FILE:3: must have 2 columns.* got 1"),
        ("sst2", SST2 + "good\t1\n\nbad\t0\n", "FILE:3: must have 2 columns.* got 1"),
        ("sst2", SST2 + "a\tb\t1\n", "FILE:2: must have 2 columns.* got 3"),
        ("sst2", SST2 + "good\t2\n", "FILE:2: the label must be 0 or 1; got '2'"),
        ("sst2", SST2 + "good\t\n", "FILE:2: the label must be 0 or 1; got ''"),
        ("sst2", SST2 + "good\t-1\n", "FILE:2: .* no label .-1.; use a .*"),
        ("sst2", SST2.encode() + b"g\xff\t1\n", "FILE:2: not UTF-8: .*"),
        ("copa", "", "FILE: the file is empty"),
        ("copa", copa_line() + "\n{'a'}\n", "FILE:2: broken JSON: .*, column 2"),
        ("copa", copa_line() + '\n{"premise": ', "FILE:2: broken JSON: .*"),
        ("copa", copa_line() + "\n\n", "FILE:2: broken JSON: .*"),
        ("copa", "[1]", r"FILE:1: must be a JSON object; got '\[1\]'"),
        ("copa", copa_line(premise=None), "FILE:1: the field 'premise' is missing"),
        ("copa", copa_line(choice2=None), "FILE:1: the field 'choice2' is missing"),
        ("copa", copa_line(choice1=" "), "FILE:1: 'choice1' must be a text; got ' '"),
        ("copa", copa_line(choice1=3), "FILE:1: 'choice1' must be a text; got 3"),
        ("copa", copa_line(question="why"), "FILE:1: 'question' must be .* got 'why'"),
        ("copa", copa_line(label=None), "FILE:1: .* no label, .*; use val.jsonl"),
        ("copa", copa_line(label=-1), "FILE:1: .* no label, .*; use val.jsonl"),
        ("copa", copa_line(label="1"), "FILE:1: 'label' must be 0 or 1; got '1'"),
        ("copa", copa_line(label=True), "FILE:1: 'label' must be 0 or 1; got True"),
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
    with pytest.raises(FileNotFoundError, match=f"{task.dev}: no such file$"):
        task.read(tmp_path / task.dev)


# Tokenizers.


def bpe_by_hand(text, vocab, merges):
    """GPT-2's algorithm, for ASCII texts of letters, spaces, commas and periods."""
    ranks = {pair: rank for rank, pair in enumerate(merges)}
    for piece in re.findall(r" ?[a-zA-Z]+| ?[,.]+", text):
        symbols = list(piece.replace(" ", "Ġ"))
        while True:
            pairs = list(itertools.pairwise(symbols))
            best = min(pairs, key=lambda p: ranks.get(p, len(ranks)), default=None)
            if best not in ranks:
                break
            merged = []
            while symbols:
                size = 2 if tuple(symbols[:2]) == best else 1
                merged.append("".join(symbols[:size]))
                symbols = symbols[size:]
            symbols = merged
        yield from (vocab[symbol] for symbol in symbols)


def test_vocab_and_merges_are_read_as_gpt2_defines_them(tokenizer, tmp_path):
    tokenizer.model.save(str(tmp_path))
    loaded = data.load_tokenizer(tmp_path)
    vocab = json.loads((tmp_path / "vocab.json").read_text())
    lines = (tmp_path / "merges.txt").read_text().splitlines()
    merges = [tuple(line.split()) for line in lines if not line.startswith("#version")]
    sentences = [s for s in corpus.reviews() if re.fullmatch("[a-z ,.]+", s)]
    assert len(sentences) > 200
    for sentence in sentences:
        expected = [2, *bpe_by_hand(sentence, vocab, merges)]
        assert loaded.encode(sentence).ids == expected


def test_tokenizer_json_is_preferred_and_starts_with_bos(tokenizer, checkpoint):
    changed = Tokenizer.from_str(tokenizer.to_str())
    # What other tools leave behind must not cut, fill or close the sequences.
    changed.enable_truncation(3)
    changed.enable_padding(length=32)
    changed.post_processor = None
    changed.save(str(checkpoint / "tokenizer.json"))
    loaded = data.load_tokenizer(checkpoint)
    text = "a warm film, naïve but 100% honest. It was great"
    ids = loaded.encode(text).ids
    assert ids == tokenizer.encode(text).ids
    assert ids[0] == 2 and 2 not in ids[1:]
    assert loaded.decode(ids) == text


@pytest.mark.parametrize(
    ("name", "content", "error", "message"),
    [
        ("README.md", "", FileNotFoundError, "FOLDER: has neither tokenizer.json nor"),
        ("vocab.json", "{}", FileNotFoundError, "FOLDER: has neither tokenizer.json"),
        ("tokenizer.json", "{", ValueError, "FOLDER/tokenizer.json: not a tokenizer: "),
        (
            "tokenizer.json",
            '{"model": {"type": "BPE", "vocab": {}, "merges": []}}',
            ValueError,
            "FOLDER: lacks the token '</s>', which OPT has",
        ),
    ],
)
def test_a_folder_without_a_tokenizer(name, content, error, message, tmp_path):
    written(tmp_path, name, content)
    with pytest.raises(error) as raised:
        data.load_tokenizer(tmp_path)
    assert str(raised.value).startswith(message.replace("FOLDER", str(tmp_path)))
    assert "\n" not in str(raised.value)


def test_broken_merges(checkpoint):
    written(checkpoint, "merges.txt", "one two three\n")
    with pytest.raises(ValueError, match=r"vocab.json and .*merges.txt: not a tok"):
        data.load_tokenizer(checkpoint)


# Batches.


def assert_batch(batch, **expected):
    for name, value in batch._asdict().items():
        assert value.dtype == (np.float32 if name == "mask" else np.int32)
        np.testing.assert_array_equal(value, expected[name], name)


def test_candidates_of_several_tokens_have_sequences_of_their_own(checkpoint):
    examples = [
        data.Example("a b", (" a", " bb"), 1),
        data.Example("a b a b a b a b", (" b b", " a"), 0),
    ]
    batch = data.encode(data.load_tokenizer(checkpoint), examples, max_length=10)
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


@pytest.mark.parametrize(("length", "padded"), [(None, 8), (4, 4), (11, 11)])
def test_candidates_of_one_token_share_a_sequence(length, padded, checkpoint):
    examples = [data.Example("a", (" a", " b"), 0), data.Example("bab", (" a", "b"), 1)]
    tokenizer = data.load_tokenizer(checkpoint)
    batch = data.encode(tokenizer, examples, max_length=64, length=length)
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
    batch = data.encode(tokenizer, examples, max_length=256)
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
    ("example", "limits", "message"),
    [
        (
            ("a b", (" a", ""), 0),
            {},
            r"example 1 \('a b'...\): the candidate '' has no",
        ),
        (("a a a b", (" a",), 0), {}, r"example 1 \(.*\): has 5 tokens, .* at most 4 "),
        (("a a b", (" a b",), 0), {}, r"example 1 \(.*\): has 5 tokens, .* at most 4 "),
        (("a a b", (" a",), 0), {"length": 3}, "has 4 tokens, where at most 3 fit"),
        (
            ("a", (" a",), 0),
            {"length": 5},
            "length must be at most max_length=4; got 5",
        ),
        # What is cut is the prompt, and there must be enough of it.
        (("a", (" a a a a a",), 0), {"truncate": True}, "has 6 tokens, .* at most 4"),
    ],
)
def test_what_cannot_be_encoded_is_named(example, limits, message, checkpoint):
    tokenizer = data.load_tokenizer(checkpoint)
    examples = [data.Example("b", (" a",), 0), data.Example(*example)]
    with pytest.raises(ValueError, match=message):
        data.encode(tokenizer, examples, max_length=4, **limits)


def test_nothing_to_encode(checkpoint):
    with pytest.raises(ValueError, match="no examples"):
        data.encode(data.load_tokenizer(checkpoint), [], max_length=4)


def test_truncation_drops_the_start_of_the_prompt(checkpoint):
    examples = [data.Example("aba b", (" a", " b b"), 0)]
    tokenizer = data.load_tokenizer(checkpoint)
    batch = data.encode(tokenizer, examples, max_length=4, truncate=True)
    assert_batch(
        batch,
        # Without the first "a" [2, 5, 4, 8]; without "ab" [2, 4, 8, 8].
        tokens=[[[2, 5, 4, 8], [2, 4, 8, 8]]],
        positions=[[[3, 0], [2, 3]]],
        targets=[[[7, 1], [8, 8]]],
        mask=[[[1, 0], [1, 1]]],
        label=[0],
    )


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


# The sentiment set.


def rows(split):
    return data.sst2_rows(corpus.SENTIMENT / f"{split}.tsv")


@pytest.mark.parametrize(("split", "size"), [("train", 320), ("dev", 80)])
def test_the_sentiment_set_is_balanced(split, size):
    labels = [label for _, label in rows(split)]
    assert (len(labels), sum(labels)) == (size, size // 2)
    # Nor do they come sorted.
    assert 0 < sum(labels[: size // 4]) < size // 4


def test_the_sentiment_set_repeats_nothing():
    plain = [
        " ".join(re.findall(r"\w+", sentence.lower()))
        for split in ("train", "dev")
        for sentence, _ in rows(split)
    ]
    assert len(set(plain)) == len(plain) == 400
    assert all(3 <= len(s) <= 100 and s.isascii() for s in plain if s != "simply awful")


def test_the_sentiment_set_can_be_learned():
    """By counting words: neither trivial nor hopeless, and the figure of its README."""
    counts = CountVectorizer(token_pattern="[a-z']+")
    (train, train_labels), (dev, dev_labels) = (
        zip(*rows(split), strict=True) for split in ("train", "dev")
    )
    model = LogisticRegression().fit(counts.fit_transform(train), train_labels)
    accuracy = model.score(counts.transform(dev), dev_labels)
    assert f"{accuracy:.0%}" in (corpus.SENTIMENT / "README.md").read_text()


# The offline text.


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


def test_without_sources_the_reviews_remain(monkeypatch, tmp_path):
    monkeypatch.setattr(corpus.sysconfig, "get_path", lambda _: str(tmp_path))
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)  # Fails to import.
    assert set(corpus.text()) == set(corpus.reviews())


def test_docstrings_and_comments_are_read_and_code_is_not(monkeypatch, tmp_path):
    source = '''"""One line of prose that the module has.

    >>> this = "is a doctest", 'and is left out' == "of" + "the" + "text"
    """
raise RuntimeError("the sources are never run")
def function():
    # Comments of several lines
    # are joined to one paragraph.
    "A docstring with \\d, an old escape, is read."
    #
    # Too short.
'''
    written(tmp_path, "module.py", source)
    written(tmp_path, "broken.py", "# A comment in what is not Python at all.\n(")
    (tmp_path / "test").mkdir()
    written(tmp_path / "test", "case.py", '"""Tests of the library are left out."""')
    written(tmp_path, "LICENSE.txt", "You may use this text as you\nplease, always.")
    monkeypatch.setattr(corpus.sysconfig, "get_path", lambda _: str(tmp_path))
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    reviews = set(corpus.reviews())
    assert [line for line in corpus.text() if line not in reviews] == [
        "You may use this text as you please, always.",
        "One line of prose that the module has.",
        "A docstring with \\d, an old escape, is read.",
        "Comments of several lines are joined to one paragraph.",
    ]


def test_the_trained_tokenizer_has_opts_ids(tokenizer):
    ids = [tokenizer.token_to_id(name) for name in ("<s>", "<pad>", "</s>", "<unk>")]
    assert ids == [0, 1, 2, 3]
    # All bytes are tokens: nothing is unknown, and nothing is lost.
    text = "Ünknown → \U0001f600 \t\n\x00"
    ids = tokenizer.encode(text).ids
    assert 3 not in ids
    assert tokenizer.decode(ids) == text


def test_the_stream_is_all_lines_each_after_bos(tokenizer):
    lines = corpus.reviews()[:50]
    stream = corpus.token_stream(tokenizer, lines)
    assert stream.dtype == np.int32
    starts = np.flatnonzero(stream == 2)
    assert [tokenizer.decode(part) for part in np.split(stream, starts)[1:]] == lines


def test_tokenizer_and_stream_are_prepared_together(tokenizer, monkeypatch):
    monkeypatch.setattr(corpus, "text", corpus.reviews)  # All of it takes seconds.
    prepared, stream = corpus.prepare(tokenizer.get_vocab_size())
    assert prepared.to_str() == tokenizer.to_str()
    expected = corpus.token_stream(tokenizer, corpus.reviews())
    np.testing.assert_array_equal(stream, expected)


def test_windows_are_pieces_of_the_stream():
    stream = np.arange(100, 130, dtype=np.int32)
    seen = set()
    for step in range(50):
        batch = corpus.windows(stream, 3, step, batch_size=4, length=8)
        assert batch.shape == (4, 8) and batch.dtype == np.int32
        np.testing.assert_array_equal(np.diff(batch), 1)
        np.testing.assert_array_equal(batch, corpus.windows(stream, 3, step, 4, 8))
        seen.update(batch[:, 0].tolist())
    assert seen == set(range(100, 123))  # The first and the last places too.
    other = corpus.windows(stream, 4, 0, 4, 8)
    assert (other != corpus.windows(stream, 3, 0, 4, 8)).any()


@pytest.mark.parametrize("length", [0, 31])
def test_windows_must_fit(length):
    with pytest.raises(ValueError, match=f"from 1 to .*, 30; got {length}$"):
        corpus.windows(np.zeros(30, np.int32), 0, 0, 1, length)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_fork_brings_no_warning():
    program = (
        "import os\n"
        "from examples.llm import corpus\n"
        "lines = corpus.reviews()\n"
        "tokenizer = corpus.train_tokenizer(lines, 300)\n"
        "corpus.token_stream(tokenizer, lines)\n"
        "child = os.fork()\n"
        "corpus.token_stream(tokenizer, lines)\n"
        "if child: os.waitpid(child, 0)\n"
    )
    environment = {k: v for k, v in os.environ.items() if k != "TOKENIZERS_PARALLELISM"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        encoding="utf-8",
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")
