"""The arguments of a function that are parameters, by their positions."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from radazo_jax._src import shown


def check_argnums(argnums: Any) -> None:
    """Raises unless these are a position, or several."""
    several = isinstance(argnums, Sequence) and not isinstance(argnums, str)
    each = argnums if several and len(argnums) else [argnums]
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in each):
        raise TypeError(
            "argnums must be the position of the parameters among the arguments of "
            f"fun, or a tuple of positions; got {shown.given(argnums)}."
        )


def split(
    args: tuple[Any, ...], argnums: int | Sequence[int]
) -> tuple[Any, tuple[Any, ...]]:
    """The parameters, a tuple if there are several, and the other arguments."""
    if not args:
        return None, ()
    places = _places(argnums, len(args))
    others = tuple(x for i, x in enumerate(args) if i not in places)
    chosen = tuple(args[i] for i in places)
    return (chosen[0] if isinstance(argnums, int) else chosen), others


def _places(argnums: int | Sequence[int], size: int) -> list[int]:
    """The positions of the parameters among so many arguments, from 0."""
    each = [argnums] if isinstance(argnums, int) else list(argnums)
    if any(not -size <= i < size for i in each):
        raise ValueError(
            f"argnums must be positions of the {size} arguments of fun; got "
            f"{argnums!r}."
        )
    return [i % size for i in each]


def placed(
    fun: Callable[..., Any],
    argnums: int | Sequence[int],
    params: Any,
    *others: Any,
    **kwargs: Any,
) -> Any:
    """`fun` with the parameters at their positions."""
    chosen = [params] if isinstance(argnums, int) else list(params)
    places, args = _places(argnums, len(chosen) + len(others)), list(others)
    for i in np.argsort(places):
        args.insert(places[i], chosen[i])
    return fun(*args, **kwargs)
