"""The command line. It only reads options: what a command needs is imported by it."""

from pathlib import Path
from typing import Any

import click

from radazo_llm.exits import Commands, tell
from radazo_llm.options import (
    CONFIG,
    FILE,
    FOLDER,
    Command,
    Decorator,
    option,
    settings_of,
)
from radazo_llm.settings import DATA, METHOD, REWARD, TUNE, Settings, fields

DTYPES = ("bfloat16", "float32")
EXPORT, OPTIONS = "The result", "Options"


def _all(*decorators: Decorator) -> Decorator:
    """Adds several options."""

    def add(command: Any) -> Any:
        for each in reversed(decorators):
            command = each(command)
        return command

    return add


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
METRIC = option(
    METHOD,
    "--metric",
    "metrics",
    multiple=True,
    metavar="NAME",
    help="A function that scores what the model writes: answer, format, length, "
    "file.py:function, or package.module:function. tune measures it; for reward it is "
    "--reward NAME=1.",
)


def _run(name: str) -> Decorator:
    """Adds the options of a run and its result."""
    return _all(
        CONFIG,
        option(
            OPTIONS,
            "--output",
            type=FOLDER,
            default=Path("runs") / name,
            show_default=True,
            help="The folder of the run.",
        ),
        DTYPE,
        option(
            OPTIONS,
            "--resume",
            is_flag=True,
            help="Continue the run in the folder, to more --steps if they are given.",
        ),
        option(
            OPTIONS,
            "--no-first-evaluation",
            "eval_first",
            flag_value=False,
            type=bool,
            default=True,
            help="Start with the first step, without measuring the untuned model.",
        ),
        option(
            OPTIONS,
            "--report",
            metavar="NAME",
            help="A function that gets the numbers of each step, report(step, values), "
            "as file.py:function or package.module:function.",
        ),
        option(
            OPTIONS,
            "--adapters",
            type=FOLDER,
            help="Adapters to start from, of an earlier run or peft.",
        ),
        option(
            EXPORT, "--export-adapters", type=FOLDER, help="What was tuned, for peft."
        ),
        option(EXPORT, "--export-gguf", type=FILE, help="The adapters, for llama.cpp."),
        option(
            EXPORT, "--export-merged", type=FOLDER, help="The model, for transformers."
        ),
    )


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
    "label, or prompt + candidates + answer.",
)
@option(
    DATA,
    "--dry-run",
    is_flag=True,
    help="Print three examples as the model sees them, and end.",
)
@METRIC
@_run("tune")
@option(
    OPTIONS,
    "--workers",
    help="The address of a Dask scheduler, or a number of processes.",
)
@settings_of(TUNE)
def tune(folder: Path, dry_run: bool, **options: Any) -> None:
    """Tunes a model on examples, and exports it."""
    from radazo_llm.formats import find
    from radazo_llm.tune import command

    settings, source = _taken(TUNE, options, folder)
    if dry_run:
        tell(source.shown(find.model(options["model"])))
        return
    command.tune(settings, source=source, to=_exports(options), **options)


@radazo_llm.command(cls=Command)
@MODEL
@option(
    DATA,
    "--data",
    "folder",
    type=FOLDER,
    required=True,
    help="Prompts: a file as for tune.",
)
@METRIC
@option(
    METHOD,
    "--reward",
    "given",
    multiple=True,
    metavar="NAME=WEIGHT",
    help="A function as for --metric, with a weight.",
)
@_run("reward")
@option(
    OPTIONS,
    "--processes",
    type=click.IntRange(1),
    default=2,
    show_default=True,
    help="Processes of reward functions.",
)
@settings_of(REWARD)
def reward(
    folder: Path,
    metrics: tuple[str, ...],
    given: tuple[str, ...],
    **options: Any,
) -> None:
    """Tunes a model on rewards of what it writes."""
    from radazo_llm.reward import command

    settings, source = _taken(REWARD, options, folder)
    command.train(
        settings,
        source=source,
        to=_exports(options),
        given=[*given, *(f"{name}=1" for name in metrics)],
        **options,
    )


@radazo_llm.command(cls=Command)
@MODEL
@option(OPTIONS, "--adapters", type=FOLDER, help="What `tune` or peft wrote.")
@option(OPTIONS, "--prompt", help="The text to continue. A chat without one.")
@option(OPTIONS, "--system", help="The first turn of a chat: how to reply.")
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


def _exports(options: dict[str, Any]) -> dict[str, Path | None]:
    """Takes the paths of exports out of the options."""
    names = [name for name in options if name.startswith("export_")]
    return {name: options.pop(name) for name in names}


def _taken(command: str, options: dict[str, Any], folder: Path) -> Any:
    """Takes the settings out of the options, with the user's file."""
    from radazo_llm.examples.splits import Own

    names = [field.name for field in fields(command)]
    settings = Settings.of(command, **{name: options.pop(name) for name in names})
    return settings, Own(folder, settings)
