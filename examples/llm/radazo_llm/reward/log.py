"""The files of a run on rewards: a line for each step, samples of text, a picture.

`metrics.jsonl` has a line for each step, and one for each evaluation on held-out
problems; `samples.txt` has some of the replies.
"""

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer
from tqdm import tqdm

from radazo_llm.models.decode import Replies
from radazo_llm.reward.problems import Problem, columns
from radazo_llm.reward.rewards import RewardPool, Scores

METRICS, SAMPLES = "metrics.jsonl", "samples.txt"
_SAMPLES = 4  # Of an evaluation.


class Log:
    """Scores replies, and writes what they were.

    Args:
      folder: The output folder.
      tokenizer: The tokenizer of the model.
      pool: The processes that score.
      resumed: Number of steps of the run that are done: their lines are kept.
    """

    def __init__(
        self, folder: Path, tokenizer: Tokenizer, pool: RewardPool, *, resumed: int
    ) -> None:
        self.folder, self.tokenizer, self.pool = folder, tokenizer, pool
        self.number, self.has_warned, self.last = resumed, False, math.nan
        self.is_alike = False  # Whether a step had one reward for all members.
        # A run that resumes evaluates one step of its journal again.
        self._repeats = resumed > 0
        kept = [row for row in rows(folder) if row["step"] < resumed or "eval" in row]
        kept = [row for row in kept if row["step"] <= resumed] if resumed else []
        self.measured = {row["step"] for row in kept if "eval" in row}
        text = "".join(f"{json.dumps(row)}\n" for row in kept)
        (folder / METRICS).write_text(text, encoding="utf-8")
        if not resumed:
            (folder / SAMPLES).write_text("", encoding="utf-8")

    def step(
        self, made: Sequence[Problem], which: np.ndarray, replies: Replies
    ) -> np.ndarray:
        """The rewards of a population's replies, as `which`, [..., B]."""
        scores, _ = self._scored(made, which, replies)
        found = scores.total.reshape(which.shape).astype(np.float32)
        if self._repeats:
            self._repeats = False
            return found
        rewards = scores.total.reshape(-1, which.shape[-1])
        with np.errstate(invalid="ignore"):
            members = np.array([_mean(row) for row in rewards])
        self._check_alike(rewards)
        row = {
            "step": self.number,
            "reward": _mean(scores.total),
            "spread": float(np.nanstd(members)) if np.isfinite(members).any() else None,
            "tokens": float(np.mean(replies.lengths)),
            "ended": float(np.mean(replies.ended)),
            **{name: _mean(each) for name, each in scores.each.items()},
        }
        if scores.failures:
            row |= {"failures": len(scores.failures), "failure": scores.failures[-1]}
            self._warn(scores.failures[-1])
        self._write(row)
        self.number += 1
        self.last = row["reward"] if row["reward"] is not None else math.nan
        return found

    def _check_alike(self, rewards: np.ndarray) -> None:
        """Says once if members [members, B] have equal rewards for every prompt."""
        finite = np.isfinite(rewards)
        low = np.where(finite, rewards, np.inf).min(axis=0)
        high = np.where(finite, rewards, -np.inf).max(axis=0)
        differ = len(rewards) < 2 or (low < high).any()
        if self.is_alike or differ or not finite.any():
            return
        self.is_alike = True
        tqdm.write(
            f"step {self.number}: all members have the same rewards (mean "
            f"{_mean(rewards):.4g}), so the step has no gradient. Give a metric "
            "with partial credit, a larger --smoothing, or more --prompts.",
            file=sys.stderr,
        )

    def held_out(
        self, made: Sequence[Problem], which: np.ndarray, replies: Replies, step: int
    ) -> None:
        """Writes the reward on held-out problems, and some of the replies.

        Raises:
          ValueError: If no reply has a reward.
        """
        scores, texts = self._scored(made, which, replies)
        if not np.isfinite(scores.total).any():
            cause = f" ({scores.failures[-1]})" if scores.failures else ""
            raise ValueError(
                "Reward functions must return a finite number for some replies; got "
                f"none for {len(texts)} held-out ones{cause}."
            )
        if scores.failures:
            self._warn(scores.failures[-1])
        self.measured.add(step)
        row = {
            "step": step,
            "eval": _mean(scores.total),
            "tokens": float(np.mean(replies.lengths)),
            "ended": float(np.mean(replies.ended)),
            **{name: _mean(each) for name, each in scores.each.items()},
        }
        self._write(row)
        with tqdm.external_write_mode():  # Clears the bar.
            print(f"step {step}: held-out reward {row['eval']:.4f}", flush=True)
        with (self.folder / SAMPLES).open("a", encoding="utf-8") as file:
            file.write(f"--- step {step}, held-out reward {row['eval']}\n")
            for i in range(min(_SAMPLES, len(texts))):
                question, reward = made[which[i]].question, scores.total[i]
                file.write(f"{question!r} -> {texts[i]!r} ({reward:g})\n")

    def _scored(
        self, made: Sequence[Problem], which: np.ndarray, replies: Replies
    ) -> tuple[Scores, list[str]]:
        flat = which.reshape(-1)
        tokens = replies.tokens.reshape(len(flat), -1)
        lengths = replies.lengths.reshape(-1)
        texts = self.tokenizer.decode_batch(
            [row[:n].tolist() for row, n in zip(tokens, lengths, strict=True)]
        )
        chosen = [made[i] for i in flat]
        questions = [p.question for p in chosen]
        size = which.shape[-1]  # A member's replies in a call.
        return self.pool.score(questions, texts, columns(chosen), size), texts

    def _warn(self, failure: str) -> None:
        """Prints a failure, if it is the first of this process."""
        if not self.has_warned:
            message = f"{failure}. {METRICS} counts such failures."
            tqdm.write(message, file=sys.stderr)  # Clears the bar.
        self.has_warned = True

    def _write(self, row: dict[str, Any]) -> None:
        with (self.folder / METRICS).open("a", encoding="utf-8") as file:
            file.write(f"{json.dumps(row)}\n")


def rows(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics; one that was cut is left out."""
    path = folder / METRICS
    if not path.exists():
        return []
    found = []
    for line in path.read_text("utf-8").splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            break
    return found


def picture(folder: Path) -> None:
    """Draws the curves of a run into its folder."""
    steps = [row for row in rows(folder) if "eval" not in row]
    evals = [row for row in rows(folder) if "eval" in row]
    import matplotlib.pyplot as plt  # Here, since it is slow to import.

    figure, axes = plt.subplots(1, 3, figsize=(12, 3.2), layout="constrained")

    def column(found: list[dict[str, Any]], name: str) -> np.ndarray:
        return np.array([row.get(name) for row in found], np.float64)

    at = column(steps, "step")
    mean, spread = column(steps, "reward"), column(steps, "spread")
    reward, length, ended = axes.flat
    reward.fill_between(at, mean - spread, mean + spread, alpha=0.2, lw=0)
    reward.plot(at, mean, lw=0.8, label="members: mean and spread")
    reward.plot(column(evals, "step"), column(evals, "eval"), "o-", label="held out")
    reward.legend(fontsize="small")
    reward.set(title="reward", xlabel="step")
    length.plot(at, column(steps, "tokens"), lw=0.8)
    length.set(title="tokens of a reply", xlabel="step")
    ended.plot(at, column(steps, "ended"), lw=0.8)
    ended.set(title="share of replies that ended", xlabel="step", ylim=(0, 1.05))
    figure.savefig(folder / "reward.png", dpi=130)
    plt.close(figure)


def _mean(values: np.ndarray) -> float | None:
    """The mean of the finite values; `None`, for JSON, without any."""
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if finite.size else None
