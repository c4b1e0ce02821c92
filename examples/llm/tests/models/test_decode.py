"""Many replies at once, against one at a time and against each member alone."""

import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import radazo_jax as zo
from radazo_llm.formats import weights
from radazo_llm.models import decode, generate, lora
from radazo_llm.models.decode import generate_tokens
from research import decoding
from research.common import RECORDS

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
        model = weights.load(GOLDEN / "decoders" / family, dtype=jnp.float32)
    return model


@functools.partial(jit, static_argnames=("graphdef", "stop"))
def _decode(graphdef, state, tokens, lengths, key, temperature, stop):
    model = nnx.merge(graphdef, state)
    return generate_tokens(model, tokens, lengths, NUMBER, key, temperature, stop=stop)


def said(model, prompts, temperature=0.0, stop=()):
    return _decode(
        *nnx.split(model), *padded(prompts), jax.random.key(0), temperature, stop
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "soft"), [("qwen2", True), ("opt", False), ("gemma3_text", False)]
)
def test_the_replies_to_each_prompt_alone(family, soft):
    model = loud(family)
    if soft:
        lora.add_prompt(model, length=3, rngs=nnx.Rngs(0))
    expected = [
        list(generate.generate(model, p, max_tokens=NUMBER, key=jax.random.key(0)))
        for p in PROMPTS
    ]
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
        return zo.vectorized().cache(points)

    def population(state, temperature):
        fun = functools.partial(
            replies, temperature=temperature, axis_names=decode.AXIS_NAMES
        )
        return decode.of_members(fun, state, points_of(state))

    # Matrices of a layer, with an axis of directions or members before them.
    jaxpr = jax.make_jaxpr(population)(state, 0.0)
    shapes = [v.aval.shape for e in equations(jaxpr.jaxpr) for v in e.outvars]
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


def test_what_does_not_fit():
    tokens, lengths = padded([[3] * 28])
    with pytest.raises(ValueError, match=r"model's 32 positions; got 5 after 28"):
        generate_tokens(tiny.model(), tokens, lengths, 5, jax.random.key(0), 0.0)


@pytest.mark.slow
def test_a_population_accesses_and_computes_what_plain_decoding_does():
    """Each member's cache is written in place, and never transposed."""
    sizes = {"members": 64, "prompts": 1, "num_tokens": 32}
    found = decoding.compared("cpu", decoding.SMALL, jnp.float32, **sizes)
    assert found["by_bytes"] > 0.85  # The factors of small matrices are not small.
    assert found["by_operations"] > 0.95


def test_a_population_decodes_at_nine_tenths_of_plain_decoding():
    rows = json.loads((RECORDS / "decoding.json").read_text("utf-8"))["rows"]
    assert min(row["share"] for row in rows) > 0.9
