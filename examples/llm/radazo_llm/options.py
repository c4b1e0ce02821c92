"""Options of the command line in groups, and from a file of TOML."""

import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import click

from radazo_llm import settings
from radazo_llm.settings import DATA, METHOD, default_of, fields, option_name

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


class Others:
    """The options that are no settings. The command line shows these descriptions.

    Attributes:
      model: A folder, a GGUF file, a package that contains one, or a name in the local
        Hugging Face cache.
      data: JSON Lines, CSV or a folder, with prompt + completion, messages, text +
        label, prompt + candidates + answer, or prompt + chosen + rejected; for rewards,
        prompt or messages.
      dry_run: Print three examples as the model sees them, and end.
      metric: A function that scores what the model writes: answer, format, length,
        file.py:function, or package.module:function. tune measures it; for reward it is
        --reward NAME=1.
      reward: A function as for --metric, with a weight.
      config: A file of TOML with options, such as `batch-size = 8`. Options of the
        command line come first.
      output: The folder of the run.
      dtype: The dtype of the model. The default is float32 on a CPU, and otherwise
        bfloat16.
      resume: Continue the run in the folder, to more --steps if they are given.
      no_first_evaluation: Start with the first step, without measuring the untuned
        model.
      report: A function that gets the numbers of each step, report(step, values), as
        file.py:function or package.module:function.
      adapters: Adapters to start from, of an earlier run or peft.
      workers: The address of a Dask scheduler, or a number of processes.
      processes: Processes of reward functions.
      export_adapters: The adapters, for peft.
      export_gguf: The adapters, for llama.cpp.
      export_merged: The model, for transformers.
      prompt: The text to continue. A chat without one.
      system: The first turn of a chat: how to reply.
      max_tokens: Tokens of a reply, at most.
      temperature: 0 takes the likeliest tokens; above, tokens are drawn.
      seed: The seed of drawn tokens.
    """


def options(command: str, *names: str) -> Decorator:
    """Adds options to a command, followed by its settings, if it has any."""
    texts, made = settings.descriptions(Others), []
    for name in names:
        group, given = _OTHERS[name]
        if name == "output":
            given = given | {"default": Path("runs") / command}
        made.append((group, name, given | {"help": texts[name]}))
    texts = settings.descriptions(settings.Settings)
    for field in fields(command) if command in (settings.TUNE, settings.REWARD) else ():
        default, choices = default_of(field, command), get_args(field.type)
        given = {
            "type": click.Choice(choices) if choices else type(default),
            "is_flag": isinstance(default, bool),
            "default": default,
            "show_default": default not in ("", False),
            "help": texts[field.name],
        }
        made.append((field.metadata["group"], field.name, given))
    # Of a group one after another; click reads decorators from the last.
    groups = list(dict.fromkeys(group for group, *_ in made))
    made.sort(key=lambda each: groups.index(each[0]))

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        for group, name, given in reversed(made):
            function = click.option(
                *(option_name(name), given.get("to", name)),
                **{k: v for k, v in given.items() if k != "to"},
                cls=Option,
                group=group,
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


_RESULT, _OPTIONS = "The result", "Options"
_FOLDER = {"type": click.Path(path_type=Path)}
_FILE = {"type": click.Path(dir_okay=False, path_type=Path)}
_NUMBER = {"show_default": True}
_CONFIG = _FILE | {"is_eager": True, "expose_value": False, "callback": _read_config}
_NAMES = {"multiple": True, "metavar": "NAME"}
_NOT_FIRST = {"to": "eval_first", "flag_value": False, "type": bool, "default": True}
# The group and the arguments of click for each; "to" is the name of the parameter.
_OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "model": (_OPTIONS, {"required": True}),
    "data": (DATA, _FOLDER | {"to": "folder", "required": True}),
    "dry_run": (DATA, {"is_flag": True}),
    "metric": (METHOD, _NAMES | {"to": "metrics"}),
    "reward": (METHOD, _NAMES | {"to": "given", "metavar": "NAME=WEIGHT"}),
    "config": (_OPTIONS, _CONFIG),
    "output": (_OPTIONS, _FOLDER | _NUMBER),
    "dtype": (_OPTIONS, {"type": click.Choice(("bfloat16", "float32"))}),
    "resume": (_OPTIONS, {"is_flag": True}),
    "no_first_evaluation": (_OPTIONS, _NOT_FIRST),
    "report": (_OPTIONS, {"metavar": "NAME"}),
    "adapters": (_OPTIONS, _FOLDER),
    "workers": (_OPTIONS, {}),
    "processes": (_OPTIONS, _NUMBER | {"type": click.IntRange(1), "default": 2}),
    "export_adapters": (_RESULT, _FOLDER),
    "export_gguf": (_RESULT, _FILE),
    "export_merged": (_RESULT, _FOLDER),
    "prompt": (_OPTIONS, {}),
    "system": (_OPTIONS, {}),
    "max_tokens": (_OPTIONS, _NUMBER | {"default": 64}),
    "temperature": (_OPTIONS, _NUMBER | {"default": 0.0}),
    "seed": (_OPTIONS, _NUMBER | {"default": 0}),
}
