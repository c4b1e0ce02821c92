"""Equations of a traced program."""

from collections.abc import Sequence

import jax
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
