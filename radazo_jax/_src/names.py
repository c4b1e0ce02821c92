"""Arguments of other packages and of other functions: errors name the right place."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")

_CALLS = "It is an argument of minimize, and of external(...), an evaluator of train."
_EVALUATIONS = "Pass max_evaluations."
_KEY = "Pass key, an integer or jax.random.key(0)."
_PROGRESS = "Pass progress."
_SIGN = "Values are minimized: return -fun(x) to maximize."
_TOLERANCE = "Pass methods.untuned(tolerance=...) to minimize."
_TRAIN = "It is an argument of train."
_UNTUNED = "It is an argument of methods.untuned(...), a method of minimize."
_WORKERS = "Pass workers to minimize."
_ARGUMENTS = {
    "args": "Close over them: pass lambda x: fun(x, *args).",
    "batched": _CALLS,
    "chunk_size": _TRAIN,
    "constraints": "Add a penalty to fun, or take COBYQA of SciPy.",
    "direction": _SIGN,
    "disp": _PROGRESS,
    "estimator": _TRAIN,
    "executor": _CALLS,
    "ftol": _TOLERANCE,
    "has_aux": _TRAIN,
    "jac": "Leave it out: gradients are estimated from values.",
    "lr": "Pass learning_rate, an argument of optimizers such as radazo(1e-3).",
    "maxfev": _EVALUATIONS,
    "maxfun": _EVALUATIONS,
    "maximize": _SIGN,
    "maxiter": "Pass num_steps, or max_evaluations.",
    "method": "Pass a method to minimize, and an optimizer and an estimator, such as "
    "radazo(1e-3) and forward_difference(), to train.",
    "mu": "Pass smoothing, an argument of estimators such as forward_difference().",
    "n_calls": _EVALUATIONS,
    "n_jobs": _WORKERS,
    "n_trials": _EVALUATIONS,
    "num_steps": _TRAIN,
    "num_workers": _WORKERS,
    "optimizer": _TRAIN,
    "options": "Pass each option as an argument.",
    "random_state": _KEY,
    "restarts": _UNTUNED,
    "retries": _CALLS,
    "sample": _TRAIN,
    "scale": _UNTUNED,
    "seed": _KEY,
    "sigma0": "Pass methods.untuned(scale=...), a typical change, to minimize.",
    "step": "It is an argument of minimize.",
    "timeout": _CALLS,
    "tol": _TOLERANCE,
    "tolerance": _UNTUNED,
    "verbose": _PROGRESS,
    "workers": _CALLS,
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
    """Makes a function name the right place of an argument that it does not have."""

    @functools.wraps(function)
    def checked(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        check_arguments(function, kwargs)
        if function.__name__ == "minimize" and len(args) > 3:
            raise TypeError(
                f"minimize must get at most 3 arguments without names; got {len(args)}."
                " Pass an optimizer and an estimator to train."
            )
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
