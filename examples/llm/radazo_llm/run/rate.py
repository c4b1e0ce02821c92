"""The learning rate of a run whose settings have none: it is measured at its start."""

from typing import Any

import jax.numpy as jnp

import radazo_jax as zo
from radazo_llm.settings import REWARD, Settings


def measured(settings: Settings, fun: Any, params: Any, sample: Any) -> float:
    """Measures the learning rate, which falls to 0 over the run.

    Args:
      settings: The settings, whose rate is 0.
      fun: The loss, `fun(params, xi)`.
      params: The parameters before the first step.
      sample: Draws ξ.

    Raises:
      ValueError: If `zo.find_learning_rate` finds none.
    """

    def mean(params: Any, xi: Any) -> Any:
        return jnp.nanmean(fun(params, xi))  # Of rewards, one for each prompt.

    try:
        found = zo.find_learning_rate(
            mean if settings.command == REWARD else fun,
            params,
            settings.num_steps,
            sample=sample,
            b1=settings.b1,
            key=settings.seed,
            distribution=settings.estimator().distribution,
            smoothing=settings.smoothing,
        )
    except ValueError as error:
        raise ValueError(
            "--learning-rate must be given if none can be measured, as of a model that "
            f"has not learned anything: {error!s:.120}... Give --learning-rate 1e-3, "
            "and a smaller one if the loss rises."
        ) from error
    print(f"{found}\n", flush=True)
    return found.learning_rate
