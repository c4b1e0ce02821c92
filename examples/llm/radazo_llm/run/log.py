"""The metrics of a run: in a file, next to a bar, and for a function of the user's.

`metrics.jsonl` has a line for each step and one for each evaluation, whose numbers are
of examples that are held out (`dev_…`), of the test, or of those to train on.
"""

import contextlib
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tqdm import tqdm

from radazo_llm.exits import reason

METRICS = "metrics.jsonl"
# What an evaluation is compared by, and whether it falls.
GOALS = {"dev_loss": True, "dev_reward": False}
Send = Callable[[int, dict[str, float]], None]


class Log(contextlib.ExitStack):
    """Writes and shows the metrics of a run.

    Args:
      folder: The folder of the files.
      done: Number of steps of the run that are done, whose lines are kept.
      end: The last step.
      send: A function that gets the metrics too.

    Attributes:
      rows: The lines so far.
    """

    def __init__(
        self,
        folder: Path,
        done: int = 0,
        end: int = 0,
        send: Send | None = None,
    ) -> None:
        super().__init__()
        self.send, before = send, rows(folder) if done else []
        self.rows = [r for r in before if r["step"] < done + is_evaluation(r)]
        self.bar = self.enter_context(tqdm(initial=done, total=end, unit="step"))
        path = folder / METRICS
        self.file = self.enter_context(path.open("w", encoding="utf-8", buffering=1))
        self.file.writelines(f"{json.dumps(row)}\n" for row in self.rows)

    def step(self, number: int, values: dict[str, Any]) -> None:
        """Writes the numbers of a step."""
        self.write(number, values)
        for name in ("loss", "reward"):
            if isinstance(values.get(name), float):
                self.bar.set_postfix({name: f"{values[name]:.4f}"}, refresh=False)
        self.bar.update()

    def evaluation(self, step: int, values: dict[str, Any]) -> None:
        """Writes the numbers of an evaluation before a step.

        Raises:
          FloatingPointError: If the loss is not finite.
        """
        for name, value in values.items():
            if name.endswith("_loss") and not math.isfinite(value):
                raise FloatingPointError(self.diverged(name, value, step))
        self.write(step, values)
        names = [name for name in GOALS if name in values]
        with tqdm.external_write_mode():  # Clears the bar.
            for name in names:
                print(f"step {step}: {name} {values[name]:.4f}", flush=True)

    def diverged(self, name: str, value: float, step: int) -> str:
        """A message on a run that is of no use from a step on."""
        text = f"{name} must be finite; got {value} at step {step}."
        if not step:
            return f"{text} Get the model's files again, or give --dtype float32."
        best = self.best()
        if best and best["step"]:
            number = best["step"]
            text += (
                f" The best evaluation was at step {number}: --resume --steps {number} "
                "exports the model there."
            )
        return f"{text} Give a smaller --learning-rate, and another --output."

    def best(self) -> dict[str, Any] | None:
        """The evaluation with the best number of those in `GOALS`."""
        found = self.evaluations()
        for name, falls in GOALS.items():
            some = [row for row in found if row.get(name) is not None]
            if some:
                return (min if falls else max)(some, key=lambda row: row[name])
        return None

    def evaluations(self) -> list[dict[str, Any]]:
        """The lines of evaluations."""
        return [row for row in self.rows if is_evaluation(row)]

    def is_measured(self, step: int) -> bool:
        """Whether there is an evaluation before a step."""
        return any(row["step"] == step for row in self.evaluations())

    def write(self, step: int, values: dict[str, Any]) -> None:
        """Adds a line."""
        self.rows.append({"step": step} | values)
        print(json.dumps(self.rows[-1]), file=self.file)
        if self.send is not None:
            numbers = {k: v for k, v in values.items() if isinstance(v, int | float)}
            try:
                self.send(step, numbers)
            except Exception as error:
                raise ValueError(f"--report must not raise; {reason(error)}") from error


def is_evaluation(row: dict[str, Any]) -> bool:
    """Whether a line is of an evaluation."""
    return any(name.startswith("dev_") for name in row)


def rows(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics; one that was cut is left out."""
    path, found = folder / METRICS, []
    for line in path.read_text("utf-8").splitlines() if path.exists() else ():
        try:
            found.append(json.loads(line))
        except ValueError:
            break
    return found
