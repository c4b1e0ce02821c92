"""Trees of arrays, and of which some leaves are arrays."""

import dataclasses
import math
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

Tree: TypeAlias = Any  # A pytree, or a leaf of one.

# Of the fields of a dataclass that is a pytree, those that are no arrays.
STATIC = {"static": True}


@dataclasses.dataclass(frozen=True, eq=False)
class Static:
    """A tree without its arrays, which can be hashed, and so be static under `jit`.

    What it holds is compared as Python does, or by identity if it has no hash.

    Attributes:
      treedef: The structure of the tree.
      others: Its leaves, with `None` instead of arrays.
      is_array: Whether a leaf is an array.
    """

    treedef: Any
    others: tuple[Any, ...]
    is_array: tuple[bool, ...]

    def merge(self, arrays: list[Tree]) -> Tree:
        """Returns the tree with these arrays."""
        found = iter(arrays)
        leaves = [
            next(found) if is_array else other
            for other, is_array in zip(self.others, self.is_array, strict=True)
        ]
        return jax.tree.unflatten(self.treedef, leaves)

    def _compared(self) -> tuple[Hashable, ...]:
        others = tuple(x if has_hash(x) else id(x) for x in self.others)
        return self.treedef, others, self.is_array

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Static) and self._compared() == other._compared()

    def __hash__(self) -> int:
        return hash(self._compared())


def partition(
    tree: Tree, kinds: type | tuple[type, ...] = (jax.Array, np.ndarray)
) -> tuple[list[Tree], Static]:
    """Splits a tree into its arrays, JAX's and NumPy's by default, and the rest."""
    return partition_by(lambda leaf: isinstance(leaf, kinds), tree)


def partition_by(
    holds: Callable[[Tree], bool], tree: Tree
) -> tuple[list[Tree], Static]:
    """Splits a tree into leaves for which `holds`, and all else in it."""
    leaves, treedef = jax.tree.flatten(tree)
    if not has_hash(treedef):
        leaves, treedef = [tree], jax.tree.structure(0)
    is_array = tuple(map(holds, leaves))
    pairs = list(zip(leaves, is_array, strict=True))
    others = tuple(None if held else leaf for leaf, held in pairs)
    return [leaf for leaf, held in pairs if held], Static(treedef, others, is_array)


def is_kept(x: object) -> bool:
    """Returns whether JAX keeps an array: its own, or NumPy's of a dtype it has now.

    It would round 64 bits that are not enabled, and has no strings, objects or dates.
    """
    if type(x) is not np.ndarray:
        return isinstance(x, jax.Array)
    try:
        return bool(jax.typeof(x).dtype == x.dtype)
    except TypeError:
        return False


def is_sharded(x: object) -> bool:
    """Returns whether this is a known array that lies on several devices in parts."""
    if not isinstance(x, jax.Array) or is_traced(x):
        return False
    return not x.sharding.is_fully_replicated


def as_arrays(tree: Tree) -> Tree:
    """Returns the tree with arrays for leaves, of dtypes that sums with arrays have.

    A Python float becomes a float32 that is not weakly typed.
    """

    def as_array(x: jax.typing.ArrayLike) -> jax.Array:
        # On CPUs `asarray` may share the memory of a NumPy array, and its owner may
        # write to it later.
        convert = jnp.array if isinstance(x, np.ndarray) else jnp.asarray
        return convert(x, jnp.result_type(x))

    return jax.tree.map(as_array, tree)


def as_numpy(tree: Tree) -> Tree:
    """Returns a copy of a tree in NumPy arrays; typed keys are JAX's alone."""

    def of_leaf(x: Tree) -> Tree:
        is_key = jnp.issubdtype(jnp.result_type(x), jax.dtypes.extended)
        return jnp.copy(x) if is_key else np.array(x)

    return jax.tree.map(of_leaf, tree)


def key_words(x: Tree) -> Tree:
    """Returns the words of a typed key; anything else as it is."""
    is_key = jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key)
    return jax.random.key_data(x) if is_key else x


def of_key_words(x: Tree, like: Tree) -> Tree:
    """Reverts `key_words`, to a key of the kind of another."""
    is_key = jnp.issubdtype(jnp.result_type(like), jax.dtypes.prng_key)
    return jax.random.wrap_key_data(x, impl=jax.random.key_impl(like)) if is_key else x


def with_float64(tree: Tree) -> Tree:
    """Replaces Python's floats by NumPy's float64, which are the same numbers."""
    return jax.tree.map(lambda x: np.float64(x) if type(x) is float else x, tree)


def has_hash(x: object) -> bool:
    try:
        hash(x)
    except TypeError:
        return False
    return True


def at_least_float32(dtype: jax.typing.DTypeLike) -> jnp.dtype:
    """Returns `dtype`, or float32 for the floating-point types narrower than it.

    Written without `jnp.promote_types`, which refuses bfloat16 with float32 under
    strict promotion.
    """
    dtype = jnp.dtype(dtype)
    return dtype if dtype.itemsize >= 4 else jnp.dtype(jnp.float32)


def with_range(dtype: jax.typing.DTypeLike) -> jnp.dtype:
    """Returns `dtype`, or float32 if it loses small numbers which float32 has."""
    narrow = jnp.finfo(dtype).minexp > jnp.finfo(jnp.float32).minexp
    return jnp.dtype(jnp.float32 if narrow else dtype)


def rounding(value: jax.typing.ArrayLike) -> float:
    """Returns the part of a loss that its rounding may change: 32 units of it.

    Smaller differences of losses are not measured, but made by rounding.
    """
    dtype = jnp.result_type(value)
    if not jnp.issubdtype(dtype, jnp.floating):
        dtype = jnp.float32
    return 32 * float(jnp.finfo(dtype).eps)


def wide(x: jax.Array) -> jax.Array:
    """Returns the array, in float32 if its dtype is narrower."""
    return x.astype(at_least_float32(x.dtype))


def widest(tree: Tree) -> jnp.dtype:
    """Returns the widest dtype of the leaves, but at least float32."""
    dtypes = [jnp.dtype(jnp.result_type(leaf)) for leaf in jax.tree.leaves(tree)]
    # Optax reads the structure of a state from a tree without leaves.
    narrowest = jnp.dtype(jnp.float32)
    return max(
        map(at_least_float32, dtypes), key=lambda x: x.itemsize, default=narrowest
    )


def size(tree: Tree) -> int:
    """Returns the number of elements of all leaves, which may be abstract."""
    return sum(math.prod(jnp.shape(leaf)) for leaf in jax.tree.leaves(tree))


def copies(tree: Tree) -> Tree:
    """Returns a tree of copies; abstract arrays are as they are."""

    def of_leaf(x: Tree) -> Tree:
        if isinstance(x, jax.ShapeDtypeStruct):
            return x
        if is_traced(x) or not isinstance(x, jax.Array) or not x.is_fully_addressable:
            return jnp.array(x)
        # Other copies are compiled, once for each shape.
        return of_key_words(jax.device_put(key_words(x), may_alias=False), x)

    return jax.tree.map(of_leaf, tree)


def as_scalar(value: float, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Returns a known number as an array of shape (), which no program has to make."""
    return jax.device_put(np.asarray(value, dtype))


def filled(value: Tree, tree: Tree) -> Tree:
    """Returns a number as a tree like another one; a tree as it is."""
    # NumPy is asked last: it cannot read a tree of traced arrays.
    if jax.tree_util.all_leaves([value]) and np.ndim(value) == 0:
        return jax.tree.map(lambda _: value, tree)
    return value


def is_traced(tree: Tree) -> bool:
    """Returns whether a tree holds arrays that are not known yet."""
    return any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(tree))


def has_x64() -> bool:
    """Returns whether 64 bits are enabled in JAX."""
    return bool(jnp.zeros(0).dtype == np.float64)


def precision_of(tree: Tree) -> AbstractContextManager[object]:
    """Returns a context in which JAX keeps the precision of a tree's arrays."""
    dtypes = [getattr(leaf, "dtype", None) for leaf in jax.tree.leaves(tree)]
    if any(dtype == np.float64 for dtype in dtypes):
        return jax.enable_x64(True)
    return nullcontext()


def norm(tree: Tree, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Returns the Euclidean norm of a tree."""
    squares = (jnp.sum(wide(jnp.asarray(x)) ** 2) for x in jax.tree.leaves(tree))
    return jnp.sqrt(sum((x.astype(dtype) for x in squares), jnp.zeros((), dtype)))


def checksum(tree: Tree) -> jax.Array:
    """Returns a number that tells whether two trees are equal to the last bit: uint32.

    A sum of integers, which does not depend on its order.
    """
    total = jnp.zeros((), jnp.uint32)
    for leaf in jax.tree.leaves(tree):
        bits = jax.lax.bitcast_convert_type(leaf, f"uint{jnp.finfo(leaf.dtype).bits}")
        if leaf.dtype.itemsize == 8:
            bits = bits ^ (bits >> 32)
        bits = bits.astype(jnp.uint32)
        # Odd multipliers, so that no change of a single element is lost.
        weights = jnp.ones((), jnp.uint32)
        for axis, size in enumerate(leaf.shape):
            place = jax.lax.broadcasted_iota(jnp.uint32, leaf.shape, axis)
            weights = weights * np.uint32(max(size, 1)) + place
        hashed = jnp.sum(bits * (2 * weights + 1), dtype=jnp.uint32)
        total = total * np.uint32(31) + hashed
    return total


checksum_of = jax.jit(checksum)
