"""A box in which the parameters of a run stay."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax

from radazo_jax._src.base import checks, shown

# A lower and an upper bound: trees like the parameters, or scalars; `None` for none.
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


BoundsLike = Bounds | ScipyBounds | Sequence[Any] | np.ndarray


class _Elements(NamedTuple):
    """Bounds of the elements of one array of parameters, as SciPy lists them.

    Attributes:
      lower: The lower bounds, [d].
      upper: The upper bounds, [d].
    """

    lower: np.ndarray
    upper: np.ndarray


def as_bounds(bounds: Any) -> Bounds | None:
    """Returns the bounds as `(lower, upper)`, as every run takes them.

    Args:
      bounds: A tuple `(lower, upper)`; `scipy.optimize.Bounds`; or a pair for each
        element of the parameters, in a list or an array, as SciPy takes them.

    Raises:
      ValueError: If they are none of these.
    """
    if hasattr(bounds, "lb") and hasattr(bounds, "ub"):
        # scipy.optimize.Bounds makes vectors of one element of numbers.
        bounds = tuple(
            np.squeeze(bound) if np.size(bound) == 1 else np.array(bound, subok=True)
            for bound in (bounds.lb, bounds.ub)
        )
    checks.check_not_masked("bounds", bounds)
    is_array = isinstance(bounds, np.ndarray | jax.Array)
    if is_array and np.shape(bounds) == (2,):
        bounds = tuple(bounds)
    if isinstance(bounds, list) and len(bounds) == 2:
        if not any(map(_is_pair, bounds)):
            bounds = tuple(bounds)
        elif any(isinstance(bound, np.ndarray | jax.Array) for bound in bounds):
            raise _error(bounds, ", which may be either")
    if bounds is None or isinstance(bounds, tuple):
        return jax.tree.map(_as_list, bounds)
    if (is_array or isinstance(bounds, list)) and all(map(_is_pair, bounds)):
        sides = ([bound[side] for bound in bounds] for side in (0, 1))
        return _Elements(*(np.array(_filled(x, i), float) for i, x in enumerate(sides)))
    raise _error(bounds)


def _is_pair(bound: object) -> bool:
    is_vector = isinstance(bound, list | tuple | np.ndarray | jax.Array)
    return is_vector and np.shape(np.asarray(bound, object)) == (2,)


def _as_list(bound: optax.Params) -> optax.Params:
    """Returns a list for an array of Python's objects, which JAX does not know."""
    is_array = isinstance(bound, np.ndarray)
    return bound.tolist() if is_array and bound.dtype.hasobject else bound


def _filled(bound: optax.Params, side: int) -> optax.Params:
    """Replaces `None`, which is no bound, by an infinity."""
    none = (-np.inf, np.inf)[side]
    return jax.tree.map(
        lambda x: none if x is None else x, bound, is_leaf=lambda x: x is None
    )


def project(bounds: Bounds | None, params: optax.Params) -> optax.Params:
    """Returns the closest parameters within the bounds."""
    if bounds is None:
        return params
    lower, upper = as_trees(bounds, params)
    return optax.projections.projection_box(params, lower, upper)


def as_trees(bounds: Bounds, params: optax.Params) -> Bounds:
    """Returns the bounds as trees of arrays like the parameters."""
    if isinstance(bounds, _Elements):
        leaves = jax.tree.leaves(params)
        treedef: Any = jax.tree.structure(params)
        count, size = len(bounds.lower), sum(map(np.size, leaves))
        if len(leaves) != 1 or count != size:
            raise ValueError(
                "bounds must have one pair for each element of one array of "
                f"parameters; got {count} pairs, and {size} elements in {len(leaves)} "
                "arrays. For trees pass (lower, upper), of trees like params."
            )
        shape = np.shape(leaves[0])
        bounds = tuple(treedef.unflatten([x.reshape(shape)]) for x in bounds)
    return _like(bounds, 0, params), _like(bounds, 1, params)


def check_bounds(bounds: Bounds | None, params: optax.Params) -> None:
    """Raises unless these are bounds, and `params` lie between them.

    Values that are traced cannot be compared.
    """
    if bounds is None:
        return
    if not isinstance(bounds, tuple) or len(bounds) != 2:
        raise _error(bounds)
    # Bounds are known, even if the parameters are traced.
    with jax.ensure_compile_time_eval():
        lower, upper = as_trees(bounds, params)
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
                f"{list(map(int, place)) or ''}. Pass (lower, upper), in this order; "
                "-np.inf, np.inf or None is no bound."
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


def _error(bounds: object, why: str = "") -> ValueError:
    """Returns the error of an argument that describes no bounds."""
    on_a_line = " ".join(repr(bounds).split())
    return ValueError(
        "bounds must be a tuple (lower, upper) of numbers or of trees like params, a "
        "list of pairs, one for each element of an array, or a scipy.optimize.Bounds; "
        f"got {on_a_line}{why}. Pass -np.inf, np.inf or None for no bound."
    )


def _like(bounds: Bounds, side: int, params: optax.Params) -> optax.Params:
    """Returns a bound as a tree of arrays like the leaves of `params`."""
    bound: Any = bounds[side]
    treedef: Any = jax.tree.structure(params)
    if bound is None or (jax.tree_util.all_leaves([bound]) and np.ndim(bound) == 0):
        found = [bound] * treedef.num_leaves
    else:
        try:
            found = treedef.flatten_up_to(bound)
        except (TypeError, ValueError) as error:
            raise _error(bounds, _missing(bound, params)) from error

    if any(isinstance(b, tuple) for b in found):  # A vector is an array or a list.
        raise _error(bounds, ", a tuple that is not read as pairs")

    def of_leaf(p: jax.Array, b: jax.typing.ArrayLike) -> jax.Array:
        return jnp.broadcast_to(jnp.asarray(_filled(b, side), p.dtype), p.shape)

    try:
        return treedef.unflatten(map(of_leaf, jax.tree.leaves(params), found))
    except (TypeError, ValueError) as error:
        raise _error(bounds, f", for shapes {shown.tree(params)}") from error


def _missing(bound: optax.Params, params: optax.Params) -> str:
    """Names the first leaf of the parameters for which a tree has no bound."""
    bounded, needed = (
        [jax.tree_util.keystr(path) for path, _ in paths]
        for paths in (
            jax.tree_util.tree_leaves_with_path(bound, is_leaf=lambda x: x is None),
            jax.tree_util.tree_leaves_with_path(params),
        )
    )
    for name in needed:
        if not any(given.startswith(name) for given in bounded):
            return f" without a bound of params{name}"
    return ""
