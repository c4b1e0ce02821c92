"""The policy gradient: advantages, and probabilities of replies."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from radazo_llm.models.decode import Replies, generate_tokens
from radazo_llm.models.opt import OPT
from research import grpo, warm_up

from .. import tiny


@pytest.fixture(scope="module")
def model():
    """A model of five tokens."""
    config = dataclasses.replace(tiny.CONFIG, vocab_size=5)
    return OPT(config, dtype=jnp.float32, rngs=nnx.Rngs(0))


def test_advantages_by_hand():
    rewards = np.array([[1.0, 0.0, 0.0, 1.0], [1.0, np.nan, 3.0, 2.0], [2.0] * 4])
    deviation = np.sqrt(2 / 3)
    expected = [
        np.array([1.0, -1.0, -1.0, 1.0]) / (1 + 2e-4),
        np.array([-1.0, 0.0, 1.0, 0.0]) / (deviation + 1e-4),
        np.zeros(4),
    ]
    found = grpo.advantages(rewards)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert not grpo.advantages(np.full((1, 2), np.nan)).any()


@pytest.mark.slow
def test_probabilities_of_all_replies_are_one(model):
    """There are 21: one ends at once, four after a token, 16 have two tokens."""
    stop = (2,)
    others = [0, 1, 3, 4]
    rows = [((0, 0), 0, True)]
    rows += [((a, 0), 1, True) for a in others]
    rows += [((a, b), 2, False) for a, b in itertools.product(others, others)]
    replies = Replies(*(jnp.array(x) for x in zip(*rows, strict=True)))
    prompts = jnp.tile(jnp.array([[1, 3, 0]]), (len(rows), 1))
    lengths = jnp.full(len(rows), 2)  # The last token is padding.
    logs, drawn = grpo.log_probabilities(model, prompts, lengths, replies, 0.7, stop)
    of_replies = np.exp(np.sum(np.where(drawn, logs, 0), axis=1, dtype=np.float64))
    np.testing.assert_allclose(of_replies.sum(), 1, rtol=1e-5)
    # Greedy decoding takes the likeliest token.
    greedy = generate_tokens(
        model, prompts[:1], lengths[:1], 2, jax.random.key(0), 0.0, stop=stop
    )
    first = int(greedy.tokens[0, 0]) if greedy.lengths[0] else 2
    of_first = [of_replies[0]]
    of_first += [
        of_replies[1 + i] + of_replies[5 + 4 * i :][:4].sum() for i in range(4)
    ]
    assert [2, *others][int(np.argmax(of_first))] == first


def test_several_ends_are_one_event(model):
    prompts, lengths = jnp.array([[1]]), jnp.array([1])
    ended = Replies(jnp.zeros((1, 1), int), jnp.array([0]), jnp.array([True]))
    of_ends = [
        float(
            grpo.log_probabilities(model, prompts, lengths, ended, 1.0, stop)[0][0, 0]
        )
        for stop in ((2,), (4,), (2, 4))
    ]
    np.testing.assert_allclose(np.logaddexp(*of_ends[:2]), of_ends[2], rtol=1e-5)


@pytest.mark.parametrize(
    ("question", "answer"), [("27+64=", "81"), ("12+30=", "42"), ("5+5=", "0")]
)
def test_a_carry_is_forgotten(question, answer):
    assert warm_up.without_carry(question) == answer


def test_a_share_of_the_solutions_forget_the_carry():
    """Tolerances are four standard deviations of 2,000 draws."""
    tokenizer = warm_up.tokenizer()
    settings = warm_up.Settings(batch_size=2000)
    tokens, _ = warm_up.solved(tokenizer, settings, 0, 2)
    carries = forgets = 0
    for row in tokens:
        text = tokenizer.decode(row[row != 0].tolist())
        question, _, answer = text.partition("=")
        a, b = map(int, question.split("+"))
        if a % 10 + b % 10 > 9:
            carries += 1
            forgets += answer == warm_up.without_carry(f"{question}=")
            assert int(answer) in (a + b, a + b - 10)
        else:
            assert int(answer) == a + b
    # Of all 100 pairs of digits, 45 carry.
    assert abs(carries / 2000 - 0.45) < 0.045
    assert abs(forgets / carries - 0.6) < 4 * (0.24 / carries) ** 0.5
