"""Checks programs one after another, and counts what they met.

A program and its definition are compiled, and run. If leaves are multiples of 1/8,
directions are signs and the scale is 1/4 or 0, what a program of moves and products
computes is exact, so that its results have the same bits however XLA fuses it. Other
programs round: their results are compared with the largest of them.
"""

import collections
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from .build import EXACT, KINDS, PRODUCTS
from .definition import DENSE, FACTORS, defined, enlarged, perturbed
from .generate import generate
from .program import Program

CLOSE = 1e-2
# Programs run once, and what is rounded to 16 bits stays so.
OPTIONS = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    "xla_allow_excess_precision": False,
}


@dataclasses.dataclass(frozen=True)
class Check:
    """The distribution of a direction, the scale, and whether two are batched."""

    distribution: str
    scale: float = 0.25
    batched: bool = False

    @property
    def words(self) -> str:
        """The row of the record's table."""
        scale = "" if self.scale else ", at scale 0"
        return self.distribution + scale + (", under `vmap`" if self.batched else "")


def checks(seed: int) -> Iterator[Check]:
    """The checks of a program: always signs, seldom other directions."""
    yield Check("flips stored" if seed % 3 else "flips", batched=seed % 16 == 4)
    if seed % 16 == 1:
        yield Check("flips", scale=0.0)
    if seed % 16 == 6:  # Matrices that are not built, if there are products.
        yield Check(list(FACTORS)[seed // 16 % len(FACTORS)], scale=0.1)
    if seed % 32 == 3:
        yield Check(list(DENSE)[seed // 32 % len(DENSE)], scale=0.1)


def kinds_of(seed: int) -> dict[str, float]:
    """Most are of what is followed through a program, and so of views."""
    if seed % 16 == 6:
        return PRODUCTS
    return KINDS if seed % 8 == 0 else EXACT


def is_wide(seed: int) -> bool:
    """Whether a program is run with 64-bit types: one in five."""
    return seed % 5 == 4


def outcome(program: Program, check: Check, exact: bool) -> tuple[str, str]:
    """`same`, `rounded`, `unstable` or `mismatch`; and what differs."""
    fun, params = enlarged(program.fun, program.arrays)
    keys = jax.random.split(jax.random.key(1), 2)
    found = []
    for make in (perturbed, defined):
        run: Callable[..., Any] = make(fun, check.distribution, check.scale)
        if check.batched:
            run = jax.vmap(run, (None, 0))
        try:
            compiled = jax.jit(run, compiler_options=OPTIONS)
            results = compiled(params, keys if check.batched else keys[0])
            found.append([np.asarray(x) for x in results])
        except Exception as error:
            found.append(error)
    got, expected = found
    if isinstance(got, Exception) or isinstance(expected, Exception):
        word = "same" if type(got) is type(expected) else "mismatch"
        return word, f"got {got!r}, expected {expected!r}"
    return compared(got, expected, exact)


def compared(
    got: Sequence[np.ndarray], expected: Sequence[np.ndarray], exact: bool
) -> tuple[str, str]:
    words = ("same", "rounded", "unstable", "mismatch")
    worst = 0
    for i, (a, b) in enumerate(zip(got, expected, strict=True)):
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            return "mismatch", f"result {i}: got {a!r}, expected {b!r}"
        if not _same_bits(a, b):
            found = 3 if exact else _rounding(a, b)
            if found == 3:
                return "mismatch", f"result {i}: got {a!r}, expected {b!r}"
            worst = max(worst, found)
    return words[worst], ""


def _same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether arrays are equal, with the signs of zeros, and NaN equal to NaN."""
    if not jnp.issubdtype(a.dtype, jnp.inexact):
        return bool((a == b).all())
    if jnp.issubdtype(a.dtype, jnp.complexfloating):
        return _same_bits(a.real, b.real) and _same_bits(a.imag, b.imag)
    a, b = a.astype(np.float64), b.astype(np.float64)
    nan = np.isnan(a) & np.isnan(b)
    return bool((nan | ((a == b) & (np.signbit(a) == np.signbit(b)))).all())


def _rounding(a: np.ndarray, b: np.ndarray) -> int:
    """1 if arrays are close, 2 if rounding may decide them, and 3 otherwise."""
    if not jnp.issubdtype(a.dtype, jnp.inexact):
        return 2
    allowed = max(CLOSE, 16 * float(jnp.finfo(a.dtype).eps))
    is_complex = jnp.issubdtype(a.dtype, jnp.complexfloating)
    a, b = (x.astype(np.complex128 if is_complex else np.float64) for x in (a, b))
    finite = np.isfinite(a)
    if (finite != np.isfinite(b)).any():
        return 2
    largest = np.abs(b[finite]).max(initial=0)
    return 1 if np.abs(a - b)[finite].max(initial=0) <= allowed * largest else 3


def run(seeds: range, quick: bool = False) -> dict[str, Any]:
    """Checks a program for each seed, and reports what it met."""
    counts: collections.Counter[str] = collections.Counter()
    primitives, failures = set(), []
    for seed in seeds:
        kinds = EXACT if quick else kinds_of(seed)
        program = generate(seed, is_wide(seed), kinds)
        with jax.enable_x64(program.wide):
            primitives.update(met(program))
            for check in list(checks(seed))[: 1 if quick else None]:
                exact = kinds is EXACT and check.scale != 0.1
                word, text = outcome(program, check, exact)
                counts[f"{check.words}: {word}"] += 1
                if word == "mismatch":
                    failures.append(f"# {check}\n# {text}\n{program.text(seed)}")
    return {
        "programs": len(seeds),
        "checks": dict(sorted(counts.items())),
        "primitives": sorted(primitives),
        "failures": failures,
    }


def met(program: Program) -> Iterator[str]:
    """The primitives of a program, inner programs included."""
    return _primitives(jax.make_jaxpr(program.fun)(program.arrays).jaxpr)


def _primitives(jaxpr: core.Jaxpr) -> Iterator[str]:
    for eqn in jaxpr.eqns:
        yield eqn.primitive.name
        for value in eqn.params.values():
            for x in value if isinstance(value, tuple | list) else [value]:
                inner = getattr(x, "jaxpr", x)
                if isinstance(inner, core.Jaxpr):
                    yield from _primitives(inner)
