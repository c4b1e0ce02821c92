"""A rule per primitive for perturbed leaves that are not built yet.

A rule gets the equation and its inputs, of which at least one is a `View`, and
returns the outputs, views or arrays; or `None`, and then the views among the inputs
are built for this equation. Control flow is interpreted inside.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Container, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from radazo_jax._src.base import xla
from radazo_jax._src.base.trees import Tree
from radazo_jax._src.directions.elements import LazyElements, LowRankFactors
from radazo_jax._src.perturb import products, rearrange, views
from radazo_jax._src.perturb.products import as_traced, bind
from radazo_jax._src.perturb.rearrange import OfMark
from radazo_jax._src.perturb.views import Value, View

_MAX_UNTIED = 2**16


def interpret(
    jaxpr: core.ClosedJaxpr, args: Sequence[Value], ready: Container[int] = ()
) -> list[jax.Array]:
    """Evaluates `jaxpr` at arguments some of which are views.

    Args:
      jaxpr: The program.
      args: Arrays and views.
      ready: Those of the values, by `id`, that nothing needs to wait for.

    Returns:
      Its outputs.
    """
    return _built(_interpret(jaxpr.jaxpr, jaxpr.consts, args, ready))


def _interpret(
    jaxpr: core.Jaxpr,
    consts: Sequence[jax.Array],
    args: Sequence[Value],
    ready: Container[int],
) -> list[Value]:
    """Returns the outputs as `interpret` does; they may be views."""
    env: dict[core.Var, Value] = {}

    def read(atom: core.Var | core.Literal) -> Value:
        return atom.val if isinstance(atom, core.Literal) else env[atom]

    # What is built here once serves all equations here; a view may also be built
    # elsewhere, as inside a loop, under another trace.
    memo: dict[int, jax.Array] = {}
    env.update(zip(jaxpr.constvars, consts, strict=True))
    env.update(zip(jaxpr.invars, args, strict=True))
    for eqn in jaxpr.eqns:
        inputs = [read(atom) for atom in eqn.invars]
        outputs = None
        with as_traced(eqn):
            if any(isinstance(value, View) for value in inputs):
                name = eqn.primitive.name
                if name in _CALLS:
                    outputs = _call(eqn.params[_CALLS[name]], inputs, ready)
                elif name in _RULES:
                    outputs = _RULES[name](eqn, inputs)
                if outputs is None:
                    outputs = _with_built(eqn, inputs, memo, ready)
            if outputs is None:
                outputs = bind(eqn, inputs)
        env.update(zip(eqn.outvars, outputs, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _with_built(
    eqn: core.JaxprEqn,
    inputs: list[Value],
    memo: dict[int, jax.Array],
    ready: Container[int],
) -> list[jax.Array]:
    """Evaluates an equation that needs the elements of its views."""
    built = _built(inputs, memo, ready)
    constrained = eqn.primitive.name == "sharding_constraint"
    if constrained and eqn.params["sharding"].num_devices > 1:
        # Else XLA applies the constraint to the sum before its rounding too, and
        # gathers at least float32.
        built = lax.optimization_barrier(built)
    whole = functools.partial(bind, eqn, built)
    in_blocks = products.product(eqn, inputs, built)
    return whole() if in_blocks is None else xla.on_one_gpu(in_blocks, whole)


def _built(
    values: Sequence[Value],
    memo: dict[int, jax.Array] | None = None,
    ready: Container[int] = (),
) -> list[jax.Array]:
    """Returns `values` with the views among them built, after the other values.

    Args:
      values: Arrays and views.
      memo: Views that have been built already, by `id`; grows.
      ready: As in `interpret`.
    """
    memo = {} if memo is None else memo
    arrays = [value for value in values if isinstance(value, jax.Array)]
    for value in values:
        if isinstance(value, View) and id(value) not in memo:
            # A small leaf need not wait: it would only be kept out of fusions.
            small = math.prod(value.shape) <= _MAX_UNTIED
            memo[id(value)] = value.build(*(() if small else arrays), ready=ready)
    return [memo[id(v)] if isinstance(v, View) else v for v in values]


# --- Structure --------------------------------------------------------------------

Rule = Callable[[core.JaxprEqn, list[Value]], "list[Value] | None"]


def _structural(
    rearrangement: Callable[[View, core.JaxprEqn, list[Value]], OfMark | None],
) -> Rule:
    """Makes a rule for a primitive whose first operand, a view, is only rearranged."""

    def rule(eqn: core.JaxprEqn, inputs: list[Value]) -> list[Value] | None:
        view, *others = inputs
        if not _is_only_view(inputs):
            return None
        of_mark = rearrangement(view, eqn, others)
        if of_mark is None:
            return None
        [base] = bind(eqn, [view.base, *others])
        return [view.map(base, of_mark)]

    return rule


def _is_only_view(inputs: list[Value]) -> bool:
    """Returns whether the first input is a view, with elements, and no other is."""
    view, *others = inputs
    if not isinstance(view, View) or any(isinstance(x, View) for x in others):
        return False
    return 0 not in view.shape


def _transpose(eqn: core.JaxprEqn, inputs: list[Value]) -> list[Value] | None:
    if not _is_only_view(inputs):
        return None
    [view] = inputs
    permutation = eqn.params["permutation"]
    [base] = bind(eqn, [view.base])
    order = view.order and tuple(permutation.index(axis) for axis in view.order)
    return [view.map(base, rearrange.transpose(permutation), order)]


def _reshape(view: View, eqn: core.JaxprEqn, _: list[Value]) -> OfMark | None:
    if eqn.params["dimensions"] is not None:
        return None
    return rearrange.reshape(view.shape, eqn.params["new_sizes"])


def _squeeze(view: View, eqn: core.JaxprEqn, _: list[Value]) -> OfMark:
    dropped = eqn.params["dimensions"]
    sizes = [n for axis, n in enumerate(view.shape) if axis not in dropped]
    return rearrange.reshape(view.shape, sizes)


def _expand(view: View, eqn: core.JaxprEqn, others: list[Value]) -> OfMark | None:
    if others:  # Sizes known only at run time.
        return None
    # If it repeats nothing, it only adds axes of size 1.
    shape = eqn.params["shape"]
    repeats = math.prod(shape) != math.prod(view.shape)
    return None if repeats else rearrange.reshape(view.shape, shape)


def _slice(view: View, eqn: core.JaxprEqn, _: list[Value]) -> OfMark | None:
    starts, limits = eqn.params["start_indices"], eqn.params["limit_indices"]
    # Slices that overlap would each be drawn.
    size = math.prod(b - a for a, b in zip(starts, limits, strict=True))
    if isinstance(view.u, LazyElements) and 2 * size > math.prod(view.shape):
        return None
    return rearrange.slice_(starts, limits, eqn.params["strides"] or [1] * len(starts))


def _dynamic_slice(
    view: View, eqn: core.JaxprEqn, starts: list[Value]
) -> OfMark | None:
    sizes = eqn.params["slice_sizes"]
    if len(starts) != len(sizes):  # Sizes known only at run time.
        return None
    return rearrange.dynamic_slice(eqn.primitive, starts, sizes)


def _reverse(view: View, eqn: core.JaxprEqn, _: list[Value]) -> OfMark:
    return rearrange.reverse(eqn.params["dimensions"])


def _convert(eqn: core.JaxprEqn, inputs: list[Value]) -> list[Value] | None:
    [view] = inputs
    new = eqn.params["new_dtype"]
    # After a first conversion there is a rounding that a second would lose.
    if view.converted or not jnp.issubdtype(new, jnp.floating):
        return None
    # A product with factors adds the exact perturbation to a rounded leaf. Eight bits
    # would round most of a leaf's own digits away.
    if isinstance(view.u, LowRankFactors) and jnp.dtype(new).itemsize < 2:
        return None
    return [dataclasses.replace(view, dtype=new, converted=new != view.dtype)]


def _gather(eqn: core.JaxprEqn, inputs: list[Value]) -> list[Value] | None:
    batched = eqn.params["dimension_numbers"].operand_batching_dims
    one_hot = eqn.params["mode"] == lax.GatherScatterMode.ONE_HOT
    if batched or one_hot or not _is_only_view(inputs):
        return None
    view, starts = inputs
    if view.u is None and eqn.params["fill_value"] is not None:
        return None  # The fill value is rounded to the leaf's dtype, not to base's.
    [base] = bind(eqn, [view.base, starts])
    found = rearrange.gather(view, starts, base, eqn.params)
    return [dataclasses.replace(found, looked_up=True)]


def _constrained(eqn: core.JaxprEqn, inputs: list[Value]) -> list[Value] | None:
    # A lazy leaf is built and rounded on its own devices, before it is gathered.
    [view] = inputs
    if not isinstance(view.u, LowRankFactors):
        return None
    return [dataclasses.replace(view, base=bind(eqn, [view.base])[0])]


# --- Products ---------------------------------------------------------------------


def _dot_general(eqn: core.JaxprEqn, inputs: list[Value]) -> list[Value] | None:
    left, right = inputs
    if left is right:
        return None  # An equation gives one value to a variable that it reads twice.
    if isinstance(left, View) and isinstance(right, View):
        left = left.build()
    view_is_left = isinstance(left, View)
    view, x = (left, right) if view_is_left else (right, left)
    if 0 in view.shape:
        return None
    return products.dot_general(eqn, x, view, view_is_left)


def _convolution(eqn: core.JaxprEqn, inputs: list[Value]) -> list[Value] | None:
    x, kernel = inputs
    if not isinstance(kernel, View) or isinstance(x, View) or 0 in kernel.shape:
        return None
    return products.convolution(eqn, x, kernel)


# --- Control flow -----------------------------------------------------------------


# Calls are entered: what stands inside is interpreted in their place.
_CALLS = {
    "jit": "jaxpr",
    "closed_call": "call_jaxpr",
    "checkpoint": "jaxpr",
    "remat2": "jaxpr",
}


def _call(
    jaxpr: core.Jaxpr | core.ClosedJaxpr, inputs: list[Value], ready: Container[int]
) -> list[Value]:
    if isinstance(jaxpr, core.ClosedJaxpr):
        return _interpret(jaxpr.jaxpr, jaxpr.consts, inputs, ready)
    return _interpret(jaxpr, (), inputs, ready)


def _scan(eqn: core.JaxprEqn, inputs: list[Value]) -> list[Value] | None:
    params = eqn.params
    if "ft_in" in params:  # From JAX 0.12 on.
        num_consts, num_carry = (len(part) for part in params["ft_in"].unpack()[:2])
    else:
        num_consts, num_carry = params["num_consts"], params["num_carry"]
    if any(isinstance(value, View) and 0 in value.shape for value in inputs):
        return None
    consts = inputs[:num_consts]
    init = _built(inputs[num_consts : num_consts + num_carry])
    stacks = inputs[num_consts + num_carry :]

    def body(carry: list[jax.Array], xs: Tree) -> tuple[list[jax.Array], Tree]:
        i, slices = xs
        slices = [
            rearrange.at(stack, i, part) if isinstance(stack, View) else part
            for stack, part in zip(stacks, slices, strict=True)
        ]
        # What a body starts from is there when it starts: a leaf need not wait for it,
        # and a slice that only its product reads is not copied out of its stack. But
        # a leaf must not be built once for all steps, ahead of the loop.
        inputs = [*(views.drawn_after(value, i) for value in consts), *carry, *slices]
        ready = {id(value) for value in inputs if params["unroll"] == 1}
        outputs = interpret(params["jaxpr"], inputs, ready)
        return outputs[:num_carry], outputs[num_carry:]

    steps = jnp.arange(params["length"], dtype=jnp.uint32)
    bases = [stack.base if isinstance(stack, View) else stack for stack in stacks]
    carry, ys = lax.scan(
        body,
        init,
        (steps, bases),
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    return [*carry, *ys]


def _while(eqn: core.JaxprEqn, inputs: list[Value]) -> list[Value] | None:
    params = eqn.params
    if params["cond_jaxpr"].out_avals[0].shape:
        return None  # Under vmap, a condition may hold for some of the batch only.
    num_cond, num_body = params["cond_nconsts"], params["body_nconsts"]
    cond_consts, rest = inputs[:num_cond], inputs[num_cond:]
    body_consts, init = rest[:num_body], _built(rest[num_body:])
    return lax.while_loop(
        lambda carry: interpret(params["cond_jaxpr"], [*cond_consts, *carry])[0],
        lambda carry: interpret(params["body_jaxpr"], [*body_consts, *carry]),
        init,
    )


def _cond(eqn: core.JaxprEqn, inputs: list[Value]) -> list[Value] | None:
    if eqn.params.get("branches_platforms"):
        return None  # Not all branches can be lowered everywhere.
    index, *operands = inputs
    [index] = _built([index])
    branches = [
        functools.partial(interpret, jaxpr, operands)
        for jaxpr in eqn.params["branches"]
    ]
    return lax.switch(index, branches)


# Functions with custom derivatives are not entered: their rules would be lost under
# `jax.grad`. They get their leaves built.
_RULES: dict[str, Rule] = {
    "transpose": _transpose,
    "reshape": _structural(_reshape),
    "squeeze": _structural(_squeeze),
    "broadcast_in_dim": _structural(_expand),
    "slice": _structural(_slice),
    "dynamic_slice": _structural(_dynamic_slice),
    "rev": _structural(_reverse),
    "convert_element_type": _convert,
    "copy": lambda eqn, inputs: inputs,
    "sharding_constraint": _constrained,
    "reshard": _constrained,
    "gather": _gather,
    "dot_general": _dot_general,
    "conv_general_dilated": _convolution,
    "scan": _scan,
    "while": _while,
    "cond": _cond,
}
