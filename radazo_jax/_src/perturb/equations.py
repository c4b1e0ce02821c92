"""Equations of a traced program."""

import contextlib
from collections.abc import Sequence

import jax
import numpy as np
from jax.extend import core

_DEBUG_INFO = core.DebugInfo("perturb", "perturb", None, None)


def bind(eqn: core.JaxprEqn, inputs: Sequence[jax.Array]) -> list[jax.Array]:
    """Evaluates one equation at arrays: its primitive, with its parameters."""
    given = {
        atom: value
        for atom, value in zip(eqn.invars, inputs, strict=True)
        if not isinstance(atom, core.Literal)
    }
    jaxpr = core.Jaxpr((), list(given), eqn.outvars, [eqn], eqn.effects, _DEBUG_INFO)
    return core.jaxpr_as_fun(core.ClosedJaxpr(jaxpr, ()))(*given.values())


def as_traced(eqn: core.JaxprEqn) -> contextlib.AbstractContextManager[None]:
    """The precision under which an equation was traced.

    A program can enable 64 bits for a part of itself. Its equations do not say so, but
    their dtypes do.
    """
    if jax.config.read("jax_enable_x64"):
        return contextlib.nullcontext()
    dtypes = [getattr(atom.aval, "dtype", None) for atom in (*eqn.invars, *eqn.outvars)]
    if not any(isinstance(x, np.dtype) and x.itemsize >= 8 for x in dtypes):
        return contextlib.nullcontext()
    return jax.enable_x64(True)
