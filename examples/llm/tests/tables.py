"""Tables of cases: what of them the fast run takes, and how it compiles."""

import functools
import math
from collections.abc import Iterator

import jax
import pytest
from jax.extend import core

import radazo_jax as zo

# For programs that run once, on which optimization is wasted: in the slow run, too.
QUICK = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
}
if jax.__version_info__ < (0, 11):  # As in `conftest.py`.
    QUICK |= {
        "xla_cpu_use_fusion_emitters": False,
        "xla_cpu_parallel_codegen_split_count": 1,
    }
jit = functools.partial(jax.jit, compiler_options=QUICK)


def slow(*values):
    """Values of a parametrized test that only the slow run takes."""
    return pytest.param(*values, marks=pytest.mark.slow)


def every(table, *fast):
    """All entries of a table, of which the fast run takes the named ones."""
    return [
        entry
        if entry in fast
        else slow(*(entry if isinstance(entry, tuple) else [entry]))
        for entry in table
    ]


def equations(jaxpr: core.Jaxpr) -> Iterator[core.JaxprEqn]:
    """All equations that compute something, inner programs included."""
    for eqn in jaxpr.eqns:
        inner = [
            x.jaxpr if isinstance(x, core.ClosedJaxpr) else x
            for value in eqn.params.values()
            for x in (value if isinstance(value, tuple | list) else [value])
            if isinstance(x, core.ClosedJaxpr | core.Jaxpr)
        ]
        for sub in inner:
            yield from equations(sub)
        if not inner:
            yield eqn


# Primitives that move numbers and compute none.
MOVES = {
    "broadcast_in_dim",
    "convert_element_type",
    "copy",
    "dynamic_slice",
    "gather",
    "optimization_barrier",
    "reshape",
    "rev",
    "row_major",
    "slice",
    "squeeze",
    "transpose",
}


def computed_sizes(fun, distribution, params):
    """The size of each value that an evaluation at a point computes, and by what."""

    def evaluated(params, key):
        draw = zo.estimators.Draw.once(key)._replace(fun=fun)
        points = zo.estimators.sample_points(distribution, draw, 1, [1.0], params)
        return zo.vectorized(1).evaluate(fun, params, points, False)[0]

    key = jax.eval_shape(lambda: jax.random.key(0))
    jaxpr = jax.make_jaxpr(evaluated)(params, key)
    return [
        (math.prod(v.aval.shape), eqn.primitive.name)
        for eqn in equations(jaxpr.jaxpr)
        if eqn.primitive.name not in MOVES
        for v in eqn.outvars
    ]
