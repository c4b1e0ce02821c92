"""What a run reports: lines of JSON, TensorBoard, and a progress bar."""

import json
import math
import os
import time
from pathlib import Path
from typing import Any

import jax
from tensorboardX import SummaryWriter
from tqdm import tqdm

FILE = "metrics.jsonl"


class Metrics:
    """Writes entries, each with the step it belongs to, in the order of the steps.

    A line holds nothing that depends on the clock, so that the file of a run that was
    cut and resumed is that of one that was not.

    Args:
      folder: Where `metrics.jsonl` and TensorBoard's files go; None writes nothing.
      position: Where in the file to go on; what follows it is of a run that was cut.
      step: The step to go on from.

    Raises:
      ValueError: If the file ends before the position.
    """

    def __init__(self, folder: Path | None, position: int = 0, step: int = 0) -> None:
        self.evaluations: list[dict[str, Any]] = []  # Of the whole run.
        self._pending: tuple[int, jax.Array] | None = None
        self._file, self._board = None, None
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = _open_at(folder / FILE, position)
            self.evaluations += _evaluations(folder / FILE)
            self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=step)

    def __enter__(self) -> "Metrics":
        return self

    def __exit__(self, *exception: object) -> None:
        if self._file is not None and self._board is not None:
            self._file.close()
            self._board.close()

    def write_loss(self, step: int, loss: jax.Array) -> float:
        """Takes the loss of a step that may still run; returns that of the one before.

        Waiting for it at once would leave the device idle until the next is sent.
        """
        value = self.flush()
        self._pending = step, loss
        return value

    def write_evaluation(self, step: int, measured: dict[str, float]) -> None:
        self.flush()
        self.evaluations.append({"step": step} | measured)
        self._write(step, measured)

    def flush(self) -> float:
        """Writes the loss that is waited for, if any, and returns it."""
        if self._pending is None:
            return math.nan
        (step, loss), self._pending = self._pending, None
        value = float(loss)
        if not math.isfinite(value):
            raise FloatingPointError(
                f"the loss is {value} at step {step}; a smaller learning rate may help."
            )
        self._write(step, {"loss": value})
        return value

    def position(self) -> int:
        """The length of the file, all of which is on the disk."""
        self.flush()
        if self._file is None:
            return 0
        self._file.flush()
        os.fsync(self._file.fileno())
        return self._file.tell()

    def _write(self, step: int, values: dict[str, float]) -> None:
        if self._file is not None and self._board is not None:
            self._file.write(json.dumps({"step": step} | values).encode() + b"\n")
            for name, value in values.items():
                self._board.add_scalar(name, value, step)


def _open_at(path: Path, position: int) -> Any:
    path.touch()
    size = path.stat().st_size
    if size < position:
        raise ValueError(
            f"{path} has {size} bytes where its checkpoint was made at {position}: "
            "restore the file, or start anew in another folder."
        )
    os.truncate(path, position)
    return path.open("ab")


def _evaluations(path: Path) -> list[dict[str, Any]]:
    try:
        entries = [json.loads(line) for line in path.read_bytes().splitlines()]
        return [entry for entry in entries if "loss" not in entry]
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{path} cannot be read ({error}): restore the file, or start anew in "
            "another folder."
        ) from None


class Progress:
    """A bar with the losses, and tokens and evaluations a second."""

    def __init__(self, label: str, start: int, steps: int) -> None:
        self._bar = tqdm(desc=label, initial=start, total=steps, unit="step")
        self._begin = time.perf_counter()
        self._tokens, self._evaluations = 0, 0
        self._shown: dict[str, str] = {}

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.close()

    def step(self, loss: float, tokens: int, evaluations: int) -> None:
        """A step was sent; `loss` is that of the one before, nan if none was due."""
        if math.isfinite(loss):
            self._tokens += tokens
            self._evaluations += evaluations
            seconds = time.perf_counter() - self._begin
            self._shown["loss"] = f"{loss:.4f}"
            self._shown["tokens/s"] = f"{self._tokens / seconds:,.0f}"
            self._shown["evaluations/s"] = f"{self._evaluations / seconds:.3g}"
            self._bar.set_postfix(self._shown, refresh=False)
        self._bar.update()

    def evaluated(self, train_loss: float) -> None:
        """Shows the loss. The rates start anew: to measure is not to train."""
        self._shown["train"] = f"{train_loss:.4f}"
        self._bar.set_postfix(self._shown)
        self._begin = time.perf_counter()
        self._tokens = self._evaluations = 0
