"""What runs take that name no optimizer or estimator: nothing is tuned."""

import functools
import math
from typing import Any

import optax

from radazo_jax._src.directions.signs import orthonormal
from radazo_jax._src.estimate.accelerated import accelerated
from radazo_jax._src.estimate.adaptive import adaptive_difference
from radazo_jax._src.estimate.differences import forward_difference
from radazo_jax._src.estimate.estimator import GradientEstimator
from radazo_jax._src.optimize.aliases import parabolic_sgd
from radazo_jax._src.optimize.minibatch import scale_by_minibatch_step
from radazo_jax._src.optimize.step import check_run

# Two of the K + 2 evaluations of a step are no directions. A cycle of d directions is
# to have many steps all the same, and all K are evaluated together.
_FEWEST, _MOST = 10, 32


def method(
    optimizer: Any, estimator: Any, params: Any, minibatches: bool
) -> tuple[optax.GradientTransformation, GradientEstimator]:
    """Optimizer and estimator as the caller named them, and defaults for `None`.

    Args:
      optimizer: An Optax transformation; by default, one without a learning rate.
      estimator: An estimator; by default, one that draws without replacement.
      params: The parameters, a tree of arrays.
      minibatches: Whether the loss is another in each step.

    Raises:
      TypeError: If an argument is something else.
    """
    if estimator is None:
        # The steps of a named optimizer may not start where an accelerated estimator
        # measures.
        count = min(max(math.isqrt(optax.tree.size(params)), _FEWEST), _MOST)
        estimator = _estimator(count, minibatches, optimizer is None)
    if optimizer is None:
        optimizer = _optimizer(minibatches)
    check_run(optimizer, estimator)
    return optimizer, estimator


# The same objects at each call, so that runs compile once.
@functools.cache
def _optimizer(minibatches: bool) -> optax.GradientTransformation:
    if minibatches:
        return optax.chain(optax.scale(-1.0), scale_by_minibatch_step())
    return parabolic_sgd()


@functools.cache
def _estimator(count: int, minibatches: bool, accelerates: bool) -> GradientEstimator:
    if minibatches:
        return forward_difference(orthonormal())
    estimator = adaptive_difference(orthonormal(), count)
    return accelerated(estimator) if accelerates else estimator
