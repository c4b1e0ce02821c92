"""Short texts for what holds large arrays: their dtypes and shapes, and few numbers.

They read no array but scalars, and work on what has no values: traced arrays,
`jax.ShapeDtypeStruct`, and arrays that were deleted or lie on other processes.
"""

import contextlib
import re
import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax
import numpy as np

from radazo_jax._src.base.trees import Tree, size

_LEAVES = 4  # The leaves of a tree that are listed.
_NUMBERS = 10  # The elements of a tree whose numbers are listed.
_LENGTH = 80  # The characters of anything else.


def on_a_line(named: object, **fields: str) -> str:
    """Returns the text of a NamedTuple on one line, from the texts of its fields."""
    return f"{type(named).__name__}({', '.join(_fields(fields))})"


def on_lines(named: object, **fields: str) -> str:
    """Returns the text of a NamedTuple with a line per field, from their texts."""
    inner = "".join(f"  {field},\n" for field in _fields(fields))
    return f"{type(named).__name__}(\n{inner})"


def part(x: object) -> str:
    """Returns a method or an estimator in words, the same in each process."""
    text = getattr(x, "__qualname__", None) or " ".join(repr(x).split())
    return re.sub(r" at 0x[0-9a-f]+", "", text)


def tree(x: Tree) -> str:
    """Returns dtypes and shapes of a tree, such as "{w: float32[3, 4], b: int8[4]}"."""
    return _listed(x, _leaf, _LEAVES)


def given(x: object) -> str:
    """Returns an argument on a line: as it is written, or the shapes of arrays."""
    with contextlib.suppress(TypeError, ValueError):  # Python's objects are no trees.
        if any(np.ndim(leaf) for leaf in jax.tree.leaves(x)) and size(x) > _NUMBERS:
            return tree(x)
    text = " ".join(repr(x).split())
    return text if len(text) <= _LENGTH else f"{text[: _LENGTH - 1]}…"


def params(x: Tree) -> str:
    """Returns the numbers of a tree if they are few and known here, else its shapes."""
    leaves = jax.tree.leaves(x)
    few = size(x) <= _NUMBERS
    if not (leaves and few and all(map(_is_known, leaves))):
        return tree(x)
    return _listed(x, lambda leaf: _numbers(np.asarray(leaf)), len(leaves))


def _listed(x: Tree, of_leaf: Callable[[Tree], str], most: int) -> str:
    """Returns the texts of at most so many leaves of a tree, with their places."""
    leaves = jax.tree_util.tree_leaves_with_path(x)
    if x is None or jax.tree_util.all_leaves([x]):
        return of_leaf(x)
    listed = [
        f"{jax.tree_util.keystr(path, simple=True, separator='.')}: {of_leaf(leaf)}"
        for path, leaf in leaves[:most]
    ]
    if len(leaves) > most:
        listed.append(f"{len(leaves) - most} more")
    return "{" + ", ".join(listed) + "}"


def _numbers(array: np.ndarray) -> str:
    """Returns the numbers of an array, in nested brackets."""
    if array.ndim == 0:
        return f"{float(array):.6g}"
    return f"[{', '.join(map(_numbers, array))}]"


def count(x: Tree) -> str:
    """Returns the number of arrays in a tree."""
    arrays = len(jax.tree.leaves(x))
    return "1 array" if arrays == 1 else f"{arrays} arrays"


def some_names(found: Sequence[str]) -> str:
    """Returns the first names of several."""
    more = [f"{len(found) - _LEAVES} more"] if len(found) > _LEAVES else []
    return f"[{', '.join([*found[:_LEAVES], *more])}]"


def number(x: object) -> str:
    """Returns a scalar, or its dtype and shape if it has no value here."""
    if isinstance(x, jax.Array) and not _is_known(x):
        return _leaf(x)
    if isinstance(x, jax.Array | np.ndarray | np.generic | float) and np.ndim(x) == 0:
        value = np.asarray(x).item()
        return f"{value:.6g}" if isinstance(value, float) else str(value)
    return tree(x)


def _is_known(x: object) -> bool:
    """Returns whether an array has its values in this process."""
    if isinstance(x, jax.core.Tracer) or not isinstance(x, jax.Array):
        return isinstance(x, np.ndarray | np.generic)
    return not x.is_deleted() and x.is_fully_addressable


def series(x: Sequence[float] | np.ndarray, of: str = "steps") -> str:
    """Shows a vector of numbers, as "8 to 0.002 in 300 steps, lowest 0.001 at 280"."""
    if not (isinstance(x, np.ndarray) and x.ndim == 1 and x.size):
        return tree(x)
    text = f"{x[0]:.6g} to {x[-1]:.6g} in {x.size} {of}"
    i = int(np.argmin(np.where(np.isfinite(x), x, np.inf)))
    return f"{text}, lowest {x[i]:.6g} at {i}" if x[i] < x[-1] else text


def _leaf(x: object) -> str:
    if hasattr(x, "dtype") and hasattr(x, "shape"):
        return f"{x.dtype}{list(x.shape)}"
    return reprlib.repr(x)


def _fields(fields: Mapping[str, str]) -> Iterator[str]:
    return (f"{name}={text}" for name, text in fields.items())
