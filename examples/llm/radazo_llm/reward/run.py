"""A run on rewards: the loss, and the loop."""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from tqdm import tqdm

import radazo_jax as zo
from radazo_llm.models.decode import AXIS_NAMES, generate_tokens, of_members
from radazo_llm.reward import problems
from radazo_llm.reward.settings import Settings
from radazo_llm.reward.task import JOURNAL, Task, steps_done


@dataclasses.dataclass(frozen=True)
class Population(zo.Evaluator):
    """Evaluates a population whose loops end together, as `of_members` does."""

    def cache(self, points: zo.estimators.Points) -> zo.estimators.Points:
        """The same points, with directions stored if that pays."""
        return zo.vectorized().cache(points)

    def evaluate(
        self, fun: Any, params: Any, points: zo.estimators.Points, has_aux: bool
    ) -> tuple[zo.estimators.Values, None]:
        """The values at the points."""
        del has_aux
        return points.split(of_members(fun, params, points)), None


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

    done = steps_done(folder)
    bar = tqdm(total=settings.num_steps, initial=done, unit="step")

    def after(report: zo.runs.Report) -> None:
        step = report.step
        bar.set_postfix(reward=f"{task.log.last:.4f}", refresh=False)
        bar.update()
        if step % settings.eval_every == 0 and step < settings.num_steps:
            task.measure(report.state.params, step)

    with bar:
        result = zo.minimize(
            fun,
            task.params,
            settings.optimizer(),
            settings.estimator(),
            num_steps=settings.num_steps,
            key=settings.seed,
            evaluator=Population(),
            sample=sample,
            callback=after,
            journal=folder / JOURNAL,
            progress=False,
        )
    if result.stopped == "num_steps":
        task.measure(result.params, settings.num_steps)
    return result.params
