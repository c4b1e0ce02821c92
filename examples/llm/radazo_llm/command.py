"""The command line. It only reads options: what a command needs is imported by it."""

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import click

from radazo_llm.reward.settings import Settings as RewardSettings
from radazo_llm.tune.settings import Settings as TuneSettings

TASKS = ("sst2", "copa", "reviews")
DTYPES = ("bfloat16", "float32")
FOLDER, FILE = click.Path(path_type=Path), click.Path(dir_okay=False, path_type=Path)
INTERRUPTED = {
    "tune": "; --resume continues from its checkpoint",
    "reward": "; the same command resumes",
}


class Commands(click.Group):
    """Ends in one line, with status 2, if the input or a file is wrong."""

    def main(self, *args: Any, **kwargs: Any) -> None:
        """Runs a command, and exits."""
        try:
            options = {"prog_name": "radazo-llm"} | kwargs | {"standalone_mode": False}
            code = super().main(*args, **options)
        except click.Abort as error:
            rest = INTERRUPTED.get(getattr(error, "command", ""), "")
            print(f"\nradazo-llm: interrupted{rest}", file=sys.stderr)
            sys.exit(130)
        except click.ClickException as error:
            context = getattr(error, "ctx", None)
            name = context.command_path if context else "radazo-llm"
            text = " ".join(error.format_message().split())
            print(f"{name}: error: {text}", file=sys.stderr)
            sys.exit(2)
        sys.exit(code if isinstance(code, int) else 0)

    def invoke(self, context: click.Context) -> Any:
        """Runs a command; errors in its input become click's."""
        try:
            return super().invoke(context)
        except (click.exceptions.Exit, click.Abort):
            raise  # A RuntimeError too.
        except (ValueError, OSError, FloatingPointError) as error:
            raise _told(context, error) from error
        except RuntimeError as error:
            from radazo_jax.runs import RunError

            if not isinstance(error, RunError):
                raise
            raise _told(context, error) from error
        except KeyboardInterrupt:
            abort = click.Abort()
            abort.command = context.invoked_subcommand
            raise abort from None


def _told(context: click.Context, error: Exception) -> click.ClickException:
    found = click.UsageError(str(error))
    found.ctx = click.Context(
        context.command, context.parent, f"radazo-llm {context.invoked_subcommand}"
    )
    return found


def option_name(field: str) -> str:
    """The option of the command line for a setting."""
    return "--" + field.removeprefix("num_").replace("_", "-")


def settings_of(
    kind: Any, *, without: tuple[str, ...] = ()
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Adds an option for each setting of a dataclass."""

    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        for field in reversed(dataclasses.fields(kind)):
            if field.name in without:
                continue
            choices = get_args(field.type)
            command = click.option(
                option_name(field.name),
                field.name,
                type=click.Choice(choices) if choices else type(field.default),
                default=field.default,
                show_default=field.default != "",
            )(command)
        return command

    return add


MODEL = click.option(
    "--model",
    required=True,
    help="A folder, a GGUF file, a package that contains one, or a name in the local "
    "Hugging Face cache.",
)
DTYPE = click.option(
    "--dtype",
    type=click.Choice(DTYPES),
    help="Of the model. The default is float32 on a CPU, and otherwise bfloat16.",
)


def _output(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    default = Path("runs") / name
    text = "The folder of the run."
    return click.option(
        "--output", type=FOLDER, default=default, show_default=True, help=text
    )


@click.group(cls=Commands, name="radazo-llm")
@click.version_option(package_name="radazo-llm")
def radazo_llm() -> None:
    """Language models, tuned by forward passes only."""


@radazo_llm.command()
@MODEL
@click.option("--task", type=click.Choice(TASKS), required=True)
@click.option("--data", "folder", type=FOLDER, required=True, help="The task's files.")
@_output("tune")
@DTYPE
@click.option("--resume", is_flag=True, help="Continue the run in the folder, if any.")
@click.option(
    "--train-examples", type=click.IntRange(1), help="At most; the default is 1000."
)
@click.option(
    "--eval-examples", type=click.IntRange(1), help="At most; the default is 500."
)
@click.option(
    "--no-first-evaluation",
    "eval_first",
    flag_value=False,
    type=bool,
    default=True,
    help="Start with the first step, without the accuracy of the untuned model.",
)
@click.option(
    "--workers", help="The address of a Dask scheduler, or a number of processes."
)
@click.option("--export-adapters", type=FOLDER, help="What was tuned, for peft.")
@click.option("--export-gguf", type=FILE, help="The adapters, for llama.cpp.")
@click.option("--export-merged", type=FOLDER, help="The model, for transformers.")
@settings_of(TuneSettings, without=("objective",))
def tune(task: str, **options: Any) -> None:
    """Tunes a model on examples, and exports it."""
    from radazo_llm.tune import command, data

    settings = _settings(TuneSettings, options, objective=data.TASKS[task].objective)
    command.tune(settings, task=task, **options)


@radazo_llm.command()
@MODEL
@click.option(
    "--length",
    type=click.IntRange(1),
    default=128,
    show_default=True,
    help="Tokens of an example.",
)
@click.option(
    "--examples",
    type=click.IntRange(1),
    default=1500,
    show_default=True,
    help="To train on and to evaluate.",
)
@DTYPE
@settings_of(TuneSettings, without=("objective",))
def plan(**options: Any) -> None:
    """Prints the memory and the disk that `tune` takes here with these settings.

    Programs are compiled for the present backend. Nothing is run.
    """
    from radazo_llm.tune.plan import plan

    plan(_settings(TuneSettings, options), **options)


@radazo_llm.command()
@MODEL
@click.option("--task", default="sum", show_default=True, help="Or gym:DATASET.")
@click.option(
    "--reward",
    "given",
    multiple=True,
    metavar="NAME=WEIGHT",
    help="A reward function of the program, or package.module:function.",
)
@_output("reward")
@DTYPE
@click.option(
    "--processes",
    type=click.IntRange(1),
    default=2,
    show_default=True,
    help="For the reward functions.",
)
@settings_of(RewardSettings)
def reward(**options: Any) -> None:
    """Tunes a model on rewards of what it writes.

    The same command resumes a run that was cut.
    """
    from radazo_llm.reward import command

    command.train(_settings(RewardSettings, options), **options)


@radazo_llm.command()
@MODEL
@click.option("--adapters", type=FOLDER, help="What `tune` or peft wrote.")
@click.option("--prompt", help="The text to continue. A chat without one.")
@click.option("--max-tokens", default=64, show_default=True)
@click.option(
    "--temperature",
    default=0.0,
    show_default=True,
    help="0 is for the likeliest token.",
)
@click.option("--seed", default=0, show_default=True)
@DTYPE
def chat(**options: Any) -> None:
    """Continues a prompt, or chats: each line of the input is a turn."""
    from radazo_llm.chat import chat

    chat(**options)


def _settings(kind: Any, options: dict[str, Any], **others: Any) -> Any:
    """Takes the settings out of the options."""
    names = [field.name for field in dataclasses.fields(kind) if field.name in options]
    return kind(**{name: options.pop(name) for name in names}, **others)
