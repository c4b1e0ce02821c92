"""Weights of the members of a population, from their values.

A shaping is a pure function from values, [n] or [n, G], to weights of the same shape:
n members, and G values for each, such as a loss for each prompt. Values are losses, so
that a weight rises with its value. A value that is not finite gets the weight zero.
"""

import dataclasses
from collections.abc import Callable
from typing import ClassVar

import jax
import jax.numpy as jnp

from radazo_jax._src.base import checks
from radazo_jax._src.base.configuration import Configuration

Shaping = Callable[[jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True, repr=False)
class ZScore(Configuration):
    """See `z_score`."""

    _constructor = "z_score"

    # The axis of the values that have one mean; `None` for all values.
    _axis: ClassVar[int | None] = None

    eps: float
    eps_root: float

    def __call__(self, values: jax.Array) -> jax.Array:
        _check_members(values)
        count = jnp.sum(jnp.isfinite(values), dtype=jnp.int32).astype(values.dtype)
        variance = jnp.sum(_deviations(values, None) ** 2) / jnp.maximum(count, 1)
        scale = jnp.sqrt(variance + self.eps_root) + self.eps
        return _deviations(values, self._axis) / jnp.where(scale > 0, scale, 1)


@checks.checks_names
def z_score(eps: float = 0.0, eps_root: float = 1e-5) -> Shaping:
    """Subtracts the mean of all values, and divides by their standard deviation.

        w = (f − mean f) / (√(var f + eps_root) + eps)

    Use it by default. The estimate does not depend on the unit of the values, and its
    length does not fall as their differences do: the learning rate needs a schedule.

    Args:
      eps: A number ≥ 0, added to the standard deviation.
      eps_root: A number ≥ 0, added to the variance.

    Returns:
      The shaping.

    Raises:
      TypeError, ValueError: If an argument is not a number ≥ 0.

    Examples:
      >>> import jax.numpy as jnp
      >>> import radazo_jax as zo
      >>> shaping = zo.shaping.z_score(eps_root=0.0)
      >>> shaping(jnp.array([1.0, 3.0, jnp.nan])).tolist()
      [-1.0, 1.0, 0.0]

    References:
      Qiu et al., Evolution Strategies at Scale, 2025, algorithm 1, with `eps` 1e-8 and
      `eps_root` 0, <https://arxiv.org/abs/2509.24372>. Sarkar et al., Evolution
      Strategies at the Hyperscale, 2025, <https://arxiv.org/abs/2511.16652>.
    """
    return ZScore(
        checks.check_non_negative("eps", eps),
        checks.check_non_negative("eps_root", eps_root),
    )


class ByGroup(ZScore):
    """See `by_group`."""

    _constructor = "by_group"
    _axis = 0


@checks.checks_names
def by_group(eps: float = 0.0, eps_root: float = 1e-5) -> Shaping:
    """Subtracts the mean of each prompt, and divides by the deviation of all values.

        w[i, g] = (f[i, g] − meanᵢ f[i, g]) / (√(var f + eps_root) + eps)

    Use it if some prompts are harder than others: only members on the same prompt are
    compared. All values share one variance, around the mean of all.

    Args:
      eps: A number ≥ 0, added to the standard deviation.
      eps_root: A number ≥ 0, added to the variance.

    Returns:
      The shaping. Without an axis of prompts it is `z_score`.

    Raises:
      TypeError, ValueError: If an argument is not a number ≥ 0.

    Examples:
      >>> import jax.numpy as jnp
      >>> import radazo_jax as zo
      >>> losses = jnp.array([[0.0, 7.0], [1.0, 8.0]])
      >>> weights = zo.shaping.by_group()(losses)
      >>> bool(jnp.all(weights[:, 0] == weights[:, 1]))
      True

    References:
      Sarkar et al., Evolution Strategies at the Hyperscale, 2025,
      <https://arxiv.org/abs/2511.16652>.
    """
    return ByGroup(
        checks.check_non_negative("eps", eps),
        checks.check_non_negative("eps_root", eps_root),
    )


class CenteredRanks(Configuration):
    """See `centered_ranks`."""

    _constructor = "centered_ranks"

    def __call__(self, values: jax.Array) -> jax.Array:
        _check_members(values)

        def of_prompt(values: jax.Array) -> jax.Array:
            finite = jnp.isfinite(values)
            lower, equal = _lower_and_equal(values)
            most = jnp.sum(finite, dtype=jnp.int32).astype(values.dtype) - 1
            rank = lower + (equal - 1) / 2
            weights = rank / jnp.maximum(most, 1) - 0.5
            return jnp.where(finite & (most > 0), weights, 0)

        return _by_prompt(of_prompt, values)


@checks.checks_names
def centered_ranks() -> Shaping:
    """Replaces values by their ranks, from −1/2 for the lowest to 1/2 for the highest.

        w = rank / (n − 1) − 1/2

    Use it if values have outliers, or an arbitrary scale: no increasing map of the
    values changes the weights. Equal values share the mean of their ranks. Members are
    ranked prompt by prompt, among the n with a finite value.

    Returns:
      The shaping.

    Examples:
      >>> import jax.numpy as jnp
      >>> import radazo_jax as zo
      >>> zo.shaping.centered_ranks()(jnp.array([3.0, 1e9, 3.0, -5.0])).tolist()
      [0.0, 0.5, 0.0, -0.5]

    References:
      Salimans et al., Evolution Strategies as a Scalable Alternative to Reinforcement
      Learning, 2017, section 2, <https://arxiv.org/abs/1703.03864>.
    """
    return CenteredRanks()


@dataclasses.dataclass(frozen=True, repr=False)
class PairSigns(Configuration):
    """See `pair_signs`."""

    _constructor = "pair_signs"

    threshold: float

    def __call__(self, values: jax.Array) -> jax.Array:
        _check_members(values)
        if len(values) % 2:
            raise ValueError(
                "values must have an even number of members for pair_signs, which "
                f"compares pairs; got {len(values)}."
            )
        first, second = values[::2], values[1::2]
        difference = first - second
        known = jnp.isfinite(first) & jnp.isfinite(second)
        known &= jnp.abs(difference) > self.threshold
        signs = jnp.where(known, jnp.sign(difference), 0)
        return jnp.stack([signs, -signs], 1).reshape(values.shape)


@checks.checks_names
def pair_signs(threshold: float = 0.0) -> Shaping:
    """Compares the two members of each pair: 1 for the higher value, −1 for the lower.

    Members 2k and 2k + 1 are a pair: the points θ ± σ uₖ of an antithetic population.
    Use it if only comparisons can be trusted, or with updates of signs. Both weights
    are zero if the values differ by `threshold` or less, or one is not finite.

    Args:
      threshold: A number ≥ 0, in the unit of the values.

    Returns:
      The shaping, for an even number of members.

    Raises:
      TypeError, ValueError: If `threshold` is not a number ≥ 0; when called, if the
        number of members is odd.

    Examples:
      >>> import jax.numpy as jnp
      >>> import radazo_jax as zo
      >>> zo.shaping.pair_signs()(jnp.array([2.0, 5.0, 4.0, 3.0])).tolist()
      [-1.0, 1.0, 1.0, -1.0]
    """
    return PairSigns(checks.check_non_negative("threshold", threshold))


@dataclasses.dataclass(frozen=True, repr=False)
class BestOf(Configuration):
    """See `best_of`."""

    _constructor = "best_of"

    k: int

    def __call__(self, values: jax.Array) -> jax.Array:
        _check_members(values)
        if self.k > len(values):
            raise ValueError(
                f"k must be at most the number of members, {len(values)}; got {self.k}."
            )

        def of_prompt(values: jax.Array) -> jax.Array:
            finite = jnp.isfinite(values)
            lower, equal = _lower_and_equal(values)
            count = jnp.sum(finite, dtype=jnp.int32).astype(values.dtype)
            share = jnp.clip((self.k - lower) / jnp.maximum(equal, 1), 0, 1)
            weights = -share * count / jnp.clip(count, 1, self.k)
            return jnp.where(finite & (share > 0), weights, 0)

        return _by_prompt(of_prompt, values)


@checks.checks_names
def best_of(k: int) -> Shaping:
    """Keeps the k members with the lowest values: weight −n/k, zero for the others.

    Gradient descent with the rate σ²/c then moves θ to the mean of the k best members,
    the recombination of a (μ/μ, λ) evolution strategy; c is the factor of the
    distribution. Use it if the best members are much better than the mean. Members are
    chosen prompt by prompt, among the n with a finite value. Equal values at the k-th
    place share the weight that is left.

    Args:
      k: A positive integer, at most the number of members.

    Returns:
      The shaping.

    Raises:
      TypeError, ValueError: If `k` is not a positive integer; when called, if there
        are fewer members.

    Examples:
      >>> import jax.numpy as jnp
      >>> import radazo_jax as zo
      >>> zo.shaping.best_of(1)(jnp.array([4.0, 2.0, 7.0])).tolist()
      [0.0, -3.0, 0.0]

    References:
      Beyer & Schwefel, Evolution Strategies, Natural Computing 2002, section 3,
      <https://doi.org/10.1023/A:1015059928466>.
    """
    return BestOf(checks.check_int_at_least("k", k, 1))


def _check_members(values: jax.Array) -> None:
    if values.ndim not in (1, 2) or len(values) < 2:
        raise ValueError(
            "values must have the shape [members] or [members, prompts], with at least "
            f"two members to compare; got {values.shape}."
        )


def _deviations(values: jax.Array, axis: int | None) -> jax.Array:
    """Returns the differences to the mean of the finite values; 0 for the others."""
    finite = jnp.isfinite(values)
    count = jnp.sum(finite, axis, keepdims=True, dtype=jnp.int32)
    count = count.astype(values.dtype)
    total = jnp.sum(jnp.where(finite, values, 0), axis, keepdims=True)
    return jnp.where(finite, values - total / jnp.maximum(count, 1), 0)


def _lower_and_equal(values: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Counts, for each value of [n], the lower and the equal finite values."""
    # Those that are not finite come last, and are not read.
    known = jnp.where(jnp.isfinite(values), values, jnp.inf)
    ordered = jnp.sort(known)
    lower = jnp.searchsorted(ordered, known, side="left")
    no_higher = jnp.searchsorted(ordered, known, side="right")
    return lower.astype(values.dtype), (no_higher - lower).astype(values.dtype)


def _by_prompt(fun: Shaping, values: jax.Array) -> jax.Array:
    """Applies a function of the values of one prompt, [n], to each prompt."""
    if values.ndim == 1:
        return fun(values)
    return jax.vmap(fun, in_axes=1, out_axes=1)(values)
