"""The door for Flax NNX: what is perturbed, what is kept, what is left alone."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
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


@pytest.fixture(autouse=True)
def as_flax_needs_it():
    """Flax adds a bias to a batch, and counts in uint32."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


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
    [
        slow("central"),
        "forward",
        slow("forward low rank"),
        slow("forward in turn"),
    ],
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
