"""The problem of a run on the host: checks of arguments before a method begins."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from radazo_jax._src.base import checks, keys, shown, trees
from radazo_jax._src.estimates.contracts import GradientEstimator
from radazo_jax._src.host.questions import Questions
from radazo_jax._src.host.table import Evaluations, line_of
from radazo_jax._src.host.vectors import Vectors
from radazo_jax._src.methods.contract import Box, Method
from radazo_jax._src.methods.policy import Untuned
from radazo_jax._src.steps import box

# Up to so many parameters, the default method runs.
MOST = 10_000


class Problem(NamedTuple):
    """The problem of a run.

    Attributes:
      vectors: The start and the grid.
      box: The bounds as vectors.
      key: The key, typed.
      line: The entries that describe the run in its table.
    """

    vectors: Vectors
    box: Box
    key: jax.Array
    line: dict[str, Any]


def check_method(method: Any) -> None:
    """Raises unless this is a method."""
    expected = "method must be a method such as methods.untuned()"
    if isinstance(method, GradientEstimator) or hasattr(method, "update"):
        kind = "estimator" if isinstance(method, GradientEstimator) else "optimizer"
        raise TypeError(
            f"{expected}; got an {kind}. Pass an optimizer and an estimator to train."
        )
    checks.check_called(method, "method")
    if not callable(method):
        raise TypeError(f"{expected}; got {shown.given(method)}.")


def has_residuals(method: Method) -> bool:
    """Whether a method takes arrays of residuals."""
    return bool(getattr(method, "residuals", False))


def value_of(method: Method) -> Callable[[Any], float]:
    """The function that makes a number of what a row of the table has."""
    if not has_residuals(method):
        return float
    value: Any = getattr(method, "value")  # noqa: B009  (A method need not have it.)
    return lambda residuals: float(value(np.reshape(residuals, (1, -1)))[0])


def check_evaluations(evaluations: Any, journal: Any = None) -> None:
    """Raises unless these are the evaluations of an earlier run, or `None`."""
    if evaluations is None:
        return
    if not isinstance(evaluations, Evaluations):
        raise TypeError(
            "evaluations must be the evaluations of an earlier result; got "
            f"{shown.tree(evaluations)}. Pass result.evaluations."
        )
    if journal is not None:
        raise ValueError(
            "evaluations must be None with a journal, from which the run continues; "
            f"got {len(evaluations)} evaluations."
        )


def problem(
    method: Method,
    params: optax.Params,
    bounds: Any,
    step: Any,
    key: jax.typing.ArrayLike,
) -> Problem:
    """The problem of a run, of arguments that are checked.

    Raises:
      TypeError, ValueError: If an argument is not valid.
    """
    if jax.process_count() > 1:
        raise ValueError(
            "minimize must run in one process; got a run of "
            f"{jax.process_count()} processes. Call it in one of them with workers or "
            "an executor, or use train."
        )
    params = trees.with_float64(params)
    with trees.precision_of(params):
        initial = checks.as_params(params)
        typed = keys.as_key(key)
        if trees.is_traced((initial, typed)):
            raise TypeError(
                "params and key must be known arrays with a method, which runs on the "
                "host; got traced ones. Call it outside of jax.jit, jax.vmap and "
                "jax.grad; inside, use solver or value_and_grad."
            )
        checks.check_all_finite(initial)
        _check_size(method, trees.size(initial))
        checks.warn_of_statistics(params)
        given = box.as_bounds(bounds)
        box.check_bounds(given, initial)
        vectors = Vectors(initial, step)
        inward = vectors.box(given)
        line = line_of(vectors, inward, typed, has_residuals(method))
        return Problem(vectors, inward, typed, line)


def _check_size(method: Method, size: int) -> None:
    """Raises if the default method has more parameters than it is made for."""
    if isinstance(method, Untuned) and size > MOST:
        raise ValueError(
            f"method must be named for more than {MOST:,} parameters; got {method!r} "
            f"for {size:,}. Pass methods.many(), or pass a loss to train."
        )


def questions(method: Method, given: Problem, limited: bool) -> Questions:
    """Begins a method.

    Args:
      method: The method.
      given: The problem.
      limited: Whether a budget ends the run.
    """
    return Questions(method, given.vectors, given.box, given.key, limited)
