"""The door for Flax NNX: what is perturbed, kept, left alone, and written to."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import radazo_jax as zo
import radazo_jax.nnx as zo_nnx
from tests.helpers.compare import Hashed
from tests.helpers.tables import jit, slow

X = jax.random.normal(jax.random.key(1), (16, 5))
Y = X[:, :1]
ESTIMATORS = {
    "forward": zo.forward_difference(Hashed(), num_directions=3),
    "forward low rank": zo.forward_difference(zo.low_rank(), num_directions=3),
    "central": zo.central_difference(Hashed(), num_directions=3),
}
# An estimator and its evaluator.
WAYS = {name: {"estimator": estimator} for name, estimator in ESTIMATORS.items()}
WAYS["forward in turn"] = WAYS["forward"] | {"evaluator": zo.vectorized(1)}


pytestmark = pytest.mark.usefixtures("as_flax_needs_it")


class Net(nnx.Module):
    def __init__(self, rngs):
        self.hidden = nnx.Linear(5, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.out = nnx.Linear(8, 1, rngs=rngs)

    def __call__(self, x):
        return self.out(self.dropout(nnx.relu(self.norm(self.hidden(x)))))


def loss_fn(model, x, y):
    return jnp.mean((model(x) - y) ** 2)


def pure(module, *filters):
    state = nnx.state(module, *filters)
    return jax.tree.map(np.asarray, nnx.to_pure_dict(state))


def functional(way, model, key, wrt=nnx.Param):
    """The gradient by the functional interface, state and all held fixed."""
    graphdef, params, rest = nnx.split(model, wrt, ...)

    def loss(params):
        rest_again = jax.tree.map(lambda x: x, rest)
        return loss_fn(nnx.merge(graphdef, params, rest_again), X, Y)

    return jit(zo.value_and_grad(loss, **way))(key, params)


@pytest.mark.parametrize(
    "name",
    [slow("central"), "forward", slow("forward low rank"), slow("forward in turn")],
)
def test_estimates_what_the_functional_interface_does(name):
    model, key = Net(nnx.Rngs(0)), jax.random.key(2)
    expected_value, expected = functional(WAYS[name], model, key)
    before = pure(model, nnx.Param)
    value_and_grad = nnx.jit(zo_nnx.value_and_grad(loss_fn, **WAYS[name]))
    value, gradient = value_and_grad(key, model, X, Y)
    np.testing.assert_allclose(value, expected_value, rtol=1e-6)
    trees = map(nnx.to_pure_dict, (gradient, expected))
    chex.assert_trees_all_close(*trees, rtol=1e-3, atol=1e-3)
    chex.assert_trees_all_equal(pure(model, nnx.Param), before)
    # Statistics and counts are those that the evaluation at the parameters leaves.
    assert int(model.dropout.rngs.count[...]) == 1
    if name != "central":
        evaluated = Net(nnx.Rngs(0))
        loss_fn(evaluated, X, Y)
        trees = (pure(net, nnx.BatchStat) for net in (model, evaluated))
        chex.assert_trees_all_close(*trees, rtol=1e-5, atol=1e-6)


def test_only_what_the_filter_names_is_perturbed():
    model = nnx.LoRA(5, 2, 1, base_module=nnx.Linear(5, 1, rngs=nnx.Rngs(0)),
                     rngs=nnx.Rngs(1))  # fmt: skip
    optimizer = nnx.Optimizer(model, zo.radazo(1e-2), wrt=nnx.LoRAParam)
    frozen = pure(model.base_module)
    value_and_grad = zo_nnx.value_and_grad(
        loss_fn, ESTIMATORS["forward"], wrt=nnx.LoRAParam
    )
    _, gradient = value_and_grad(jax.random.key(0), model, X, Y)
    assert {path[-1] for path, _ in nnx.to_flat_state(gradient)} == {"lora_a", "lora_b"}
    before = pure(model, nnx.LoRAParam)
    optimizer.update(model, gradient)
    chex.assert_trees_all_equal(pure(model.base_module), frozen)
    after = pure(model, nnx.LoRAParam)
    assert not np.array_equal(after["lora_b"], before["lora_b"])


def test_value_fn_leaves_the_model_as_an_evaluation_does():
    model, expected = Net(nnx.Rngs(0)), Net(nnx.Rngs(0))
    value = zo_nnx.value_fn(lambda model: loss_fn(model, X, Y), model)
    at_params = loss_fn(expected, X, Y)
    trees = (pure(net, nnx.Not(nnx.RngKey)) for net in (model, expected))
    chex.assert_trees_all_equal(*trees)
    for _ in range(2):  # Each call starts from the state that the model was made with.
        np.testing.assert_allclose(value(nnx.state(model, nnx.Param)), at_params)


def test_a_variable_that_is_new_is_kept():
    class Recorder(nnx.Module):
        def __init__(self):
            self.weight = nnx.Param(jnp.ones(3))

        def __call__(self):
            self.seen = nnx.Intermediate(self.weight[...])
            return jnp.sum(self.weight[...] ** 2)

    model = Recorder()
    zo_nnx.value_and_grad(lambda model: model(), ESTIMATORS["forward"])(0, model)
    np.testing.assert_array_equal(model.seen[...], np.ones(3))


def test_has_aux_and_keyword_arguments():
    model = nnx.Linear(5, 1, rngs=nnx.Rngs(0))

    def with_aux(model, x, *, y):
        prediction = model(x)
        return jnp.mean((prediction - y) ** 2), prediction

    value_and_grad = zo_nnx.value_and_grad(
        with_aux, ESTIMATORS["forward"], has_aux=True
    )
    (value, prediction), _ = value_and_grad(jax.random.key(0), model, X, y=Y)
    np.testing.assert_allclose(prediction, model(X), rtol=1e-6)
    np.testing.assert_allclose(value, loss_fn(model, X, Y), rtol=1e-6)


def test_bad_input_is_named():
    model = nnx.Linear(5, 1, rngs=nnx.Rngs(0))
    estimator = ESTIMATORS["forward"]
    with pytest.raises(TypeError, match="loss_fn must be a function of the model"):
        zo_nnx.value_and_grad(None, estimator)
    with pytest.raises(TypeError, match="estimator must be a GradientEstimator"):
        zo_nnx.value_and_grad(loss_fn, zo.radazo(1e-2))
    with pytest.raises(TypeError, match="evaluator must be an Evaluator such as"):
        zo_nnx.value_and_grad(loss_fn, estimator, evaluator=nnx.LoRAParam)
    with pytest.raises(ValueError, match=r"wrt must match.*LoRAParam.*none of Linear"):
        zo_nnx.value_and_grad(loss_fn, estimator, wrt=nnx.LoRAParam)(0, model, X, Y)
    with pytest.raises(ValueError, match="wrt must match variables"):
        zo_nnx.value_fn(lambda model: loss_fn(model, X, Y), model, nnx.LoRAParam)
    with pytest.raises(ValueError, match="scalar loss"):
        zo_nnx.value_and_grad(lambda model: model(X), estimator)(0, model)


# --- Writes to NNX objects ------------------------------------------------------


FORWARD = zo.forward_difference(num_directions=3)


class Dropped(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(5, 4, rngs=rngs)
        self.dropout = nnx.Dropout(0.5)

    def __call__(self, x, rngs):
        return self.dropout(self.linear(x), rngs=rngs)


def dropped_loss(model, x, rngs):
    return jnp.mean(model(x, rngs) ** 2)


def of_mask(model, rngs):
    """Depends on the dropout mask alone."""
    mask = model.dropout(jnp.ones((16, 4)), rngs=rngs)
    return jnp.mean(mask) + 0 * jnp.sum(model.linear.bias[...])


@pytest.mark.parametrize("wrapped", [slow(lambda f: f), nnx.jit], ids=["eager", "jit"])
@pytest.mark.parametrize(
    "estimator", [FORWARD, slow(zo.central_difference(num_directions=2))]
)
def test_each_step_has_a_new_dropout_mask(wrapped, estimator):
    model, rngs = Dropped(nnx.Rngs(0)), nnx.Rngs(dropout=1)
    value_and_grad = wrapped(zo_nnx.value_and_grad(of_mask, estimator))
    values = [float(value_and_grad(i, model, rngs)[0]) for i in range(4)]
    assert int(rngs.dropout.count[...]) == 4
    assert len(set(values)) > 1
    # The same masks as by Flax itself: one evaluation per step.
    expected = nnx.Rngs(dropout=1)
    np.testing.assert_allclose(
        values, [of_mask(model, expected) for _ in range(4)], rtol=1e-6
    )


def test_all_evaluations_of_a_step_share_the_mask():
    model, rngs = Dropped(nnx.Rngs(0)), nnx.Rngs(dropout=1)
    _, gradient = zo_nnx.value_and_grad(of_mask, FORWARD)(0, model, rngs)
    assert not any(np.any(g) for g in jax.tree.leaves(gradient))


def test_keyword_arguments_and_containers_are_written_to():
    def loss(model, batch, *, metric):
        value = dropped_loss(model, batch["x"], batch["streams"][0])
        metric.update(values=value)
        return value

    model, rngs = Dropped(nnx.Rngs(0)), nnx.Rngs(dropout=1)
    metric = nnx.metrics.Average()
    value_and_grad = zo_nnx.value_and_grad(loss, FORWARD)
    batch = {"x": X, "streams": [rngs]}
    values = [value_and_grad(i, model, batch, metric=metric)[0] for i in range(3)]
    assert int(rngs.dropout.count[...]) == 3
    np.testing.assert_allclose(metric.compute(), np.mean(values), rtol=1e-6)


def test_a_second_module_is_written_to_and_not_perturbed():
    def loss(model, teacher):
        return jnp.mean((model(X) - teacher(X)) ** 2)

    class Teacher(nnx.Module):
        def __init__(self, rngs):
            self.norm = nnx.BatchNorm(5, rngs=rngs)
            self.out = nnx.Linear(5, 4, rngs=rngs)

        def __call__(self, x):
            return self.out(self.norm(x))

    model = nnx.Linear(5, 4, rngs=nnx.Rngs(0))
    teacher, expected = Teacher(nnx.Rngs(1)), Teacher(nnx.Rngs(1))
    value, gradient = zo_nnx.value_and_grad(loss, FORWARD)(0, model, teacher)
    np.testing.assert_allclose(value, loss(model, expected), rtol=1e-5)
    np.testing.assert_allclose(
        teacher.norm.mean[...], expected.norm.mean[...], rtol=1e-6
    )
    np.testing.assert_array_equal(teacher.out.kernel[...], expected.out.kernel[...])
    assert set(nnx.to_pure_dict(gradient)) == {"kernel", "bias"}


def test_objects_that_share_variables_stay_shared():
    class Inner(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(5, 4, rngs=rngs)
            self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def loss(model, dropout):
        first = model.dropout(model.linear(X))
        return jnp.mean(first**2) + 0 * jnp.sum(dropout(X))

    model = Inner(nnx.Rngs(0))
    zo_nnx.value_and_grad(loss, FORWARD)(0, model, model.dropout)
    assert int(model.dropout.rngs.count[...]) == 2


def test_variables_as_arguments_are_written_to():
    def loss(model, counter):
        counter[...] += 1
        return jnp.sum(model(X) ** 2)

    counter = nnx.Variable(jnp.zeros((), jnp.int32))
    model = nnx.Linear(5, 4, rngs=nnx.Rngs(0))
    value_and_grad = nnx.jit(zo_nnx.value_and_grad(loss, FORWARD))
    for i in range(3):
        value_and_grad(i, model, counter)
    assert int(counter[...]) == 3


def test_value_fn_writes_to_its_arguments():
    tx = optax.chain(zo.estimate_gradient(FORWARD, key=0), zo.radazo(1e-2))

    @nnx.jit
    def step(model, optimizer, rngs):
        loss = zo_nnx.value_fn(dropped_loss, model, args=(X, rngs))
        optimizer.update(model, nnx.state(model, nnx.Param), value_fn=loss)

    model, rngs = Dropped(nnx.Rngs(0)), nnx.Rngs(dropout=1)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    for _ in range(3):
        step(model, optimizer, rngs)
    assert int(rngs.dropout.count[...]) == 3


STATISTICS = {
    "nnx": nnx.state(nnx.BatchNorm(5, rngs=nnx.Rngs(0))),
    "linen": {"params": {"w": np.ones(2)}, "batch_stats": {"mean": np.zeros(2)}},
}


@pytest.mark.parametrize("kind", STATISTICS)
@pytest.mark.parametrize("method", [(), (zo.radazo(1e-2), FORWARD)], ids=["", "radazo"])
def test_statistics_among_the_parameters_are_named(kind, method):
    with pytest.warns(UserWarning, match="is a running statistic"):
        zo.ask_tell(STATISTICS[kind], *method)


def test_parameters_alone_are_not_warned_of(recwarn):
    zo.ask_tell(nnx.state(nnx.BatchNorm(5, rngs=nnx.Rngs(0)), nnx.Param))
    assert not recwarn.list
