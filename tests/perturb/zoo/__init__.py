"""Programs to perturb: one function each, small, and one line in every test of them.

A builder returns the function, its parameters and its further arguments. What the
tests must know of a program stands in its decorator.
"""

from tests.perturb.zoo import (
    calls,
    control_flow,
    dtypes,
    effects,
    look_ups,
    networks,
    products,
    structure,
)
from tests.perturb.zoo.program import PROGRAMS, normal

__all__ = [
    "PROGRAMS",
    "calls",
    "control_flow",
    "dtypes",
    "effects",
    "look_ups",
    "networks",
    "normal",
    "products",
    "structure",
]
