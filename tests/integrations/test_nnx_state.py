"""The writes of a loss to the Flax NNX objects among its arguments."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import radazo_jax as zo
import radazo_jax.nnx as zo_nnx
from tests.helpers.tables import slow

X = jax.random.normal(jax.random.key(1), (16, 5))
FORWARD = zo.forward_difference(num_directions=3)


@pytest.fixture(autouse=True)
def as_flax_needs_it():
    """Flax adds a bias to a batch, and counts in uint32."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


class Net(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(5, 4, rngs=rngs)
        self.dropout = nnx.Dropout(0.5)

    def __call__(self, x, rngs):
        return self.dropout(self.linear(x), rngs=rngs)


def loss_fn(model, x, rngs):
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
    model, rngs = Net(nnx.Rngs(0)), nnx.Rngs(dropout=1)
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
    model, rngs = Net(nnx.Rngs(0)), nnx.Rngs(dropout=1)
    _, gradient = zo_nnx.value_and_grad(of_mask, FORWARD)(0, model, rngs)
    assert not any(np.any(g) for g in jax.tree.leaves(gradient))


def test_keyword_arguments_and_containers_are_written_to():
    def loss(model, batch, *, metric):
        value = loss_fn(model, batch["x"], batch["streams"][0])
        metric.update(values=value)
        return value

    model, rngs = Net(nnx.Rngs(0)), nnx.Rngs(dropout=1)
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
        loss = zo_nnx.value_fn(loss_fn, model, args=(X, rngs))
        optimizer.update(model, nnx.state(model, nnx.Param), value_fn=loss)

    model, rngs = Net(nnx.Rngs(0)), nnx.Rngs(dropout=1)
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
