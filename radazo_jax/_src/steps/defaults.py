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

# Up to so many parameters, the first stage evaluates differences along all coordinates.
_FEW = 100

# K is at least 10, because two of the K + 2 evaluations of a step are no directions. It
# is at most 32, because a cycle of d directions should have many steps.
_FEWEST, _MOST = 10, 32


def default_method(params: optax.Params, minibatches: bool = False) -> Method:
    """The optimizer, the estimator and the search of runs that name none.

    There is no learning rate: step sizes are found from values. Use it with `solver`
    and `ask_tell`. `minimize` and `minimize_black_box` begin with it by themselves; up
    to 100 parameters, other methods may follow, as `stages` of the result lists.

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
    if minibatches:
        default = _of_minibatches()
    elif size <= _FEW and optimizer is None and estimator is None:
        default = bfgs(), full_difference(), backtracking()
    else:
        # Only the default search is known to start its steps at the lookahead point of
        # an accelerated estimator.
        default = _of_many(size, accelerates=optimizer is None)
    if search is None:
        search = default[2] if optimizer is None else whole()
    chosen = (
        default[0] if optimizer is None else optimizer,
        default[1] if estimator is None else estimator,
        search,
    )
    check_run(*chosen)
    return chosen


def is_staged(
    optimizer: Any,
    estimator: Any,
    search: Any,
    params: optax.Params,
    minibatches: bool,
) -> bool:
    """Whether a run that names these may change its method."""
    named = not (optimizer is estimator is search is None)
    return not named and not minibatches and optax.tree.size(params) <= _FEW


# The same optimizer at each call, so that runs compile once.
@functools.cache
def _of_minibatches() -> Method:
    descent = optax.chain(optax.scale(-1.0), scale_by_minibatch_step())
    return descent, forward_difference(orthonormal()), whole()


@functools.cache
def whole_steps() -> optax.GradientTransformation:
    """The optimizer whose direction is the negative gradient as it is."""
    return optax.with_extra_args_support(optax.sgd(1.0))


def _of_many(size: int, accelerates: bool) -> Method:
    count = min(max(math.isqrt(size), _FEWEST), _MOST)
    estimator = adaptive_difference(orthonormal(), count)
    if accelerates:
        estimator = accelerated(estimator)
    return whole_steps(), estimator, parabolic()
