"""The contract of a search: custom ones, outcomes, and errors."""

import dataclasses
import functools
import json
import pickle
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import radazo_jax as zo
from tests.helpers.compare import Hashed
from tests.helpers.tables import every, jit

DIMENSION, SEEDS, STEPS = 20, 100, 300
START = jnp.full(DIMENSION, 0.3)
ESTIMATOR = zo.forward_difference(Hashed(), num_directions=4)
Outcome = zo.runs.Outcome


# --- Rejected steps restore the parameters ----------------------------------------

ACCELERATED = zo.accelerated(zo.adaptive_difference(zo.orthonormal(), 10))
BOUNDS = {
    "unbounded": None,
    "bounds": (0.0, 1.0),
    "bounds as trees": (jnp.zeros(DIMENSION), jnp.ones(DIMENSION)),
}


def quadratic(x, matrix, center):
    return (x - center) @ matrix @ (x - center)


def problems(inside):
    """Matrices with condition numbers up to 300, and minima inside the box or not."""
    random = np.random.default_rng(0)
    bases, _ = np.linalg.qr(random.normal(size=(SEEDS, DIMENSION, DIMENSION)))
    largest = random.uniform(0, 2.5, SEEDS)
    scales = np.logspace(0, largest, DIMENSION).T
    matrices = np.einsum("sij,sj,skj->sik", bases, scales, bases)
    low, high = (0.2, 0.8) if inside else (-0.5, 1.5)
    centers = random.uniform(low, high, (SEEDS, DIMENSION))
    return jnp.float32(matrices), jnp.float32(centers)


@functools.cache
def program(bounds):
    """The runs from all keys on all problems."""
    init, step = zo.solver(
        quadratic,
        optax.sgd(1.0),
        ACCELERATED,
        zo.search.parabolic(),
        bounds=BOUNDS[bounds],
    )

    def run(state, key, *problem):
        def body(carry, _):
            state, before = carry
            new, info = step(state, *problem)
            rejected = info.outcome == Outcome.REJECTED
            wrong = rejected & jnp.any(new.params != before)
            inside = jnp.all((new.params >= 0) & (new.params <= 1))
            return (new, state.params), (info.value, rejected, wrong, ~inside)

        state = state._replace(key=key)
        return jax.lax.scan(body, (state, state.params), length=STEPS)[1]

    keys, state = jax.random.split(jax.random.key(0), SEEDS), init(START, 0)
    batched = jax.jit(jax.vmap(run, in_axes=(None, 0, 0, 0)))
    return functools.partial(batched, state, keys)


@pytest.mark.parametrize("bounds", every(BOUNDS, "bounds"))
def test_restores_the_parameters_before_the_step_bit_for_bit(bounds):
    for inside in (True, False):
        found = program(bounds)(*problems(inside))
        values, rejected, wrong, outside = map(np.asarray, found)
        assert np.sum(np.any(rejected, axis=1)) >= SEEDS / 5
        assert not wrong.any()
        assert bounds == "unbounded" or not outside.any()
        assert np.isfinite(values).all()


def cliff(x):
    """A bowl that is infinite beyond a distance of 5 from its minimum."""
    value = jnp.sum((x - 1.0) ** 2)
    return jnp.where(value > 25.0, jnp.inf, value)


TOO_LONG = zo.search.parabolic(extra_evaluations=1, initial_step_size=1e3)


def test_a_rejected_step_leaves_the_optimizer_as_it_was():
    init, step = zo.solver(cliff, zo.radazo(1.0), ESTIMATOR, TOO_LONG)
    step, states, outcomes = jit(step), [init(START, 0)], []
    for _ in range(8):
        state, info = step(states[-1])
        states.append(state)
        outcomes.append(int(info.outcome))
    assert set(outcomes) == {Outcome.TAKEN, Outcome.REJECTED}
    for t in np.flatnonzero(np.array(outcomes) == Outcome.REJECTED):
        before, after = states[t], states[t + 1]
        chex.assert_trees_all_equal(after.optimizer_state, before.optimizer_state)
        chex.assert_trees_all_equal(after.params, states[t - 1].params)


def test_a_bad_last_step_is_undone_without_a_gradient_that_is_not_finite():
    """Neither by a step, nor at the end of a run."""
    seen = []

    def update(updates, state, params=None):
        del params
        finite = jnp.all(jnp.isfinite(updates))
        jax.debug.callback(lambda finite: seen.append(bool(finite)), finite)
        return updates, state

    spy = optax.GradientTransformation(lambda _: optax.EmptyState(), update)
    optimizer = optax.chain(spy, zo.radazo(1.0))
    for num_steps in (1, 2):
        result = zo.minimize(
            cliff,
            START,
            optimizer,
            ESTIMATOR,
            TOO_LONG,
            num_steps=num_steps,
            key=0,
            progress=False,
        )
        chex.assert_trees_all_equal(result.params, START)
        jax.effects_barrier()
    # The first step of both runs alone has a direction.
    assert len(seen) == 2 and all(seen)


@pytest.mark.parametrize(
    "search", [zo.search.whole(), zo.search.parabolic(), zo.search.backtracking()]
)
def test_a_step_to_a_bound_ends_on_it(search):
    """θ + (bound − θ) may be a rounding error apart from the bound."""
    low, high = np.float32(-0.7), np.float32(0.9)
    slopes = jnp.array([1.0, -1.0, 2.0, -3.0])
    init, step = zo.solver(
        lambda x: jnp.sum(slopes * x),
        optax.sgd(1.0),
        zo.full_difference(),
        search,
        bounds=(low, high),
    )

    def run(start):
        state, _ = jax.lax.scan(lambda state, _: step(state), init(start, 0), length=20)
        return state.params

    starts = jax.random.uniform(jax.random.key(0), (50, 4), minval=low, maxval=high)
    ends = jit(jax.vmap(run))(starts)
    expected = np.where(slopes > 0, low, high)
    np.testing.assert_array_equal(ends, np.tile(expected, (50, 1)))


# --- Outcomes ---------------------------------------------------------------------


def outcomes(fun, start, *method, num_steps=4):
    init, step = zo.solver(fun, *method)
    step, state, found = jit(step), init(start, 0), []
    for _ in range(num_steps):
        state, info = step(state)
        found.append(int(info.outcome))
    return found, state


def test_a_step_without_values_is_skipped_and_counted():
    method = zo.radazo(1e-2), ESTIMATOR
    found, state = outcomes(lambda x: jnp.nan * jnp.sum(x), START, *method)
    assert found == 4 * [Outcome.SKIPPED]
    assert int(state.failures.skipped) == int(state.failures.in_a_row) == 4
    chex.assert_trees_all_equal(state.params, START)


def test_a_rejected_step_without_values_is_not_counted_as_skipped():
    def fun(x):
        return jnp.where(jnp.all(abs(x - START) < 0.1), jnp.sum(x), jnp.nan)

    search = zo.search.parabolic(initial_step_size=1e3)
    found, state = outcomes(fun, START, optax.sgd(1.0), ESTIMATOR, search, num_steps=2)
    assert found == [Outcome.TAKEN, Outcome.REJECTED]
    assert int(state.failures.skipped) == int(state.failures.in_a_row) == 0
    assert int(state.failures.evaluations) == 5
    chex.assert_trees_all_equal(state.params, START)


def test_a_gradient_with_missing_values_is_incomplete():
    """The next step evaluates at the same parameters what is missing."""
    start = jnp.array([0.3, 0.5])

    def fun(x):
        return jnp.where(x[0] > start[0], jnp.nan, jnp.sum(x**2))

    method = zo.bfgs(), zo.full_difference(), zo.search.backtracking()
    init, step = zo.solver(fun, *method)
    state, info = jit(step)(init(start, 0))
    assert info.outcome == Outcome.INCOMPLETE
    chex.assert_trees_all_equal(state.params, start)
    assert int(state.failures.skipped) == 0
    state, info = jit(step)(state)
    assert info.outcome == Outcome.TAKEN
    assert (state.params != start).all()


# --- A custom search --------------------------------------------------------------


class HalvingState(NamedTuple):
    before: Any
    value: jax.Array
    size: jax.Array


@dataclasses.dataclass(frozen=True, repr=False)
class Halving(zo.search.Search):
    """Halves the step size when a step raises the loss, and returns."""

    first: float = 8.0

    def init(self, params):
        before = jax.tree.map(jnp.zeros_like, params)
        return HalvingState(before, jnp.float32(jnp.inf), jnp.float32(self.first))

    def judge(self, state, params, value):
        del params
        accepted = value <= state.value
        size = jnp.where(accepted, state.size, state.size / 2)
        return accepted, state._replace(size=size)

    def move(self, state, params, descent):
        step = jax.tree.map(lambda u: state.size * u, descent.direction)
        after = descent.project(optax.apply_updates(params, step))
        return after, HalvingState(params, descent.value, state.size)


def loss(x):
    return jnp.sum((x - 1.0) ** 2)


METHOD = optax.sgd(1.0), zo.central_difference(Hashed(), 20), Halving()


@functools.cache
def run_of_halving(num_steps=30):
    init, step = zo.solver(loss, *METHOD)
    state, step, infos = init(START, 0), jax.jit(step), []
    for _ in range(num_steps):
        state, info = step(state)
        infos.append((float(info.value), int(info.outcome)))
    return state, np.array(infos).T


def test_a_custom_search_finds_its_step_size():
    state, (values, found) = run_of_halving()
    assert set(found) == {Outcome.TAKEN, Outcome.REJECTED}
    rejected = int(np.sum(found == Outcome.REJECTED))
    assert float(state.search_state.size) == 8.0 / 2**rejected
    taken = values[found == Outcome.TAKEN]
    assert (np.diff(taken) <= 0).all() and taken[-1] < 0.7 * taken[0]
    for t in np.flatnonzero(found == Outcome.REJECTED):
        kept = values[:t][found[:t] == Outcome.TAKEN]
        assert values[t] > kept[-1]


def test_a_custom_search_in_minimize():
    state, (values, _) = run_of_halving()
    result = zo.minimize(loss, START, *METHOD, num_steps=30, key=0, progress=False)
    np.testing.assert_allclose(result.values, values, rtol=1e-4, atol=1e-6)
    assert result.state.search_state.size == state.search_state.size
    assert "step_size" not in repr(result.history)


def test_a_custom_search_under_jit_scan_and_vmap():
    state, (values, found) = run_of_halving()
    init, step = zo.solver(loss, *METHOD)

    def run(key):
        return jax.lax.scan(lambda state, _: step(state), init(START, key), length=30)

    ends, infos = jit(jax.vmap(run))(jnp.stack([jax.random.key(0), jax.random.key(1)]))
    np.testing.assert_array_equal(infos.outcome[0], found)
    np.testing.assert_allclose(infos.value[0], values, rtol=1e-4, atol=1e-6)
    assert (infos.value[1] != infos.value[0]).any()
    np.testing.assert_array_equal(ends.search_state.size[0], state.search_state.size)


def test_a_custom_search_with_donated_state():
    expected, _ = run_of_halving()
    init, step = zo.solver(loss, *METHOD)
    donating = jax.jit(step, donate_argnums=0)
    state = init(START, 0)
    for _ in range(30):
        state, _ = donating(state)
    chex.assert_trees_all_equal(state.params, expected.params)
    chex.assert_trees_all_equal(state.search_state, expected.search_state)


def test_a_custom_search_by_hand_and_from_a_journal(tmp_path):
    def fun(x):
        return float(np.sum((x - 1.0) ** 2))

    path = tmp_path / "run.jsonl"
    options = {"num_steps": 12, "key": 0, "progress": False}
    result = zo.minimize_black_box(
        fun, np.asarray(START), *METHOD, journal=path, **options
    )
    told = zo.ask_tell(START, *METHOD)
    for _ in range(12):
        told.tell([fun(x) for x in told.ask()])
    chex.assert_trees_all_equal(told.params, result.state.params)
    rebuilt = zo.replay(path, START, *METHOD)
    chex.assert_trees_all_equal(rebuilt.params, result.state.params)
    assert len(path.read_text().splitlines()) >= 12


def test_searches_are_compared_by_their_fields():
    assert Halving() == Halving(8.0) != Halving(4.0)
    assert hash(Halving()) == hash(Halving(8.0))
    assert repr(Halving(4.0)) == "Halving(first=4.0)"
    assert repr(zo.search.parabolic(0.5)) == "parabolic(decay=0.5)"
    for search in (zo.search.whole(), zo.search.parabolic(), zo.search.backtracking()):
        assert pickle.loads(pickle.dumps(search)) == search
    assert zo.search.whole() != zo.search.backtracking()


# --- What is refused --------------------------------------------------------------


def message_of(kind, call, *args, **kwargs):
    with pytest.raises(kind) as caught:
        call(*args, **kwargs)
    message = str(caught.value)
    assert "\n" not in message
    return message


def solver(search):
    return zo.solver(loss, optax.sgd(1.0), ESTIMATOR, search)


@pytest.mark.parametrize(
    ("search", "end"),
    [
        (zo.radazo(1e-2), ""),
        (zo.search.parabolic, ""),
        (None, "None."),
        (ESTIMATOR, ""),
        (50, "50. Pass num_steps=50 by its name."),
        (1e-2, "0.01. Pass num_steps=0.01 by its name."),
    ],
    ids=["optimizer", "constructor", "none", "estimator", "count", "rate"],
)
def test_something_else_in_place_of_a_search(search, end):
    message = message_of(TypeError, solver, search)
    assert message.startswith("search must be a Search such as search.parabolic(); got")
    assert message.endswith(end)
    if search is not None:  # `minimize` then chooses.
        again = message_of(
            TypeError, zo.minimize, loss, START, optax.sgd(1.0), ESTIMATOR, search
        )
        assert again == message


def test_a_search_in_place_of_an_optimizer():
    message = message_of(TypeError, zo.solver, loss, zo.search.parabolic(), ESTIMATOR)
    assert message == (
        "optimizer must be an Optax transformation such as radazo(1e-3); got "
        "parabolic()."
    )


def test_a_search_with_a_field_that_has_no_hash():
    message = message_of(TypeError, solver, Halving(jnp.ones(2)))
    assert message.startswith("Halving must have hashable fields; got first of type")


def test_a_search_that_is_no_dataclass():
    class Plain(Halving):
        second: float = 1.0

    message = message_of(TypeError, Plain)
    assert message.startswith("Plain must be a frozen dataclass")


class JudgesByANumber(Halving):
    def judge(self, state, params, value):
        return value, state


class JudgesAlone(Halving):
    def judge(self, state, params, value):
        return value <= state.value


class MovesAlone(Halving):
    def move(self, state, params, descent):
        return descent.project(params)


class MovesToADict(Halving):
    def move(self, state, params, descent):
        return {"w": params}, state


class LosesItsState(Halving):
    def move(self, state, params, descent):
        return params, ()


class GoesBackAlone(Halving):
    def back(self, state, params, project):
        return state.before


class GoesToAnotherShape(Halving):
    def back(self, state, params, project):
        return state.before[:2], state


@pytest.mark.parametrize(
    ("search", "method"),
    [
        (JudgesByANumber(), "judge"),
        (JudgesAlone(), "judge"),
        (MovesAlone(), "move"),
        (MovesToADict(), "move"),
        (LosesItsState(), "move"),
        (GoesBackAlone(), "back"),
        (GoesToAnotherShape(), "back"),
    ],
    ids=lambda x: type(x).__name__,
)
def test_a_method_that_returns_something_else(search, method):
    init, step = solver(search)
    message = message_of(TypeError, step, init(START, 0))
    calls = {
        "judge": "judge(state, params, value)",
        "move": "move(state, params, descent)",
        "back": "back(state, params, project)",
    }
    assert message.startswith(f"{method} of the search must return ")
    assert message.endswith(f"It is called as {calls[method]}.")


def test_a_search_in_an_optax_loop():
    message = message_of(
        TypeError, zo.estimate_gradient, ESTIMATOR, 0, zo.search.parabolic()
    )
    assert message == (
        "inner must be an Optax transformation with a learning rate; got the search "
        "parabolic(). Pass it to solver or minimize."
    )


def test_a_search_in_an_optax_chain():
    chain = optax.chain(zo.radazo(1e-2), zo.search.parabolic())
    state = chain.init(START)
    message = message_of(AttributeError, chain.update, START, state, START)
    assert message == (
        "optimizer must have a learning rate, as radazo(1e-2) has; got the search "
        "parabolic(). Pass it to solver or minimize."
    )


def test_a_missing_attribute_of_a_search():
    search = zo.search.parabolic()
    assert not hasattr(search, "update")
    assert message_of(AttributeError, getattr, search, "other") == (
        "'Parabolic' object has no attribute 'other'"
    )


def test_further_evaluations_need_a_loss_that_jax_evaluates(tmp_path):
    expected = (
        "extra_evaluations must be 0 if JAX does not evaluate the loss, as in "
        "ask_tell and with a journal; got 1."
    )
    method = zo.radazo(1.0), ESTIMATOR, zo.search.parabolic(extra_evaluations=1)
    run = zo.ask_tell(START, *method)
    values = np.sum(run.ask() ** 2, axis=1)
    assert message_of(ValueError, run.tell, values) == expected
    path = tmp_path / "run.jsonl"
    options = {"num_steps": 2, "key": 0, "journal": path, "progress": False}
    assert message_of(ValueError, zo.minimize, loss, START, *method, **options) == (
        expected
    )
    assert not path.exists() or all(map(json.loads, path.read_text().splitlines()))
