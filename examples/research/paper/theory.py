"""The quantities of the paper's analysis, with the numbers of their equations.

Python numbers in, Python numbers out, in double precision: nothing here is traced.
Theorems and equations are numbered as the paper's source numbers them.

Examples:
  >>> from paper import theory
  >>> variance = theory.first_moment_variance(b1=0.9, gradient_variance=1.0)
  >>> round(variance, 4), round(theory.step_ratio(0.9), 2)
  (0.0526, 4.36)
"""

import math
from typing import Any

from common import checks

__all__ = [
    "convergence_constant_radazo",
    "convergence_constant_zo_adamm",
    "first_moment_squared_bias",
    "first_moment_variance",
    "gradient_variance_bound",
    "predicted_speedup",
    "second_moment_bound_radazo",
    "second_moment_bound_zo_adamm",
    "smoothing_bias_bound",
    "step_ratio",
]


def gradient_variance_bound(
    *,
    noise_std: float,
    value_bound: float,
    dimension: int,
    num_directions: int,
    smoothing: float,
) -> float:
    """Σ², the bound on the variance of one coordinate of the gradient estimate.

        Σ² = 8 (σ² + C²) d / (K μ²)

    It bounds E|∇̂ᵢf − ∇ᵢF_μ|² of the forward difference with sphere directions. It
    holds for any function bounded by C, and is far above the variance for a smooth
    function: it does not shrink with the differences f(θ + μu) − f(θ).

    Args:
      noise_std: σ ≥ 0 with E|f(θ; ξ) − F(θ)|² ≤ σ², in units of the loss.
      value_bound: C ≥ 0 with |f(θ; ξ)| ≤ C, in units of the loss.
      dimension: d, the number of coordinates.
      num_directions: K, the number of directions per estimate.
      smoothing: μ > 0, in units of the parameters.

    Returns:
      Σ², in units of the squared gradient.

    Raises:
      ValueError: If an argument is out of range.

    Examples:
      >>> from paper import theory
      >>> theory.gradient_variance_bound(
      ...     noise_std=0.0,
      ...     value_bound=1.0,
      ...     dimension=100,
      ...     num_directions=10,
      ...     smoothing=1.0,
      ... )
      80.0

    References:
      Shu et al., Refining Adaptive Zeroth-Order Optimization at Ease, ICML 2025,
      eq. (16), and as a bound in lemma 5.2, eq. (15).
    """
    checks.non_negative(noise_std=noise_std, value_bound=value_bound)
    checks.count(dimension=dimension, num_directions=num_directions)
    checks.positive(smoothing=smoothing)
    power = noise_std**2 + value_bound**2
    return 8 * power * dimension / (num_directions * smoothing**2)


def smoothing_bias_bound(
    *, smoothing: float, smoothness: float, dimension: int
) -> float:
    """The bound μ L √d on ‖∇F − ∇F_μ‖: how far smoothing moves the gradient.

    Args:
      smoothing: μ > 0, in units of the parameters.
      smoothness: L ≥ 0 with |∇ᵢF(θ) − ∇ᵢF(θ')| ≤ L ‖θ − θ'‖ for every coordinate i.
      dimension: d, the number of coordinates.

    Returns:
      The bound, in units of the gradient.

    Raises:
      ValueError: If an argument is out of range.

    Examples:
      >>> from paper import theory
      >>> theory.smoothing_bias_bound(smoothing=0.5, smoothness=2.0, dimension=9)
      3.0

    References:
      Shu et al., Refining Adaptive Zeroth-Order Optimization at Ease, ICML 2025,
      lemma 5.1, eq. (13).
    """
    checks.positive(smoothing=smoothing)
    checks.non_negative(smoothness=smoothness)
    checks.count(dimension=dimension)
    return smoothing * smoothness * math.sqrt(dimension)


def first_moment_variance(
    *, b1: float, gradient_variance: float, step: int | None = None
) -> float:
    """The variance of m: the variance of g times (1 − β₁)/(1 + β₁).

    Given the variance of one coordinate of g_t rather than the bound Σ², and
    independent gradient estimates, as at fixed θ, this is the variance itself and not a
    bound. After t steps from m₀ = 0 it is smaller by the factor 1 − β₁²ᵗ.

    Args:
      b1: β₁ in [0, 1).
      gradient_variance: The variance of g, or Σ² of `gradient_variance_bound`.
      step: t ≥ 1; `None` is the limit of many steps, which the theorem states.

    Returns:
      The variance, in the units of `gradient_variance`.

    Raises:
      ValueError: If an argument is out of range.

    Examples:
      >>> from paper import theory
      >>> theory.first_moment_variance(b1=0.5, gradient_variance=3.0)
      1.0
      >>> theory.first_moment_variance(b1=0.5, gradient_variance=3.0, step=1)
      0.75

    References:
      Shu et al., Refining Adaptive Zeroth-Order Optimization at Ease, ICML 2025,
      theorem 5.3, eq. (17), "Variance"; its proof for the factor 1 − β₁²ᵗ.
    """
    checks.rate(b1=b1)
    checks.non_negative(gradient_variance=gradient_variance)
    if step is None:
        reached = 1.0
    else:
        checks.count(step=step)
        reached = 1 - b1 ** (2 * step)
    return (1 - b1) / (1 + b1) * reached * gradient_variance


def first_moment_squared_bias(
    *,
    b1: float,
    b2: float,
    learning_rate: float,
    smoothness: float,
    dimension: int,
    step: int,
    squared_gradient: float,
) -> float:
    """The bound on the squared bias of m: it lags θ, and it starts at zero.

        β₁ (1 + β₁) L² η² d / ((1 − β₁)² (1 − β₂)) + β₁ᵗ E|∇ᵢF_μ(θ_{t−1})|²

    Args:
      b1: β₁ in [0, 1).
      b2: β₂ in [0, 1).
      learning_rate: η ≥ 0.
      smoothness: L ≥ 0, as in `smoothing_bias_bound`.
      dimension: d, the number of coordinates.
      step: t ≥ 1.
      squared_gradient: E|∇ᵢF_μ(θ_{t−1})|² of the coordinate.

    Returns:
      The bound, in units of the squared gradient.

    Raises:
      ValueError: If an argument is out of range.

    Examples:
      >>> from paper import theory
      >>> theory.first_moment_squared_bias(
      ...     b1=0.5,
      ...     b2=0.75,
      ...     learning_rate=0.5,
      ...     smoothness=1.0,
      ...     dimension=4,
      ...     step=1,
      ...     squared_gradient=2.0,
      ... )
      13.0

    References:
      Shu et al., Refining Adaptive Zeroth-Order Optimization at Ease, ICML 2025,
      theorem 5.3, eq. (17), "Squared Bias".
    """
    behind = _lag(b1, b2, learning_rate, smoothness, dimension)
    checks.non_negative(squared_gradient=squared_gradient)
    checks.count(step=step)
    return (1 + b1) * behind + b1**step * squared_gradient


def _lag(b1: Any, b2: Any, learning_rate: Any, smoothness: Any, dimension: Any) -> Any:
    """β₁ L² η² d / ((1 − β₁)² (1 − β₂)), common to all bounds on the bias."""
    checks.rate(b1=b1, b2=b2)
    checks.non_negative(learning_rate=learning_rate, smoothness=smoothness)
    checks.count(dimension=dimension)
    moved = smoothness**2 * learning_rate**2 * dimension
    return b1 * moved / ((1 - b1) ** 2 * (1 - b2))


def second_moment_bound_radazo(
    *,
    b1: float,
    b2: float,
    learning_rate: float,
    smoothness: float,
    dimension: int,
    gradient_variance: float,
    step: int,
    average_squared_gradient: float,
    initial_accumulator_value: float = 0.0,
) -> float:
    """The bound on E[v] of R-AdaZO, whose v averages m².

        β₂ᵗ v₀ + (1 − β₁) Σ² + β₁ (1 + β₁)² L² η² d / ((1 − β₁)² (1 − β₂))
            + (1 + β₁)²/β₁ · Σ_τ (1 − β₂) β₂^{t−τ} E|∇ᵢF_μ(θ_{τ−1})|²

    Args:
      b1: β₁ in (0, 1).
      b2: β₂ in [0, 1).
      learning_rate: η ≥ 0.
      smoothness: L ≥ 0, as in `smoothing_bias_bound`.
      dimension: d, the number of coordinates.
      gradient_variance: Σ² of `gradient_variance_bound`, or the variance of g itself.
      step: t ≥ 1.
      average_squared_gradient: Σ_τ (1 − β₂) β₂^{t−τ} E|∇ᵢF_μ(θ_{τ−1})|², what v would
        be without noise, from v₀ = 0, eq. (18).
      initial_accumulator_value: v₀ ≥ 0 of the coordinate.

    Returns:
      The bound, in units of the squared gradient.

    Raises:
      ValueError: If an argument is out of range.

    Examples:
      >>> from paper import theory
      >>> theory.second_moment_bound_radazo(
      ...     b1=0.5,
      ...     b2=0.75,
      ...     learning_rate=0.5,
      ...     smoothness=1.0,
      ...     dimension=4,
      ...     gradient_variance=2.0,
      ...     step=1,
      ...     average_squared_gradient=2.0,
      ...     initial_accumulator_value=4.0,
      ... )
      31.0

    References:
      Shu et al., Refining Adaptive Zeroth-Order Optimization at Ease, ICML 2025,
      theorem 5.4, eq. (19).
    """
    behind = _lag(b1, b2, learning_rate, smoothness, dimension)
    rest = _common(b1, b2, step, average_squared_gradient, initial_accumulator_value)
    checks.non_negative(gradient_variance=gradient_variance)
    return (1 - b1) * gradient_variance + (1 + b1) ** 2 * behind + rest


def second_moment_bound_zo_adamm(
    *,
    b1: float,
    b2: float,
    gradient_variance: float,
    step: int,
    average_squared_gradient: float,
    initial_accumulator_value: float = 0.0,
) -> float:
    """The bound on E[v] of ZO-AdaMM, whose v averages g².

        β₂ᵗ v₀ + (1 + β₁) Σ² + (1 + β₁)²/β₁ · Σ_τ (1 − β₂) β₂^{t−τ} E|∇ᵢF_μ(θ_{τ−1})|²

    This v does not depend on β₁. The bound does, so that it compares with R-AdaZO's
    bound. At fixed θ the variance of g enters E[v] of R-AdaZO with (1 − β₁)/(1 + β₁)
    of the weight that it has here; this holds for E[v] itself, not only for the bounds.

    Args:
      b1: β₁ in (0, 1).
      b2: β₂ in [0, 1).
      gradient_variance: As in `second_moment_bound_radazo`.
      step: t ≥ 1.
      average_squared_gradient: As in `second_moment_bound_radazo`.
      initial_accumulator_value: v₀ ≥ 0 of the coordinate.

    Returns:
      The bound, in units of the squared gradient.

    Raises:
      ValueError: If an argument is out of range.

    Examples:
      >>> from paper import theory
      >>> theory.second_moment_bound_zo_adamm(
      ...     b1=0.5,
      ...     b2=0.75,
      ...     gradient_variance=2.0,
      ...     step=1,
      ...     average_squared_gradient=2.0,
      ...     initial_accumulator_value=4.0,
      ... )
      15.0

    References:
      Shu et al., Refining Adaptive Zeroth-Order Optimization at Ease, ICML 2025,
      corollary 5.5, eq. (20).
    """
    rest = _common(b1, b2, step, average_squared_gradient, initial_accumulator_value)
    checks.non_negative(gradient_variance=gradient_variance)
    return (1 + b1) * gradient_variance + rest


def convergence_constant_radazo(
    *,
    b1: float,
    b2: float,
    learning_rate: float,
    smoothness: float,
    dimension: int,
    gradient_variance: float,
    initial_norm: float = 0.0,
) -> float:
    """V of R-AdaZO: its average gradient norm is bounded by about √(V d) ε.

        V² = ‖v₀‖ + (1 − β₁) Σ² + β₁ (1 + β₁)² L² η² d / ((1 − β₁)² (1 − β₂))

    Args:
      b1: β₁ in [0, 1).
      b2: β₂ in [0, 1).
      learning_rate: η ≥ 0.
      smoothness: L ≥ 0, as in `smoothing_bias_bound`.
      dimension: d, the number of coordinates.
      gradient_variance: Σ² of `gradient_variance_bound`.
      initial_norm: ‖v₀‖ ≥ 0.

    Returns:
      V, not its square, in units of the gradient.

    Raises:
      ValueError: If an argument is out of range.

    Examples:
      >>> from paper import theory
      >>> theory.convergence_constant_radazo(
      ...     b1=0.5,
      ...     b2=0.75,
      ...     learning_rate=0.5,
      ...     smoothness=1.0,
      ...     dimension=4,
      ...     gradient_variance=8.0,
      ...     initial_norm=3.0,
      ... )
      5.0

    References:
      Shu et al., Refining Adaptive Zeroth-Order Optimization at Ease, ICML 2025,
      eq. (22) and theorem 5.9.
    """
    behind = _lag(b1, b2, learning_rate, smoothness, dimension)
    checks.non_negative(gradient_variance=gradient_variance, initial_norm=initial_norm)
    square = initial_norm + (1 - b1) * gradient_variance + (1 + b1) ** 2 * behind
    return math.sqrt(square)


def convergence_constant_zo_adamm(
    *, b1: float, gradient_variance: float, initial_norm: float = 0.0
) -> float:
    """V̂ of ZO-AdaMM, the counterpart of V of R-AdaZO.

        V̂² = ‖v₀‖ + (1 + β₁) Σ²

    Args:
      b1: β₁ in [0, 1).
      gradient_variance: Σ² of `gradient_variance_bound`.
      initial_norm: ‖v₀‖ ≥ 0.

    Returns:
      V̂, not its square, in units of the gradient.

    Raises:
      ValueError: If an argument is out of range.

    Examples:
      >>> from paper import theory
      >>> theory.convergence_constant_zo_adamm(
      ...     b1=0.5, gradient_variance=8.0, initial_norm=4.0
      ... )
      4.0

    References:
      Shu et al., Refining Adaptive Zeroth-Order Optimization at Ease, ICML 2025,
      theorem 5.10.
    """
    checks.rate(b1=b1)
    checks.non_negative(gradient_variance=gradient_variance, initial_norm=initial_norm)
    return math.sqrt(initial_norm + (1 + b1) * gradient_variance)


def predicted_speedup(b1: float) -> float:
    """The paper's speedup over ZO-AdaMM, ((1 + β₁)/(1 − β₁))^¼, if Σ² dominates.

    It is the ratio of √V̂ to √V, of two upper bounds on the average gradient norm: how
    much smaller the bound is, not how many times fewer steps are taken. At equal
    learning rates the steps differ by more, by `step_ratio`.

    Args:
      b1: β₁ in [0, 1).

    Returns:
      The ratio.

    Raises:
      ValueError: If `b1` is not in [0, 1).

    Examples:
      >>> from paper import theory
      >>> round(theory.predicted_speedup(0.9), 3)
      2.088

    References:
      Shu et al., Refining Adaptive Zeroth-Order Optimization at Ease, ICML 2025,
      remark after theorem 5.10.
    """
    return math.sqrt(step_ratio(b1))


def step_ratio(b1: float) -> float:
    """The ratio of step lengths, R-AdaZO to ZO-AdaMM: √((1 + β₁)/(1 − β₁)).

    At the same learning rate, m and β₂ the two methods divide m by √v. If the noise of
    g dominates v, R-AdaZO's v is smaller by (1 − β₁)/(1 + β₁). So ZO-AdaMM at
    a learning rate this many times higher takes steps of the same length.

    Args:
      b1: β₁ in [0, 1).

    Returns:
      The ratio.

    Raises:
      ValueError: If `b1` is not in [0, 1).

    Examples:
      >>> from paper import theory
      >>> round(theory.step_ratio(0.9), 3)
      4.359

    References:
      Shu et al., Refining Adaptive Zeroth-Order Optimization at Ease, ICML 2025,
      eqs. (17), (19) and (20): the factors of Σ².
    """
    checks.rate(b1=b1)
    return math.sqrt((1 + b1) / (1 - b1))


def _common(b1: Any, b2: Any, step: Any, squared: Any, initial: Any) -> Any:
    """The common terms of the bounds of both methods on E[v]."""
    checks.rate(b1=b1)
    checks.positive(b1=b1)
    checks.rate(b2=b2)
    checks.non_negative(
        average_squared_gradient=squared, initial_accumulator_value=initial
    )
    checks.count(step=step)
    return b2**step * initial + (1 + b1) ** 2 / b1 * squared
