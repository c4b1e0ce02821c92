"""Keras: `fit` takes the steps that a loop of our own takes."""

import importlib.util
import os

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import radazo_jax as zo
from tests.helpers.tables import slow

os.environ.setdefault("KERAS_BACKEND", "jax")
if importlib.util.find_spec("keras") is None:
    pytest.skip('needs "radazo-jax[stacks]"', allow_module_level=True)

import keras

import radazo_jax.keras as zo_keras

rng = np.random.default_rng(0)
X = rng.standard_normal((16, 3)).astype(np.float32)
Y = (X @ [[1.0], [-2.0], [0.5]]).astype(np.float32)
ESTIMATORS = {
    "forward": zo.forward_difference(zo.rademacher(), num_directions=3),
    "central": zo.central_difference(zo.low_rank(), num_directions=2),
}
STEPS = 4


@pytest.fixture(autouse=True)
def as_keras_needs_it():
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


def network(*layers):
    keras.utils.set_random_seed(0)
    dense = keras.layers.Dense
    parts = [keras.Input((3,)), dense(4, activation="tanh"), *layers, dense(1)]
    return keras.Sequential(parts)


def trained(model, optimizer, estimator, steps=STEPS, **kwargs):
    trainer = zo_keras.ZerothOrder(model, estimator, key=7)
    trainer.compile(optimizer=optimizer, loss="mse", **kwargs)
    history = trainer.fit(X, Y, batch_size=16, epochs=steps, shuffle=False, verbose=0)
    return trainer, history.history


def values(model):
    return [np.asarray(v.value) for v in model.trainable_variables]


@pytest.mark.parametrize("name", ["forward", slow("central")])
def test_fit_is_the_loop_written_out(name):
    model, transformation = network(), zo.radazo(1e-2)
    params = values(model)
    _, history = trained(model, transformation, ESTIMATORS[name])

    def loss(params):
        w1, b1, w2, b2 = params
        found = jnp.tanh(X @ w1 + b1) @ w2 + b2
        return jnp.mean((found - Y) ** 2)

    @jax.jit
    def step(i, params, state):
        key = jax.random.fold_in(jax.random.key(7), i)
        value, grads = zo.value_and_grad(loss, ESTIMATORS[name])(key, params)
        updates, state = transformation.update(grads, state, params)
        return value, optax.apply_updates(params, updates), state

    state, losses = transformation.init(params), []
    for i in range(STEPS):
        value, params, state = step(jnp.uint32(i), params, state)
        losses.append(value)
    if name == "forward":  # Keras shows the loss of the first evaluation.
        np.testing.assert_allclose(history["loss"], losses, rtol=1e-5)
    # The differences of values that agree to rounding, over a distance of 1e-3.
    for found, expected in zip(values(model), params, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_optimizers_callbacks_and_metrics_of_keras():
    model, epochs = network(), []
    trainer = zo_keras.ZerothOrder(model, ESTIMATORS["forward"])
    trainer.compile(optimizer=keras.optimizers.Adam(0.05), loss="mse", metrics=["mae"])
    callback = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda i, _: epochs.append(i)
    )
    history = trainer.fit(X, Y, epochs=60, verbose=0, callbacks=[callback])
    assert epochs == list(range(60))
    assert history.history["loss"][-1] < 0.5 * history.history["loss"][0]
    loss, error = trainer.evaluate(X, Y, verbose=0)
    residuals = model.predict(X, verbose=0) - Y
    np.testing.assert_allclose(loss, np.mean(residuals**2), rtol=1e-5)
    np.testing.assert_allclose(error, np.mean(np.abs(residuals)), rtol=1e-5)


@pytest.mark.slow
def test_statistics_are_those_of_one_evaluation():
    model = network(keras.layers.BatchNormalization(), keras.layers.Dropout(0.5))
    estimator = ESTIMATORS["forward"]  # Its first evaluation is at the parameters.
    trained(model, optax.sgd(0.0), estimator, steps=1)
    weights, bias = values(model)[:2]
    mean = np.tanh(X @ weights + bias).mean(axis=0)
    found = values_of(model, "moving_mean")
    np.testing.assert_allclose(found, 0.01 * mean, rtol=1e-4, atol=1e-7)


@pytest.mark.slow
def test_the_mask_is_the_same_in_all_evaluations_of_a_step():
    """Differences to another mask are 1000 times the slope, and more."""
    model = network(keras.layers.Dropout(0.5))
    before = values(model)
    trained(model, optax.sgd(1.0), ESTIMATORS["forward"], steps=1)
    moved = [a - b for a, b in zip(values(model), before, strict=True)]
    assert max(np.abs(step).max() for step in moved) < 30


def values_of(model, name):
    (found,) = (v for v in model.non_trainable_variables if v.name == name)
    return np.asarray(found.value)


# Keras 3.15, as it reads its own variables with NumPy 2.4.
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
@pytest.mark.slow
def test_a_run_goes_on_from_saved_weights(tmp_path):
    one, _ = trained(network(), zo.radazo(1e-2), ESTIMATORS["forward"], steps=2)
    one.save_weights(tmp_path / "run.weights.h5")
    one.fit(X, Y, batch_size=16, epochs=2, shuffle=False, verbose=0)
    two = zo_keras.ZerothOrder(network(), ESTIMATORS["forward"], key=7)
    two.compile(optimizer=zo.radazo(1e-2), loss="mse")
    two.build(X.shape)
    two.optimizer.build(two.trainable_variables)
    two.load_weights(tmp_path / "run.weights.h5")
    two.fit(X, Y, batch_size=16, epochs=2, shuffle=False, verbose=0)
    for a, b in zip(values(one), values(two), strict=True):
        np.testing.assert_array_equal(a, b)


def test_what_is_no_estimator():
    with pytest.raises(TypeError, match="estimator must be a GradientEstimator"):
        zo_keras.ZerothOrder(network(), "forward")


def weights_of(model):
    return np.concatenate([np.asarray(v.value).ravel() for v in model.weights])


def test_mixed_precision_draws_new_directions():
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        trainer = zo_keras.ZerothOrder(model, zo.central_difference(num_directions=1))
        trainer.compile(optimizer=keras.optimizers.SGD(1e-2), loss="mse")
        points = [weights_of(model)]
        for _ in range(3):
            trainer.fit(np.eye(3), np.ones((3, 1)), verbose=0)
            points.append(weights_of(model))
    finally:
        keras.config.set_dtype_policy(before)
    steps = np.diff(points, axis=0)
    assert np.linalg.matrix_rank(steps, tol=1e-2 * np.linalg.norm(steps, 2)) == 3


# Keras' own callback reads the rate so.
@pytest.mark.filterwarnings("ignore:__array__:DeprecationWarning")
def test_constraints_and_the_rate_of_callbacks_hold_for_optax():
    layer = keras.layers.Dense(1, use_bias=False, kernel_constraint="non_neg")
    model = keras.Sequential([keras.Input((3,)), layer])
    trainer = zo_keras.ZerothOrder(model, zo.forward_difference())
    trainer.compile(optimizer=zo.radazo(0.1), loss="mse")
    trainer.fit(np.eye(3), -np.ones((3, 1)), epochs=30, verbose=0)
    kernel = np.asarray(layer.kernel.value)
    assert kernel.min() == 0
    stops = keras.callbacks.LearningRateScheduler(lambda epoch, rate: 0.0)
    trainer.fit(np.eye(3), np.ones((3, 1)), verbose=0, callbacks=[stops])
    np.testing.assert_array_equal(np.asarray(layer.kernel.value), kernel)
