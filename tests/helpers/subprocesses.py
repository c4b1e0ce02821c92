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
    """Returns what a program prints; fails if it has an error, or does not end."""
    with tempfile.TemporaryFile("w+") as printed:
        process = subprocess.Popen(
            [sys.executable, "-c", code, *map(str, arguments)],
            cwd=ROOT,
            stdout=printed,
            stderr=subprocess.STDOUT,
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
        text = printed.read()
    assert status is not None, f"no end within {timeout} s; printed {text[-2000:]!r}"
    assert status == 0, text[-2000:]
    return text
