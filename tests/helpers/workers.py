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
