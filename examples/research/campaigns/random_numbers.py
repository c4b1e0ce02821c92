"""Tests the normal numbers of `sphere` and `low_rank` by statistics, 10⁹ of them.

    python -m campaigns.random_numbers --output records/trust/random_numbers.json

Each statistic has a known distribution if the numbers are independent and normal, so it
has a p-value. A row is suspicious if its p-value is below 1e-6 / the number of rows.
The numbers of a direction are taken in the order of their positions; `keys` compares
directions of consecutive keys, and `numbers` directions of one key and consecutive
numbers. `partners` are the two numbers that share a block.

References:
  Knuth, The Art of Computer Programming, Volume 2, section 3.3.2: the frequency test,
  the serial test and the gap test.
"""

import functools
from typing import Any

import click
import jax
import jax.numpy as jnp
import numpy as np
import scipy.stats

import radazo_jax as zo
from common import options
from common.campaign import Campaign, campaign

BINS, SIDE = 1024, 32  # Of the frequency test; along each axis of a serial test.
GAP, LONGEST = 1 / 8, 96  # The interval of the gap test, in quantiles.
LAGS = (1, 2, 3, 4, 8, 15, 16, 17, 31, 32, 33, 64, 1024)
PARTNER = 16
TAILS = (4.0, 5.0, 6.0)
SUSPICIOUS = 1e-6


def drawn(key: jax.Array, at: Any) -> jax.Array:
    """The numbers at these positions before they are divided by their norm."""
    return zo.sphere().draw(key, jnp.uint32(0), at)


@jax.jit
def quantiles(key: jax.Array, at: Any) -> tuple[jax.Array, jax.Array]:
    z = drawn(key, at)
    return z, jax.scipy.stats.norm.cdf(z)


@jax.jit
def products(z: jax.Array, other: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Σ z z' and Σ (z² - 1)(z'² - 1) of many rows, summed in float64 elsewhere."""
    z, other = z.reshape(-1, 1024), other.reshape(-1, 1024)
    squares = (z**2 - 1) * (other**2 - 1)
    return jnp.sum(z * other, 1), jnp.sum(squares, 1)


class Counts:
    """Counts over all numbers, chunk by chunk."""

    def __init__(self) -> None:
        self.total = 0
        self.frequency = np.zeros(BINS, np.int64)
        self.serial = {
            name: np.zeros(SIDE * SIDE, np.int64) for name in ("neighbors", "partners")
        }
        self.polar = np.zeros(SIDE * SIDE, np.int64)
        self.gaps = np.zeros(LONGEST + 1, np.int64)
        self.tails = np.zeros(len(TAILS), np.int64)
        self.sums: dict[str, np.ndarray] = {}

    def add(self, z: np.ndarray, u: np.ndarray) -> None:
        self.total += z.size
        fine = np.minimum((u * BINS).astype(np.int32), BINS - 1)
        self.frequency += np.bincount(fine, minlength=BINS)
        coarse = fine // (BINS // SIDE)
        pairs = coarse.reshape(-1, 2)
        grouped = coarse.reshape(-1, 2, PARTNER)
        for name, (x, y) in {
            "neighbors": (pairs[:, 0], pairs[:, 1]),
            "partners": (grouped[:, 0].ravel(), grouped[:, 1].ravel()),
        }.items():
            self.serial[name] += np.bincount(SIDE * x + y, minlength=SIDE * SIDE)
        x, y = (z.reshape(-1, 2, PARTNER)[:, i].ravel() for i in (0, 1))
        # exp(-r²/2) is uniform, and so is the angle.
        radius = (np.exp(-(x**2 + y**2) / 2) * SIDE).astype(np.int32)
        angle = ((np.arctan2(y, x) / (2 * np.pi) + 0.5) * SIDE).astype(np.int32)
        place = SIDE * np.minimum(radius, SIDE - 1) + np.minimum(angle, SIDE - 1)
        self.polar += np.bincount(place, minlength=SIDE * SIDE)
        gaps = np.minimum(np.diff(np.flatnonzero(u < GAP)) - 1, LONGEST)
        self.gaps += np.bincount(gaps, minlength=LONGEST + 1)
        self.tails += [np.count_nonzero(np.abs(z) > tail) for tail in TAILS]

    def correlate(self, name: str, z: jax.Array, other: jax.Array) -> None:
        found = [np.sum(np.asarray(x, np.float64)) for x in products(z, other)]
        kept = self.sums.setdefault(name, np.zeros(3))
        kept += [*found, z.size]

    def rows(self) -> list[dict[str, Any]]:
        found = [
            uniform("frequency", self.frequency),
            *(uniform(f"serial, {name}", x) for name, x in self.serial.items()),
            uniform("radius and angle of partners", self.polar),
        ]
        lengths = np.arange(LONGEST)
        expected = np.append(GAP * (1 - GAP) ** lengths, (1 - GAP) ** LONGEST)
        found.append(chi_squared("gap", self.gaps, expected * self.gaps.sum()))
        for tail, count in zip(TAILS, self.tails, strict=True):
            mean = 2 * scipy.stats.norm.sf(tail) * self.total
            p = scipy.stats.binomtest(int(count), self.total, mean / self.total).pvalue
            found.append(row(f"beyond {tail:.0f} deviations", int(count), mean, p))
        for name, (sum_, squares, count) in self.sums.items():
            for kind, total, variance in (("", sum_, 1), (" of squares", squares, 4)):
                score = total / np.sqrt(variance * count)
                p = 2 * scipy.stats.norm.sf(abs(score))
                found.append(row(f"correlation{kind}, {name}", score, 0.0, p))
        return found


def row(test: str, statistic: float, expected: float, p: float) -> dict[str, Any]:
    return {"test": test, "statistic": statistic, "expected": expected, "p": float(p)}


def uniform(test: str, counts: np.ndarray) -> dict[str, Any]:
    return chi_squared(test, counts, np.full(counts.size, counts.sum() / counts.size))


def chi_squared(test: str, counts: np.ndarray, expected: np.ndarray) -> dict[str, Any]:
    statistic, p = scipy.stats.chisquare(counts, expected)
    return row(test, float(statistic), counts.size - 1, p)


def run(num: int, chunk: int) -> list[dict[str, Any]]:
    """The rows of `num` numbers, drawn in chunks of a direction each."""
    at, counts = zo.random.positions((chunk,)), Counts()
    before: jax.Array | None = None
    for i in range(num // chunk):
        key = jax.random.key(i)
        z, u = quantiles(key, at)
        counts.add(np.asarray(z), np.asarray(u))
        for lag in LAGS:
            inner = chunk - 1024
            counts.correlate(f"lag {lag}", z[:inner], z[lag : lag + inner])
        if before is not None:
            counts.correlate("keys", z, before)
        first, second = (
            quantiles(jax.random.fold_in(key, number), at)[0] for number in (0, 1)
        )
        counts.correlate("numbers", first, second)
        before = z
    return counts.rows()


def suspicious(rows: list[dict[str, Any]]) -> list[str]:
    """The tests that the numbers fail."""
    return [row["test"] for row in rows if row["p"] < SUSPICIOUS / len(rows)]


@campaign(__doc__)
@click.option("--num", type=options.COUNT, default=10**9, help="Numbers drawn.")
@click.option("--chunk", type=click.IntRange(min=2**12), default=2**22)
def main(num: int, chunk: int) -> Campaign:
    if chunk % 1024 or num < chunk:
        raise click.BadParameter("must be a multiple of 1024, and at most --num.")
    case = {}, functools.partial(run, num, chunk)
    return Campaign([case], about={"num": num // chunk * chunk}, failed=suspicious)


if __name__ == "__main__":
    main()
