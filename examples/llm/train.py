"""Fine-tuning by forward passes only: the loss, the step, the loop.

A run is a function of its settings, its model and its data: step i draws its
directions with `fold_in(key, i)` and reads the batch `batch_at(data, seed, i)`. So it
can be cut at any step and go on from a checkpoint to the same end, bit for bit.
"""

import dataclasses
import functools
import math
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import radazo_jax as zo
import radazo_jax.nnx as zo_nnx
from examples.llm import lora
from examples.llm.checkpoint import Checkpoints
from examples.llm.data import Batch, batch_at
from examples.llm.metrics import Metrics, Progress
from examples.llm.model import OPT

METHODS = ("radazo", "zo_adamm", "zo_rmsprop", "zo_sgd")
LAWS: dict[str, Callable[[], zo.Law]] = {
    "gaussian": zo.gaussian,
    "sphere": zo.sphere,
    "rademacher": zo.rademacher,
    "low_rank": zo.low_rank,
}
OBJECTIVES = ("classification", "language_model")


@dataclasses.dataclass(frozen=True)
class Settings:
    """All that defines a run, beside the model and the data.

    The defaults are those of the paper: central differences with one Gaussian
    direction, and the same η, μ, β₁ and β₂ for all methods.
    """

    method: str = "radazo"
    tune: str = "lora"  # Or "prompt", or "full".
    objective: str = "classification"  # Or "language_model": see `loss_terms`.
    law: str = "gaussian"
    num_directions: int = 1  # K: a step costs 2K evaluations.
    smoothing: float = 1e-3  # μ
    learning_rate: float = 5e-5  # η
    b1: float = 0.9
    b2: float = 0.99
    batch_size: int = 16
    num_steps: int = 1000
    seed: int = 0
    eval_every: int = 100
    eval_batch_size: int = 64
    checkpoint_every: int = 100
    lora_rank: int = 8
    lora_alpha: float = 16.0
    prompt_length: int = 5

    def __post_init__(self) -> None:
        choices = (
            ("method", METHODS),
            ("tune", tuple(lora.FILTERS)),
            ("objective", OBJECTIVES),
            ("law", tuple(LAWS)),
        )
        for name, allowed in choices:
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"{name} must be one of {', '.join(allowed)}, got "
                    f"{getattr(self, name)!r}."
                )
        for field in dataclasses.fields(self):
            _check_number(field.name, getattr(self, field.name))


def _check_number(name: str, value: Any) -> None:
    if name in ("b1", "b2"):
        if not 0 <= value < 1:
            raise ValueError(f"{name} must be in [0, 1), got {value}.")
    elif name == "seed":
        if value < 0:
            raise ValueError(f"seed must not be negative, got {value}.")
    elif not isinstance(value, str) and not 0 < value < math.inf:
        raise ValueError(f"{name} must be positive, got {value}.")


# What may differ when a run is resumed: it changes none of the steps.
FREE = ("num_steps", "checkpoint_every")


class State(NamedTuple):
    """Where a run stands."""

    params: nnx.State  # What is tuned, and nothing else.
    opt_state: optax.OptState
    key: jax.Array  # Of the run, typed; it does not change.
    step: jax.Array  # (), int32: steps done, and so the position in the data.


class Rates(NamedTuple):
    """The numbers of a method that all its runs share one compiled step for."""

    learning_rate: jax.Array  # (), float32.
    b1: jax.Array  # (), float32.


class Recipe(NamedTuple):
    """What of the settings is compiled into a step."""

    method: str
    tune: str
    objective: str
    law: str
    num_directions: int
    smoothing: float
    b2: float

    @classmethod
    def of(cls, settings: Settings) -> "Recipe":
        return cls(*(getattr(settings, name) for name in cls._fields))

    def optimizer(self, rates: Rates) -> optax.GradientTransformation:
        if self.method == "zo_sgd":
            return zo.zo_sgd(rates.learning_rate)
        if self.method == "zo_rmsprop":
            return zo.zo_rmsprop(rates.learning_rate, b2=self.b2)
        method = zo.radazo if self.method == "radazo" else zo.zo_adamm
        return method(rates.learning_rate, b1=rates.b1, b2=self.b2)

    def estimator(self) -> zo.GradientEstimator:
        # One direction after the other, so that memory does not grow with K.
        return zo.central_difference(
            LAWS[self.law](), self.num_directions, self.smoothing, batch_size=1
        )


def _token_log_probabilities(model: OPT, batch: Batch) -> jax.Array:
    """Of each candidate's tokens, float32 [B, C, L]."""
    examples, sequences, length = batch.tokens.shape
    hidden = model.hidden(batch.tokens.reshape(-1, length))
    hidden = hidden.reshape(examples, sequences, length, -1)
    # Logits only where they are needed: the vocabulary is wide.
    positions = batch.positions[:, :sequences, :, None]
    logits = model.logits(jnp.take_along_axis(hidden, positions, axis=2))
    rows = jax.nn.log_softmax(logits)  # [B, 1 or C, L, vocabulary]
    shape = (*batch.targets.shape, rows.shape[-1])
    rows = jnp.broadcast_to(rows, shape)
    return jnp.take_along_axis(rows, batch.targets[..., None], axis=-1)[..., 0]


def scores(model: OPT, batch: Batch) -> jax.Array:
    """The mean log-probability of each candidate's tokens, float32 [B, C]."""
    found = _token_log_probabilities(model, batch) * batch.mask
    return found.sum(axis=-1) / batch.mask.sum(axis=-1)


def loss_terms(model: OPT, batch: Batch, objective: str) -> tuple[jax.Array, jax.Array]:
    """A sum of losses and how many there are; the loss is their ratio.

    "classification" is the cross-entropy over the candidates, one loss an example;
    "language_model" that of the tokens of the right candidate, one loss a token.
    """
    if objective == "classification":
        losses = optax.softmax_cross_entropy_with_integer_labels(
            scores(model, batch), batch.label
        )
        return losses.sum(), jnp.float32(losses.size)
    right = _right_candidate(batch)
    found = _token_log_probabilities(model, right)
    return -(found * right.mask).sum(), right.mask.sum()


def _right_candidate(batch: Batch) -> Batch:
    """The batch with the right one for its only candidate."""

    def pick(leaf: jax.Array) -> jax.Array:
        label = jnp.minimum(batch.label, leaf.shape[1] - 1)  # Tokens may be shared.
        return jnp.take_along_axis(leaf, label[:, None, None], axis=1)

    chosen = map(pick, batch[:-1])
    return Batch(*chosen, label=jnp.zeros_like(batch.label))


def loss_fn(model: OPT, batch: Batch, objective: str = "classification") -> jax.Array:
    total, count = loss_terms(model, batch, objective)
    return total / count


@functools.partial(
    jax.jit, static_argnames=("graphdef", "recipe"), donate_argnames="state"
)
def train_step(
    graphdef: nnx.GraphDef[OPT],
    recipe: Recipe,
    state: State,
    rest: nnx.State,
    rates: Rates,
    batch: Batch,
) -> tuple[State, jax.Array]:
    """One step of a run, and the loss on its batch; `state` is consumed."""
    value_and_grad = zo_nnx.value_and_grad(
        functools.partial(loss_fn, objective=recipe.objective),
        recipe.estimator(),
        wrt=lora.FILTERS[recipe.tune],
    )
    model = nnx.merge(graphdef, state.params, rest)
    key = jax.random.fold_in(state.key, state.step)
    loss, grads = value_and_grad(key, model, batch)
    updates, opt_state = recipe.optimizer(rates).update(
        grads, state.opt_state, state.params
    )
    params = optax.apply_updates(state.params, updates)
    return State(params, opt_state, state.key, state.step + 1), loss


@functools.partial(jax.jit, static_argnames=("graphdef", "objective", "batch_size"))
def evaluate(
    graphdef: nnx.GraphDef[OPT],
    params: nnx.State,
    rest: nnx.State,
    data: Batch,
    *,
    objective: str,
    batch_size: int,
) -> tuple[jax.Array, jax.Array]:
    """Loss and accuracy on all examples, a batch at a time."""

    def one(example: Batch) -> tuple[jax.Array, jax.Array, jax.Array]:
        model = nnx.merge(graphdef, params, rest)
        example = jax.tree.map(lambda leaf: leaf[None], example)
        right = scores(model, example).argmax(axis=-1) == example.label
        return *loss_terms(model, example, objective), right.mean()

    totals, counts, hits = jax.lax.map(one, data, batch_size=batch_size)
    return totals.sum() / counts.sum(), hits.mean()


class Result(NamedTuple):
    """What a run leaves."""

    model: OPT
    state: State
    evaluations: list[dict[str, Any]]  # Of the whole run, also after a resumption.


class Job(NamedTuple):
    """A model split in two, and what was made of the settings."""

    graphdef: nnx.GraphDef[OPT]
    rest: nnx.State  # What is not tuned.
    recipe: Recipe
    rates: Rates


def prepare(settings: Settings, model: OPT) -> tuple[Job, State]:
    """Adds adapters or a prompt to the model, and starts a run of it.

    The state takes the model's arrays over: what is tuned is not to be used elsewhere.
    """
    init_key, run_key = jax.random.split(jax.random.key(settings.seed))
    rngs = nnx.Rngs(init_key)
    if settings.tune == "lora":
        rank, alpha = settings.lora_rank, settings.lora_alpha
        lora.add_lora(model, rank=rank, alpha=alpha, rngs=rngs)
    elif settings.tune == "prompt":
        lora.add_prompt(model, length=settings.prompt_length, rngs=rngs)
    graphdef, params, rest = nnx.split(model, lora.FILTERS[settings.tune], ...)
    recipe = Recipe.of(settings)
    rates = Rates(jnp.float32(settings.learning_rate), jnp.float32(settings.b1))
    opt_state = recipe.optimizer(rates).init(params)
    state = State(params, opt_state, run_key, jnp.int32(0))
    return Job(graphdef, rest, recipe, rates), state


def fingerprint(tree: Any) -> str:
    """A checksum of the first numbers of every array: tells models and data apart."""
    crc = 0
    for leaf in jax.tree.leaves(tree):
        head = np.asarray(jnp.ravel(leaf)[:4096])
        crc = zlib.crc32(head.tobytes() + str((leaf.shape, leaf.dtype)).encode(), crc)
    return f"crc32 {crc:08x}"


def run(
    settings: Settings,
    model: OPT,
    train: Batch,
    dev: Batch,
    *,
    folder: Path | None = None,
    resume: bool = False,
    label: str = "",
) -> Result:
    """Trains a model.

    Args:
      settings: What to do.
      model: What to train. It is consumed.
      train: The examples to train on; the training loss is that of all of them.
      dev: The examples whose accuracy is measured.
      folder: Where checkpoints and metrics go; nothing is written without.
      resume: Whether to go on from the last checkpoint in the folder, if there is one.
      label: What the progress bar says.

    Raises:
      ValueError: If the batch is larger than the data.
      CheckpointError: If the folder has a run and `resume` is False, or has another
        run than the one to resume.
      FloatingPointError: If the loss is not finite.
    """
    if settings.batch_size > len(train.label):
        raise ValueError(
            f"batch_size must be at most {len(train.label)}, the number of examples, "
            f"got {settings.batch_size}."
        )
    description = dataclasses.asdict(settings) | {
        "base model": fingerprint(nnx.state(model, nnx.Param)),
        "data": fingerprint((train, dev)),
    }
    job, state = prepare(settings, model)
    data = train, dev
    if folder is None:
        with Metrics(None) as metrics:
            state = _loop(settings, job, state, data, metrics, None, label)
        return _result(job, state, metrics)
    with Checkpoints(folder, description, free=FREE) as checkpoints:
        position = 0
        if resume:
            state, position = checkpoints.restore(state)
        else:
            checkpoints.refuse_if_any()
        with Metrics(folder, position, int(state.step)) as metrics:
            state = _loop(settings, job, state, data, metrics, checkpoints, label)
    return _result(job, state, metrics)


def _result(job: Job, state: State, metrics: Metrics) -> Result:
    model = nnx.merge(job.graphdef, state.params, job.rest)
    return Result(model, state, metrics.evaluations)


def _loop(
    settings: Settings,
    job: Job,
    state: State,
    data: tuple[Batch, Batch],
    metrics: Metrics,
    checkpoints: Checkpoints | None,
    label: str,
) -> State:
    start, end = int(state.step), settings.num_steps
    on_device = jax.device_put(data)
    with Progress(label, start, end) as progress:
        for step in range(start, end + 1):
            # What was done before a checkpoint is not done again after it.
            fresh = step > start or start == 0
            if fresh and (step % settings.eval_every == 0 or step == end):
                measured = measure(settings, job, state, on_device)
                metrics.write_evaluation(step, measured)
                progress.evaluated(measured["train_loss"])
            due = step % settings.checkpoint_every == 0 or step == end
            if checkpoints is not None and due and step > start:
                checkpoints.save(step, state, metrics.position())
            if step == end:
                break
            batch = batch_at(data[0], settings.seed, step, settings.batch_size)
            state, loss = train_step(
                job.graphdef, job.recipe, state, job.rest, job.rates, batch
            )
            evaluations = 2 * settings.num_directions
            tokens = evaluations * batch.tokens.size
            progress.step(metrics.write_loss(step, loss), tokens, evaluations)
    return state


def measure(
    settings: Settings, job: Job, state: State, data: tuple[Batch, Batch]
) -> dict[str, float]:
    """Loss and accuracy on the examples to train on, and on those held back."""
    result = {}
    for name, examples in zip(("train", "dev"), data, strict=True):
        loss, accuracy = evaluate(
            job.graphdef,
            state.params,
            job.rest,
            examples,
            objective=settings.objective,
            batch_size=settings.eval_batch_size,
        )
        result |= {f"{name}_loss": loss, f"{name}_accuracy": accuracy}
    return {name: float(value) for name, value in result.items()}
