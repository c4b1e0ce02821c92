"""The progress bar of a run, and Ctrl-C."""

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Makes the first Ctrl-C a flag to read, if signals can be handled."""
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    received: list[int] = []
    previous = signal.getsignal(signal.SIGINT)

    def handle(signum: int, frame: Any) -> None:
        del frame
        if received:
            raise KeyboardInterrupt
        received.append(signum)

    signal.signal(signal.SIGINT, handle)
    try:
        yield lambda: bool(received)
    finally:
        signal.signal(signal.SIGINT, previous)


@contextmanager
def progress_bar(
    progress: bool, done: int, total: int | None
) -> Iterator[Callable[[int, dict[str, str]], None]]:
    """Yields `report(steps, figures)`; `total` is `None` if it is not known."""
    if not progress:
        yield lambda steps, figures: None
        return
    try:
        from tqdm.auto import tqdm
    except ImportError:

        def line(steps: int, figures: dict[str, str]) -> None:
            nonlocal done
            done += steps
            listed = ", ".join(f"{name} {text}" for name, text in figures.items())
            of_total = "" if total is None else f"/{total}"
            print(f"step {done}{of_total}: {listed}", file=sys.stderr)

        yield line
        return
    with tqdm(initial=done, total=total, unit="step") as bar:
        compiled = bar.disable  # A disabled bar has no clock.

        def show(steps: int, figures: dict[str, str]) -> None:
            nonlocal compiled
            bar.set_postfix(figures, refresh=False)
            if compiled:
                bar.update(steps)
                return
            # The first steps include compilation, so the bar estimates from the next.
            compiled, start = True, bar.start_t
            bar.n += steps
            bar.initial = bar.last_print_n = bar.n
            bar.unpause()
            bar.start_t = start
            bar.refresh()

        try:
            yield show
        finally:
            bar.initial = done  # The last line has the rate of the whole run.
