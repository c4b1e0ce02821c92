"""Options that several programs have; a wrong value is told in one line by click."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import click

COUNT = click.IntRange(min=1)
POSITIVE = click.FloatRange(min=0, min_open=True)

output = click.option(
    "--output", type=click.Path(dir_okay=False, path_type=Path), help="A JSON file."
)
resume = click.option(
    "--resume", is_flag=True, help="Takes the rows that the output has."
)
plot = click.option(
    "--plot",
    "picture",
    type=click.Path(dir_okay=False, path_type=Path),
    help="A PNG file.",
)


class _Command(click.Command):
    """A command that names in one line what is not installed."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except ModuleNotFoundError as error:
            raise click.ClickException(
                f"{error.name} must be installed. See the extras in README.md."
            ) from error


def command(doc: str) -> Callable[[Callable[..., Any]], click.Command]:
    """A command that is described by the first line of its module."""
    return click.command(
        cls=_Command,
        help=doc.partition("\n")[0],
        context_settings={"show_default": True},
    )


def some(*declared: str, of: Iterable[str], text: str) -> Callable[..., Any]:
    """An option that can be repeated, with a value of a few; by default, all."""
    names = list(of)
    return click.option(
        *declared,
        type=click.Choice(names),
        multiple=True,
        default=names,
        show_default="all",
        help=f"{text}; can be repeated.",
    )
