"""Tests whether the method without tuning diverges under bad conditions.

The first step is wrong by 10⁶, the curvature changes by 10⁴ during the run, or values
are noisy; in float32 and float64.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import optax

import radazo_jax as zo
from board import problems
from board.ours import DEFAULT
from board.problems import Problem
from common.record import numbers

BUDGET = 10  # In units of d + 1.
_MOST = 200  # The dimension up to which problems are taken.
_CHANGE = 1e4
# The gap at which the curvature changes, and the width of the change, as shares.
_WHERE, _WIDTH = 0.1, 0.005
# The share of the gap above which a run has gone up.
_UP = 1.5
# The default optimizer and search, whose state can hold a first step.
OPTIMIZER = optax.sgd(1.0)
SEARCH = zo.search.parabolic(initial_step_size=1.0)


class Harm(NamedTuple):
    """A bad condition: of the first step, of the curvature, or of the values."""

    step: float = 1.0
    change: Callable[[np.ndarray], np.ndarray] = lambda share: share
    noise: float = 0.0


def steeper(share: np.ndarray) -> np.ndarray:
    """Grows 10⁴ times as fast below a tenth of the gap."""
    near = -_WIDTH * np.logaddexp(-share / _WIDTH, -_WHERE / _WIDTH)
    return share + (_CHANGE - 1) * near


def flatter(share: np.ndarray) -> np.ndarray:
    """Grows 10⁴ times as fast above a tenth of the gap."""
    above = _WIDTH * np.logaddexp(0, (share - _WHERE) / _WIDTH)
    return share + (_CHANGE - 1) * above


HARMS = {
    "none": Harm(),
    "first step × 10⁶": Harm(step=1e6),
    "first step × 10⁻⁶": Harm(step=1e-6),
    "curvature × 10⁴ on the way": Harm(change=steeper),
    "curvature × 10⁻⁴ on the way": Harm(change=flatter),
    "1 % noise": Harm(noise=0.01),
}


def measures(fast: bool, seed: int) -> Iterator[problems.Row]:
    """The rows of the record."""
    order = ("Synthetic", "Rotated", "CUTEst", "BBOB")
    found = [
        c for c in problems.cases(fast) if c.kind in order and c.dimension <= _MOST
    ]
    for case in sorted(found, key=lambda case: order.index(case.kind)):
        built = functools.cache(case.make)
        for name, harm in HARMS.items():
            for dtype in ("float32", "float64"):

                def measure(built=built, harm=harm, dtype=dtype) -> dict[str, Any]:
                    return numbers(run(built(), harm, dtype, seed))

                row = {"kind": case.kind, "problem": case.name}
                row |= {"dimension": case.dimension, "harm": name, "dtype": dtype}
                yield row, measure


def run(problem: Problem, harm: Harm, dtype: str, seed: int) -> dict[str, Any]:
    """Runs the method; gaps are shares of the gap at the start of the function."""
    unit, draw = problem.gap, np.random.default_rng(seed)

    def exact(points: np.ndarray) -> np.ndarray:
        shares = (problem.evaluate(np.asarray(points)) - problem.least) / unit
        return harm.change(shares)

    def fun(points: np.ndarray) -> np.ndarray:
        values = exact(points)
        return values + harm.noise * draw.normal(size=len(values))

    start = problem.start.astype(dtype)
    first = float(exact(start[None])[0])
    # About what the first step is by default, a fiftieth of the loss by its slope.
    rate = np.diff(harm.change(np.array([1 - 1e-6, 1])))[0] / 1e-6
    slope = rate**2 * problem.slope / unit**2
    size = harm.step * 0.02 * (first / slope if slope else 1.0)
    method = OPTIMIZER, zo.default_method(start)[1], SEARCH
    state = zo.ask_tell(start, *method, key=seed).state
    search_state = state.search_state._replace(step_size=np.asarray(size, dtype))
    state = state._replace(search_state=search_state)
    num_steps = BUDGET * (problem.dimension + 1) // DEFAULT.each(problem.dimension)
    ends, best, error = [], np.inf, None
    # No step has evaluated the end of the last one: another step rejects a rise.
    for steps in (max(1, num_steps), 1):
        try:
            result = zo.minimize_black_box(
                fun,
                start,
                *method,
                num_steps=steps,
                state=state,
                batched=True,
                progress=False,
            )
            state, best = result.state, min(best, result.best.value)
        except zo.RunError as failed:
            state, error = failed.state, str(failed)
        ends.append(float(exact(np.asarray(state.params)[None])[0]) / first)
    return {
        "last": ends[0],
        "next": ends[1],
        "best": best / first,
        "up": not ends[0] <= _UP,
        "diverged": not min(ends) <= _UP,
        "error": error,
    }
