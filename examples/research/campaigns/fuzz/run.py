"""Checks programs one after another, and counts what they met."""

import collections
import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.extend import core

from .build import KINDS, PRODUCTS, QUICK
from .generate import generate, refused
from .program import Program
from .properties import (
    DIRECTIONS,
    EXACT_SCALE,
    FACTORS,
    PROPERTIES,
    Mismatch,
    Undefined,
    enlarged,
    traced,
)

_NAMES = list(DIRECTIONS)
WORDS = {
    "bits": "bit for bit the definition",
    "rounded": "the definition, to rounding",
    "compiled": "under `jit`",
    "batched": "under `vmap`",
    "differentiated": "under `grad`",
    "refused": "raises what `fun` raises",
}


@dataclasses.dataclass(frozen=True)
class Check:
    """A property, the distribution of the direction, and the scale."""

    name: str
    distribution: str
    scale: float

    def __str__(self) -> str:
        return f'{self.name}(fun, params, "{self.distribution}", {self.scale})'

    @property
    def words(self) -> str:
        return WORDS[self.name] + ("" if self.scale else ", at scale 0")


def checks(seed: int) -> Iterator[Check]:
    """The checks of a program: always the definition, seldom costly ones."""
    distribution = _NAMES[seed // 64 % len(_NAMES)]
    if seed % 16 == 6:
        # Matrices that are not built, if there are products.
        yield Check("rounded", FACTORS[seed // 16 % 2], 0.1)
        return
    yield Check("bits", "flips stored" if seed % 3 else "flips", EXACT_SCALE)
    if seed % 16 == 1:
        yield Check("rounded" if distribution in FACTORS else "bits", distribution, 0.0)
    if seed % 32 == 3:
        yield Check("rounded", distribution, 0.1)
    if seed % 64 in (8, 36):
        yield Check("differentiated", "hashed", 0.1)
    if seed % 64 in (16, 21):
        yield Check("batched", "low_rank" if seed % 64 == 16 else "hashed", 0.1)
    if seed % 64 == 7:
        yield Check("compiled", distribution, 0.1)


def kinds_of(seed: int) -> dict[str, float]:
    """Most are of what is followed through a program, and so of views."""
    if seed % 16 == 6:
        return PRODUCTS
    return KINDS if seed % 8 == 0 else QUICK


def is_wide(seed: int) -> bool:
    """Whether a program is run with 64-bit types: one in five."""
    return seed % 5 == 4


def failure(program: Program, check: Check) -> tuple[str | None, str]:
    """The failure of a check, or `None`; and its outcome."""
    with jax.enable_x64(program.wide):
        try:
            fun, params = program.fun, program.arrays
            if check.name != "refused":
                traced(fun, params)
        except Exception:
            return None, "no program"
        try:
            with np.errstate(all="ignore"):
                fun, params = enlarged(fun, params)
                outcome = PROPERTIES[check.name](
                    fun, params, check.distribution, check.scale
                )
        except Undefined:
            return None, "undefined"
        except Mismatch as error:
            return f"Mismatch: {error}", "mismatch"
        except Exception as error:
            return f"{type(error).__name__}: {error}", "mismatch"
    return None, outcome or "same"


def printed(seed: int, program: Program, check: Check) -> str:
    return program.test(f"seed_{seed}_{check.name}", str(check))


def run(seeds: range, quick: bool = False) -> dict[str, Any]:
    """Checks a program for each seed, and reports what it met."""
    counts: collections.Counter[str] = collections.Counter()
    primitives, failures = set(), []
    for seed in seeds:
        program = generate(seed, is_wide(seed), QUICK if quick else kinds_of(seed))
        found = [(program, check) for check in checks(seed)][: 1 if quick else None]
        if not quick and seed % 32 == 9:
            check = Check("refused", "hashed", 0.1)
            found += [(other, check) for other in refused(seed, program.wide)]
        with jax.enable_x64(program.wide):
            primitives.update(met(program))
            for one, check in found:
                message, outcome = failure(one, check)
                counts[f"{check.words}: {outcome}"] += 1
                if message is not None:
                    failures.append(f"# {message}\n{printed(seed, one, check)}")
    return {
        "programs": len(seeds),
        "checks": dict(sorted(counts.items())),
        "primitives": sorted(primitives),
        "failures": failures,
    }


def met(program: Program) -> Iterator[str]:
    """The primitives of a program, inner programs included."""
    return _primitives(traced(program.fun, program.arrays).jaxpr)


def _primitives(jaxpr: core.Jaxpr) -> Iterator[str]:
    for eqn in jaxpr.eqns:
        yield eqn.primitive.name
        for value in eqn.params.values():
            for x in value if isinstance(value, tuple | list) else [value]:
                inner = getattr(x, "jaxpr", x)
                if isinstance(inner, core.Jaxpr):
                    yield from _primitives(inner)
