"""The class of a function, according to the first steps of the default method."""

from typing import Any, NamedTuple

import numpy as np
import optax

from radazo_jax._src import trees
from radazo_jax._src.base import Objective
from radazo_jax._src.estimators.covariance import CmaState
from radazo_jax._src.runs.minimize import minimize_black_box
from radazo_jax._src.runs.results import Report
from radazo_jax._src.steps import stages
from radazo_jax._src.steps.states import RunError

# Classes that stages do not distinguish.
FAILING, CONSTANT = "failing", "constant"

ADVICE = {
    stages.SCALED: "sizes of parameters are far apart: pass scale=found.sizes",
    stages.NOISY: "fun changes at one point: if it should be exact, look for a random "
    "number without a seed",
    stages.IN_STEPS: "fun is made of steps: if you know their width, name "
    "estimators.cma(step_size=...)",
    CONSTANT: "fun did not change, also at distant points: does it use its argument?",
}

# A first look takes fewer steps than this.
_MOST_STEPS = 20


class Look(NamedTuple):
    """The findings of the first steps of the default method.

    Attributes:
      kind: The class of the function.
      sizes: The sizes of the parameters if it is "scaled", a tree like them.
    """

    kind: str
    sizes: Any


def first_look(fun: Objective, params: optax.Params, key: Any) -> Look:
    """The first steps of the default method, up to one that moves.

    On a function in steps it is followed by a step of the strategy, whose points are
    far apart: if all values are equal, the function is constant.
    """
    values: list[np.ndarray] = []

    def see(report: Report) -> bool:
        values.append(report.values[np.isfinite(report.values)])
        found = report.state.estimator_state
        if isinstance(found, CmaState):
            return True
        if found.in_steps:
            return _differ(values)
        return bool(found.complete | found.exhausted)

    options: dict[str, Any] = {
        "num_steps": _MOST_STEPS,
        "progress": False,
        "callback": see,
    }
    try:
        result = minimize_black_box(fun, params, key=key, **options)
    except RunError as error:
        result = error.result
    if result.history.failed.sum() > 0:
        return Look(FAILING, None)
    found = result.state.estimator_state
    if isinstance(found, CmaState):
        return Look(stages.IN_STEPS if _differ(values) else CONSTANT, None)
    kind, sizes = stages.kind_of(found), None
    if kind == stages.SCALED:
        sizes = trees.like_tree(found.sizes.guesses, result.state.params)
    return Look(kind, sizes)


def _differ(values: list[np.ndarray]) -> bool:
    return np.unique(np.concatenate(values)).size > 1
