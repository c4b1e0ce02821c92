"""Programs in processes of their own, which end with all their children."""

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).parents[2]


def output_of(code, *arguments, timeout=120):
    """Returns what a program prints; fails if it has an error, or does not end.

    Its warnings are left out: a process may print one after the program has ended.
    """
    with (
        tempfile.TemporaryFile("w+") as printed,
        tempfile.TemporaryFile("w+") as warned,
    ):
        process = subprocess.Popen(
            [sys.executable, "-c", code, *map(str, arguments)],
            cwd=ROOT,
            stdout=printed,
            stderr=warned,
            start_new_session=True,
        )
        try:
            status = process.wait(timeout)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            # The group holds the processes that the program started.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        printed.seek(0)
        warned.seek(0)
        text, warnings = printed.read(), warned.read()
    shown = f"{text[-2000:]}\n{warnings[-2000:]}"
    assert status is not None, f"no end within {timeout} s; printed {shown}"
    assert status == 0, shown
    return text
