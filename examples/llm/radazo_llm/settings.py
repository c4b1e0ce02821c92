"""The settings of a run, of examples or of rewards.

Libraries are imported when they are needed, so that the command line can list its
options at once.
"""

import dataclasses
import inspect
import math
import re
from collections.abc import Sequence
from typing import Any, Literal, Self, get_args

DATA, MODEL, METHOD, LENGTH = "The data", "What is tuned", "The method", "The run"
TUNE, REWARD = "tune", "reward"
# Settings that no step depends on, and so may change when a run is resumed.
FREE = ("num_steps", "eval_every", "eval_batch_size", "timeout")
_FROM_0 = ("seed", "learning_rate", "warmup_steps", "last_layers", "decay")
_FROM_0 = (*_FROM_0, "temperature", "eval_temperature")
_MOST_SMOOTHING = 1e3  # Above, points have nothing to do with the parameters.


def setting(default: Any, group: str, *, reward: Any = None, of: str = "") -> Any:
    """A field.

    Args:
      default: The default.
      group: The group that the command line lists it in.
      reward: The default of runs on rewards, if it is another.
      of: The command that has the setting alone.
    """
    other = default if reward is None else reward
    metadata = {"group": group, REWARD: other, "of": of}
    return dataclasses.field(default=default, metadata=metadata)


def option_name(field: str) -> str:
    """The option of the command line for a setting."""
    return "--" + field.removeprefix("num_").replace("_", "-")


@dataclasses.dataclass(frozen=True)
class Settings:
    r"""All that defines a run, except the model, the data and the rewards.

    The defaults of `tune` are the paper's, but for η: central differences with one
    Gaussian direction, and the same μ, β₁ and β₂ for all methods. The command line
    shows these descriptions:

    Attributes:
      labels: The word that stands for each value of the column label, such as
        great=1,terrible=0. The values themselves by default.
      template: The prompt of a text with a label; \n is a new line.
      chat: Make each prompt the turn of a user, in the model's chat template.
      all_turns: Score all replies of a conversation, and not the last.
      split_column: The column that says train, dev or test. By default, split if there
        is one.
      dev_share: The share of rows to evaluate on, if nothing names the splits.
      test_share: The share of rows that are measured before and after the run alone.
      skip_long: Leave out examples that are longer than the model's context.
      train_examples: Rows to train on, at most.
      eval_examples: Rows to evaluate, at most.
      method: The optimizer.
      tune: The part that is tuned: adapters, or all parameters.
      quantize: The storage of frozen matrices; file leaves them as in a GGUF file.
      objective: The loss: the cross-entropy of the candidates or of the tokens that
        follow, which the data decide, or the share of wrong choices. For a metric of
        what the model writes, use radazo-llm reward --data.
      distribution: The directions along which the loss is measured; low_rank makes
        steps of full tuning cheaper.
      num_directions: K: more make a step longer and its estimate less noisy.
      difference: central takes 2K evaluations per step, forward K + 1.
      shaping: The weights of rewards; by_group compares replies to one prompt.
      population_size: Members of a step: more take longer and are less noisy.
      smoothing: μ, the distance of the points: larger for a loss that moves in jumps,
        such as accuracy or a reward.
      learning_rate: η, at its largest; 0 measures it before the first step, and takes
        the cosine.
      schedule: The learning rate over the run; a cosine ends at 0.
      warmup_steps: Steps in which the learning rate rises from 0.
      b1: β₁, the average of the estimates.
      b2: β₂, the average of their squares.
      decay: The pull toward the untuned parameters.
      batch_size: Examples, or prompts, of a step: more take longer and are less noisy.
      num_buckets: Groups of examples of similar length. Each compiles a program, and is
        padded to its own longest.
      last_layers: Only these are tuned and run in a step; 0 for all.
      num_steps: More reach a lower loss, and take as much longer.
      seed: The seed of directions, adapters and the order of examples.
      eval_every: Steps from one evaluation to the next.
      eval_batch_size: Examples that are evaluated at once: fewer take less memory.
      num_tokens: Tokens that the model writes for a prompt, at most.
      temperature: 0 takes the likeliest tokens; above, tokens are drawn.
      eval_temperature: The temperature of replies to held-out problems.
      instruction: A text in front of each question.
      timeout: Seconds of a call of a reward function; then it is ended.
      lora_rank: The rank of the adapters.
      lora_alpha: Adapters are multiplied by this number over their rank.
      lora_targets: The projections that get adapters.
    """

    labels: str = setting("", DATA)
    template: str = setting(r"{text}\nAnswer:", DATA)
    chat: bool = setting(False, DATA)
    all_turns: bool = setting(False, DATA, of=TUNE)
    split_column: str = setting("", DATA)
    dev_share: float = setting(0.1, DATA)
    test_share: float = setting(0.0, DATA)
    skip_long: bool = setting(False, DATA, of=TUNE)
    train_examples: int = setting(10_000, DATA, reward=2048)
    eval_examples: int = setting(500, DATA, reward=256)
    method: Literal["radazo", "zo_adamm", "zo_rmsprop", "zo_sgd"] = setting(
        "radazo", METHOD
    )
    tune: Literal["lora", "full"] = setting("lora", MODEL)
    quantize: Literal["no", "file"] = setting("no", MODEL, of=TUNE)
    objective: Literal["auto", "classification", "language_model", "accuracy"] = (
        setting("auto", METHOD, of=TUNE)
    )
    distribution: Literal["gaussian", "sphere", "rademacher", "low_rank"] = setting(
        "gaussian", METHOD
    )
    num_directions: int = setting(1, METHOD, of=TUNE)
    difference: Literal["central", "forward"] = setting("central", METHOD, of=TUNE)
    shaping: Literal["z_score", "by_group", "centered_ranks", "pair_signs"] = setting(
        "by_group", METHOD, of=REWARD
    )
    population_size: int = setting(32, METHOD, of=REWARD)
    smoothing: float = setting(1e-3, METHOD, reward=0.05)
    learning_rate: float = setting(0.0, METHOD, reward=0.001)
    schedule: Literal["constant", "cosine"] = setting(
        "constant", METHOD, reward="cosine"
    )
    warmup_steps: int = setting(0, METHOD)
    b1: float = setting(0.9, METHOD)
    b2: float = setting(0.99, METHOD)
    decay: float = setting(0.0, METHOD)
    batch_size: int = setting(16, LENGTH)
    num_buckets: int = setting(1, LENGTH, of=TUNE)
    last_layers: int = setting(0, MODEL, of=TUNE)
    num_steps: int = setting(1000, LENGTH, reward=200)
    seed: int = setting(0, LENGTH)
    eval_every: int = setting(100, LENGTH, reward=20)
    eval_batch_size: int = setting(64, LENGTH)
    num_tokens: int = setting(32, LENGTH, reward=6)
    temperature: float = setting(0.0, METHOD, of=REWARD)
    eval_temperature: float = setting(0.0, LENGTH, of=REWARD)
    instruction: str = setting("", MODEL, of=REWARD)
    timeout: float = setting(30.0, LENGTH)
    lora_rank: int = setting(8, MODEL, reward=4)
    lora_alpha: float = setting(16.0, MODEL, reward=8.0)
    lora_targets: str = setting("q_proj,v_proj", MODEL)
    command: str = TUNE

    @classmethod
    def of(cls, command: str, **given: Any) -> Self:
        """The settings of a command, with its defaults."""
        defaults = {field.name: default_of(field, command) for field in fields(command)}
        return cls(**(defaults | given), command=command)

    def __post_init__(self) -> None:
        for field in fields(self.command):
            name, value = field.name, getattr(self, field.name)
            if choices := get_args(field.type):
                valid, expected = value in choices, f"one of {', '.join(choices)}"
            elif name in ("b1", "b2"):
                valid, expected = 0 <= value < 1, "in [0, 1)"
            elif isinstance(value, bool | str):
                continue  # The data or the model decide.
            elif name in ("dev_share", "test_share"):
                valid, expected = 0 <= value < 1, "in [0, 1)"
            elif name == "smoothing":
                valid = 0 < value <= _MOST_SMOOTHING
                expected = f"positive and at most {_MOST_SMOOTHING:g}"
            elif name in _FROM_0:
                valid, expected = 0 <= value < math.inf, "0 or more"
            else:
                valid, expected = 0 < value < math.inf, "positive"
            if not valid:
                raise ValueError(f"{option_name(name)} must be {expected}; got {value}")
        if not self.learning_rate and (self.method != "radazo" or self.num_steps < 2):
            raise ValueError(
                "--learning-rate must be positive unless it can be measured, with the "
                f"method radazo and --steps 2 or more; got 0 with {self.method} and "
                f"{self.num_steps}."
            )
        if self.tune == "full" and (self.last_layers or self.quantized):
            raise ValueError(
                "--tune must not be full with --last-layers or --quantize; got "
                f"{self.last_layers} and {self.quantize}."
            )
        if self.command == REWARD and self.population_size % 2:
            raise ValueError(
                f"--population-size must be even; got {self.population_size}."
            )

    @property
    def quantized(self) -> bool:
        return self.quantize != "no"

    def optimizer(self, rates: Any) -> Any:
        """The optimizer: a method's scaling, the pull to the start, and the rates.

        Args:
          rates: η of each step, float32 [steps].
        """
        import jax.numpy as jnp
        import optax

        import radazo_jax as zo

        betas: dict[str, Any] = {}
        if self.method in ("radazo", "zo_adamm"):
            betas["b1"] = self.b1
        if self.method != "zo_sgd":
            betas["b2"] = self.b2
        if self.method == "radazo" and self.command == TUNE:
            # A measured rate is for steps with it. Without, the first step is 10 times
            # as long, and a short run leaves the region that was measured.
            betas["bias_correction"] = not self.learning_rate
        pull = [zo.anchored_decay(None, self.decay)] if self.decay else []
        last = len(rates) - 1
        return optax.chain(
            getattr(zo, self.method)(1.0, **betas),
            optax.scale(-1.0),
            *pull,
            optax.scale_by_learning_rate(
                lambda count: jnp.asarray(rates)[jnp.minimum(count, last)]
            ),
        )

    def estimator(self) -> Any:
        """The estimator: of differences, or of a population."""
        import radazo_jax as zo

        distribution = getattr(zo, self.distribution)()
        if self.command == REWARD:
            return zo.evolution_strategy(
                distribution,
                self.population_size,
                self.smoothing,
                shaping=getattr(zo.shaping, self.shaping)(),
            )
        forward = self.difference == "forward"
        difference = zo.forward_difference if forward else zo.central_difference
        return difference(distribution, self.num_directions, self.smoothing)

    def rates(self, measured: float | None, ends: Sequence[int]) -> Any:
        """η of each step, float32 [the last end].

        Args:
          measured: The rate that was measured, which takes the cosine.
          ends: The numbers of steps that the run was started and continued with. Each
            part has a schedule of its own, so that earlier steps stay as they were.
        """
        import numpy as np

        parts = []
        for begin, end in zip((0, *ends), ends, strict=False):
            step = np.arange(end - begin)
            warm = 0 if begin else self.warmup_steps
            found = np.minimum((step + 1) / max(warm, 1), 1.0)
            if self.schedule == "cosine" or measured is not None:
                done = np.maximum(step - warm, 0) / max(end - begin - warm, 1)
                found *= (1 + np.cos(np.pi * np.minimum(done, 1.0))) / 2
            parts.append(found)
        top = self.learning_rate if measured is None else measured
        return (top * np.concatenate(parts)).astype(np.float32)


def descriptions(of: type) -> dict[str, str]:
    """The description of each attribute, from the class."""
    text = inspect.cleandoc(of.__doc__ or "").partition("Attributes:")[2]
    parts = re.split(r"\n  (\w+): ", text)[1:]
    pairs = zip(parts[::2], parts[1::2], strict=True)
    return {name: " ".join(words.split()) for name, words in pairs}


def default_of(field: dataclasses.Field[Any], command: str) -> Any:
    """The default of a setting for a command."""
    return field.metadata[REWARD] if command == REWARD else field.default


def fields(command: str) -> list[dataclasses.Field[Any]]:
    """The settings of a command."""
    return [
        field
        for field in dataclasses.fields(Settings)
        if field.metadata and field.metadata["of"] in ("", command)
    ]
