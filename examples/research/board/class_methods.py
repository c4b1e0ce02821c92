"""The default method and other tools on a function, as their users call them."""

import contextlib
import functools
import importlib.util
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from scipy.optimize import differential_evolution, minimize

import radazo_jax as zo
from board.class_problems import Function
from common.record import numbers

TARGETS = (1e-1, 1e-2, 1e-3, 1e-5)  # The share of the gap at the start that is left.


class Finished(Exception):
    """There is nothing left to find, or nothing left to spend."""


class Count:
    """The function that a method evaluates: it counts, and records reached targets.

    Attributes:
      count: Number of evaluations.
      reached: The number of the evaluation that first was at each target, counted from
        1; `None` if none was.
      gap: The lowest gap so far, as a share of the gap at the start, without noise.
      lowest: The lowest value that the method got, and its point.
    """

    def __init__(self, function: Function, budget: int, seed: int = 0):
        self.function, self.budget = function, budget
        self.count, self.gap = 0, 1.0
        self.reached: list[int | None] = [None] * len(TARGETS)
        self.lowest = np.inf, function.start
        self._noise = np.random.default_rng(seed)
        self._noisy = bool(function.noise or function.relative)
        self._next = 0

    @property
    def finished(self) -> bool:
        """Whether there is nothing left to find, or nothing left to spend."""
        # The targets do not end a noisy run, because its last point is measured.
        found = self._next == len(TARGETS) and not self._noisy
        return found or self.count >= self.budget

    def value(self, x: np.ndarray) -> float:
        """Returns the value at a point, with noise."""
        self.count += 1
        function = self.function
        value = float(function.fun(x))
        gap = (value - function.least) / function.gap
        if self.count <= self.budget:
            self.gap = min(self.gap, gap) if gap == gap else self.gap
            while self._next < len(TARGETS) and gap <= TARGETS[self._next]:
                self.reached[self._next] = self.count
                self._next += 1
        if self._noisy:
            value += function.noise * function.gap * self._noise.normal()
            value += function.relative * value * self._noise.normal()
        if value < self.lowest[0]:
            self.lowest = value, np.array(x, np.float64)
        return value

    def one(self, x: np.ndarray) -> float:
        """Returns the value at a point; raises `Finished` if the run must end."""
        if self.finished:
            raise Finished
        return self.value(x)

    def finite(self) -> Callable[[np.ndarray], float]:
        """Returns `one` for tools without NaN: the highest value so far replaces it."""
        highest = -np.inf

        def one(x: np.ndarray) -> float:
            nonlocal highest
            value = self.one(x)
            if np.isfinite(value):
                highest = max(highest, value)
            return value if np.isfinite(value) else highest

        return one


def default(count: Count, seed: int) -> np.ndarray:
    """`minimize` with its default method."""
    try:
        result = zo.minimize(
            count.value,
            count.function.start,
            bounds=count.function.bounds,
            step=count.function.step,
            max_evaluations=count.budget,
            key=seed,
            progress=False,
            callback=lambda report: count.finished,
        )
    except zo.RunError as error:
        if error.result is None:
            return count.lowest[1]
        result = error.result
    return np.asarray(result.params)


def scipy(count: Count, seed: int, method: str) -> np.ndarray:
    """A method of SciPy, as it is."""
    del seed
    function = count.function
    box = None if function.bounds is None else np.stack(function.bounds, axis=1)
    limit = "maxfun" if method == "L-BFGS-B" else "maxfev"
    options: dict[str, Any] = {limit: count.budget}
    if method != "COBYQA":  # It has a default for each number of parameters.
        options["maxiter"] = 10**6
    fun = count.one if method == "COBYQA" else count.finite()
    found = minimize(fun, function.start, method=method, bounds=box, options=options)
    return np.asarray(found.x)


def powell(count: Count, seed: int) -> np.ndarray:
    """NLopt's NEWUOA; with bounds, its BOBYQA."""
    import nlopt

    del seed
    function, fun = count.function, count.finite()
    bounded = function.bounds is not None
    name = nlopt.LN_BOBYQA if bounded else nlopt.LN_NEWUOA
    search = nlopt.opt(name, function.dimension)
    if function.bounds is not None:
        search.set_lower_bounds(function.bounds[0])
        search.set_upper_bounds(function.bounds[1])
    search.set_min_objective(lambda x, _: fun(x))
    search.set_maxeval(count.budget)
    try:
        return np.asarray(search.optimize(function.start))
    except (nlopt.RoundoffLimited, RuntimeError, ValueError):
        return count.lowest[1]


def cma(count: Count, seed: int) -> np.ndarray:
    """pycma with restarts of twice the population, separable above 200 parameters.

    The first standard deviation is 0.5, at most a quarter of the box. With noise, it
    returns its mean, as pycma advises.
    """
    import cma

    function, size = count.function, 1
    options: dict[str, Any] = {"verbose": -9, "maxfevals": np.inf}
    options["CMA_diagonal"] = function.dimension > 200
    scale = 0.5
    if function.bounds is not None:
        lower, upper = function.bounds
        options["bounds"] = [list(lower), list(upper)]
        scale = float(min(scale, np.min(upper - lower) / 4))
    mean = function.start
    population = 4 + int(3 * np.log(function.dimension))
    with contextlib.suppress(Finished):
        while not count.finished:
            options |= {"seed": 1000 * seed + size, "popsize": size * population}
            search = cma.CMAEvolutionStrategy(function.start, scale, options)
            while not search.stop() and not count.finished:
                points = search.ask()
                search.tell(points, [count.one(x) for x in points])
                if size == 1:
                    mean = np.asarray(search.result.xfavorite)
            size *= 2
    return mean


def _box(function: Function) -> tuple[np.ndarray, np.ndarray]:
    """The bounds, or for tools that need some, three sizes around the start."""
    if function.bounds is not None:
        return function.bounds
    size = 3 * max(1.0, float(np.sqrt(np.mean(function.start**2))))
    return function.start - size, function.start + size


def differential(count: Count, seed: int) -> np.ndarray:
    """SciPy's differential evolution, from the start, in a box."""
    function = count.function
    lower, upper = _box(function)
    found = differential_evolution(
        count.finite(),
        list(zip(lower, upper, strict=True)),
        rng=seed,
        x0=function.start,
        maxiter=10**6,
        polish=False,
    )
    return np.asarray(found.x)


def optuna(count: Count, seed: int) -> np.ndarray:
    """Optuna's default sampler, TPE, whose first trial is the start, in a box."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    function = count.function
    names = [f"x{i}" for i in range(function.dimension)]
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed))
    study.enqueue_trial(dict(zip(names, function.start.tolist(), strict=True)))
    limits = list(zip(names, *_box(function), strict=True))

    def of_trial(trial: Any) -> float:
        return count.one(np.array([trial.suggest_float(*limit) for limit in limits]))

    study.optimize(of_trial, n_trials=count.budget)
    return np.array([study.best_params[name] for name in names])


class Method(NamedTuple):
    """A tool, the most parameters that it is run with, and the module that it needs."""

    run: Callable[[Count, int], np.ndarray]
    most: int = 1000
    needs: str = "radazo_jax"

    def takes(self, dimension: int) -> bool:
        there = importlib.util.find_spec(self.needs) is not None
        return there and dimension <= self.most


DEFAULT = "default"
METHODS = {
    DEFAULT: Method(default),
    "lbfgsb": Method(functools.partial(scipy, method="L-BFGS-B")),
    "powell": Method(functools.partial(scipy, method="Powell")),
    "newuoa": Method(powell, 100, "nlopt"),
    "cma": Method(cma, needs="cma"),
    "cobyqa": Method(functools.partial(scipy, method="COBYQA"), 12),
    "simplex": Method(functools.partial(scipy, method="Nelder-Mead"), 20),
    "differential": Method(differential, 100),
    "optuna": Method(optuna, 12, "optuna"),
}
# As tables have them.
NAMES = {
    DEFAULT: "the default",
    "lbfgsb": "L-BFGS-B, differences",
    "powell": "Powell",
    "newuoa": "NEWUOA/BOBYQA",
    "cma": "CMA",
    "cobyqa": "COBYQA, d ≤ 12",
    "simplex": "Nelder-Mead, d ≤ 20",
    "differential": "differential evolution, d ≤ 100",
    "optuna": "Optuna's TPE, d ≤ 12",
}


def measured(
    function: Function,
    budget: int,
    run: Callable[[Count, int], np.ndarray | None],
    seed: int,
) -> dict[str, Any]:
    """Runs a method: evaluations to targets, the lowest gap, and with noise the last.

    All gaps are shares of the gap at the start, without noise. A tool that fails ends
    its run, with what it has found.
    """
    count, point = Count(function, budget, seed), None
    ends = () if run is default else (ValueError, TypeError, np.linalg.LinAlgError)
    with warnings.catch_warnings(), np.errstate(all="ignore"), jax.enable_x64(True):
        warnings.simplefilter("ignore")
        with contextlib.suppress(Finished, *ends):
            point = run(count, seed)
    found: dict[str, Any] = {"evaluations": count.reached, "gap": count.gap}
    if function.noise or function.relative:
        point = count.lowest[1] if point is None else point
        found["returned"] = (function.fun(point) - function.least) / function.gap
    return numbers(found)
