"""Buckets of examples, the batches of a run, its rates, and what it measures."""

import collections
import dataclasses
import io
import tarfile

import jax
import numpy as np
import optax
import pytest
from flax import nnx

from radazo_llm.tune import data, reviews, train
from radazo_llm.tune.batches import Feed, bounds, buckets, chunks
from radazo_llm.tune.command import summary
from radazo_llm.tune.data import Batch

from .. import tables, tiny


def of_lengths(lengths):
    """Examples whose number is their label, with so many tokens each."""
    number, longest = len(lengths), -(-max(lengths) // 8) * 8
    tokens = np.zeros((number, 1, longest), np.int32)
    for row, length in zip(tokens, lengths, strict=True):
        row[0, :length] = 1 + np.arange(length)
    positions = np.repeat(np.array(lengths)[:, None, None] - 1, 2, axis=1)
    ones = np.ones((number, 2, 1))
    return Batch(
        tokens,
        positions.astype(np.int32),
        ones.astype(np.int32),
        ones.astype(np.float32),
        np.arange(number),
    )


LENGTHS = np.random.default_rng(0).integers(3, 30, 50).tolist()


@pytest.mark.parametrize("number", [1, 2, 4, 100])
def test_buckets_divide_examples_and_cut_only_padding(number):
    whole = of_lengths(LENGTHS)
    parts = buckets(whole, bounds(whole, number))
    assert len(parts) <= min(number, 4)  # Lengths are rounded up to multiples of 8.
    assert sorted(i for part in parts for i in part.label) == list(range(50))
    for part in parts:
        length = part.tokens.shape[-1]
        assert length % 8 == 0
        np.testing.assert_array_equal(part.tokens, whole.tokens[part.label, :, :length])
        assert not whole.tokens[part.label, :, length:].any()
    assert sum(part.tokens.size for part in parts) <= whole.tokens.size


def test_longer_examples_than_any_to_train_on_have_a_bucket():
    ends = bounds(of_lengths([3, 7, 12]), 2)
    assert ends.tolist() == [8, 16]
    parts = buckets(of_lengths([17, 5, 16]), ends)
    assert [part.tokens.shape[-1] for part in parts] == [8, 16, 24]
    assert [part.label.tolist() for part in parts] == [[1], [2], [0]]


@pytest.mark.parametrize("size", [1, 7, 50, 64])
def test_chunks_have_one_size_and_each_example_once(size):
    whole, labels = of_lengths(LENGTHS), []
    found = list(chunks(whole, size))
    assert {len(values) for _, chunk in found for values in chunk} == {size}
    for number, chunk in found:
        labels += chunk.label[:number].tolist()
    assert labels == list(range(50))


def test_scores_in_buckets_are_those_in_one_batch():
    whole, model = tiny.examples(8, 2), tiny.model()
    scores = tables.jit(train.scores)
    whole = whole._replace(positions=np.minimum(whole.positions, 3))
    expected = np.asarray(scores(model, whole))
    cut = whole._replace(tokens=whole.tokens[..., :4])
    np.testing.assert_allclose(scores(model, cut), expected, rtol=1e-5)


def test_one_bucket_gives_the_batches_of_batch_at():
    whole = of_lengths(LENGTHS)
    feed = Feed([whole], 3, np.full(20, 7))
    for step in range(20):
        expected = data.batch_at(whole, 3, step, 7)
        for one, two in zip(feed(step), expected, strict=True):
            np.testing.assert_array_equal(one, two)


def test_examples_of_all_buckets_come_equally_often():
    whole = of_lengths(LENGTHS)
    parts = buckets(whole, bounds(whole, 3))
    feed = Feed(parts, 0, np.full(2000, 5))
    seen = collections.Counter(i for step in range(2000) for i in feed(step).label)
    assert len(seen) == 50
    # Within a bucket the counts are equal, except for the last epoch.
    for part in parts:
        counts = [seen[i] for i in part.label]
        assert max(counts) - min(counts) <= 1
    # 10,000 draws of 50 in batches of 5: five standard deviations of a bucket.
    bound = 5 * 200 / np.sqrt(2000 / 3)
    assert all(abs(count - 200) < bound for count in seen.values())


def test_a_longer_run_begins_as_a_shorter_one():
    whole = of_lengths(LENGTHS)
    parts = buckets(whole, bounds(whole, 3))
    short, long = (Feed(parts, 1, np.full(n, 5)) for n in (10, 100))
    for step in range(10):
        np.testing.assert_array_equal(short(step).label, long(step).label)


def test_batches_grow():
    settings = dataclasses.replace(tiny.SETTINGS, batch_size=4, num_steps=9)
    assert settings.batch_sizes().tolist() == [4] * 9
    growing = dataclasses.replace(settings, final_batch_size=12)
    assert growing.batch_sizes().tolist() == [4, 4, 4, 8, 8, 8, 12, 12, 12]
    feed = Feed([of_lengths(LENGTHS)], 0, growing.batch_sizes())
    labels = np.concatenate([feed(step).label for step in range(9)])
    assert len(labels) == 72
    assert sorted(labels[:50]) == list(range(50))  # None twice before all were there.


@pytest.mark.parametrize("schedule", ["constant", "cosine"])
def test_rates_are_those_of_optax(schedule):
    settings = train.Settings(
        schedule=schedule, warmup_steps=5, num_steps=40, learning_rate=0.3
    )
    if schedule == "cosine":
        after = optax.cosine_decay_schedule(0.3, 35)
    else:
        after = optax.constant_schedule(0.3)
    # The first step has a rate already.
    warmup = optax.linear_schedule(0.06, 0.36, 5)
    expected = optax.join_schedules([warmup, after], [5])
    for step in range(40):
        found = settings.learning_rate_at(step)
        assert found == pytest.approx(float(expected(step)), rel=1e-5, abs=1e-7)


@pytest.mark.slow
def test_a_step_of_adamw_is_that_of_optax():
    settings = dataclasses.replace(tiny.SETTINGS, method="adamw", learning_rate=0.01)
    job, state = train.start(settings, tiny.model())
    assert settings.num_evaluations == 3

    def loss(params):
        model = nnx.merge(job.graphdef, params, job.rest)
        return train.loss_fn(model, tiny.TRAIN)

    optimizer = optax.adamw(0.01, 0.9, 0.99)
    with jax.numpy_dtype_promotion("standard"):  # Optax relies on it.
        gradient = tables.jit(jax.grad(loss))(state.params)
        updates, _ = optimizer.update(
            gradient, optimizer.init(state.params), state.params
        )
        expected = optax.apply_updates(state.params, updates)
        found, _ = tiny.train_step(job, state, tiny.TRAIN)
    for one, two in zip(*map(jax.tree.leaves, (found.params, expected)), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-4, atol=1e-7)


def test_a_calibrated_model_answers_each_word_equally_often():
    margin = np.array([0.5, 1.0, 2.0, 3.0, 4.0, 9.0])
    scores = np.stack([np.zeros(6), margin], axis=1)
    label = np.array([0, 0, 1, 0, 1, 1])
    found = train.Measured(np.ones(6), np.ones(6), scores)
    assert found.accuracy(label) == 0.5  # It says 1 to all.
    assert found.calibrated_accuracy(label) == 4 / 6


@pytest.mark.parametrize(
    ("first", "text"),
    [
        (
            {"step": 0, "test_accuracy": 0.5, "test_calibrated": 0.73},
            "untuned 50.0%, untuned with the threshold at its median 73.0%, tuned 80",
        ),
        ({"step": 10, "test_accuracy": 0.8}, "Accuracy on test: tuned 80.0%."),
    ],
)
def test_a_run_ends_with_the_accuracies_that_count(first, text):
    assert text in summary([first, {"step": 10, "test_accuracy": 0.8}])


# --- Movie reviews ----------------------------------------------------------------


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
    path = archive(tmp_path / "a.tar.gz", LINES)
    found = {name: reviews.split(path, name) for name in ("train", "dev", "test")}
    sizes = {name: len(rows) for name, rows in found.items()}
    assert sizes == {"train": 500, "dev": 500, "test": 1000}  # A third has |0.4|.
    together = [row for rows in found.values() for row in rows]
    expected = {
        (f"sentence {i}", 1 - i % 2) for i in range(3000) if abs(0.4 + i % 3) >= 0.5
    }
    assert set(together) == expected and len(together) == len(expected)
    (example, *_) = data.TASKS["reviews"].read(path / "dev")
    sentence, label = found["dev"][0]
    assert example[:3] == (f"{sentence} It was", (" terrible", " great"), label)


@pytest.mark.parametrize(
    ("lines", "name", "message"),
    [
        (LINES, "other.txt", "source distribution: it has no movieReviewSnippets"),
        ([*LINES, "1\tnan\tx"], None, "line 3001 of .* must be a number, a rating"),
        ([*LINES, "1\t2"], None, "line 3001 of .* must be a number, a rating"),
        (LINES[:100], None, "has too few sentences: 66"),
    ],
)
def test_bad_reviews(lines, name, message, tmp_path):
    names = {} if name is None else {"name": name}
    path = archive(tmp_path / "a.tar.gz", lines, **names)
    with pytest.raises(ValueError, match=message):
        reviews.split(path, "dev")
    path.write_bytes(b"no archive")
    reviews._rows.cache_clear()
    with pytest.raises(ValueError, match="must be vaderSentiment's source"):
        reviews.split(path, "dev")
    with pytest.raises(ValueError, match="must be vaderSentiment's source"):
        reviews.split(tmp_path, "dev")
