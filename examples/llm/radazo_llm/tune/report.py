"""The metrics of a run: in a file, for TensorBoard, and next to a bar."""

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tensorboardX import SummaryWriter
from tqdm import tqdm

from radazo_llm.tune.tracking import Log

METRICS = "metrics.jsonl"


class Report(contextlib.ExitStack):
    """Writes and shows the metrics of a run.

    Args:
      folder: The folder of the files, if there are any.
      rows: The rows of metrics so far, to which others are added.
      first: The first step.
      end: The last step.
      label: The text of the progress bar.
      clock: As of `run`.
      log: A function that gets the metrics of each step too.
    """

    def __init__(
        self,
        folder: Path | None,
        rows: list[dict[str, Any]],
        first: int,
        end: int,
        label: str,
        clock: Callable[[], float] | None,
        log: Log | None = None,
    ) -> None:
        super().__init__()
        self.log = log
        self.rows, self.seconds = rows, Seconds(clock, rows)
        self.shown: dict[str, str] = {}
        self.bar = self.enter_context(
            tqdm(desc=label, initial=first, total=end, unit="step")
        )
        path = f"{folder}/{METRICS}" if folder else os.devnull
        # What follows the checkpoint is of a run that was cut.
        file = open(path, "w", encoding="utf-8", buffering=1)  # noqa: SIM115
        self.file = self.enter_context(file)
        self.file.writelines(f"{json.dumps(row)}\n" for row in rows)
        writes = folder is not None
        self.board = self.enter_context(
            SummaryWriter(
                f"{folder}/tensorboard", purge_step=first, write_to_disk=writes
            )
        )

    def __call__(self, step: int, values: dict[str, float]) -> None:
        self.rows.append({"step": step} | values | self.seconds())
        print(json.dumps(self.rows[-1]), file=self.file)
        if self.log is not None:
            self.log(step, values)
        for name, value in values.items():
            self.board.add_scalar(name, value, step)
            if name in ("loss", "train_loss"):
                self.shown[name] = f"{value:.4f}"

    def advance(self, evaluations: int, tokens: int) -> None:
        """Moves the bar by a step of so many evaluations, of so many tokens each."""
        rate = evaluations * (self.bar.format_dict["rate"] or 0.0)
        self.shown["tokens/s"] = f"{rate * tokens:,.0f}"
        self.shown["evaluations/s"] = f"{rate:.3g}"
        self.bar.set_postfix(self.shown, refresh=False)
        self.bar.update()


class Seconds:
    """The time of a run without its evaluations, for rows of metrics."""

    def __init__(self, clock: Callable[[], float] | None, rows: list[Any]) -> None:
        self.clock = clock
        if clock is not None:
            self.start = clock() - (rows[-1]["cpu_s"] if rows else 0.0)

    def __call__(self) -> dict[str, float]:
        return {} if self.clock is None else {"cpu_s": self.clock() - self.start}

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """Leaves out the time in between."""
        before = self().get("cpu_s")
        yield
        if self.clock is not None:
            self.start = self.clock() - before
