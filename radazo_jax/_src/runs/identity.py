"""The identity of a function, by which a journal recognizes it.

A name and a digest of its code, and a text of each number, string and array that it
captures: by a closure, by the default of a parameter, or as an argument of a
`functools.partial`. Attributes, lists and data of modules are left out, because they
may change between calls: counters and caches do.
"""

import contextlib
import dis
import functools
import hashlib
import inspect
import itertools
import types
import zlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_LONGEST = 40  # Characters of a text that is shown; of a longer one, a checksum is.


def name(fun: Any) -> str:
    """A name for a function that changes when its code does."""
    *_, fun = _layers(fun)
    owner = fun if hasattr(fun, "__qualname__") else type(fun)
    text = f"{owner.__module__}.{owner.__qualname__}"
    code = getattr(_function(fun), "__code__", None)
    if code is None:
        return text
    digest = hashlib.sha256()
    for part in _parts(code):
        digest.update(repr(part).encode())
    return f"{text} {digest.hexdigest()[:8]}"


def captured(fun: Any) -> dict[str, str]:
    """The numbers, strings and arrays that a function captures: name -> text."""
    found: dict[str, str] = {}
    for layer in _layers(fun):
        for name, value in _captured_by(layer):
            text = text_of(value)
            if text is not None:
                found.setdefault(name, text)
    return found


def _layers(fun: Any) -> Iterator[Any]:
    """A function, and the functions that it wraps."""
    while True:
        yield fun
        if isinstance(fun, functools.partial):
            fun = fun.func
        elif hasattr(fun, "__wrapped__"):
            fun = fun.__wrapped__
        else:
            return


def _function(fun: Any) -> Any:
    """The function that a call of an object runs."""
    return fun if hasattr(fun, "__code__") else type(fun).__call__


def _captured_by(fun: Any) -> Iterator[tuple[str, Any]]:
    """Names and values that a function captures itself."""
    if isinstance(fun, functools.partial):
        yield from zip(_parameters(fun.func), fun.args, strict=False)
        yield from fun.keywords.items()
    fun = _function(fun)
    code = getattr(fun, "__code__", None)
    if code is None:
        return
    places = code.co_varnames[: code.co_argcount]
    defaults = fun.__defaults__ or ()
    yield from zip(places[len(places) - len(defaults) :], defaults, strict=True)
    yield from (fun.__kwdefaults__ or {}).items()
    assigned = set(_assigned(code))  # Such as a counter of calls.
    for name, cell in zip(code.co_freevars, fun.__closure__ or (), strict=True):
        try:
            if name not in assigned:
                yield name, cell.cell_contents
        except ValueError:
            pass  # The variable has no value.


def _parameters(fun: Any) -> Iterator[str]:
    """The names of the parameters of a function, and then numbers."""
    # A function that is not written in Python may have no signature.
    with contextlib.suppress(TypeError, ValueError):
        yield from inspect.signature(fun).parameters
    yield from (f"argument {number}" for number in itertools.count())


def _assigned(code: types.CodeType) -> Iterator[str]:
    """The variables of a closure to which code assigns."""
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("STORE_DEREF", "DELETE_DEREF"):
            yield instruction.argval
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _assigned(constant)


def text_of(value: Any) -> str | None:
    """A text of a number, a string or an array; `None` for anything else."""
    if isinstance(value, np.generic) and not value.dtype.hasobject:
        value = value.item()
    if isinstance(value, bool | int | float | complex | str | bytes | None):
        text = repr(value)
        if len(text) <= _LONGEST:
            return text
        return f"{type(value).__name__} {_checksum(text.encode())}"
    if isinstance(value, tuple):
        texts = [text_of(x) for x in value]
        return None if None in texts else f"({', '.join(map(str, texts))})"
    return _text_of_array(value)


def _text_of_array(value: Any) -> str | None:
    if isinstance(value, jax.Array):
        known = not (isinstance(value, jax.core.Tracer) or value.is_deleted())
        if not (known and value.is_fully_addressable):
            return None
        if jnp.issubdtype(value.dtype, jax.dtypes.extended):
            value = jax.random.key_data(value)
        value = np.asarray(value)
    if not isinstance(value, np.ndarray) or value.dtype.hasobject:
        return None
    content = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
    return f"{value.dtype}{list(value.shape)} {_checksum(content)}"


def _checksum(content: Any) -> str:
    return f"{zlib.crc32(content):08x}"


def _parts(code: types.CodeType) -> Iterator[Any]:
    """The parts of a function: its instructions, names and constants."""
    yield from (code.co_code, code.co_names, code.co_varnames)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _parts(constant)
        elif isinstance(constant, frozenset):
            yield sorted(map(repr, constant))
        else:
            yield constant
