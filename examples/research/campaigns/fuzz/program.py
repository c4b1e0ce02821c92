"""Programs as lines of Python, which can be run and printed."""

import dataclasses
import functools
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

# What the lines of a program may name.
NAMES = {"jax": jax, "jnp": jnp, "lax": lax, "np": np}

_NAME = re.compile(r"\b[pv]\d+\b")


@dataclasses.dataclass(frozen=True)
class Value:
    """A variable of a program.

    Attributes:
      name: `p3` for a parameter, else `v3`.
      shape: Its shape.
      dtype: Its dtype.
      is_view: Whether it is a parameter, or one that was only rearranged.
    """

    name: str
    shape: tuple[int, ...]
    dtype: Any
    is_view: bool = False

    def __str__(self) -> str:
        return self.name

    @property
    def size(self) -> int:
        return int(np.prod(self.shape))


@dataclasses.dataclass(frozen=True)
class Block:
    """An inner function; it may read the variables around it."""

    name: str
    args: tuple[Value, ...]
    statements: tuple["Statement", ...]
    results: tuple[str, ...]

    def __str__(self) -> str:
        return self.name

    def lines(self) -> Iterator[str]:
        yield f"def {self.name}({', '.join(value.name for value in self.args)}):"
        for statement in self.statements:
            yield from ("    " + line for line in statement.lines())
        comma = "," if len(self.results) == 1 else ""
        yield f"    return ({', '.join(self.results)}{comma})"

    def reads(self) -> set[str]:
        return used(self.statements, self.results)


@dataclasses.dataclass(frozen=True)
class Statement:
    """`outs = text`, after the definitions of the inner functions that it names.

    `many`: whether the text is of a tuple, also with one variable.
    """

    outs: tuple[Value, ...]
    text: str
    blocks: tuple[Block, ...] = ()
    many: bool = False

    def lines(self) -> Iterator[str]:
        for block in self.blocks:
            yield from block.lines()
        names = ", ".join(value.name for value in self.outs)
        comma = "," if self.many and len(self.outs) == 1 else ""
        yield f"{names}{comma} = {self.text}" if names else self.text

    def reads(self) -> set[str]:
        own = {value.name for block in self.blocks for value in block.args}
        inner = set().union(*(block.reads() for block in self.blocks))
        return (set(_NAME.findall(self.text)) | inner) - own


def used(statements: tuple[Statement, ...], results: tuple[str, ...]) -> set[str]:
    """The variables that statements or results read and no statement sets."""
    names, made = set(results), set()
    for statement in statements:
        names |= statement.reads()
        made |= {value.name for value in statement.outs}
    return names - made


@dataclasses.dataclass(frozen=True)
class Program:
    """A function of parameters.

    Attributes:
      params: Each parameter's variable, and the text of its array.
      statements: The statements that it computes.
      results: The variables that it returns.
      wide: Whether it is run with 64-bit types.
    """

    params: tuple[tuple[Value, str], ...]
    statements: tuple[Statement, ...]
    results: tuple[str, ...]
    wide: bool = False

    @functools.cached_property
    def arrays(self) -> tuple[jax.Array, ...]:
        with jax.enable_x64(self.wide):
            return tuple(jax.device_put(_array(text)) for _, text in self.params)

    @functools.cached_property
    def fun(self) -> Callable[[Any], Any]:
        scope: dict[str, Any] = dict(NAMES)
        exec("\n".join(self.lines()), scope)
        return scope["fun"]

    def lines(self) -> Iterator[str]:
        yield "def fun(params):"
        names = [value.name for value, _ in self.params]
        if names:
            yield f"    {', '.join(names)}{',' * (len(names) == 1)} = params"
        body = Block("body", (), self.statements, self.results)
        yield from list(body.lines())[1:]

    def text(self, seed: int) -> str:
        """The program as a test without its last line, the check that fails."""
        values = ", ".join(text for _, text in self.params)
        comma = "," if len(self.params) == 1 else ""
        lines = [f"def test_seed_{seed}():", *("    " + line for line in self.lines())]
        wide = "  # With 64-bit types." if self.wide else ""
        return "\n".join([*lines, f"    params = ({values}{comma}){wide}"])


class _Numpy:
    """`jnp` in the text of a parameter, so that nothing is compiled."""

    inf, nan, zeros = np.inf, np.nan, staticmethod(np.zeros)

    @staticmethod
    def array(values: Any, dtype: Any) -> np.ndarray:
        with np.errstate(all="ignore"):
            return np.array(values).astype(dtype)

    def __getattr__(self, name: str) -> Any:
        return jnp.dtype(getattr(jnp, name))


def _array(text: str) -> np.ndarray:
    return eval(text, NAMES | {"jnp": _Numpy()})


def literal(values: np.ndarray) -> str:
    """An array as text."""
    if not values.size:
        return f"jnp.zeros({values.shape}, {typename(values.dtype)})"
    return f"jnp.array({_nested(values.tolist())}, {typename(values.dtype)})"


def typename(dtype: Any) -> str:
    name = jnp.dtype(dtype).name
    return "jnp.bool_" if name == "bool" else f"jnp.{name}"


def _nested(values: Any) -> str:
    if isinstance(values, list):
        return f"[{', '.join(map(_nested, values))}]"
    if isinstance(values, complex):
        return f"complex({_nested(values.real)}, {_nested(values.imag)})"
    text = repr(values)
    return text.replace("inf", "jnp.inf").replace("nan", "jnp.nan")
