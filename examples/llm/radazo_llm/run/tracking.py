"""A run's metrics on Weights & Biases."""

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from radazo_llm.exits import reason

Log = Callable[[int, dict[str, float]], None]
_ID = "wandb.txt"


@contextlib.contextmanager
def on_wandb(folder: Path, about: dict[str, Any]) -> Iterator[Log]:
    """Starts or continues the run of a folder on Weights & Biases.

    The variables of wandb decide the server and the project: `WANDB_PROJECT` is
    radazo-llm by default, and `WANDB_MODE=offline` writes files alone.

    Args:
      folder: The folder of the run, which keeps the run's name on the server.
      about: The run's settings.

    Yields:
      A function that sends the metrics of a step.

    Raises:
      ValueError: If wandb is not installed, or starts no run.
    """
    try:
        import wandb  # An optional package.
    except ImportError:
        raise ValueError(
            "--wandb must be given with wandb installed; it is not. pip install wandb, "
            "or leave out --wandb: TensorBoard's files are always written."
        ) from None
    name = folder / _ID
    try:
        run = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or "radazo-llm",
            dir=folder,
            config=about,
            id=name.read_text("utf-8").strip() if name.exists() else None,
            resume="allow",
        )
    except Exception as error:
        raise ValueError(
            f"--wandb must reach a server of wandb; got {reason(error)}. Run wandb "
            "login, or set WANDB_MODE=offline."
        ) from None
    name.write_text(f"{run.id}\n", "utf-8")
    with run:
        yield lambda step, values: run.log(values, step=step)
