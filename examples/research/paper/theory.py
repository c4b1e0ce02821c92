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

__all__ = ["first_moment_variance", "predicted_speedup", "step_ratio"]


def first_moment_variance(
    *, b1: float, gradient_variance: float, step: int | None = None
) -> float:
    """The variance of m: the variance of g times (1 − β₁)/(1 + β₁).

    Given the variance of one coordinate of g_t rather than the bound Σ², and
    independent gradient estimates, as at fixed θ, this is the variance itself and not a
    bound. After t steps from m₀ = 0 it is smaller by the factor 1 − β₁²ᵗ.

    Args:
      b1: β₁ in [0, 1).
      gradient_variance: The variance of g, or a bound on it.
      step: t ≥ 1; `None` is the limit of many steps, which the theorem states.

    Returns:
      The variance, in the units of `gradient_variance`.

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
    reached = 1.0 if step is None else 1 - b1 ** (2 * step)
    return (1 - b1) / (1 + b1) * reached * gradient_variance


def predicted_speedup(b1: float) -> float:
    """The paper's speedup over ZO-AdaMM, ((1 + β₁)/(1 − β₁))^¼, if Σ² dominates.

    It is the ratio of √V̂ to √V, of two upper bounds on the average gradient norm: how
    much smaller the bound is, not how many times fewer steps are taken. At equal
    learning rates the steps differ by more, by `step_ratio`.

    Args:
      b1: β₁ in [0, 1).

    Returns:
      The ratio.

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

    Examples:
      >>> from paper import theory
      >>> round(theory.step_ratio(0.9), 3)
      4.359

    References:
      Shu et al., Refining Adaptive Zeroth-Order Optimization at Ease, ICML 2025,
      eqs. (17), (19) and (20): the factors of Σ².
    """
    return math.sqrt((1 + b1) / (1 - b1))
