"""Group relative policy optimization, the first-order reference of populations.

Each step draws G replies to each prompt. A reply's advantage is its reward, less the
mean of its group, over the standard deviation of its group. The step follows the
gradient of the mean, over the tokens of all replies, of the advantage times the
log-probability of the token. All replies of a step are the current model's, so there is
no ratio to clip. There is no penalty on the distance to the start.

Shao et al., DeepSeekMath, 2024; the mean over tokens is from Yu et al., DAPO, 2025.
"""

import dataclasses
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from tqdm import tqdm

from radazo_llm.models.decode import Replies, generate_tokens
from radazo_llm.models.model import LanguageModel
from radazo_llm.reward import settings


@dataclasses.dataclass(frozen=True)
class Settings(settings.Settings):
    """A run. A group has as many replies as a population has members."""

    method: Literal["grpo"] = "grpo"
    temperature: float = 1.0

    def _check_population(self) -> None:
        if self.population_size < 2:
            raise ValueError(
                "population_size, the replies to a prompt, must be 2 or more; got 1. A "
                "reply is compared with others to its prompt."
            )
        if not self.temperature:
            raise ValueError(
                "temperature must be positive; got 0.0. All replies to a prompt would "
                "be the same."
            )

    def _scale(self) -> optax.GradientTransformation:
        return optax.scale_by_adam(self.b1, self.b2)


_EPS = 1e-4  # Added to the standard deviation of a group, as in TRL.


def advantages(rewards: np.ndarray, eps: float = _EPS) -> np.ndarray:
    """The advantages of rewards [prompts, G]; 0 without a finite reward."""
    finite = np.isfinite(rewards)
    kept = np.where(finite, rewards, 0.0)
    number = np.maximum(finite.sum(1, keepdims=True), 1)
    mean = kept.sum(1, keepdims=True) / number
    apart = np.where(finite, rewards - mean, 0.0)
    deviation = np.sqrt((apart**2).sum(1, keepdims=True) / number)
    return (apart / (deviation + eps)).astype(np.float32)


def log_probabilities(
    model: LanguageModel,
    prompts: jax.Array,
    lengths: jax.Array,
    replies: Replies,
    temperature: float,
    stop: tuple[int, ...],
) -> tuple[jax.Array, jax.Array]:
    """The log-probability of each token of replies, and of their ends.

    The probability of an end is the sum over the tokens that end a reply.

    Args:
      model: The model.
      prompts: int32 [B, T], padded on the right.
      lengths: The tokens of each prompt: int32 [B].
      replies: The replies, [B].
      temperature: The temperature that they were drawn with, positive.
      stop: The tokens that end a reply.

    Returns:
      float32 [B, num_tokens], and the mask of those that were drawn.
    """
    count = replies.tokens.shape[1]
    place = jnp.arange(count)[None]
    whole = jnp.pad(prompts, ((0, 0), (0, count)))
    whole = jax.vmap(jax.lax.dynamic_update_slice)(
        whole, replies.tokens, lengths[:, None]
    )
    hidden = model.hidden(whole)
    at = (lengths[:, None] - 1 + place)[..., None]
    logits = model.logits(jnp.take_along_axis(hidden, at, axis=1))
    logs = jax.nn.log_softmax(logits / temperature)
    of_token = jnp.take_along_axis(logs, replies.tokens[..., None], axis=2)[..., 0]
    of_end = jax.nn.logsumexp(logs[..., jnp.asarray(stop)], axis=2)
    is_end = (place == replies.lengths[:, None]) & replies.ended[:, None]
    drawn = (place < replies.lengths[:, None]) | is_end
    return jnp.where(is_end, of_end, of_token), drawn


def run(settings: Settings, task: Any, folder: Any) -> Any:
    """The tuned parameters of a task. A run that was cut starts again.

    Args:
      settings: `Settings`.
      task: `radazo_llm.reward.task.Task`.
      folder: Unused.
    """
    del folder  # There is no journal.
    size, heat = settings.population_size, settings.temperature
    shape = (settings.num_prompts,)
    optimizer = settings.optimizer()

    @jax.jit
    def generate(params: Any, which: jax.Array, key: jax.Array) -> Replies:
        prompts = jax.tree.map(lambda x: jnp.repeat(x[which], size, 0), task.prompts)
        model = nnx.merge(task.graphdef, params, task.rest)
        return generate_tokens(
            model, *prompts, settings.num_tokens, key, heat, stop=task.stop
        )

    def loss(params: Any, which: Any, replies: Replies, weights: Any) -> jax.Array:
        prompts = jax.tree.map(lambda x: jnp.repeat(x[which], size, 0), task.prompts)
        model = nnx.merge(task.graphdef, params, task.rest)
        logs, drawn = log_probabilities(model, *prompts, replies, heat, task.stop)
        number = jnp.sum(drawn, dtype=jnp.float32)
        return -jnp.sum(jnp.where(drawn, logs * weights[:, None], 0.0)) / number

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def update(params: Any, state: Any, *batch: Any) -> tuple[Any, Any]:
        updates, state = optimizer.update(jax.grad(loss)(params, *batch), state, params)
        return optax.apply_updates(params, updates), state

    def by_member(x: jax.Array) -> np.ndarray:
        """Rows as a reply of each member to every prompt."""
        return np.asarray(x).reshape(*shape, size, *x.shape[1:]).swapaxes(0, 1)

    params = jax.tree.map(jnp.copy, task.params)
    state = optimizer.init(params)
    key = jax.random.key(settings.seed)
    for i in tqdm(range(settings.num_steps), desc="GRPO", unit="step"):
        rows, draws = jax.random.split(jax.random.fold_in(key, i))
        which = jax.random.randint(rows, shape, 0, len(task.problems))
        replies = generate(params, which, draws)
        members = jax.tree.map(by_member, replies)
        rewards = -task.losses(np.asarray(which), members)
        weights = advantages(rewards.T).reshape(-1)
        params, state = update(params, state, which, replies, weights)
        done = i + 1
        if done % settings.eval_every == 0 or done == settings.num_steps:
            task.measure(params, done)
    return params
