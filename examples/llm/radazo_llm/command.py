"""The command line. It only reads options: what a command needs is imported by it."""

from pathlib import Path
from typing import Any

import click

from radazo_llm.exits import Commands, tell
from radazo_llm.options import Command, options
from radazo_llm.settings import REWARD, TUNE, Settings, fields

_RUN = "config", "output", "dtype", "resume", "no_first_evaluation", "report"
_RUN = (*_RUN, "adapters", "export_adapters", "export_gguf", "export_merged")


@click.group(cls=Commands, name="radazo-llm")
@click.version_option(package_name="radazo-llm")
def radazo_llm() -> None:
    """Language models, tuned by forward passes only."""


@radazo_llm.command(cls=Command)
@options(TUNE, "model", "data", "dry_run", "metric", *_RUN, "workers")
def tune(folder: Path, dry_run: bool, **given: Any) -> None:
    """Tunes a model on examples, and exports it."""
    from radazo_llm.formats import find
    from radazo_llm.tune import command

    settings, source = _taken(TUNE, given, folder)
    if dry_run:
        tell(source.shown(find.model(given["model"])))
        return
    command.tune(settings, source=source, to=_exports(given), **given)


@radazo_llm.command(cls=Command)
@options(REWARD, "model", "data", "metric", "reward", *_RUN, "processes")
def reward(
    folder: Path, metrics: tuple[str, ...], given: tuple[str, ...], **others: Any
) -> None:
    """Tunes a model on rewards of what it writes."""
    from radazo_llm.reward import command

    settings, source = _taken(REWARD, others, folder)
    weights = [*given, *(f"{name}=1" for name in metrics)]
    to = _exports(others)
    command.train(settings, source=source, to=to, given=weights, **others)


@radazo_llm.command(cls=Command)
@options("chat", "model", "adapters", "prompt", "system", "max_tokens", "temperature")
@options("chat", "seed", "dtype")
def chat(**given: Any) -> None:
    """Continues a prompt, or chats: each line of the input is a turn."""
    from radazo_llm.chat import chat

    chat(**given)


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
