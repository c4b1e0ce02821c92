"""What runs take that name no optimizer or estimator: nothing is tuned."""

import functools
from typing import Any, NamedTuple

import optax

from radazo_jax._src.directions.signs import orthonormal
from radazo_jax._src.estimate.adaptive import adaptive_difference
from radazo_jax._src.estimate.differences import forward_difference
from radazo_jax._src.estimate.estimator import GradientEstimator
from radazo_jax._src.optimize.aliases import parabolic_sgd
from radazo_jax._src.optimize.minibatch import scale_by_minibatch_step
from radazo_jax._src.optimize.step import check_run


class Method(NamedTuple):
    """What steps are taken by."""

    optimizer: optax.GradientTransformation
    estimator: GradientEstimator


def method(optimizer: Any, estimator: Any, minibatches: bool) -> Method:
    """What the caller named, and the defaults in place of `None`.

    Args:
      optimizer: An Optax transformation; by default, one without a learning rate.
      estimator: An estimator; by default, one that draws without replacement.
      minibatches: Whether the loss is another in each step.

    Raises:
      TypeError: If an argument is something else.
    """
    default = _defaults(minibatches)
    optimizer = default.optimizer if optimizer is None else optimizer
    estimator = default.estimator if estimator is None else estimator
    check_run(optimizer, estimator)
    return Method(optimizer, estimator)


@functools.cache
def _defaults(minibatches: bool) -> Method:
    """The same objects at each call, so that runs compile once."""
    if minibatches:
        optimizer = optax.chain(optax.scale(-1.0), scale_by_minibatch_step())
        return Method(optimizer, forward_difference(orthonormal()))
    return Method(parabolic_sgd(), adaptive_difference(orthonormal()))
