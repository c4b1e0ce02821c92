"""The run of `reward.py`: the settings, the loss, the loop, the command line."""

import argparse
import copy
import dataclasses
import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from tokenizers import Tokenizer

import radazo_jax as zo
from examples.apps.llm import data, lora, problems, reward, rewards, warm_up, weights
from examples.apps.llm.decode import AXIS_NAMES, Replies, generate_tokens, of_members
from examples.apps.llm.generate import conversation, ends
from examples.apps.llm.main import DTYPES, find_model, option
from examples.apps.llm.model import LanguageModel
from examples.apps.llm.reward_log import Log, picture
from examples.common import record
from examples.common.checkpoint import locked
from examples.common.cli import Parser

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

    method: Literal["radazo", "zo_adamm", "zo_sgd"] = "radazo"
    tune: Literal["lora", "full"] = "full"
    distribution: Literal["low_rank", "gaussian"] = "low_rank"
    shaping: Literal["z_score", "by_group", "centered_ranks", "pair_signs"] = "by_group"
    population_size: int = 64
    smoothing: float = 5e-3  # σ
    learning_rate: float = 2e-5  # η, on a cosine to 0.
    b1: float = 0.9
    b2: float = 0.99
    decay: float = 0.0  # Toward the start.
    num_prompts: int = 32  # Of a step.
    num_tokens: int = 6  # Of a reply, at most.
    temperature: float = 0.0
    num_problems: int = 2048
    num_steps: int = 200
    eval_every: int = 20
    eval_problems: int = 256
    seed: int = 0
    lora_rank: int = 8
    lora_alpha: float = 16.0
    timeout: float = 30.0  # Seconds of a call of a reward function.

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            name, value = field.name, getattr(self, field.name)
            if get_args(field.type):
                continue
            zero = name in ("seed", "decay", "temperature", "b1", "b2")
            if value < 0 or not (zero or value) or value == float("inf"):
                expected = "0 or more" if zero else "positive"
                raise ValueError(f"{option(name)} must be {expected}; got {value}.")
        if self.population_size % 2:
            raise ValueError(
                f"--population-size must be even; got {self.population_size}."
            )
        if max(self.b1, self.b2) >= 1:
            raise ValueError(f"--b1 and --b2 must be below 1; got {self.b1, self.b2}.")

    def optimizer(self) -> optax.GradientTransformation:
        cosine = optax.cosine_decay_schedule(self.learning_rate, self.num_steps)
        scale = {
            "radazo": lambda: zo.scale_by_radazo(self.b1, self.b2),
            "zo_adamm": lambda: zo.scale_by_zo_adamm(self.b1, self.b2),
            "zo_sgd": optax.identity,
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


@functools.partial(jax.jit, static_argnames=("graphdef", "num_tokens", "stop"))
def _greedy(
    graphdef: Any, params: Any, rest: Any, prompts: Any, num_tokens: int, stop: Any
) -> Replies:
    model, key = nnx.merge(graphdef, params, rest), jax.random.key(0)
    return generate_tokens(model, *prompts, num_tokens, key, 0.0, stop=stop)


def run(
    settings: Settings,
    model: LanguageModel,
    tokenizer: Tokenizer,
    task: str,
    pool: rewards.RewardPool,
    *,
    stop: set[int],
    render: Any,
    folder: Path,
) -> LanguageModel:
    """Tunes a model, which is consumed, and returns it."""
    if settings.tune == "lora":
        rngs = nnx.Rngs(settings.seed)
        rank, alpha = settings.lora_rank, settings.lora_alpha
        lora.add_lora(model, rank=rank, alpha=alpha, rngs=rngs)
    graphdef, params, rest = nnx.split(model, lora.FILTERS[settings.tune], ...)
    ends_at = tuple(sorted(stop))

    def asked(number: int, held_out: bool) -> tuple[Any, problems.Prompts]:
        made = problems.make(task, number, settings.seed, held_out=held_out)
        plain = [render([{"role": "user", "content": p.question}]) for p in made]
        texts = [p.question for p in made]
        most = model.config.max_position_embeddings - settings.num_tokens
        encoded = problems.encode(
            tokenizer,
            plain,
            special=plain == texts,  # A template has special tokens itself.
            vocab_size=model.config.vocab_size,
            most=most,
        )
        return made, encoded

    train, prompts = asked(settings.num_problems, False)
    held_out, held_out_prompts = asked(settings.eval_problems, True)
    journal = folder / "journal.jsonl"
    done = 0
    if journal.exists():
        done = len(zo.runs.History.from_journal(journal).step)
    log = Log(folder, tokenizer, pool, resumed=done)

    def score(which: np.ndarray, replies: Replies) -> np.ndarray:
        # Every member has the same prompts.
        members = np.asarray(replies.tokens).shape[:-2]
        rows = np.broadcast_to(which, (*members, np.shape(which)[-1]))
        return -log.step(train, rows, Replies(*map(np.asarray, replies)))

    def measure(params: Any, step: int) -> None:
        args = params, rest, held_out_prompts
        found = _greedy(graphdef, *args, settings.num_tokens, ends_at)
        rows = np.arange(len(held_out))
        log.held_out(held_out, rows, Replies(*map(np.asarray, found)), step)

    fun = jax.tree_util.Partial(
        functools.partial(
            losses, graphdef, score, settings.num_tokens, settings.temperature, ends_at
        ),
        rest,
        jax.tree.map(jnp.asarray, prompts),
    )

    def sample(key: jax.Array) -> tuple[jax.Array, jax.Array]:
        # Not the key of the directions, which the run draws from another.
        rows, draws = jax.random.split(key)
        shape = (settings.num_prompts,)
        return jax.random.randint(rows, shape, 0, len(train)), draws

    def after(state: zo.runs.SolverState, values: np.ndarray) -> None:
        step = int(state.step)
        if step % settings.eval_every == 0 and step < settings.num_steps:
            measure(state.params, step)

    if not done:
        measure(params, 0)
    result = zo.minimize(
        fun,
        params,
        settings.optimizer(),
        settings.estimator(),
        settings.num_steps,
        settings.seed,
        evaluator=POPULATION,
        sample=sample,
        callback=after,
        journal=journal,
    )
    if result.stopped == "num_steps":
        measure(result.params, settings.num_steps)
    return nnx.merge(graphdef, result.params, rest)


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
    add("--processes", type=int, default=2, help="for the reward functions")
    for field in dataclasses.fields(Settings):
        kind, choices = type(field.default), get_args(field.type) or None
        name, text = option(field.name), f"default {field.default}"
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
    output, task = options["output"], options["task"]
    if "fast" in options:
        settings = dataclasses.replace(
            settings, num_steps=4, eval_every=2, eval_problems=8, num_problems=32
        )
    given = options.get("reward", ["answer=1" if task == "sum" else "gym=1"])
    by_name = weights_of(given)
    if "model" in options:
        folder = find_model(options["model"])
    else:
        small = warm_up.FAST if "fast" in options else warm_up.Settings()
        name = "fast-model" if "fast" in options else "model"
        folder = warm_up.warmed_up(output / name, small)
    weights.read_config(folder)  # Its errors come before others.
    tokenizer = data.load_tokenizer(folder)
    stop, render = ends(folder, tokenizer), conversation(folder)
    about = {
        "settings": dataclasses.asdict(settings),
        "task": task,
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
        tuned = run(
            settings,
            model,
            tokenizer,
            task,
            pool,
            stop=stop,
            render=render,
            folder=output,
        )
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
