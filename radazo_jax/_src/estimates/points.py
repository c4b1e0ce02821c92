"""Points of a step: directions by number, points along them, and points as trees."""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from radazo_jax._src.base.names import checks_names
from radazo_jax._src.base.trees import Tree, as_arrays, at_least_float32, widest
from radazo_jax._src.base.xla import on_any_mesh, specs_of
from radazo_jax._src.directions import generator
from radazo_jax._src.directions.distribution import (
    Direction,
    Distribution,
    lazy,
    sample_directions,
)
from radazo_jax._src.directions.distributions import LowRank
from radazo_jax._src.directions.elements import Elements, LowRankFactors
from radazo_jax._src.directions.generator import Positions
from radazo_jax._src.directions.layout import Layout, Leaf
from radazo_jax._src.estimates.contracts import Draw, Points
from radazo_jax._src.perturb import transform


@checks_names
def sample_points(
    distribution: Distribution,
    draw: Draw,
    num_directions: int,
    scales: Sequence[float] | jax.Array,
    params: optax.Params,
    *,
    includes_params: bool = False,
    numbers: jax.Array | None = None,
) -> Points:
    """Samples the directions of a step, and points at the same scales along each.

    Args:
      distribution: The distribution of the directions.
      draw: The draw of the step; its keys are consumed.
      num_directions: K. It must be the same in every step if the distribution is
        `sequential`.
      scales: Displacements sᵢ along each direction, shape [m], in units of the
        parameters.
      params: θ, a tree of arrays, of which only the shapes are used.
      includes_params: Whether θ itself is a point, the first.
      numbers: The numbers of the directions, uint32, [K], if an estimator chooses them:
        a number is the same direction in every step of a run. By default, each step has
        its own.

    Returns:
      The points.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> import radazo_jax as zo
      >>> draw, params = zo.estimators.Draw.once(jax.random.key(0)), jnp.zeros(3)
      >>> points = zo.estimators.sample_points(
      ...     zo.sphere(), draw, 4, [0.1, -0.1], params
      ... )
      >>> points.num_points
      8
    """
    directions, layout = _sample(distribution, draw, num_directions, params, numbers)
    along = jnp.asarray(scales, widest(params))
    each = jnp.broadcast_to(along, (num_directions, *along.shape))
    return Points(directions, each, includes_params, layout)


@checks_names
def points_along(
    tree: Tree,
    scales: Sequence[float] | jax.Array,
    params: optax.Params,
    *,
    includes_params: bool = False,
) -> Points:
    """Returns the points θ + sᵢ w along a tree w, which an estimator has made.

    Args:
      tree: w, a tree like the parameters.
      scales: sᵢ, shape [m].
      params: θ, a tree of arrays.
      includes_params: Whether θ itself is a point, the first.

    Returns:
      The points. They have one direction, which is 0, because the gradient is a
      multiple of w, as `points.of_tree` makes it.

    Examples:
      >>> import jax.numpy as jnp
      >>> import radazo_jax as zo
      >>> points = zo.estimators.points_along(jnp.ones(2), [0.5, -0.5], jnp.zeros(2))
      >>> zo.estimators.candidates(points, jnp.zeros(2)).tolist()
      [[0.5, 0.5], [-0.5, -0.5]]
    """
    once = Draw.once(jax.random.key(0))
    directions, layout = _sample(_Zero(), once, 1, params)
    shifts = jnp.asarray(scales, jnp.float32)[None]
    each = jnp.zeros_like(shifts)
    # Sharded as the parameters, whatever it was made of.
    tree = on_any_mesh(lambda tree: tree, specs_of(params))(tree)
    return Points(directions, each, includes_params, layout, tree, shifts)


class _Zero(Distribution):
    """The direction 0, which costs nothing."""

    def factor(self, dimension: int) -> float:
        del dimension
        return 1.0

    def draw(self, key: jax.Array, number: jax.Array, at: Positions) -> jax.Array:
        del key, number
        return jnp.zeros(at.lo.shape, jnp.float32)


def _sample(
    distribution: Distribution,
    draw: Draw,
    num_directions: int,
    params: optax.Params,
    numbers: jax.Array | None = None,
) -> tuple[Direction, Layout]:
    """Samples the directions of a step, and returns them with the layout of θ."""
    layout = transform.layout_for(distribution, draw.fun, params)
    if numbers is not None:
        return sample_directions(distribution, draw.run_key, numbers, layout), layout
    each = np.arange(num_directions, dtype=np.uint32)
    if not distribution.sequential:
        return sample_directions(distribution, draw.key, each, layout), layout
    key, first = _next_in_run(draw, num_directions)
    return sample_directions(distribution, key, first + each, layout), layout


def _next_in_run(draw: Draw, num_directions: int) -> tuple[jax.Array, jax.Array]:
    """Returns key and first number of a step whose directions are numbered in a run.

    Numbers are uint32. Once they are used up, they begin again under another key.
    """
    step = jnp.asarray(draw.step).astype(jnp.uint32)
    most = np.uint32(min(2**32 // num_directions, 2**32 - 1))
    cycle = step // most
    key = draw.run_key
    following = generator.fold_in(key, cycle)
    later, now = jax.random.key_data(following), jax.random.key_data(key)
    data = jnp.where(cycle > 0, later, now)
    key = jax.random.wrap_key_data(data, impl=jax.random.key_impl(key))
    return key, (step % most) * np.uint32(num_directions)


@checks_names
def candidates(points: Points, params: optax.Params) -> optax.Params:
    """Returns the points as trees of arrays, for evaluations outside of a program.

    Args:
      points: The points, n of them.
      params: θ.

    Returns:
      A tree like `params` whose leaves have one additional axis, the first, of size n.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> import radazo_jax as zo
      >>> estimator, params = zo.central_difference(num_directions=3), jnp.zeros(2)
      >>> draw = zo.estimators.Draw.once(jax.random.key(0))
      >>> points, _ = estimator.points(draw, params, ())
      >>> zo.estimators.candidates(points, params).shape
      (6, 2)
    """
    params = as_arrays(params)

    def moved(direction: Direction, scale: jax.Array, shift: Tree) -> optax.Params:
        at = shifted(params, points.shift, shift)

        def away(p: jax.Array, u: jax.Array) -> jax.Array:
            dtype = at_least_float32(p.dtype)
            return _step(p, scale.astype(dtype) * u.astype(dtype))

        return jax.tree.map(away, at, direction.tree(points.layout))

    at_scales = jax.vmap(moved, in_axes=(None, 0, 0))
    moved_params = jax.vmap(at_scales)(points.directions, points.scales, points.shifts)

    def flat(p: jax.Array, moved: jax.Array) -> jax.Array:
        rows = lax.collapse(moved, 0, 2)
        return jnp.concatenate([p[None], rows]) if points.includes_params else rows

    return jax.tree.map(flat, params, moved_params)


@checks_names
def candidate_rows(points: Points, params: optax.Params) -> jax.Array:
    """Returns the points as vectors, for estimators of few parameters.

    Args:
      points: The points, n of them.
      params: θ.

    Returns:
      All coordinates of each point, float32, [n, d].

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> import radazo_jax as zo
      >>> params = {"a": jnp.zeros(2), "b": jnp.zeros((2, 3))}
      >>> draw = zo.estimators.Draw.once(jax.random.key(0))
      >>> points, _ = zo.spsa().points(draw, params, ())
      >>> zo.estimators.candidate_rows(points, params).shape
      (2, 8)
    """

    def program(trees: Tree) -> jax.Array:
        leaves = jax.tree.leaves(trees)
        flat = [x.astype(jnp.float32).reshape(len(x), -1) for x in leaves]
        return jnp.concatenate(flat, axis=1)

    return on_any_mesh(program, jax.P())(candidates(points, params))


def shifted(params: optax.Params, shift: Tree, distance: jax.Array | None) -> Tree:
    """Returns θ + t w, rounded to the dtypes of θ; θ itself without a w.

    Args:
      params: θ.
      shift: w, a tree like θ, or `None`.
      distance: t, or `None`.
    """
    if distance is None:
        return params

    def away(p: jax.Array, w: jax.Array) -> jax.Array:
        wide = at_least_float32(p.dtype)
        return distance.astype(wide) * w.astype(wide)

    return jax.tree.map(_step, params, jax.tree.map(away, params, shift))


def _step(p: jax.Array, distance: jax.Array) -> jax.Array:
    wide = at_least_float32(p.dtype)
    return (p.astype(wide) + distance.astype(wide)).astype(p.dtype)


@checks_names
def candidate_factors(points: Points) -> tuple[optax.Params, optax.Params]:
    """Returns the displacements of points along `low_rank` directions as factors.

    Point i is W + Aᵢ Bᵢᵀ for each matrix W of θ: a LoRA adapter, which an inference
    server adds to its own copy of θ. If θ is itself a point, its B is zero.

    Args:
      points: The points, n of them. All leaves must be drawn of low rank: a leaf that
        is no matrix, or has a side no longer than the rank, is drawn dense.

    Returns:
      Two trees like the parameters, of A and of B, in float32 and of shapes
      [n, …, rows, r] and [n, …, columns, r]. The axes … stack matrices, as the layers
      of a scan. Several axes of rows are joined, and likewise several axes of columns.

    Raises:
      TypeError: If the directions are of another distribution.
      ValueError: If a leaf is drawn dense, or the points are moved by a shift.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> import radazo_jax as zo
      >>> estimator = zo.central_difference(zo.low_rank(2), num_directions=3)
      >>> params = {"layers": jnp.zeros((4, 8, 5))}
      >>> draw = zo.estimators.Draw.once(jax.random.key(0))
      >>> points, _ = estimator.points(draw, params, ())
      >>> a, b = zo.estimators.candidate_factors(points)
      >>> a["layers"].shape, b["layers"].shape
      ((6, 4, 8, 2), (6, 4, 5, 2))

    References:
      Hu et al., LoRA: Low-Rank Adaptation of Large Language Models, 2021,
      <https://arxiv.org/abs/2106.09685>. Sarkar et al., Evolution Strategies at the
      Hyperscale, 2025, <https://arxiv.org/abs/2511.16652>.
    """
    distribution, layout = points.directions.distribution, points.layout
    if not isinstance(distribution, LowRank):
        raise TypeError(
            f"points must be along directions of low_rank; got {distribution!r}."
        )
    if points.shift is not None:
        raise ValueError(
            "points must be θ + s u, without another tree; got points with a shift."
        )
    for leaf in layout.leaves:
        if distribution.axes(leaf) is None:
            raise ValueError(
                f"points must move matrices of low rank alone; got the leaf "
                f"{leaf.path} of shape {leaf.shape}, which is drawn dense. Tune the "
                "matrices alone, and let the function hold the other leaves."
            )

    def of_direction(direction: Direction) -> list[tuple[jax.Array, jax.Array]]:
        return [
            _matrices(lazy(direction, leaf, layout.dimension), distribution, leaf)
            for leaf in layout.leaves
        ]

    # θ is a point along the first direction, at scale 0.
    num_base, num_along = int(points.includes_params), points.scales.shape[1]
    each = np.repeat(np.arange(len(points.scales)), num_along)
    which = np.concatenate([np.zeros(num_base, int), each])
    scales = (points.scales * points.directions.scale[:, None]).reshape(-1)
    scales = jnp.concatenate([jnp.zeros(num_base, scales.dtype), scales])

    def scaled(b: jax.Array) -> jax.Array:
        return scales.reshape(-1, *(1,) * (b.ndim - 1)) * b[which]

    factors = jax.vmap(of_direction)(points.directions)
    return (
        jax.tree.unflatten(layout.treedef, [a[which] for a, _ in factors]),
        jax.tree.unflatten(layout.treedef, [scaled(b) for _, b in factors]),
    )


def _matrices(
    factors: Elements, distribution: LowRank, leaf: Leaf
) -> tuple[jax.Array, jax.Array]:
    """Returns factors of a leaf: [stacked, …, rows, r] and [stacked, …, columns, r]."""
    axes = distribution.axes(leaf)
    assert axes is not None and isinstance(factors, LowRankFactors)
    both = (*axes.rows, *axes.columns)
    stacked = [i for i in range(len(leaf.shape)) if i not in both]
    order = (*stacked, *both, len(leaf.shape))
    sizes = [leaf.shape[i] for i in stacked]

    def matrix(factor: jax.Array, side: tuple[int, ...]) -> jax.Array:
        length = math.prod(leaf.shape[i] for i in side)
        return factor.transpose(order).reshape(*sizes, length, distribution.rank)

    return matrix(factors.a, axes.rows), matrix(factors.b, axes.columns)
