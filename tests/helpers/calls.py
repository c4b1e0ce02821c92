"""Functions of which calls are lost, for processes that need not import JAX."""

import os
import pathlib
import signal
import sys
import time

import numpy as np


def square(x):
    return float(np.sum(x**2))


def is_lost(x):
    """Whether the functions below lose this point, one of some around a start of 1."""
    return bool(x[0] > 1)


class Stop(BaseException):
    """An end that is no `Exception`."""


class Unreadable(Exception):
    """An error that is pickled, but cannot be unpickled."""

    def __init__(self, code, place):
        super().__init__(f"error {code} at {place}")


class Unsendable(Exception):
    """An error that cannot be pickled."""

    def __init__(self, message):
        super().__init__(message)
        self.file = open(os.devnull)  # noqa: SIM115


def _raising(error, x):
    if is_lost(x):
        raise error
    return square(x)


def raises(x):
    return _raising(OSError("no license"), x)


def exits(x):
    return sys.exit("no license") if is_lost(x) else square(x)


def stops(x):
    return _raising(Stop("no license"), x)


def raises_unreadable(x):
    return _raising(Unreadable(3, "mesh"), x)


def raises_unsendable(x):
    return _raising(Unsendable("no license"), x)


def hangs(x, folder):
    """Its first call, of all processes, does not return."""
    try:
        os.close(os.open(pathlib.Path(folder) / "called", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return square(x)
    while True:
        time.sleep(60)


def kill_all(x):
    os.kill(os.getpid(), signal.SIGKILL)


def kills(x):
    """Kills its process at the points that are lost."""
    return kill_all(x) if is_lost(x) else square(x)


def _leaves(tree):
    if isinstance(tree, np.ndarray):
        return [tree]
    children = tree.values() if isinstance(tree, dict) else tree
    return [leaf for child in children for leaf in _leaves(child)]


class Writer:
    """A function of a tree of arrays that writes to its argument."""

    def __init__(self, write):
        self.write = write

    def __call__(self, params):
        total = 0.0
        # Each value depends on what was written before it.
        for x in _leaves(params) * 2:
            total += float(np.sum((x.astype(np.float64) - 1) ** 2))
            if self.write == "sort":
                x.sort(axis=-1)
            else:
                x *= np.float32(0.5)
        if self.write == "empty" and not isinstance(params, np.ndarray):
            params.clear()
        return total

    def batched(self, params):
        """The values of all points, of which it overwrites the whole batch."""
        found = _leaves(params)
        values = [self([x[i] for x in found]) for i in range(len(found[0]))]
        for x in found:
            x.fill(0)
        return values
