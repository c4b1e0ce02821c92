"""Names of SciPy, Optuna and pycma: errors say what they are called here."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")

_EVALUATIONS = "Pass max_evaluations."
_KEY = "Pass key, an integer or jax.random.key(0)."
_PROGRESS = "Pass progress."
_SIGN = "Values are minimized: return -fun(x) to maximize."
_TOLERANCE = "Pass tolerance."
_WORKERS = "Pass workers to minimize_black_box."
_ARGUMENTS = {
    "args": "Close over them: pass lambda x: fun(x, *args).",
    "constraints": "Add a penalty to fun, or take COBYQA of SciPy.",
    "direction": _SIGN,
    "disp": _PROGRESS,
    "ftol": _TOLERANCE,
    "jac": "Leave it out: gradients are estimated from values.",
    "lr": "Pass learning_rate, an argument of optimizers such as radazo(1e-3).",
    "maxfev": _EVALUATIONS,
    "maxfun": _EVALUATIONS,
    "maximize": _SIGN,
    "maxiter": "Pass num_steps, or max_evaluations.",
    "method": "Pass an optimizer and an estimator, such as radazo(1e-3) and "
    "forward_difference(), or neither.",
    "mu": "Pass smoothing, an argument of estimators such as forward_difference().",
    "n_calls": _EVALUATIONS,
    "n_jobs": _WORKERS,
    "n_trials": _EVALUATIONS,
    "num_workers": _WORKERS,
    "options": "Pass each option as an argument.",
    "random_state": _KEY,
    "seed": _KEY,
    "sigma0": "Pass scale, the size of a typical change of each parameter.",
    "tol": _TOLERANCE,
    "verbose": _PROGRESS,
    "x0": "Pass params.",
}

_STOPPED = "Read stopped, the reason for which the run ended."
_ATTRIBUTES = {
    "best_params": "Read best.params.",
    "best_value": "Read best.value.",
    "fun": "Read best.value.",
    "message": _STOPPED,
    "nfev": "Read num_evaluations.",
    "nit": "Read len(values).",
    "status": _STOPPED,
    "success": _STOPPED,
    "x": "Read params, or best.params.",
}


def check_arguments(function: Callable[..., Any], given: dict[str, Any]) -> None:
    """Raises if an argument of a function has the name of another package."""
    for name in given:
        if name in _ARGUMENTS and name not in inspect.signature(function).parameters:
            raise TypeError(
                f"{function.__name__} must get arguments by its own names; got "
                f"{name}. {_ARGUMENTS[name]}"
            )


def checks_names(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Makes a function say what an argument of another package is called here."""

    @functools.wraps(function)
    def checked(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        check_arguments(function, kwargs)
        return function(*args, **kwargs)

    return checked


def says_attributes(result: type[_T]) -> type[_T]:
    """Makes a class say what an attribute of another package is called here."""

    def missing(self: Any, name: str) -> Any:
        text = f"{result.__name__!r} object has no attribute {name!r}"
        if name in _ATTRIBUTES:
            raise AttributeError(f"{text}. {_ATTRIBUTES[name]}")
        raise AttributeError(text, name=name, obj=self)

    # A method of this name would make every attribute valid for type checkers.
    type.__setattr__(result, "__getattr__", missing)
    return result
