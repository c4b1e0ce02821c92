"""The settings of a run on rewards.

Libraries are imported when they are needed, so that the command line can list its
options at once.
"""

import dataclasses
import math
from typing import Any, Literal, get_args

from radazo_llm.tune.settings import LENGTH, METHOD, MODEL, setting

_FROM_0 = ("seed", "decay", "temperature", "eval_temperature", "b1", "b2")


@dataclasses.dataclass(frozen=True)
class Settings:
    """A run, apart from the model, the task and the rewards."""

    method: Literal["radazo", "zo_adamm", "zo_sgd"] = setting(
        "radazo", METHOD, "The optimizer."
    )
    tune: Literal["lora", "full"] = setting(
        "lora", MODEL, "What is tuned: adapters, or all parameters."
    )
    distribution: Literal["low_rank", "gaussian"] = setting(
        "gaussian",
        METHOD,
        "The directions of members; low_rank makes steps of full tuning cheaper.",
    )
    shaping: Literal["z_score", "by_group", "centered_ranks", "pair_signs"] = setting(
        "by_group",
        METHOD,
        "How rewards become weights; by_group compares replies to one prompt.",
    )
    population_size: int = setting(
        32, METHOD, "Members of a step: more take longer and are less noisy."
    )
    smoothing: float = setting(
        0.05,
        METHOD,
        "σ, the distance of the members: the smallest at which their rewards differ.",
    )
    learning_rate: float = setting(1e-3, METHOD, "η, which falls to 0 on a cosine.")
    b1: float = setting(0.9, METHOD, "β₁, the average of the estimates.")
    b2: float = setting(0.99, METHOD, "β₂, the average of their squares.")
    decay: float = setting(0.0, METHOD, "The pull toward the untuned parameters.")
    num_prompts: int = setting(
        16, LENGTH, "Prompts of a step, which all members answer."
    )
    num_tokens: int = setting(6, LENGTH, "Tokens of a reply, at most.")
    temperature: float = setting(
        0.0, METHOD, "0 takes the likeliest tokens; above, tokens are drawn."
    )
    num_problems: int = setting(
        2048, LENGTH, "Problems to train on; all of the data if it has fewer."
    )
    num_steps: int = setting(200, LENGTH, "Steps of the run.")
    eval_every: int = setting(20, LENGTH, "Steps from one evaluation to the next.")
    eval_problems: int = setting(
        256, LENGTH, "Held-out problems; all of the data if it has fewer."
    )
    eval_temperature: float = setting(
        0.0, LENGTH, "The temperature of replies to held-out problems."
    )
    seed: int = setting(0, LENGTH, "Of problems, directions and drawn tokens.")
    lora_rank: int = setting(4, MODEL, "The rank of the adapters.")
    lora_alpha: float = setting(
        8.0, MODEL, "Adapters are multiplied by this number over their rank."
    )
    instruction: str = setting("", MODEL, "A text in front of each question.")
    timeout: float = setting(
        30.0, LENGTH, "Seconds of a call of a reward function; then it is ended."
    )

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            name, value = field.name, getattr(self, field.name)
            if get_args(field.type) or isinstance(value, str):
                continue
            zero = name in _FROM_0
            if value < 0 or not (zero or value) or not math.isfinite(value):
                expected = "0 or more" if zero else "positive"
                raise ValueError(f"{name} must be {expected}; got {value}.")
        if max(self.b1, self.b2) >= 1:
            raise ValueError(f"b1 and b2 must be below 1; got {self.b1, self.b2}.")
        self._check_population()

    def _check_population(self) -> None:
        if self.population_size % 2:
            raise ValueError(
                f"population_size must be even; got {self.population_size}."
            )

    def optimizer(self) -> Any:
        """The optimizer: a method's scaling, the pull to the start, and a cosine."""
        import jax.numpy as jnp
        import optax

        import radazo_jax as zo

        cosine = optax.cosine_decay_schedule(self.learning_rate, self.num_steps)
        pull = [zo.anchored_decay(None, self.decay)] if self.decay else []

        def rate(count: Any) -> Any:
            return cosine(count.astype(jnp.float32))

        return optax.chain(self._scale(), *pull, optax.scale_by_learning_rate(rate))

    def _scale(self) -> Any:
        import optax

        import radazo_jax as zo

        if self.method == "zo_sgd":
            return optax.identity()
        scale = {"radazo": zo.scale_by_radazo, "zo_adamm": zo.scale_by_zo_adamm}
        return scale[self.method](self.b1, self.b2)

    def estimator(self) -> Any:
        import radazo_jax as zo

        return zo.evolution_strategy(
            getattr(zo, self.distribution)(),
            self.population_size,
            self.smoothing,
            shaping=getattr(zo.shaping, self.shaping)(),
        )
