"""Covariance matrix adaptation: what a population of points teaches.

Everything is a vector of all d parameters, or a matrix of such vectors.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from radazo_jax._src import trees

# Up to so many parameters, the whole covariance matrix is learned; beyond, its
# diagonal.
MOST_FULL = 200

# The shares of the first standard deviation below and above which a run has ended, and
# the least share in which the step size can be computed with.
_SMALLEST, _LARGEST, _LEAST = 1e-12, 1e12, 1e-20

# The largest condition number of the covariance, and the least of its eigenvalues.
_LARGEST_CONDITION, _LEAST_VARIANCE = 1e14, 1e-20

# If no point has a value, the next points lie closer to θ.
_CLOSER = 0.5

_EXACT = lax.Precision.HIGHEST


class CmaState(NamedTuple):
    """State of `cma`.

    d is the number of parameters. Points are θ + σ S B D z with normal z. Arrays are
    float32, or float64 if the parameters are.

    Attributes:
      step_size: σ: shape ().
      first_step_size: σ of the first step: shape ().
      scale: The diagonal of S, the unit of each parameter, constant: [d].
      covariance: C, the covariance of B D z: [d, d], or its diagonal, [d], for more
        than 200 parameters.
      basis: B, the eigenvectors of C, its columns: [d, d]; `None` if C is diagonal.
      deviations: The diagonal of D, the square roots of the eigenvalues of C: [d].
      step_path: p_σ, the path from which σ is learned: [d].
      covariance_path: p_c, the path from which C is learned: [d].
      normals: z of the latest points: [λ, d].
      generation: Number of steps with a finite value: int32, shape ().
      lower: The lower bounds, NaN before the first step: [d].
      upper: The upper bounds, likewise.
      level: The least value of a step, from which the least values of later steps
        differ by rounding alone; NaN before the first value: shape ().
      unchanged: Number of such later steps: int32, shape ().
      exhausted: Whether further steps would teach nothing: bool, shape ().
    """

    step_size: jax.Array
    first_step_size: jax.Array
    scale: jax.Array
    covariance: jax.Array
    basis: jax.Array | None
    deviations: jax.Array
    step_path: jax.Array
    covariance_path: jax.Array
    normals: jax.Array
    generation: jax.Array
    lower: jax.Array
    upper: jax.Array
    level: jax.Array
    unchanged: jax.Array
    exhausted: jax.Array


class Constants(NamedTuple):
    """The constants of a population, in the names of Hansen's tutorial, table 1.

    Attributes:
      weights: wᵢ, the best first; the weights of the better half are positive, with a
        sum of 1: float64, [λ].
      c_step: c_σ, the learning rate of p_σ.
      damping: d_σ, the damping of σ.
      c_path: c_c, the learning rate of p_c.
      c_one: c₁, the learning rate of C from p_c.
      c_rank: c_μ, the learning rate of C from the population.
      length: The mean length of a normal vector.
      gap: Number of steps from one eigendecomposition to the next.
      patience: Number of steps without a change after which a run has ended.
    """

    weights: np.ndarray
    c_step: float
    damping: float
    c_path: float
    c_one: float
    c_rank: float
    length: float
    gap: int
    patience: int


@functools.lru_cache(maxsize=64)
def constants_of(d: int, size: int) -> Constants:
    """The constants of a population of this size for d parameters."""
    raw = math.log((size + 1) / 2) - np.log(np.arange(1, size + 1))
    better, worse = raw[: size // 2], raw[size // 2 :]
    mass, mass_of_worse = (
        float(np.sum(x) ** 2 / np.sum(x**2)) for x in (better, worse)
    )
    # A diagonal has fewer numbers to learn than a matrix.
    faster = 1 if d <= MOST_FULL else (d + 2) / 3
    c_one = faster * 2 / ((d + 1.3) ** 2 + mass)
    c_rank = faster * 2 * (0.25 + mass - 2 + 1 / mass) / ((d + 2) ** 2 + mass)
    c_rank = min(1 - c_one, c_rank)
    # So much that C neither shrinks nor grows, is learned no faster than its mass
    # allows, and stays positive definite.
    most = min(
        1 + c_one / c_rank,
        1 + 2 * mass_of_worse / (mass + 2),
        (1 - c_one - c_rank) / (d * c_rank),
    )
    c_step = (mass + 2) / (d + mass + 5)
    return Constants(
        np.concatenate([better / np.sum(better), most * worse / np.sum(abs(worse))]),
        c_step,
        damping=1 + 2 * max(0, math.sqrt((mass - 1) / (d + 1)) - 1) + c_step,
        c_path=(4 + mass / d) / (d + 4 + 2 * mass / d),
        c_one=c_one,
        c_rank=c_rank,
        length=math.sqrt(d) * (1 - 1 / (4 * d) + 1 / (21 * d**2)),
        gap=max(1, int(1 / (10 * d * (c_one + c_rank)))),
        patience=10 + math.ceil(30 * d / size),
    )


class Population(NamedTuple):
    """The population of a step, the best first, and its mean.

    Attributes:
      z: The normal vectors of the members: [λ, d].
      y: B D z: [λ, d].
      values: Their values, infinite if they failed: [λ].
      parents: The weights of the members whose mean is the next θ, with a sum of 1,
        or 0 if all have failed: [λ].
      mean_z: The weighted mean of z: [d].
      mean_y: The weighted mean of y: [d].
    """

    z: jax.Array
    y: jax.Array
    values: jax.Array
    parents: jax.Array
    mean_z: jax.Array
    mean_y: jax.Array

    @classmethod
    def of(
        cls, constants: Constants, values: jax.Array, state: CmaState
    ) -> "Population":
        """The population of these values, [λ], which are not ranked yet."""
        ranked = jnp.where(jnp.isfinite(values), values, jnp.inf)
        order = jnp.argsort(ranked, stable=True)
        ranked, z = ranked[order], state.normals[order]
        weights = jnp.asarray(np.maximum(constants.weights, 0), z.dtype)
        weights = jnp.where(jnp.isfinite(ranked), weights, 0)
        total = jnp.sum(weights)
        parents = weights / jnp.where(total > 0, total, 1)
        y = colored(state, z)
        return cls(z, y, ranked, parents, product(parents, z), product(parents, y))

    @property
    def finite(self) -> jax.Array:
        """Which members have a value: bool, [λ]."""
        return jnp.isfinite(self.values)


def product(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.matmul(a, b, precision=_EXACT)


def colored(state: CmaState, z: jax.Array) -> jax.Array:
    """B D z of the rows z."""
    scaled = z * state.deviations[None]
    return scaled if state.basis is None else product(scaled, state.basis.T)


def whitened(state: CmaState, y: jax.Array) -> jax.Array:
    """D⁻¹ Bᵀ y of the rows y."""
    rotated = y if state.basis is None else product(y, state.basis)
    return rotated / state.deviations[None]


def learned(constants: Constants, found: Population, state: CmaState) -> CmaState:
    """The state after a step, but for `exhausted`."""
    closer = state._replace(step_size=_CLOSER * state.step_size)
    adapted = _adapted(constants, found, state)
    after = optax.tree.where(jnp.any(found.finite), adapted, closer)
    first = state.first_step_size
    step_size = jnp.clip(after.step_size, _LEAST * first, _LARGEST * first)
    return after._replace(step_size=step_size)


def _adapted(constants: Constants, found: Population, state: CmaState) -> CmaState:
    """The state after a step with a finite value, but for `exhausted`."""
    generation = optax.safe_increment(state.generation)
    mass, rotated = 1 / jnp.sum(found.parents**2), found.mean_z
    if state.basis is not None:
        rotated = product(state.basis, rotated)
    c_step, c_path = constants.c_step, constants.c_path
    step_path = (1 - c_step) * state.step_path
    step_path += jnp.sqrt(c_step * (2 - c_step) * mass) * rotated
    length = jnp.sqrt(jnp.sum(step_path**2))
    # While σ grows fast, C must not.
    begins = 1 - (1 - c_step) ** (2 * generation.astype(length.dtype))
    longest = (1.4 + 2 / (len(step_path) + 1)) * constants.length
    steady = (length < longest * jnp.sqrt(begins)).astype(length.dtype)
    path = (1 - c_path) * state.covariance_path
    path += steady * jnp.sqrt(c_path * (2 - c_path) * mass) * found.mean_y
    rate = constants.c_step / constants.damping * (length / constants.length - 1)
    rate = jnp.minimum(rate, 1) + _flatness(constants, found)
    level, unchanged = _followed(found, state)
    after = state._replace(
        step_size=state.step_size * jnp.exp(rate),
        covariance=_covariance(constants, found, state.covariance, path, steady),
        step_path=step_path,
        covariance_path=path,
        generation=generation,
        level=level,
        unchanged=unchanged,
    )
    if state.basis is None:
        return _floored(after, after.covariance, None)

    def decomposed(after: CmaState) -> CmaState:
        return _floored(after, *jnp.linalg.eigh(after.covariance))

    due = generation % constants.gap == 0
    return lax.cond(due, decomposed, lambda after: after, after)


def _flatness(constants: Constants, found: Population) -> jax.Array:
    """The growth of log σ because the better values are equal: shape ()."""
    size = len(found.values)
    last = found.values[min(size // 2, 1 + size // 4)]
    growth = 0.2 + constants.c_step / constants.damping
    return jnp.where(found.values[0] == last, growth, 0).astype(found.z.dtype)


def _covariance(
    constants: Constants,
    found: Population,
    before: jax.Array,
    path: jax.Array,
    steady: jax.Array,
) -> jax.Array:
    """C, or its diagonal, after a step."""
    c_one, c_rank, c_path = constants.c_one, constants.c_rank, constants.c_path
    dtype = before.dtype
    negative = jnp.asarray(np.minimum(constants.weights, 0), dtype)
    lengths = jnp.sum(found.z**2, 1)
    each = len(path) / jnp.maximum(lengths, jnp.finfo(dtype).tiny)
    # The length of a bad step teaches nothing.
    each = found.parents + negative * jnp.where(lengths > 0, each, 0)
    total = jnp.sum(found.parents) + jnp.sum(negative)
    kept = 1 - c_one - c_rank * total + c_one * (1 - steady) * c_path * (2 - c_path)
    if before.ndim == 1:
        of_population = product(each, found.y**2)
        return kept * before + c_one * path**2 + c_rank * of_population
    of_population = product(found.y.T * each[None], found.y)
    after = kept * before + c_one * jnp.outer(path, path) + c_rank * of_population
    return (after + after.T) / 2


def _floored(
    after: CmaState, variances: jax.Array, basis: jax.Array | None
) -> CmaState:
    """The state with these eigenvalues and eigenvectors, of a bounded condition."""
    least = jnp.max(variances) / _largest_condition(variances.dtype, basis is not None)
    least = jnp.maximum(least, _LEAST_VARIANCE)
    floored = jnp.maximum(variances, least)
    covariance = floored
    if basis is not None:
        made = product(basis * floored[None], basis.T)
        covariance = jnp.where(jnp.any(variances < least), made, after.covariance)
    return after._replace(
        covariance=covariance, basis=basis, deviations=jnp.sqrt(floored)
    )


def _largest_condition(dtype: Any, is_full: bool) -> float:
    """The condition number beyond which eigenvalues are errors of rounding."""
    rounding = 1 / float(jnp.finfo(dtype).eps) if is_full else math.inf
    return min(_LARGEST_CONDITION, rounding)


def _followed(found: Population, state: CmaState) -> tuple[jax.Array, jax.Array]:
    """The level of the least values, and the number of steps at it."""
    least, level = found.values[0].astype(state.level.dtype), state.level
    largest = jnp.maximum(abs(least), abs(level))
    same = abs(least - level) <= trees.rounding(found.values) * largest
    unchanged = jnp.where(same, optax.safe_increment(state.unchanged), 0)
    return jnp.where(same, level, least), unchanged


def is_exhausted(constants: Constants, at: jax.Array, after: CmaState) -> jax.Array:
    """Whether a strategy at θ has nothing more to learn: bool, shape ()."""
    variances = after.covariance
    if after.basis is not None:
        variances = jnp.diagonal(variances)
    deviations = after.step_size * after.scale * jnp.sqrt(variances)
    first = after.first_step_size * after.scale
    resolution = jnp.finfo(at.dtype).eps * abs(at)
    small = jnp.all(deviations <= jnp.maximum(_SMALLEST * first, resolution))
    large = ~jnp.all(deviations < _LARGEST * first)
    flat = after.unchanged >= constants.patience
    most = _largest_condition(variances.dtype, after.basis is not None)
    # The floor of the eigenvalues has this condition, up to rounding.
    condition = jnp.max(after.deviations) / jnp.min(after.deviations)
    singular = condition >= 0.999 * math.sqrt(most)
    return small | large | flat | singular
