"""Many replies at once, against one at a time and against each member alone."""

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import radazo_jax as zo
from radazo_llm.formats import load as loading
from radazo_llm.models import decode, lora
from radazo_llm.models.decode import generate_tokens

from .. import tiny
from ..tables import equations, jit

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
PROMPTS = [[5, 7, 2, 9], [3], [11, 4]]
NUMBER = 5


def padded(prompts):
    lengths = np.array([len(p) for p in prompts], np.int32)
    tokens = np.full((len(prompts), max(lengths)), 1, np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    return tokens, lengths


def loud(family):
    """A model whose likeliest tokens differ from place to place."""
    if family == "opt":
        model = tiny.model()
        state = nnx.state(model)
        nnx.update(model, jax.tree.map(lambda x: x * 5 if x.ndim > 1 else x, state))
    else:
        model = loading.load(GOLDEN / "decoders" / family, dtype=jnp.float32)
    return model


@functools.partial(jit, static_argnames=("graphdef", "stop"))
def _decode(graphdef, state, tokens, lengths, key, temperature, stop):
    model = nnx.merge(graphdef, state)
    return generate_tokens(model, tokens, lengths, NUMBER, key, temperature, stop=stop)


def said(model, prompts, temperature=0.0, stop=()):
    return _decode(
        *nnx.split(model), *padded(prompts), jax.random.key(0), temperature, stop
    )


def greedy(model, tokens):
    """Computes all logits again for each token; later tokens do not change them."""
    padded = np.zeros((1, len(tokens) + NUMBER), np.int32)
    padded[0, : len(tokens)] = tokens
    for at in range(len(tokens), padded.shape[1]):
        padded[0, at] = tiny.logits(model, padded)[0, at - 1].argmax()
    return padded[0, len(tokens) :].tolist()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "soft"), [("qwen2", True), ("opt", False), ("gemma3_text", False)]
)
def test_the_replies_to_each_prompt_alone(family, soft):
    model = loud(family)
    if soft:
        lora.add_prompt(model, length=3, rngs=nnx.Rngs(0))
    expected = [greedy(model, prompt) for prompt in PROMPTS]
    assert len({token for reply in expected for token in reply}) > 2, "too easy"
    found = said(model, PROMPTS)
    np.testing.assert_array_equal(found.tokens, expected)
    np.testing.assert_array_equal(found.lengths, NUMBER)
    assert not found.ended.any()
    stop = int(found.tokens[0, 2])
    stopped = said(model, PROMPTS, stop=(stop,))
    for row, reply in enumerate(expected):
        length = reply.index(stop) if stop in reply else NUMBER
        assert stopped.lengths[row] == length
        assert stopped.ended[row] == (stop in reply)
        rest = [0] * (NUMBER - length)
        np.testing.assert_array_equal(stopped.tokens[row], reply[:length] + rest)


@pytest.mark.slow
def test_a_population_says_what_each_member_says_alone():
    """In float32, of low rank, greedily and drawn; no member's matrix is built."""
    graphdef, state = nnx.split(loud("opt"))
    tokens, lengths = padded(PROMPTS)
    estimator = zo.evolution_strategy(zo.low_rank(), 6, 0.2)
    draw = zo.estimators.Draw.once(jax.random.key(1))

    def replies(state, temperature, axis_names=()):
        key = jax.random.key(0)
        return generate_tokens(
            nnx.merge(graphdef, state), tokens, lengths, NUMBER, key, temperature,
            stop=(0,), axis_names=axis_names,
        )  # fmt: skip

    def points_of(state):
        points, _ = estimator.points(draw, state, ())
        return zo.vectorized(len(points.scales)).cache(points)

    def population(state, temperature):
        fun = functools.partial(
            replies, temperature=temperature, axis_names=decode.AXIS_NAMES
        )
        return decode.of_members(fun, state, points_of(state))

    # Matrices of a layer, with an axis of directions or members before them.
    jaxpr = jax.make_jaxpr(population)(state, 0.0)
    shapes = [
        v.aval.shape for e in equations(jaxpr.jaxpr) for v in (*e.invars, *e.outvars)
    ]
    matrices = [s for s in shapes if s[-2:] in ((16, 64), (64, 16))]
    assert matrices and all({3, 6}.isdisjoint(s[:-2]) for s in matrices)
    compiled = jit(population)
    alone = jit(jax.vmap(replies, (0, None)))
    members = jit(lambda state: zo.estimators.candidates(points_of(state), state))(
        state
    )
    for temperature in (0.0, 1.0):
        found = compiled(state, temperature)
        expected = alone(members, temperature)
        jax.tree.map(np.testing.assert_array_equal, found, expected)
        assert len(np.unique(np.asarray(found.tokens), axis=0)) == 6, "too easy"


@pytest.mark.slow
def test_drawn_tokens_have_the_probabilities_of_the_logits():
    model = tiny.model()
    model.embed_tokens.embedding[...] *= 20  # So that tokens differ in probability.
    tokens, number = np.array([[3, 4]], np.int32), 400
    logits = tiny.logits(model, tokens)[0, -1]

    @jit
    def draw(key):
        return generate_tokens(model, tokens, np.array([2], np.int32), 1, key, 1.0)

    keys = jax.random.split(jax.random.key(0), number)
    drawn = np.array([draw(key).tokens[0, 0] for key in keys])
    likely = np.asarray(jax.nn.softmax(logits))
    # Tokens in the upper half of the probability: a binomial, to five deviations.
    order = np.argsort(-likely)
    top = order[: np.searchsorted(np.cumsum(likely[order]), 0.5) + 1]
    part = likely[top].sum()
    hits = np.isin(drawn, top).mean()
    assert abs(hits - part) <= 5 * np.sqrt(part * (1 - part) / number)


def test_what_does_not_fit():
    tokens, lengths = padded([[3] * 28])
    with pytest.raises(ValueError, match=r"model's 32 positions; got 5 after 28"):
        generate_tokens(tiny.model(), tokens, lengths, 5, jax.random.key(0), 0.0)
