"""Points of a step: directions by number, points along them, and points as trees."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from radazo_jax._src.contracts import Draw, Points
from radazo_jax._src.directions import sums
from radazo_jax._src.directions.distribution import Direction, Distribution
from radazo_jax._src.directions.layout import Layout
from radazo_jax._src.names import checks_names
from radazo_jax._src.numbers import generator
from radazo_jax._src.numbers.counter import Positions
from radazo_jax._src.perturb import transform
from radazo_jax._src.trees import as_arrays, at_least_float32, widest
from radazo_jax._src.xla import on_any_mesh, specs_of


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
    tree: Any,
    scales: Sequence[float] | jax.Array,
    params: optax.Params,
    *,
    includes_params: bool = False,
) -> Points:
    """The points θ + sᵢ w along a tree w, for estimators that make their own direction.

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
    """The directions of a step, stacked, and the layout of the parameters."""
    layout = transform.layout_for(distribution, draw.fun, params)
    if numbers is not None:
        return sums.sample(distribution, draw.run_key, numbers, layout), layout
    each = np.arange(num_directions, dtype=np.uint32)
    if not distribution.sequential:
        return sums.sample(distribution, draw.key, each, layout), layout
    key, first = _next_in_run(draw, num_directions)
    return sums.sample(distribution, key, first + each, layout), layout


def _next_in_run(draw: Draw, num_directions: int) -> tuple[jax.Array, jax.Array]:
    """The key and the first number of a step whose directions are numbered in a run.

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

    def moved(direction: Direction, scale: jax.Array, shift: Any) -> optax.Params:
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

    def program(trees: Any) -> jax.Array:
        leaves = jax.tree.leaves(trees)
        flat = [x.astype(jnp.float32).reshape(len(x), -1) for x in leaves]
        return jnp.concatenate(flat, axis=1)

    return on_any_mesh(program, jax.P())(candidates(points, params))


def shifted(params: optax.Params, shift: Any, distance: jax.Array | None) -> Any:
    """θ + t w, rounded to the dtypes of θ; θ itself without a w.

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
