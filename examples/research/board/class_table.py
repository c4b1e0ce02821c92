"""The classes of problems: which families, of how many parameters, and how changed."""

import zlib
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import NamedTuple

import numpy as np

from board import class_changes as changes
from board import class_data as data
from board import class_everyday as everyday
from board import class_problems as smooth
from board import class_rough as rough
from board import class_steps as steps
from board.class_changes import changed
from board.class_problems import Family, Function

# Few numbers, because the default method is compiled for each: seconds a number.
SMALL = (2, 5, 10, 20)
_UNITS = SMALL[1:]  # For families of three parameters a unit.
_MIDDLE = (30, 50, 100)
_LARGE = (200, 500, 1000)
_NOISY = (5, 20, 50)


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


def _sized(
    dimensions: Sequence[int],
    module: ModuleType,
    names: str,
    change: Callable[[Family], Family] = lambda family: family,
) -> dict[str, Problems]:
    """Families of a module, by their names."""
    return {
        name: Problems(change(getattr(module, name)), dimensions)
        for name in names.split()
    }


def _changed(
    change: Callable[[Family], Family], of: dict[str, Problems], names: str = ""
) -> dict[str, Problems]:
    """Families, or some of them, with a change."""
    return {
        name: Problems(change(of[name].family), of[name].dimensions)
        for name in names.split() or of
    }


_FREE = (
    _sized(
        SMALL, smooth, "quadratic chain quartic trigonometric equations compartments"
    )
    | _sized((5,), smooth, "predators")
    | _sized(_UNITS, smooth, "peaks network")
    | _sized(SMALL, data, "logistic tumors diabetes")
    | _sized((10, 20), smooth, "cluster")
)
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
_names = "quadratic chain trigonometric equations logistic peaks"
_CHOSEN = {name: _FREE[name] for name in _names.split()}
_CUT = {name: p for name, p in _FREE.items() if name not in ("cluster", "diabetes")}


def _noise(noise: float, relative: float) -> dict[str, Problems]:
    change = changed(changes.noisy, noise, relative)
    return {
        f"{name} {d}": Problems(change(_FREE[name].family), (d,))
        for d in _NOISY
        for name in ("quadratic", "chain", "equations", "logistic", "network")
    }


CLASSES = {
    "free": Class("Free, d ≤ 20", _FREE),
    "boxes": Class("In boxes, d ≤ 20", _changed(changed(changes.boxed), _CUT)),
    "everyday": Class("As people bring them, d ≤ 10", _EVERYDAY),
    "guessed": Class(
        "The same in guessed boxes", _changed(changed(changes.inside), _EVERYDAY)
    ),
    "jitter": Class(
        "The same with jitter", _changed(changed(changes.jittered), _EVERYDAY)
    ),
    "middle": Class(
        "d = 30–100",
        _sized(_MIDDLE, smooth, "quadratic chain quartic trigonometric equations")
        | _sized(_MIDDLE, data, "logistic")
        | _sized(_MIDDLE, smooth, "network cluster"),
    ),
    "large": Class(
        "d = 200–1000",
        _sized(_LARGE, smooth, "quadratic chain quartic equations deconvolution"),
        budget=30,
    ),
    "steps": Class(
        "In steps",
        _sized(SMALL, steps, "floors grid mistakes order digits")
        | _sized(_UNITS, steps, "units"),
    ),
    "whole": Class(
        "Whole numbers", _sized(SMALL, steps, "counts shares sites neighbors stocks")
    ),
    "scales-6": Class(
        "Scales from 1e-6 to 1e6", _changed(changed(changes.scaled, 6), _CHOSEN)
    ),
    "scales-2": Class(
        "Scales from 1e-2 to 1e2", _changed(changed(changes.scaled, 2), _CHOSEN)
    ),
    "nan-5": Class(
        "NaN at 5 % of points", _changed(changed(changes.failing, 0.05), _CHOSEN)
    ),
    "nan-20": Class(
        "NaN at 20 % of points", _changed(changed(changes.failing, 0.2), _CHOSEN)
    ),
    "region": Class(
        "Optimum at a failing region",
        _changed(changed(changes.halved), _FREE, "quadratic chain logistic")
        | _sized(SMALL, rough, "ball roots wealth barrier")
        | _changed(changed(changes.halved), _FREE, "equations trigonometric"),
    ),
    "far": Class(
        "Far start",
        _sized(SMALL, smooth, "quadratic chain quartic", changed(changes.far))
        | _sized(SMALL, rough, "slopes cone", changed(changes.far)),
    ),
    "flat": Class(
        "Flat start", _sized(SMALL, rough, "hole well basin saddle inflection")
    ),
    "jump": Class(
        "Jumps",
        _changed(changed(changes.stepped), _FREE, "quadratic chain logistic")
        | {
            f"{name}, torn": problems
            for name, problems in _changed(
                changed(changes.torn), _FREE, "quadratic equations"
            ).items()
        },
    ),
    "nonsmooth": Class(
        "Nonsmooth",
        _sized(SMALL, rough, "absolutes largest squares bends regression margin"),
    ),
    "multimodal": Class(
        "Multimodal",
        _sized((2, 5, 10), rough, "ripples funnel products hollows waves")
        | _sized((10, 12), rough, "atoms"),
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
