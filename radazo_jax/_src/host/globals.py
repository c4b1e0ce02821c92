"""The global random generators of NumPy and Python, as a method has them."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np


class Globals:
    """States of the global generators of NumPy and Python for one method."""

    def __init__(self, seed: list[int]):
        self._numpy = np.random.RandomState(seed).get_state()
        self._python = random.Random(repr(seed)).getstate()

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Uses them instead of the caller's."""
        outer = np.random.get_state(), random.getstate()
        np.random.set_state(self._numpy)
        random.setstate(self._python)
        try:
            yield
        finally:
            self._numpy, self._python = np.random.get_state(), random.getstate()
            np.random.set_state(outer[0])
            random.setstate(outer[1])
