"""What runs take that name no optimizer or estimator: nothing is tuned."""

import functools
from typing import NamedTuple

import optax

from radazo_jax._src.directions.signs import orthonormal
from radazo_jax._src.estimate.differences import forward_difference
from radazo_jax._src.estimate.estimator import GradientEstimator
from radazo_jax._src.optimize.aliases import parabolic_sgd
from radazo_jax._src.optimize.minibatch import scale_by_minibatch_step


class Defaults(NamedTuple):
    """An optimizer and an estimator.

    Attributes:
      optimizer: One without a learning rate.
      estimator: One whose directions are drawn without replacement.
    """

    optimizer: optax.GradientTransformationExtraArgs
    estimator: GradientEstimator


@functools.cache
def defaults(minibatches: bool) -> Defaults:
    """The same objects at each call, so that runs compile once.

    Args:
      minibatches: Whether the loss is another in each step.
    """
    if minibatches:
        optimizer = optax.chain(optax.scale(-1.0), scale_by_minibatch_step())
    else:
        optimizer = parabolic_sgd()
    return Defaults(optimizer, forward_difference(orthonormal()))
