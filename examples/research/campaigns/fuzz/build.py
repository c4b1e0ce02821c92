"""Puts programs together, statement after statement, each of a known type."""

import dataclasses
import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .program import NAMES, Block, Program, Statement, Value, literal, typename

# Few shapes, so that operations that were compiled once are met again.
SHAPES = [(), (3,), (2, 3), (3, 3), (0,), (1, 3), (2, 3, 3), (3, 2), (1,), (2, 0, 3)]
WEIGHTS = [3, 8, 10, 10, 1, 3, 5, 4, 1, 1]
LARGEST, DEEPEST = 64, 5

FLOATS = ("float32", "float16", "bfloat16", "float64")
COMPLEX = ("complex64", "complex128")
INEXACT = (*FLOATS, *COMPLEX)
SIGNED = ("int32", "int8", "int16", "int64")
UNSIGNED = ("uint32", "uint8", "uint16", "uint64")
INTS = (*SIGNED, *UNSIGNED)
REAL = (*FLOATS, *INTS)
NUMBERS = (*REAL, *COMPLEX)
ALL = (*NUMBERS, "bool")
_64_BITS = ("float64", "complex128", "int64", "uint64")


@dataclasses.dataclass(frozen=True)
class Maker:
    """Makes statements of one primitive; `None` if JAX refuses what it tried."""

    primitive: str
    kind: str
    make: Callable[["Builder"], Any]


MAKERS: dict[str, Maker] = {}


def maker(kind: str, *primitives: str) -> Callable[[Any], Any]:
    """Registers a function of a `Builder`."""

    def register(make: Any) -> Any:
        for primitive in primitives:
            MAKERS[primitive] = Maker(primitive, kind, make)
        return make

    return register


class Builder:
    """The statements of a function that grows, and the variables it can read."""

    def __init__(
        self,
        rng: random.Random,
        wide: bool = False,
        kinds: dict[str, float] | None = None,
        parent: "Builder | None" = None,
    ):
        self.rng, self.wide, self.kinds = rng, wide, kinds or KINDS
        self.depth = parent.depth + 1 if parent else 0
        self.values: list[Value] = list(parent.values) if parent else []
        self.statements: list[Statement] = []
        self.params: list[tuple[Value, str]] = []
        self._count: list[int] = parent._count if parent else [0]

    # --- Variables ----------------------------------------------------------------

    def fresh(self, letter: str = "v") -> str:
        self._count[0] += 1
        return f"{letter}{self._count[0]}"

    def param(self, shape: tuple[int, ...], dtype: str) -> Value:
        value = Value(self.fresh("p"), shape, jnp.dtype(dtype), True)
        self.params.append((value, literal(self.numbers(shape, dtype, odd=0.05))))
        self.values.append(value)
        return value

    def shape(self) -> tuple[int, ...]:
        return self.rng.choices(SHAPES, WEIGHTS)[0]

    def dtype(self, among: Sequence[str] = ALL) -> str:
        """The first ones are met most often."""
        among = [name for name in among if self.wide or name not in _64_BITS]
        weights = [6 if i == 0 else 1 for i in range(len(among))]
        return self.rng.choices(among, weights)[0]

    def numbers(self, shape: tuple[int, ...], dtype: str, odd: float = 0.0) -> Any:
        """Multiples of 1/8 between -2 and 2, or small integers; `odd` ones seldom."""
        rng, size = self.rng, math.prod(shape)
        dtype = jnp.dtype(dtype)
        if dtype.kind == "b":
            values: list[Any] = [rng.random() < 0.5 for _ in range(size)]
        elif jnp.issubdtype(dtype, jnp.integer):
            low = -3 if jnp.issubdtype(dtype, jnp.signedinteger) else 0
            values = [rng.randint(low, 4) for _ in range(size)]
        else:
            # Not zero: p + 0 · u has its own sign of zero.
            values = [rng.choice((-1, 1)) * rng.randint(1, 16) / 8 for _ in range(size)]
            if size and rng.random() < odd:
                values[rng.randrange(size)] = rng.choice(
                    (math.inf, -math.inf, math.nan, 1e30, 1e-30)
                )
            if jnp.issubdtype(dtype, jnp.complexfloating):
                values = [complex(x, rng.randint(-8, 8) / 8) for x in values]
        with np.errstate(all="ignore"):
            return np.array(values).reshape(shape).astype(dtype)

    def constant(self, shape: tuple[int, ...], dtype: str) -> Value:
        return self.emit(literal(self.numbers(shape, dtype, odd=0.1)))[0]

    def integers(self, shape: tuple[int, ...], low: int, high: int) -> Value:
        """Integers of any type that holds them; now and then computed of a leaf."""
        dtype = self.dtype(INTS)
        if self.rng.random() < 0.3:
            return self.make(shape, dtype)
        if dtype in UNSIGNED:
            low = max(low, 0)
        values = [
            self.rng.randint(low, max(low, high)) for _ in range(math.prod(shape))
        ]
        return self.emit(literal(np.array(values, dtype).reshape(shape)))[0]

    # --- Choices ------------------------------------------------------------------

    def pick(
        self,
        dtypes: Sequence[str] = ALL,
        where: Callable[[Value], bool] = lambda value: True,
    ) -> Value:
        """Returns a variable, preferably a view, or a new one."""
        found = [v for v in self.values if v.dtype.name in dtypes and where(v)]
        if found and self.rng.random() < 0.95:
            weights = [3 + 6 * v.is_view + i for i, v in enumerate(found)]
            return self.rng.choices(found, weights)[0]
        for _ in range(20):
            shape = self.shape()
            value = Value("", shape, jnp.dtype(self.dtype(dtypes)))
            if where(value):
                return self.make(shape, value.dtype.name)
        raise Refused

    def of_rank(self, low: int, dtypes: Sequence[str] = ALL, high: int = 9) -> Value:
        return self.pick(dtypes, lambda v: low <= len(v.shape) <= high)

    def make(self, shape: tuple[int, ...], dtype: str) -> Value:
        """A variable of this type: one there is, one out of a view, or a constant."""
        same = [v for v in self.values if v.shape == shape and v.dtype.name == dtype]
        if same and self.rng.random() < 0.6:
            return self.rng.choice(same)
        views = [v for v in self.values if v.is_view and v.size]
        if not views or self.rng.random() < 0.4:
            return self.constant(shape, dtype)
        value, size = self.rng.choice(views), math.prod(shape)
        if len(value.shape) != 1:
            [value] = self.emit(f"{value}.reshape(-1)", is_view=True)
        if size < value.size:
            [value] = self.emit(f"{value}[:{size}]", is_view=True)
        elif size > value.size:
            at = [i % value.size for i in range(size)]
            [value] = self.emit(f"{value}[jnp.array({at})]", is_view=True)
        if shape != value.shape:
            [value] = self.emit(f"{value}.reshape({shape})", is_view=True)
        return self.convert(value, dtype)

    def convert(self, value: Value, dtype: str) -> Value:
        if value.dtype.name == dtype:
            return value
        if value.dtype.name in COMPLEX and dtype not in COMPLEX:
            [value] = self.emit(f"lax.real({value})")
        floating = value.dtype.name in FLOATS and dtype in FLOATS
        text = f"lax.convert_element_type({value}, {typename(dtype)})"
        return self.emit(text, is_view=value.is_view and floating)[0]

    def like(self, value: Value) -> Value:
        return self.make(value.shape, value.dtype.name)

    def axis(self, value: Value) -> int:
        if not value.shape:
            raise Refused
        return self.rng.randrange(len(value.shape))

    def permutation(self, n: int) -> tuple[int, ...]:
        return tuple(self.rng.sample(range(n), n))

    def some(self, n: int, at_least: int = 0) -> tuple[int, ...]:
        """Some of n axes, in order."""
        if n < at_least:
            raise Refused
        count = self.rng.randint(at_least, n)
        return tuple(sorted(self.rng.sample(range(n), count)))

    # --- Statements ---------------------------------------------------------------

    def emit(self, text: str, *blocks: Block, is_view: bool = False) -> list[Value]:
        """Adds a statement, and returns its variables.

        Raises:
          Refused: If JAX refuses to trace it, or the result is too large.
        """
        bare = Statement((), text, blocks)
        avals = self._types(bare)
        outs = [Value(self.fresh(), a.shape, a.dtype, is_view) for a in avals]
        for value in outs:
            if value.size > LARGEST or len(value.shape) > DEEPEST:
                raise Refused
        many = not isinstance(avals, _One)
        self.statements.append(Statement(tuple(outs), text, blocks, many))
        self.values += outs
        return outs

    def _types(self, bare: Statement) -> Any:
        known = {value.name: value for value in self.values}
        args = [known[name] for name in sorted(bare.reads()) if name in known]
        *lines, last = bare.lines()
        header = f"def run({', '.join(value.name for value in args)}):"
        body = [*lines, f"return {last}"]
        scope: dict[str, Any] = dict(NAMES)
        exec("\n".join([header, *("    " + line for line in body)]), scope)
        specs = [jax.ShapeDtypeStruct(value.shape, value.dtype) for value in args]
        try:
            found = jax.eval_shape(scope["run"], *specs)
        except Exception as error:
            raise Refused(str(error)) from None
        return tuple(found) if isinstance(found, tuple | list) else _One([found])

    def block(
        self, *types: Value, length: int = 2, views: bool = False
    ) -> "tuple[Builder, tuple[Value, ...]]":
        """A builder of an inner function of arguments of these types."""
        inner = Builder(self.rng, self.wide, self.kinds, self)
        args = tuple(
            Value(inner.fresh(), v.shape, v.dtype, views and v.is_view) for v in types
        )
        inner.values += args
        inner.grow(self.rng.randint(0, length))
        return inner, args

    def close(self, args: Sequence[Value], results: Sequence[Value]) -> Block:
        name = self.fresh("f")
        names = tuple(value.name for value in results)
        return Block(name, tuple(args), tuple(self.statements), names)

    def grow(self, length: int) -> None:
        """Adds statements of that many makers."""
        for _ in range(length):
            self.step(self.choose())

    def choose(self) -> Maker:
        kind = self.rng.choices(list(self.kinds), list(self.kinds.values()))[0]
        if self.depth >= 2 and kind in ("calls", "meshes"):
            kind = "moves"
        return self.rng.choice([one for one in MAKERS.values() if one.kind == kind])

    def step(self, one: Maker) -> bool:
        """Adds what a maker makes, or nothing."""
        kept = len(self.statements), len(self.values)
        try:
            one.make(self)
        except Refused:
            del self.statements[kept[0] :], self.values[kept[1] :]
            return False
        return True

    def program(self) -> Program:
        """All variables that nothing reads are results, and a few others."""
        made = [value for s in self.statements for value in s.outs]
        read = set().union(*(s.reads() for s in self.statements), set())
        results = [
            value.name
            for value in made
            if (value.name not in read or self.rng.random() < 0.15)
            and not jnp.issubdtype(value.dtype, jax.dtypes.extended)
        ]
        params, statements = tuple(self.params), tuple(self.statements)
        if not results:
            results = [self.params[0][0].name]
        return Program(params, statements, tuple(results), self.wide)


class Refused(Exception):
    """JAX does not trace this statement."""


class _One(list):
    """The type of a single result."""


# How often makers of each kind are chosen.
KINDS = {
    "moves": 30,
    "look_ups": 10,
    "writes": 5,
    "others": 6,
    "elementwise": 16,
    "sums": 10,
    "products": 8,
    "calls": 12,
    "matrices": 3,
    "randomness": 3,
    "meshes": 0.3,
    # These compile each time that they are run.
    "outside": 0.2,
}

# Their results are exact, if leaves are multiples of 1/8.
EXACT = {"moves": 30, "look_ups": 10, "products": 3, "calls": 10}
PRODUCTS = {"moves": 20, "look_ups": 5, "calls": 5, "products": 20}
