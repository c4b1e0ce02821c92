"""Runs a traced program operation by operation, and if asked, rounds at random.

Nothing is fused: two programs that apply the same operations to the same numbers end
in the same bits. With random rounding (Vignes' CESTAC method) what an operation reads
and writes is moved by a unit in the last place or two, up or down, and the spread of
several runs tells how far rounding can carry the results.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from .numpy_ops import by_numpy
from .numpy_sums import wide

# Inner programs that are run in the place of their equation.
CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "call": "call_jaxpr",
    "checkpoint": "jaxpr",
    "remat2": "jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vmap_call": "call",
    "composite": "jaxpr",
}
# These move numbers, and round none.
MOVES = {
    *("broadcast_in_dim", "reshape", "squeeze", "transpose", "slice", "rev", "copy"),
    *("gather", "dynamic_slice", "dynamic_update_slice", "concatenate", "pad", "split"),
    *("select_n", "stack", "unstack", "tile", "sort", "convert_element_type", "iota"),
    *("optimization_barrier", "name", "device_put", "row_major", "tie", "neg", "abs"),
    *("bitcast_convert_type", "stop_gradient", "while", "cond", "scan"),
    *("new_ref", "ref", "get", "swap", "addupdate", "freeze"),
}


class Rounding:
    """Moves numbers by up to `size` units in the last place, up or down."""

    def __init__(self, seed: int, size: float = 1.0):
        self.rng, self.size = np.random.default_rng(seed), size
        self.all_finite = True

    def __call__(self, x: Any) -> Any:
        if not jnp.issubdtype(x.dtype, jnp.inexact) or not x.size:
            return x
        x = np.asarray(x)
        self.all_finite &= bool(np.isfinite(x.astype(wide(x.dtype))).all())
        return (x.astype(wide(x.dtype)) * self._factor(x)).astype(x.dtype)

    def widened(self, x: Any, y: Any) -> Any:
        """y, x in a wider dtype: a sum formed there has digits that x has lost."""
        kinds = [jnp.issubdtype(z.dtype, jnp.floating) for z in (x, y)]
        if not all(kinds) or jnp.finfo(x.dtype).eps <= jnp.finfo(y.dtype).eps:
            return y
        y, epsilon = np.asarray(y), float(jnp.finfo(x.dtype).eps)
        lost = epsilon * self.size * self.rng.uniform(-0.5, 0.5, y.shape)
        return (y.astype(wide(y.dtype)) * (1 + lost)).astype(y.dtype)

    def displaced(self, x: Any, p: Any) -> Any:
        """x = p + s · u, with u rounded as float32 and the sum as what it is."""
        x, p = np.asarray(x), np.asarray(p)
        step = x.astype(wide(x.dtype)) - p.astype(wide(x.dtype))
        step = np.where(np.isfinite(step), step * self._factor(step, np.float32), 0)
        moved = (p.astype(wide(x.dtype)) + step).astype(x.dtype)
        return self(np.where(np.isfinite(x.astype(wide(x.dtype))), moved, x))

    def _factor(self, x: Any, dtype: Any = None) -> Any:
        epsilon = float(jnp.finfo(dtype or x.dtype).eps) * self.size
        return 1 + epsilon * self.rng.integers(-1, 2, x.shape)


def evaluate(
    closed: core.ClosedJaxpr, args: Sequence[Any], rounding: Rounding | None = None
) -> list[Any]:
    """The results of a program, an operation at a time."""
    with np.errstate(all="ignore"):
        return _run(closed.jaxpr, closed.consts, args, rounding)


def _run(
    jaxpr: core.Jaxpr, consts: Sequence[Any], args: Sequence[Any], rounding: Any
) -> list[Any]:
    env: dict[core.Var, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
    env.update(zip(jaxpr.invars, args, strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, core.Literal) else env[atom]

    for eqn in jaxpr.eqns:
        inputs, name = [read(atom) for atom in eqn.invars], eqn.primitive.name
        if name in CALLS:
            inner = eqn.params[CALLS[name]]
            outputs = _run(*_parts(inner), inputs, rounding)
        elif name in _FLOW:
            outputs = _FLOW[name](eqn, inputs, rounding)
        elif rounding is None or name in MOVES:
            outputs = _apply(eqn, inputs)
            if rounding is not None and name == "convert_element_type":
                outputs = [rounding.widened(*inputs, *outputs)]
        else:
            outputs = _apply(eqn, [rounding(x) for x in inputs])
            outputs = [rounding(x) for x in outputs]
        env.update(zip(eqn.outvars, outputs, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _parts(inner: Any) -> tuple[Any, Any]:
    closed = isinstance(inner, core.ClosedJaxpr)
    return (inner.jaxpr, inner.consts) if closed else (inner, ())


def _apply(eqn: core.JaxprEqn, inputs: list[Any]) -> list[Any]:
    name = eqn.primitive.name
    if name == "optimization_barrier":
        return inputs
    found = by_numpy(eqn, inputs)
    if found is not None:
        return [np.asarray(found)]
    bound = eqn.primitive.get_bind_params(eqn.params)
    # Older versions of JAX give inner functions apart.
    functions, params = bound if isinstance(bound, tuple) else ((), bound)
    if name == "layout_constraint":
        inputs = list(map(jnp.asarray, inputs))
    with eqn.ctx.manager:
        out = eqn.primitive.bind(*functions, *inputs, **params)
    return list(out) if eqn.primitive.multiple_results else [out]


# --- Control flow -----------------------------------------------------------------


def _scan(eqn: core.JaxprEqn, inputs: list[Any], rounding: Any) -> list[Any]:
    params = eqn.params
    if "ft_in" in params:  # From JAX 0.12 on.
        num_consts, num_carry = (len(part) for part in params["ft_in"].unpack()[:2])
    else:
        num_consts, num_carry = params["num_consts"], params["num_carry"]
    consts, rest = inputs[:num_consts], inputs[num_consts:]
    carry, stacks = rest[:num_carry], rest[num_carry:]
    steps = list(range(params["length"]))
    made: dict[int, list[Any]] = {}
    for i in reversed(steps) if params["reverse"] else steps:
        slices = [_at(stack, i) for stack in stacks]
        outputs = _run(*_parts(params["jaxpr"]), [*consts, *carry, *slices], rounding)
        carry, made[i] = outputs[:num_carry], outputs[num_carry:]
    ys = [
        _stacked([made[i][j] for i in steps], var.aval)
        for j, var in enumerate(eqn.outvars[num_carry:])
    ]
    return [*carry, *ys]


def _at(stack: Any, i: int) -> Any:
    keys = jnp.issubdtype(stack.dtype, jax.dtypes.extended)
    return stack[i] if keys else np.asarray(stack)[i]


def _stacked(parts: list[Any], aval: Any) -> Any:
    if jnp.issubdtype(aval.dtype, jax.dtypes.extended):
        return jnp.stack(parts)
    if not parts:
        return np.zeros(aval.shape, aval.dtype)
    return np.stack([np.asarray(part) for part in parts])


def _while(eqn: core.JaxprEqn, inputs: list[Any], rounding: Any) -> list[Any]:
    params = eqn.params
    num_cond, num_body = params["cond_nconsts"], params["body_nconsts"]
    cond_consts, rest = inputs[:num_cond], inputs[num_cond:]
    body_consts, carry = rest[:num_body], rest[num_body:]
    condition, body = _parts(params["cond_jaxpr"]), _parts(params["body_jaxpr"])
    while True:
        [goes_on] = map(np.asarray, _run(*condition, [*cond_consts, *carry], rounding))
        if not goes_on.any():
            return list(carry)
        new = _run(*body, [*body_consts, *carry], rounding)
        carry = [_where(goes_on, *pair) for pair in zip(new, carry, strict=True)]


def _where(batch: Any, new: Any, old: Any) -> Any:
    """Selects `new` for the part of a batch whose loop continues, or for all."""
    if not batch.shape:
        return new
    return jnp.where(batch.reshape(batch.shape + (1,) * (new.ndim - 1)), new, old)


def _cond(eqn: core.JaxprEqn, inputs: list[Any], rounding: Any) -> list[Any]:
    index, *operands = inputs
    branches = eqn.params["branches"]
    chosen = branches[int(np.clip(np.asarray(index), 0, len(branches) - 1))]
    return _run(*_parts(chosen), operands, rounding)


_FLOW = {"scan": _scan, "while": _while, "cond": _cond}
