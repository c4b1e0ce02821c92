"""The settings of a tuning run.

Libraries are imported when they are needed, so that the command line can list its
options at once.
"""

import dataclasses
import math
from typing import Any, Literal, get_args

MODEL, METHOD, LENGTH = "What is tuned", "The method", "The run"
_FROM_0 = ("seed", "learning_rate", "warmup_steps", "final_batch_size", "last_layers")


def setting(default: Any, group: str, text: str) -> Any:
    """A field with its help text, and the group that the command line lists it in."""
    return dataclasses.field(default=default, metadata={"group": group, "help": text})


@dataclasses.dataclass(frozen=True)
class Settings:
    """All that defines a run, except the model and the data.

    The defaults are the paper's, but for η: central differences with one Gaussian
    direction, and the same μ, β₁ and β₂ for all methods.
    """

    method: Literal["radazo", "zo_adamm", "zo_rmsprop", "zo_sgd", "adamw"] = setting(
        "radazo", METHOD, "The optimizer. adamw is by backpropagation, to compare with."
    )
    tune: Literal["lora", "prompt", "full", "scales"] = setting(
        "lora",
        MODEL,
        "What is tuned: adapters, a soft prompt, all parameters, or the scales of "
        "quantized matrices.",
    )
    quantize: Literal["no", "int8", "int4", "file"] = setting(
        "no", MODEL, "How frozen matrices are stored; file leaves them as in the file."
    )
    objective: Literal["classification", "language_model", "accuracy"] = setting(
        "classification",
        METHOD,
        "The loss: the cross-entropy of the candidates or of the tokens that follow, "
        "or the share of wrong choices. The data decide by default. For a metric of "
        "what the model writes, use radazo-llm reward --data.",
    )
    distribution: Literal["gaussian", "sphere", "rademacher", "low_rank"] = setting(
        "gaussian", METHOD, "The directions along which the loss is measured."
    )
    num_directions: int = setting(
        1, METHOD, "K: more make a step longer and its estimate less noisy."
    )
    difference: Literal["central", "forward"] = setting(
        "central", METHOD, "central takes 2K evaluations per step, forward K + 1."
    )
    smoothing: float = setting(
        1e-3,
        METHOD,
        "μ, the distance of the points: larger for a loss that moves in jumps, such "
        "as accuracy.",
    )
    learning_rate: float = setting(
        0.0,
        METHOD,
        "η, at its largest; 0 measures it before the first step, and takes the cosine.",
    )
    bias_correction: bool = setting(
        False, METHOD, "Whether R-AdaZO's first steps are no longer than later ones."
    )
    schedule: Literal["constant", "cosine"] = setting(
        "constant", METHOD, "The learning rate over the run; a cosine ends at 0."
    )
    warmup_steps: int = setting(
        0, METHOD, "Steps in which the learning rate rises from 0."
    )
    b1: float = setting(0.9, METHOD, "β₁, the average of the estimates.")
    b2: float = setting(0.99, METHOD, "β₂, the average of their squares.")
    batch_size: int = setting(
        16, LENGTH, "Examples of a step: more take longer and are less noisy."
    )
    final_batch_size: int = setting(
        0,
        LENGTH,
        "The batch doubles at equal intervals until it has this size; 0 leaves it.",
    )
    num_buckets: int = setting(
        1,
        LENGTH,
        "Groups of examples of similar length. Each compiles a program, and is padded "
        "to its own longest.",
    )
    last_layers: int = setting(
        0, MODEL, "Only these are tuned and run in a step; 0 for all."
    )
    num_steps: int = setting(
        1000, LENGTH, "More steps reach a lower loss, and take as much longer."
    )
    seed: int = setting(0, LENGTH, "Of directions, adapters and the order of examples.")
    eval_every: int = setting(100, LENGTH, "Steps from one evaluation to the next.")
    eval_batch_size: int = setting(
        64, LENGTH, "Examples that are evaluated at once: fewer take less memory."
    )
    checkpoint_every: int = setting(
        100, LENGTH, "Steps from one checkpoint to the next."
    )
    lora_rank: int = setting(8, MODEL, "The rank of the adapters.")
    lora_alpha: float = setting(
        16.0, MODEL, "Adapters are multiplied by this number over their rank."
    )
    lora_targets: str = setting(
        "q_proj,v_proj", MODEL, "The projections that get adapters."
    )
    prompt_length: int = setting(5, MODEL, "The tokens of a soft prompt.")

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            name, value = field.name, getattr(self, field.name)
            if choices := get_args(field.type):
                valid, expected = value in choices, f"one of {', '.join(choices)}"
            elif name in ("b1", "b2"):
                valid, expected = 0 <= value < 1, "in [0, 1)"
            elif name in ("lora_targets", "bias_correction"):
                continue  # The model decides which targets it has.
            elif name in _FROM_0:
                valid, expected = 0 <= value < math.inf, "0 or more"
            else:
                valid, expected = 0 < value < math.inf, "positive"
            if not valid:
                raise ValueError(f"{name} must be {expected}; got {value}.")
        rounded = self.quantize in ("int8", "int4")
        if self.last_layers and (self.tune not in ("lora", "scales") or rounded):
            raise ValueError(
                "last_layers must be 0 unless lora or scales are tuned, and matrices "
                f"are those of the file; got {self.last_layers} with {self.tune} and "
                f"{self.quantize}."
            )
        if self.tune in ("full", "scales") and (self.tune == "full") == self.quantized:
            raise ValueError(
                "tune must not be full with quantize, and not scales without it; got "
                f"{self.tune} with {self.quantize}."
            )

    @property
    def num_evaluations(self) -> int:
        """Number of evaluations of the loss per step; a backward pass counts as two."""
        if self.method == "adamw":
            return 3
        forward = self.difference == "forward"
        return self.num_directions + 1 if forward else 2 * self.num_directions

    @property
    def quantized(self) -> bool:
        return self.quantize != "no"

    def optimizer(self, rate: Any, b1: Any) -> Any:
        """The optimizer, with η and β₁ as numbers, arrays or a schedule."""
        import optax

        import radazo_jax as zo

        if self.method == "adamw":
            return optax.adamw(rate, b1, self.b2)
        if self.method == "zo_sgd":
            return zo.zo_sgd(rate)
        if self.method == "zo_rmsprop":
            return zo.zo_rmsprop(rate, b2=self.b2)
        if self.method == "zo_adamm":
            return zo.zo_adamm(rate, b1, self.b2)
        return zo.radazo(rate, b1, self.b2, bias_correction=self.bias_correction)

    def estimator(self) -> Any:
        import radazo_jax as zo

        distribution = getattr(zo, self.distribution)()
        forward = self.difference == "forward"
        difference = zo.forward_difference if forward else zo.central_difference
        return difference(distribution, self.num_directions, self.smoothing)

    def learning_rate_at(self, step: int) -> float:
        """η of a step."""
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        if self.schedule == "constant":
            return self.learning_rate
        done = (step - self.warmup_steps) / max(self.num_steps - self.warmup_steps, 1)
        return self.learning_rate * (1 + math.cos(math.pi * min(done, 1.0))) / 2

    def batch_sizes(self) -> Any:
        """The number of examples of each step, int64 [num_steps]."""
        import numpy as np

        final = max(self.final_batch_size, self.batch_size)
        doublings = max(math.ceil(math.log2(final / self.batch_size)), 0)
        interval = np.arange(self.num_steps) * (doublings + 1) // self.num_steps
        return np.minimum(self.batch_size * 2**interval, final)

    def compiled(self) -> "Settings":
        """The settings that a compiled step depends on; the others at their defaults.

        Runs that differ in the others share a step.
        """
        names = (
            "method",
            "tune",
            "quantize",
            "objective",
            "distribution",
            "num_directions",
        )
        names = (*names, "difference", "smoothing", "b2", "bias_correction")
        return Settings(**{name: getattr(self, name) for name in names})
