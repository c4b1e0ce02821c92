"""Argument checks shared by the whole package.

A check of a number returns it as a float, by which settings are compared, and raises
an error which names the argument, the value received and what would do. Values known
only while a program is traced (the hyperparameters that
`optax.inject_hyperparams` passes, or a `vmap` over a population of optimizers)
cannot be compared with anything: the numeric checks return them as they are.
"""

import inspect
import math
import sys
import types
import warnings
from collections.abc import Callable, Mapping
from typing import Any, SupportsFloat

import jax
import jax.numpy as jnp
import numpy as np
import optax

from radazo_jax._src.base import shown, trees
from radazo_jax._src.base.names import checks_names as checks_names
from radazo_jax._src.base.trees import Tree, at_least_float32

# The packages whose frames lie between a warning and the call of the user.
_BETWEEN = {"radazo_jax", "jax", "optax", "contextlib"}


def warn(text: str) -> None:
    """Warns at the line of the user's code that called this package.

    Python shows a warning once for each line of a caller.
    """
    frame, depth = sys._getframe(), 1
    while frame.f_back is not None and _package_of(frame) in _BETWEEN:
        frame, depth = frame.f_back, depth + 1
    warnings.warn(text, stacklevel=depth)


def _package_of(frame: types.FrameType) -> str:
    name: str = frame.f_globals.get("__name__", "")
    return name.partition(".")[0]


def require_arguments(**needed: object) -> None:
    """Raises unless an update has got the arguments that it needs.

    Args:
      **needed: The arguments by their names, `None` if they are missing.

    Raises:
      ValueError: If one is missing.
    """
    for name, given in needed.items():
        if given is None:
            call = "as update(updates, state, params)"
            if name != "params":
                call = "as train does (value_fn only without a journal)"
            raise ValueError(f"{name} must be passed to update, {call}; got None.")


@checks_names
def check_int_at_least(name: str, value: object, minimum: int) -> int:
    """Checks that an argument is a Python (or NumPy) integer of a minimum size.

    The arguments checked here decide shapes or the length of loops, hence arrays and
    tracers are rejected even when they hold an integer.

    Args:
      name: Name of the argument in errors.
      value: The argument: an `int` or `np.integer`.
      minimum: The least valid value.

    Returns:
      The value, as an `int`.

    Raises:
      TypeError: If the value is a bool, a float, an array, a tracer or anything else
        that is not an integer.
      ValueError: If the value is less than `minimum`.

    Examples:
      >>> from radazo_jax.checks import check_int_at_least
      >>> check_int_at_least("num_directions", 10, 1)
      10
      >>> check_int_at_least("num_directions", 0, 1)
      Traceback (most recent call last):
        ...
      ValueError: num_directions must be an int ≥ 1; got 0.
    """
    expected = f"{name} must be an int ≥ {minimum}"
    if isinstance(value, (jax.Array, jax.ShapeDtypeStruct, np.ndarray)):
        raise TypeError(
            f"{expected}; got {_describe(value)}. It shapes the program and must be "
            "static: list it in static_args of optax.inject_hyperparams, or in "
            "static_argnames of jax.jit."
        )
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{expected}; got {_describe(value)}.")
    if value < minimum:
        raise ValueError(f"{expected}; got {value!r}.")
    return int(value)


@checks_names
def check_positive(name: str, value: object) -> float:
    """Checks that an argument is a finite number greater than zero.

    Args:
      name: Name of the argument in errors.
      value: The argument: a number, or an array of shape ().

    Returns:
      The value, as a `float`; as it is if it is only known while a program is traced.

    Raises:
      TypeError: If the value is not a real number.
      ValueError: If it is not a scalar, or not in the range.

    Examples:
      >>> from radazo_jax.checks import check_positive
      >>> check_positive("smoothing", 0.0)
      Traceback (most recent call last):
        ...
      ValueError: smoothing must be a finite number > 0; got 0.0.
    """
    return _check_number(name, value, "a finite number > 0", lambda x: 0 < x < math.inf)


def check_finite(name: str, value: object) -> float:
    """Checks that an argument is a finite number."""
    return _check_number(name, value, "a finite number", math.isfinite)


def check_non_negative(name: str, value: object) -> float:
    """Checks that an argument is a finite number, zero or greater."""
    return _check_number(
        name, value, "a finite number ≥ 0", lambda x: 0 <= x < math.inf
    )


def check_learning_rate(value: optax.ScalarOrSchedule) -> None:
    """Checks that a learning rate is a schedule, or a finite number, zero or greater.

    Examples:
      >>> check_learning_rate(-0.01)
      Traceback (most recent call last):
        ...
      ValueError: learning_rate must be a finite number ≥ 0, or a schedule; got -0.01.
    """
    if callable(value):
        return
    expected = "a finite number ≥ 0, or a schedule"
    if hasattr(value, "schedule"):
        raise TypeError(
            f"learning_rate must be {expected}; got a {type(value).__name__}. Pass its "
            "schedule, as in radazo(found.schedule)."
        )
    _check_number("learning_rate", value, expected, lambda x: 0 <= x < math.inf)
    warn_of_size("learning_rate", value, most=1e10)


def warn_of_size(
    name: str, value: SupportsFloat, least: float = 0.0, most: float = 1e20
) -> None:
    """Warns if a known number is of a size that no run can use."""
    if isinstance(value, jax.core.Tracer | jax.ShapeDtypeStruct):
        return
    size = float(value)
    if size and not least <= size <= most:
        lost = "moves nothing" if size < least else "overflows"
        warn(
            f"{name} is {size:.3g}, by which a step {lost} unless the parameters are "
            "of this size. Give a number in their units."
        )


@checks_names
def check_unit_interval(name: str, value: object) -> float:
    """Checks that an argument lies in [0, 1), such as the decay rate of an average.

    Args:
      name: Name of the argument in errors.
      value: The argument: a number, or an array of shape ().

    Returns:
      The value, as a `float`; as it is if it is only known while a program is traced.

    Raises:
      TypeError: If the value is not a real number.
      ValueError: If it is not a scalar, or not in the range.

    Examples:
      >>> from radazo_jax.checks import check_unit_interval
      >>> check_unit_interval("decay", 0.9)
      0.9
    """
    return _check_number(name, value, "a number in [0, 1)", lambda x: 0 <= x < 1)


def _check_number(
    name: str, value: Any, expected: str, holds: Callable[[float], bool]
) -> Any:
    """Checks that an argument is a real number, or a 0-d array, for which `holds`.

    Returns:
      A float, or the value itself if it is only known while a program is traced.

    Raises:
      TypeError: If the value is not a real number (bools are not numbers here).
      ValueError: If it is not a scalar, or not as expected.
    """
    message = f"{name} must be {expected}; got "
    if callable(value):
        raise TypeError(
            f"{message}{_describe(value)}. To give {name} a schedule, wrap the "
            "optimizer in optax.inject_hyperparams."
        )
    if isinstance(value, (bool, int, float)):
        dtype, shape = np.dtype(type(value)), ()
    elif hasattr(value, "dtype") and hasattr(value, "shape"):
        dtype, shape = value.dtype, tuple(value.shape)
    else:
        raise TypeError(f"{message}{_describe(value)}.")
    # JAX's hierarchy of dtypes rather than NumPy's, which leaves out bfloat16.
    if not any(jnp.issubdtype(dtype, kind) for kind in (jnp.floating, jnp.integer)):
        raise TypeError(f"{message}{_describe(value)}.")
    if shape:
        raise ValueError(f"{message}an array of shape {shape}.")
    if isinstance(value, (jax.core.Tracer, jax.ShapeDtypeStruct)):
        return value
    if not holds(float(value)):
        raise ValueError(f"{message}{value!r}.")
    return float(value)


@checks_names
def check_fun(fun: object, name: str = "fun") -> None:
    """Checks that an argument is a function.

    Args:
      fun: The argument.
      name: Its name in errors.

    Returns:
      `None`.

    Raises:
      TypeError: If the argument is not callable.

    Examples:
      >>> from radazo_jax.checks import check_fun
      >>> check_fun([1.0, 2.0], "prior")
      Traceback (most recent call last):
        ...
      TypeError: prior must be a function of params; got [1.0, 2.0].
    """
    if not callable(fun):
        given = shown.given(fun)
        raise TypeError(f"{name} must be a function of params; got {given}.")


def check_called(given: object, name: str = "optimizer") -> None:
    """Raises for functions that make optimizers or methods, and for names of methods.

    Args:
      given: The argument of a caller.
      name: Its name in errors.
    """
    expected = f"{name} must be a method such as methods.untuned()"
    if name == "optimizer":
        expected = "optimizer must be an Optax transformation such as radazo(1e-3)"
    if isinstance(given, str):
        raise TypeError(
            f"{expected}; got {given!r}. minimize and ask_tell take a method, such as "
            "zo.methods.evolution()."
        )
    if isinstance(given, types.GeneratorType):
        raise TypeError(
            f"{expected}; got a method that was called. Pass the method itself, such "
            "as zo.methods.evolution(), to minimize or ask_tell."
        )
    if not isinstance(given, types.FunctionType):
        return
    if given.__module__.partition(".")[0] in ("radazo_jax", "optax"):
        maker = given.__name__
        raise TypeError(
            f"{expected}; got the function {maker} without parentheses. Call it, as in "
            f"{maker}(...)."
        )


def check_callback(callback: object) -> None:
    """Raises unless this is a function of one argument, or `None`."""
    if callback is None:
        return
    expected = "callback must be a function of one argument, a Report"
    if not callable(callback):
        raise TypeError(
            f"{expected}; got {_describe(callback)}. Pass print, or lambda report: ..."
        )
    try:
        signature = inspect.signature(callback)
    except (TypeError, ValueError):  # Some functions of C have none.
        return
    try:
        signature.bind(None)
    except TypeError as error:
        raise TypeError(
            f"{expected}; got one with the arguments {signature}. What it reports are "
            "report.step, .values, .points, .best and .state."
        ) from error


def refer_to(name: str) -> str:
    """Returns the end of an error message that names the docstring that explains it.

    Args:
      name: A public name of `radazo_jax`. A wheel has docstrings and no pages.
    """
    return f" See help(zo.{name})."


def _describe(value: object) -> str:
    """Returns the value and its type on one line, as errors print them."""
    return f"{shown.given(value)} of type {type(value).__name__}"


def as_params(params: optax.Params) -> optax.Params:
    """Returns `params` as arrays; raises if a leaf is not real and floating-point."""
    check_params(params)
    return trees.as_arrays(params)


def check_all_finite(params: optax.Params) -> None:
    """Raises if an element of `params` is NaN or infinite."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        found = np.asarray(leaf, np.float64)
        if not np.all(np.isfinite(found)):
            raise ValueError(
                "params must be finite; got "
                f"{found[~np.isfinite(found)][0]} at params"
                f"{jax.tree_util.keystr(path)}."
            )


def check_not_masked(name: str, tree: Tree) -> None:
    """Raises if a tree holds a masked array, whose masked numbers would be used."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if isinstance(leaf, np.ma.MaskedArray):
            raise TypeError(
                f"{name} must hold arrays without masks; got a masked one at {name}"
                f"{jax.tree_util.keystr(path)}. Pass .filled(value) of it."
            )


def check_params(params: optax.Params) -> None:
    """Raises if `params` are no tree of real floating-point arrays with elements."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    if not leaves:
        raise ValueError(
            f"params must hold at least one array; got the empty tree {params!r}."
        )
    check_not_deleted("params", params)
    check_not_masked("params", params)
    for path, leaf in leaves:
        try:
            dtype = jnp.result_type(leaf)
        except (TypeError, ValueError):
            dtype = None
        advice = _how_to_convert(leaf, dtype)
        if advice or dtype is None or not jnp.issubdtype(dtype, np.floating):
            is_array = dtype is not None and isinstance(leaf, np.ndarray | jax.Array)
            given = f"{dtype}" if is_array else _describe(leaf)
            raise TypeError(
                "params must hold real floating-point arrays; got "
                f"{given} at params{jax.tree_util.keystr(path)}. "
                + _how_to_split(params, advice)
            )
    if not any(np.size(leaf) for _, leaf in leaves):
        raise ValueError(
            f"params must hold at least one number; got empty {shown.tree(params)}."
        )


def _how_to_convert(leaf: object, dtype: np.dtype | None) -> str:
    """Returns advice on numbers that can become a floating-point array."""
    if hasattr(leaf, "to_numpy"):
        return "Convert it by .to_numpy(float)."
    if hasattr(leaf, "detach"):
        return "Convert it by .detach().numpy()."
    if type(leaf) is int:
        return "Pass a float, or the array np.array(params, float)."
    numbers = isinstance(leaf, np.ndarray | np.generic | jax.Array)
    # JAX knows neither other orders of bytes nor other precisions.
    kind = getattr(getattr(leaf, "dtype", None), "kind", "")  # Keys have none.
    if numbers and (kind in ("i", "u") or (kind == "f" and not dtype)):
        split = " Close over what is not optimized." * (dtype is not None)
        return f"Convert it by .astype(float).{split}"
    return ""


def _how_to_split(params: optax.Params, advice: str) -> str:
    """Returns advice on parameters that are not all floating-point arrays."""
    if isinstance(params, types.FunctionType):
        return "Pass fun before params."
    modules = {kind.__module__ for kind in type(params).__mro__}
    if any(name.startswith("flax.linen") for name in modules):
        return (
            "A Linen module has no parameters: pass module.init(key, x)['params'], and "
            "call module.apply({'params': params}, x) in fun."
        )
    if any(name.startswith("flax.nnx.module") for name in modules):
        return (
            "Use radazo_jax.nnx.value_and_grad, which perturbs the nnx.Param of a "
            "module and keeps the state of its Dropout and BatchNorm."
        )
    return advice or "Close over what is not optimized, or split it off."


def warn_of_float32(params: optax.Params) -> None:
    """Warns if NumPy's float64 becomes float32."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if not isinstance(leaf, np.ndarray | np.generic):
            continue
        if leaf.dtype == np.float64 and jnp.result_type(leaf) == jnp.float32:
            warn(
                f"params{jax.tree_util.keystr(path)} is float64 and becomes float32, "
                "because JAX has 64 bits disabled. Pass float32, such as "
                "np.zeros(5, np.float32), or enable 64 bits by "
                "jax.config.update('jax_enable_x64', True)."
            )
            return


def warn_of_statistics(params: optax.Params) -> None:
    """Warns if parameters of Flax hold the running statistics of BatchNorm."""
    places = []
    if isinstance(params, Mapping) and {"params", "batch_stats"} <= params.keys():
        places = ["['batch_stats']"]
    if "flax.nnx" in sys.modules:
        kind = sys.modules["flax.nnx"].BatchStat
        found = jax.tree_util.tree_leaves_with_path(
            params, is_leaf=lambda x: isinstance(x, kind)
        )
        places += [jax.tree_util.keystr(p) for p, x in found if isinstance(x, kind)]
    if places:
        warn(
            f"params{places[0]} is a running statistic, which the run will move like a "
            "parameter. Pass nnx.state(model, nnx.Param) or variables['params'], and "
            "let fun close over the rest."
        )


def check_not_deleted(name: str, tree: Tree) -> None:
    """Raises if an array of a tree was donated to a program, or deleted."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        known = isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer)
        if known and leaf.is_deleted():
            raise ValueError(
                f"{name} must hold arrays with values; got one that was deleted or "
                f"donated to a compiled function, {name}{jax.tree_util.keystr(path)}. "
                f"Donate or keep a copy instead: jax.tree.map(jnp.copy, {name})."
            )


def checked_loss(
    fun: Callable[[optax.Params], object], has_aux: bool, vector_valued: bool = False
) -> Callable[[optax.Params], tuple[jax.Array, Tree]]:
    """Returns `fun` as a function of parameters to (loss of at least float32, aux).

    The function raises, when called, if `fun` returns something other than a real
    scalar, or a vector of at least one element with `vector_valued`.
    """

    def loss(params: optax.Params) -> tuple[jax.Array, Tree]:
        output = fun(params)
        value, aux = as_pair(output) if has_aux else (output, None)
        dtype, shape = _dtype_and_shape(value)
        if len(shape) > vector_valued or 0 in shape:
            raise ValueError(
                f"fun must return a scalar loss{' or a vector' * vector_valued}; got "
                f"an array of shape {shape}. Take its mean or sum."
            )
        check_floating(value)
        # A float64 loss becomes float32 unless 64 bits are enabled outside of it too.
        dtype = jax.dtypes.canonicalize_dtype(at_least_float32(dtype))
        return jnp.asarray(value).astype(dtype), aux

    return loss


def check_floating(value: object) -> None:
    """Raises unless a loss is real and floating-point, or stands for one that is."""
    dtype, _ = _dtype_and_shape(value)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(
            f"fun must return a real floating-point loss; got dtype {dtype}."
        )


def as_pair(output: Tree) -> tuple[Tree, Tree]:
    """Returns the output of a function with `has_aux`; raises unless it is a pair."""
    if isinstance(output, tuple) and len(output) == 2:
        return output
    raise TypeError(
        "fun must return a pair (loss, aux) when has_aux is True; got "
        f"{jax.tree.map(jnp.shape, output)}. Return both, or leave out has_aux."
    )


def _dtype_and_shape(value: Any) -> tuple[Any, tuple[int, ...]]:
    try:
        if jax.tree_util.all_leaves([value]):
            return jnp.result_type(value), jnp.shape(value)
    except TypeError:
        pass
    raise TypeError(
        f"fun must return a scalar loss; got {_describe(value)}. With auxiliary "
        "output, set has_aux=True."
    )


def as_values(values: Tree, dtype: jax.typing.DTypeLike) -> np.ndarray:
    """Returns values as an array of the dtype in which they are used."""
    array = np.asarray(values)
    if array.dtype.kind not in "fiub":
        raise TypeError(
            "values must be real numbers, NaN for what failed; got "
            f"{shown.given(values)}."
        )
    # Values beyond float32 are infinite: they failed.
    with np.errstate(all="ignore"):
        return array.astype(dtype)
