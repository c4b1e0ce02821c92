"""Runs on workers that hold the model, with calls that never leave the process."""

import threading
import time
from unittest import mock

import chex
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import radazo_jax as zo
from radazo_jax._src.workers import fleet, replica
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
    here, deaths, lock = Here(), [], threading.Lock()

    def before(name, first, values, members):
        # Dies with members in its hands; its successor has another name.
        messages = sum(map(len, here.sent.values()))
        with lock:
            if len(members) and messages // 15 > len(deaths):
                here.alive.discard(name)
                here.alive.add(f"{name}{len(deaths)}")
                deaths.append(name)
        return 0.005

    here.before = before
    result = run(here, 40, journal=path)
    assert len(deaths) > 2
    assert_same(result, expected)
    assert_same_lines(path, expected)
    left = {name for name, x in result.workers.items() if x.left}
    assert left == set(deaths)
    assert all("died" in result.workers[name].left for name in left)


def test_worker_that_starts_again_under_its_name_is_built_again():
    here = Here("a")

    def callback(report):
        if report.step == 4:
            replaced.append(here.replicas.pop("a"))

    replaced = []
    result = run(here, callback=callback)
    assert_same(result, reference())
    assert replaced[0] in here.freed and "died" in result.workers["a"].left


def test_runs_of_workers_are_freed_in_the_end():
    here = Here()
    run(here)
    assert {id(x) for x in here.freed} == {id(x) for x in here.replicas.values()}


def test_worker_that_catches_up_gets_the_steps_in_parts(tmp_path):
    """Otherwise a long journal would be taken for a worker without an answer."""
    path, here = tmp_path / "run", Here("a")
    begun = run(here, 30, journal=path)
    before = len(here.sent["a"])
    with mock.patch.object(fleet, "_CHUNK", 1):
        result = run(here, 32, journal=path)
    assert len(here.sent["a"]) - before >= 30
    np.testing.assert_array_equal(result.values[:30], begun.values)
    assert_same(result, reference(32))


@pytest.mark.slow
def test_journal_of_another_program_continues_from_its_values(tmp_path):
    """Points one by one leave sums of directions to be rounded in another way."""
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
    with pytest.warns(UserWarning, match="as the journal; before") as found:
        result = run(Here(), journal=path, **run_of)
    assert len(found) == 1
    np.testing.assert_array_equal(result.values[:6], begun.values)
    state = zo.replay(path, fleets.PARAMS, **run_of, exact=False)
    chex.assert_trees_all_equal(state.params, result.params)


def corrupt(here, name, step, before_steps=False):
    """Flips a bit of one parameter of a worker, once: before or after its steps."""
    flipped = []

    def before(to, first, values, members):
        # Another worker answers later, so that its checksum is not the first.
        if to != name:
            return 0.02
        if not flipped and first == step:
            flipped.append(step)
            held = here.replicas[to]
            evaluate = held.evaluate

            def flip(*args):
                held.evaluate = evaluate
                state = held._stepper.state
                b = state.params["b"].at[1].add(np.float32(2**-20))
                params = state.params | {"b": b}
                held._stepper.state = state._replace(params=params)
                return None if before_steps else evaluate(*args)

            if before_steps:
                flip()
            else:
                held.evaluate = flip
        return 0

    here.before = before


@pytest.mark.parametrize(
    ("names", "before_steps"), [("abc", True), ("ab", False), slow("abc", False)]
)
def test_worker_that_drifts_ends_the_run_by_name(names, before_steps, tmp_path):
    """Its checksum is not in the journal, though it was the first."""
    path, here = tmp_path / "run", Here(names)
    corrupt(here, "b", 5, before_steps)
    text = r"same parameters as [abc]; before step [56], .* and [abc] [0-9a-f]{8}\."
    with pytest.raises(zo.RunError, match=text) as error:
        run(here, journal=path)
    assert " b" in str(error.value) and "resumes the run" in str(error.value)
    expected = reference()
    assert_same(run(Here(names), journal=path), expected)
    assert_same_lines(path, expected)


@pytest.mark.parametrize("factor", [np.float32(2), np.float32(1.001)])
@pytest.mark.parametrize("name", "abc")
def test_worker_that_comes_to_evaluate_another_function_ends_the_run(name, factor):
    """Two workers in turn evaluate one point of every tenth step."""
    here, changed = Here(), []

    def before(to, first, values, members):
        if to == name and first >= 3 and not changed:
            changed.append(first)
            evaluate = here.replicas[to].evaluate
            here.replicas[to].evaluate = lambda members: factor * evaluate(members)
        return 0.01

    here.before = before
    text = r"the same function on all workers; at point \d of step \d0, . has the value"
    with pytest.raises(zo.RunError, match=text) as error:
        run(here, 100)
    assert f" {name} has" in str(error.value)
    assert len(error.value.result.values) <= 40


def test_one_point_of_every_tenth_step_is_evaluated_twice():
    here = Here()
    here.before = lambda *args: 0.005  # All are idle when a step begins.
    result = run(here, 41, timeout=600.0)
    evaluations = sum(x.evaluations for x in result.workers.values())
    # At the first step, the others may not be there yet.
    assert 41 * 5 + 4 <= evaluations <= 41 * 5 + 5


def test_worker_that_joins_with_another_function_is_left_out():
    here, factors = Here("a"), [1.0, 2.0]

    def make_fun():
        factor = jnp.float32(factors.pop(0))
        return lambda params: factor * fleets.loss(params)

    def callback(report):
        here.alive.add("b")
        return bool(here.freed)  # Once it is left out.

    here.before = lambda *args: 0.05
    with pytest.warns(UserWarning, match="worker b is left out: .* the first value is"):
        run(here, 60, make_fun=make_fun, callback=callback)


def test_members_of_a_late_worker_go_to_others():
    here, hung = Here(), []

    def before(name, first, values, members):
        if name == "c" and len(members) and not hung:
            hung.append(first)
            return 100
        return 0.05

    here.before = before
    result = run(here, 40, timeout=50.0, callback=lambda report: bool(hung))
    assert hung and not result.workers["c"].left
    assert_same(result, reference(len(result.values)))


def test_worker_that_gives_no_answer_is_dropped():
    here = Here("ab")
    here.before = lambda name, *args: 3600 if name == "b" else 0.05
    result = run(here, 40, timeout=1.0, callback=lambda report: bool(here.freed))
    assert "no answer" in result.workers["b"].left
    assert result.history.failed.sum() == 0
    assert_same(result, reference(len(result.values)))


def test_worker_that_hung_is_not_the_measure_of_the_others():
    """Otherwise the next one that hangs would be waited for three times as long."""
    found = fleet.Fleet(Here(), None, 1, 600.0, lambda: False)
    late = found._workers["a"] = fleet.Worker("a", asked=time.monotonic() - 100)
    found.reports["a"], found.values = fleet.WorkerReport(0), np.zeros(1)
    found._seconds = 0.1
    found._answered(late, [0], replica.Reply([7], np.zeros(0), (0, 0, 0), np.ones(1)))
    assert found.values == [1.0] and found._seconds == 0.2


def test_members_are_shared_out_in_whole_batches():
    """Equal parts of 8 members would be 3, 3 and 2."""
    here, given = Here(), []

    def before(name, first, values, members):
        given.append(len(members))
        return 0.01  # All are idle when a step begins.

    here.before = before
    run(here, 6, estimator=zo.forward_difference(Hashed(), 7), batch_size=4)
    # Of the first step, one point is evaluated by two workers.
    assert given.count(4) > 6
    assert all(size % 4 == 0 for size in given[4:]) and max(given) <= 8


@pytest.mark.slow
def test_a_step_has_more_points_than_16_bits_number():
    estimator = zo.forward_difference(Hashed(), 2**16 + 4)
    result = run(Here("a"), 1, estimator=estimator, batch_size=2**14)
    expected = fleets.trained(1, estimator=estimator)
    assert result.num_evaluations == 2**16 + 5 and not np.any(result.history.failed)
    chex.assert_trees_all_close(result.params, expected.params, rtol=1e-5)


def test_workers_that_stand_still_are_warned_about():
    with pytest.warns(UserWarning, match="at all points of the first 10 steps"):
        run(Here("a"), 12, make_fun=lambda: lambda p: 0 * fleets.loss(p))


def test_values_that_fail_are_dropped_as_by_train():
    def fails(params):
        value = fleets.loss(params)
        return jnp.where(params["b"][0] > 0, jnp.nan, value)

    here = Here("a")
    result = run(here, 3, make_fun=lambda: fails)
    expected = fleets.trained(fun=fails)
    assert expected.state.failures.evaluations > 0
    chex.assert_trees_all_equal(result.state.failures, expected.state.failures)
    chex.assert_trees_all_close(result.params, expected.params, atol=1e-4)


# --- Bad input ----------------------------------------------------------------------


def test_make_fun_that_fails_gives_its_traceback_once():
    def broken():
        raise FileNotFoundError("checkpoint.npz")

    with pytest.raises(
        ValueError, match=r"make_fun must build the run on all"
    ) as error:
        run(Here(), make_fun=broken)
    assert str(error.value).count("FileNotFoundError: checkpoint.npz") == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [("start", "0badbad0"), ("versions", {"jax": "0.1"}), ("points", 9)],
)
def test_worker_with_another_run_is_named(name, value):
    here = Here()

    def change(worker, description):
        if worker != "b":
            return description
        return description._replace(line=description.line | {name: value})

    here.change = change
    text = f"the run on all workers; on [abc], {name} is .*; on [abc] it is "
    with pytest.raises(ValueError, match=text) as error:
        run(here)
    assert "on b" in str(error.value)


def test_late_worker_with_another_run_is_left_out():
    here = Here("a")
    here.before = lambda *args: 0.05

    def change(name, description):
        line = description.line | {"start": "0badbad0"}
        return description._replace(line=line) if name == "b" else description

    here.change = change
    with pytest.warns(UserWarning, match="worker b is left out: .* start is 0badbad0"):
        result = run(here, 30, callback=lambda report: here.alive.add("b"))
    assert "b" not in result.workers and len(result.values) == 30


def test_worker_with_another_version_is_named_on_a_line():
    here, build = Here(), Here.build

    def changed(self, name, given, timeout):
        if name == "b":
            given = ("radazo_jax 9.9, Python 2.7", given[1])
        return build(self, name, given, timeout)

    text = r"on b, it has radazo_jax \d.*, and the driver has radazo_jax 9\.9, Python"
    with (
        mock.patch.object(Here, "build", changed),
        pytest.raises(ValueError, match=text) as error,
    ):
        run(here)
    assert "\n" not in str(error.value)


def test_journal_of_another_run_is_refused_and_kept(tmp_path):
    path = tmp_path / "run"
    run(Here("a"), 3, journal=path)
    before = path.read_bytes()
    params = fleets.PARAMS | {"b": np.ones(4, np.float32)}
    with pytest.raises(ValueError, match="must be of this run"):
        run(Here(), journal=path, params=params)
    assert path.read_bytes() == before


def test_optimizer_that_evaluates_is_refused():
    optimizer = optax.chain(
        zo.zo_sgd(1.0), optax.scale_by_backtracking_linesearch(max_backtracking_steps=3)
    )
    with pytest.raises(ValueError, match="must build the run on all workers; on a"):
        run(Here("a"), optimizer=optimizer)


@pytest.mark.parametrize(
    "estimator",
    [fleets.ESTIMATOR, slow(zo.evolution_strategy(zo.rademacher(), 4, 1e-2))],
)
def test_function_with_more_than_a_scalar_is_refused(estimator):
    with pytest.raises(ValueError, match="must return a scalar loss"):
        run(Here("a"), make_fun=lambda: lambda p: p["b"], estimator=estimator)


def test_no_workers(tmp_path):
    path = tmp_path / "run"
    run(Here("a"), 2, journal=path)
    before = path.read_bytes()
    with pytest.raises(ValueError, match="client must have workers; got none"):
        run(Here(""), timeout=0.3, journal=path)
    assert path.read_bytes() == before


def test_journal_is_complete_if_all_workers_are_lost(tmp_path):
    path, here = tmp_path / "run", Here("a")

    def callback(report):
        here.alive.discard("a") if report.step == 4 else None

    with pytest.raises(zo.RunError, match="client must have workers; got") as error:
        run(here, journal=path, callback=callback, timeout=1.0)
    assert error.value.state.step == 4
    result = run(Here(), journal=path)
    assert_same(result, reference())


def test_wait_for_the_parameters_of_a_silent_worker_ends():
    here = Here("a")
    here.slow["a", "params"] = 3600
    with pytest.raises(zo.RunError, match="gave no parameters") as error:
        run(here, timeout=0.5)
    assert len(error.value.result.values) == STEPS


def test_parameters_come_from_another_worker_if_one_is_silent():
    here = Here("ab")
    here.slow["a", "params"] = 3600
    assert_same(run(here, timeout=2.0), reference())


def test_worker_that_cannot_build_the_run_again_keeps_the_result():
    here = Here("a")

    def callback(report):
        here.change = lambda name, description: "no checkpoint"
        here.replicas.pop("a", None)  # Its process has started again.

    with (
        pytest.warns(UserWarning, match="a is left out"),
        pytest.raises(zo.RunError, match="no checkpoint") as error,
    ):
        run(here, callback=callback)
    assert len(error.value.result.values) == 1


def test_worker_that_hangs_while_others_work_is_left_out():
    """It was there from the beginning."""
    here = Here()
    here.slow["b", "describe"] = 3600
    here.before = lambda *args: 0.05
    with pytest.warns(UserWarning, match="worker b is left out: .* built the run in 1"):
        result = run(here, 60, timeout=1.0, callback=lambda report: bool(here.freed))
    assert "b" not in result.workers
    assert_same(result, reference(len(result.values)))


def test_worker_that_dies_whenever_it_builds_the_run_ends_it():
    here, deaths = Here("a"), []

    def change(name, description):
        deaths.append(name)
        raise OSError("connection reset")

    here.change = change
    with pytest.raises(ValueError, match="a, died while it built the run: OSError"):
        run(here, timeout=1.5)
    assert len(deaths) > 1


def test_function_that_fails_on_all_workers_ends_the_run():
    here = Here("a")
    here.build = lambda name, given, timeout: (name, held(*given))

    def held(*given):
        found = replica.Replica(*given)
        found.answer = lambda *args: "Traceback\nRESOURCE_EXHAUSTED: out of memory"
        here.replicas["a"] = found
        return found

    with (
        pytest.warns(UserWarning, match="a is left out"),
        pytest.raises(zo.RunError, match="RESOURCE_EXHAUSTED"),
    ):
        run(here)


def test_point_that_kills_its_workers_ends_the_run():
    here, names = Here("a"), iter(range(100))

    def before(name, first, values, members):
        if first + len(values) == 3 and len(members):
            here.alive = {str(next(names))}
        return 0

    here.before = before
    text = r"a point has lost 5 workers; the last one, \d, died"
    with pytest.raises(zo.RunError, match=text) as error:
        run(here)
    assert len(error.value.result.values) == 3


class Client:
    """A client of Dask, as far as arguments are checked."""

    nthreads = submit = cancel = as_current = None
    asynchronous = False


class Asynchronous(Client):
    asynchronous = True


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"make_fun": 3}, TypeError, "make_fun must be a function"),
        ({"client": "tcp://here"}, TypeError, "client must be a distributed.Client"),
        ({"client": Asynchronous()}, TypeError, "Client, not asynchronous, or"),
        ({"client": None}, TypeError, "ray.init.*; got None"),
        ({"timeout": 0}, ValueError, "timeout must be"),
        ({"batch_size": 0}, ValueError, "batch_size must be"),
        ({"on_failure": "retry"}, ValueError, "on_failure must be"),
        ({"params": {}}, ValueError, "params must hold"),
    ],
)
def test_arguments_are_checked(change, error, text):
    arguments = {
        "make_fun": fleets.make_fun,
        "params": fleets.PARAMS,
        "optimizer": fleets.OPTIMIZER,
        "estimator": fleets.ESTIMATOR,
        "client": Client(),
    }
    with pytest.raises(error, match=text) as raised:
        zo.distribute(**arguments | change)
    assert "\n" not in str(raised.value)


# --- Messages -----------------------------------------------------------------------


@pytest.mark.slow
def test_messages_do_not_grow_with_the_parameters():
    def sent(width):
        here = Here("a")
        params = {
            "w": np.zeros((6, width), np.float32),
            "b": np.zeros(width, np.float32),
        }
        run(here, 3, params=params)
        return here.sent["a"]

    assert sent(4) == sent(400)
