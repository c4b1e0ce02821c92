"""The class of a function, according to the first steps of the default method."""

from typing import Any

import optax

from radazo_jax._src import trees
from radazo_jax._src.base import Objective
from radazo_jax._src.estimators.full import FullDifferenceState
from radazo_jax._src.runs.minimize import minimize_black_box
from radazo_jax._src.runs.results import Result
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
}

# A first look takes fewer steps than this.
_MOST_STEPS = 20


def first_look(fun: Objective, params: optax.Params, key: Any) -> Result:
    """The run of the default method up to the first step that moves."""
    try:
        return minimize_black_box(
            fun,
            params,
            key=key,
            num_steps=_MOST_STEPS,
            progress=False,
            callback=lambda report: _is_over(report.state.estimator_state),
        )
    except RunError as error:
        result: Result = error.result
        return result


def _is_over(found: FullDifferenceState) -> bool:
    """Whether the first look is over: the next step moves, or is of another stage."""
    return bool(found.complete | found.exhausted)


def class_of(look: Result) -> str:
    """The class of a function, as far as the stages tell classes apart."""
    failed = look.history.failed.sum() > 0
    return FAILING if failed else stages.kind_of(look.state.estimator_state)


def sizes_of(look: Result) -> Any:
    """The sizes of the parameters, a tree like them."""
    return trees.like_tree(look.state.estimator_state.sizes.guesses, look.state.params)
