"""Which axes of a leaf make a matrix: taken from how a function uses it."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from radazo_jax._src.directions.law import Law
from radazo_jax._src.directions.laws import Gaussian
from radazo_jax._src.directions.layout import Layout
from radazo_jax._src.directions.low_rank import LowRank, MatrixAxes, default_axes
from radazo_jax._src.perturb import rules, views


def specialize(law: Law, fun: Callable[[Any], Any], params: Any, layout: Layout) -> Law:
    """`law` with the matrices that `fun` makes of the leaves of `params`.

    The first use of a leaf decides. A product makes rows of the axes that it
    contracts and columns of those that it leaves; axes that are gone by then (a scan
    has sliced them, an index has picked from them) stack matrices.

    Args:
      law: Any law; only those of low rank have matrices.
      fun: A function of the parameters. It is traced once more.
      params: The parameters, arrays.
      layout: Their layout.

    Returns:
      The law to sample from.
    """
    if not isinstance(law, LowRank):
        return law
    law.check_where(layout)
    if given := law.given(params):
        return dataclasses.replace(law, inferred=given, dimension_numbers=None)
    found: dict[str, MatrixAxes | None] = {}

    def trace(key: jax.Array, params: Any) -> None:
        # Positions of a dense law tell for each axis of a leaf where it has gone.
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
    return dataclasses.replace(law, inferred=tuple(sorted(found.items())))


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
        for mark in view.u.marks
    ]
    remaining = [axis for axis, where in enumerate(along) if where]
    rows = tuple(axis for axis in remaining if along[axis] & contracted)
    columns = tuple(axis for axis in remaining if axis not in rows)
    if rows and columns:
        found[path] = MatrixAxes(rows, columns)
    else:
        found[path] = default_axes(remaining)
