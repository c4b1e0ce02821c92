"""The function that methods evaluate: it counts, and records reached targets."""

import functools
from collections.abc import Callable, Sequence

import numpy as np

from board.problems import Case, Problem

# The share of the gap at the start that is left.
TARGETS = (1e-1, 1e-2, 1e-3)


class Finished(Exception):
    """There is nothing left to find, or nothing left to spend."""


class Oracle:
    """Values of a problem for one run, all of which are counted.

    Attributes:
      count: Number of evaluations.
      reached: The number of the evaluation that first was at each target, counted from
        1; infinite if none was.
      gap: The lowest gap so far, as a share of the gap at the start, without noise.
      outside: Number of points outside of the problem's bounds.
    """

    def __init__(
        self,
        problem: Problem,
        budget: int,
        seed: int = 0,
        targets: Sequence[float] = TARGETS,
    ):
        self.problem, self.budget, self.targets = problem, budget, targets
        self.count, self.gap, self.outside = 0, 1.0, 0
        self.reached = np.full(len(targets), np.inf)
        self._noise = np.random.default_rng(seed)

    @property
    def finished(self) -> bool:
        return self.count >= self.budget or bool(np.isfinite(self.reached).all())

    def __call__(self, points: np.ndarray) -> np.ndarray:
        """Returns the values at points [n, d], with the noise of the problem."""
        points = np.asarray(points)
        if self.problem.bounds is not None:
            lower, upper = self.problem.bounds
            out = (points < lower) | (points > upper)
            self.outside += int(np.any(out, axis=1).sum())
        return self.told(self.problem.evaluate(points))

    def told(self, values: np.ndarray) -> np.ndarray:
        """Counts values that were evaluated elsewhere, and adds the noise."""
        self.see(values)
        if self.problem.noise:
            values = values + self.problem.noise * self._noise.normal(size=len(values))
        return values

    def see(self, values: np.ndarray, each: int = 1) -> None:
        """Counts values without noise, each the first of so many evaluations."""
        numbers = self.count + 1 + each * np.arange(len(values))
        self.count += each * len(values)
        gaps = (np.asarray(values, np.float64) - self.problem.least) / self.problem.gap
        gaps = np.where(np.isfinite(gaps) & (numbers <= self.budget), gaps, np.inf)
        for i, target in enumerate(self.targets):
            first = numbers[gaps <= target]
            if first.size:
                self.reached[i] = min(self.reached[i], first[0])
        self.gap = float(min(self.gap, gaps.min(initial=np.inf)))

    def one(self, point: np.ndarray) -> float:
        """Returns the value at one point; raises `Finished` if the run must end."""
        if self.finished:
            raise Finished
        return float(self(np.asarray(point)[None])[0])


@functools.cache
def opened(case: Case, budget: int, seed: int) -> tuple[Problem, Callable[[], Oracle]]:
    """A problem, built once, and what makes oracles with a budget of so many d + 1."""
    problem = case.make()
    most = budget * (problem.dimension + 1)
    return problem, functools.partial(Oracle, problem, most, seed)
