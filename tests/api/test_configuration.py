"""The configuration of a run is compared by its fields, and shown as written."""

import dataclasses
import functools
import inspect
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import radazo_jax as zo
from tests.helpers.compare import Hashed
from tests.helpers.tables import jit

NAMES = vars(zo) | vars(zo.contrib) | vars(zo.estimators) | vars(zo.shaping)

# How each is written in full, and the same with another argument.
WRITTEN = {
    "sphere()": "gaussian()",
    "gaussian()": "low_rank(rank=1)",
    "rademacher()": "orthonormal()",
    "orthonormal()": "sphere()",
    "coordinate()": "coordinate(replace=False)",
    "coordinate(replace=False)": "coordinate(replace=True)",
    "low_rank(rank=2)": "low_rank(rank=1)",
    "vectorized(batch_size=None)": "vectorized(batch_size=1)",
    "external()": "external(batched=True)",
    "external(workers=2, timeout=60)": "external(workers=2, timeout=60, retries=1)",
    "sharded(axis_name='k', batch_size=None)": "sharded('j')",
    "sharded(axis_name=('k', 'j'), batch_size=2)": "sharded(('k', 'j'), batch_size=1)",
    "forward_difference(sphere(), num_directions=10, smoothing=0.005)": (
        "forward_difference(sphere(), num_directions=11, smoothing=0.005)"
    ),
    "central_difference(low_rank(rank=2), num_directions=3, smoothing=0.1)": (
        "forward_difference(low_rank(rank=2), num_directions=3, smoothing=0.1)"
    ),
    "evolution_strategy(sphere(), population_size=20, smoothing=0.005, "
    "antithetic=True, shaping=z_score(eps=0.0, eps_root=1e-05))": (
        "evolution_strategy(shaping=z_score(eps=1.0))"
    ),
    "coordinate_wise(num_directions=10, smoothing=0.005, decay=0.9, "
    "uniform_fraction=0.5)": "coordinate_wise(uniform_fraction=0.4)",
    "gaussian_process(sphere(), num_directions=4, smoothing=0.05, memory_size=150, "
    "lengthscale=None, jitter=1e-05)": ("gaussian_process(lengthscale=1.0)"),
    "linear_interpolation(sphere(), num_directions=10, smoothing=0.005, "
    "memory_size=3, radius=0.01)": "linear_interpolation(radius=0.02)",
    "majority_vote(gaussian(), num_directions=10, smoothing=0.005)": (
        "forward_difference(gaussian(), num_directions=10, smoothing=0.005)"
    ),
    "hessian_informed(gaussian(), smoothing=0.001, decay=0.999999)": (
        "hessian_informed(gaussian(), smoothing=0.001, decay=0.9)"
    ),
    "lazy_low_rank(rank=2, period=50, smoothing=0.001)": "lazy_low_rank(rank=3)",
    "normalized_batch(rademacher(), num_directions=8, smoothing=0.001)": (
        "forward_difference(rademacher(), num_directions=8, smoothing=0.001)"
    ),
    "momentum_perturbation(gaussian(), smoothing=0.001, b1=0.5, uncertainty=0.5)": (
        "momentum_perturbation(gaussian(), smoothing=0.001, b1=0.5, uncertainty=0.4)"
    ),
    "prior_guided(sphere(), num_directions=10, smoothing=0.005, prior=None, "
    "decay=0.0)": "prior_guided(decay=0.5)",
    "query_reuse(sphere(), num_directions=10, smoothing=0.05, memory_size=6)": (
        "query_reuse(sphere(), num_directions=10, smoothing=0.05, memory_size=5)"
    ),
    "residual_feedback(sphere(), num_directions=1, smoothing=0.05)": (
        "residual_feedback(sphere(), num_directions=2, smoothing=0.05)"
    ),
    "variance_reduced(sphere(), num_directions=10, smoothing=0.005, period=50, "
    "anchor_steps=5)": "variance_reduced(anchor_steps=4)",
    "z_score(eps=0.0, eps_root=1e-05)": "by_group(eps=0.0, eps_root=1e-05)",
    "by_group(eps=0.5, eps_root=1e-05)": "by_group(eps=0.0, eps_root=1e-05)",
    "centered_ranks()": "pair_signs(threshold=0.0)",
    "pair_signs(threshold=0.0)": "pair_signs(threshold=0.1)",
    "best_of(k=3)": "best_of(k=2)",
}

# It is another estimator by its name: `central_difference` along random signs.
SPELLINGS = {"spsa"}


def read(text):
    return eval(text, dict(NAMES))


@pytest.mark.parametrize("text", WRITTEN)
def test_equal_ones_are_equal_and_are_shown_as_they_are_written(text):
    one, again, other = read(text), read(text), read(WRITTEN[text])
    assert one == again and hash(one) == hash(again)
    assert one != other
    assert repr(one) == text
    copy = pickle.loads(pickle.dumps(one))
    assert copy == one and hash(copy) == hash(one) and copy is not one


def test_the_table_has_all_of_them():
    kinds = {zo.GradientEstimator, zo.Evaluator, zo.Distribution}
    public = {
        name
        for name in (*zo.__all__, *zo.contrib.__all__, *zo.estimators.__all__)
        if inspect.isfunction(NAMES[name])
        and inspect.signature(NAMES[name]).return_annotation in kinds
    }
    assert len(public) > 15
    written = {text.partition("(")[0] for text in WRITTEN}
    assert public | set(zo.shaping.__all__) == written | SPELLINGS


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (zo.forward_difference(), zo.forward_difference(zo.sphere(), 10, 5e-3)),
        (zo.spsa(), zo.central_difference(zo.rademacher(), 1)),
        (zo.sharded("k"), zo.sharded(("k",))),
        *(
            (zo.forward_difference(smoothing=x), zo.forward_difference(smoothing=1.0))
            for x in (1, np.float32(1), np.float64(1), np.array(1.0), jnp.float32(1))
        ),
        (
            zo.forward_difference(num_directions=np.int32(3)),
            zo.forward_difference(num_directions=3),
        ),
    ],
)
def test_the_same_setting_in_another_form_is_equal(one, other):
    assert one == other and hash(one) == hash(other) and repr(one) == repr(other)


def test_settings_cannot_be_changed():
    for made in map(read, WRITTEN):
        for field in dataclasses.fields(made):
            with pytest.raises(dataclasses.FrozenInstanceError):
                setattr(made, field.name, getattr(made, field.name))


# --- Custom subclasses ------------------------------------------------------------


class Methods:
    """The methods of all three kinds, without fields."""

    def factor(self, dimension):
        return 1.0

    def draw(self, key, number, at):
        return Hashed().draw(key, number, at)

    def points(self, draw, params, state):
        return FORWARD.points(draw, params, state)

    def reduce(self, points, values, params, state):
        return FORWARD.reduce(points, values, params, state)

    def cache(self, points):
        return zo.vectorized().cache(points)

    def evaluate(self, *args):
        return zo.vectorized().evaluate(*args)


FORWARD = zo.forward_difference(Hashed())
each_kind = pytest.mark.parametrize(
    "kind", [zo.GradientEstimator, zo.Evaluator, zo.Distribution]
)


FROZEN = dataclasses.dataclass(frozen=True)


def custom(kind, decorate=FROZEN):
    @decorate
    class Custom(Methods, kind):
        setting: object = 1.0

    return Custom


def loss(params):
    return jnp.sum(params**2)


def value_and_grad(made):
    """The function whose estimator, evaluator or distribution is a custom one."""
    if isinstance(made, zo.Distribution):
        return zo.value_and_grad(loss, zo.forward_difference(made))
    if isinstance(made, zo.Evaluator):
        return zo.value_and_grad(loss, FORWARD, evaluator=made)
    return zo.value_and_grad(loss, made)


@each_kind
def test_a_custom_frozen_dataclass_is_compared_by_its_fields(kind):
    make = custom(kind)
    assert make(2.0) == make(2.0) and hash(make(2.0)) == hash(make(2.0))
    assert make(2.0) != make() and make(2.0) != custom(kind)(2.0)
    assert repr(make(2.0)).endswith("Custom(setting=2.0)")
    value, gradient = jit(value_and_grad(make(2.0)))(0, jnp.ones(3))
    expected = jit(zo.value_and_grad(loss, FORWARD))(0, jnp.ones(3))
    np.testing.assert_array_equal([value, *gradient], [expected[0], *expected[1]])


@each_kind
def test_a_class_without_fields_needs_no_decorator(kind):
    class Plain(Methods, kind):
        pass

    class Other(Methods, kind):
        pass

    assert Plain() == Plain() and hash(Plain()) == hash(Plain())
    assert Plain() != Other() and repr(Plain()) == "Plain()"
    assert value_and_grad(Plain())


@each_kind
@pytest.mark.parametrize("arguments", [(), (2.0,)])
def test_a_class_with_fields_and_without_the_decorator_is_refused(kind, arguments):
    undecorated = custom(kind, lambda cls: cls)

    class Own(Methods, kind):
        def __init__(self, setting=1.0):
            object.__setattr__(self, "setting", setting)

    class Child(undecorated):
        pass

    for make in (undecorated, Own, Child):
        with pytest.raises(TypeError) as caught:
            make(*arguments)
        name = "Own" if make is Own else "Custom"
        assert str(caught.value) == (
            f"{name} must be a frozen dataclass, because it has fields; got a class "
            "that is not decorated. Add @dataclasses.dataclass(frozen=True) above it."
        )


@each_kind
def test_a_class_that_compares_by_less_than_its_fields_is_refused(kind):
    with pytest.raises(TypeError, match="got a dataclass with eq=False"):
        custom(kind, dataclasses.dataclass(frozen=True, eq=False))()

    class Equal(Methods, kind):
        def __eq__(self, other):
            return True

    with pytest.raises(TypeError, match="got a class with __eq__ and without __hash__"):
        Equal()

    @dataclasses.dataclass(frozen=True)
    class Hiding(Methods, kind):
        setting: object = 1.0

        def __post_init__(self):
            object.__setattr__(self, "hidden", self.setting)

        @functools.cached_property
        def kept(self):
            return 2 * self.setting

    made = Hiding()
    assert made.kept == 2.0
    message = "Hiding must hold its fields alone.*; got another attribute, hidden"
    with pytest.raises(TypeError, match=message):
        value_and_grad(made)


@each_kind
@pytest.mark.parametrize("setting", [np.ones(3), jnp.ones(3), [1.0], {"a": 1.0}])
def test_a_field_without_a_hash_is_refused(kind, setting):
    message = (
        r"^Custom must have hashable fields; got setting of type "
        rf"{type(setting).__name__}\. Use numbers, strings or tuples of them, and keep "
        r"arrays in a state or in what a function captures\.$"
    )
    with pytest.raises(TypeError, match=message):
        value_and_grad(custom(kind)(setting))


@pytest.mark.parametrize(
    "call",
    [
        lambda made: zo.solver(loss, optax.sgd(0.1), made),
        lambda made: zo.train(
            loss, jnp.ones(3), optax.sgd(0.1), made, num_steps=1, key=0
        ),
        lambda made: zo.ask_tell(jnp.ones(3), optax.sgd(0.1), made),
        lambda made: zo.estimate_gradient(made, 0),
        lambda made: zo.estimators.estimate(made, loss, 0, jnp.ones(3), ()),
    ],
)
def test_each_entry_refuses_a_field_without_a_hash(call):
    with pytest.raises(TypeError, match="Custom must have hashable fields"):
        call(custom(zo.GradientEstimator)([1.0]))


def test_an_evaluator_that_returns_values_alone_is_refused():
    class Alone(Methods, zo.Evaluator):
        def evaluate(self, *args):
            return super().evaluate(*args)[0]

    message = (
        r"evaluate of the evaluator must return a pair \(Values, aux\); got Values. It "
        r"is called as evaluate\(fun, params, points, has_aux\)"
    )
    with pytest.raises(TypeError, match=message):
        value_and_grad(Alone())(0, jnp.ones(3))


# --- Settings known only within a program -----------------------------------------


def test_a_distance_may_be_traced():
    def last(smoothing):
        estimator = zo.forward_difference(Hashed(), 3, smoothing)
        init, step = zo.solver(loss, optax.sgd(1e-2), estimator)
        state = init(jnp.ones(4), 0)
        for _ in range(2):
            state, info = step(state)
        return state.params, info.slope

    distances = jnp.array([0.5, 0.25])
    found = jit(jax.vmap(last))(distances)
    for i, distance in enumerate((0.5, 0.25)):
        expected = jit(functools.partial(last, distance))()
        for one, all_ in zip(expected, found, strict=True):
            np.testing.assert_allclose(all_[i], one, rtol=1e-5)


# --- Programs, and the objects of optimizers --------------------------------------


each_optimizer = pytest.mark.parametrize(
    "make", [zo.radazo, zo.zo_adamm, zo.zo_sgd, zo.zo_signsgd, zo.zo_rmsprop]
)


@each_optimizer
def test_equal_arguments_make_the_same_optimizer(make):
    first = make(0.1)
    assert make(0.1) is make(learning_rate=0.1) is first
    defaults = {
        key: parameter.default
        for key, parameter in inspect.signature(make).parameters.items()
        if parameter.default is not inspect.Parameter.empty
    }
    assert make(**(defaults | {"learning_rate": 0.1})) is first
    assert make(0.2) is not first


def test_numbers_of_other_types_make_another_optimizer():
    """In Python 1 == 1.0, but their dtypes differ."""
    rates = [1, 1.0, np.float32(1), np.float64(1)]
    made = [zo.zo_signsgd(rate) for rate in rates]
    assert len(set(map(id, made))) == len(rates)
    assert zo.radazo(0.1, bias_correction=True) is not zo.radazo(0.1)
    stored = [zo.radazo(0.1, mu_dtype=dtype) for dtype in (None, jnp.float32)]
    assert stored[0] is not stored[1]


def test_a_dtype_follows_the_precision_in_which_it_is_asked_for():
    before = zo.radazo(0.1, mu_dtype=np.float64)
    with jax.enable_x64(True):
        inside = zo.radazo(0.1, mu_dtype=np.float64)
        found = [made.init(jnp.zeros(2))[0].mu.dtype for made in (before, inside)]
    after = zo.radazo(0.1, mu_dtype=np.float64)
    assert found == [np.float32, np.float64] and after is before


def test_schedules_and_arrays_are_compared_as_objects():
    schedule = optax.constant_schedule(0.1)
    assert zo.radazo(schedule) is zo.radazo(schedule)
    assert zo.radazo(schedule) is not zo.radazo(optax.constant_schedule(0.1))
    rate = jnp.float32(0.1)
    assert zo.radazo(rate) is not zo.radazo(rate)


@each_optimizer
def test_an_optimizer_made_within_a_program_can_be_used_outside(make):
    """It holds no tracer of the program."""
    make, made = functools.partial(make, 0.37), []

    @jax.jit
    def program(x):
        made.append(make())
        return jax.tree.leaves(made[0].init(x))

    program(jnp.ones(3))
    assert make() is made[0]
    leaves = jax.tree.leaves(make().init(jnp.ones(3)))
    assert not any(isinstance(leaf, jax.core.Tracer) for leaf in leaves)
