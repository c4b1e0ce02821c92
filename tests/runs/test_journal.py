"""Journals of steps: continued and rebuilt. See `test_files.py` for damaged ones."""

import json
import subprocess
import sys
import warnings
import zlib

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import radazo_jax as zo
from tests.helpers import short_runs
from tests.helpers.black_boxes import ESTIMATOR, OPTIMIZER, START, fun, traced
from tests.helpers.compare import Hashed
from tests.helpers.short_runs import square
from tests.helpers.tables import (
    DISTRIBUTIONS,
    ESTIMATORS,
    KINDS,
    each_distribution,
    slow,
)


def run(path, steps, fun=fun, start=START, estimator=ESTIMATOR, **options):
    method = OPTIMIZER, estimator
    return short_runs.run(fun, start, steps, method, journal=path, **options)


def compiled(path, steps, fun=traced, **options):
    method = OPTIMIZER, ESTIMATOR
    return short_runs.traced(fun, START, steps, method, journal=path, **options)


@pytest.mark.parametrize("call", [run, slow(compiled)])
def test_goes_on_where_the_file_ends(call, tmp_path):
    whole = call(tmp_path / "whole.jsonl", 12)
    path = tmp_path / "parts.jsonl"
    for steps in (5, 5, 12, 12):
        parts = call(path, steps)
    chex.assert_trees_all_equal(parts.state, whole.state)
    np.testing.assert_array_equal(parts.values, whole.values)
    np.testing.assert_array_equal(parts.history.step, np.arange(12))
    np.testing.assert_array_equal(parts.history.slope, whole.history.slope)
    if call is run:
        assert parts.best.number == whole.best.number
        assert parts.num_evaluations == whole.num_evaluations
        np.testing.assert_array_equal(parts.best.params, whole.best.params)


def test_is_resumed_wherever_it_is_cut(tmp_path):
    path = tmp_path / "run.jsonl"
    whole, content = run(path, 6), path.read_bytes()
    for size in np.linspace(0, len(content), 12, dtype=int):
        path.write_bytes(content[:size])
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*its last line was not complete")
            chex.assert_trees_all_equal(run(path, 6).state, whole.state)
        # The file is whole again, except for the seconds.
        again = [json.loads(line) for line in path.read_bytes().splitlines()]
        for line, first in zip(again[1:], content.splitlines()[1:], strict=True):
            assert line["values"] == json.loads(first)["values"]


def test_both_drivers_write_the_same_values(tmp_path):
    a, b = tmp_path / "a", tmp_path / "b"
    run(a, 3)
    compiled(b, 3)
    for x, y in zip(lines(a)[1:], lines(b)[1:], strict=True):
        assert (x["values"], x["params"]) == (y["values"], y["params"])


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def nested(params):
    return jnp.sum(params["w"] @ params["w"].T) + jnp.sum(jnp.abs(params["b"]))


def replayed(tmp_path, optimizer, estimator, fun=nested, **options):
    params = {
        "w": jnp.asarray(np.linspace(-1, 1, 12).reshape(3, 4), jnp.float32),
        "b": jnp.ones(5),
    }
    path = tmp_path / "run.jsonl"
    result = zo.train(
        *(fun, params, optimizer, estimator),
        num_steps=6,
        key=1,
        progress=False,
        journal=path,
        **options,
    )
    state = zo.replay(path, params, optimizer, estimator, fun=fun, **options)
    chex.assert_trees_all_equal(state, result.state)
    return params, state


@pytest.mark.parametrize(
    ("distribution", "name"),
    each_distribution(ESTIMATORS, fast=("sphere",), among=KINDS),
)
def test_replays_every_distribution_and_estimator(distribution, name, tmp_path):
    estimator = ESTIMATORS[name](
        DISTRIBUTIONS[distribution], num_directions=3, smoothing=0.1
    )
    replayed(tmp_path, zo.radazo(1e-2), estimator)


@pytest.mark.parametrize(
    "optimizer",
    [
        slow(zo.zo_adamm(1e-2)),
        slow(optax.adamw(optax.cosine_decay_schedule(1e-2, 5))),
        slow(optax.polyak_sgd()),
        slow(
            zo.chain_in_place(
                zo.radazo(1e-2, moments="replayed"), zo.stochastic_rounding(1)
            )
        ),
    ],
)
def test_replays_every_chain(optimizer, tmp_path):
    with jax.numpy_dtype_promotion("standard"):  # As Optax's moments need it.
        replayed(tmp_path, optimizer, ESTIMATOR)


def test_failures_are_rebuilt(tmp_path):
    path, calls = tmp_path / "run.jsonl", []

    def sometimes(x):
        calls.append(x)
        bad = {3: np.nan, 5: np.inf} | dict.fromkeys((8, 9, 10), "text")
        return bad.get(len(calls) - 1, fun(x))

    result = run(path, 4, fun=sometimes)
    assert result.state.failures.evaluations == 5
    assert result.state.failures.skipped == 1
    chex.assert_trees_all_equal(
        zo.replay(path, START, OPTIMIZER, ESTIMATOR), result.state
    )
    failure = "returned 'text' of type str, not a number"
    assert lines(path)[3]["failures"] == [failure] * 3


def test_is_small(tmp_path):
    """20,000 steps of K = 1 in less than 3 MB, whatever the size of the model."""
    path = tmp_path / "run.jsonl"
    estimator = zo.forward_difference(Hashed(), num_directions=1)
    run(path, 20, square, np.ones(10_000, np.float32), estimator=estimator)
    size = [len(line) for line in path.read_bytes().splitlines(keepends=True)]
    assert size[0] + 20_000 * (max(size[1:]) + 4) < 3e6


def of_another_optimizer(path):
    zo.replay(path, START, zo.radazo(1e-2), ESTIMATOR)


def of_another_version(path):
    content = path.read_bytes().replace(b'"optax":"', b'"optax":"0.')
    *body, _ = content.splitlines()[0].rpartition(b',"crc":"')
    head = body[0] + b',"crc":"%08x"}' % zlib.crc32(body[0])
    path.write_bytes(head + b"\n")
    run(path, 3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda path: run(path, 3, key=1),
            r"is \[0, 0\], that of the call is \[0, 1\]",
        ),
        (lambda path: zo.replay(path, START + 1, OPTIMIZER, ESTIMATOR), "its start is"),
        (of_another_optimizer, "before step 1"),
        (lambda path: run(path, 3, bounds=(-9.0, 9.0)), "its bounds is"),
        (
            lambda path: run(path, 3, start=START.astype("f8")),
            r"its params is {'': 'float32\[6\]'}",
        ),
        (of_another_version, "its versions is .*'optax': '0\\."),
        (
            lambda path: zo.replay(
                path, START, OPTIMIZER, zo.central_difference(num_directions=2)
            ),
            "its estimator is",
        ),
        (lambda path: zo.replay(path / "none", START, OPTIMIZER, ESTIMATOR), "journal"),
        (
            lambda path: run(
                path, 3, state=zo.replay(path, START, OPTIMIZER, ESTIMATOR)
            ),
            "state must be None with a journal",
        ),
        (
            lambda path: compiled(path, 3, chunk_size=2),
            "chunk_size must be None with a journal",
        ),
    ],
)
def test_journals_of_other_runs_are_refused(call, message, tmp_path):
    path = tmp_path / "run.jsonl"
    run(path, 3)
    with pytest.raises((ValueError, OSError), match=message) as caught:
        call(path)
    assert "journal" in str(caught.value) and "\n" not in str(caught.value)


def test_other_machines_are_rebuilt_up_to_rounding_if_asked(tmp_path):
    path = tmp_path / "run.jsonl"
    result = run(path, 3)
    state = zo.replay(path, START + 1e-6, OPTIMIZER, ESTIMATOR, exact=False)
    np.testing.assert_allclose(state.params, result.params, atol=1e-4)


REPLAY = """
import sys
import jax, jax.numpy as jnp
jax.config.update("jax_num_cpu_devices", 8)
import radazo_jax as zo
from jax.sharding import PartitionSpec as P

estimator = zo.forward_difference(num_directions=3, smoothing=0.5)
optimizer = zo.zo_sgd(5e-8)
with jax.set_mesh(jax.make_mesh((8,), ("x",))):
    params = jax.device_put(jnp.zeros(80_000), P("x"))
    loss = lambda p: jnp.sum((p - 1.0) ** 2)
    run = (params, optimizer, estimator)
    zo.train(loss, *run, num_steps=600, journal=sys.argv[1], progress=False)
    print(zo.replay(sys.argv[1], *run, fun=loss).step)
"""


@pytest.mark.slow
def test_a_replay_on_many_cpu_devices_waits_for_its_steps(tmp_path):
    """XLA ends a process that queues several hundred steps with collectives."""
    done = subprocess.run(
        [sys.executable, "-c", REPLAY, str(tmp_path / "run.jsonl")],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert "600" in done.stdout.split(), done.stderr[-1000:]
