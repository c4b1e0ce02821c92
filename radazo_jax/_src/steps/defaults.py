"""The default method, which has nothing to tune."""

import functools
import math
from typing import Any

import optax

from radazo_jax._src import checks
from radazo_jax._src.base import GradientEstimator, Search
from radazo_jax._src.directions.signs import orthonormal
from radazo_jax._src.estimators.accelerated import accelerated
from radazo_jax._src.estimators.adaptive import adaptive_difference
from radazo_jax._src.estimators.differences import forward_difference
from radazo_jax._src.estimators.full import full_difference
from radazo_jax._src.search.backtracking import backtracking
from radazo_jax._src.search.parabolic import parabolic
from radazo_jax._src.search.whole import whole
from radazo_jax._src.steps.states import check_run
from radazo_jax._src.transforms.aliases import bfgs
from radazo_jax._src.transforms.minibatch import scale_by_minibatch_step

Method = tuple[optax.GradientTransformation, GradientEstimator, Search]

# Up to so many parameters a step evaluates differences along all coordinates.
_FEW = 20

# K is at least 10, because two of the K + 2 evaluations of a step are no directions. It
# is at most 32, because a cycle of d directions should have many steps.
_FEWEST, _MOST = 10, 32


def default_method(params: optax.Params, minibatches: bool = False) -> Method:
    """The optimizer, the estimator and the search of runs that name none.

    There is no learning rate: step sizes are found from values. Use it with `solver`
    and `ask_tell`; `minimize` and `minimize_black_box` use it by themselves.

    Args:
      params: The parameters, a tree of arrays; their number determines K.
      minibatches: Whether the loss changes from step to step.

    Returns:
      An Optax transformation, an estimator and a search. For the same number of
      parameters the transformation is the same object, and estimators and searches are
      equal, so that programs compile once.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> import radazo_jax as zo
      >>> params = jnp.zeros(4)
      >>> method = zo.default_method(params)
      >>> init, step = zo.solver(lambda x: jnp.sum((x - 1) ** 2), *method)
      >>> state, step = init(params, jax.random.key(0)), jax.jit(step)
      >>> for _ in range(20):
      ...     state, info = step(state)
      >>> bool(info.value < 1e-3)
      True
    """
    return method(None, None, None, params, minibatches)


def method(
    optimizer: Any,
    estimator: Any,
    search: Any,
    params: optax.Params,
    minibatches: bool,
) -> Method:
    """The method that a caller names in part, completed by the default.

    Raises:
      TypeError: If one is something else.
    """
    checks.check_params(params)
    size = optax.tree.size(params)
    few = size <= _FEW and not minibatches
    names_none = optimizer is None and estimator is None
    if search is None and optimizer is None:
        search = _search(few and names_none, minibatches)
    elif search is None:
        search = whole()
    if names_none and few:
        optimizer, estimator = bfgs(), full_difference()
    if estimator is None:
        # Only the default search is known to start its steps at the lookahead point of
        # an accelerated estimator.
        count = min(max(math.isqrt(size), _FEWEST), _MOST)
        estimator = _estimator(count, minibatches, optimizer is None)
    if optimizer is None:
        optimizer = _optimizer(minibatches)
    check_run(optimizer, estimator, search)
    return optimizer, estimator, search


# The same object at each call, so that runs compile once.
@functools.cache
def _optimizer(minibatches: bool) -> optax.GradientTransformation:
    if minibatches:
        return optax.chain(optax.scale(-1.0), scale_by_minibatch_step())
    return optax.with_extra_args_support(optax.sgd(1.0))


def _search(few: bool, minibatches: bool) -> Search:
    if minibatches:
        return whole()
    return backtracking() if few else parabolic()


def _estimator(count: int, minibatches: bool, accelerates: bool) -> GradientEstimator:
    if minibatches:
        return forward_difference(orthonormal())
    estimator = adaptive_difference(orthonormal(), count)
    return accelerated(estimator) if accelerates else estimator
