"""Evaluation at a perturbed point."""

import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import optax

from radazo_jax._src import trees
from radazo_jax._src.directions.distribution import Direction
from radazo_jax._src.directions.layout import Layout, layout_of
from radazo_jax._src.perturb import rules, views


def perturb(fun: Callable[..., Any]) -> Callable[..., Any]:
    """Transforms `fun` into its evaluation at a perturbed point.

    A perturbed leaf is built only by the equation of `fun` that uses it: layer by layer
    inside a `scan`, row by row in a lookup. A product with a matrix whose direction has
    low rank never builds it. `fun` is traced once, and its side effects (debug prints,
    callbacks) happen once.

    Args:
      fun: A function whose first argument is a tree of arrays, the parameters.

    Returns:
      A function `(params, direction, scale, *args, **kwargs)` that equals, up to
      rounding, `fun(tree_map(lambda p, u: p + scale * u, params, u), *args, **kwargs)`,
      with `direction` materialized for `params` as `u`. The sum is formed in float32
      (float64 for float64 leaves, whose directions are float32 all the same) and
      rounded once, to the dtype in which `fun` uses the leaf. Only a product with a
      direction of low rank never forms the sum: it rounds the leaf to the dtype of the
      product, at least 16 bits, and adds the exact perturbation. The output of `fun`
      may also hold objects that are not arrays.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> import radazo_jax as zo
      >>> def loss(params, x):
      ...     return jnp.sum((params["w"] * x) ** 2)
      >>> params, x = {"w": jnp.ones(3)}, jnp.array([1.0, 2.0, 3.0])
      >>> direction = zo.rademacher().sample(jax.random.key(0), params)
      >>> value = zo.perturb(loss)(params, direction, 0.5, x)
      >>> u = zo.rademacher().materialize(direction, params)
      >>> bool(jnp.allclose(value, loss({"w": params["w"] + 0.5 * u["w"]}, x)))
      True
    """

    @functools.wraps(fun)
    def perturbed(
        params: optax.Params,
        direction: Direction,
        scale: jax.typing.ArrayLike,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        params = trees.as_arrays(params)
        layout = direction.distribution._annotate(layout_of(params), params)
        return evaluate(fun, params, layout, direction, scale, args, kwargs)

    # It takes other arguments than `fun`, so inspection must not follow to `fun`.
    del perturbed.__wrapped__
    return perturbed


def evaluate(
    fun: Callable[..., Any],
    params: optax.Params,
    layout: Layout,
    direction: Direction,
    scale: jax.typing.ArrayLike,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] = MappingProxyType({}),
) -> Any:
    """`perturb(fun)` for arrays with a known layout."""
    jaxpr, outputs_of = _trace(fun, params, args, kwargs)
    given = views.views_of(params, layout, direction, jnp.asarray(scale))
    return outputs_of(rules.evaluate(jaxpr, views.with_small_drawn(given)))


def _trace(
    fun: Callable[..., Any],
    params: optax.Params,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> tuple[Any, Callable[[list[jax.Array]], Any]]:
    """`fun` as a program of its parameters, and what makes its output."""
    # Not the output itself, which holds tracers.
    static: list[trees.Static] = []

    def of_params(params: optax.Params) -> list[Any]:
        # New containers, as under jit: fun may write into them.
        new_args, new_kwargs = jax.tree.map(lambda x: x, (args, dict(kwargs)))
        output = fun(params, *new_args, **new_kwargs)
        arrays, rest = trees.partition(output, jax.Array)
        static[:] = [rest]
        return arrays

    jaxpr = jax.make_jaxpr(of_params)(params)
    return jaxpr, static[0].merge
