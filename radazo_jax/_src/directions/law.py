"""What a law of random directions is, and the directions that laws sample.

A direction is a law, a key and a number, not an array: its elements are computed where
they are needed, from their positions. Positions run through the whole tree of
parameters, leaf after leaf, so that a direction does not depend on how the same
coordinates are cut into leaves, and no two leaves share their numbers.
"""

import abc
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, ClassVar, dataclass_transform

import jax
import jax.numpy as jnp

from radazo_jax._src.directions.held import Drawn, Held, Stored
from radazo_jax._src.directions.layout import Layout, Leaf, layout_of
from radazo_jax._src.numbers import counter, keys
from radazo_jax._src.numbers.counter import Positions
from radazo_jax._src.trees import STATIC


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Direction:
    """A random direction u, as the numbers from which it can be computed anywhere.

    A pytree of three scalars whatever the size of the parameters: it can be vmapped,
    scanned, sharded and stored.

    Attributes:
      key: The typed key of the draw, shape ().
      number: Which direction it is of those that share the key: uint32, shape ().
      scale: What the draw is multiplied by, float32, shape ().
      law: The law that sampled it; static.
      cached: The stored elements of each leaf, `None` if they are not stored.
    """

    key: jax.Array
    number: jax.Array
    scale: jax.Array
    law: "Law" = dataclasses.field(metadata=STATIC)
    cached: tuple[Held, ...] | None = None


@dataclass_transform(frozen_default=True)
@dataclasses.dataclass(frozen=True)
class Law(abc.ABC):
    """A distribution of directions u over all coordinates of a tree.

    Laws are centered and symmetric. A law of your own is a subclass with two methods,
    `factor` and `draw`. It becomes a frozen dataclass, so that laws with equal fields
    are equal and can be static under `jit`; fields must be hashable.

    Attributes:
      numbered: Whether the directions under one key depend on one another, as draws
        without replacement do. `draw` then gets the key that they share, and tells them
        apart by their number. Otherwise each direction has a key of its own.

    Raises:
      TypeError: When a subclass is defined whose instances could not be compared, or
        hashed: one with an `__init__` of its own, or an `__eq__` without a `__hash__`.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> import radazo_jax as zo
      >>> class Uniform(zo.Law):
      ...     width: float = 1.0
      ...
      ...     def factor(self, params):
      ...         return 3 / self.width**2
      ...
      ...     def draw(self, key, number, at):
      ...         return self.width * (2 * zo.random.uniform(key, at) - 1)
      >>> law, params = Uniform(0.5), jnp.zeros(4)
      >>> u = law.materialize(law.sample(0, params), params)
      >>> bool((abs(u) <= 0.5).all())
      True
    """

    numbered: ClassVar[bool] = False

    # Whether directions are divided by their norm.
    _normalized: ClassVar[bool] = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        own = cls.__dict__
        if "__init__" in own and not ("__eq__" in own and "__hash__" in own):
            raise TypeError(
                f"{cls.__name__} must be comparable by its fields, as a frozen "
                "dataclass is; got a law with an __init__ of its own, and without "
                "__eq__ and __hash__."
            )
        if "__eq__" in own and own.get("__hash__") is None:
            raise TypeError(
                f"{cls.__name__} must be hashable; got a law with __eq__ and without "
                "__hash__."
            )
        dataclasses.dataclass(frozen=True, eq="__eq__" not in own)(cls)

    @abc.abstractmethod
    def factor(self, params: Any) -> float:
        """The c of E[u uᵀ] = I / c, by which estimators multiply.

        Args:
          params: A tree of arrays, of which only the shapes are used.
        """

    @abc.abstractmethod
    def draw(self, key: jax.Array, number: jax.Array, at: Positions) -> jax.Array:
        """The elements of a direction at some positions, each from its position alone.

        Args:
          key: A typed key: the direction's own, or, under a law that is `numbered`, the
            one that it shares.
          number: The number of the direction: uint32, shape ().
          at: The positions, of any shape; `at.dimension` is d. `radazo_jax.random`
            draws numbers at them.

        Returns:
          The elements: float32, of the shape of the positions.
        """

    def sample(self, key: jax.typing.ArrayLike, params: Any) -> Direction:
        """Samples a direction for `params`.

        Args:
          key: A key; it is consumed.
          params: A tree of arrays, of which only the shapes are used.

        Returns:
          The direction, number 0 under the key.
        """
        layout = self._annotate(layout_of(params), params)
        return self._sample(keys.as_key(key), jnp.uint32(0), layout)

    def materialize(self, direction: Direction, params: Any) -> Any:
        """Computes all elements of `direction`.

        Args:
          direction: A direction that this law sampled.
          params: The tree of arrays it was sampled for.

        Returns:
          A tree like `params`, in the shapes and dtypes of its leaves.
        """
        layout = self._annotate(layout_of(params), params)
        return jax.tree.map(
            lambda u, p: u.astype(jnp.result_type(p)),
            jax.tree.unflatten(layout.treedef, elements(direction, layout)),
            params,
        )

    # How directions are drawn and stored: laws that know of a cheaper way than element
    # by element override what follows.

    def _annotate(self, layout: Layout, params: Any) -> Layout:
        """The layout with the axes that the law itself prescribes."""
        del params
        return layout

    def _sample(self, key: jax.Array, number: jax.Array, layout: Layout) -> Direction:
        del layout
        return Direction(key, number, jnp.ones((), jnp.float32), self)

    def _lazy(self, direction: Direction, leaf: Leaf, dimension: int) -> Held:
        """The elements of a leaf, unstored."""
        indices = tuple(counter.block(leaf.shape))
        key, number = direction.key, direction.number
        return Drawn(key, number, indices, self, leaf, dimension)

    def _whole(self, direction: Direction, leaf: Leaf, dimension: int) -> jax.Array:
        """All elements of a leaf at once, before they are scaled: float32."""
        return self._lazy(direction, leaf, dimension).values()

    def _numbers(self, direction: Direction, layout: Layout) -> Any:
        """What is stored of a direction whose elements are needed again."""
        return [
            self._whole(direction, leaf, layout.dimension) for leaf in layout.leaves
        ]

    def _held(self, numbers: Any, layout: Layout) -> tuple[Held, ...]:
        """What is stored, leaf by leaf."""
        del layout
        return tuple(Stored(of_leaf) for of_leaf in numbers)

    def _inverse_norm(self, held: Sequence[Held]) -> jax.Array:
        """One over the norm of all elements, of a law that is normalized."""
        raise NotImplementedError

    def _num_stored(self, leaf: Leaf) -> int:
        """How many numbers make the elements of a leaf."""
        return leaf.size


class UnitNorm(Law):
    """Laws of directions of norm 1, for which E[u uᵀ] = I/d."""

    def factor(self, params: Any) -> float:
        return float(layout_of(params).dimension)


# Compiled as a whole where it is called outside of any jit; part of the program where
# there is one.
@functools.partial(jax.jit, static_argnames="layout", inline=True)
def elements(direction: Direction, layout: Layout) -> list[jax.Array]:
    """All elements of `direction`, leaf by leaf, scaled: float32."""
    if direction.cached is not None:
        return [direction.scale * held.values() for held in direction.cached]
    return [
        direction.scale * direction.law._whole(direction, leaf, layout.dimension)
        for leaf in layout.leaves
    ]
