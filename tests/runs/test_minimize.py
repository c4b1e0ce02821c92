"""The driver: chunks, resumption, interruption, progress."""

import builtins
import dataclasses
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import radazo_jax as zo
from tests.helpers.compare import Hashed
from tests.helpers.short_runs import called

START = jnp.zeros(20)
OPTIMIZER = zo.radazo(1e-2)
ESTIMATOR = zo.forward_difference(Hashed(), num_directions=4)


def loss(x):
    return jnp.sum((x - 1.0) ** 2)


def noisy_loss(x, xi):
    return jnp.sum((x - xi) ** 2)


def run(num_steps, fun=loss, params=START, **kwargs):
    method = {"optimizer": OPTIMIZER, "estimator": ESTIMATOR}
    kwargs = {"progress": False, "key": 0, **method, **kwargs}
    return zo.train(fun, params, num_steps=num_steps, **kwargs)


def test_is_the_loop_written_by_hand():
    value_and_grad = zo.value_and_grad(loss, ESTIMATOR)

    @jax.jit
    def step(x, state, t):
        key, _ = jax.random.split(jax.random.fold_in(jax.random.key(0), t))
        value, gradient = value_and_grad(key, x)
        updates, state = OPTIMIZER.update(gradient, state, x)
        return optax.apply_updates(x, updates), state, value

    x, state, values = START, OPTIMIZER.init(START), []
    for t in range(20):
        x, state, value = step(x, state, t)
        values.append(value)
    result = run(20)
    np.testing.assert_allclose(result.values, values, rtol=1e-4)
    np.testing.assert_allclose(result.params, x, atol=1e-4)
    assert int(result.state.step) == 20
    assert result.values.dtype == np.float32


def test_a_sample_may_be_a_constant():
    """It is the loss at this batch, with a warning, because its key is not used."""
    with pytest.warns(UserWarning, match="sample must draw by its key"):
        found = run(
            3,
            lambda x, batch: jnp.sum((x - batch[0]) ** 2),
            sample=lambda key: (jnp.float32(0.5),),
        )
    expected = run(3, lambda x: jnp.sum((x - 0.5) ** 2))
    np.testing.assert_allclose(found.params, expected.params, rtol=1e-5)


@pytest.mark.parametrize("chunk_size", [1, 7, 50, 64])
def test_chunks_do_not_change_the_numbers(chunk_size):
    expected, got = run(50), run(50, chunk_size=chunk_size)
    np.testing.assert_array_equal(got.values, expected.values)
    chex.assert_trees_all_equal(got.state, expected.state)


def test_resumes_to_the_same_numbers():
    def sample(key):
        return jax.random.normal(key, START.shape)

    whole = run(60, noisy_loss, sample=sample)
    part = run(23, noisy_loss, sample=sample)
    rest = run(37, noisy_loss, sample=sample, state=part.state)
    np.testing.assert_array_equal(
        np.concatenate([part.values, rest.values]), whole.values
    )
    chex.assert_trees_all_equal(rest.state, whole.state)
    chex.assert_trees_all_equal(rest.params, whole.params)


def test_the_callers_arrays_survive():
    part = run(3)
    before = np.asarray(part.params)
    run(3, state=part.state)
    np.testing.assert_array_equal(part.state.params, before)
    np.testing.assert_array_equal(START, np.zeros(20))


def test_ctrl_c_ends_the_run_with_what_it_has():
    handler = signal.getsignal(signal.SIGINT)

    def interrupt(report):
        if report.step == 20:
            os.kill(os.getpid(), signal.SIGINT)

    result = run(1000, chunk_size=10, callback=interrupt)
    assert result.stopped == "interrupted" and len(result.values) in (20, 30)
    np.testing.assert_array_equal(result.values, run(len(result.values)).values)
    assert signal.getsignal(signal.SIGINT) is handler


@pytest.mark.slow
def test_ctrl_c_from_outside_in_the_middle_of_a_chunk():
    program = textwrap.dedent(
        """
        import jax.numpy as jnp, radazo_jax as zo
        result = zo.train(
            lambda x: jnp.sum(x**2), jnp.ones(1000), zo.radazo(1e-3),
            zo.forward_difference(), num_steps=10**9, progress=False,
            callback=lambda report: print("chunk", flush=True),
        )
        print("kept", len(result.values) == int(result.state.step) > 0, flush=True)
        """
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True
    ) as process:
        lines = (line for line in process.stdout if "chunk" in line)
        for _ in range(5):
            next(lines)
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate(timeout=60)
    assert "kept True" in rest
    assert process.returncode == 0


def test_a_second_ctrl_c_raises():
    def interrupt(report):
        del report
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        run(100, chunk_size=10, callback=interrupt)


def test_other_threads_have_no_signals_to_handle():
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as pool:
        result = pool.submit(run, 5).result()
    np.testing.assert_array_equal(result.values, run(5).values)


def test_progress_bar(capsys):
    run(50, progress=True, chunk_size=25)
    assert "50/50" in capsys.readouterr().err


def test_progress_without_tqdm_is_a_line_a_chunk(capsys, monkeypatch):
    real = builtins.__import__

    def fake(name, *args, **kwargs):
        if name.startswith("tqdm"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", fake)
    result = run(50, progress=True, chunk_size=20)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(":")[0] for line in lines] == [
        "step 20/50",
        "step 40/50",
        "step 50/50",
    ]
    assert lines[-1].endswith(f"loss {result.values[-1]:.6g}")


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"num_steps": 2**31}, ValueError, "num_steps must end a run before"),
        ({"chunk_size": 0}, ValueError, "chunk_size.*0"),
        ({"chunk_size": "10"}, TypeError, "chunk_size.*'10'"),
        ({"key": None}, TypeError, "key must be a key"),
        ({"params": {}}, ValueError, "empty tree"),
        ({"params": jnp.arange(3)}, TypeError, "int32 at params"),
        ({"fun": 3.0}, TypeError, "loss must be a function of params; got 3.0"),
        ({"fun": lambda x: x}, ValueError, r"scalar loss; got an array of shape"),
        ({"optimizer": 1e-3}, TypeError, "optimizer must be an Optax .*; got 0.001"),
        ({"estimator": "fd"}, TypeError, "estimator must be a GradientEstimator.*'fd'"),
    ],
)
def test_bad_input(kwargs, error, message):
    with pytest.raises(error, match=message):
        run(**{"num_steps": 3, **kwargs})


@pytest.mark.parametrize("part", ["optimizer", "estimator"])
@pytest.mark.parametrize("calls", [False, True])
def test_a_run_at_a_traced_number_says_so(part, calls):
    def last(x):
        replaced = {
            "optimizer": zo.radazo(x),
            "estimator": dataclasses.replace(ESTIMATOR, smoothing=x),
        }
        fun = (lambda p: float(np.sum(p))) if calls else loss
        given = {"evaluator": zo.external()} if calls else {}
        return jnp.sum(run(3, fun, **{part: replaced[part]}, **given).params)

    with pytest.raises(TypeError, match=r"got traced ones.*call it outside of jax"):
        jax.grad(last)(1e-2)


@dataclasses.dataclass
class Target:
    """Callable, and without a hash, as dataclasses are."""

    center: float

    def __call__(self, x):
        return jnp.sum((x - self.center) ** 2)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Module:
    """A pytree, as the modules of some frameworks are, of arrays and functions."""

    center: jax.Array
    activation: Callable

    def __call__(self, x):
        return jnp.sum((x - self.activation(self.center)[None]) ** 2)


@pytest.mark.parametrize(
    "fun", [Target(1.0), Module(jnp.ones(()), jnp.abs)], ids=["dataclass", "pytree"]
)
def test_functions_without_a_hash(fun):
    chex.assert_trees_all_equal(run(5, fun).params, run(5).params)


def test_arrays_of_a_function_are_arguments():
    traces = []

    def activation(x):
        traces.append(x)
        return x

    for center in (0.0, 1.0):
        result = run(3, Module(jnp.full((), center), activation))
    assert len(traces) <= 2  # As above: the second run compiles nothing.
    chex.assert_trees_all_equal(result.params, run(3).params)


@pytest.mark.parametrize(
    "fun",
    [
        lambda x: float(x[0]) ** 2,
        lambda x: np.sum(np.abs(x)),
        lambda x: jnp.sum(x) if x[0] > 0 else -jnp.sum(x),
        lambda x: jnp.float32(range(3)[x[0].astype(jnp.int32)]),
    ],
    ids=["float", "NumPy", "if", "index"],
)
def test_a_function_that_cannot_be_traced_is_sent_to_minimize(fun):
    with pytest.raises(TypeError, match=r"fun must be .* minimize, or to") as caught:
        run(2, fun)
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value.__cause__, jax.errors.JAXTypeError | TypeError)


@pytest.mark.parametrize(
    ("optimizer", "estimator", "name"),
    [
        (zo.zo_sgd(1e-2), ESTIMATOR, "optimizer"),
        (zo.radazo(1e-2, mu_dtype="bfloat16"), ESTIMATOR, "optimizer"),
        (OPTIMIZER, zo.contrib.query_reuse(Hashed()), "estimator"),
    ],
    ids=["tree", "dtype", "estimator"],
)
def test_a_state_of_another_method_is_refused(optimizer, estimator, name):
    state = run(2).state
    with pytest.raises(
        ValueError, match=f"state must be of this {name}.*Continue"
    ) as e:
        run(2, optimizer=optimizer, estimator=estimator, state=state)
    assert "\n" not in str(e.value)


def test_arrays_that_were_donated_are_named():
    params = {"w": jnp.ones(20)}
    jax.jit(lambda x: x + 1, donate_argnums=0)(params["w"])
    call = {"num_steps": 2, "progress": False}
    for drive in (zo.train, called):
        with pytest.raises(ValueError, match=r"donated.*params\['w'\].*jnp.copy"):
            drive(lambda p: loss(p["w"]), params, OPTIMIZER, ESTIMATOR, **call)
    kept = []
    run(4, chunk_size=2, callback=lambda report: kept.append(report.state))
    with pytest.raises(ValueError, match=r"state must hold.*donated.*jnp\.copy, state"):
        run(2, state=kept[0])
