"""Whether a transformation computes the same block by block as for a whole tree."""

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from radazo_jax._src import trees
from radazo_jax._src.directions.layout import layout_of
from radazo_jax._src.directions.sums import Block
from radazo_jax._src.numbers import counter
from radazo_jax._src.transforms import rounding

# Most leaves of a probe. Of a larger tree, the others are left out.
_MOST = 32

# The exponents of ten of the updates of a probe, beyond what is clipped.
_LEAST, _LARGEST = -3.0, 12.0


def probe_of(params: optax.Params) -> optax.Params:
    """Small parameters of the same structure, with `None` for most of many leaves."""
    leaves, treedef = jax.tree.flatten(params)
    rng = np.random.default_rng(0)
    every = -(-len(leaves) // _MOST)
    small = [
        None if i % every else _normal(rng, [min(n, 3) for n in jnp.shape(leaf)])
        for i, leaf in enumerate(leaves)
    ]
    return jax.tree.unflatten(treedef, small)


def is_by_blocks(
    other: optax.GradientTransformation, state: Any, params: optax.Params
) -> bool:
    """Whether a transformation computes the same for blocks of each leaf.

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
    """Large updates, others, and some of which one is NaN."""
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


def _normal(rng: np.random.Generator, shape: Any) -> np.ndarray:
    return np.asarray(rng.normal(size=shape), np.float32)


def _by_blocks(
    update: Callable[..., Any],
    updates: optax.Updates,
    state: Any,
    params: optax.Params,
) -> tuple[Any, Any]:
    """The updates of blocks, put together, and the state after updates of nothing."""
    layout, found = layout_of(params), []
    leaves = (layout.leaves, jax.tree.leaves(updates), jax.tree.leaves(params))
    for leaf, u, p in zip(*leaves, strict=True):
        together = jnp.zeros(leaf.shape, jnp.float32)
        for block in _blocks(leaf.shape):
            at = counter.positions(
                leaf.shape, block.indices, leaf.offset, layout.dimension
            )
            part, _ = update(block.read(u), state, block.read(p), positions=at)
            together = block.write(together, part)
        found.append(together)
    nothing = jax.tree.map(lambda p: jnp.zeros((0,), p.dtype), params)
    return found, update(nothing, state, nothing)[1]


def _blocks(shape: tuple[int, ...]) -> Iterator[Block]:
    """Blocks that cut the first axis and the last one."""
    cuts = [
        [(0, 1), (1, n - 1)] if n > 1 and axis in (0, len(shape) - 1) else [(0, n)]
        for axis, n in enumerate(shape)
    ]
    for block in itertools.product(*cuts):
        yield Block([start for start, _ in block], tuple(size for _, size in block))


def _are_equal(whole: Any, parts: Any) -> bool:
    """Whether the leaves of two trees are the same up to rounding."""
    leaves = [
        [trees.words(x) for x in jax.tree.leaves(tree)] for tree in (whole, parts)
    ]
    return len(leaves[0]) == len(leaves[1]) and all(
        np.allclose(x, y, rtol=1e-5, atol=0, equal_nan=True)
        for x, y in zip(*leaves, strict=True)
    )
