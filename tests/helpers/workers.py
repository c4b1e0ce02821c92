"""Functions for worker processes, which need not import JAX."""

import os
import signal

import numpy as np

CENTER = np.linspace(-1, 1, 6, dtype=np.float32)


def distance(x):
    """Sums of few multiples of 1/64 are exact, in NumPy's order and in XLA's."""
    return float(np.sum(np.abs(np.round((x - CENTER) * 64))) / 64)


def kills(x):
    return bool(x[1] > 0.01)


def kill_all(x):
    os.kill(os.getpid(), signal.SIGKILL)


def kill_some(x):
    """Kills its process at points on one side."""
    if kills(x):
        os.kill(os.getpid(), signal.SIGKILL)
    return distance(x)
