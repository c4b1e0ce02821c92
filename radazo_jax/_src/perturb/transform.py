"""`perturb`: a function, traced once and evaluated at a perturbed point."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TypeVar

import jax
import jax.numpy as jnp
import optax

from radazo_jax._src.base import checks, programs, trees
from radazo_jax._src.base.trees import Tree
from radazo_jax._src.directions.distribution import Direction, Distribution
from radazo_jax._src.directions.distributions import Gaussian, LowRank
from radazo_jax._src.directions.layout import Layout, MatrixAxes, matrix_axes
from radazo_jax._src.perturb import rules, views

_T = TypeVar("_T")


@checks.checks_names
def perturb(fun: Callable[..., _T]) -> Callable[..., _T]:
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
        *args: Tree,
        **kwargs: Tree,
    ) -> _T:
        params = trees.as_arrays(params)
        layout = direction.distribution._layout(params)
        return evaluate(fun, params, layout, direction, scale, args, kwargs, False)

    # It takes other arguments than `fun`, so inspection must not follow to `fun`.
    del perturbed.__wrapped__
    return perturbed


def evaluate(
    fun: Callable[..., _T],
    params: optax.Params,
    layout: Layout,
    direction: Direction,
    scale: jax.typing.ArrayLike,
    args: tuple[Tree, ...] = (),
    kwargs: Mapping[str, Tree] = MappingProxyType({}),
    in_loop: bool = True,
) -> _T:
    """Evaluates `perturb(fun)` for arrays with a known layout, also in a loop."""
    jaxpr, outputs_of = _trace(fun, params, args, kwargs)
    given = views.views_of(params, layout, direction, jnp.asarray(scale), in_loop)
    return outputs_of(rules.interpret(jaxpr, views.with_small_drawn(given)))


def _trace(
    fun: Callable[..., _T],
    params: optax.Params,
    args: tuple[Tree, ...],
    kwargs: Mapping[str, Tree],
) -> tuple[Tree, Callable[[list[jax.Array]], _T]]:
    """Traces `fun` as a program of its parameters, and what makes its output."""
    # Not the output itself, which holds tracers.
    static: list[trees.Static] = []

    def of_params(params: optax.Params) -> list[Tree]:
        # New containers, as under jit: fun may write into them.
        new_args, new_kwargs = jax.tree.map(lambda x: x, (args, dict(kwargs)))
        output = fun(params, *new_args, **new_kwargs)
        arrays, rest = trees.partition(output, jax.Array)
        static[:] = [rest]
        return arrays

    jaxpr = jax.make_jaxpr(of_params)(params)
    programs.check_no_refs(jaxpr.consts)
    return jaxpr, static[0].merge


def layout_for(
    distribution: Distribution,
    fun: Callable[[optax.Params], Tree] | None,
    params: optax.Params,
) -> Layout:
    """Returns the layout of the parameters, with the axes of matrices in `fun`.

    The first use of a leaf decides. A product makes rows of the axes that it
    contracts and columns of those that it leaves; axes that are gone by then (a scan
    has sliced them, an index has picked from them) stack matrices.

    Args:
      distribution: The distribution of the directions. Only `low_rank` reads the axes;
        for other distributions nothing is traced.
      fun: A function of the parameters, traced once more; `None` if JAX cannot.
      params: The parameters, arrays.
    """
    layout = distribution._layout(params)
    if (
        not isinstance(distribution, LowRank)
        or distribution.dimension_numbers is not None
        or fun is None
    ):
        return layout
    found: dict[str, MatrixAxes | None] = {}

    def trace(key: jax.Array, params: optax.Params) -> None:
        # The positions of a dense distribution follow each axis of a leaf through the
        # program.
        direction = Gaussian().sample(key, params)
        given = views.views_of(params, layout, direction, jnp.float32(0))
        given = [
            dataclasses.replace(view, on_use=functools.partial(_note, found, leaf.path))
            for view, leaf in zip(given, layout.leaves, strict=True)
        ]
        # A new function each time: JAX remembers the programs of those it has traced,
        # and `fun` may have no hash, or read what has changed since.
        jaxpr = jax.make_jaxpr(lambda params: fun(params))(params)
        rules.interpret(jaxpr, given)

    jax.eval_shape(trace, jax.random.key(0), params)
    return layout.with_axes(found)


def _note(
    found: dict[str, MatrixAxes | None],
    path: str,
    view: views.View,
    contracted: set[int],
) -> None:
    if path in found:
        return
    along = [
        {axis for axis in range(mark.ndim) if mark.shape[axis] > 1}
        for mark in view.marks
    ]
    remaining = [axis for axis, where in enumerate(along) if where]
    rows = tuple(axis for axis in remaining if along[axis] & contracted)
    columns = tuple(axis for axis in remaining if axis not in rows)
    if rows and columns:
        found[path] = MatrixAxes(rows, columns)
    else:
        found[path] = matrix_axes(remaining)
