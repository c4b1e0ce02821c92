"""Functions for worker processes, which need not import JAX."""

import sys

import numpy as np


def square(x):
    return float(np.sum(x**2))


def fails(x):
    """Whether the point is one of those that the functions below lose."""
    return bool(x[0] > 1)


class Stop(BaseException):
    """An end that is no `Exception`."""


def exits(x):
    return sys.exit("no license") if fails(x) else square(x)


def stops(x):
    if fails(x):
        raise Stop("no license")
    return square(x)
