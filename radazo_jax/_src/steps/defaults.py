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
from radazo_jax._src.transforms.decayed import radazo_at

Method = tuple[optax.GradientTransformation, GradientEstimator, Search]

# Up to so many parameters, the first stage evaluates differences along all coordinates.
FEW = 100

# K is at least 10, because two of the K + 2 evaluations of a step are no directions. It
# is at most 32, because a cycle of d directions should have many steps.
_FEWEST, _MOST = 10, 32

# Above so many parameters, the moments on minibatches are replayed, not stored.
_LARGE = 1 << 24


def default_method(
    params: optax.Params,
    learning_rate: float | None = None,
    num_steps: int | None = None,
    smoothing: float | None = None,
) -> Method:
    """The optimizer, the estimator and the search of runs that name none.

    Without a learning rate, step sizes are found from values, so the loss must be the
    same function in each step. On minibatches the optimizer is R-AdaZO, and a
    learning rate must be measured before the run: `find_learning_rate` returns it. Use
    this function with `solver`, `ask_tell` and `replay`; `minimize` and
    `minimize_black_box` begin with it by themselves. Up to 100 parameters, other
    methods may follow there, as `stages` of the result lists.

    Args:
      params: The parameters, a tree of arrays; their number determines K. On
        minibatches, the moments of more than 2²⁴ parameters are replayed, as by
        `radazo(..., moments="replayed")`.
      learning_rate: η of the first step on minibatches, > 0.
      num_steps: T, the number of steps over which η falls linearly to 0. If it is not
        known, η falls as 1/√(1 + t/100).
      smoothing: μ on minibatches, > 0, as `find_learning_rate` measures it for
        `orthonormal()`; by default 5e-3.

    Returns:
      An Optax transformation, an estimator and a search. For the same number of
      parameters runs compile once, at any learning rate.

    Raises:
      TypeError, ValueError: If an argument has the wrong type or value, or `num_steps`
        is given without `learning_rate`.

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

      On minibatches:

      >>> def loss(x, noise):
      ...     return 1 + jnp.mean((x - 1 - noise) ** 2)
      >>> def sample(key):
      ...     return jax.random.normal(key, (4,)) / 4
      >>> found = zo.find_learning_rate(loss, params, 200, sample=sample)
      >>> method = zo.default_method(params, found.learning_rate, found.num_steps)
      >>> init, step = zo.solver(loss, *method, sample=sample)
      >>> state, step = init(params, jax.random.key(0)), jax.jit(step)
      >>> for _ in range(200):
      ...     state, info = step(state)
      >>> bool(jnp.mean((state.params - 1) ** 2) < 0.1)
      True
    """
    if learning_rate is None:
        if num_steps is not None:
            raise ValueError(
                f"num_steps must be None without learning_rate; got {num_steps!r}. "
                "Give both, as find_learning_rate returns them."
            )
        return method(None, None, None, params, minibatches=False)
    checks.check_positive("learning_rate", learning_rate)
    if num_steps is not None:
        checks.check_int_at_least("num_steps", num_steps, 1)
    rate = learning_rate, num_steps
    estimator = forward_difference(orthonormal(), smoothing=smoothing)
    return method(None, estimator, whole(), params, minibatches=True, rate=rate)


def method(
    optimizer: Any,
    estimator: Any,
    search: Any,
    params: optax.Params,
    minibatches: bool,
    rate: tuple[float, int | None] = (0.0, None),
) -> Method:
    """The method that a caller names in part, completed by the default.

    Args:
      optimizer: The optimizer, if it is named.
      estimator: The estimator, if it is named.
      search: The search, if it is named.
      params: The parameters.
      minibatches: Whether the loss changes from step to step.
      rate: The learning rate on minibatches, and the number of steps.

    Raises:
      TypeError: If one is something else.
    """
    checks.check_params(params)
    size = optax.tree.size(params)
    if minibatches:
        default = _of_minibatches(size, estimator, *rate)
    elif size <= FEW and optimizer is None and estimator is None:
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
    return not named and not minibatches and optax.tree.size(params) <= FEW


def _of_minibatches(
    size: int, estimator: Any, learning_rate: float, num_steps: int | None
) -> Method:
    default = forward_difference(orthonormal())
    most = max(getattr(estimator or default, "num_directions", 0), 64)
    optimizer = radazo_at(learning_rate, num_steps, size > _LARGE, most)
    return optimizer, default, whole()


# The same optimizer at each call, so that runs compile once.
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
