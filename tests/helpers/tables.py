"""Tables of the cases of tests: a new distribution is one line here."""

import functools
import itertools
import math

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

import radazo_jax as zo
from examples.custom_distribution import Smooth, Sparse

DISTRIBUTIONS = {
    "sphere": zo.sphere(),
    "gaussian": zo.gaussian(),
    "rademacher": zo.rademacher(),
    "coordinate": zo.coordinate(),
    "coordinate in turn": zo.coordinate(replace=False),
    "orthonormal": zo.orthonormal(),
    "low_rank": zo.low_rank(),
    "low_rank(2)": zo.low_rank(2),
    "sparse": Sparse(),
    "smooth": Smooth(),
}
# A distribution that is normalized, drawn by element, packed in words, and made of
# factors.
KINDS = ("sphere", "gaussian", "rademacher", "low_rank")
# Of these, what the fast run takes: one by position, and the one of factors.
FAST = ("sphere", "low_rank")
# Distributions whose elements are sums of products. Compilers round these differently:
# they may fuse a multiplication and an addition, or merge two constants.
SUMS = ("low_rank(2)", "smooth")
ESTIMATORS = {"forward": zo.forward_difference, "central": zo.central_difference}

# For programs that run once, on which optimization is wasted: in the slow run, too.
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
if jax.__version_info__ < (0, 11):  # As in `conftest.py`.
    QUICK |= {
        "xla_cpu_use_fusion_emitters": False,
        "xla_cpu_parallel_codegen_split_count": 1,
    }
jit = functools.partial(jax.jit, compiler_options=QUICK)


def slow(*values, **options):
    """Values of a parametrized test that only the slow run takes."""
    return pytest.param(*values, marks=pytest.mark.slow, **options)


def every(table, *fast):
    """All entries of a table, of which the fast run takes the named ones."""
    return [
        entry
        if entry in fast
        else slow(*(entry if isinstance(entry, tuple) else [entry]))
        for entry in table
    ]


def assert_same_draws(distribution, got, expected):
    """Trees of elements that two programs drew, by the name of the distribution."""

    def compare(a, b):
        ulps = 4 if distribution in SUMS else 0
        largest = np.max(np.abs(b), initial=0).astype(np.float32)
        atol = ulps * float(np.spacing(largest))
        np.testing.assert_allclose(a, b, rtol=0, atol=atol)

    jax.tree.map(compare, got, expected)


def each_distribution(*axes, fast=FAST, among=DISTRIBUTIONS):
    """Each distribution with one combination of values, and all combinations among the
    distributions.

    What a distribution does does not depend on these values, so that all distributions
    with all values would find no more. The fast run takes the named distributions.
    """
    combinations = list(itertools.product(*axes))
    cases = []
    for i, distribution in enumerate(
        (*fast, *(name for name in among if name not in fast))
    ):
        case = (distribution, *combinations[i % len(combinations)])
        cases.append(case if distribution in fast else slow(*case))
    return cases


def covariance(distribution, params):
    """E[u uᵀ], an array [d, d]: the distribution's own, or the identity over its
    factor."""
    dimension = sum(leaf.size for leaf in jax.tree.leaves(params))
    if hasattr(distribution, "covariance"):
        return distribution.covariance(dimension)
    return np.eye(dimension) / distribution.factor(dimension)


def mesh_of(*sizes, types=AxisType.Auto):
    """A mesh of up to three axes, named `k`, `data` and `model`."""
    devices = jax.devices()[: math.prod(sizes)]
    names = ("k", "data", "model")[: len(sizes)]
    return jax.make_mesh(
        sizes, names, axis_types=(types,) * len(sizes), devices=devices
    )
