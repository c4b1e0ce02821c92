"""Random functions of NumPy arrays that write to their arguments, by a seed.

They need not import JAX, so they start quickly in worker processes.
"""

import copy

import numpy as np


def _tree(rng):
    """A start: one array, a dictionary, or a list of arrays in a dictionary."""
    arrays = [rng.normal(size=n).astype(np.float32) for n in (6, 4, 3)]
    matrix = arrays[1].reshape(2, 2)
    nested = {"a": [arrays[0], matrix], "b": {"c": arrays[2]}}
    return [arrays[0], {"x": arrays[0], "y": matrix}, nested][rng.integers(3)]


def leaves(tree):
    if isinstance(tree, np.ndarray):
        return [tree]
    children = tree.values() if isinstance(tree, dict) else tree
    return [leaf for child in children for leaf in leaves(child)]


def _times(x, number):
    x *= number


def _minus_mean(x, number):
    x -= x.mean() + number


def _sort(x, number):
    x.sort(axis=-1)


def _fill(x, number):
    x.fill(number)


def _one(x, number):
    x.reshape(-1)[0] = number


def _into(x, number):
    np.maximum(x, number, out=x)


def _reverse(x, number):
    x[...] = x[::-1].copy()


_WRITES = [_times, _minus_mean, _sort, _fill, _one, _into, _reverse]


class Writer:
    """A function that reads its argument, and writes to it meanwhile.

    Its value equals the value of the pure function `Writer(seed).pure`.
    """

    def __init__(self, seed):
        rng = np.random.default_rng(seed)
        self.start = _tree(rng)
        count = rng.integers(1, 5)
        # Each reads the leaves before it writes to one of them, so that the value
        # depends on what was written before.
        self.steps = [
            (rng.integers(len(_WRITES)), rng.integers(3), float(rng.normal()))
            for _ in range(count)
        ]
        self.empties = bool(rng.integers(2))

    def __call__(self, params):
        found = leaves(params)
        total = 0.0
        for which, leaf, number in self.steps:
            total += sum(float(np.sum((x.astype(np.float64) - 1) ** 2)) for x in found)
            _WRITES[which](found[leaf % len(found)], np.float32(number))
        # The function writes to the containers of the tree, too.
        if self.empties and not isinstance(params, np.ndarray):
            params.clear()
        return total

    def pure(self, params):
        return self(copy.deepcopy(params))

    def batched(self, params):
        """The values of all points, of which it overwrites the whole batch."""
        found = leaves(params)
        values = []
        for i in range(len(found[0])):
            points = [x[i] for x in found]
            values.append(self(points))
        for x in found:
            x.fill(0)
        return values
