"""Properties that hold for every program, and the bounds of their rounding.

The authority is `fun` itself, at leaves that are displaced densely: p + s · u with u
from `Distribution.materialize`. Both programs are run operation by operation.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np

import radazo_jax as zo
from common.distributions import DISTRIBUTIONS

from .evaluate import Rounding, evaluate

# For sums that are exact: leaves are multiples of 1/8, and directions are signs.
EXACT_SCALE = 0.25
# Leaves of fewer elements are perturbed before a program, not inside of it.
LARGE = 2**16 + 1


class Hashed(zo.Distribution):
    """Numbers that depend on key and position and cost nothing to compile."""

    def factor(self, dimension: int) -> float:
        return 1.0

    def draw(self, key: jax.Array, number: jax.Array, at: Any) -> jax.Array:
        word = (at.lo + jax.random.key_data(key)[1]) * np.uint32(2654435761)
        return (word >> np.uint32(8)).astype(jnp.float32) * np.float32(2**-23) - 1


class Flips(Hashed):
    """Signs that cost nothing to compile: p + s · u is exact in every dtype."""

    def draw(self, key: jax.Array, number: jax.Array, at: Any) -> jax.Array:
        drawn = super().draw(key, number, at)
        return jnp.where(drawn > 0, jnp.float32(1), jnp.float32(-1))


def stored(distribution: zo.Distribution) -> zo.Distribution:
    """The distribution with all elements of its directions stored, as in estimators."""

    class Stored(type(distribution)):
        def sample(self, key: jax.Array, params: Any) -> Any:
            draw = zo.estimators.Draw.once(key)
            points = zo.estimators.sample_points(distribution, draw, 1, [1.0], params)
            cached = zo.vectorized().cache(points).directions
            return jax.tree.map(lambda x: x[0], cached)

    fields = (field.name for field in dataclasses.fields(distribution))
    return Stored(**{name: getattr(distribution, name) for name in fields})


# What directions of other checks than the cheap ones are drawn from.
DIRECTIONS: dict[str, zo.Distribution] = DISTRIBUTIONS | {
    "coordinate in turn": zo.coordinate(replace=False),
    "orthonormal": zo.orthonormal(),
    "low_rank(2)": zo.low_rank(2),
}
EVERY = DIRECTIONS | {
    "hashed": Hashed(),
    "flips": Flips(),
    "flips stored": stored(Flips()),
    "rademacher stored": stored(zo.rademacher()),
    "sphere stored": stored(zo.sphere()),
}
# What a distribution of factors adds to a product is summed in another order.
FACTORS = ("low_rank", "low_rank(2)")


class Mismatch(AssertionError):
    """A perturbed program is not what its definition is."""


class Undefined(Exception):
    """`fun` itself cannot be run."""


def displaced(
    params: Any, key: jax.Array, distribution: zo.Distribution, scale: float
) -> Any:
    """p + s · u in float32 at least, rounded once."""
    direction = distribution.sample(key, params)
    wide = jax.tree.map(lambda p: p.astype(_wide(p.dtype)), params)
    u = distribution.materialize(direction, wide)
    return jax.tree.map(
        lambda p, x, u: (x + jnp.asarray(scale, x.dtype) * u).astype(p.dtype),
        *(params, wide, u),
    )


def _wide(dtype: Any) -> Any:
    return dtype if dtype.itemsize >= 4 else jnp.dtype("float32")


def perturbed(
    fun: Callable[[Any], Any], distribution: zo.Distribution, scale: float
) -> Any:
    def run(params: Any, key: jax.Array) -> Any:
        return zo.perturb(fun)(params, distribution.sample(key, params), scale)

    return run


@dataclasses.dataclass(frozen=True)
class OfLarge:
    """A function of leaves that are the first rows of large ones.

    Attributes:
      fun: A function of the leaves.
      shapes: Their shapes.
    """

    fun: Callable[[Any], Any]
    shapes: tuple[tuple[int, ...], ...]

    def __call__(self, params: Sequence[jax.Array]) -> Any:
        pairs = zip(params, self.shapes, strict=True)
        return self.fun(tuple(_first_rows(x, shape) for x, shape in pairs))


def _first_rows(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return x[: shape[0]] if shape else x[0]


def enlarged(
    fun: Callable[[Any], Any], params: Sequence[jax.Array]
) -> tuple[OfLarge, tuple[jax.Array, ...]]:
    """The function of large leaves, and the leaves, followed by rows of zeros."""
    return OfLarge(fun, tuple(x.shape for x in params)), tuple(map(_with_rows, params))


def _with_rows(x: jax.Array) -> jax.Array:
    rows = np.atleast_1d(np.asarray(x))
    width = max(1, int(np.prod(rows.shape[1:])))
    missing = max(0, -(-LARGE // width) - len(rows))
    return jnp.asarray(np.pad(rows, [(0, missing)] + [(0, 0)] * (rows.ndim - 1)))


def traced(fun: Callable[..., Any], *args: Any) -> Any:
    """The jaxpr of a function, which is traced once for all properties of it."""
    leaves, treedef = jax.tree.flatten(args)
    return _traced(fun, treedef, *(jax.typeof(x) for x in leaves))


@functools.lru_cache(maxsize=256)
def _traced(fun: Callable[..., Any], treedef: Any, *avals: Any) -> Any:
    specs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in avals]
    return jax.make_jaxpr(fun)(*jax.tree.unflatten(treedef, specs))


def step_by_step(fun: Callable[..., Any], *args: Any) -> list[Any]:
    return evaluate(traced(fun, *args), jax.tree.leaves(args))


# --- Properties -------------------------------------------------------------------


def bits(fun: Any, params: Any, distribution: str, scale: float) -> None:
    """The result is bitwise equal to the definition."""
    key = jax.random.key(1)
    expected, _ = _definition(fun, params, key, distribution, scale)
    got = step_by_step(perturbed(fun, EVERY[distribution], scale), params, key)
    _assert_bits(got, expected)


def rounded(fun: Any, params: Any, distribution: str, scale: float) -> str:
    """The definition, to rounding."""
    key = jax.random.key(1)
    expected, spread = _definition(fun, params, key, distribution, scale)
    got = step_by_step(perturbed(fun, EVERY[distribution], scale), params, key)
    return _assert_rounded(got, expected, spread, distribution)


def compiled(fun: Any, params: Any, distribution: str, scale: float) -> str:
    """In one program, as XLA fuses it."""
    key = jax.random.key(1)
    expected, spread = _definition(fun, params, key, distribution, scale)
    got = jax.jit(perturbed(fun, EVERY[distribution], scale))(params, key)
    return _assert_rounded(list(got), expected, spread, distribution)


def batched(fun: Any, params: Any, distribution: str, scale: float) -> str:
    """Two directions at once."""
    keys = jax.random.split(jax.random.key(1), 2)
    both = jax.vmap(perturbed(fun, EVERY[distribution], scale), (None, 0))
    displace = functools.partial(
        displaced, distribution=EVERY[distribution], scale=scale
    )
    plain = jax.vmap(lambda params, key: fun(displace(params, key)), (None, 0))
    error = _error(lambda: jax.make_jaxpr(plain)(params, keys))
    if error is not None:
        return _assert_raises(lambda: jax.make_jaxpr(both)(params, keys), error)
    definitions = [_definition(fun, params, key, distribution, scale) for key in keys]
    got = step_by_step(both, params, keys)
    outcomes = []
    for i, (expected, spread) in enumerate(definitions):
        one = [np.asarray(x)[i] for x in got]
        try:
            outcomes.append(_assert_rounded(one, expected, spread, distribution))
        except Mismatch as error:
            # `jax.vmap` of fun may be wrong itself: of a scatter without indices, say.
            own = [np.asarray(x)[i] for x in step_by_step(plain, params, keys)]
            if not all(map(_same_bits, one, own)):
                raise
            raise Undefined("jax.vmap(fun) is not fun") from error
    return max(outcomes)


def differentiated(fun: Any, params: Any, distribution: str, scale: float) -> str:
    """The gradient equals the gradient at the displaced leaves."""

    def loss(params: Any) -> jax.Array:
        real = [x for x in fun(params) if jnp.issubdtype(x.dtype, jnp.floating)]
        sums = [jnp.sum(jnp.sin(x.astype("float32"))) for x in real]
        return sum(sums, jnp.zeros((), "float32"))

    key = jax.random.key(1)
    one = jax.grad(perturbed(loss, EVERY[distribution], scale))
    error = _error(lambda: jax.make_jaxpr(jax.grad(loss))(params))
    if error is not None:
        # Of several objections, which one comes first is a matter of order.
        if _error(lambda: jax.make_jaxpr(one)(params, key)) is None:
            raise Mismatch(f"got no error, expected {error!r}")
        return "same"
    expected, spread = _definition(jax.grad(loss), params, key, distribution, scale)
    try:
        got = step_by_step(one, params, key)
    except Exception as error:
        twice = jax.grad(_traced_first(loss, params))
        if _error(lambda: step_by_step(twice, params)) is None:
            raise
        raise Undefined("JAX does not differentiate what it has traced") from error
    return _assert_rounded(got, expected, spread, distribution)


def _traced_first(loss: Any, params: Any) -> Any:
    """The loss as a function of its own jaxpr, with checkpoints entered.

    As `perturb` does; a checkpoint drops what is not used before it is differentiated.
    """
    with mock.patch.object(jax, "checkpoint", lambda fun, **_: fun):
        closed = jax.make_jaxpr(loss)(params)
    run = jax.extend.core.jaxpr_as_fun(closed)
    return lambda params: run(*jax.tree.leaves(params))[0]


def refused(fun: Any, params: Any, distribution: str, scale: float) -> str:
    """The perturbed function raises what `fun` raises while it is traced."""
    error = _error(lambda: jax.make_jaxpr(fun)(params))
    if error is None:
        return "same"
    one = perturbed(fun, EVERY[distribution], scale)
    return _assert_raises(lambda: jax.make_jaxpr(one)(params, jax.random.key(1)), error)


PROPERTIES = {
    check.__name__: check
    for check in (bits, rounded, compiled, batched, differentiated, refused)
}


# --- Comparisons ------------------------------------------------------------------


@functools.cache
def _displace(distribution: str, scale: float) -> Callable[..., Any]:
    """Always the same function, which is not traced again for the same types."""
    return functools.partial(displaced, distribution=EVERY[distribution], scale=scale)


def _definition(
    fun: Any, params: Any, key: jax.Array, distribution: str, scale: float
) -> tuple[list[Any], Callable[[Rounding], list[Any]]]:
    """The results of `fun` at the displaced leaves; and with random rounding."""
    dense = params
    if scale:
        dense = step_by_step(_displace(distribution, scale), params, key)
    jaxpr, dense = traced(fun, params), jax.tree.leaves(dense)

    def spread(rounding: Rounding) -> list[Any]:
        given = zip(dense, jax.tree.leaves(params), strict=True)
        return evaluate(jaxpr, [rounding.displaced(*x) for x in given], rounding)

    try:
        return list(map(np.asarray, evaluate(jaxpr, dense))), spread
    except Exception as error:
        raise Undefined(repr(error)) from error


def _assert_bits(got: Sequence[Any], expected: Sequence[Any]) -> None:
    _assert_types(got, expected)
    for i, (a, b) in enumerate(zip(got, expected, strict=True)):
        if not _same_bits(a, b):
            raise Mismatch(f"result {i}: got {a!r}, expected {b!r}")


def _assert_types(got: Sequence[Any], expected: Sequence[Any]) -> None:
    kinds = [[(x.shape, x.dtype) for x in each] for each in (got, expected)]
    if kinds[0] != kinds[1]:
        raise Mismatch(f"got results of {kinds[0]}, expected {kinds[1]}")


def _same_bits(a: Any, b: Any) -> bool:
    """Whether arrays are equal, with the signs of zeros, and NaN equal to NaN."""
    a, b = np.asarray(a), np.asarray(b)
    if not jnp.issubdtype(a.dtype, jnp.inexact):
        return bool((a == b).all())
    if jnp.issubdtype(a.dtype, jnp.complexfloating):
        return _same_bits(a.real, b.real) and _same_bits(a.imag, b.imag)
    a, b = a.astype(np.float64), b.astype(np.float64)
    nan = np.isnan(a) & np.isnan(b)
    return bool((nan | ((a == b) & (np.signbit(a) == np.signbit(b)))).all())


def _assert_rounded(
    got: Sequence[Any],
    expected: Sequence[Any],
    spread: Callable[[Rounding], list[Any]],
    distribution: str,
) -> str:
    """`same`, `rounded`, or `unstable` if rounding decides the results."""
    _assert_types(got, expected)
    if all(map(_same_bits, got, expected)):
        return "same"
    for count, size in ((3, 1.0), (16, 4.0), (64, 16.0)):
        roundings = [Rounding(seed, size) for seed in range(count)]
        runs = [spread(rounding) for rounding in roundings]
        if distribution in FACTORS and not roundings[0].all_finite:
            return "unstable"  # ∞ · (W + s A Bᵀ) is not ∞ · W + s (∞ · A) Bᵀ.
        found = [
            _outcome(a, b, [run[i] for run in runs])
            for i, (a, b) in enumerate(zip(got, expected, strict=True))
        ]
        if "wrong" not in found:
            return "unstable" if "unstable" in found else "rounded"
    i = found.index("wrong")
    raise Mismatch(f"result {i}: got {got[i]!r}, expected {expected[i]!r}")


def _outcome(got: Any, expected: Any, runs: Sequence[Any]) -> str:
    a, b, *runs = (np.asarray(x) for x in (got, expected, *runs))
    if _same_bits(a, b):
        return "same"
    if not jnp.issubdtype(b.dtype, jnp.inexact):
        return "unstable" if any((run != b).any() for run in runs) else "wrong"
    epsilon = float(jnp.finfo(b.dtype).eps)
    real = not jnp.issubdtype(b.dtype, jnp.complexfloating)
    a, b, *runs = (
        x.astype(np.float64 if real else np.complex128) for x in (a, b, *runs)
    )
    finite = np.isfinite(b)
    if any((np.isfinite(run) != finite).any() for run in runs):
        return "unstable"
    odd = ~finite & (np.isnan(a) & np.isnan(b) | (a == b))
    if not (odd | (finite & np.isfinite(a))).all():
        return "wrong"
    if not finite.any():
        return "rounded"
    a, b, runs = a[finite], b[finite], [run[finite] for run in runs]
    size = np.abs(b).max()
    spread = max(np.abs(run - b).max() for run in runs)
    return (
        "rounded" if np.abs(a - b).max() <= 8 * (spread + epsilon * size) else "wrong"
    )


def _error(trace: Callable[[], Any]) -> Exception | None:
    try:
        trace()
    except Exception as error:
        return error
    return None


def _assert_raises(trace: Callable[[], Any], error: Exception) -> str:
    got = _error(trace)
    if type(got) is not type(error):
        raise Mismatch(f"got {got!r}, expected {error!r}")
    return "same"
