"""A box in which the parameters of a run stay."""

from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax

from radazo_jax._src.trees import filled

# A lower and an upper bound: trees like the parameters, or scalars.
Bounds = tuple[Any, Any]

# A start may lie outside of a bound by so many roundings of it.
_ROUNDINGS = 4


class ScipyBounds(Protocol):
    """`scipy.optimize.Bounds`, without an import of SciPy.

    Attributes:
      lb: The lower bounds.
      ub: The upper bounds.
    """

    lb: Any
    ub: Any


BoundsLike = Bounds | ScipyBounds


def as_bounds(bounds: Any) -> Bounds | None:
    """The bounds as `(lower, upper)`, as every run takes them.

    Raises:
      ValueError: If they are a pair for each parameter, as SciPy takes them. Pairs of
        two parameters would otherwise be read as a lower and an upper bound.
    """
    if hasattr(bounds, "lb") and hasattr(bounds, "ub"):
        # scipy.optimize.Bounds makes vectors of one element of numbers.
        lower, upper = (
            np.squeeze(bound) if np.size(bound) == 1 else np.array(bound)
            for bound in (bounds.lb, bounds.ub)
        )
        return lower, upper
    if _has_pairs(bounds):
        raise _Pairs(bounds)
    return bounds


def _has_pairs(bounds: Any) -> bool:
    if isinstance(bounds, np.ndarray | jax.Array):
        return bounds.ndim == 2
    if not isinstance(bounds, list):
        return False
    return any(isinstance(bound, tuple | list) for bound in bounds)


def project(bounds: Bounds | None, params: optax.Params) -> optax.Params:
    """The closest parameters within the bounds."""
    if bounds is None:
        return params
    lower, upper = as_trees(bounds, params)
    return optax.projections.projection_box(params, lower, upper)


def as_trees(bounds: Bounds, params: optax.Params) -> Bounds:
    """The bounds as trees of arrays like the parameters."""
    lower, upper = (_like(bound, params) for bound in bounds)
    return lower, upper


def check_bounds(bounds: Any, params: optax.Params) -> None:
    """Raises unless these are bounds, and `params` lie between them.

    Values that are traced cannot be compared.
    """
    if bounds is None:
        return
    try:
        # Bounds are known, even if the parameters are traced.
        with jax.ensure_compile_time_eval():
            lower, upper = as_trees(bounds, params)
    except _Pairs:
        raise
    except (TypeError, ValueError) as error:
        raise ValueError(
            "bounds must be a pair (lower, upper) of numbers, or of trees like params; "
            f"got {bounds!r}."
        ) from error
    leaves = zip(
        jax.tree_util.tree_leaves_with_path(params),
        jax.tree.leaves(lower),
        jax.tree.leaves(upper),
        strict=True,
    )
    for (path, p), low, high in leaves:
        where = f"params{jax.tree_util.keystr(path)}"
        if isinstance(low, jax.core.Tracer) or isinstance(high, jax.core.Tracer):
            continue
        wrong = np.argwhere(~(np.asarray(low) <= np.asarray(high)))
        if len(wrong):
            place = tuple(wrong[0])
            raise ValueError(
                "bounds must have no lower bound that exceeds its upper bound, and no "
                f"NaN; got lower {low[place]} and upper {high[place]} at {where}"
                f"{list(map(int, place)) or ''}. Pass (lower, upper), in this order."
            )
        if isinstance(p, jax.core.Tracer):
            continue
        _check_within(np.asarray(p), np.asarray(low), np.asarray(high), where)


def _check_within(p: np.ndarray, low: np.ndarray, high: np.ndarray, where: str) -> None:
    """Raises if elements lie farther outside of bounds than by rounding."""
    for bound, outside, side in ((low, p < low, "below"), (high, p > high, "above")):
        apart = _ROUNDINGS * jnp.finfo(p.dtype).eps * np.abs(bound)
        wrong = np.argwhere(outside & ~(np.abs(p - bound) <= apart) | np.isnan(p))
        if len(wrong):
            place = tuple(wrong[0])
            raise ValueError(
                f"params must lie within bounds; got {p[place]} at {where}"
                f"{list(map(int, place)) or ''}, {side} the bound {bound[place]}."
            )


class _Pairs(ValueError):
    """Bounds that are a pair for each parameter."""

    def __init__(self, bounds: Any):
        on_a_line = " ".join(repr(bounds).split())
        super().__init__(
            "bounds must be a tuple (lower, upper) or a scipy.optimize.Bounds; got "
            f"{on_a_line}. If these are pairs, one for each parameter, pass "
            "tuple(np.transpose(bounds))."
        )


def _like(bound: Any, params: optax.Params) -> optax.Params:
    """A bound as a tree of arrays that broadcast against the leaves of `params`."""
    bound = filled(bound, params)

    def check(p: jax.Array, b: Any) -> jax.Array:
        if isinstance(b, tuple):  # A vector of bounds is an array or a list.
            raise _Pairs(bound)
        return jnp.broadcast_to(jnp.asarray(b, p.dtype), p.shape)

    return jax.tree.map(check, params, bound)
