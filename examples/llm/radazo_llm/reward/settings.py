"""The settings of a run on rewards.

Libraries are imported when they are needed, so that the command line can list its
options at once.
"""

import dataclasses
import math
from typing import Any, Literal, get_args


@dataclasses.dataclass(frozen=True)
class Settings:
    """A run, apart from the model, the task and the rewards."""

    method: Literal["radazo", "zo_adamm", "zo_sgd"] = "radazo"
    tune: Literal["lora", "full"] = "lora"
    distribution: Literal["low_rank", "gaussian"] = "gaussian"
    shaping: Literal["z_score", "by_group", "centered_ranks", "pair_signs"] = "by_group"
    population_size: int = 32
    smoothing: float = 0.05  # σ
    learning_rate: float = 1e-3  # η, on a cosine to 0.
    b1: float = 0.9
    b2: float = 0.99
    decay: float = 0.0  # Toward the start.
    num_prompts: int = 16  # Of a step.
    num_tokens: int = 6  # Of a reply, at most.
    temperature: float = 0.0
    num_problems: int = 2048
    num_steps: int = 200
    eval_every: int = 20
    eval_problems: int = 256
    seed: int = 0
    lora_rank: int = 4
    lora_alpha: float = 8.0
    instruction: str = ""  # In front of each question.
    timeout: float = 30.0  # Seconds of a call of a reward function.

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            name, value = field.name, getattr(self, field.name)
            if get_args(field.type) or isinstance(value, str):
                continue
            zero = name in ("seed", "decay", "temperature", "b1", "b2")
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
