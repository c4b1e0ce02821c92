"""The classes of problems: which families, of how many parameters, and how changed."""

import zlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from board import class_everyday as everyday
from board import class_problems as smooth
from board import class_rough as rough
from board.class_problems import Family, Function, polished

# Few numbers, because the default method is compiled for each: seconds a number.
SMALL = (2, 5, 10, 20)
_UNITS = SMALL[1:]  # For families of three parameters a unit.
_MIDDLE = (30, 50, 100)
_LARGE = (200, 500, 1000)
_NOISY = (5, 20, 50)


def boxed(base: Family) -> Family:
    """A family in a box that cuts off the minimum in a third of the parameters.

    The box ends between start and minimum there, and is wide in the others. f* is
    polished in the box.
    """

    def family(draw: np.random.Generator, d: int) -> Function:
        found = base(draw, d)
        away = found.start - found.best
        away = np.where(np.abs(away) < 0.1, np.copysign(0.5, away), away)
        cut = draw.permutation(d) % 3 == 0
        end = found.best + draw.uniform(0.2, 0.6, d) * away
        wide = draw.uniform(1.5, 4, d) * np.abs(away) + 0.5
        lower = np.where(cut & (away > 0), end, found.best - wide)
        upper = np.where(cut & (away < 0), end, found.best + wide)
        start = np.clip(found.start, lower, upper)
        points = [np.clip(found.best, lower, upper), start]
        return polished(found.fun, start, points, (lower, upper))

    return family


def scaled(base: Family, power: float) -> Family:
    """A family whose parameters have sizes from 10^-power to 10^power."""

    def family(draw: np.random.Generator, d: int) -> Function:
        found = base(draw, d)
        sizes = 10 ** draw.permutation(np.linspace(-power, power, d))
        start, best = sizes * found.start, sizes * found.best
        return Function(lambda x: found.fun(x / sizes), start, found.least, best)

    return family


def failing(base: Family, share: float) -> Family:
    """A family that is NaN at a share of the points, by a hash of the point."""

    def family(draw: np.random.Generator, d: int) -> Function:
        found, limit = base(draw, d), int(share * 2**32)
        salt = int(draw.integers(2**32))
        while zlib.crc32(found.start.tobytes(), salt) < limit:
            salt += 1

        def fun(x: np.ndarray) -> float:
            fails = zlib.crc32(np.asarray(x, np.float64).tobytes(), salt) < limit
            return np.nan if fails else found.fun(x)

        return Function(fun, found.start, found.least, found.best)

    return family


def halved(base: Family) -> Family:
    """A family that is NaN beyond a plane through its minimum."""

    def family(draw: np.random.Generator, d: int) -> Function:
        found = base(draw, d)
        away = found.start - found.best
        normal = away / np.linalg.norm(away) + draw.normal(size=d) / d**0.5
        if normal @ away < 0:
            normal = -normal
        # The minimum itself is in the region, with its rounding.
        edge = float(normal @ found.best) - 1e-12

        def fun(x: np.ndarray) -> float:
            return found.fun(x) if normal @ x >= edge else np.nan

        return Function(fun, found.start, found.least, found.best)

    return family


def stepped(base: Family) -> Family:
    """A family with six jumps up, across planes between the minimum and the start."""

    def family(draw: np.random.Generator, d: int) -> Function:
        found = base(draw, d)
        away = found.start - found.best
        normals = away / np.linalg.norm(away) + draw.normal(size=(6, d)) / d**0.5
        normals *= np.sign(normals @ away)[:, None]
        edges = normals @ found.best + draw.uniform(0.1, 0.9, 6) * (normals @ away)
        heights = draw.uniform(0.05, 0.3, 6) * found.gap

        def fun(x: np.ndarray) -> float:
            return found.fun(x) + float(heights @ (normals @ x > edges))

        return Function(fun, found.start, found.least, found.best)

    return family


def torn(base: Family) -> Family:
    """A family with a jump up or down at every plane of a set; the minimum is low."""

    def family(draw: np.random.Generator, d: int) -> Function:
        found = base(draw, d)
        normal = draw.normal(size=d) / np.linalg.norm(found.start - found.best)
        normal *= draw.uniform(2, 6)
        height = draw.uniform(0.1, 0.3) * found.gap

        def fun(x: np.ndarray) -> float:
            odd = np.floor(normal @ (x - found.best) + 0.5) % 2
            return found.fun(x) + height * float(odd)

        return Function(fun, found.start, found.least, found.best)

    return family


def noisy(base: Family, noise: float, relative: float) -> Family:
    """A family above 0 whose values a method gets with noise."""

    def family(draw: np.random.Generator, d: int) -> Function:
        found = base(draw, d)
        return Function(
            lambda x: found.fun(x) - found.least,
            found.start,
            0.0,
            found.best,
            noise=noise,
            relative=relative,
        )

    return family


class Problems(NamedTuple):
    """A family, and the numbers of parameters that its seeds have in turn."""

    family: Family
    dimensions: Sequence[int] = SMALL


class Class(NamedTuple):
    """A class of problems.

    Attributes:
      text: The class in the words of the tables.
      problems: The families by name.
      budget: The most evaluations, in units of d + 1.
      noise: Whether values are noisy, so that the returned point is measured.
    """

    text: str
    problems: dict[str, Problems]
    budget: int = 100
    noise: bool = False


_FREE = {
    "quadratic": Problems(smooth.quadratic),
    "chain": Problems(smooth.chain),
    "quartic": Problems(smooth.quartic),
    "trigonometric": Problems(smooth.trigonometric),
    "equations": Problems(smooth.equations),
    "compartments": Problems(smooth.compartments),
    "predators": Problems(smooth.predators, (5,)),
    "peaks": Problems(smooth.peaks, _UNITS),
    "network": Problems(smooth.network, _UNITS),
    "logistic": Problems(smooth.logistic),
    "tumors": Problems(smooth.tumors),
    "diabetes": Problems(smooth.diabetes),
    "cluster": Problems(smooth.cluster, (10, 20)),
}
_EVERYDAY = {
    "decays": Problems(everyday.decays, (2, 4, 6)),
    "doses": Problems(everyday.doses, (3,)),
    "counts": Problems(everyday.counts, (3, 6, 10)),
    "process": Problems(everyday.process, (4, 5, 6)),
    "portfolio": Problems(everyday.portfolio, (3, 5, 8)),
    "outliers": Problems(everyday.outliers, (3, 5, 10)),
    "penalty": Problems(everyday.penalty, (3, 5, 8)),
    "control": Problems(everyday.control, (4, 6, 10)),
}
# Their minima are nowhere near a singularity, so that they can be scaled and cut.
_CHOSEN = ("quadratic", "chain", "trigonometric", "equations", "logistic", "peaks")


def _changed(
    change: Callable[[Family], Family],
    names: Sequence[str] = _CHOSEN,
    of: dict[str, Problems] = _FREE,
) -> dict[str, Problems]:
    return {
        name: Problems(change(of[name].family), of[name].dimensions) for name in names
    }


def _sized(dimensions: Sequence[int], **families: Family) -> dict[str, Problems]:
    return {name: Problems(family, dimensions) for name, family in families.items()}


def _noise(noise: float, relative: float) -> dict[str, Problems]:
    names = ("quadratic", "chain", "equations", "logistic", "network")
    return {
        f"{name} {d}": Problems(noisy(_FREE[name].family, noise, relative), (d,))
        for d in _NOISY
        for name in (names if d < 200 else names[:2])
    }


CLASSES = {
    "free": Class("Free, d ≤ 20", _FREE),
    "boxes": Class(
        "In boxes, d ≤ 20",
        _changed(boxed, [n for n in _FREE if n not in ("cluster", "diabetes")]),
    ),
    "everyday": Class("As people bring them, d ≤ 10", _EVERYDAY),
    "guessed": Class(
        "The same in guessed boxes",
        _changed(everyday.inside, list(_EVERYDAY), _EVERYDAY),
    ),
    "jitter": Class(
        "The same with jitter",
        _changed(everyday.jittered, list(_EVERYDAY), _EVERYDAY),
    ),
    "middle": Class(
        "d = 30–100",
        _sized(
            _MIDDLE,
            quadratic=smooth.quadratic,
            chain=smooth.chain,
            quartic=smooth.quartic,
            trigonometric=smooth.trigonometric,
            equations=smooth.equations,
            logistic=smooth.logistic,
            network=smooth.network,
            cluster=smooth.cluster,
        ),
    ),
    "large": Class(
        "d = 200–1000",
        _sized(
            _LARGE,
            quadratic=smooth.quadratic,
            chain=smooth.chain,
            quartic=smooth.quartic,
            equations=smooth.equations,
            deconvolution=smooth.deconvolution,
        ),
        budget=30,
    ),
    "steps": Class(
        "In steps",
        _sized(
            SMALL,
            floors=rough.floors,
            grid=rough.grid,
            mistakes=rough.mistakes,
            order=rough.order,
            digits=rough.digits,
        )
        | _sized(_UNITS, units=rough.units),
    ),
    "whole": Class(
        "Whole numbers",
        _sized(
            SMALL,
            counts=rough.counts,
            shares=rough.shares,
            sites=rough.sites,
            neighbors=rough.neighbors,
            stocks=rough.stocks,
        ),
    ),
    "scales-6": Class(
        "Scales from 1e-6 to 1e6", _changed(lambda base: scaled(base, 6))
    ),
    "scales-2": Class(
        "Scales from 1e-2 to 1e2", _changed(lambda base: scaled(base, 2))
    ),
    "nan-5": Class("NaN at 5 % of points", _changed(lambda base: failing(base, 0.05))),
    "nan-20": Class("NaN at 20 % of points", _changed(lambda base: failing(base, 0.2))),
    "region": Class(
        "Optimum at a failing region",
        _changed(halved, ("quadratic", "chain", "logistic"))
        | _sized(
            SMALL,
            ball=rough.ball,
            roots=rough.roots,
            wealth=rough.wealth,
            barrier=rough.barrier,
        )
        | _changed(halved, ("equations", "trigonometric")),
    ),
    "far": Class(
        "Far start",
        _sized(
            SMALL,
            quadratic=rough.far(smooth.quadratic),
            chain=rough.far(smooth.chain),
            quartic=rough.far(smooth.quartic),
            slopes=rough.far(rough.slopes),
            cone=rough.far(rough.cone),
        ),
    ),
    "flat": Class(
        "Flat start",
        _sized(
            SMALL,
            hole=rough.hole,
            well=rough.well,
            basin=rough.basin,
            saddle=rough.saddle,
            inflection=rough.inflection,
        ),
    ),
    "jump": Class(
        "Jumps",
        _changed(stepped, ("quadratic", "chain", "logistic"))
        | {
            f"{name}, torn": problems
            for name, problems in _changed(torn, ("quadratic", "equations")).items()
        },
    ),
    "nonsmooth": Class(
        "Nonsmooth",
        _sized(
            SMALL,
            absolutes=rough.absolutes,
            largest=rough.largest,
            squares=rough.squares,
            bends=rough.bends,
            regression=rough.regression,
            margin=rough.margin,
        ),
    ),
    "multimodal": Class(
        "Multimodal",
        _sized(
            (2, 5, 10),
            ripples=rough.ripples,
            funnel=rough.funnel,
            products=rough.products,
            hollows=rough.hollows,
            waves=rough.waves,
        )
        | _sized((10, 12), atoms=rough.atoms),
    ),
    **{
        f"{kind}-{level}": Class(
            f"{kind.capitalize()} noise {level}",
            _noise(*((size, 0.0) if kind == "additive" else (0.0, size))),
            noise=True,
        )
        for kind in ("additive", "relative")
        for level, size in (("1e-4", 1e-4), ("1e-2", 1e-2), ("1e-1", 1e-1))
    },
}


class Case(NamedTuple):
    """A problem that is not built yet."""

    kind: str
    name: str
    seed: int
    dimension: int
    family: Family

    def make(self) -> Function:
        """Returns the function of the seed, the same in every process."""
        name = f"{self.kind} {self.name}".encode()
        draw = np.random.default_rng([zlib.crc32(name), self.seed])
        return self.family(draw, self.dimension)


def cases(kinds: Sequence[str], seeds: Sequence[int]) -> list[Case]:
    """All problems of some classes and seeds."""
    return [
        Case(kind, name, seed, problems.dimensions[place], problems.family)
        for kind in kinds
        for number, (name, problems) in enumerate(CLASSES[kind].problems.items())
        for seed in seeds
        # The last seeds of a hundred have other numbers than the first of the next.
        for place in [(number + seed + seed // 100) % len(problems.dimensions)]
    ]
