"""Functions that JAX does not see: executors, ask/tell, failures."""

import itertools
import multiprocessing
import os
import pickle
import signal
import threading
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import workers
from compare import assert_same
from tables import slow
from workers import CENTER

import radazo_jax as zo
from radazo_jax._src.estimate.outside import distinct, outside
from radazo_jax._src.optimize import ask_tell

START = np.zeros(6, np.float32)
OPTIMIZER = zo.radazo(3e-2)
ESTIMATOR = zo.forward_difference(num_directions=3, smoothing=0.5)
STEPS = 12
fun = workers.distance


def traced(x):
    return jnp.sum(jnp.abs(jnp.round((x - CENTER) * 64))) / 64


def run(fun=fun, start=START, steps=STEPS, **options):
    options = {"progress": False, **options}
    return zo.minimize_black_box(fun, start, OPTIMIZER, ESTIMATOR, steps, 0, **options)


@pytest.fixture(scope="module")
def reference():
    return run()


def spawning():
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(2, mp_context=context)


def test_is_the_run_of_minimize(reference):
    compiled = zo.minimize(
        traced, START, OPTIMIZER, ESTIMATOR, STEPS, 0, progress=False
    )
    assert_same(reference.state, compiled.state)
    np.testing.assert_array_equal(reference.values, compiled.values)


def test_with_64_bits():
    with jax.enable_x64():
        result = run(start=START.astype(np.float64), steps=3)
        assert result.params.dtype == np.float64
        assert ask_tell.checksum(result.params).dtype == np.uint32


def test_tunes_nothing_where_nothing_is_named():
    target = np.linspace(-1, 1, 50, dtype=np.float32)

    def far(x):
        return float(1e3 * np.sum((x - target) ** 2))

    start = np.zeros(50, np.float32)
    result = zo.minimize_black_box(far, start, num_steps=30, progress=False)
    assert far(result.params) < 0.01 * far(start)


def test_threads_give_the_same_run(reference):
    with ThreadPoolExecutor(4) as threads:
        assert_same(run(executor=threads).state, reference.state)


def test_processes_give_the_same_run(reference):
    with spawning() as processes:
        assert_same(run(executor=processes).state, reference.state)


@pytest.mark.slow
def test_dask_gives_the_same_run_when_a_worker_is_killed(reference):
    distributed = pytest.importorskip("distributed")
    with (
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, dashboard_address=None
        ) as cluster,
        distributed.Client(cluster) as client,
        client.get_executor() as executor,
    ):
        pids = list(client.run(os.getpid).values())

        def kill(state, values):
            if int(state.step) == 4:
                os.kill(pids[0], signal.SIGKILL)

        assert_same(run(executor=executor, callback=kill).state, reference.state)


@pytest.mark.slow
def test_loky_gives_the_same_run(reference):
    loky = pytest.importorskip("loky")
    assert_same(run(executor=loky.get_reusable_executor).state, reference.state)


def test_a_vectorized_function_gets_all_candidates(reference):
    calls = []

    def batched(xs):
        calls.append(xs.shape)
        return np.array([fun(x) for x in xs]), list(range(len(xs)))

    result = run(batched, batched=True)
    assert_same(result.state, reference.state)
    assert calls == [(4, 6)] * STEPS
    assert result.best.info == result.best.number % 4


def test_ask_and_tell_give_the_same_run(reference):
    init, ask, tell = zo.ask_tell(OPTIMIZER, ESTIMATOR)
    state = init(START, jax.random.key(0))
    for _ in range(STEPS):
        candidates, state = ask(state)
        # A checkpoint between the two.
        bits = jax.random.key_data(state.run.key)
        stored = pickle.loads(pickle.dumps((state._replace(run=None), bits)))
        state = stored[0]._replace(run=state.run)
        again, state = ask(state)
        np.testing.assert_array_equal(candidates, again)
        state = tell(state, [fun(x) for x in candidates])
    assert_same(state.run, reference.state)


def test_finds_the_best_of_all_points(reference):
    seen = []

    def watched(x):
        seen.append((fun(x), x))
        return seen[-1]

    result = run(lambda x: (watched(x)[0], "told"))
    values = np.array([value for value, _ in seen])
    assert result.best.number == np.argmin(values)
    assert result.best.value == values.min()
    assert result.best.info == "told"
    np.testing.assert_array_equal(result.best.params, seen[np.argmin(values)][1])
    assert result.num_evaluations == len(values) == STEPS * 4
    assert_same(result.state, reference.state)


def test_parameters_and_candidates_stay_within_bounds():
    points = []

    def watched(x):
        points.append(x)
        return fun(x)

    result = run(watched, bounds=(-0.25, np.full(6, 0.5, np.float32)), steps=30)
    points = np.stack([*points, result.params])
    assert points.min() == -0.25
    assert points.max() == 0.5


NONE = [float("nan"), float("inf"), "text", np.ones(2), None, {}]


@pytest.mark.parametrize("bad", NONE, ids=str)
def test_what_is_not_a_number_is_dropped(bad):
    """As if the direction had not been drawn: the mean of the others."""
    calls = itertools.count()

    def sometimes(x):
        return bad if next(calls) == 2 else fun(x)

    result = run(sometimes, steps=1)
    assert result.state.failures.evaluations == 1
    key = jax.random.split(jax.random.fold_in(jax.random.key(0), 0))[0]
    points = ESTIMATOR.points(key, START, ())
    candidates = zo.candidates(points, START)
    values = np.array([fun(x) for x in candidates], np.float64)
    # Of the points 0 (θ), 1, 2 and 3, the third call is of the second direction.
    u = (np.asarray(candidates, np.float64)[1:] - START) / 0.5
    slopes = (values[1:] - values[0]) / 0.5
    expected = 6 / 2 * (slopes[0] * u[0] + slopes[2] * u[2])
    found = jnp.asarray(np.where(np.arange(4) == 2, np.nan, values), jnp.float32)
    estimate, _ = ESTIMATOR.reduce(points, found, START, ())
    np.testing.assert_allclose(estimate.gradient, expected, rtol=1e-4)
    assert estimate.num_values == 3


def states_of_steps(failing):
    """The states after three steps, in which these evaluations fail."""
    calls, states = itertools.count(), []

    def sometimes(x):
        if next(calls) in failing:
            raise OSError("no answer")
        return fun(x)

    def keep(state, values):
        states.append(jax.device_get(state))

    run(sometimes, steps=3, callback=keep)
    return states


def test_a_step_without_values_is_skipped():
    for failing in ([4], [5, 6, 7]):
        before, after, last = states_of_steps(failing)
        assert after.failures.skipped == last.failures.skipped == 1
        assert after.failures.in_a_row == 1
        assert last.failures.in_a_row == 0
        assert_same(before.params, after.params)
        assert_same(before.optimizer_state, after.optimizer_state)
        assert np.any(last.params != after.params)


def test_compiled_runs_drop_and_skip_alike():
    """NaN at the same points gives the run of the black box, bit for bit."""

    def fails(x):
        return x[0] > 0.2

    def sometimes(x):
        return np.nan if fails(x) else fun(x)

    compiled = zo.minimize(
        lambda x: jnp.where(fails(x), jnp.nan, traced(x)),
        START,
        OPTIMIZER,
        ESTIMATOR,
        STEPS,
        0,
        progress=False,
    )
    outside = run(sometimes)
    assert outside.state.failures.evaluations > 0
    assert_same(outside.state, compiled.state)


def test_a_point_that_a_step_has_twice_is_evaluated_once():
    """At first nothing lies ahead: the point there is θ, as in a run that has both."""
    calls, values = [], []

    def fun(x):
        calls.append(None)
        return float(np.sum((x - 1) ** 2))

    def see(state, found):
        values.append(found)

    estimator = zo.accelerated(zo.forward_difference(zo.orthonormal(), 4))
    result = zo.minimize_black_box(
        fun,
        np.zeros(12, np.float32),
        zo.parabolic_sgd(),
        estimator,
        8,
        progress=False,
        callback=see,
    )
    steps = np.array(values)
    assert steps.shape == (8, 6)
    assert result.num_evaluations == 48
    # In each of the first three steps all directions are new.
    twice = steps[:, 0] == steps[:, 1]
    assert twice[:3].all() and not twice.all()
    assert len(calls) == 48 - np.sum(twice)


def test_a_failure_is_that_of_all_points_that_are_the_same():
    def fun(x):
        if np.allclose(x, 0):
            raise ValueError("not here")
        return float(np.sum(x))

    with outside(fun, None) as evaluate:
        found = distinct(evaluate)(np.array([[0.0], [0.0], [1.0]]), 3)
    np.testing.assert_array_equal(found.values, [np.nan, np.nan, 1.0])
    assert found.failures == dict.fromkeys((0, 1), "ValueError: not here")


def test_retries_evaluate_the_same_point_again(reference):
    failed = {}

    def flaky(x):
        if failed.setdefault(x.tobytes(), 0) < 2:
            failed[x.tobytes()] += 1
            raise OSError("no answer")
        return fun(x)

    result = run(flaky, on_failure="retry", max_retries=2)
    assert_same(result.state, reference.state)


def compiled_without_values(**options):
    def fun(x):
        return jnp.sum(x) * jnp.nan

    zo.minimize(fun, START, OPTIMIZER, ESTIMATOR, 9, 0, progress=False, **options)


def test_too_many_failures_end_the_run_with_its_state():
    def broken(x):
        raise OSError("no answer")

    with pytest.raises(zo.RunError, match=r"OSError: no answer") as caught:
        run(broken, max_failures=3)
    assert caught.value.state.step == 3
    with pytest.raises(zo.RunError, match=r"in 3 steps in a row") as caught:
        compiled_without_values(max_failures=3)
    assert caught.value.state.step == 3
    result = run(state=caught.value.state)
    assert result.state.step == 3 + STEPS


def test_raise_ends_the_run_at_the_first_failure():
    calls = []

    def broken(x):
        calls.append(x)
        return "text" if len(calls) == 7 else fun(x)

    with pytest.raises(zo.RunError, match="returned 'text' of type str"):
        run(broken, on_failure="raise")
    assert len(calls) == 8
    with pytest.raises(zo.RunError, match="at step 0"):
        compiled_without_values(on_failure="raise")


def test_a_point_that_hangs_has_failed():
    stop = threading.Event()

    def hangs(x):
        if threading.current_thread().name.endswith("_0"):
            stop.wait()
        return fun(x)

    threads = ThreadPoolExecutor(4)
    try:
        result = run(hangs, executor=threads, timeout=0.2, steps=1)
    finally:
        stop.set()
        threads.shutdown()
    assert result.state.failures.evaluations == 1


@pytest.mark.parametrize("make", [spawning, slow("loky")])
def test_points_that_kill_their_worker_fail_alone(make):
    if make == "loky":
        make = pytest.importorskip("loky").get_reusable_executor
    result = run(workers.kill_some, executor=make, steps=2)
    expected = run(lambda x: np.nan if workers.kills(x) else fun(x), steps=2)
    assert expected.state.failures.evaluations > 0
    assert_same(result.state, expected.state)


def test_an_executor_that_never_works_is_not_made_again_and_again():
    with pytest.raises(zo.RunError, match='if __name__ == "__main__"'):
        run(workers.kill_all, executor=spawning)


def test_a_broken_executor_ends_the_run_with_its_state():
    with (
        spawning() as processes,
        pytest.raises(zo.RunError, match="executor is broken") as caught,
    ):
        run(workers.kill_some, executor=processes, steps=2)
    assert caught.value.state.step in (0, 1)


def test_ctrl_c_keeps_the_steps_before():
    def interrupted(x):
        if len(calls) == 9:
            os.kill(os.getpid(), signal.SIGINT)
        calls.append(x)
        return fun(x)

    calls = []
    result = run(interrupted)
    assert len(result.values) == 2
    assert_same(result.state, run(steps=2).state)


def test_a_few_failures_at_random_change_little():
    """As far from the minimum as clean runs end, with other keys."""

    def final(key, share):
        def sometimes(x):
            return np.nan if draws.random() < share else smooth(x)

        draws = np.random.default_rng(key)
        result = zo.minimize_black_box(
            sometimes, START, OPTIMIZER, ESTIMATOR, 150, key, progress=False
        )
        failed = int(result.state.failures.evaluations)
        return smooth(np.asarray(result.params)), failed

    def smooth(x):
        return float(np.sum((x - CENTER) ** 2))

    clean = [final(key, 0)[0] for key in range(4)]
    for share in (0.01, 0.1):
        for key in range(2):
            value, failed = final(key, share)
            assert 0 < failed < 600 * share * 3
            assert value < 3 * max(clean)


def bad_values(values):
    init, ask, tell = zo.ask_tell(OPTIMIZER, ESTIMATOR)
    _, state = ask(init(START, 0))
    tell(state, values)


def told_twice():
    init, ask, tell = zo.ask_tell(OPTIMIZER, ESTIMATOR)
    _, state = ask(init(START, 0))
    tell(tell(state, np.zeros(4)), np.zeros(4))


def other_tree():
    _, ask, _ = zo.ask_tell(OPTIMIZER, ESTIMATOR)
    init, _, _ = zo.ask_tell(zo.zo_sgd(1e-2), ESTIMATOR)
    ask(init(START, 0))


def not_told():
    init, _, tell = zo.ask_tell(OPTIMIZER, ESTIMATOR)
    tell(init(START, 0), np.zeros(4))


def shut_down():
    threads = ThreadPoolExecutor(1)
    threads.shutdown()
    run(executor=threads)


def forking():
    context = multiprocessing.get_context("fork")
    run(executor=ProcessPoolExecutor(1, mp_context=context))


def not_picklable():
    with spawning() as processes:
        run(lambda x: 0.0, executor=processes)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: bad_values(np.zeros(5)),
            ValueError,
            r"shape \(4,\); got shape \(5,\)",
        ),
        (lambda: bad_values(["a"] * 4), TypeError, "values must be real numbers"),
        (told_twice, ValueError, "told already"),
        (not_told, ValueError, "must follow an ask"),
        (other_tree, ValueError, "state must be of this optimizer"),
        (shut_down, ValueError, "executor must be running"),
        (forking, ValueError, r'get_context\("spawn"\)'),
        (not_picklable, TypeError, "ThreadPoolExecutor"),
        (lambda: run(executor=3), TypeError, "executor must be a concurrent.futures"),
        (lambda: run(timeout=1.0), ValueError, r"ThreadPoolExecutor\(1\)"),
        (lambda: run(on_failure="skip"), ValueError, "on_failure must be 'drop'"),
        (lambda: run(max_failures=0), ValueError, "max_failures must be an int ≥ 1"),
        (lambda: run(max_retries=-1), ValueError, "max_retries must be an int ≥ 0"),
        (lambda: run(fun=3), TypeError, "fun must be a function"),
        (lambda: run(bounds=(0.5, 1.0)), ValueError, "params must lie within bounds"),
        (lambda: run(bounds=3.0), ValueError, "bounds must be a pair"),
        (lambda: run(bounds=(-1, {"a": 2})), ValueError, "bounds must be a pair"),
        (
            lambda: zo.minimize(
                traced, START, OPTIMIZER, ESTIMATOR, 1, 0, on_failure="retry"
            ),
            ValueError,
            "on_failure must be 'drop' or 'raise' where fun is compiled",
        ),
    ],
)
def test_bad_input_is_named(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_the_bar_tells_the_best_the_rate_and_failures(capsys):
    calls = itertools.count()
    run(lambda x: fun(x) if next(calls) != 2 else np.nan, steps=2, progress=True)
    shown = capsys.readouterr().err
    assert all(f"{name}=" in shown for name in ("best", "evaluations/s", "failed"))
