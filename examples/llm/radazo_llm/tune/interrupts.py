"""Signals that end a run at a place that it can resume from."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupts(contextlib.AbstractContextManager["Interrupts"]):
    """Raises KeyboardInterrupt at Ctrl-C and SIGTERM, though not within a step.

    A step consumes the state before it. Signals that arrive within `deferred` are
    raised at its end; the second one is raised at once.
    """

    def __init__(self) -> None:
        self._deferred = self._requested = False
        self._before: dict[int, object] = {}

    def __enter__(self) -> "Interrupts":
        # Python delivers signals to the main thread, and sets handlers in it alone.
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _receive(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        if self._deferred and not self._requested:
            self._requested = True
            return
        raise KeyboardInterrupt

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """Holds back a signal until the end of the block."""
        self._deferred = True
        try:
            yield
        finally:
            self._deferred = False
        if self._requested:
            raise KeyboardInterrupt
