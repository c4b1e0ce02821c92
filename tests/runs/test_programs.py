"""Programs are shared by equal traces, by no others, and see what has changed."""

import dataclasses
import gc
import tempfile
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, PartitionSpec

import radazo_jax as zo
from radazo_jax._src.base import programs
from tests.helpers.compiled import compilations
from tests.helpers.short_runs import METHOD, START, run
from tests.helpers.short_runs import traced as traced_run
from tests.helpers.tables import every, mesh_of, slow

X = jnp.array([0.5, -1.0, 2.0], jnp.float32)
NAN = np.array([0x7FC00001, 0x7FC00002], np.uint32).view(np.float32)


def trace(fun, *args):
    return jax.tree.structure(programs.trace(fun, *(args or (X,))))


def apply(run, *args):
    return run(*args)


def outcome(fun, *args):
    traced = programs.trace(fun, *args)
    return programs.of(apply, traced, *args)(*args)


def with_jvp(tangent):
    """x³ with a custom derivative."""

    @jax.custom_jvp
    def cube(x):
        return x**3

    cube.defjvp(lambda primals, tangents: (primals[0] ** 3, tangent(tangents[0])))
    return cube


def with_vjp(pulled):
    @jax.custom_vjp
    def cube(x):
        return x**3

    cube.defvjp(lambda x: (x**3, x), lambda x, ct: (pulled(ct),))
    return cube


def callback(factor):
    def host(x):
        return np.float32(factor) * x

    shape = jax.ShapeDtypeStruct((3,), jnp.float32)
    return lambda x: jax.pure_callback(host, shape, x, vmap_method="sequential")


EQUAL = {
    "lambda": lambda: lambda x: jnp.sum(x**2),
    "array": lambda: (lambda c: lambda x: x * c)(np.arange(3.0)),
    "NaN": lambda: lambda x: x * float("nan"),
    "scan": lambda: lambda x: jax.lax.scan(lambda c, y: (c * y, c + y), x[0], x)[1],
    "cond": lambda: (
        lambda x: jax.lax.cond(x[0] > 0, lambda x: x + 1, lambda x: x - 1, x)
    ),
    "jit": lambda: lambda x: jax.jit(lambda x: x + jnp.arange(3.0))(x),
    "jit with an array": lambda: (
        lambda c: lambda x: jax.jit(lambda x: x + jnp.asarray(c))(x)
    )(np.arange(3.0)),
    "relu": lambda: lambda x: jax.nn.relu(x),
    "custom JVP": lambda: lambda x: with_jvp(lambda t: 2 * t)(x),
    "custom VJP": lambda: lambda x: with_vjp(lambda ct: 2 * ct)(x),
    "checkpoint": lambda: lambda x: jax.checkpoint(lambda x: jnp.sin(x))(x),
    "print": lambda: lambda x: (jax.debug.print("{}", x), x)[1],
    "random": lambda: lambda x: x + jax.random.normal(jax.random.key(3), (3,)),
}


@pytest.mark.parametrize("make", EQUAL.values(), ids=EQUAL)
def test_equal_new_functions_share_a_program(make):
    assert trace(make()) == trace(make())
    assert hash(trace(make())) == hash(trace(make()))


def scaled_by(number):
    return lambda x: x * number


@dataclasses.dataclass(eq=False)
class Simulator:
    """A callable object that holds more than its fields."""

    size: int = 3

    def __call__(self, x):
        return np.asarray(self.factor * x, np.float32)


class Values(tuple):
    def __call__(self, x):
        return np.asarray(self.factor * x, np.float32)


def simulated(host, factor, shape=(3,)):
    """A function that calls an object of Python, which gets an attribute."""
    host.factor = factor
    of_call = jax.ShapeDtypeStruct(shape, jnp.float32)
    return lambda x: jax.pure_callback(host, of_call, x, vmap_method="sequential")


def observed(host, factor):
    host.factor = factor
    return lambda x: (jax.debug.callback(host, x), x)[1]


class Info:
    """Equal to all others, and no array."""

    def __eq__(self, other):
        return isinstance(other, Info)

    def __hash__(self):
        return 0


def repeated(factor):
    return lambda x: jax.lax.fori_loop(0, 3, lambda _, y: y * factor, x)


DIFFERENT = {
    "numbers": (scaled_by(2.0), scaled_by(3.0)),
    "signs of zero": (scaled_by(0.0), scaled_by(-0.0)),
    "NaNs": tuple(scaled_by(nan) for nan in NAN),
    "equations": (jnp.sin, jnp.cos),
    "order": (lambda x: x[0] - x[1], lambda x: x[1] - x[0]),
    "outputs": (lambda x: (x, 2 * x), lambda x: (2 * x, x)),
    "trees": (lambda x: {"a": x}, lambda x: {"b": x}),
    "static outputs": (lambda x: (x, 1.0), lambda x: (x, 1)),
    "static arrays": (lambda x: (x, np.ones(2)), lambda x: (x, np.zeros(2))),
    "callbacks": (callback(1.0), callback(2.0)),
    "objects of a dataclass": (
        simulated(Simulator(), 1.0),
        simulated(Simulator(), 2.0),
    ),
    "tuples that are called": (simulated(Values(), 1.0), simulated(Values(), 2.0)),
    "observers": (observed(Simulator(), 1.0), observed(Simulator(), 2.0)),
    "outputs that say they are equal": (
        (lambda info: lambda x: (x, info))(Info()),
        (lambda info: lambda x: (x, info))(Info()),
    ),
    "arrays of objects": tuple(
        (lambda array: lambda x: (x, array))(np.array([Info()], object))
        for _ in range(2)
    ),
    "bodies of loops": (repeated(2.0), repeated(3.0)),
    "constants of an inner jit": tuple(
        (lambda c: lambda x: jax.jit(lambda x: x + c)(x))(jnp.arange(3.0) + k)
        for k in range(2)
    ),
    "NumPy constants of an inner jit": tuple(
        (lambda c: lambda x: jax.jit(lambda x: x + c)(x))(np.arange(3.0) + k)
        for k in range(2)
    ),
    "context": (
        lambda x: x @ x,
        jax.default_matmul_precision("highest")(lambda x: x @ x),
    ),
}


@pytest.mark.parametrize("pair", DIFFERENT.values(), ids=DIFFERENT)
def test_different_functions_share_no_program(pair):
    first, second = map(trace, pair)
    assert first != second


def _estimated(fun, start):
    estimate = zo.value_and_grad(fun, zo.forward_difference(zo.rademacher()))
    return estimate(jax.random.key(0), start)[0]


def _solved(fun, start):
    init, step = zo.solver(fun, *METHOD)
    return step(init(start, jax.random.key(0)))[1].value


ENTRIES = {
    "minimize": lambda fun, start: traced_run(fun, start, 1).values[0],
    "a journal": lambda fun, start: traced_run(
        fun, start, 1, journal=tempfile.mkdtemp() + "/run"
    ).values[0],
    "value_and_grad": _estimated,
    "solver": _solved,
}


@pytest.mark.parametrize("entry", every(ENTRIES, "minimize", "value_and_grad"))
def test_another_object_that_is_called_back_is_called(entry):
    """A simulator is the same by its fields, and another one by what it holds."""
    start = jnp.float32(2.0)
    for factor in (1.0, -1.5):
        fun = simulated(Simulator(), factor, ())
        assert ENTRIES[entry](fun, start) == 2 * factor


def test_meshes_with_another_order_of_devices_share_no_program():
    devices = np.array(jax.devices()[:2])
    if devices.size < 2:
        pytest.skip("needs two devices")

    def on(devices):
        sharding = jax.NamedSharding(Mesh(devices, "a"), PartitionSpec("a"))
        return lambda x: jax.lax.with_sharding_constraint(x, sharding)

    x = jnp.zeros(4)
    assert trace(on(devices), x) == trace(on(devices), x)
    assert trace(on(devices), x) != trace(on(devices[::-1]), x)


def test_what_is_written_to_an_array_of_an_inner_jit_is_seen():
    factors = np.ones(3, np.float32)

    def fun(x):
        return jax.jit(lambda x: x * factors)(x)

    np.testing.assert_array_equal(outcome(fun, X), X)
    factors[:] = 7
    np.testing.assert_array_equal(outcome(fun, X), 7 * X)


def in_a_loop(tangent):
    fun = with_jvp(tangent)
    return lambda x: jax.lax.scan(lambda x, _: (fun(x), None), x, None, length=1)[0]


@pytest.mark.parametrize("kind", [with_jvp, with_vjp, in_a_loop])
def test_custom_derivatives_count_once_something_differentiates(kind):
    def derivative(run, x):
        return jax.grad(lambda x: jnp.sum(run(x)))(x)

    def at(factor):
        fun = kind(lambda t: factor * t)
        traced = programs.trace(lambda x: fun(x), X)
        return programs.of(derivative, traced, X)

    np.testing.assert_array_equal(at(2.0)(X), np.full(3, 2))
    np.testing.assert_array_equal(at(5.0)(X), np.full(3, 5))
    assert at(5.0).func is at(5.0).func
    assert at(5.0).func is not at(2.0).func


def test_an_optimizer_differentiates_the_loss_as_it_is_now():
    def update(updates, state, params=None, *, value_fn, **others):
        return jax.tree.map(lambda g: -0.5 * g, jax.grad(value_fn)(params)), state

    optimizer = optax.GradientTransformationExtraArgs(lambda params: (), update)
    for factor in (1.0, 3.0):
        fun = with_jvp(lambda t: factor * t)  # noqa: B023
        result = traced_run(
            lambda x: jnp.sum(fun(x)),  # noqa: B023
            num_steps=1,
            method=(optimizer, METHOD[1]),
        )
        np.testing.assert_array_equal(result.params, np.full(3, 1 - factor / 2))


def test_under_a_mesh_arrays_are_a_part_of_the_program():
    """An evaluator may divide the mesh, and traces the function again."""
    if jax.device_count() < 2:
        pytest.skip("needs two devices")

    def times(number):
        factors = np.full(3, number, np.float32)
        return lambda x: factors * x

    with jax.set_mesh(mesh_of(2)):
        for number in (1.0, 2.0, 1.0):
            np.testing.assert_array_equal(outcome(times(number), X), number * X)
        assert trace(times(3.0)) == trace(times(3.0))
        assert trace(times(3.0)) != trace(times(4.0))


def test_another_precision_is_rounded_to_that_of_the_trace():
    x = X.astype(jnp.bfloat16)
    traced = programs.trace(lambda x: x * x, x)
    found = traced(x.astype(jnp.float32) + 1e-4)
    assert found.dtype == jnp.bfloat16
    np.testing.assert_array_equal(found, x * x)


def test_an_inner_part_in_64_bits_stays_in_64_bits():
    def fun(x):
        with jax.enable_x64(True):
            wide = jnp.float64(1) + x.astype(jnp.float64) * jnp.float64(2**-40)
            return ((wide - 1) * jnp.float64(2.0**40)).astype(jnp.float32)

    np.testing.assert_array_equal(outcome(fun, X), X)


def test_dropped_programs_are_freed(monkeypatch):
    monkeypatch.setattr(programs, "_MOST", 3)

    def run(k):
        traced = programs.trace(lambda x: x * (k + 1.0), X)
        found = programs.of(apply, traced, X)
        found(X)
        return weakref.ref(found.func)

    kept = [run(k) for k in range(programs._MOST + 3)]
    gc.collect()
    alive = [ref() is not None for ref in kept]
    assert alive == [False] * 3 + [True] * programs._MOST


def test_nothing_is_compiled_where_jit_is_disabled():
    seen = []

    def fun(run, x):
        seen.append(float(x[0]))
        return run * x

    with jax.disable_jit():
        found = programs.of(fun, 2.0, X)(X)
    assert seen == [0.5]
    np.testing.assert_array_equal(found, 2 * X)


def test_errors_of_a_function_are_its_own():
    def fun(x):
        raise ZeroDivisionError("of the user")

    with pytest.raises(ZeroDivisionError, match="of the user") as caught:
        programs.trace(fun, X)
    assert caught.traceback[-1].name == "fun"


# --- The function as it is now --------------------------------------------------


def first_value(loss, **options):
    """The loss at the start, which is three times its factor."""
    return float(traced_run(loss, num_steps=1, **options).values[0])


class Problem:
    """A loss that reads an attribute."""

    def __init__(self, factor=1.0):
        self.factor = factor

    def loss(self, p):
        return self.factor * jnp.sum(p**2)

    def on_the_host(self, p):
        """The factor is a constant of the callback, which does not read it again."""
        factor, shape = np.float32(self.factor), jax.ShapeDtypeStruct((), jnp.float32)

        def callback(x):
            return factor * np.sum(np.square(x), dtype=np.float32)

        return jax.pure_callback(callback, shape, p, vmap_method="sequential")


def by_object(take):
    """The loss is a part of a problem, an attribute of which changes."""

    def make(monkeypatch):
        problem = Problem()
        return take(problem), lambda: setattr(problem, "factor", -1.0)

    return make


def by_array(monkeypatch):
    factors = np.ones(3, np.float32)

    def loss(p):
        return jnp.sum(factors * p**2)

    return loss, lambda: np.negative(factors, out=factors)


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(by_object(lambda problem: problem.loss), id="method"),
        pytest.param(by_object(lambda problem: problem.on_the_host), id="callback"),
        slow(by_array, id="array"),
    ],
)
def test_the_same_function_is_used_as_it_is_now(kind, monkeypatch):
    loss, change = kind(monkeypatch)
    assert first_value(loss) == 3
    change()
    assert first_value(loss) == -3


@pytest.mark.slow
def test_sample_is_used_as_it_is_now():
    def loss(p, factor):
        return factor * jnp.sum(p**2)

    def sample(key):
        return factors[0] + 0 * jax.random.uniform(key)

    factors = [1.0]
    assert first_value(loss, sample=sample) == 3
    factors[0] = -1.0
    assert first_value(loss, sample=sample) == -3


def test_value_and_grad_uses_its_function_as_it_is_now():
    problem = Problem()
    function = zo.value_and_grad(problem.loss, METHOD[1])
    assert function(jax.random.key(0), START)[0] == 3
    problem.factor = -1.0
    assert function(jax.random.key(0), START)[0] == -3


# --- Compilations ---------------------------------------------------------------


@pytest.mark.parametrize("call", [traced_run, slow(run)])
def test_equal_new_arguments_compile_nothing(call, caplog):
    """The function, if it is traced, the optimizer, and the estimator."""

    def again(rate=1e-2, num_steps=3):
        fun = {"fun": lambda p: jnp.sum(jnp.cos(p))} if call is traced_run else {}
        estimator = zo.forward_difference(zo.rademacher(), num_directions=2)
        method = zo.radazo(rate), estimator
        return call(num_steps=num_steps, method=method, **fun)

    first = again()
    with compilations(caplog) as found:
        second = again()
        again(num_steps=11)
    assert not found
    np.testing.assert_array_equal(first.params, second.params)
    with compilations(caplog) as found:
        again(rate=2e-2)
    assert found


@pytest.mark.slow
def test_another_learning_rate_on_minibatches_compiles_nothing(caplog):
    """The rate that is measured, and the number of steps, are inputs."""

    def untuned(scale, num_steps):
        return traced_run(
            lambda x, noise: jnp.sum((x - noise) ** 2),
            jnp.full(3, scale),
            num_steps,
            (None, zo.forward_difference(zo.rademacher(), 4, smoothing=5e-3)),
            sample=lambda key: jax.random.normal(key, (3,)),
        ).learning_rate.learning_rate

    first = untuned(3.0, 5)
    with compilations(caplog) as found:
        assert untuned(30.0, 8) > 2 * first
    assert not found


@pytest.mark.parametrize("jit", [lambda x: x, slow(jax.jit)], ids=["plain", "jit"])
def test_value_and_grad_compiles_once(jit, caplog):
    function = jit(zo.value_and_grad(lambda p: jnp.sum(p**2), METHOD[1]))
    keys, params = jax.random.split(jax.random.key(0)), jnp.ones(3)
    function(keys[0], params)
    with compilations(caplog) as found:
        function(keys[1], params)
    assert not found
