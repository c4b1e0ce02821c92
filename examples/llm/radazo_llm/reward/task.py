"""Prompts for a model, its replies, and their rewards."""

import dataclasses
import functools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tqdm import tqdm

import radazo_jax as zo
from radazo_llm.formats import tokenizers
from radazo_llm.formats.chat_template import ends, load, of_config
from radazo_llm.models.decode import (
    AXIS_NAMES,
    Replies,
    generate_tokens,
    of_members,
    replies_of,
)
from radazo_llm.reward import problems
from radazo_llm.reward.pool import RewardPool, Scores
from radazo_llm.reward.problems import Problem
from radazo_llm.run.loop import Job
from radazo_llm.settings import Settings
from radazo_llm.tune.job import Parts

SAMPLES = "samples.txt"
_SHOWN = 4  # Samples of an evaluation.


class Task:
    """Problems for a model, and the rewards of its replies.

    Args:
      settings: The settings of the run.
      parts: The model.
      source: The model's folder, with its tokenizer.
      splits: The problems by split: train, dev and, maybe, test.
      pool: The processes that score.
      folder: The folder of samples.
      now: The date and the time that a chat template may name.
    """

    def __init__(
        self,
        settings: Settings,
        parts: Parts,
        source: Path,
        splits: dict[str, list[Problem]],
        pool: RewardPool,
        folder: Path,
        now: str | None = None,
    ) -> None:
        self.settings, self.parts, self.pool = settings, parts, pool
        self.folder = folder
        self.tokenizer, template = tokenizers.load(source), load(source, now)
        plain = next(iter(splits.values()))[0].before is None
        stop = of_config if plain else ends
        self.stop = tuple(sorted(stop(source, self.tokenizer)))
        config = parts.model(parts.params).config
        positions = config.max_position_embeddings
        room = positions - settings.num_tokens
        if room < 1:
            raise ValueError(
                f"--tokens must be below the model's {positions} positions, to leave "
                f"room for a prompt; got {settings.num_tokens}."
            )
        self.problems: dict[str, list[Problem]] = {}
        self.prompts: dict[str, Any] = {}
        for name, found in splits.items():
            made = [
                p._replace(question=settings.instruction + p.question) for p in found
            ]
            prompts = [p.question for p in made]
            if not plain:
                rendered = template.render([p.chat() for p in made])
                prompts = [text for text, _ in rendered]
            encoded = problems.encode(
                self.tokenizer,
                prompts,
                # A template has special tokens itself.
                special=plain or template.source is None,
                vocab_size=config.vocab_size,
                most=room,
            )
            self.problems[name] = made
            self.prompts[name] = jax.tree.map(jnp.asarray, encoded)
        self.latest: dict[str, Any] = {}  # The numbers of the latest step.
        self._warned = self._alike = False

    def job(self) -> Job:
        """Returns the job of a run: the negative rewards."""
        settings, data = self.settings, self.prompts["train"]
        fun = functools.partial(
            losses,
            self.parts.graphdef,
            self.losses,
            settings.num_tokens,
            settings.temperature,
            self.stop,
        )
        shape, number = (settings.batch_size,), len(self.problems["train"])

        def sample(key: jax.Array) -> tuple[jax.Array, jax.Array]:
            # Not the key of the directions, which the run draws from another.
            rows, draws = jax.random.split(key)
            return jax.random.randint(rows, shape, 0, number), draws

        return Job(
            jax.tree_util.Partial(fun, self.parts.rest, data),
            self.parts.params,
            sample,
            self.measure,
            evaluator=Population(),
            row=lambda: self.latest,
            drops=True,
        )

    def losses(self, which: np.ndarray, replies: Replies) -> np.ndarray:
        """The negative rewards of replies to some problems.

        Args:
          which: The problems, [..., B]; members of a population have the same ones.
          replies: [..., B].
        """
        members = np.asarray(replies.tokens).shape[:-2]
        rows = np.broadcast_to(which, (*members, np.shape(which)[-1]))
        replies = Replies(*map(np.asarray, replies))
        scores, _ = self._scored("train", rows, replies)
        rewards = scores.total.reshape(-1, rows.shape[-1])
        of_members = np.array([_mean(row) for row in rewards], np.float64)
        spread = np.nanstd(of_members) if np.isfinite(of_members).any() else None
        self._check_alike(rewards)
        self.latest = {
            "reward": _mean(scores.total),
            "spread": None if spread is None else float(spread),
            **_numbers(scores, replies),
        }
        if scores.failures:
            last = scores.failures[-1]
            self.latest |= {"failures": len(scores.failures), "failure": last}
        return -scores.total.reshape(rows.shape).astype(np.float32)

    def measure(self, params: Any, step: int) -> dict[str, Any]:
        """The rewards of replies to held-out problems, of which some are written.

        Raises:
          ValueError: If no reply has a reward.
        """
        ends = step in (0, self.settings.num_steps)
        found: dict[str, Any] = {}
        for name in [n for n in self.problems if n == "dev" or (n == "test" and ends)]:
            replies = replies_of(
                self.parts.graphdef,
                (params, self.parts.rest),
                *self.prompts[name],
                jax.random.key(step),
                num_tokens=self.settings.num_tokens,
                temperature=self.settings.eval_temperature,
                stop=self.stop,
            )
            replies = Replies(*map(np.asarray, replies))
            rows = np.arange(len(self.problems[name]))
            scores, texts = self._scored(name, rows, replies)
            if not np.isfinite(scores.total).any():
                cause = f" ({scores.failures[-1]})" if scores.failures else ""
                raise ValueError(
                    "Reward functions must return a finite number for some replies; "
                    f"got none for {len(texts)} held-out ones{cause}."
                )
            numbers = {"reward": _mean(scores.total)} | _numbers(scores, replies)
            found |= {f"{name}_{key}": value for key, value in numbers.items()}
            if name == "dev":
                self._write_samples(step, scores, texts)
        return found

    def _write_samples(self, step: int, scores: Scores, texts: Sequence[str]) -> None:
        with (self.folder / SAMPLES).open("a", encoding="utf-8") as file:
            file.write(f"--- step {step}, held-out reward {_mean(scores.total)}\n")
            for problem, text, reward in zip(
                self.problems["dev"][:_SHOWN], texts, scores.total, strict=False
            ):
                file.write(f"{problem.question!r} -> {text!r} ({reward:g})\n")

    def _scored(
        self, name: str, which: np.ndarray, replies: Replies
    ) -> tuple[Scores, list[str]]:
        flat = which.reshape(-1)
        tokens = replies.tokens.reshape(len(flat), -1)
        lengths = replies.lengths.reshape(-1)
        texts = self.tokenizer.decode_batch(
            [row[:n].tolist() for row, n in zip(tokens, lengths, strict=True)]
        )
        chosen = [self.problems[name][i] for i in flat]
        questions = [p.question for p in chosen]
        size = which.shape[-1]  # A member's replies in a call.
        scores = self.pool.score(questions, texts, problems.columns(chosen), size)
        if scores.failures and not self._warned:
            text = f"{scores.failures[-1]}. metrics.jsonl counts such failures."
            tqdm.write(text, file=sys.stderr)  # Clears the bar.
            self._warned = True
        return scores, texts

    def _check_alike(self, rewards: np.ndarray) -> None:
        """Says once if members [members, B] have equal rewards for every prompt."""
        finite = np.isfinite(rewards)
        low = np.where(finite, rewards, np.inf).min(axis=0)
        high = np.where(finite, rewards, -np.inf).max(axis=0)
        differ = len(rewards) < 2 or (low < high).any()
        if self._alike or differ or not finite.any():
            return
        self._alike = True
        tqdm.write(
            f"All members of a step have the same rewards (mean {_mean(rewards):.4g}), "
            "so the step has no gradient. Give a metric with partial credit, a larger "
            "--smoothing, or a larger --batch-size.",
            file=sys.stderr,
        )


@dataclasses.dataclass(frozen=True)
class Population(zo.Evaluator):
    """Evaluates a population whose loops end together, as `of_members` does."""

    def cache(self, points: zo.estimators.Points) -> zo.estimators.Points:
        """The same points, with directions stored if that pays."""
        return zo.vectorized(len(points.scales)).cache(points)

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


def _numbers(scores: Scores, replies: Replies) -> dict[str, Any]:
    return {
        "tokens": float(np.mean(replies.lengths)),
        "ended": float(np.mean(replies.ended)),
        **{name: _mean(each) for name, each in scores.each.items()},
    }


def _mean(values: np.ndarray) -> float | None:
    """The mean of the finite values; `None`, for JSON, without any."""
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if finite.size else None
