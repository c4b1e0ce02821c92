"""The job of `radazo-llm reward`."""

import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from radazo_llm.formats import config, find
from radazo_llm.reward import problems
from radazo_llm.reward.pool import RewardPool
from radazo_llm.reward.task import Task
from radazo_llm.run import exports, folder, session
from radazo_llm.settings import Settings
from radazo_llm.tune.job import Tuned, parts_of


def weights_of(given: Sequence[str]) -> dict[str, float]:
    """The weights of reward functions, by name."""
    found = {}
    for text in given:
        name, _, weight = text.rpartition("=")
        try:
            found[name] = float(weight)
        except ValueError:
            name = ""
        if not name or not np.isfinite(found[name]):
            raise ValueError(f"--reward must be NAME=WEIGHT; got {text!r}.")
    return found


def train(
    settings: Settings,
    *,
    model: str,
    source: Any,
    given: Sequence[str],
    output: Path,
    processes: int = 2,
    adapters: Path | None = None,
    resume: bool = False,
    to: exports.Exports,
    **options: Any,
) -> None:
    """Tunes a model on rewards of what it writes.

    Args:
      settings: The settings of the run.
      model: A name that `find.model` takes.
      source: Prompts, `splits.Own`.
      given: Reward functions with their weights, such as "answer=1".
      output: The folder of the run.
      processes: Number of processes for reward functions.
      adapters: The folder of adapters to start from.
      resume: Whether to continue the run in the folder.
      to: The paths of exports.
      options: Other options of `session.execute`.

    Raises:
      ValueError: If an argument is wrong, or the folder has another run.
    """
    # An installed command does not look for modules in the present folder.
    sys.path.append(str(Path.cwd()))
    weights = weights_of(given or ["answer=1"])
    path = find.model(model)
    config.read(path)  # Its errors come before others.
    exports.check(settings, path, to)
    now = folder.started(output, resume)
    splits = {
        name: [problems.of_item(item) for item in items]
        for name, items in source.problems().items()
        if items
    }
    likeliest = settings.eval_temperature == 0
    numbers = ", ".join(f"{name} {len(some):,}" for name, some in splits.items())
    print(
        f"{source.path.name}: {numbers} prompts; those that are held out are answered "
        f"by {'the likeliest' if likeliest else 'drawn'} tokens.",
        flush=True,
    )

    def prepare(loaded: Any, stack: contextlib.ExitStack) -> Tuned:
        identity: dict[str, Any] = {"--reward": weights}
        parts = parts_of(settings, loaded, adapters)
        identity["the base model"] = folder.checksum(parts.rest)
        identity["--adapters"] = folder.checksum(parts.params)
        pool = stack.enter_context(RewardPool(weights, processes, settings.timeout))
        made = Task(settings, parts, path, splits, pool, output, now)
        identity["the data"] = folder.checksum(made.prompts)
        return Tuned(made.job(), parts, identity)

    session.execute(
        settings,
        prepare,
        model=model,
        path=path,
        output=output,
        notes={"data": source.path, "started": now},
        to=to,
        resume=resume,
        **options,
    )
