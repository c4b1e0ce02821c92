"""Group relative policy optimization, the first-order reference of populations.

Each step draws G replies to each prompt. A reply's advantage is its reward, less the
mean of its group, over the standard deviation of its group. The step follows the
gradient of the mean, over the tokens of all replies, of the advantage times the
log-probability of the token. All replies of a step are the current model's, so there is
no ratio to clip. There is no penalty on the distance to the start.

Shao et al., DeepSeekMath, 2024; the mean over tokens is from Yu et al., DAPO, 2025.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from tqdm import tqdm

from radazo_llm.models.decode import Replies, generate_tokens
from radazo_llm.models.model import LanguageModel
from radazo_llm.run.log import Log
from radazo_llm.settings import Settings

TEMPERATURE = 1.0  # Of the replies to train on.
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


def run(settings: Settings, task: Any, log: Log) -> Any:
    """The tuned parameters of a task; a group is as large as a population.

    Args:
      settings: The settings, of `reward`.
      task: `radazo_llm.reward.task.Task`.
      log: Gets the numbers of steps and evaluations.
    """
    size, heat = settings.population_size, TEMPERATURE
    shape, parts = (settings.batch_size,), task.parts
    rates = jnp.asarray(settings.rates(None, [settings.num_steps]))
    optimizer = optax.adam(lambda count: rates[count], settings.b1, settings.b2)
    data = task.prompts["train"]

    @jax.jit
    def generate(params: Any, which: jax.Array, key: jax.Array) -> Replies:
        prompts = jax.tree.map(lambda x: jnp.repeat(x[which], size, 0), data)
        model = parts.model(params)
        return generate_tokens(
            model, *prompts, settings.num_tokens, key, heat, stop=task.stop
        )

    def loss(params: Any, which: Any, replies: Replies, weights: Any) -> jax.Array:
        prompts = jax.tree.map(lambda x: jnp.repeat(x[which], size, 0), data)
        model = parts.model(params)
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

    params = jax.tree.map(jnp.copy, parts.params)
    state = optimizer.init(params)
    key = jax.random.key(settings.seed)
    log.evaluation(0, task.measure(params, 0))
    for i in tqdm(range(settings.num_steps), desc="GRPO", unit="step"):
        rows, draws = jax.random.split(jax.random.fold_in(key, i))
        which = jax.random.randint(rows, shape, 0, len(task.problems["train"]))
        replies = generate(params, which, draws)
        members = jax.tree.map(by_member, replies)
        rewards = -task.losses(np.asarray(which), members)
        log.step(i, task.latest)
        weights = advantages(rewards.T).reshape(-1)
        params, state = update(params, state, which, replies, weights)
        done = i + 1
        if done % settings.eval_every == 0 or done == settings.num_steps:
            log.evaluation(done, task.measure(params, done))
    return params
