"""Arguments of other packages and of other functions: errors name the right place."""

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable
from typing import NoReturn, ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")

# Arguments of other packages, and what they are here, the likeliest first.
_MEANT = {
    "num_steps": "epochs iterations max_iter max_steps maxiter n_iter niter steps",
    "max_evaluations": "budget max_evals max_iter max_steps maxevals maxfev maxfevals "
    "maxfun maxiter n_calls n_trials steps",
    "bounds": "lb lower lower_bounds ub upper upper_bounds",
    "callback": "callbacks",
    "fun": "func loss loss_fn objective",
    "journal": "checkpoint storage",
    "key": "random_seed random_state rng seed",
    "learning_rate": "lr step_size",
    "loss": "fun func loss_fn objective",
    "max_seconds": "max_time maxtime",
    "method": "algorithm optimizer",
    "num_directions": "num_samples popsize",
    "optimizer": "algorithm method",
    "params": "theta x x0",
    "progress": "disp verbose",
    "sample": "batches data dataset",
    "scale": "rhobeg sigma sigma0",
    "smoothing": "eps epsilon mu sigma",
    "step": "integers integrality",
    "tolerance": "atol ftol gtol rtol tol xtol",
    "workers": "n_jobs n_workers num_workers parallel processes",
}

# The meaning of an argument, and the functions that have it.
_HINTS = {
    "bounds": ["a tuple (lower, upper)"],
    "key": ["an integer or jax.random.key(0)"],
    "method": ["such as methods.evolution(), or an optimizer to train"],
    "optimizer": ["such as radazo(1e-3), or a method to minimize"],
    "scale": ["the size of a typical change of each parameter"],
    "step": ["the spacing of the values, 1 for whole numbers"],
}
_CALLS = "an argument of minimize, and of external(...), an evaluator of train"
_ESTIMATOR = "an argument of estimators such as forward_difference()"
_METHOD = "an argument of methods such as methods.untuned(), for minimize"
_TRAIN = "an argument of train"
_PLACES = {
    "batch_size": "an argument of evaluators such as vectorized()",
    "batched": _CALLS,
    "chunk_size": _TRAIN,
    "estimator": _TRAIN,
    "evaluations": "an argument of minimize",
    "executor": _CALLS,
    "has_aux": _TRAIN,
    "learning_rate": "an argument of optimizers such as radazo(1e-3)",
    "max_evaluations": "an argument of minimize and train",
    "num_directions": _ESTIMATOR,
    "num_steps": _TRAIN,
    "restarts": _METHOD,
    "retries": _CALLS,
    "sample": _TRAIN,
    "scale": _METHOD,
    "smoothing": _ESTIMATOR,
    "step": "an argument of minimize",
    "timeout": _CALLS,
    "tolerance": _METHOD,
    "workers": _CALLS,
}

_SIGN = "Values are minimized: return -fun(x) to maximize."
_OTHERWISE = {
    "args": "Close over them: pass lambda x: fun(x, *args).",
    "constraints": "Add a penalty to fun, or take COBYQA of SciPy.",
    "direction": _SIGN,
    "jac": "Leave it out: gradients are estimated from values.",
    "maximize": _SIGN,
    "options": "Pass each option as an argument.",
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


def check_arguments(function: Callable[..., object], given: Iterable[str]) -> None:
    """Raises if an argument of a function has another name here.

    Raises:
      TypeError: If it is known what is meant; else Python has an error of its own.
    """
    parameters = inspect.signature(function).parameters
    own = [n for n, x in parameters.items() if x.kind is not x.VAR_KEYWORD]
    if len(own) < len(parameters):  # The function that gets the others checks them.
        return
    for name in given:
        advice = "" if name in own else _advice(name, own)
        if advice:
            raise TypeError(
                f"{function.__name__} must get arguments by its own names; got "
                f"{name}. {advice}"
            )


def _advice(name: str, own: list[str]) -> str:
    """Returns advice on an argument of a function, empty if there is none."""
    if name in _OTHERWISE:
        return _OTHERWISE[name]
    meant = [ours for ours, theirs in _MEANT.items() if name in theirs.split()]
    if not meant:
        meant = [name] if name in _PLACES else difflib.get_close_matches(name, own, 1)
    for ours in meant:
        if ours in own:
            return f"Pass {', '.join([ours, *_HINTS.get(ours, [])])}."
    places = [f"Pass {x}, {_PLACES[x]}." for x in meant if x in _PLACES]
    return places[0] if places else ""


def checks_names(function: Callable[_P, _T], /) -> Callable[_P, _T]:
    """Makes a function say what an argument of another name is called here.

    Args:
      function: A function with arguments of its own names.

    Returns:
      The function, which raises a TypeError for the name of another package, or for a
      misspelled one.

    Examples:
      >>> from radazo_jax.checks import checks_names
      >>> @checks_names
      ... def estimator(num_directions=10):
      ...     return num_directions
      >>> estimator(popsize=20)
      Traceback (most recent call last):
        ...
      TypeError: estimator must get arguments by its own names; got popsize.
      Pass num_directions.
    """
    own = inspect.signature(function).parameters.keys()

    @functools.wraps(function)
    def checked(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        if not own >= kwargs.keys():
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

    def missing(self: object, name: str) -> NoReturn:
        text = f"{result.__name__!r} object has no attribute {name!r}"
        if name in _ATTRIBUTES:
            raise AttributeError(f"{text}. {_ATTRIBUTES[name]}")
        raise AttributeError(text, name=name, obj=self)

    # A method of this name would make every attribute valid for type checkers.
    type.__setattr__(result, "__getattr__", missing)
    return result
