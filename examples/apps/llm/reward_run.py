"""The run of `reward.py`: the settings, the loss, the loop, the command line."""

import argparse
import copy
import dataclasses
import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import radazo_jax as zo
from examples.apps.llm import grpo, problems, reward, rewards, warm_up, weights
from examples.apps.llm.decode import AXIS_NAMES, generate_tokens, of_members
from examples.apps.llm.main import DTYPES, find_model, option
from examples.apps.llm.reward_log import picture
from examples.apps.llm.reward_task import JOURNAL, Task
from examples.common import record
from examples.common.checkpoint import locked
from examples.common.cli import Parser, at_least_one

OUTPUT = Path(__file__).resolve().parents[2] / "out" / "reward"
SHAPINGS = {
    "z_score": zo.shaping.z_score(),
    "by_group": zo.shaping.by_group(),
    "centered_ranks": zo.shaping.centered_ranks(),
    "pair_signs": zo.shaping.pair_signs(),
}
DISTRIBUTIONS = {"low_rank": zo.low_rank(), "gaussian": zo.gaussian()}


@dataclasses.dataclass(frozen=True)
class Settings:
    """A run, apart from the model, the task and the rewards."""

    method: Literal["radazo", "zo_adamm", "zo_sgd", "grpo"] = "radazo"
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
    instruction: str = ""
    timeout: float = 30.0  # Seconds of a call of a reward function.

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            name, value = field.name, getattr(self, field.name)
            if get_args(field.type) or isinstance(value, str):
                continue
            zero = name in ("seed", "decay", "temperature", "b1", "b2")
            if value < 0 or not (zero or value) or not np.isfinite(value):
                expected = "0 or more" if zero else "positive"
                raise ValueError(f"{option(name)} must be {expected}; got {value}.")
        if self.method == "grpo" and self.population_size < 2:
            raise ValueError(
                "--population-size, the replies to a prompt, must be 2 or more with "
                "--method grpo; got 1. A reply is compared with others to its prompt."
            )
        if self.method != "grpo" and self.population_size % 2:
            raise ValueError(
                f"--population-size must be even; got {self.population_size}."
            )
        if max(self.b1, self.b2) >= 1:
            raise ValueError(f"--b1 and --b2 must be below 1; got {self.b1, self.b2}.")
        if self.method == "grpo" and not self.temperature:
            raise ValueError(
                "--temperature must be positive with --method grpo; got 0.0. All "
                "replies to a prompt would be the same."
            )

    def optimizer(self) -> optax.GradientTransformation:
        cosine = optax.cosine_decay_schedule(self.learning_rate, self.num_steps)
        scale = {
            "radazo": lambda: zo.scale_by_radazo(self.b1, self.b2),
            "zo_adamm": lambda: zo.scale_by_zo_adamm(self.b1, self.b2),
            "zo_sgd": optax.identity,
            "grpo": lambda: optax.scale_by_adam(self.b1, self.b2),
        }[self.method]()
        pull = [zo.anchored_decay(None, self.decay)] if self.decay else []

        def rate(count: jax.Array) -> jax.Array:
            return cosine(count.astype(jnp.float32))

        return optax.chain(scale, *pull, optax.scale_by_learning_rate(rate))

    def estimator(self) -> zo.GradientEstimator:
        return zo.evolution_strategy(
            DISTRIBUTIONS[self.distribution],
            self.population_size,
            self.smoothing,
            shaping=SHAPINGS[self.shaping],
        )


def population() -> zo.Evaluator:
    """Evaluates a population whose loops end together, as `of_members` does."""

    def evaluate(
        fun: Any, params: Any, points: zo.estimators.Points, has_aux: bool
    ) -> tuple[zo.estimators.Values, None]:
        del has_aux
        return points.split(of_members(fun, params, points)), None

    return zo.vectorized()._replace(evaluate=evaluate)


# One object, so that programs compile once.
POPULATION = population()


def losses(
    graphdef: Any,
    score: Any,
    num_tokens: int,
    temperature: float,
    stop: tuple[int, ...],
    rest: Any,
    prompts: problems.Prompts,
    params: Any,
    batch: tuple[jax.Array, jax.Array],
) -> jax.Array:
    """The negative rewards of the replies to some prompts: float32 [B]."""
    which, key = batch
    replies = generate_tokens(
        nnx.merge(graphdef, params, rest),
        prompts.tokens[which],
        prompts.lengths[which],
        num_tokens,
        key,
        temperature,
        stop=stop,
        axis_names=AXIS_NAMES,
    )
    shape = jax.ShapeDtypeStruct(which.shape, jnp.float32)
    return jax.pure_callback(score, shape, which, replies, vmap_method="expand_dims")


def program(settings: Settings, task: Task) -> tuple[Callable[..., Any], Any]:
    """The function that a run minimizes, and what samples its prompts."""
    fun = functools.partial(
        losses,
        task.graphdef,
        task.losses,
        settings.num_tokens,
        settings.temperature,
        task.stop,
    )
    fun = jax.tree_util.Partial(fun, task.rest, task.prompts)

    def sample(key: jax.Array) -> tuple[jax.Array, jax.Array]:
        # Not the key of the directions, which the run draws from another.
        rows, draws = jax.random.split(key)
        shape = (settings.num_prompts,)
        return jax.random.randint(rows, shape, 0, len(task.problems)), draws

    return fun, sample


def run(settings: Settings, task: Task, folder: Path) -> Any:
    """The tuned parameters of a task. A journal in the folder is resumed."""
    fun, sample = program(settings, task)

    def after(state: zo.runs.SolverState, values: np.ndarray) -> None:
        step = int(state.step)
        if step % settings.eval_every == 0 and step < settings.num_steps:
            task.measure(state.params, step)

    result = zo.minimize(
        fun,
        task.params,
        settings.optimizer(),
        settings.estimator(),
        settings.num_steps,
        settings.seed,
        evaluator=POPULATION,
        sample=sample,
        callback=after,
        journal=folder / JOURNAL,
    )
    if result.stopped == "num_steps":
        task.measure(result.params, settings.num_steps)
    return result.params


def replayed(settings: Settings, task: Task, folder: Path) -> Any:
    """The tuned parameters, from the rewards in the journal: nothing is written."""
    fun, sample = program(settings, task)
    method = settings.optimizer(), settings.estimator()
    kinds = {"evaluator": POPULATION, "sample": sample}
    return zo.replay(folder / JOURNAL, task.params, *method, fun=fun, **kinds).params


# --- The command line -------------------------------------------------------------


def make_parser() -> Parser:
    parser = Parser(
        prog="examples.apps.llm.reward",
        description=reward.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
    )
    add = parser.add_argument
    add("--model", help="a folder, or a name in the local cache; a small one without")
    add("--task", default="sum", help="sum, or gym: and a dataset of reasoning-gym")
    add("--reward", action="append", help="NAME=WEIGHT, or package.module:function=1")
    add("--output", type=Path, default=OUTPUT, help="folder")
    add("--dtype", choices=DTYPES, default=DTYPES[0])
    add("--fast", action="store_true", help="a small run: to see that it works")
    add("--processes", type=at_least_one, default=2, help="for the reward functions")
    for field in dataclasses.fields(Settings):
        kind, choices = type(field.default), get_args(field.type) or None
        name, text = option(field.name), f"default {field.default}"
        if field.name == "instruction":
            text = "a text in front of each question"
        add(name, dest=field.name, type=kind, choices=choices, help=text)
    return parser


def weights_of(given: Sequence[str]) -> dict[str, float]:
    """The weights of reward functions, by name."""
    found = {}
    for text in given:
        name, _, weight = text.rpartition("=")
        try:
            found[name] = float(weight)
        except ValueError:
            name = ""
        if not name or not np.isfinite(found[name]):
            raise ValueError(f"--reward must be NAME=WEIGHT; got {text!r}.")
    return found


def tune(options: dict[str, Any]) -> None:
    names = {field.name for field in dataclasses.fields(Settings)} & options.keys()
    settings = Settings(**{name: options[name] for name in names})
    output = options["output"]
    if "fast" in options:
        settings = dataclasses.replace(
            settings, num_steps=4, eval_every=2, eval_problems=8, num_problems=32
        )
    given = options.get("reward", ["answer=1" if options["task"] == "sum" else "gym=1"])
    by_name = weights_of(given)
    if "model" in options:
        folder = find_model(options["model"])
    else:
        small = warm_up.FAST if "fast" in options else warm_up.Settings()
        name = "fast-model" if "fast" in options else "model"
        folder = warm_up.warmed_up(output / name, small)
    weights.read_config(folder)  # Its errors come before others.
    about = {
        "settings": dataclasses.asdict(settings),
        "task": options["task"],
        "rewards": by_name,
        "model": options.get("model", "warm-up"),
    }
    path = output / "settings.json"
    if path.exists() and record.read(path) != about:
        raise ValueError(
            f"{output} has a run with other settings; give another --output."
        )
    path.write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
    model = weights.load(folder, dtype=options["dtype"])
    with rewards.RewardPool(by_name, options["processes"], settings.timeout) as pool:
        task = Task(settings, model, folder, options["task"], pool, output)
        method = grpo.run if settings.method == "grpo" else run
        params = method(settings, task, output)
    tuned = task.model(params)
    if settings.tune == "lora":
        weights.save_adapters(tuned, output / "adapters", base=str(folder))
    else:
        weights.save_merged(copy.copy(tuned), output / "tuned", base=folder)
    picture(output)
    print(f"The tuned model, samples and a picture are in {output}.")


def main(argv: Sequence[str] | None = None) -> None:
    parser = make_parser()
    options = vars(parser.parse_args(argv))
    try:
        with locked(str(options["output"])):
            tune(options)
    except (ValueError, OSError, zo.RunError) as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        parser.exit(130, f"\n{parser.prog}: interrupted; the same command resumes\n")
