"""The equations of a perturbed function, and the ties of its barriers."""

import math
from collections.abc import Iterator

import jax
from jax.extend import core

import radazo_jax as zo
from radazo_jax._src.perturb import transform
from tests.helpers.compare import SCALE

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


def described(distribution, params):
    """A direction without numbers, which is all that tracing needs."""
    return jax.eval_shape(
        lambda key: distribution.sample(key, params), jax.random.key(0)
    )


def computed_sizes(
    fun, distribution, params, *args, num=None, as_used=False
) -> list[tuple[int, str]]:
    """The size of each value that the perturbed function computes, and by what.

    Args:
      fun: The function.
      distribution: The distribution of the directions.
      params: Its parameters.
      *args: Its other arguments.
      num: The number of directions under `vmap`; `None` for one without.
      as_used: Whether the axes of matrices follow from the use of the leaves, as in an
        estimator.
    """

    def perturbed(params, direction, *args):
        if not as_used:
            return zo.perturb(fun)(params, direction, SCALE, *args)
        layout = transform.layout_for(distribution, lambda p: fun(p, *args), params)
        return transform.evaluate(fun, params, layout, direction, SCALE, args)

    direction = described(distribution, params)
    if num:
        direction = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((num, *x.shape), x.dtype), direction
        )
        perturbed = jax.vmap(perturbed, in_axes=(None, 0, *(None for _ in args)))
    jaxpr = jax.make_jaxpr(perturbed)(params, direction, *args)
    return [
        (math.prod(v.aval.shape), eqn.primitive.name)
        for eqn in equations(jaxpr.jaxpr)
        if eqn.primitive.name not in MOVES
        for v in eqn.outvars
    ]


def waits(fun, distribution, params, *args) -> list[list[tuple[int, ...]]]:
    """The shapes of what each barrier of the perturbed function ties together."""

    def perturbed(params, direction, *args):
        return zo.perturb(fun)(params, direction, SCALE, *args)

    direction = described(distribution, params)
    return waits_of(jax.make_jaxpr(perturbed)(params, direction, *args))


def waits_of(jaxpr) -> list[list[tuple[int, ...]]]:
    """The shapes of what each barrier of a program ties together."""
    return [
        [atom.aval.shape for atom in eqn.invars]
        for eqn in equations(jaxpr.jaxpr)
        if eqn.primitive.name == "optimization_barrier"
    ]
