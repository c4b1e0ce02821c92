"""A `sample` whose batch does not depend on its key is warned of."""

import itertools
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

import radazo_jax as zo

DATA = np.arange(100, dtype=np.float32)
METHOD = zo.zo_sgd(0.05), zo.central_difference(num_directions=2)
ROWS = np.random.default_rng(0)
BATCHES = itertools.cycle(DATA.reshape(25, 4))

# Each makes a batch without the key, in a way that a trace keeps as a constant.
FIXED = {
    "an iterator": lambda key: next(BATCHES),
    "a generator of NumPy": lambda key: DATA[ROWS.integers(0, 100, 4)],
    "a fixed key": lambda key: jax.random.choice(jax.random.key(3), DATA, (4,)),
    "a program": jax.jit(lambda key: jnp.asarray(DATA[:4])),
    "what is dropped": lambda key: (jax.random.normal(key), jnp.asarray(DATA[:4]))[1],
}


def drawn(key):
    return jax.random.choice(key, DATA, (4,))


def from_outside(key):
    """A batch that a callback draws anew at each step."""
    kind = jax.ShapeDtypeStruct((4,), jnp.float32)
    return io_callback(lambda: DATA[ROWS.integers(0, 100, 4)], kind)


def loss(p, batch):
    return 1 + jnp.mean((p - batch) ** 2)


def in_a_loop(sample):
    init, step = zo.solver(loss, *METHOD, sample=sample)
    return jax.jit(step)(init(jnp.float32(3.0), 0))


CALLS = {
    "minimize": lambda sample: zo.train(
        loss, jnp.float32(3.0), *METHOD, sample=sample, num_steps=2, progress=False
    ),
    "solver": in_a_loop,
    "a rate": lambda s: zo.find_learning_rate(loss, jnp.float32(3.0), 9, sample=s),
    "a smoothing": lambda s: zo.find_smoothing(loss, jnp.float32(3.0), sample=s),
    "a diagnosis": lambda s: zo.diagnose(loss, jnp.float32(3.0), sample=s),
}


@pytest.mark.parametrize("call", CALLS)
def test_an_iterator_is_warned_of_once_in_all_calls(call):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        CALLS[call](FIXED["an iterator"])
    texts = [str(x.message) for x in seen if "sample" in str(x.message)]
    assert len(texts) == 1 and "\n" not in texts[0]
    assert re.match("sample must draw by its key; .*jax.random.choice", texts[0])
    assert all(x.filename == __file__ for x in seen)


@pytest.mark.parametrize("kind", FIXED)
def test_each_batch_without_a_key_is_warned_of(kind):
    with pytest.warns(UserWarning, match="sample must draw by its key"):
        CALLS["minimize"](FIXED[kind])


@pytest.mark.parametrize("sample", [drawn, jax.jit(drawn), from_outside])
def test_batches_that_differ_are_not(sample):
    CALLS["minimize"](sample)  # Warnings are errors in tests.
    CALLS["solver"](sample)


def test_steps_that_are_not_compiled_call_it_each_time():
    numbers = itertools.count(1)
    init, step = zo.solver(
        lambda p, x: p * x, *METHOD, sample=lambda key: np.float32(next(numbers))
    )
    state = init(jnp.float32(3.0), 0)
    for number in (1, 2):
        before = float(state.params)
        state, info = step(state)
        np.testing.assert_allclose(info.value, before * number, rtol=0.1)
