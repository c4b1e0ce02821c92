"""The class of a function, according to the first steps of the default method."""

from typing import Any

import numpy as np
import optax

from radazo_jax._src import trees
from radazo_jax._src.base import Objective
from radazo_jax._src.estimators.covariance import CmaState
from radazo_jax._src.runs.minimize import minimize_black_box
from radazo_jax._src.runs.results import Report
from radazo_jax._src.steps import stages
from radazo_jax._src.steps.states import RunError

# A first look at the class of a function takes fewer steps than this.
_MOST_STEPS = 20

ADVICE = {
    stages.SCALED: "sizes of parameters are far apart: pass scale=found.sizes",
    stages.NOISY: "fun changes at one point: if it should be exact, look for a random "
    "number without a seed",
    stages.IN_STEPS: "fun is made of steps: if you know their width, name "
    "estimators.cma(step_size=...)",
    "constant": "fun did not change, also at distant points: does it use its argument?",
}


def class_of(fun: Objective, params: optax.Params, key: Any) -> tuple[str, Any]:
    """The class of a function, and the sizes of its parameters if they are far apart.

    It is what the default method sees in its first steps, up to one that moves. On a
    function in steps these are followed by a step of the strategy, whose points are far
    apart: if all values are equal, the function is constant.
    """
    values: list[np.ndarray] = []

    def see(report: Report) -> bool:
        values.append(report.values[np.isfinite(report.values)])
        found = report.state.estimator_state
        if isinstance(found, CmaState):
            return True
        if found.in_steps:
            return np.unique(np.concatenate(values)).size > 1
        return bool(found.complete | found.exhausted)

    given = {"num_steps": _MOST_STEPS, "progress": False, "callback": see}
    try:
        result = minimize_black_box(fun, params, key=key, **given)  # type: ignore[arg-type]
    except RunError as error:
        result = error.result
    if result.history.failed.sum() > 0:
        return "failing", None
    found = result.state.estimator_state
    if isinstance(found, CmaState):
        differ = np.unique(np.concatenate(values)).size > 1
        return (stages.IN_STEPS if differ else "constant"), None
    kind = stages.kind_of(found)
    if kind != stages.SCALED:
        return kind, None
    return kind, trees.like_tree(found.sizes.guesses, result.state.params)
