"""Values of points by one compiled program: all at once, or one by one."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from radazo_jax._src.base import checks, trees, xla
from radazo_jax._src.base.trees import Tree
from radazo_jax._src.directions import storage
from radazo_jax._src.directions.distribution import Direction
from radazo_jax._src.directions.elements import LowRankFactors
from radazo_jax._src.directions.storage import Use
from radazo_jax._src.estimates.contracts import Evaluator, Points, Values
from radazo_jax._src.estimates.points import shifted
from radazo_jax._src.perturb import transform

# θ joins the batch of the points if all but this fraction of the parameters are
# matrices in products with directions of low rank.
_DENSE_SHARE = 8

# Points are taken in turn beyond so many elements of all directions; on CPUs, from so
# many parameters on, below which a loop takes longer than its evaluations.
_MOST_TOGETHER, _FEWEST_IN_TURN = 2**24, 2**13


@dataclasses.dataclass(frozen=True, repr=False)
class Vectorized(Evaluator):
    """See `vectorized`."""

    _constructor = "vectorized"

    batch_size: int | None

    def cache(self, points: Points) -> Points:
        return with_stored(points, self._use(points))

    def _use(self, points: Points) -> Use:
        count, size = len(points.scales), points.layout.dimension
        if self.batch_size is not None or count * size > _MOST_TOGETHER:
            return use_of(count, self.batch_size or 1)
        if (
            jax.default_backend() == "cpu"
            and size >= _FEWEST_IN_TURN
            # Products with the same matrices are one, if all are taken together.
            and not storage.have_factors(points.directions, points.layout)
        ):
            return Use.STORED_IN_TURN
        return use_of(count, None)

    def evaluate(
        self,
        fun: Callable[[optax.Params], Tree],
        params: optax.Params,
        points: Points,
        has_aux: bool,
    ) -> tuple[Values, Tree]:
        loss = checks.checked_loss(fun, has_aux, points.vector_valued)
        use = self._use(points)
        if not has_aux and _shares_products(points, use):
            values, aux = _values_in_one_batch(loss, params, points), None
        else:
            batch_size = None if use is Use.TOGETHER else self.batch_size or 1
            values, aux = _values(loss, params, points, has_aux, batch_size, use)
        return points.split(values), aux


@checks.checks_names
def vectorized(batch_size: int | None = None) -> Evaluator:
    """Evaluates points within the compiled step, under `jax.vmap` or in turn.

    Args:
      batch_size: Number of directions that are evaluated together, as in
        `jax.lax.map`: all of them under one `vmap` if it is at least K, and one at a
        time if it is 1, in the memory of a single evaluation. `None` chooses: one at a
        time if K directions have more than 2²⁴ elements, and on a CPU from 2¹³
        parameters on, unless directions have low rank; otherwise all of them. The
        values are the same up to rounding.

    Returns:
      The evaluator.

    Raises:
      TypeError, ValueError: If `batch_size` is not a positive integer or `None`.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> import radazo_jax as zo
      >>> value_and_grad = zo.value_and_grad(
      ...     lambda x: jnp.sum(x**2),
      ...     zo.forward_difference(),
      ...     evaluator=zo.vectorized(1),
      ... )
      >>> value, gradient = value_and_grad(jax.random.key(0), jnp.ones(3))
      >>> float(value)
      3.0
    """
    return Vectorized(checked_batch_size(batch_size))


def checked_batch_size(batch_size: object) -> int | None:
    """Checks the number of points that are evaluated together, and returns it."""
    if batch_size is None:
        return None
    return checks.check_int_at_least("batch_size", batch_size, 1)


def with_stored(points: Points, use: Use) -> Points:
    """Returns the same points, with directions stored if that suits their use."""
    cached = storage.cache(points.directions, points.layout, use)
    return dataclasses.replace(points, directions=cached)


def batched_map(
    fun: Callable[[optax.Params], Tree],
    xs: Tree,
    batch_size: int | None,
    evaluator: str = "vectorized(",
) -> Tree:
    """Calls `jax.lax.map`, whose `batch_size=None` is all at once."""
    size = len(jax.tree.leaves(xs)[0])
    if batch_size == 1 or size == 1:
        return lax.map(fun, xs)
    try:
        if use_of(size, batch_size) is Use.TOGETHER:
            return jax.vmap(fun)(xs)
        return lax.map(fun, xs, batch_size=batch_size)
    except (NotImplementedError, ValueError) as error:
        if _can_be_traced(fun, xs):
            raise type(error)(
                f"fun cannot be evaluated at several points under jax.vmap: {error} "
                f"Pass {evaluator}batch_size=1) to evaluate one at a time."
            ) from error
        raise


def _can_be_traced(fun: Callable[[optax.Params], Tree], xs: Tree) -> bool:
    """Returns whether a function works on one element, so that batching it failed."""
    try:
        jax.eval_shape(fun, jax.tree.map(lambda x: x[0], xs))
    except Exception:
        return False
    return True


def use_of(size: int, batch_size: int | None) -> Use:
    """Returns the use of so many directions: together, if all are alive at once."""
    together = size > 1 and (batch_size is None or batch_size >= size)
    return Use.TOGETHER if together else Use.IN_TURN


def _values(
    loss: Callable[[optax.Params], tuple[jax.Array, Tree]],
    params: optax.Params,
    points: Points,
    has_aux: bool,
    batch_size: int | None,
    use: Use,
) -> tuple[jax.Array, Tree]:
    base = loss(params) if points.includes_params else None
    # In turn, also with what of θ is the same for all, as rows looked up.
    in_turn = use is not Use.TOGETHER
    first = (base[0],) if base and in_turn else ()
    static: list[trees.Static] = []

    def along(point: tuple[Direction, Tree, Tree]) -> tuple[jax.Array, list[jax.Array]]:
        direction, scales, shifts = point
        if use is Use.STORED_IN_TURN:
            direction = storage.with_elements(direction, points.layout)
        values: list[jax.Array] = []
        found: list[jax.Array] = []
        after = first
        for i, scale in enumerate(scales):
            at, u = xla.tie((params, direction), *after)
            t = None if shifts is None else shifts[i]
            at = shifted(at, points.shift, t)
            value, aux = transform.evaluate(loss, at, points.layout, u, scale)
            if not values and has_aux and not base:
                found, rest = trees.partition(aux, jax.Array)
                static[:] = [rest]
            values.append(value)
            after = (value,) if in_turn else ()
        return jnp.stack(values), found

    each = (points.directions, points.scales, points.shifts)
    values, found = batched_map(along, each, batch_size)
    values = lax.collapse(values, 0, 2)
    if base:
        return jnp.concatenate([base[0][None], values]), base[1]
    aux = static[0].merge([x[0] for x in found]) if has_aux else None
    return values, aux


def values_by_number(
    loss: Callable[[Tree], tuple[jax.Array, Tree]],
    params: optax.Params,
    points: Points,
    numbers: jax.Array,
    batch_size: int | None,
    evaluator: str = "vectorized(",
) -> jax.Array:
    """Evaluates some of the points, each computed alike whatever the others.

    Args:
      loss: The function, which returns a pair.
      params: θ.
      points: The points.
      numbers: The numbers of the points to evaluate, θ first if it is one: int32, [m].
      batch_size: The number of points that are evaluated together.
      evaluator: The beginning of the evaluator as it is written.

    Returns:
      The values: at least float32, [m].
    """
    # θ is a point along the first direction, at scale 0.
    base = [0] * points.includes_params
    along = np.repeat(np.arange(len(points.scales)), points.scales.shape[1])
    which = jnp.asarray(np.array([*base, *along]))
    scales, shifts = jax.tree.map(
        lambda x: jnp.concatenate([jnp.zeros(len(base)), x.reshape(-1)]),
        (points.scales, points.shifts),
    )

    def evaluate(i: jax.Array) -> jax.Array:
        direction = jax.tree.map(lambda x: x[which[i]], points.directions)
        t = None if shifts is None else shifts[i]
        at = shifted(params, points.shift, t)
        return transform.evaluate(loss, at, points.layout, direction, scales[i])[0]

    return batched_map(evaluate, numbers, batch_size, evaluator)


def _shares_products(points: Points, use: Use) -> bool:
    """Returns whether all evaluations multiply the same parameters, but for a few."""
    held = points.directions.cached
    if not held or not points.includes_params or points.scales.shape[1] > 1:
        return False
    if points.shift is not None or use is not Use.TOGETHER:
        return False
    pairs = zip(points.layout.leaves, held, strict=True)
    dense = sum(leaf.size for leaf, u in pairs if not isinstance(u, LowRankFactors))
    return dense * _DENSE_SHARE <= points.layout.dimension


def _values_in_one_batch(
    loss: Callable[[optax.Params], tuple[jax.Array, Tree]],
    params: optax.Params,
    points: Points,
) -> jax.Array:
    """Evaluates points together with θ, the first of the batch: all read θ once."""
    directions, scales = (
        jax.tree.map(lambda x: jnp.concatenate([x[:1], x]), tree)
        for tree in (points.directions, points.scales[:, 0])
    )

    def evaluate(point: tuple[Direction, jax.Array]) -> jax.Array:
        return transform.evaluate(loss, params, points.layout, *point)[0]

    return batched_map(evaluate, (directions, scales.at[0].set(0)), None)
