"""A run that continues gives the result of the last call alone."""

import pickle
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import radazo_jax as zo
from radazo_jax.runs import Evaluations
from tests.helpers.host_runs import (
    CENTER,
    METHODS,
    START,
    Function,
    assert_same,
    bowl,
    quiet,
    ripples,
    rosenbrock,
    rows,
    run,
)
from tests.helpers.subprocesses import output_of
from tests.helpers.tables import slow

# --- Any sequence of budgets ------------------------------------------------------


def budget_of(rng):
    """A budget: none, evaluations, and what else may end a run."""
    kind = rng.integers(6)
    most = {"max_evaluations": int(rng.integers(1, 70))}
    if kind == 0:
        return {}
    if kind == 1:
        return most | {"target": float(rng.uniform(0, 4))}
    if kind == 2:
        return most | {"patience": int(rng.integers(1, 9))}
    return most


def cases(number):
    """Random problems: method, dtypes, noise, failures, and how points are evaluated.

    Calls at the same time have no order, so that their noise has none.
    """
    rng = np.random.default_rng(69)
    for i in range(number):
        noise = 0.1 * float(rng.integers(3) == 0)
        how = ["in turn", "batched", "threads"][
            int(rng.integers(3 if not noise else 1))
        ]
        name = str(rng.choice(list(METHODS)))
        fails = [False, False, "as numbers", "by mistakes"][int(rng.integers(4))]
        # A mistake at the first point is an end; in a batch, all of its points fail.
        if name in ("custom", "repeating") or how == "batched":
            fails = fails and "as numbers"
        yield (
            i,
            name,
            str(rng.choice(["float64", "float64", "float32", "bfloat16"])),
            np.float32 if rng.integers(4) == 0 else float,
            noise,
            fails,
            how,
        )


def called(fun, how, *args, **options):
    """The result of a run of which points are evaluated in a way."""
    if how == "threads":
        with ThreadPoolExecutor(3) as pool:
            return quiet(run, fun, *args, executor=pool, **options)
    if how == "batched":
        return quiet(
            run, lambda xs: [fun(x) for x in xs], *args, batched=True, **options
        )
    return quiet(run, fun, *args, **options)


@pytest.mark.parametrize("case", [x if x[0] < 6 else slow(x) for x in cases(200)])
@pytest.mark.parametrize("memory", ["journal", "evaluations"])
def test_any_sequence_of_budgets_gives_the_result_of_the_last(case, memory, tmp_path):
    number, name, dtype, of_value, noise, fails, how = case
    rng = np.random.default_rng([number, 1])
    args = METHODS[name], np.zeros(3, jnp.dtype(dtype))
    path, found = tmp_path / "run.jsonl", None
    for budget in [budget_of(rng) for _ in range(rng.integers(2, 6))]:
        if memory == "journal":
            known = Evaluations.from_journal(path) if path.exists() else None
            more = {"journal": path}
        else:
            known = found and pickle.loads(pickle.dumps(found.evaluations))
            more = {"evaluations": known}
        fun = Function(noise, fails, of_value)
        if known is not None:
            fun = fun.continued(known)
        if memory == "journal" and known is not None:
            fun = Comparing(fun, path)
        found = called(fun, how, *args, **budget, **more)
        alone = called(Function(noise, fails, of_value), how, *args, **budget)
        assert_same(found, alone)


class Comparing:
    """A function whose noise depends on the rows of a file.

    So the one evaluation of a known point, the first call of all, changes no other.
    """

    def __init__(self, fun, path):
        self.fun, self.path, self.count = fun, path, 0

    def __call__(self, x):
        self.count += 1
        if self.fun.noise and self.count <= 2:
            self.fun.counts.clear()
            known = Evaluations.from_journal(self.path).points
            self.fun.counts.update(row.tobytes() for row in known)
        return self.fun(x)


SEQUENCES = {
    "a start at a minimum": (lambda x: bowl(x + 1), ({}, {"max_evaluations": 300})),
    "a minimum, then none": (lambda x: bowl(x + 1), ({"max_evaluations": 60}, {})),
    "a budget beyond the end": (ripples, ({"max_evaluations": 70}, {})),
    "no budget, then one": (ripples, ({}, {"max_evaluations": 300}, {})),
    "a target in between": (ripples, ({"target": 9.0}, {}, {"max_evaluations": 9})),
}


@pytest.mark.parametrize("memory", ["journal", "evaluations"])
@pytest.mark.parametrize("name", SEQUENCES)
def test_a_budget_may_come_and_go(name, memory, tmp_path):
    fun, budgets = SEQUENCES[name]
    start, found = CENTER - 1 if "minimum" in name else START, None
    for budget in budgets:
        more = {"journal": tmp_path / "run.jsonl"}
        if memory == "evaluations":
            more = {"evaluations": found and found.evaluations}
        found = quiet(run, fun, start=start, **budget, **more)
        assert_same(found, run(fun, start=start, **budget))


@pytest.mark.parametrize(
    ("fun", "d", "most"), [(rosenbrock, 2, 90), (bowl, 3, 120), (bowl, 3, 1000)]
)
def test_a_budget_is_what_is_evaluated(fun, d, most):
    """Without restarts, and without a budget, the run ends by itself."""
    for method in (zo.methods.untuned(restarts=0), zo.methods.untuned(tolerance=1e-6)):
        counted = Function(fun=fun)
        result = run(counted, method, np.zeros(d), max_evaluations=most)
        assert len(counted.calls) == result.num_evaluations <= most
        assert result.best.value < 1e-6 * fun(np.zeros(d))
        if method.restarts == 0 and most == 1000:
            assert result.stopped == "converged" and result.num_evaluations < 200


def test_a_journal_keeps_what_a_smaller_budget_does_not_use(tmp_path):
    path = tmp_path / "run.jsonl"
    run(ripples, journal=path, max_evaluations=60)
    content = path.read_bytes()
    for most in (1, 5, 6, 23, 59):
        fun = Function()
        result = run(fun, journal=path, max_evaluations=most)
        assert result.num_evaluations == result.evaluations.used.sum() == most
        assert path.read_bytes() == content and len(fun.calls) <= 1
    with pytest.warns(UserWarning, match=r"has 60 values, of which the run used \d+:"):
        run(ripples, METHODS["evolution"], journal=path, max_evaluations=20)


# --- Other methods and other machines ---------------------------------------------


@pytest.mark.parametrize("name", METHODS)
def test_another_method_uses_what_it_asks_for(name):
    """Its best point is one that it has used."""
    first = run(rosenbrock, zo.methods.slopes(), max_evaluations=40)
    fun = Function(fun=rosenbrock)
    more = {"evaluations": first.evaluations, "max_evaluations": 30}
    found = quiet(run, fun, METHODS[name], **more)
    assert_same(found, run(rosenbrock, METHODS[name], max_evaluations=30))
    assert found.best.value == rosenbrock(found.best.params)
    assert len(found.evaluations) == 40 + len(fun.calls)
    assert len(fun.calls) < 30 or name in ("custom", "repeating")


def test_values_in_float32_continue_as_such():
    """A function of JAX, in which float64 is disabled, has float32 values."""
    fun, seen = jax.jit(lambda x: jnp.sum((1 - x) ** 2) + x[0] ** 4), []
    first = run(fun, start=np.zeros(4, np.float32))
    more = {"evaluations": first.evaluations}
    told = zo.ask_tell(np.zeros(4, np.float32), **more)
    assert told.ended == first.reason and told.best[1:3] == first.best[1:3]
    np.testing.assert_array_equal(told.params, first.params)
    assert first.best.value == float(fun(first.params))
    same = run(lambda x: seen.append(x) or fun(x), start=told.params * 0, **more)
    assert_same(same, first)
    assert not seen


OTHER = """
import os, sys
cores, most, path = sys.argv[1:]
os.sched_setaffinity(0, range(int(cores)))
import numpy as np, radazo_jax as zo
from tests.helpers.host_runs import quiet, run
matrix = (np.random.default_rng(3).normal(size=(3, 3)) / 4).tolist()
def cubes(x):
    rows = (sum(a * b for a, b in zip(row, x)) for row in matrix)
    return float(sum((v - 1) ** 2 + abs(v) ** 3 for v in rows))
def steps(x):
    return float(np.abs(np.round(3 * x - 1)).sum())  # Whole numbers are exact.
d = int(os.environ["D"])
given = {"start": np.zeros(d), "max_evaluations": int(most), "journal": path}
print("ended", quiet(run, steps if d > 3 else cubes, **given).num_evaluations)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("d", "calls"),
    [
        (150, [("1", 600, ""), ("1", 650, ""), ("2", 700, "")]),
        (3, [("1", 400, "Haswell"), ("1", 500, "Prescott")]),
    ],
    ids=["cores", "BLAS"],
)
def test_other_sums_of_a_machine_are_no_other_run(d, calls, monkeypatch, tmp_path):
    """OpenBLAS splits sums by its threads and by the kind of the processor."""
    monkeypatch.setenv("D", str(d))
    for cores, most, kind in calls:
        monkeypatch.setenv("OPENBLAS_CORETYPE", kind)
        if not kind:
            monkeypatch.delenv("OPENBLAS_CORETYPE")
        output = output_of(OTHER, cores, most, tmp_path / "run.jsonl")
        assert output.split()[-2:] == ["ended", str(most)]


# --- Outages and corrected functions-----------------------------------------------


class Outage(Function):
    """A server that is away from some call on."""

    def __init__(self, begin, end=10**6, error=OSError, **options):
        super().__init__(**options)
        self.begin, self.end, self.error = begin, end, error

    def __call__(self, x):
        if self.begin <= len(self.calls) < self.end:
            self.calls.append(np.asarray(x, float).tobytes())
            raise self.error("no license")
        return super().__call__(x)


def failing(fun, *args, **options):
    """The result of a run that may end with too many failures."""
    try:
        return quiet(run, fun, *args, **options)
    except zo.RunError as error:
        return error.result


@pytest.mark.parametrize("memory", ["journal", "evaluations"])
@pytest.mark.parametrize("name", ["untuned", "evolution", "custom", "repeating"])
@pytest.mark.parametrize("error", [OSError, KeyError])
def test_an_outage_leaves_no_trace(name, memory, error, tmp_path):
    """Whatever is reached on each day after it: the last one has the whole budget."""
    method = METHODS[name]
    whole = run(ripples, method, max_evaluations=100)
    for begin, days in ((40, [100]), (17, [26, 20, 33, 100]), (2, [5, 2, 60, 100])):
        given, found = {"journal": tmp_path / f"{begin}.jsonl"}, None
        outage = Outage(begin, error=error)
        found = failing(outage, method, max_evaluations=100, **given)
        for most in [*days, 100]:
            if memory == "evaluations":
                given = {"evaluations": pickle.loads(pickle.dumps(found.evaluations))}
            fun = Function()
            found = failing(fun, method, max_evaluations=most, **given)
            assert found.num_evaluations == most
        assert_same(found, whole)
        # On the last day nothing was left to do, but for the comparison.
        assert len(fun.calls) == (memory == "journal")


def test_the_next_call_says_once_that_it_evaluates_failures_again(tmp_path):
    path = tmp_path / "run.jsonl"
    failing(Outage(30), max_evaluations=200, journal=path)
    with pytest.warns(UserWarning, match="are evaluated again, once,") as caught:
        run(ripples, journal=path, max_evaluations=100)
    assert len(caught) == 1
    assert_same(
        run(ripples, journal=path, max_evaluations=100),
        run(ripples, max_evaluations=100),
    )


@pytest.mark.parametrize("memory", ["journal", "evaluations"])
def test_a_point_that_fails_again_is_not_tried_a_third_time(memory, tmp_path):
    given, counts = {"journal": tmp_path / "run.jsonl"}, []
    for _ in range(4):
        fun = Outage(0)
        fun.begin = 20 if not counts else 0 + (memory == "journal")
        found = failing(fun, METHODS["custom"], max_evaluations=40, **given)
        counts.append(len(fun.calls) - (memory == "journal" and bool(counts)))
        if memory == "evaluations":
            given = {"evaluations": found.evaluations}
    assert counts == [40, 20, 0, 0]


# --- Killed -----------------------------------------------------------------------

KILLED = """
import os, signal, subprocess, sys, warnings
warnings.simplefilter("ignore")
import numpy as np, radazo_jax as zo
from concurrent.futures import ThreadPoolExecutor

kind, method, log, path, most, kills = sys.argv[1:]

def fun(x, log=log, kind=kind):
    import os, signal, time, numpy as np
    with open(log, "a") as file:
        file.write("call\\n")
    calls = sum(1 for _ in open(log)) - int(open(log + ".before").read())
    run = int(open(log + ".pid").read())
    is_its = kind == "dask" or run in (os.getpid(), os.getppid())
    if calls >= int(open(log + ".kill").read()) and is_its:
        os.kill(run, signal.SIGKILL)
    if kind != "turn":
        time.sleep(0.01)
    return float(np.sum((x - 0.3) ** 2) + np.sum(np.sin(9 * x) ** 2))

def run():
    options = {"turn": {}, "workers": {"workers": 2}}.get(kind)
    if kind == "dask":
        options = {"executor": distributed.Client(address).get_executor()}
    elif options is None:
        options = {"executor": ThreadPoolExecutor(2)}
    zo.minimize(
        fun, np.zeros(8), getattr(zo.methods, method)(), max_evaluations=int(most),
        journal=path, progress=False, **options
    )

if kind == "dask":  # Its worker stays when a run is killed.
    import distributed
    cluster = [sys.executable, "-c", os.environ["CLUSTER"]]
    cluster = subprocess.Popen(cluster, stdout=subprocess.PIPE, text=True)
    address = cluster.stdout.readline().strip()
rng, left, killed = np.random.default_rng(5), int(kills), 0
open(log, "w").close()
while True:
    with open(log + ".before", "w") as file:
        file.write(str(sum(1 for _ in open(log))))
    with open(log + ".kill", "w") as file:
        file.write(str(int(rng.integers(2, 9)) if left else 10**6))
    child = os.fork()  # JAX has not begun here.
    if not child:
        with open(log + ".pid", "w") as file:
            file.write(str(os.getpid()))
        run()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if not status:
        break
    assert os.WTERMSIG(status) == signal.SIGKILL and left, status
    left, killed = left - 1, killed + 1
print("killed", killed, "calls", sum(1 for _ in open(log)))
"""


CLUSTER = """
import distributed, time
options = {"n_workers": 1, "threads_per_worker": 2}
found = distributed.LocalCluster(dashboard_address="127.0.0.1:0", **options)
print(found.scheduler_address, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize(
    ("kind", "method", "most", "kills"),
    [
        ("turn", "untuned", 60, 8),
        slow("turn", "untuned", 260, 60),
        slow("turn", "evolution", 260, 60),
        slow("threads", "evolution", 200, 40),
        slow("workers", "evolution", 120, 12),
        slow("dask", "evolution", 50, 3),
    ],
)
def test_a_run_that_is_killed_anywhere_is_the_undisturbed_run(
    kind, method, most, kills, monkeypatch, tmp_path
):
    """A kill by -9 at random evaluations. Only what ran then is evaluated again."""
    if kind == "dask":
        pytest.importorskip("distributed")
    monkeypatch.setenv("CLUSTER", CLUSTER)
    path, log = tmp_path / "run.jsonl", tmp_path / "log"
    output = output_of(KILLED, kind, method, log, path, most, kills, timeout=600)
    killed, calls = (int(output.split()[i]) for i in (-3, -1))

    def fun(x):
        return float(np.sum((x - 0.3) ** 2) + np.sum(np.sin(9 * x) ** 2))

    whole = run(fun, getattr(zo.methods, method)(), np.zeros(8), max_evaluations=most)
    found, expected = Evaluations.from_journal(path), whole.evaluations
    assert killed == kills and len(found) == most
    assert rows(found, used=False) == rows(expected, used=False)
    if kind == "turn":
        np.testing.assert_array_equal(found.points, expected.points)
        np.testing.assert_array_equal(found.values, expected.values)
    # Two run at once, a value may have just arrived, and each call compares a point. A
    # worker of Dask has the other points of the step, too.
    lost = {"turn": 2, "dask": 2 + whole.history.evaluations.max()}.get(kind, 4)
    assert calls <= most + kills * lost


def test_a_file_that_ends_anywhere_continues(tmp_path):
    path, options = tmp_path / "run.jsonl", {"max_evaluations": 60}
    for method in METHODS.values():
        path.unlink(missing_ok=True)
        whole = run(ripples, method, journal=path, **options)
        content = path.read_bytes()
        for size in np.linspace(0, len(content), 12, dtype=int):
            path.write_bytes(content[:size])
            assert_same(quiet(run, ripples, method, journal=path, **options), whole)
            lines = [x.rpartition(b',"seconds"')[0] for x in content.splitlines()]
            again = [
                x.rpartition(b',"seconds"')[0] for x in path.read_bytes().splitlines()
            ]
            assert again == lines


def test_what_arrives_on_an_executor_is_in_the_file_at_once(tmp_path):
    """At the last of 40 points that are asked for at once, 38 are in it."""
    path, counts = tmp_path / "run.jsonl", []

    def fun(x):
        if np.count_nonzero(x) == 1:
            time.sleep(0.005)
            counts.append(len(path.read_bytes().splitlines()) - 1)
        return float(np.sum((x - 0.5) ** 2))

    with ThreadPoolExecutor(2) as pool:
        run(fun, start=np.zeros(40), max_evaluations=60, journal=path, executor=pool)
    assert max(counts[:40]) >= 38
