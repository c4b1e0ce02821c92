"""Moments that are not stored, but replayed from the latest steps."""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from radazo_jax._src.base import checks, shown, xla
from radazo_jax._src.base.trees import Tree, at_least_float32, widest, with_range
from radazo_jax._src.base.xla import on_any_mesh, specs_of
from radazo_jax._src.directions import generator, sums
from radazo_jax._src.directions.distribution import Direction
from radazo_jax._src.directions.layout import Layout, Leaf
from radazo_jax._src.directions.sums import Block, LinearCombination
from radazo_jax._src.estimates.contracts import GradientTransformationExtraArgs
from radazo_jax._src.optimizers.in_place import Finish, InPlaceUpdate
from radazo_jax._src.optimizers.moments import Hyperparameters, averaged, scalar

# Dropped weight beyond which a window is called short.
_MUCH_DROPPED = 0.05


class StepHistory(NamedTuple):
    """The coefficients and directions of the latest H steps, in turn.

    Step t is at index t mod H. A step without a direction k has coefficient 0.

    Attributes:
      key_data: The words of the keys: uint32, [H, max_directions, 2].
      number: The numbers of the directions: uint32, [H, max_directions].
      scale: The factors of their elements: float32, [H, max_directions].
      coefficient: The coefficients: at least float32, [H, max_directions].
    """

    key_data: jax.Array
    number: jax.Array
    scale: jax.Array
    coefficient: jax.Array

    @classmethod
    def init(cls, window: int, max_directions: int, dtype: np.dtype) -> "StepHistory":
        """Returns the history before the first step."""
        shape = (window, max_directions)
        return cls(
            jnp.zeros((*shape, 2), jnp.uint32),
            jnp.zeros(shape, jnp.uint32),
            jnp.zeros(shape, jnp.float32),
            jnp.zeros(shape, dtype),
        )

    def with_step(
        self, index: jax.Array, coefficients: jax.Array, directions: Direction
    ) -> "StepHistory":
        """Returns the history with a new step, which replaces the oldest."""
        key_data = jax.random.key_data(directions.key)
        step = (key_data, directions.number, directions.scale, coefficients)

        def write(kept: jax.Array, new: jax.Array) -> jax.Array:
            row = jnp.zeros(kept.shape[1:], kept.dtype)
            row = row.at[: len(new)].set(new.astype(kept.dtype))
            return kept.at[index].set(row)

        return StepHistory(*map(write, self, step))

    def weighted(
        self, weights: jax.Array, like: Direction
    ) -> tuple[jax.Array, Direction]:
        """Returns coefficients times the weights of their steps, and the directions.

        Args:
          weights: The weights of the steps, [H].
          like: The directions of a step, stacked: [K].

        Returns:
          Arrays and directions, stacked: [H · K].
        """
        key_data, number, scale, coefficient = (
            x[:, : len(like.scale)].reshape(-1, *x.shape[2:]) for x in self
        )
        key = jax.random.wrap_key_data(key_data, impl=jax.random.key_impl(like.key))
        repeated = jnp.repeat(weights, len(like.scale))
        directions = Direction(key, number, scale, like.distribution)
        return repeated * coefficient, directions


class FactoredMoment(NamedTuple):
    """The second moment of a stack of matrices, by its means.

    Attributes:
      rows: R, the means over the columns: of the leaf's shape, with size 1 along the
        last axis.
      columns: C, the means over the rows: with size 1 along the axis before it.
    """

    rows: jax.Array
    columns: jax.Array

    @classmethod
    def of_squares(cls, x: jax.Array, shape: tuple[int, ...]) -> "FactoredMoment":
        """Returns the shares of a block x of a leaf in the means of its squares.

        The shares of all blocks add up to the means.
        """
        means = (jnp.sum(x * x, i, keepdims=True) / shape[i] for i in (-1, -2))
        return cls(*means)

    @property
    def mean(self) -> jax.Array:
        """The mean of the second moment of each matrix."""
        return jnp.mean(self.rows, axis=-2, keepdims=True)

    def product(self, mean: jax.Array) -> jax.Array:
        """Returns R_i C_j / mean(R), zero if all are zero."""
        return self.rows * (self.columns / jnp.where(mean > 0, mean, 1))


class ScaleByReplayedMomentsState(NamedTuple):
    """State of `scale_by_replayed_radazo`.

    Attributes:
      count: The number of updates so far: int32, shape ().
      history: The coefficients and directions of the latest steps.
      nu: The second moment v, a tree like the parameters: a `FactoredMoment` for each
        leaf of matrices, else an array like the leaf; at least float32.
    """

    # `count` is the name that Optax's states have; it hides a method of tuple.
    count: jax.Array  # type: ignore[assignment]
    history: StepHistory
    nu: Any


@checks.checks_names
def scale_by_replayed_radazo(
    window: int = 64,
    b1: jax.typing.ArrayLike = 0.9,
    b2: jax.typing.ArrayLike = 0.99,
    eps_root: jax.typing.ArrayLike = 1e-8,
    initial_accumulator_value: jax.typing.ArrayLike = 0.0,
    bias_correction: bool = False,
    max_directions: int = 64,
) -> GradientTransformationExtraArgs:
    """Rescales updates by R-AdaZO without storing the first moment.

    A zeroth-order gradient is a combination Σₖ cₖ uₖ of K random directions, and each
    direction can be drawn again from its key. So is the first moment a combination: of
    the directions of all steps so far. This transformation keeps the coefficients and
    the keys of the latest H steps, the window, and draws their directions again in
    each update:

        m_t = (1 − β₁) Σ_{0≤j<H} β₁ʲ Σₖ c_{t−j,k} u_{t−j,k}

    The older steps are dropped. Their weight in m is β₁ᴴ, 0.1 % at the defaults.

    The second moment of a matrix is kept by its means over the rows and over the
    columns, R and C, two vectors per matrix:

        R_i ← β₂ R_i + (1 − β₂) mean_j m_ij²
        C_j ← β₂ C_j + (1 − β₂) mean_i m_ij²
        v_ij = R_i C_j / mean(R)
        u_t = m_t / √(v_t + ζ)

    The last two axes of a leaf form matrices, and the other axes stack them. The second
    moment of a leaf with fewer axes is kept whole, as by `scale_by_radazo`.

    Use it if the two moments of `scale_by_radazo` do not fit into memory. `solver`,
    `train` and `ask_tell` add its updates to the parameters block by block, so that the
    parameters are the only tree of their size.
    Each update draws the directions of H steps. `low_rank` draws few numbers for a
    direction, and m is one product of rank K · H per matrix. `rademacher` draws one
    word for 32 elements. The other distributions draw a number per element and
    direction, which takes longer than evaluating the loss.

    Args:
      window: H, the number of steps from which m is rebuilt, at least 2.
      b1: Decay rate β₁ of the first moment, in [0, 1).
      b2: Decay rate β₂ of the second moment, in [0, 1).
      eps_root: The constant ζ ≥ 0, inside the root, in units of the squared gradient.
      initial_accumulator_value: v₀ ≥ 0, the same for all coordinates.
      bias_correction: Whether to debias both moments, as `scale_by_radazo` does. The
        weights of the steps in the window then add up to 1.
      max_directions: The largest K for which the state has room.

    Returns:
      An `optax.GradientTransformationExtraArgs`, whose state is a
      `ScaleByReplayedMomentsState` and whose update is an `InPlaceUpdate`. It must come
      first in a chain, because it takes the gradient from the extra argument
      `combination` and ignores the updates that come in. `chain_in_place` adds learning
      rates and other transformations.

    Raises:
      ValueError: If `window` is less than 2, or another hyperparameter is out of its
        range; by the update, if a step has more directions than the state has room for.
      TypeError: If an argument is of another type; by the update, if there is no
        `combination`, as outside of `solver`, `train` and
        `estimate_gradient(inner=...)`, or if it is not one of directions alone.

    Warns:
      UserWarning: If β₁ᴴ is more than 5 %.

    Examples:
      >>> import jax, jax.numpy as jnp, optax
      >>> import radazo_jax as zo
      >>> optimizer = zo.chain_in_place(
      ...     zo.scale_by_replayed_radazo(), optax.scale_by_learning_rate(0.01)
      ... )
      >>> init, step = zo.solver(
      ...     lambda x: jnp.sum(x**2), optimizer, zo.forward_difference(zo.low_rank())
      ... )
      >>> state = init(jnp.ones((8, 4)), jax.random.key(0))
      >>> state, info = jax.jit(step)(state)
      >>> float(info.value)
      32.0

    References:
      Shu et al., Refining Adaptive Zeroth-Order Optimization at Ease, ICML 2025,
      algorithm 2.

      Shazeer and Stern, Adafactor: Adaptive Learning Rates with Sublinear Memory Cost,
      ICML 2018, algorithm 2.
    """
    given = Hyperparameters(
        b1, b2, eps_root, initial_accumulator_value, bias_correction
    )
    checks.check_int_at_least("window", window, 2)
    checks.check_int_at_least("max_directions", max_directions, 1)
    given.check()
    _warn_of_short_window(window, b1)

    def init(params: optax.Params) -> ScaleByReplayedMomentsState:
        leaves, treedef = jax.tree.flatten(params)
        nu = map(partial(_initial_moment, initial_accumulator_value), leaves)
        return ScaleByReplayedMomentsState(
            jnp.zeros((), jnp.int32),
            StepHistory.init(window, max_directions, widest(params)),
            # Means over rows are no arrays like the parameters, so that a tree without
            # leaves, in whose place Optax looks for such arrays, is not one of them.
            jax.tree.unflatten(treedef, nu) if leaves else jnp.zeros(()),
        )

    def apply(
        finish: Finish | None,
        state: ScaleByReplayedMomentsState,
        params: optax.Params | None = None,
        *,
        combination: LinearCombination | None = None,
        **extra_args: Tree,
    ) -> tuple[Tree, ScaleByReplayedMomentsState]:
        del extra_args
        return _walk(given, finish, params, state, combination)

    def update(
        updates: optax.Updates,
        state: ScaleByReplayedMomentsState,
        params: optax.Params | None = None,
        **kwargs: Tree,
    ) -> tuple[Tree, ScaleByReplayedMomentsState]:
        # The gradient is the combination, whatever has become of the updates. These may
        # be wider than the parameters.
        structures: list[Any] = [jax.tree.structure(x) for x in (updates, params)]
        if params is not None and structures[0] == structures[1]:
            params = jax.tree.map(
                lambda u, p: jnp.asarray(p).astype(u.dtype), updates, params
            )
        return apply(None, state, params, **kwargs)

    return optax.GradientTransformationExtraArgs(init, InPlaceUpdate(update, apply))


def _initial_moment(value: Tree, p: Tree) -> Tree:
    """Returns v₀ of a leaf: a `FactoredMoment` if it has matrices, else an array."""
    shape, dtype = jnp.shape(p), at_least_float32(jnp.result_type(p))
    value = scalar(value, dtype)
    if len(shape) < 2:
        return jnp.full_like(p, value, dtype)
    *stacked, rows, columns = shape
    sizes = (*stacked, rows, 1), (*stacked, 1, columns)
    return FactoredMoment(*(jnp.full(size, value, dtype) for size in sizes))


def _walk(
    given: Hyperparameters,
    finish: Finish | None,
    params: optax.Params,
    state: ScaleByReplayedMomentsState,
    combination: Tree,
) -> tuple[Tree, ScaleByReplayedMomentsState]:
    """Adds the updates to the parameters; without `finish`, returns the updates."""
    window, max_directions = state.history.coefficient.shape
    coefficients, latest = _check_combination(combination, max_directions)
    checks.require_arguments(params=params)
    index = state.count % window
    history = state.history.with_step(index, coefficients, latest)
    dtype = history.coefficient.dtype
    count = optax.safe_increment(state.count)
    ages = (index - jnp.arange(window, dtype=jnp.int32)) % window
    weights, nu_weight = _weights(given, ages, count, dtype)
    terms = history.weighted(weights, latest)

    def program(params: optax.Params, nu: Tree, *numbers: Tree) -> tuple[Tree, Tree]:
        update = partial(_of_leaf, given, combination.layout, finish)
        treedef: Any = jax.tree.structure(params)
        found = jax.tree_util.tree_leaves_with_path(params)
        pairs = zip(found, treedef.flatten_up_to(nu), strict=True)
        done = [update(path, p, moment, *numbers) for (path, p), moment in pairs]
        params = jax.tree.unflatten(treedef, [p for p, _ in done])
        return params, jax.tree.unflatten(treedef, [moment for _, moment in done])

    specs = specs_of((params, state.nu))
    params, nu = on_any_mesh(program, specs)(params, state.nu, terms, nu_weight)
    return params, ScaleByReplayedMomentsState(count, history, nu)


def _weights(
    given: Hyperparameters, ages: jax.Array, count: jax.Array, dtype: np.dtype
) -> tuple[jax.Array, jax.Array]:
    """Returns the weights in m of steps of these ages, [H], and the divisor of v."""
    decay_1, decay_2 = (
        jnp.asarray(scalar(b, dtype), dtype) for b in (given.b1, given.b2)
    )
    weights = (1 - decay_1) * decay_1 ** ages.astype(dtype)
    if not given.bias_correction:
        return weights, jnp.ones((), dtype)
    steps = jnp.minimum(count, len(ages)).astype(dtype)
    return weights / (1 - decay_1**steps), 1 - decay_2 ** count.astype(dtype)


def _of_leaf(
    given: Hyperparameters,
    layout: Layout,
    finish: Finish | None,
    path: Tree,
    p: jax.Array,
    nu: Tree,
    terms: tuple[jax.Array, Direction],
    nu_weight: jax.Array,
) -> tuple[jax.Array, Tree]:
    """Returns a leaf after the update, and its second moment.

    Args:
      given: The hyperparameters.
      layout: The layout of all parameters.
      finish: Applied to the updates before they are added to the parameters; if it
        is `None`, the updates replace the parameters.
      path: The path of the leaf.
      p: The leaf.
      nu: Its second moment.
      terms: The coefficients and the directions of m, stacked.
      nu_weight: The divisor of v: shape ().
    """
    leaf = _leaf(layout, path, p)
    if leaf.size == 0:
        return p, nu
    dtype, has_matrices = at_least_float32(p.dtype), p.ndim > 1

    def draw(block: Block) -> jax.Array:
        combine = partial(
            sums.combine_block, sizes=block.sizes, leaf=leaf, dimension=layout.dimension
        )
        coefficients, directions = terms
        return xla.compute_once(
            combine, coefficients.astype(dtype), directions, tuple(block.starts)
        )

    def add(block: Block, total: Tree) -> Tree:
        part = jax.tree.map(block.read, total)
        more = FactoredMoment.of_squares(draw(block), leaf.shape)
        return jax.tree.map(block.write, total, jax.tree.map(jnp.add, part, more))

    # If a matrix does not fit into a block, its means need a walk of their own.
    cut = has_matrices and sums.cuts(leaf.shape, p.ndim - 2)
    mean = None
    if cut:
        zeros = jax.tree.map(jnp.zeros_like, nu)
        nu = averaged(sums.for_each(leaf.shape, add, zeros), nu, given.b2)
        mean = nu.mean

    def step(block: Block, carry: tuple[jax.Array, Tree]) -> tuple[jax.Array, Tree]:
        p, nu = carry
        m = draw(block)
        v = jax.tree.map(block.read, nu)
        if not cut:
            x = FactoredMoment.of_squares(m, leaf.shape) if has_matrices else m * m
            v = averaged(x, v, given.b2)
            nu = jax.tree.map(block.write, nu, v)
        if has_matrices:
            v = v.product(v.mean if mean is None else block.read(mean))
        v = v / nu_weight.astype(dtype) + scalar(given.eps_root, dtype)
        u = (m * jax.lax.rsqrt(v)).astype(with_range(p.dtype))
        if finish is not None:
            before = block.read(p)
            at = generator.positions(
                leaf.shape, block.indices, leaf.offset, layout.dimension
            )
            u = finish(u, before, at).astype(p.dtype)
            u = optax.apply_updates(before, u)
        return block.write(p, u.astype(p.dtype)), nu

    return sums.for_each(leaf.shape, step, (p, nu))


def _leaf(layout: Layout, path: Tree, p: jax.Array) -> Leaf:
    """Returns the place of an array of the parameters among all coordinates."""
    name = jax.tree_util.keystr(path)
    for leaf in layout.leaves:
        if (leaf.path, leaf.shape) == (name, p.shape):
            return leaf
    raise ValueError(
        f"params{name} must be an array that the loss takes, of the same shape; got "
        f"shape {p.shape}. Wrappers that reshape parameters need stored moments."
    )


def _warn_of_short_window(window: int, b1: Tree) -> None:
    if isinstance(b1, jax.core.Tracer):
        return
    dropped = float(b1) ** window
    if dropped > _MUCH_DROPPED:
        enough = math.ceil(math.log(_MUCH_DROPPED) / math.log(float(b1)))
        checks.warn(
            f"window={window} drops {dropped:.0%} of the weight of the first moment at "
            f"b1={float(b1):g}. Pass window={enough} or more."
        )


def _check_combination(
    combination: object, max_directions: int
) -> tuple[jax.Array, Direction]:
    """Returns the coefficients and directions of a combination of directions alone.

    Raises:
      TypeError: If it is not one.
      ValueError: If there are more directions than a history has room for.
    """
    if not isinstance(combination, LinearCombination):
        raise TypeError(
            "combination must be passed to the update, as solver, train and "
            "estimate_gradient(inner=...) do, because replayed moments need the "
            f"directions of the gradient; got {shown.given(combination)}. Use them "
            "without optax.MultiSteps, with more directions per step instead."
            + checks.refer_to("scale_by_replayed_radazo")
        )
    coefficients, directions = combination.coefficients, combination.directions
    if combination.trees or coefficients is None or directions is None:
        raise TypeError(
            "combination must be a sum of directions alone; got one with "
            f"{len(combination.trees)} trees. Use stored moments with this estimator."
        )
    if len(coefficients) > max_directions:
        raise ValueError(
            "max_directions must be at least the number of directions per step, "
            f"{len(coefficients)}; got {max_directions}. Pass max_directions="
            f"{len(coefficients)}."
        )
    # Without stored elements, which the other steps do not have.
    drawn = Direction(
        directions.key, directions.number, directions.scale, directions.distribution
    )
    return coefficients, drawn
