"""Warnings: losses that rise, runs that stand still, batches without a key."""

import itertools
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

import radazo_jax as zo
from radazo_jax._src.runs.loop import Rising
from tests.helpers.compare import Hashed
from tests.helpers.tables import slow

RNG = np.random.default_rng(0)
NOISE = RNG.normal(size=1000)
STEPS = np.arange(1000)


@pytest.mark.parametrize(
    "losses, warns",
    [
        (2 + STEPS / 100, True),
        (2 + STEPS / 100 + NOISE / 4, True),
        (2 - STEPS / 1000 + NOISE, False),
        (2 + NOISE, False),
        (np.where(STEPS < 2, 2, 5 + NOISE / 4), True),
        (np.where(STEPS < 2, 2, 2.5 + NOISE / 4), False),
        (np.full(1000, 2.0), False),
        (np.where(STEPS < 500, 5 - STEPS / 200, 2.5 + (STEPS - 500) / 1000), False),
        (np.where(STEPS < 900, 2 + STEPS / 100, np.nan), True),
        (np.where(STEPS % 20 == 0, np.nan, 2 + STEPS / 100), False),
    ],
)
@pytest.mark.parametrize("chunk", [1, 64])
def test_a_rise_is_told_from_noise(losses, warns, chunk):
    told, rising = [], Rising(len(losses), lambda: "Try less.")

    def see():
        for begin in range(0, len(losses), chunk):
            rising.see(losses[begin : begin + chunk])

    if not warns:
        return see()
    with pytest.warns(UserWarning, match=r"The loss has risen from .* Try less\.") as w:
        see()
    told.extend(w)
    assert len(told) == 1


@pytest.mark.parametrize("num_steps", [None, 199])
def test_short_runs_are_not_judged(num_steps):
    Rising(num_steps, lambda: "").see(2 + STEPS / 100)


def noisy_loss(params, batch):
    return 1 + jnp.mean((params - batch) ** 2)


def jittery(params, batch):
    """Short differences show the sine alone, and steps are a random walk."""
    return noisy_loss(params, batch) + jnp.sin(3e3 * jnp.sum(params)) / 10


def sample(key):
    return jax.random.normal(key, (16,)) / 4


def run_noisy(fun, **options):
    return zo.train(
        fun, jnp.ones(16), sample=sample, num_steps=400, progress=False, **options
    )


@pytest.mark.slow
def test_a_run_that_rises_is_told_the_measured_rate_and_smoothing():
    found = zo.find_learning_rate(jittery, jnp.ones(16), 400, sample=sample)
    text = (
        "The loss has risen .* Measured at the start: radazo"
        rf"\({found.learning_rate:.2g}\) with smoothing={found.smoothing:.2g}"
    )
    with pytest.warns(UserWarning, match=text) as told:
        run_noisy(jittery, optimizer=zo.radazo(0.05), estimator=zo.forward_difference())
    assert len(told) == 1 and told[0].filename == __file__


@pytest.mark.slow
def test_a_run_at_the_measured_rate_is_not_told():
    assert np.isfinite(run_noisy(noisy_loss).values).all()


# --- Runs that stand still ------------------------------------------------------


START = np.zeros(5, np.float32)
METHOD = (zo.radazo(1e-2), zo.forward_difference(Hashed(), num_directions=4))


def steps(params):
    """The function of the README: constant near the start."""
    return np.abs(np.round(8 * params) - [3, 1, 4, 1, 5]).sum()


def jax_steps(params):
    target = jnp.array([3, 1, 4, 1, 5], jnp.float32)
    return jnp.abs(jnp.round(8 * params) - target).sum()


def warned(run, *args, **kwargs):
    """The result and the warnings of a run."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = run(*args, progress=False, **kwargs)
    assert all(warning.filename == __file__ for warning in caught)
    texts = [str(warning.message) for warning in caught]
    assert all("at all points of the first 10 steps" in text for text in texts)
    return result, texts


def called(*args, **kwargs):
    return zo.train(*args, evaluator=zo.external(), **kwargs)


RUNS = pytest.mark.parametrize(
    ("run", "fun"), [slow(called, steps), (zo.train, jax_steps)]
)


@RUNS
def test_a_run_that_stands_still_is_warned_about_once(run, fun):
    """After ten steps."""
    result, texts = warned(run, fun, START, *METHOD, num_steps=40)
    assert np.all(result.values == 14)
    assert len(texts) == 1
    assert texts[0].startswith("fun returned 14 at all") and "\n" not in texts[0]
    _, texts = warned(run, fun, START, *METHOD, num_steps=9)
    assert not texts


def test_a_journaled_compiled_run_is_warned_about(tmp_path):
    path = tmp_path / "run.jsonl"
    _, texts = warned(zo.train, jax_steps, START, *METHOD, num_steps=12, journal=path)
    assert len(texts) == 1


@RUNS
def test_what_is_advised_moves_the_run(run, fun):
    method = (zo.radazo(1e-2), zo.central_difference(smoothing=0.2))
    result, texts = warned(run, fun, START, *method, num_steps=200)
    assert not texts
    assert result.values.min() < 3


@RUNS
def test_a_run_that_begins_at_its_target_is_not_warned_about(run, fun):
    result, texts = warned(run, fun, START, *METHOD, num_steps=40, target=14.0)
    assert result.stopped == "target" and not texts


@RUNS
def test_a_constant_that_a_run_has_reached_is_not_warned_about(run, fun):
    del fun

    def hinge(x):
        return (x + 0.5).clip(0, None).sum()

    every = zo.central_difference(zo.coordinate(replace=False), num_directions=5)
    result, texts = warned(run, hinge, START, zo.zo_sgd(0.2), every, num_steps=30)
    assert np.all(result.values[-20:] == 0) and not texts
    _, texts = warned(
        run, hinge, START, zo.zo_sgd(0.2), every, num_steps=20, state=result.state
    )
    assert not texts


@RUNS
def test_values_without_a_pattern_are_not_warned_about(run, fun):
    """Steps that are skipped have no equal values."""
    del fun
    with pytest.raises(zo.RunError), warnings.catch_warnings():
        warnings.simplefilter("error")
        run(
            lambda x: x.sum() * np.float32(np.nan),
            START,
            *METHOD,
            num_steps=30,
            progress=False,
        )


# --- Batches without a key ------------------------------------------------------


DATA = np.arange(100, dtype=np.float32)
DESCENT = zo.zo_sgd(0.05), zo.central_difference(Hashed(), num_directions=2)
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


def fit(p, batch):
    return 1 + jnp.mean((p - batch) ** 2)


def in_a_loop(sample):
    init, step = zo.solver(fit, *DESCENT, sample=sample)
    return jax.jit(step)(init(jnp.float32(3.0), 0))


CALLS = {
    "minimize": lambda sample: zo.train(
        fit, jnp.float32(3.0), *DESCENT, sample=sample, num_steps=2, progress=False
    ),
    "solver": in_a_loop,
    "a rate": lambda s: zo.find_learning_rate(
        fit, jnp.float32(3.0), 9, sample=s, distribution=Hashed()
    ),
    "a smoothing": lambda s: zo.find_smoothing(
        fit, jnp.float32(3.0), sample=s, distribution=Hashed()
    ),
    "a diagnosis": lambda s: zo.diagnose(fit, jnp.float32(3.0), DESCENT[1], sample=s),
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
        lambda p, x: p * x, *DESCENT, sample=lambda key: np.float32(next(numbers))
    )
    state = init(jnp.float32(3.0), 0)
    for number in (1, 2):
        before = float(state.params)
        state, info = step(state)
        np.testing.assert_allclose(info.value, before * number, rtol=0.1)
