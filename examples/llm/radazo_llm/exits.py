"""The ends of a command: well, in one line on what is wrong, or interrupted.

The status is 2 if the input or a file is wrong, 1 if the run has diverged, and 130 if
it was interrupted.
"""

import contextlib
import errno
import os
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

import click

_RESUMED = "tune", "reward"


def reason(error: BaseException) -> str:
    """The class and the message of an error of another package, on one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


def tell(text: str) -> None:
    """Prints a text of which the reader may take a part: `| head` is no error."""
    try:
        print(text, flush=True)
    except BrokenPipeError:  # What is left must not be written at the end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class Commands(click.Group):
    """Ends in one line, with status 2, if the input or a file is wrong."""

    def main(self, *args: Any, **kwargs: Any) -> None:
        """Runs a command, and exits."""
        try:
            options = {"prog_name": "radazo-llm"} | kwargs | {"standalone_mode": False}
            with _terminated_like_interrupted():
                code = super().main(*args, **options)
        except click.Abort as error:
            resumed = getattr(error, "command", "") in _RESUMED
            rest = "; the same command with --resume continues" if resumed else ""
            print(f"\nradazo-llm: interrupted{rest}", file=sys.stderr)
            sys.exit(130)
        except click.ClickException as error:
            context = getattr(error, "ctx", None)
            name = context.command_path if context else "radazo-llm"
            text = " ".join(error.format_message().split())
            print(f"{name}: error: {text}", file=sys.stderr)
            diverged = isinstance(error.__cause__, FloatingPointError)
            sys.exit(1 if diverged else 2)
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


@contextlib.contextmanager
def _terminated_like_interrupted() -> Iterator[None]:
    """Makes SIGTERM, which a scheduler of jobs sends, raise as Ctrl-C does."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _told(context: click.Context, error: Exception) -> click.ClickException:
    text = str(error)
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        text = f"{error.filename}: {error.strerror}"
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        text += ". Make room, or choose another folder (--output)."
    found = click.UsageError(text)
    found.ctx = click.Context(
        context.command, context.parent, f"radazo-llm {context.invoked_subcommand}"
    )
    return found
