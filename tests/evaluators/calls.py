"""Functions of which calls are lost, for processes that need not import JAX."""

import os
import pathlib
import time

import numpy as np


def square(x):
    return float(np.sum(x**2))


def hangs(x, folder):
    """Its first call, of all processes, does not return."""
    try:
        os.close(os.open(pathlib.Path(folder) / "called", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return square(x)
    while True:
        time.sleep(60)


class Unreadable(Exception):
    """An error that is pickled, but cannot be unpickled."""

    def __init__(self, code, place):
        super().__init__(f"error {code} at {place}")


class Unsendable(Exception):
    """An error that cannot be pickled."""

    def __init__(self):
        super().__init__("error with a file")
        self.file = open(os.devnull)  # noqa: SIM115


def fails(x):
    return bool(x[0] > 1)


def raises_unreadable(x):
    if fails(x):
        raise Unreadable(3, "mesh")
    return square(x)


def raises_unsendable(x):
    if fails(x):
        raise Unsendable
    return square(x)
