"""Optimizers, each a chain of transformations.

They take gradients as any Optax optimizer does. They are meant for zeroth-order
gradients, but work with gradients from any source. Equal hashable arguments give the
same optimizer, so that runs with it share a compiled program.
"""

# No `from __future__ import annotations` here: Optax reads the annotation of
# `learning_rate` to find out which optimizers take a schedule.

from collections.abc import Callable

import jax
import optax

from radazo_jax._src.base import checks
from radazo_jax._src.base.configuration import cached_constructor
from radazo_jax._src.estimates.contracts import GradientTransformationExtraArgs
from radazo_jax._src.optimizers.in_place import chain_in_place
from radazo_jax._src.optimizers.moments import (
    Hyperparameters,
    scale_by_radazo,
    scale_by_zo_adamm,
    with_float32_moments,
)
from radazo_jax._src.optimizers.replayed import scale_by_replayed_radazo


@cached_constructor
def radazo(
    learning_rate: optax.ScalarOrSchedule,
    b1: jax.typing.ArrayLike = 0.9,
    b2: jax.typing.ArrayLike = 0.99,
    eps_root: jax.typing.ArrayLike = 1e-8,
    initial_accumulator_value: jax.typing.ArrayLike = 0.0,
    bias_correction: bool = False,
    mu_dtype: jax.typing.DTypeLike | None = None,
    *,
    moments: str = "stored",
    window: int = 64,
    max_directions: int = 64,
) -> GradientTransformationExtraArgs:
    """The R-AdaZO optimizer: Adam for noisy, zeroth-order gradients.

    The step is −η m_t/√(v_t + ζ) with v_t the average of m_t² rather than of g_t²; see
    `scale_by_radazo` for the recursion and its first step. If the noise of the
    estimates dominates, steps are √((1+β₁)/(1−β₁)) times as long (4.4 at the default)
    as the steps of `zo_adamm` at the same learning rate.

    Args:
      learning_rate: The step size η, a scalar ≥ 0 or a schedule.
      b1: Decay rate β₁ of the first moment, in [0, 1).
      b2: Decay rate β₂ of the second moment, in [0, 1).
      eps_root: The constant ζ ≥ 0, inside the root, in units of the
        squared gradient.
      initial_accumulator_value: v₀ ≥ 0, the same for all coordinates.
      bias_correction: Whether to debias both moments, which makes the first step
        η per coordinate instead of η/√(1−β₂).
      mu_dtype: Real floating dtype in which the first moment is stored. None is the
        parameters' dtype, float32 if that is narrower.
      moments: `"stored"`, or `"replayed"` to rebuild the first moment from the
        directions of the latest steps and keep the second by its means over rows and
        columns, as `scale_by_replayed_radazo` does. No moment then takes the memory
        of the parameters.
      window: The number of steps from which a replayed first moment is rebuilt.
      max_directions: The largest number of directions per step, with replayed moments.

    Returns:
      The optimizer, an `optax.GradientTransformationExtraArgs`. With replayed moments,
      its update needs the extra argument `combination`, which `solver`, `train` and
      `estimate_gradient(inner=...)` pass.

    Raises:
      ValueError: If a hyperparameter is out of its range, or of the other kind of
        moments.
      TypeError: If one has the wrong type.

    Examples:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import optax
      >>> import radazo_jax as zo
      >>> def f(x):
      ...     return jnp.sum(x**2)
      >>> optimizer = zo.radazo(learning_rate=0.01)
      >>> params = jnp.array([1.0, 2.0, 3.0])
      >>> state = optimizer.init(params)
      >>> for _ in range(5):
      ...     updates, state = optimizer.update(jax.grad(f)(params), state)
      ...     params = optax.apply_updates(params, updates)
      ...     print(f"{f(params):.2f}")
      12.83
      11.85
      11.02
      10.31
      9.70

    References:
      Shu et al., Refining Adaptive Zeroth-Order Optimization at Ease, ICML 2025,
      algorithm 2.
    """
    shared = (b1, b2, eps_root, initial_accumulator_value, bias_correction)
    if moments not in ("stored", "replayed"):
        raise ValueError(f"moments must be 'stored' or 'replayed'; got {moments!r}.")
    if moments == "replayed":
        if mu_dtype is not None:
            raise ValueError(
                "mu_dtype must be left out with replayed moments, which store no first "
                f"moment; got {mu_dtype!r}."
            )
        replayed = scale_by_replayed_radazo(window, *shared, max_directions)
        return _at_rate(learning_rate, replayed, chain_in_place)
    return _at_rate(learning_rate, scale_by_radazo(*shared, mu_dtype))


@cached_constructor
def zo_adamm(
    learning_rate: optax.ScalarOrSchedule,
    b1: jax.typing.ArrayLike = 0.9,
    b2: jax.typing.ArrayLike = 0.99,
    eps_root: jax.typing.ArrayLike = 1e-8,
    initial_accumulator_value: jax.typing.ArrayLike = 0.0,
    bias_correction: bool = False,
    mu_dtype: jax.typing.DTypeLike | None = None,
    amsgrad: bool = False,
) -> GradientTransformationExtraArgs:
    """The ZO-AdaMM optimizer, in the form the R-AdaZO paper compares with.

    The step is −η m_t/√(v_t + ζ) with v_t the average of g_t², without the running
    maximum of the original unless `amsgrad` is set; see `scale_by_zo_adamm`.

    Args:
      learning_rate: The step size η, a scalar ≥ 0 or a schedule.
      b1: Decay rate β₁ of the first moment, in [0, 1).
      b2: Decay rate β₂ of the second moment, in [0, 1).
      eps_root: The constant ζ ≥ 0, inside the root, in units of the
        squared gradient.
      initial_accumulator_value: v₀ ≥ 0, the same for all coordinates.
      bias_correction: Whether to debias both moments, as Adam does.
      mu_dtype: Real floating dtype in which the first moment is stored. None is the
        parameters' dtype, float32 if that is narrower.
      amsgrad: Whether to divide by the running maximum of v_t, as the original does.

    Returns:
      The optimizer, an `optax.GradientTransformationExtraArgs`.

    Raises:
      ValueError: If a hyperparameter is out of its range.
      TypeError: If one has the wrong type.

    Examples:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import optax
      >>> import radazo_jax as zo
      >>> def f(x):
      ...     return jnp.sum(x**2)
      >>> optimizer = zo.zo_adamm(learning_rate=0.01)
      >>> params = jnp.array([1.0, 2.0, 3.0])
      >>> state = optimizer.init(params)
      >>> for _ in range(5):
      ...     updates, state = optimizer.update(jax.grad(f)(params), state)
      ...     params = optax.apply_updates(params, updates)
      ...     print(f"{f(params):.2f}")
      13.88
      13.72
      13.53
      13.33
      13.12

    References:
      Shu et al., Refining Adaptive Zeroth-Order Optimization at Ease, ICML 2025,
      algorithm 1.

      Chen et al., ZO-AdaMM: Zeroth-Order Adaptive Momentum Method for Black-Box
      Optimization, NeurIPS 2019.
    """
    shared = (b1, b2, eps_root, initial_accumulator_value, bias_correction)
    return _at_rate(learning_rate, scale_by_zo_adamm(*shared, mu_dtype, amsgrad))


@cached_constructor
def zo_rmsprop(
    learning_rate: optax.ScalarOrSchedule,
    b2: jax.typing.ArrayLike = 0.99,
    eps_root: jax.typing.ArrayLike = 1e-8,
    initial_accumulator_value: jax.typing.ArrayLike = 0.0,
    bias_correction: bool = False,
) -> GradientTransformationExtraArgs:
    """RMSProp for zeroth-order gradients: no first moment.

    The step is −η g_t/√(v_t + ζ) with v_t ← β₂ v_{t−1} + (1−β₂) g_t²:
    `optax.scale_by_rms` with the second moment kept in float32 for parameters of lower
    precision.

    Args:
      learning_rate: The step size η, a scalar ≥ 0 or a schedule.
      b2: Decay rate β₂ of the second moment, in [0, 1).
      eps_root: The constant ζ ≥ 0, inside the root, in units of the
        squared gradient. With 0, a coordinate whose gradients were all zero is NaN.
      initial_accumulator_value: v₀ ≥ 0, the same for all coordinates.
      bias_correction: Whether to debias the second moment, which makes the first step
        η per coordinate instead of η/√(1−β₂).

    Returns:
      The optimizer, an `optax.GradientTransformationExtraArgs`.

    Raises:
      ValueError: If a hyperparameter is out of its range.
      TypeError: If one has the wrong type.

    Examples:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import optax
      >>> import radazo_jax as zo
      >>> def f(x):
      ...     return jnp.sum(x**2)
      >>> optimizer = zo.zo_rmsprop(learning_rate=0.01)
      >>> params = jnp.array([1.0, 2.0, 3.0])
      >>> state = optimizer.init(params)
      >>> for _ in range(5):
      ...     updates, state = optimizer.update(jax.grad(f)(params), state)
      ...     params = optax.apply_updates(params, updates)
      ...     print(f"{f(params):.2f}")
      12.83
      12.06
      11.45
      10.95
      10.52

    References:
      Hinton, Neural Networks for Machine Learning, lecture 6e, 2012.
    """
    start = initial_accumulator_value
    Hyperparameters(0.0, b2, eps_root, start, bias_correction).check()
    scaled = optax.scale_by_rms(b2, eps_root, start, bias_correction=bias_correction)
    return _at_rate(learning_rate, with_float32_moments(scaled))


@cached_constructor
def zo_sgd(
    learning_rate: optax.ScalarOrSchedule,
    momentum: jax.typing.ArrayLike | None = None,
    nesterov: bool = False,
) -> GradientTransformationExtraArgs:
    """Stochastic gradient descent for zeroth-order gradients.

    The step is −η g_t, as in `optax.sgd`, with the momentum kept in float32 for
    parameters of lower precision. Without momentum the state does not grow with the
    parameters.

    Args:
      learning_rate: The step size η, a scalar ≥ 0 or a schedule.
      momentum: Decay rate of the momentum, in [0, 1), or None for no momentum.
      nesterov: Whether to use Nesterov momentum.

    Returns:
      The optimizer, an `optax.GradientTransformationExtraArgs`.

    Raises:
      ValueError: If a hyperparameter is out of its range.
      TypeError: If one is not a real number.

    Examples:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import optax
      >>> import radazo_jax as zo
      >>> def f(x):
      ...     return jnp.sum(x**2)
      >>> optimizer = zo.zo_sgd(learning_rate=0.1)
      >>> params = jnp.array([1.0, 2.0, 3.0])
      >>> state = optimizer.init(params)
      >>> for _ in range(3):
      ...     updates, state = optimizer.update(jax.grad(f)(params), state)
      ...     params = optax.apply_updates(params, updates)
      ...     print(f"{f(params):.2f}")
      8.96
      5.73
      3.67

    References:
      Ghadimi and Lan, Stochastic First- and Zeroth-Order Methods for Nonconvex
      Stochastic Programming, SIAM J. Optim. 2013.
    """
    checks.check_learning_rate(learning_rate)
    if momentum is None:
        return optax.with_extra_args_support(optax.sgd(learning_rate))
    checks.check_unit_interval("momentum", momentum)
    return _at_rate(
        learning_rate, with_float32_moments(optax.trace(momentum, nesterov))
    )


@cached_constructor
def zo_signsgd(
    learning_rate: optax.ScalarOrSchedule,
) -> GradientTransformationExtraArgs:
    """Descent along the signs of zeroth-order gradients.

    The step is −η sign(g_t). This is `optax.sign_sgd` under its name in the
    zeroth-order literature.

    Args:
      learning_rate: The step size η, a scalar ≥ 0 or a schedule.

    Returns:
      The optimizer, an `optax.GradientTransformationExtraArgs`.

    Raises:
      ValueError: If the learning rate is negative or not finite.
      TypeError: If it is neither a real number nor a function.

    Examples:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import optax
      >>> import radazo_jax as zo
      >>> def f(x):
      ...     return jnp.sum(x**2)
      >>> optimizer = zo.zo_signsgd(learning_rate=0.1)
      >>> params = jnp.array([1.0, 2.0, 3.0])
      >>> state = optimizer.init(params)
      >>> for _ in range(3):
      ...     updates, state = optimizer.update(jax.grad(f)(params), state)
      ...     params = optax.apply_updates(params, updates)
      ...     print(f"{f(params):.2f}")
      12.83
      11.72
      10.67

    References:
      Liu et al., signSGD via Zeroth-Order Oracle, ICLR 2019.
    """
    checks.check_learning_rate(learning_rate)
    return optax.with_extra_args_support(optax.sign_sgd(learning_rate))


def _at_rate(
    learning_rate: optax.ScalarOrSchedule,
    inner: optax.GradientTransformation,
    chain: Callable[..., GradientTransformationExtraArgs] = optax.chain,
) -> GradientTransformationExtraArgs:
    """Chains a transformation and the learning rate."""
    checks.check_learning_rate(learning_rate)
    return chain(inner, optax.scale_by_learning_rate(learning_rate))
