"""Mistakes are answered by one line that says what to do."""

import os
import pickle
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

import radazo_jax as zo
import radazo_jax.nnx as zo_nnx
from radazo_jax._src.steps import states
from radazo_jax.estimators import Estimate, sample_points
from tests.helpers.short_runs import called, run

X = np.ones((4, 3), np.float32)
START = np.ones(3, np.float32)
FORWARD = zo.forward_difference(num_directions=2)


def loss(x):
    return (x**2).sum()


def message(kind, function, *args, **kwargs):
    with pytest.raises(kind) as error:
        function(*args, **kwargs)
    text = str(error.value)
    assert "\n" not in text
    return text


OPTIMIZERS = pytest.mark.parametrize(
    "optimizer",
    [zo.radazo, zo.zo_adamm, zo.zo_sgd, zo.zo_signsgd, zo.zo_rmsprop],
    ids=lambda f: f.__name__,
)


BAD_RATES = [
    *((x, ValueError) for x in (-1e-2, jnp.float32(-1), float("nan"), np.inf)),
    *((x, TypeError) for x in ("1e-2", None, True, 1j)),
    (jnp.ones(2), ValueError),
]


@OPTIMIZERS
def test_a_learning_rate_that_ascends_or_is_no_number_is_refused(optimizer):
    for rate, kind in BAD_RATES:
        text = message(kind, optimizer, rate)
        assert text.startswith("learning_rate must be a finite number ≥ 0, or a sched")


def test_replayed_moments_refuse_a_negative_rate():
    message(ValueError, zo.radazo, -1e-2, moments="replayed")


@OPTIMIZERS
@pytest.mark.parametrize(
    "rate",
    [0.0, 1, 0.5, np.float32(0.5), jnp.float32(0.5), optax.constant_schedule(0.5)],
    ids=lambda rate: type(rate).__name__,
)
def test_numbers_arrays_and_schedules_are_learning_rates(optimizer, rate):
    tx = optimizer(rate)
    updates, _ = tx.update(START, tx.init(START), START)
    size = rate(0) if callable(rate) else rate
    assert np.all(np.sign(updates) == -np.sign(size))


@OPTIMIZERS
def test_learning_rates_may_be_traced(optimizer):
    def step(rate):
        tx = optimizer(rate)
        return tx.update(START, tx.init(START), START)[0]

    updates = jax.jit(jax.vmap(step))(jnp.array([0.5, 1.0]))
    np.testing.assert_allclose(2 * updates[0], updates[1], rtol=1e-6)
    tx = optax.inject_hyperparams(optimizer)(learning_rate=0.5)
    injected, _ = jax.jit(tx.update)(START, tx.init(START), START)
    np.testing.assert_allclose(injected, updates[0], rtol=1e-6)


def test_a_swapped_optimizer_and_estimator_are_recognized():
    swapped = (FORWARD, zo.radazo(1e-2))
    client = type("Client", (), {})()
    for call in (
        lambda: zo.train(loss, START, *swapped),
        lambda: called(loss, START, *swapped),
        lambda: zo.solver(loss, *swapped),
        lambda: zo.ask_tell(START, *swapped),
        lambda: zo.distribute(lambda: loss, START, *swapped, client=client),
        lambda: zo.train(loss, START, estimator=zo.radazo(1e-2)),
        lambda: zo.value_and_grad(loss, zo.radazo(1e-2)),
        lambda: zo.estimate_gradient(zo.radazo(1e-2), key=0),
        lambda: zo.diagnose(loss, START, zo.radazo(1e-2), 0),
    ):
        assert "swapped?" in message(TypeError, call)


LARGE = np.ones((50, 3), np.float32)


@pytest.mark.parametrize(
    "call",
    [
        lambda: zo.solver(LARGE, loss, FORWARD),
        lambda: zo.solver(loss, LARGE, FORWARD),
        lambda: zo.solver(loss, zo.zo_sgd(1e-2), LARGE),
        lambda: zo.find_learning_rate(LARGE, LARGE, 10),
        lambda: zo.find_smoothing(LARGE, LARGE),
        lambda: zo.diagnose(LARGE, LARGE),
        lambda: zo.value_and_grad(loss, FORWARD, evaluator=LARGE),
        lambda: zo.value_and_grad(loss, FORWARD, LARGE),
        lambda: zo.forward_difference(LARGE),
        lambda: zo.evolution_strategy(shaping=LARGE),
        lambda: zo.keep_params_in(LARGE),
        lambda: zo.sharded(LARGE),
        lambda: zo.vectorized(LARGE),
        lambda: zo.contrib.prior_guided(prior=LARGE),
        lambda: zo_nnx.value_and_grad(LARGE, FORWARD),
    ],
)
def test_arrays_in_the_wrong_place_are_shown_by_their_shapes(call):
    text = message(TypeError, call)
    assert "got float32[50, 3]" in text and len(text) < 250


@pytest.mark.parametrize("call", [zo.find_learning_rate, zo.find_smoothing])
def test_a_function_after_its_parameters_is_recognized(call):
    given = (10,) if call is zo.find_learning_rate else ()
    assert message(TypeError, call, LARGE, loss, *given).endswith("fun before params.")


@pytest.mark.parametrize(
    "named", ["cma", zo.methods.evolution()(None)], ids=["a name", "called"]
)
def test_a_name_and_a_method_that_was_called_are_referred_to_methods(named):
    for call, argument in (
        (lambda: zo.minimize(loss, START, named), "method"),
        (lambda: zo.ask_tell(START, named), "optimizer"),
        (lambda: zo.solver(loss, named, FORWARD), "optimizer"),
    ):
        text = message(TypeError, call)
        assert text.startswith(f"{argument} must be")
        assert "zo.methods.evolution()" in text


MASKED = np.ma.masked_array(START, mask=[False, False, True])
MASKED_CALLS = {
    "minimize": lambda: zo.minimize(loss, MASKED),
    "a tree": lambda: zo.minimize(loss, {"a": MASKED}),
    "by hand": lambda: zo.ask_tell(MASKED),
    "solver": lambda: zo.solver(loss, zo.zo_sgd(1e-2), FORWARD).init(MASKED, 0),
    "an estimate": lambda: zo.value_and_grad(loss, FORWARD)(0, MASKED),
    "a rate": lambda: zo.find_learning_rate(loss, MASKED, 10),
    "a diagnosis": lambda: zo.diagnose(loss, MASKED),
}
BOUNDS = {
    "a tuple": (-1.0, MASKED),
    "pairs": np.ma.masked_array(np.ones((3, 2)), mask=np.eye(3, 2)),
    "pairs in a list": [(0.0, 1.0), (0.0, np.ma.masked), (0.0, 1.0)],
    "SciPy's": type("Bounds", (), {"lb": -START, "ub": MASKED})(),
}


@pytest.mark.parametrize("call", MASKED_CALLS.values(), ids=MASKED_CALLS)
def test_masked_parameters_are_refused(call):
    text = message(TypeError, call)
    assert text.startswith("params must hold arrays without masks") and ".fill" in text


@pytest.mark.parametrize("bounds", BOUNDS.values(), ids=BOUNDS)
def test_masked_bounds_are_refused(bounds):
    for call in (
        lambda: zo.ask_tell(np.zeros(3), bounds=bounds),
        lambda: zo.minimize(loss, START, bounds=bounds),
        lambda: zo.solver(loss, zo.zo_sgd(1e-2), FORWARD, bounds=bounds),
    ):
        text = message(TypeError, call)
        assert text.startswith("bounds must hold arrays without masks")


class Quantized(nnx.Module):
    def __init__(self):
        self.scale = nnx.Param(jnp.ones(2))
        self.weight = nnx.Param(jnp.array([3, -4], jnp.int8))

    def __call__(self):
        return jnp.sum(self.scale[...] * self.weight[...].astype(jnp.float32))


def test_an_integer_variable_of_a_module_is_named_with_a_filter_that_works():
    def estimate(**options):
        value_and_grad = zo_nnx.value_and_grad(lambda m: m() ** 2, FORWARD, **options)
        return value_and_grad(0, Quantized())

    text = message(TypeError, estimate)
    assert text.startswith(
        "wrt must match floating-point variables; got int8[2] at wei"
    )
    wrt = text.partition("Pass wrt=")[2].rstrip(".")
    value, gradient = estimate(wrt=eval(wrt, {"nnx": nnx}))
    assert value == 1 and list(gradient) == ["scale"]


def test_a_state_of_other_parameters_is_refused():
    init, _ = zo.solver(loss, zo.zo_sgd(1e-2), FORWARD)
    state = init(START, 0)
    states.check_params_of(state, np.zeros(3))
    for params in (np.zeros(4), {"a": START}, [START]):
        text = message(ValueError, states.check_params_of, state, params)
        assert text.startswith("state must have parameters like params")
        assert "got float32[3]" in text


INTEGERS = {
    "nothing named": lambda fun: zo.train(fun, START, progress=False),
    "an optimizer": lambda fun: zo.train(fun, START, zo.radazo(1e-2)),
    "a rate": lambda fun: zo.find_learning_rate(fun, START, 10),
    "a smoothing": lambda fun: zo.find_smoothing(fun, START),
    "an estimate": lambda fun: zo.value_and_grad(fun, FORWARD)(0, START),
}


@pytest.mark.parametrize("kind", INTEGERS)
def test_a_loss_that_counts_is_refused(kind):
    text = message(TypeError, INTEGERS[kind], lambda x: jnp.sum(x > 0))
    assert text == "fun must return a real floating-point loss; got dtype int32."


@pytest.mark.parametrize("made", [zo.radazo, optax.adam, zo.methods.evolution])
def test_a_function_without_parentheses_is_recognized(made):
    expected = f"the function {made.__name__} without parentheses. Call it"
    for call in (
        lambda: zo.minimize(loss, START, made),
        lambda: zo.train(loss, START, made, FORWARD),
        lambda: zo.solver(loss, made, FORWARD),
        lambda: zo.ask_tell(START, made),
    ):
        assert expected in message(TypeError, call)


def test_an_estimator_of_a_method_is_refused():
    text = message(ValueError, zo.ask_tell, START, zo.methods.slopes(), FORWARD)
    assert text.startswith("estimator must be None with a method")


SLOPES, SGD = zo.methods.slopes(), zo.zo_sgd(1e-2)


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: zo.minimize(loss, START, SGD), "to train."),
        (lambda: zo.minimize(loss, START, FORWARD), "to train."),
        (lambda: zo.minimize(loss, START, SGD, FORWARD), "to train."),
        (lambda: zo.minimize(loss, START, optimizer=SGD), "optimizer to train."),
        (lambda: zo.minimize(loss, START, estimator=FORWARD), "argument of train."),
        (lambda: zo.minimize(loss, START, sample=jnp.sum), "argument of train."),
        (lambda: zo.train(loss, START, SLOPES), "Pass a method to minimize."),
        (lambda: zo.train(loss, START, SLOPES, FORWARD), "method to minimize."),
        (lambda: zo.train(loss, START, method=SLOPES), "method to minimize."),
        (lambda: zo.train(loss, START, step=1.0), "argument of minimize."),
        (lambda: zo.train(loss, START, workers=2), "external(...)"),
        (lambda: zo.train(loss, START, tolerance=0.1), "methods.untuned()"),
        (lambda: zo.solver(loss, SLOPES, FORWARD), "Pass a method to minimize."),
    ],
)
def test_the_other_door_is_named(call, named):
    assert named in message(TypeError, call)


def test_the_optimizer_of_a_python_function_is_named_by_the_caller():
    text = message(ValueError, called, loss, START)
    assert text.startswith("optimizer must be given with an evaluator of Python fun")


@pytest.mark.parametrize("key", [0, jax.random.key(0)], ids=str)
def test_a_key_that_is_params_is_named(key):
    init, _ = zo.solver(loss, zo.radazo(1e-2), FORWARD)
    text = message(TypeError, init, key, {"w": START})
    assert text.startswith("key must be a key") and "{w: float32[3]}" in text


RUNS = {
    "a method": lambda fun: zo.minimize(fun, START, progress=False),
    "an optimizer": lambda fun: zo.train(fun, START, zo.radazo(1e-2)),
    "a rate": lambda fun: zo.find_learning_rate(fun, START, 10),
    "a smoothing": lambda fun: zo.find_smoothing(fun, START),
    "a diagnosis": lambda fun: zo.diagnose(fun, START),
    "a Python function": lambda fun: called(fun, START, zo.radazo(1e-2)),
}


@pytest.mark.parametrize("transform", [jax.jit, jax.grad, jax.vmap])
@pytest.mark.parametrize("kind", RUNS)
def test_a_run_inside_of_a_transformation_says_so(kind, transform):
    def outer(a):
        return RUNS[kind](lambda x: loss(x - a))

    argument = jnp.ones(2) if transform is jax.vmap else 1.0
    text = message((TypeError, zo.RunError), transform(outer), argument)
    assert "of jax.jit, jax.vmap" in text


class Net(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(3, 1, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.linear(self.dropout(x))


def _runs(fun, params):
    def by_solver():
        init, step = zo.solver(fun, zo.radazo(1e-2), FORWARD)
        jax.jit(step)(init(params, 0))

    yield by_solver
    yield lambda: zo.train(
        fun, params, zo.radazo(1e-2), FORWARD, num_steps=3, progress=False
    )
    yield lambda: zo.train(fun, params, num_steps=3, progress=False)
    yield lambda: zo.value_and_grad(fun, FORWARD)(0, params)


@pytest.mark.usefixtures("as_flax_needs_it")
def test_a_module_with_dropout_is_referred_to_nnx():
    graphdef, params, rest = nnx.split(Net(nnx.Rngs(0)), nnx.Param, ...)

    def split(params):
        return jnp.mean(nnx.merge(graphdef, params, rest)(X) ** 2)

    def whole(model):
        return jnp.mean(model(X) ** 2)

    for fun, start in ((split, params), (whole, Net(nnx.Rngs(0)))):
        for call in _runs(fun, start):
            assert "radazo_jax.nnx.value_and_grad" in message(TypeError, call)


@pytest.mark.usefixtures("as_flax_needs_it")
def test_random_streams_that_a_loss_closes_over_are_to_be_passed():
    model, rngs = Net(nnx.Rngs(0)), nnx.Rngs(dropout=1)

    def loss(model):
        return jnp.mean(model.dropout(model.linear(X), rngs=rngs) ** 2)

    text = message(TypeError, zo_nnx.value_and_grad(loss, FORWARD), 0, model)
    assert "Pass them as arguments to radazo_jax.nnx.value_and_grad" in text


def test_a_linen_module_is_no_tree_of_parameters():
    module = linen.Dense(1)
    for call in _runs(lambda params: params(X), module):
        assert "module.init(key, x)['params']" in message(TypeError, call)
    text = message(TypeError, called, loss, module, SGD, FORWARD)
    assert "module.init(key, x)['params']" in text


class ByShape(zo.Distribution):
    def factor(self, dimension):
        return 1.0

    def draw(self, key, number, at):
        return jax.random.normal(jax.random.fold_in(key, number), at.lo.shape)


class ByPosition(ByShape):
    def draw(self, key, number, at):
        return zo.random.normal(jax.random.fold_in(key, number), at)


class OfATable(ByShape):
    """Draws a number for each third position, by the shape of a table."""

    def draw(self, key, number, at):
        table = jax.random.normal(jax.random.fold_in(key, number), (3,))
        return table[at.lo % np.uint32(3)]


def test_draws_by_shape_are_referred_to_draws_by_position():
    params = {"a": jnp.ones(4), "b": jnp.ones(4)}

    def fun(params):
        return loss(params["a"]) + loss(params["b"])

    def estimated(distribution):
        return zo.value_and_grad(fun, zo.forward_difference(distribution))(0, params)

    def compiled(distribution):
        return jax.jit(lambda: estimated(distribution))()

    text = message(TypeError, estimated, ByShape())
    assert "radazo_jax.random" in text and "zo.random.normal(key, at)" in text
    message(TypeError, compiled, ByShape())
    message(TypeError, ByShape().materialize, ByShape().sample(0, params), params)
    for distribution in (ByPosition(), OfATable()):
        _, gradient = compiled(distribution)
        assert np.all(np.isfinite(gradient["a"]))


def _points(draw, params, state):
    return sample_points(zo.rademacher(), draw, 1, [1e-3, -1e-3], params), state


def _combination(points, values, params, state):
    above, below = values.along[0]
    return points.combine((above - below)[None] / 2e-3)


def _estimate(points, values, params, state):
    gradient = _combination(points, values, params, state)
    return Estimate(values.along[0, 0], jnp.float32(1), jnp.int32(2), gradient)


@pytest.mark.parametrize(
    ("reduce", "got"),
    [
        (_combination, "got LinearCombination."),
        (_estimate, "got Estimate."),
        (lambda *args: (_combination(*args), ()), "got LinearCombination first."),
        (lambda *args: None, "got NoneType."),
    ],
)
def test_what_reduce_returns_is_named(reduce, got):
    class Wrong(zo.GradientEstimator):
        def points(self, *args):
            return _points(*args)

        def reduce(self, *args):
            return reduce(*args)

    estimator = Wrong()
    runs = (
        lambda: zo.value_and_grad(loss, estimator)(0, START),
        lambda: zo.train(loss, START, zo.radazo(1e-2), estimator, num_steps=2),
        lambda: called(loss, START, zo.radazo(1e-2), estimator, num_steps=2),
    )
    # One function looks at what is returned. Each kind of run calls it.
    for call in runs if reduce is _combination else runs[:1]:
        text = message(TypeError, call)
        assert "reduce of the estimator must return a pair (Estimate, state)" in text
        assert f"{got} It is called as reduce(points, values, params, state)" in text


def test_a_dask_client_has_an_executor():
    distributed = pytest.importorskip("distributed")
    client = distributed.Client.__new__(distributed.Client)
    client.__class__ = type("Client", (distributed.Client,), {"__del__": lambda _: 0})
    text = message(TypeError, run, loss, executor=client)
    assert "client.get_executor()" in text


SCRIPT = """
import concurrent.futures, multiprocessing
import numpy as np
import radazo_jax as zo

def make():
    context = multiprocessing.get_context("spawn")
    return concurrent.futures.ProcessPoolExecutor(1, mp_context=context)

def fun(x):
    return float(np.sum(x**2))

zo.minimize(fun, np.ones(3), executor={}, max_evaluations=20, progress=False)
"""


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["make()", "make"])
def test_a_script_without_a_main_guard_is_told_so(tmp_path, executor):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT.format(executor))
    env = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    ran = subprocess.run(
        [sys.executable, path], env=env, capture_output=True, text=True, timeout=300
    )
    assert ran.returncode == 1
    # A dying pool may print after the error.
    lines = ran.stderr.splitlines()
    (error,) = [line for line in lines if line.startswith("radazo_jax.")]
    assert 'if __name__ == "__main__":' in error


@pytest.mark.parametrize("call", [zo.train, zo.minimize])
@pytest.mark.parametrize(
    ("name", "ours"),
    [
        *(("x0", "params"), ("maxiter", "max_evaluations")),
        *(("tol", "tolerance"), ("args", "fun"), ("seed", "key")),
        *(("n_trials", "max_evaluations"), ("lr", "learning_rate")),
        *(("mu", "smoothing"), ("sigma0", "scale"), ("max_evals", "max_evaluations")),
        *(("budget", "max_evaluations"), ("integrality", "step"), ("lower", "bounds")),
        *(("parallel", "workers"), ("steps", "max_evaluations"), ("boundz", "bounds")),
        *(("learning_rate", "optimizers such as"), ("callbac", "callback")),
    ],
)
def test_arguments_of_other_packages_are_named(call, name, ours):
    text = message(TypeError, call, loss, START, **{name: 1})
    if call is zo.train:
        ours = {"maxiter": "num_steps", "steps": "num_steps"}.get(name, ours)
    assert f"got {name}. " in text and ours in text.split(name, 1)[1]


def test_an_argument_that_no_package_has_is_pythons_error():
    assert "unexpected" in message(TypeError, zo.minimize, loss, START, nonsense=1)
    assert "learning_rate" in message(TypeError, zo.radazo, lr=1e-2)
    assert "smoothing" in message(TypeError, zo.forward_difference, mu=1e-2)


def test_attributes_of_other_packages_are_named():
    result = run(num_steps=1)
    for name, ours in (
        ("x", "params"),
        ("fun", "best.value"),
        ("nfev", "num_evaluations"),
    ):
        assert ours in message(AttributeError, getattr, result, name)
    assert "paramz" in message(AttributeError, getattr, result, "paramz")
    copied = pickle.loads(pickle.dumps(result.best))
    assert copied.value == result.best.value


@pytest.mark.parametrize(
    "call",
    [
        zo.train,
        zo.minimize,
        lambda fun, start, **given: zo.distribute(
            lambda: fun, start, zo.zo_sgd(1e-2), FORWARD, client=None, **given
        ),
    ],
)
@pytest.mark.parametrize("callback", [True, "print", lambda step, value: None])
def test_a_callback_is_checked_before_the_run(call, callback):
    called = []
    text = message(TypeError, call, called.append, START, callback=callback)
    assert text.startswith("callback must be a function of one argument")
    assert not called


class Tensor:
    """An array of another library."""

    def detach(self):
        raise AssertionError


@pytest.mark.parametrize(
    ("params", "advice"),
    [
        (np.zeros(2, int), ".astype(float)"),
        ({"a": START, "b": np.arange(2)}, ".astype(float)"),
        ([0, 1], "np.array(params, float)"),
        (START.astype(">f4"), ".astype(float)"),
        (START.astype(np.longdouble), ".astype(float)"),
        (Tensor(), ".detach().numpy()"),
        (type("Series", (), {"to_numpy": 0, "dtype": START.dtype})(), ".to_numpy("),
    ],
    ids=lambda x: x if isinstance(x, str) else type(x).__name__,
)
def test_parameters_of_other_kinds_are_converted_by_the_user(params, advice):
    for call in (zo.train, zo.minimize):
        assert advice in message(TypeError, call, loss, params)
