"""Runs on workers that hold the model, with messages that never leave the process."""

import asyncio
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import radazo_jax as zo
from radazo_jax._src import trees
from radazo_jax._src.workers.messages import failed
from radazo_jax._src.workers.shares import shares
from tests.helpers import fleets
from tests.helpers.compare import Hashed
from tests.helpers.fleets import (
    STEPS,
    Here,
    assert_same,
    assert_same_lines,
    reference,
    run,
)
from tests.helpers.tables import slow

RUNS = {
    "sgd": (fleets.OPTIMIZER, fleets.ESTIMATOR),
    "radazo, signs": (zo.radazo(1e-2), zo.forward_difference(zo.rademacher(), 4)),
    "sgd, central, sphere": (zo.zo_sgd(1e-2), zo.central_difference(zo.sphere(), 2)),
    "population": (zo.zo_sgd(1e-2), zo.evolution_strategy(zo.rademacher(), 4, 1e-2)),
}


@pytest.mark.parametrize("name", ["sgd", *map(slow, list(RUNS)[1:])])
def test_run_equals_that_of_one_process_bit_for_bit(name, tmp_path):
    method = RUNS[name]
    run_of = dict(zip(("optimizer", "estimator"), method, strict=True))
    path = tmp_path / "run"
    expected = reference(**run_of)
    result = run(Here(), journal=path, **run_of)
    assert_same(result, expected)
    assert_same_lines(path, expected)
    state = zo.replay(path, fleets.PARAMS, *method)
    assert int(state.step) == STEPS


def test_run_is_that_of_train(tmp_path):
    """Its programs round in other ways."""
    result = run(Here(), 3)
    expected = fleets.trained()
    assert result.history.evaluations.tolist() == [5, 5, 5]
    # A value is a mean of 12 terms below 1, and a difference of two is divided by μ.
    rounding = 12 * 2**-24 / 5e-3
    np.testing.assert_allclose(result.values, expected.values, rtol=1e-6)
    slopes = (np.sqrt(x.history.slope) for x in (result, expected))
    np.testing.assert_allclose(*slopes, atol=2 * rounding)
    chex.assert_trees_all_close(result.params, expected.params, atol=rounding)


def test_workers_that_die_and_join_change_nothing(tmp_path):
    path, expected = tmp_path / "run", reference(40)
    here, deaths = Here(), []

    def before(address, request):
        # Dies with members in its hands; its successor has another address.
        messages = sum(map(len, here.sent.values()))
        if len(request.members) and messages // 15 > len(deaths):
            here.alive.discard(address)
            here.alive.add(f"{address}{len(deaths)}")
            deaths.append(address)
            raise OSError("connection reset")
        return None

    here.before = before
    result = run(here, 40, journal=path)
    assert len(deaths) > 2
    assert_same(result, expected)
    assert_same_lines(path, expected)
    left = [x for x in result.workers.values() if x.left]
    assert {address for address, x in result.workers.items() if x.left} == set(deaths)
    assert all("died" in x.left for x in left)


def test_call_resumes_from_the_journal(tmp_path):
    path = tmp_path / "run"
    expected = reference()
    begun = run(Here(), 5, journal=path)
    result = run(Here(("d", "e")), journal=path)
    assert_same(result, expected)
    np.testing.assert_array_equal(result.values[:5], begun.values)


@pytest.mark.slow
def test_journal_of_another_program_continues_from_its_values(tmp_path):
    """Points one by one leave sums of directions to be rounded in another way.

    After these steps, workers are compared with one another.
    """
    path = tmp_path / "run"
    run_of = {
        "optimizer": zo.radazo(1e-2),
        "estimator": zo.forward_difference(zo.sphere(), 4),
    }
    begun = zo.train(
        *(fleets.loss, fleets.PARAMS, *run_of.values()),
        num_steps=6,
        evaluator=zo.vectorized(1),
        journal=path,
        progress=False,
    )
    with pytest.raises(ValueError, match="got other parameters before step"):
        zo.replay(path, fleets.PARAMS, **run_of)
    corrupt(here := Here(), "b", 8)
    with pytest.warns(UserWarning) as found:
        result = run(here, journal=path, **run_of)
    texts = [str(warning.message) for warning in found]
    assert len(texts) == 2 and "than the program that wrote it" in texts[0]
    assert "worker b had other parameters than the run before step 9" in texts[1]
    np.testing.assert_array_equal(result.values[:6], begun.values)
    state = zo.replay(path, fleets.PARAMS, **run_of, exact=False)
    chex.assert_trees_all_equal(trees.as_numpy(state.params), result.params)


def corrupt(here, address, step, before_steps=False):
    """Flips a bit of one parameter of a worker, once: before or after its steps."""
    flipped = []

    def before(to, request):
        replica = here.replicas[to]
        repeats = not len(request.values)  # Members of a step, without steps before.
        if to != address or flipped or repeats or request.first != step:
            return

        def flip(*args):
            replica.evaluate = evaluate
            maker = replica._stepper
            b = maker.state.params["b"].at[1].add(np.float32(2**-20))
            maker.state = maker.state._replace(params=maker.state.params | {"b": b})
            return None if before_steps else evaluate(*args)

        flipped.append(step)
        evaluate = replica.evaluate
        if before_steps:
            flip()
        else:
            replica.evaluate = flip

    here.before = before


@pytest.mark.parametrize(
    ("workers", "before_steps"), [("abc", True), ("ab", False), slow("abc", False)]
)
def test_worker_that_drifts_is_told_apart_and_rebuilt(workers, before_steps):
    """If there are two, neither is known to be right: both are rebuilt, and agree."""
    expected = reference()
    here = Here(workers)
    corrupt(here, "b", 5, before_steps)
    with pytest.warns(UserWarning, match="is rebuilt") as found:
        result = run(here)
    assert_same(result, expected)
    both = workers == "ab" and not before_steps
    rebuilt = {x: y.rebuilt for x, y in result.workers.items() if y.rebuilt}
    at = (5 if before_steps else 6,)
    assert rebuilt == ({"a": at, "b": at} if both else {"b": at})
    assert len(found) == 1 + both


def test_worker_that_always_drifts_is_left_out():
    expected = reference()
    here = Here()

    def before(address, request):
        if address == "b" and request.first >= 2:
            maker = here.replicas[address]._stepper
            scaled = jax.tree.map(lambda x: x * 1.0001, maker.state.params)
            maker.state = maker.state._replace(params=scaled)

    here.before = before
    with pytest.warns(UserWarning, match="worker b") as found:
        result = run(here)
    assert_same(result, expected)
    assert result.workers["b"].left == "drifted"
    assert "is left out: its parameters differed" in str(found[-1].message)


def scale_values(here, address, factor):
    """From step 3 on, a worker evaluates a multiple of the function."""

    def before(to, request):
        if to == address and request.first + len(request.values) == 3:
            evaluate = here.replicas[to].evaluate
            here.replicas[to].evaluate = lambda members: factor * evaluate(members)
            here.before = lambda to, request: None

    here.before = before


@pytest.mark.parametrize("factor", [np.float32(2), np.float32(1.001)])
def test_worker_that_comes_to_evaluate_another_function_is_left_out(factor):
    """In the same step if its values stand out, and otherwise at step 4."""
    here = Here()
    scale_values(here, "b", factor)
    with pytest.warns(UserWarning, match="worker b is left out: make_fun must build"):
        result = run(here)
    assert result.workers["b"].left == "evaluates another function"
    if factor == 2:
        assert_same(result, reference())


def test_of_two_workers_that_evaluate_different_functions_both_are_named():
    here = Here("ab")
    scale_values(here, "b", np.float32(2))
    with pytest.raises(zo.RunError, match=r"at point . of step 3 on . and") as error:
        run(here)
    assert all(f" on {address}" in str(error.value) for address in "ab")
    assert len(error.value.result.values) == 3


def test_worker_that_joins_with_another_function_is_left_out():
    here, factors = Here(("a",)), [1.0, 2.0]

    def make_fun():
        factor = jnp.float32(factors.pop(0))
        return lambda params: factor * fleets.loss(params)

    here.before = lambda address, request: asyncio.sleep(0.05)
    with pytest.warns(UserWarning, match="worker b is left out: make_fun must build"):
        run(here, 60, make_fun=make_fun, callback=lambda report: here.alive.add("b"))


@pytest.mark.slow
def test_members_are_repeated_in_few_steps():
    here = Here("ab")
    result = run(here, 128)
    evaluations = sum(x.evaluations for x in result.workers.values())
    # By both workers at the steps 0, 1, 2, 4, …, 64, and at most 8 times in doubt.
    assert 128 * 5 < evaluations <= 128 * 5 + 2 * (8 + 8)


def test_members_of_a_late_worker_go_to_others():
    here, hung = Here(), []

    def before(address, request):
        if address == "c" and len(request.members) and not hung:
            hung.append(request.first)
            return asyncio.sleep(3600)
        return asyncio.sleep(0.05)

    here.before = before
    result = run(here, 40, timeout=600.0, callback=lambda report: bool(hung))
    assert hung and not result.workers["c"].left
    assert_same(result, reference(len(result.values)))


def test_worker_that_gives_no_answer_is_dropped():
    here = Here(("a", "b"))

    def before(address, request):
        return asyncio.sleep(3600) if address == "b" else asyncio.sleep(0.05)

    here.before = before
    result = run(here, 40, timeout=2.0)
    assert "no answer" in result.workers["b"].left
    assert result.history.failed.sum() == 0


@pytest.mark.slow
def test_late_worker_copies_a_state_if_that_is_faster():
    expected = reference(200)
    here = Here(("a",))
    # Slow steps, so that the run lasts long enough on a busy machine.
    here.before = lambda address, request: asyncio.sleep(0.02)
    here.change = lambda address, x: x._replace(seconds_per_step=1.0)

    def callback(report):
        here.alive.add("b") if report.step == 13 else None

    result = run(here, 200, callback=callback)
    assert ("b", "a") in here.copied and result.workers["b"].evaluations
    assert_same(result, expected)


def test_members_are_shared_out_in_whole_batches():
    """Equal parts of 8 members would be 3, 3 and 2."""
    here, given = Here(), []

    def before(address, request):
        given.append(len(request.members))
        return asyncio.sleep(0.01)  # All are idle when a step begins.

    here.before = before
    run(here, 6, estimator=zo.forward_difference(Hashed(), 7), batch_size=4)
    assert given.count(4) > 6 and all(size % 4 == 0 for size in given)


@pytest.mark.slow
def test_a_step_has_more_points_than_16_bits_number():
    estimator = zo.forward_difference(Hashed(), 2**16 + 4)
    result = run(Here(("a",)), 1, estimator=estimator, batch_size=2**14)
    expected = fleets.trained(1, estimator=estimator)
    assert result.num_evaluations == 2**16 + 5 and not np.any(result.history.failed)
    chex.assert_trees_all_close(result.params, expected.params, rtol=1e-5)


def test_workers_that_stand_still_are_warned_about():
    with pytest.warns(UserWarning, match="at all points of the first 10 steps"):
        run(Here(("a",)), 12, make_fun=lambda: lambda p: 0 * fleets.loss(p))


def test_values_that_fail_are_dropped_as_by_train():
    def fails(params):
        value = fleets.loss(params)
        return jnp.where(params["b"][0] > 0, jnp.nan, value)

    here = Here(("a",))
    result = run(here, 3, make_fun=lambda: fails)
    expected = fleets.trained(fun=fails)
    assert expected.state.failures.evaluations > 0
    chex.assert_trees_all_equal(result.state.failures, expected.state.failures)
    chex.assert_trees_all_close(result.params, expected.params, atol=1e-4)


# --- Bad input ----------------------------------------------------------------------


def test_make_fun_that_fails_gives_its_traceback_once():
    def broken():
        raise FileNotFoundError("checkpoint.npz")

    with pytest.raises(ValueError, match=r"make_fun, params") as error:
        run(Here(), make_fun=broken)
    assert str(error.value).count("checkpoint.npz") == 1


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("start", "0badbad0", "params must have the same checksum"),
        ("versions", {"jax": "0.1"}, "versions must be the same"),
        ("points", 9, "make_fun must build a run with the same points"),
    ],
)
def test_worker_with_another_run_is_named(name, value, text):
    here = Here()

    def change(address, description):
        if address != "b":
            return description
        return description._replace(line=description.line | {name: value})

    here.change = change
    with pytest.raises(ValueError, match=f"{text} on all workers; got .* on b"):
        run(here)


def test_late_worker_with_another_run_is_left_out():
    here = Here(("a",))
    here.before = lambda address, request: asyncio.sleep(0.05)

    def change(address, description):
        line = description.line | {"start": "0badbad0"}
        return description._replace(line=line) if address == "b" else description

    here.change = change
    with pytest.warns(UserWarning, match="worker b is left out: params must have"):
        result = run(here, 30, callback=lambda report: here.alive.add("b"))
    assert "b" not in result.workers and len(result.values) == 30


def test_journal_of_another_run_is_refused_and_kept(tmp_path):
    path = tmp_path / "run"
    run(Here(("a",)), 3, journal=path)
    before = path.read_bytes()
    params = fleets.PARAMS | {"b": np.ones(4, np.float32)}
    with pytest.raises(ValueError, match="must be of this run"):
        run(Here(), journal=path, params=params)
    assert path.read_bytes() == before


def test_optimizer_that_evaluates_is_refused():
    optimizer = optax.chain(
        zo.zo_sgd(1.0), optax.scale_by_backtracking_linesearch(max_backtracking_steps=3)
    )
    with pytest.raises(ValueError, match="optimizer and estimator must build a run"):
        run(Here(("a",)), optimizer=optimizer)


@pytest.mark.parametrize(
    "estimator",
    [fleets.ESTIMATOR, slow(zo.evolution_strategy(zo.rademacher(), 4, 1e-2))],
)
def test_function_with_more_than_a_scalar_is_refused(estimator):
    with pytest.raises(ValueError, match="must return a scalar loss"):
        run(Here(("a",)), make_fun=lambda: lambda p: p["b"], estimator=estimator)


def test_no_workers(tmp_path):
    path = tmp_path / "run"
    run(Here(("a",)), 2, journal=path)
    before = path.read_bytes()
    with pytest.raises(ValueError, match="client must have workers; got none"):
        run(Here(()), timeout=0.3, journal=path)
    assert path.read_bytes() == before


def test_journal_is_complete_if_all_workers_are_lost(tmp_path):
    path, here = tmp_path / "run", Here(("a",))

    def callback(report):
        here.alive.discard("a") if report.step == 4 else None

    with pytest.raises(zo.RunError, match="client had no workers for") as error:
        run(here, journal=path, callback=callback, timeout=2.0)
    assert error.value.state.step == 4
    result = run(Here(), journal=path)
    expected = reference()
    assert_same(result, expected)


def test_wait_for_the_parameters_of_a_silent_worker_ends():
    here = Here(("a",))
    here.params = lambda address, run: asyncio.sleep(3600)
    with pytest.raises(zo.RunError, match="gave no parameters for") as error:
        run(here, timeout=2.0)
    assert len(error.value.result.values) == STEPS


def test_worker_that_cannot_build_the_run_again_keeps_the_result():
    here = Here(("a",))

    def callback(report):
        here.change = lambda address, description: "no checkpoint"
        here.replicas["a"].answer = None  # Its process has started again.

    def before(address, request):
        if here.replicas[address].answer is None:
            raise OSError("connection reset")

    here.before = before
    with (
        pytest.warns(UserWarning, match="a is left out"),
        pytest.raises(zo.RunError, match="no checkpoint") as error,
    ):
        run(here, callback=callback)
    assert len(error.value.result.values) == 1


def test_worker_that_hangs_while_others_work_is_left_out():
    """It was there from the beginning."""
    here, hung = Here(), []
    reference(1)  # Compiles, so that the other workers are there in time.
    install = here.install

    async def hangs(address, *args):
        if address == "b":
            try:
                await asyncio.sleep(3600)
            finally:
                hung.append(address)
        return await install(address, *args)

    here.install = hangs
    here.before = lambda address, request: asyncio.sleep(0.02)
    with pytest.warns(UserWarning, match="worker b is left out: make_fun, params"):
        result = run(here, 1000, timeout=2.0, callback=lambda report: len(hung) > 0)
    assert "b" not in result.workers
    assert_same(result, reference(len(result.values)))


def test_function_that_fails_on_all_workers_ends_the_run():
    here = Here(("a",))

    def answer(request):
        return failed("Traceback\nRESOURCE_EXHAUSTED: out of memory")

    def before(address, request):
        here.replicas[address].answer = answer

    here.before = before
    with (
        pytest.warns(UserWarning, match="a is left out"),
        pytest.raises(zo.RunError, match="RESOURCE_EXHAUSTED"),
    ):
        run(here)


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"make_fun": 3}, TypeError, "make_fun must be a function"),
        ({"client": "tcp://here"}, TypeError, "client must be a distributed.Client"),
        ({"timeout": 0}, ValueError, "timeout must be"),
        ({"batch_size": 0}, ValueError, "batch_size must be"),
        ({"on_failure": "retry"}, ValueError, "on_failure must be"),
        ({"params": {}}, ValueError, "params must hold"),
    ],
)
def test_arguments_are_checked(change, error, text):
    class Client:
        scheduler = rpc = run = sync = asynchronous = None

    arguments = {
        "make_fun": fleets.make_fun,
        "params": fleets.PARAMS,
        "optimizer": fleets.OPTIMIZER,
        "estimator": fleets.ESTIMATOR,
        "client": Client(),
    }
    with pytest.raises(error, match=text):
        zo.distribute(**arguments | change)


# --- Messages -----------------------------------------------------------------------


@pytest.mark.slow
def test_messages_do_not_grow_with_the_parameters():
    def sent(width):
        here = Here(("a",))
        params = {
            "w": np.zeros((6, width), np.float32),
            "b": np.zeros(width, np.float32),
        }
        run(here, 3, params=params)
        return here.sent["a"]

    # The number of a run, which is drawn, and times take more or fewer bytes.
    np.testing.assert_allclose(sent(4), sent(400), rtol=0, atol=8)


def test_shares_end_first():
    """Compared with all ways to share out batches."""
    for rates in ((1.0, 1.0, 0.1), (3.0, 2.0, 1.0), (0.5, 4.0, 4.0)):
        for n in range(1, 8):
            found = shares(n, rates)
            assert sum(found) == n

            def end(counts, rates=rates):
                return max(c / r for c, r in zip(counts, rates, strict=True))

            ways = itertools.product(range(n + 1), repeat=len(rates))
            best = min(end(way) for way in ways if sum(way) == n)
            assert end(found) == pytest.approx(best)
    assert shares(3, []) == []
