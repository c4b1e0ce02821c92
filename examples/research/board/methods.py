"""The methods by name: what is tuned, and up to which dimension they are run."""

import functools
import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

import radazo_jax as zo
from board import opponents, ours
from board.oracle import Oracle, opened
from board.problems import Case, Problem
from board.report import UNTUNED
from common.record import numbers


class Method(NamedTuple):
    """A method, with its scales, to run on a problem.

    Attributes:
      run: `(problem, make_oracle, seed)` gives an oracle for each scale that it tried.
      needs: The module without which it is left out.
      most: The dimension up to which it is run.
      traced: Whether it needs a function that JAX can trace.
    """

    run: Callable[[Problem, Callable[[], Oracle], int], list[Oracle]]
    needs: str = "radazo_jax"
    most: int = 10_000
    traced: bool = False

    def takes(self, kind: str, dimension: int) -> bool:
        there = importlib.util.find_spec(self.needs) is not None
        black_box = kind in ("BBOB", "Noisy")
        return there and dimension <= self.most and not (self.traced and black_box)


def _each(run: Callable[..., None], *scales: dict[str, Any]) -> Callable[..., Any]:
    """A run with each of the keyword arguments."""

    def all_scales(
        problem: Problem, make_oracle: Callable[[], Oracle], seed: int
    ) -> list[Oracle]:
        oracles = []
        for scale in scales or ({},):
            oracles.append(make_oracle())
            run(problem, oracles[-1], seed, **scale)
        return oracles

    return all_scales


_sweep = functools.lru_cache(maxsize=1)(ours.sweep)


def _swept(
    name: str, scales: slice, estimator: zo.GradientEstimator
) -> Callable[..., Any]:
    """A part of the sweep over learning rates."""

    def run(
        problem: Problem, make_oracle: Callable[[], Oracle], seed: int
    ) -> list[Oracle]:
        return _sweep(problem, make_oracle, seed, estimator)[name][scales]

    return run


def _of_cma(kind: str) -> Callable[..., Any]:
    return _each(opponents.cma, *({"scale": s, "kind": kind} for s in (0.1, 0.5)))


def _of_evosax(name: str, *scales: float) -> Callable[..., Any]:
    """At scales of the distance to the minimum, or as it is."""
    options = [{"name": name, "scale": scale} for scale in scales or (None,)]
    return _each(opponents.evosax, *options)


def swept(estimator: zo.GradientEstimator) -> dict[str, Method]:
    """The methods with a learning rate, tuned and as in the paper."""
    return {
        f"{name}, {how}": Method(_swept(name, part, estimator), most=1100)
        for how, part in (("best of 5", slice(1, None)), ("η = 0.001", slice(0, 1)))
        for name in ours.RATES
    }


_SNES = {"needs": "evosax", "most": 330}
_OPEN_ES = {"needs": "evosax", "most": 100}
METHODS = {
    UNTUNED: Method(_each(ours.DEFAULT)),
    "radazo_jax, not accelerated": Method(_each(ours.PLAIN)),
    "R-AdaZO, parabolic step": Method(_each(ours.RADAZO), traced=True),
    **swept(ours.FORWARD),
    "SciPy L-BFGS-B": Method(_each(opponents.lbfgs), needs="scipy"),
    "CMA, best of 2": Method(_of_cma("full"), "cma", 200),
    "sep-CMA, best of 2": Method(_of_cma("separable"), "cma", 330),
    "VkD-CMA, best of 2": Method(_of_cma("vkd"), "cma", 1100),
    "NGOpt": Method(_each(opponents.nevergrad), needs="nevergrad", most=200),
    "SNES": Method(_of_evosax("SNES"), **_SNES),
    "SNES, best of 2": Method(_of_evosax("SNES", 0.1, 0.5), **_SNES),
    "Open_ES": Method(_of_evosax("Open_ES"), **_OPEN_ES),
    "Open_ES, best of 3": Method(_of_evosax("Open_ES", 0.1, 0.3, 1.0), **_OPEN_ES),
}


def measure(case: Case, method: Method, budget: int, seed: int) -> dict[str, Any]:
    """Returns a row of a record: for each target, the best of the scales."""
    problem, make_oracle = opened(case, budget, seed)
    oracles = method.run(problem, make_oracle, seed)
    reached = [oracle.reached for oracle in oracles]
    gap = min(oracle.gap for oracle in oracles)
    return numbers({"evaluations": np.min(reached, axis=0), "gap": gap})
