"""The axes of a leaf that form a matrix, inferred from a function's use of it."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from radazo_jax._src.directions.distribution import Distribution
from radazo_jax._src.directions.layout import Layout, MatrixAxes, matrix_axes
from radazo_jax._src.directions.low_rank import LowRank
from radazo_jax._src.directions.normal import Gaussian
from radazo_jax._src.perturb import rules, views


def annotate(
    layout: Layout,
    distribution: Distribution,
    fun: Callable[[optax.Params], Any] | None,
    params: optax.Params,
) -> Layout:
    """The layout with the axes of the matrices that `fun` makes of the leaves.

    The first use of a leaf decides. A product makes rows of the axes that it
    contracts and columns of those that it leaves; axes that are gone by then (a scan
    has sliced them, an index has picked from them) stack matrices.

    Args:
      layout: The layout of the parameters.
      distribution: The distribution of the directions. Only `low_rank` reads the axes;
        for other distributions nothing is traced.
      fun: A function of the parameters, traced once more; `None` if JAX cannot.
      params: The parameters, arrays.
    """
    layout = distribution._annotate(layout, params)
    if (
        not isinstance(distribution, LowRank)
        or distribution.given is not None
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
        rules.evaluate(jaxpr, given)

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
