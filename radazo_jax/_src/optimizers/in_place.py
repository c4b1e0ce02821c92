"""Updates of an optimizer block by block, in the memory of the parameters."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from radazo_jax._src.base import shown, trees
from radazo_jax._src.base.names import checks_names
from radazo_jax._src.base.trees import Tree
from radazo_jax._src.directions import generator
from radazo_jax._src.directions.generator import Positions
from radazo_jax._src.directions.layout import layout_of
from radazo_jax._src.directions.sums import Block
from radazo_jax._src.estimates.contracts import GradientTransformationExtraArgs
from radazo_jax._src.optimizers import rounding

# Most leaves of a probe. Of a larger tree, the others are left out.
_MOST = 32

# The exponents of ten of the updates of a probe, beyond what is clipped.
_LEAST, _LARGEST = -3.0, 12.0


def probe_of(params: optax.Params) -> optax.Params:
    """Returns small parameters of a structure, with `None` for most of many leaves."""
    leaves, treedef = jax.tree.flatten(params)
    rng = np.random.default_rng(0)
    every = -(-len(leaves) // _MOST)
    small = [
        None if i % every else _normal(rng, [min(n, 3) for n in jnp.shape(leaf)])
        for i, leaf in enumerate(leaves)
    ]
    return jax.tree.unflatten(treedef, small)


def is_by_blocks(
    other: optax.GradientTransformation, state: optax.OptState, params: optax.Params
) -> bool:
    """Returns whether a transformation computes the same for blocks of each leaf.

    Args:
      other: The transformation.
      state: Its state.
      params: A probe.

    Returns:
      Whether three updates and the states after them are the same, or are not known:
      if they are traced, or if the transformation refuses the whole tree.
    """
    if isinstance(state, rounding.StochasticRoundingState):
        return True  # It draws by position, and takes long to compile.
    update = optax.with_extra_args_support(other).update
    args: dict[str, Any] = dict.fromkeys(("grad", "value_fn", "combination"))
    update = functools.partial(
        update, **args, value=jnp.float32(1), slope=jnp.float32(1)
    )
    whole, parts = jax.jit(update), jax.jit(functools.partial(_by_blocks, update))
    with jax.ensure_compile_time_eval(), np.errstate(all="ignore"):
        for updates in _updates(params):
            try:
                if trees.is_traced(state):
                    state = other.init(params)
                expected = whole(updates, state, params)
            except Exception:
                return True
            if trees.is_traced(expected):
                return True
            try:
                found = parts(updates, state, params)
            except Exception:
                return False
            if not _are_equal(expected, found):
                return False
            state = expected[1]
    return True


def _updates(params: optax.Params) -> Iterator[optax.Updates]:
    """Returns large updates, others, and some of which one is NaN."""
    rng = np.random.default_rng(1)

    def drawn(p: np.ndarray) -> np.ndarray:
        sizes = 10 ** rng.uniform(_LEAST, _LARGEST, p.shape)
        return np.asarray(_normal(rng, p.shape) * sizes, np.float32)

    yield jax.tree.map(drawn, params)
    yield jax.tree.map(drawn, params)
    leaves, treedef = jax.tree.flatten(jax.tree.map(drawn, params))
    for leaf in leaves[:1]:
        leaf.flat[:1] = np.nan
    yield jax.tree.unflatten(treedef, leaves)


def _normal(rng: np.random.Generator, shape: Sequence[int]) -> np.ndarray:
    return np.asarray(rng.normal(size=shape), np.float32)


def _by_blocks(
    update: Callable[..., Tree],
    updates: optax.Updates,
    state: optax.OptState,
    params: optax.Params,
) -> tuple[Tree, Tree]:
    """Returns the joined updates of blocks, and the state after updates of nothing."""
    layout, found = layout_of(params), []
    leaves = (layout.leaves, jax.tree.leaves(updates), jax.tree.leaves(params))
    for leaf, u, p in zip(*leaves, strict=True):
        together = jnp.zeros(leaf.shape, jnp.float32)
        for block in _blocks(leaf.shape):
            at = generator.positions(
                leaf.shape, block.indices, leaf.offset, layout.dimension
            )
            part, _ = update(block.read(u), state, block.read(p), positions=at)
            together = block.write(together, part)
        found.append(together)
    nothing = jax.tree.map(lambda p: jnp.zeros((0,), p.dtype), params)
    return found, update(nothing, state, nothing)[1]


def _blocks(shape: tuple[int, ...]) -> Iterator[Block]:
    """Returns blocks that cut the first axis and the last one."""
    cuts = [
        [(0, 1), (1, n - 1)] if n > 1 and axis in (0, len(shape) - 1) else [(0, n)]
        for axis, n in enumerate(shape)
    ]
    for block in itertools.product(*cuts):
        yield Block([start for start, _ in block], tuple(size for _, size in block))


def _are_equal(whole: Tree, parts: Tree) -> bool:
    """Returns whether the leaves of two trees are the same up to rounding."""
    leaves = [
        [trees.key_words(x) for x in jax.tree.leaves(tree)] for tree in (whole, parts)
    ]
    return len(leaves[0]) == len(leaves[1]) and all(
        np.allclose(x, y, rtol=1e-5, atol=0, equal_nan=True)
        for x, y in zip(*leaves, strict=True)
    )


# Of the updates and the parameters of a block, and its positions, to its updates.
Finish = Callable[[jax.Array, jax.Array, Positions], jax.Array]


@dataclasses.dataclass(frozen=True)
class InPlaceUpdate:
    """An update function that can also add its updates to the parameters.

    A tree of updates takes as much memory as the parameters. A transformation that
    computes its updates block by block does not need one, if it adds each block to the
    parameters itself. Its `update` is an object of this class, which Optax calls like
    any update function. `solver` finds the class and calls `apply` instead.

    Attributes:
      update: `update(updates, state, params, **extra_args) -> (updates, state)`, as in
        Optax.
      apply: `apply(finish, state, params, **extra_args) -> (params, state)` adds the
        updates to the parameters. It replaces the updates u of each block by
        `finish(u, p, positions)`, with the parameters p of the block and the positions
        of its elements.
    """

    update: Callable[..., tuple[Any, Any]]
    apply: Callable[..., tuple[Any, Any]]

    def __call__(
        self,
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params = None,
        **extra_args: Tree,
    ) -> tuple[Tree, Tree]:
        """Returns a tree of updates, and the state after them."""
        return self.update(updates, state, params, **extra_args)


@checks_names
def chain_in_place(
    first: optax.GradientTransformation, *others: optax.GradientTransformation
) -> GradientTransformationExtraArgs:
    """Chains transformations that work element by element onto one that works in place.

    `optax.chain` passes a tree of updates from one transformation to the next. If the
    first one can add its updates to the parameters block by block, as
    `scale_by_replayed_radazo` can, this chain applies the others to each block, so
    that `solver` and `train` never hold a tree of updates. It computes what
    `optax.chain` computes, and everywhere else it is one.

    Use it for learning rates, schedules, weight decay and `stochastic_rounding`. A
    transformation that mixes elements, such as `optax.clip_by_global_norm`, or that
    needs the whole tree, such as `optax.add_noise` or one with a mask, must be chained
    by `optax.chain`. `init` compares updates of small arrays, and refuses the others.

    Args:
      first: A transformation whose update is an `InPlaceUpdate`, such as
        `scale_by_replayed_radazo()` or `radazo(1e-3, moments="replayed")`.
      *others: Transformations that work element by element. Their states must not
        grow with the parameters.

    Returns:
      The chain; its update is an `InPlaceUpdate`.

    Raises:
      TypeError: If `first` cannot update in place.
      ValueError: In `init`, if another one does not work element by element, or has a
        state that grows with the parameters.

    Examples:
      >>> import jax, jax.numpy as jnp, optax
      >>> import radazo_jax as zo
      >>> optimizer = zo.chain_in_place(
      ...     zo.scale_by_replayed_radazo(),
      ...     optax.add_decayed_weights(1e-4),
      ...     optax.scale_by_learning_rate(optax.linear_schedule(0.02, 0.0, 300)),
      ... )
      >>> result = zo.train(
      ...     lambda x: jnp.sum(x**2),
      ...     jnp.ones((8, 4)),
      ...     optimizer,
      ...     zo.forward_difference(),
      ...     num_steps=300,
      ...     key=0,
      ...     progress=False,
      ... )
      >>> bool(result.values[-1] < 0.1 * result.values[0])
      True
    """
    in_place = first.update
    if not isinstance(in_place, InPlaceUpdate):
        raise TypeError(
            "first must update in place, as scale_by_replayed_radazo() does; got "
            f"{shown.given(first)}. Chain others by optax.chain."
        )
    if not others:
        return first
    chained = optax.chain(first, *others)
    rest = optax.chain(*others)
    checked: list[Any] = []  # The structures and shapes of the parameters so far.

    def init(params: optax.Params) -> Tree:
        state = chained.init(params)
        sizes = [jnp.size(x) for x in jax.tree.leaves(state[1:])]
        if max(sizes, default=1) > 1:
            raise ValueError(
                "others must work element by element, with states of single numbers; "
                f"got a state of {max(sizes)} numbers. Chain them by optax.chain."
            )
        shapes = [jnp.shape(x) for x in jax.tree.leaves(params)]
        kind = jax.tree.structure(params), shapes
        if kind not in checked:
            _check_blocks(others, state[1:], params)
            checked.append(kind)
        return state

    def apply(
        finish: Finish, state: optax.OptState, params: optax.Params, **extra_args: Tree
    ) -> tuple[optax.Params, Tree]:
        rounds = rounding.is_in(state)

        def one(u: jax.Array, p: jax.Array, positions: Positions) -> jax.Array:
            args = {**extra_args, "positions": positions}
            if not rounds and trees.with_range(p.dtype) != p.dtype:
                u = u.astype(p.dtype)  # As the tree of updates would have it.
            u, _ = rest.update(u, state[1:], p, **args)
            return finish(u, p, positions)

        params, first_state = in_place.apply(one, state[0], params, **extra_args)
        # Their states do not depend on the updates, of which none are needed.
        nothing = jax.tree.map(lambda p: jnp.zeros((0,), p.dtype), params)
        _, after = rest.update(nothing, state[1:], nothing, **extra_args)
        return params, (first_state, *after)

    return optax.GradientTransformationExtraArgs(
        init, InPlaceUpdate(chained.update, apply)
    )


def _check_blocks(
    others: Sequence[optax.GradientTransformation], states: Tree, params: optax.Params
) -> None:
    """Raises if a transformation computes otherwise for blocks than for the tree."""
    probe = probe_of(params)
    for other, state in zip(others, states, strict=True):
        if not is_by_blocks(other, state, probe):
            names = (
                shown.part(f).partition(".")[0] for f in (other.update, other.init)
            )
            name = next(x for x in names if x != "with_extra_args_support")
            raise ValueError(
                f"others must work element by element; got {name}, which computes "
                "something else for parts of the parameters. Chain it by optax.chain."
            )


def keep_update(u: jax.Array, p: jax.Array, positions: Positions) -> jax.Array:
    """Returns the updates of a block as they are."""
    del p, positions
    return u
