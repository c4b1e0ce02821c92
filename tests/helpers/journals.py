"""Files of runs: their lines, what is none, and functions that change between calls."""

import contextlib
import pickle
import resource
import signal
import threading
import zlib

from tests.helpers.calls import square

DEEP = b"[" * 10**5 + b"]" * 10**5


class Planted:
    """If a pickle of it is ever read, the reading process ends."""

    def __reduce__(self):
        return exit, ("a pickle was read",)


PICKLE = pickle.dumps(Planted())


def lines_of(content):
    """The lines of a file without their checksums."""
    return [line.rpartition(b',"crc":"')[0] for line in content.splitlines()]


def with_checksums(bodies):
    checksum, content = 0, b""
    for body in bodies:
        checksum = zlib.crc32(body, checksum)
        content += body + b',"crc":"%08x"}\n' % checksum
    return content


@contextlib.contextmanager
def full_disk(limit):
    """Files have at most so many bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, previous)


# A first process starts a second while it writes, and waits for its end. What they run
# stands for CALL, with the options `more`.
TWO = """
import subprocess, sys
from tests.helpers import host_runs, short_runs

code, path, which = sys.argv[1:]

def start_second(report):
    if not started:
        started.append(True)
        command = [sys.executable, "-c", code, code, path, "second"]
        print(subprocess.run(command, capture_output=True, text=True).stdout)

started = [] if which == "first" else [True]
more = {"journal": path, "callback": start_second}
try:
    print(which, "ended", CALL.params.tolist())
except Exception as error:
    print(which, "refused", type(error).__name__, error)
"""


class Simulator:
    """A function with what changes between calls, and changes no value."""

    def __init__(self):
        self.calls, self.known, self.lock = 0, {}, threading.Lock()

    def __call__(self, x):
        with self.lock:
            self.calls += 1
            return self.known.setdefault(x.tobytes(), square(x))
