"""The optimizers: each a chain of a direction and a learning rate.

Optax's own suites, in `test_optax_suite.py`, test what all optimizers must do.
"""

import functools
import inspect

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import radazo_jax as zo
from tests.helpers.moments import PARAMS, gradients, run

# Name -> the optimizer as a function of the learning rate, its direction, and Optax's
# optimizer that takes the same steps. Optax has no Adam without bias correction.
OPTIMIZERS = {
    "radazo": (
        zo.radazo,
        zo.scale_by_radazo(),
        optax.chain(optax.ema(0.9, debias=False), optax.rmsprop(0.1, 0.99, 1e-8)),
    ),
    "zo_adamm": (zo.zo_adamm, zo.scale_by_zo_adamm(), None),
    "zo_adamm_debiased": (
        functools.partial(zo.zo_adamm, bias_correction=True),
        zo.scale_by_zo_adamm(bias_correction=True),
        optax.adam(0.1, 0.9, 0.99, 0.0, 1e-8),
    ),
    "zo_rmsprop": (
        zo.zo_rmsprop,
        optax.scale_by_rms(0.99, 1e-8),
        optax.rmsprop(0.1, 0.99, 1e-8),
    ),
    "zo_sgd": (zo.zo_sgd, optax.identity(), optax.sgd(0.1)),
    "zo_sgd_momentum": (
        functools.partial(zo.zo_sgd, momentum=0.9),
        optax.trace(0.9),
        optax.sgd(0.1, 0.9),
    ),
    "zo_sgd_nesterov": (
        functools.partial(zo.zo_sgd, momentum=0.9, nesterov=True),
        optax.trace(0.9, nesterov=True),
        optax.sgd(0.1, 0.9, nesterov=True),
    ),
    "zo_signsgd": (zo.zo_signsgd, optax.scale_by_sign(), optax.sign_sgd(0.1)),
}


def updates_of(tx, num_steps=50):
    gs = jax.tree.map(jnp.asarray, gradients(num_steps))
    with jax.numpy_dtype_promotion("standard"):  # For the parts of Optax.
        return run(tx, PARAMS, gs)[0]


def assert_equal(actual, expected, rtol=0.0):
    chex.assert_trees_all_close(actual, expected, rtol=rtol, atol=0)
    chex.assert_trees_all_equal_shapes_and_dtypes(actual, expected)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_is_minus_the_learning_rate_times_a_direction(name):
    optimizer, direction, theirs = OPTIMIZERS[name]
    expected = updates_of(direction)
    scaled = [jax.tree.map(lambda u: -0.25 * u, update) for update in expected]
    # A power of two: no rounding.
    assert_equal(updates_of(optimizer(0.25)), scaled)
    scheduled = updates_of(optimizer(lambda count: jnp.where(count < 2, 0.25, 0.5)))
    assert_equal(scheduled[:2], scaled[:2])
    assert_equal(scheduled[2], jax.tree.map(lambda u: 2 * u, scaled[2]))
    if theirs is not None:
        assert_equal(updates_of(optimizer(0.1)), updates_of(theirs), rtol=2e-6)


@pytest.mark.parametrize("name", ["radazo", "zo_adamm"])
def test_arguments_reach_the_transformation(name):
    arguments = {
        "b1": 0.5,
        "b2": 0.75,
        "eps_root": 1e-2,
        "initial_accumulator_value": 2.0,
        "bias_correction": True,
        "mu_dtype": "bfloat16",
        **({"amsgrad": True} if name == "zo_adamm" else {}),
    }
    transform = getattr(zo, f"scale_by_{name}")
    assert list(inspect.signature(transform).parameters) == list(arguments)
    expected = updates_of(optax.chain(transform(**arguments), optax.scale(-0.5)), 5)
    assert_equal(updates_of(OPTIMIZERS[name][0](0.5, **arguments), 5), expected)


def test_arguments_reach_rmsprop():
    expected = updates_of(
        optax.chain(optax.scale_by_rms(0.75, 1e-2, 2.0), optax.scale(-0.5)), 5
    )
    assert_equal(updates_of(zo.zo_rmsprop(0.5, 0.75, 1e-2, 2.0), 5), expected)
    first = updates_of(zo.zo_rmsprop(0.5, eps_root=0.0, bias_correction=True), 1)[0]
    assert_equal(np.abs(first["w"]), np.full((3, 2), 0.5, np.float32), rtol=1e-5)


@pytest.mark.parametrize(
    ("make", "argument", "value", "error"),
    [
        (zo.zo_rmsprop, "b2", 1.0, ValueError),
        (zo.zo_rmsprop, "eps_root", float("nan"), ValueError),
        (zo.zo_rmsprop, "initial_accumulator_value", -1.0, ValueError),
        (zo.zo_sgd, "momentum", 1.0, ValueError),
    ],
)
def test_bad_hyperparameters(make, argument, value, error):
    with pytest.raises(error, match=f"{argument} must be .*got"):
        make(0.1, **{argument: value})
