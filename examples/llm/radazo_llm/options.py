"""Options of the command line in groups, and from a file of TOML."""

import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import click

from radazo_llm.settings import default_of, descriptions, fields, option_name

FOLDER, FILE = click.Path(path_type=Path), click.Path(dir_okay=False, path_type=Path)
Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


class Option(click.Option):
    """An option that help lists in a group."""

    def __init__(self, *args: Any, group: str = "Options", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.group = group


class Command(click.Command):
    """A command whose help lists its options by group."""

    def format_options(
        self, context: click.Context, formatter: click.HelpFormatter
    ) -> None:
        """Writes each group's options under its name."""
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(context):
            record = parameter.get_help_record(context)
            if record is not None:
                name = getattr(parameter, "group", "Options")
                groups.setdefault(name, []).append(record)
        for name, records in groups.items():
            with formatter.section(name):
                formatter.write_dl(records)


def option(group: str, *names: str, **kwargs: Any) -> Decorator:
    """Adds an option to a command, in a group."""
    return click.option(*names, cls=Option, group=group, **kwargs)


def settings_of(command: str) -> Decorator:
    """Adds an option for each setting of a command."""

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        found, texts = fields(command), descriptions()
        # Of a group one after another; click reads decorators from the last.
        groups = list(dict.fromkeys(field.metadata["group"] for field in found))
        found.sort(key=lambda field: groups.index(field.metadata["group"]))
        for field in reversed(found):
            default = default_of(field, command)
            choices = get_args(field.type)
            function = option(
                field.metadata["group"],
                *(option_name(field.name), field.name),
                type=click.Choice(choices) if choices else type(default),
                is_flag=isinstance(default, bool),
                default=default,
                show_default=default not in ("", False),
                help=texts[field.name],
            )(function)
        return function

    return add


def _read_config(context: click.Context, _: Any, path: Path | None) -> None:
    """Takes the options of a file as defaults."""
    if path is None:
        return
    try:
        with path.open("rb") as file:
            found = tomllib.load(file)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise click.UsageError(f"{path} must be TOML: {error}", context) from None
    except OSError as error:
        raise click.UsageError(f"{path}: {error.strerror}", context) from None
    known = {
        name: parameter
        for parameter in context.command.params
        for name in parameter.opts
        if name != "--config"
    }
    defaults: dict[str, Any] = {}
    for key, value in found.items():
        parameter = known.get("--" + key.replace("_", "-"))
        if parameter is None or parameter.name is None or isinstance(value, dict):
            raise click.UsageError(
                f"{path}: {key} must be an option of {context.info_name}; see "
                f"{context.command_path} --help.",
                context,
            )
        if getattr(parameter, "is_flag", False):
            if not isinstance(value, bool):
                raise click.UsageError(
                    f"{path}: {key} must be true or false; got {value!r}.", context
                )
            if not value:
                continue
            value = parameter.flag_value
        defaults[parameter.name] = value
    context.default_map = defaults


CONFIG = option(
    "Options",
    "--config",
    type=FILE,
    is_eager=True,
    expose_value=False,
    callback=_read_config,
    help="A file of TOML with options, such as `batch-size = 8`. Those of the command "
    "line come first.",
)
