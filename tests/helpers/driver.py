"""Runs of methods without the run layer: rounding, bounds, and a count."""

from typing import NamedTuple

import numpy as np

from radazo_jax._src.methods.contract import Ask, Box, Start


class Run(NamedTuple):
    """The best point, its value and number, all points, and the reason of the end."""

    params: np.ndarray
    value: float
    number: int
    points: np.ndarray
    reason: str | None

    @property
    def count(self):
        return len(self.points)


def free(d):
    return Box(np.full(d, -np.inf), np.full(d, np.inf))


def started(x, box=None, dtype=np.float64, resolution=None, seed=0, limited=False):
    def rounded(points):
        return np.asarray(points).astype(dtype).astype(np.float64)

    x = rounded(np.asarray(x, np.float64))
    if box is not None:
        box = Box(*(np.broadcast_to(np.asarray(b, float), x.shape) for b in box))
    return Start(
        params=x,
        box=box or free(len(x)),
        rng=np.random.default_rng(seed),
        resolution=resolution or np.finfo(np.float64).eps,
        step=np.zeros(len(x)),
        round=rounded,
        flatten=lambda tree: np.broadcast_to(np.asarray(tree, float), x.shape),
        limited=limited,
    )


def check(points, start):
    assert points.ndim == 2 and points.shape[1] == len(start.params)
    assert np.all(np.isfinite(points))
    assert np.array_equal(points, start.round(points))
    assert np.array_equal(points, start.box.clip(points))


def completed(part, fun, start=None):
    """The result of a part of a method, and all points that it asks for."""
    points, values = [], None
    while True:
        try:
            asked = part.send(values)
        except StopIteration as stop:
            return stop.value, np.array(points)
        asked = getattr(asked, "points", asked)
        if start is not None:
            check(asked, start)
        points.extend(asked)
        values = np.array([fun(x) for x in asked])


def drive(method, fun, x, most=20_000, **start):
    """Runs a method to its end, or for so many evaluations, and checks its points."""
    start = started(x, limited=most < 20_000, **start)
    steps, points, values, reason = method(start), [], [], None
    asked = next(steps)
    while len(points) < most:
        if isinstance(asked, Ask):
            if asked.center is not None:
                check(asked.center[None], start)
            asked = asked.points
        check(asked, start)
        new = [float(fun(x)) for x in asked]
        points.extend(asked)
        values.extend(new)
        try:
            asked = steps.send(np.where(np.isfinite(new), new, np.nan))
        except StopIteration as stop:
            reason = stop.value.reason
            lowest = np.flatnonzero(np.array(values) == stop.value.value)
            assert any(np.array_equal(points[i], stop.value.params) for i in lowest)
            break
    lowest = int(np.nanargmin(values))
    low = points[lowest], values[lowest], lowest + 1
    return Run(*low, np.array(points), reason)
