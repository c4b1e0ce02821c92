"""Options that several programs have; a wrong value is told in one line by click."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import click

COUNT = click.IntRange(min=1)

output = click.option(
    "--output", type=click.Path(dir_okay=False, path_type=Path), help="A JSON file."
)
resume = click.option(
    "--resume", is_flag=True, help="Takes the rows that the output has."
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


class _List(click.ParamType):
    """Values that are separated by commas, each of a few or a whole number."""

    name = "list"

    def __init__(self, of: Iterable[str] | None):
        self.of = None if of is None else list(of)

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> list[str]:
        found = value.split(",") if isinstance(value, str) else value
        for one in found:
            if self.of is None and not one.isdecimal():
                self.fail(f"must be whole numbers; got {one!r}.", param, ctx)
            if self.of is not None and one not in self.of:
                known = ", ".join(self.of)
                self.fail(f"must be of {known}; got {one!r}.", param, ctx)
        return found


def _joined(_: click.Context, __: click.Parameter, lists: Any) -> list[str]:
    return list(dict.fromkeys(value for values in lists for value in values))


def listed(
    *declared: str, of: Iterable[str] | None = None, text: str, default: str = ""
) -> Callable[..., Any]:
    """An option with values that are separated by commas; it can be repeated.

    Args:
      declared: The names of the option.
      of: The values to choose from; without them, values are whole numbers.
      text: The help.
      default: The default; by default, all values to choose from.
    """
    names = None if of is None else list(of)
    return click.option(
        *declared,
        type=_List(names),
        multiple=True,
        callback=_joined,
        default=[default or ",".join(names or ())],
        show_default=default or "all",
        help=f"{text}, separated by commas.",
    )
