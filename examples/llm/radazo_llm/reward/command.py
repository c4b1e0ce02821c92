"""The job of `radazo-llm reward`."""

import copy
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from radazo_llm.examples.splits import NAMES
from radazo_llm.formats import find, weights
from radazo_llm.formats.files import json_object
from radazo_llm.reward import problems, rewards
from radazo_llm.reward.log import picture
from radazo_llm.reward.run import run
from radazo_llm.reward.settings import Settings
from radazo_llm.reward.task import Problems, Task
from radazo_llm.tune.checkpoint import locked, write_json


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
    task: str,
    source: Any,
    given: Sequence[str],
    output: Path,
    dtype: str | None,
    processes: int,
) -> None:
    """Tunes a model on rewards of what it writes.

    Args:
      settings: The settings of the run.
      model: A name that `find.model` takes.
      task: A name that `problems.make` takes, without `source`.
      source: Prompts, `splits.Own`; or None.
      given: Reward functions with their weights, such as "answer=1".
      output: The folder of the run. A journal in it is resumed.
      dtype: The dtype of the model; by default, of the present backend.
      processes: Number of processes for reward functions.

    Raises:
      ValueError: If an argument is wrong, or the folder has another run.
    """
    # An installed command does not look for modules in the present folder.
    sys.path.append(str(Path.cwd()))
    default = "gym=1" if task.startswith(problems.GYM) else "answer=1"
    by_name = weights_of(given or [default])
    folder = find.model(model)
    weights.read_config(folder)  # Its errors come before others.
    about = {
        "settings": dataclasses.asdict(settings),
        "task": task,
        "rewards": by_name,
        "model": model,
    }
    named: Any = task
    if source is not None:
        named = _of_source(settings, source)
        # As JSON has it, to compare with.
        data = json.loads(json.dumps(dataclasses.asdict(source), default=str))
        about = {**about, "task": None, "data": data}
    with locked(output):
        path = output / "settings.json"
        if path.exists() and json_object(path) != about:
            raise ValueError(
                f"{output} has a run with other settings; give another --output."
            )
        write_json(path, about)
        loaded = weights.load(folder, dtype=dtype or weights.default_dtype())
        timeout = settings.timeout
        with rewards.RewardPool(by_name, processes, timeout) as pool:
            made = Task(settings, loaded, folder, named, pool, output)
            params = run(settings, made, output)
        tuned = made.model(params)
        if settings.tune == "lora":
            weights.save_adapters(tuned, output / "adapters", base=str(folder))
        else:
            weights.save_merged(copy.copy(tuned), output / "tuned", base=folder)
        picture(output)
    print(f"The tuned model, samples and a picture are in {output}.")


def _of_source(settings: Settings, source: Any) -> Problems:
    """The problems of a user's file, to train on and held out."""
    limits = {"train": settings.num_problems, "dev": settings.eval_problems, "test": 0}
    found = source.divided(limits)
    train, held_out = ([*map(problems.of_item, found.items[n])] for n in NAMES[:2])
    likeliest = settings.eval_temperature == 0
    print(
        f"{source.path.name}: {len(train)} prompts to train on, {len(held_out)} held "
        f"out, which are answered by {'the likeliest' if likeliest else 'drawn'} "
        "tokens.",
        flush=True,
    )
    return train, held_out
