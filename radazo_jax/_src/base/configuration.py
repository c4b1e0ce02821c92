"""The configuration of runs, which is compared by its fields or by identity."""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, ClassVar, ParamSpec, Self, TypeVar

import jax

from radazo_jax._src.base import trees
from radazo_jax._src.base.names import check_arguments

_P = ParamSpec("_P")
_T = TypeVar("_T")

# The number of objects that a constructor of `cached_constructor` keeps, at most.
_MOST_KEPT = 64


@dataclasses.dataclass(frozen=True, repr=False)
class Configuration:
    """Estimators, evaluators, distributions and shapings.

    Equal ones are equal and have the same hash, so that they can be static under `jit`
    and share a compiled program. They are shown as they are written.

    Raises:
      TypeError: When an instance is made of a class whose instances cannot be compared:
        a subclass with fields, or with an `__init__` of its own, that is not a frozen
        dataclass, or one with an `__eq__` and without a `__hash__`.
    """

    # The public function that makes instances, if it has another name than the class.
    _constructor: ClassVar[str] = ""

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        del args, kwargs
        for each in cls.__mro__:
            if issubclass(each, Configuration):
                _check_class(each)
        return super().__new__(cls)

    def __repr__(self) -> str:
        shown: list[str] = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is field.default or not field.repr:
                continue
            leads = not shown and isinstance(value, Configuration)
            shown.append(repr(value) if leads else f"{field.name}={value!r}")
        name = vars(type(self)).get("_constructor") or type(self).__name__
        return f"{name}({', '.join(shown)})"


def _check_class(cls: type[Configuration]) -> None:
    """Raises if instances of a class would be compared by less than they hold."""
    decorated = vars(cls).get("__dataclass_params__")
    own = inspect.get_annotations(cls).values()
    has_fields = any("ClassVar" not in str(annotation) for annotation in own)
    if decorated is None and (has_fields or "__init__" in vars(cls)):
        raise TypeError(
            f"{cls.__name__} must be a frozen dataclass, because it has fields; got a "
            "class that is not decorated. Add @dataclasses.dataclass(frozen=True) "
            "above it."
        )
    if decorated is not None and not decorated.eq and "__eq__" not in vars(cls):
        raise TypeError(
            f"{cls.__name__} must be comparable by its fields; got a dataclass with "
            "eq=False. Leave eq out."
        )
    if cls.__hash__ is None:
        raise TypeError(
            f"{cls.__name__} must be hashable; got a class with __eq__ and without "
            "__hash__. Define both or neither."
        )


def check_fields(configuration: Configuration) -> None:
    """Raises if a field cannot be compared, or something else than fields is held.

    Tracers are let pass: within a trace, nothing is compared.
    """
    name = type(configuration).__name__
    fields = [field.name for field in dataclasses.fields(configuration)]
    for field in fields:
        value = getattr(configuration, field)
        if isinstance(value, Configuration):
            check_fields(value)
        elif not (trees.has_hash(value) or trees.is_traced(value)):
            raise TypeError(
                f"{name} must have hashable fields; got {field} of type "
                f"{type(value).__name__}. Use numbers, strings or tuples of them, and "
                "keep arrays in a state or in what a function captures."
            )
    for other in vars(configuration):
        # A cached property is an attribute of the class as well.
        if other not in fields and not hasattr(type(configuration), other):
            raise TypeError(
                f"{name} must hold its fields alone, by which it is compared; got "
                f"another attribute, {other}. Declare it as a field."
            )


def cached_constructor(constructor: Callable[_P, _T]) -> Callable[_P, _T]:
    """Returns a constructor that returns the same object for equal, hashable arguments.

    Optax's transformations are pairs of functions, which are compared by identity, so
    that equal ones would each compile their own program. Arguments are equal if their
    types are, too: 1, 1.0 and True differ. Arrays and tracers have no hash, and each
    call with one makes an object.
    """
    signature = inspect.signature(constructor)

    @functools.lru_cache(_MOST_KEPT, typed=True)
    def kept(floats: Any, *args: Any, **kwargs: Any) -> _T:
        del floats
        return constructor(*args, **kwargs)

    @functools.wraps(constructor)
    def construct(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        try:
            given = signature.bind(*args, **kwargs)
        except TypeError:
            check_arguments(constructor, kwargs)
            given = None  # Python's own error is raised below.
        if given is not None:
            given.apply_defaults()
            if trees.has_hash(tuple(given.arguments.values())):
                # Dtypes depend on whether 64 bits are enabled.
                floats = jax.dtypes.canonicalize_dtype(float)
                return kept(floats, *given.args, **given.kwargs)
        return constructor(*args, **kwargs)

    return construct
