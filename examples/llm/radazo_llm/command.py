"""The command line. It only reads options: what a command needs is imported by it."""

import dataclasses
from pathlib import Path
from typing import Any

import click

from radazo_llm.exits import Commands
from radazo_llm.options import (
    CONFIG,
    FILE,
    FOLDER,
    METRIC,
    Command,
    Decorator,
    option,
    setting_option,
    settings_of,
)
from radazo_llm.reward.settings import Settings as RewardSettings
from radazo_llm.tune.settings import METHOD
from radazo_llm.tune.settings import Settings as TuneSettings

TASKS = ("sst2", "copa", "reviews")
DTYPES = ("bfloat16", "float32")
(OBJECTIVE,) = (f for f in dataclasses.fields(TuneSettings) if f.name == "objective")
DATA, EXPORT, OPTIONS = "The data", "The result", "Options"


MODEL = option(
    OPTIONS,
    "--model",
    required=True,
    help="A folder, a GGUF file, a package that contains one, or a name in the local "
    "Hugging Face cache.",
)
DTYPE = option(
    OPTIONS,
    "--dtype",
    type=click.Choice(DTYPES),
    help="The dtype of the model. The default is float32 on a CPU, and otherwise "
    "bfloat16.",
)


def _output(name: str) -> Decorator:
    default = Path("runs") / name
    text = "The folder of the run."
    return option(
        OPTIONS, "--output", type=FOLDER, default=default, show_default=True, help=text
    )


def own_data(*, written: bool = False) -> Decorator:
    """Adds the options that say how a user's file is read.

    Args:
      written: Whether the model's own text is scored, which is always a chat's if the
        model has a template.
    """
    options = [
        option(
            DATA,
            "--labels",
            default="",
            metavar="WORD=VALUE,...",
            help="The word that stands for each value of the column label, such as "
            "great=1,terrible=0. The values themselves by default.",
        ),
        option(
            DATA,
            "--template",
            default=r"{text}\nAnswer:",
            show_default=True,
            help=r"The prompt of a text with a label; \n is a new line.",
        ),
        option(
            DATA,
            "--chat",
            is_flag=True,
            help="Make each prompt the turn of a user, in the model's chat template.",
        ),
        option(
            DATA,
            "--split-column",
            default="",
            help="The column that says train, dev or test. By default, split if there "
            "is one.",
        ),
        option(
            DATA,
            "--dev-share",
            default=0.1,
            show_default=True,
            help="The share of rows to evaluate on, if nothing names the splits.",
        ),
        option(
            DATA,
            "--test-share",
            default=0.0,
            show_default=True,
            help="The share of rows that are measured before and after the run alone.",
        ),
        option(
            DATA,
            "--skip-long",
            is_flag=True,
            help="Leave out examples that are longer than the model's context.",
        ),
    ]
    kept = [options[i] for i in (0, 1, 3, 4)] if written else options

    def add(command: Any) -> Any:
        for each in reversed(kept):
            command = each(command)
        return command

    return add


@click.group(cls=Commands, name="radazo-llm")
@click.version_option(package_name="radazo-llm")
def radazo_llm() -> None:
    """Language models, tuned by forward passes only."""


@radazo_llm.command(cls=Command)
@MODEL
@option(
    DATA,
    "--data",
    "folder",
    type=FOLDER,
    required=True,
    help="JSON Lines, CSV or a folder, with prompt + completion, messages, text + "
    "label, or prompt + candidates + answer; or the folder of --task.",
)
@option(DATA, "--task", type=click.Choice(TASKS), help="A task of MeZO, by its files.")
@option(
    DATA,
    "--dry-run",
    is_flag=True,
    help="Print three examples as the model sees them, and end.",
)
@own_data()
@option(
    DATA,
    "--train-examples",
    type=click.IntRange(1),
    help="At most; the default is 10000, and 1000 of a task.",
)
@option(
    DATA,
    "--eval-examples",
    type=click.IntRange(1),
    help="At most; the default is 500.",
)
@CONFIG
@_output("tune")
@DTYPE
@option(OPTIONS, "--resume", is_flag=True, help="Continue the run in the folder.")
@option(
    OPTIONS,
    "--no-first-evaluation",
    "eval_first",
    flag_value=False,
    type=bool,
    default=True,
    help="Start with the first step, without the accuracy of the untuned model.",
)
@option(
    OPTIONS,
    "--workers",
    help="The address of a Dask scheduler, or a number of processes.",
)
@METRIC
@option(
    OPTIONS,
    "--wandb",
    is_flag=True,
    help="Send the metrics to Weights & Biases too, to the project WANDB_PROJECT.",
)
@option(EXPORT, "--export-adapters", type=FOLDER, help="What was tuned, for peft.")
@option(EXPORT, "--export-gguf", type=FILE, help="The adapters, for llama.cpp.")
@option(EXPORT, "--export-merged", type=FOLDER, help="The model, for transformers.")
@setting_option(OBJECTIVE, default=None, show_default=False)
@settings_of(TuneSettings, without=("objective", "bias_correction"))
def tune(
    folder: Path, task: str | None, objective: str | None, dry_run: bool, **options: Any
) -> None:
    """Tunes a model on examples, and exports it."""
    from radazo_llm.tune import command, data

    own = _own(folder, options)
    source = own if task is None else data.TaskFiles(task, folder)
    if dry_run:
        command.dry_run(own, options["model"])
        return
    objective = objective or source.objective()
    settings = _settings(TuneSettings, options, objective=objective)
    command.tune(settings, source=source, **options)


@radazo_llm.command(cls=Command)
@MODEL
@option(DATA, "--data", "folder", type=FOLDER, help="As for tune.")
@own_data()
@option(
    DATA,
    "--length",
    type=click.IntRange(1),
    default=128,
    show_default=True,
    help="Tokens of an example, without --data.",
)
@option(
    DATA,
    "--examples",
    type=click.IntRange(1),
    default=1500,
    show_default=True,
    help="To train on and to evaluate, without --data.",
)
@CONFIG
@DTYPE
@settings_of(TuneSettings, without=("objective", "bias_correction"))
def plan(folder: Path | None, **options: Any) -> None:
    """Prints the memory, the disk and the time that `tune` takes here.

    Programs are compiled for the present backend, and a step is timed on zeros. No
    weights are read.
    """
    from radazo_llm.tune.plan import plan

    own = _own(folder or Path(), options)
    settings = _settings(TuneSettings, options)
    plan(settings, source=None if folder is None else own, **options)


@radazo_llm.command(cls=Command)
@MODEL
@option(DATA, "--data", "folder", type=FOLDER, help="Prompts: a file as for tune.")
@own_data(written=True)
@option(
    DATA,
    "--task",
    default="sum",
    show_default=True,
    help="Problems without --data: sum, or gym:DATASET.",
)
@option(
    METHOD,
    "--metric",
    "metrics",
    multiple=True,
    metavar="NAME",
    help="As --reward NAME=1.",
)
@option(
    METHOD,
    "--reward",
    "given",
    multiple=True,
    metavar="NAME=WEIGHT",
    help="A reward function of the program, file.py:function, or "
    "package.module:function.",
)
@CONFIG
@_output("reward")
@DTYPE
@option(
    OPTIONS,
    "--processes",
    type=click.IntRange(1),
    default=2,
    show_default=True,
    help="Processes of reward functions.",
)
@settings_of(RewardSettings)
def reward(
    folder: Path | None,
    metrics: tuple[str, ...],
    given: tuple[str, ...],
    **options: Any,
) -> None:
    """Tunes a model on rewards of what it writes.

    The same command resumes a run that was cut.
    """
    from radazo_llm.reward import command

    own = _own(folder or Path(), options, written=True)
    command.train(
        _settings(RewardSettings, options),
        source=None if folder is None else own,
        given=[*given, *(f"{name}=1" for name in metrics)],
        **options,
    )


@radazo_llm.command(cls=Command)
@MODEL
@option(OPTIONS, "--adapters", type=FOLDER, help="What `tune` or peft wrote.")
@option(OPTIONS, "--prompt", help="The text to continue. A chat without one.")
@option(
    OPTIONS, "--max-tokens", default=64, show_default=True, help="Tokens of a reply."
)
@option(
    OPTIONS,
    "--temperature",
    default=0.0,
    show_default=True,
    help="0 is for the likeliest token.",
)
@option(OPTIONS, "--seed", default=0, show_default=True, help="Of drawn tokens.")
@DTYPE
def chat(**options: Any) -> None:
    """Continues a prompt, or chats: each line of the input is a turn."""
    from radazo_llm.chat import chat

    chat(**options)


def _own(folder: Path, options: dict[str, Any], *, written: bool = False) -> Any:
    """Takes the options of a user's file out of the options."""
    from radazo_llm.examples.forms import Shape
    from radazo_llm.examples.splits import Own

    options["template"] = options["template"].replace(r"\n", "\n")
    names = [field.name for field in dataclasses.fields(Own)]
    values = {name: options.pop(name) for name in names if name in options}
    names = [field.name for field in dataclasses.fields(Shape)]
    shape = Shape(**{name: options.pop(name) for name in names if name in options})
    return Own(folder, shape, **values, written=written)


def _settings(kind: Any, options: dict[str, Any], **others: Any) -> Any:
    """Takes the settings out of the options."""
    names = [field.name for field in dataclasses.fields(kind) if field.name in options]
    return kind(**{name: options.pop(name) for name in names}, **others)
