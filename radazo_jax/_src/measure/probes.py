"""Probes before a run: losses along random directions, by one compiled loop."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from radazo_jax._src.base import checks, programs, trees, xla
from radazo_jax._src.directions import storage
from radazo_jax._src.directions.distribution import Distribution
from radazo_jax._src.estimates.contracts import Evaluator, Points, check_evaluator
from radazo_jax._src.estimates.differences import check_distribution
from radazo_jax._src.estimates.gradients import values_at
from radazo_jax._src.estimates.vectorized import Vectorized, vectorized
from radazo_jax._src.perturb import transform
from radazo_jax._src.steps import box, step
from radazo_jax._src.steps.box import Bounds

# The most directions and distances of a call, whose losses share a program.
_MOST = 20, 16


class Probe(NamedTuple):
    """A loss on minibatches within bounds, evaluated along random directions."""

    fun: Any
    sample: Any
    distribution: Distribution
    evaluator: Evaluator
    bounds: Bounds | None = None

    def checked(self, params: optax.Params, key: jax.Array) -> "Probe":
        """The same with its functions as they are now, and checked arguments."""
        check_distribution(self.distribution)
        check_evaluator(self.evaluator)
        if programs.are_disabled():
            return self
        fun, sample = step.traced_functions(self.fun, self.sample, params, key)
        return self._replace(fun=fun, sample=sample)

    def loss_of(self, key: jax.Array, number: jax.Array) -> Callable[[Any], Any]:
        """The loss on a minibatch, by its number."""
        batch: tuple[Any, ...] = ()
        if self.sample is not None:
            batch = (self.sample(step.key_of(key, number, step.BATCH)),)
        return lambda params: self.fun(box.project(self.bounds, params), *batch)

    def losses(
        self,
        params: optax.Params,
        key: jax.Array,
        num_directions: int,
        distances: Sequence[float] | np.ndarray,
    ) -> np.ndarray:
        """The losses along directions, each on a minibatch of its own.

        Args:
          params: θ.
          key: A typed key. Calls with the same key have the same directions and
            minibatches.
          num_directions: The number of directions, at most 20.
          distances: The distances from θ along each direction, at most 16.

        Returns:
          The losses: float64, [num_directions, distances].
        """
        given = np.asarray(distances, np.float32)
        run = self
        if isinstance(self.evaluator, Vectorized):
            # In turn whatever the batch size, so that the loss is compiled once.
            given = np.resize(given, _MOST[1])
            run = self._replace(evaluator=vectorized(batch_size=1))
        counts = [
            trees.as_scalar(n, np.int32) for n in (num_directions, len(distances))
        ]
        args = params, key, jnp.asarray(given), *counts
        found = np.asarray(programs.of(_losses, run, *args)(*args), np.float64)
        return found[:num_directions, : len(distances)]


def _losses(
    probe: Probe,
    params: optax.Params,
    key: jax.Array,
    distances: jax.Array,
    num_directions: jax.Array,
    num_distances: jax.Array,
) -> jax.Array:
    """The losses, with zeros at the end: [20, distances]."""
    distances = distances.astype(trees.widest(params))

    def along(number: jax.Array, found: jax.Array) -> jax.Array:
        of = number.astype(jnp.uint32)
        loss = probe.loss_of(key, of)
        own, distribution = step.key_of(key, of, step.DIRECTIONS), probe.distribution
        layout = transform.layout_for(distribution, loss, params)
        directions = storage.sample_one(distribution, own, layout)
        if not isinstance(probe.evaluator, Vectorized):
            points = Points(directions, distances[None], False, layout)
            points = probe.evaluator.cache(points)
            values, _ = values_at(probe.evaluator, loss, params, points)
            return found.at[number].set(values.along[0].astype(found.dtype))
        scalar = checks.checked_loss(loss, False)
        direction = jax.tree.map(lambda x: x[0], directions)

        def at(i: jax.Array, found: jax.Array) -> jax.Array:
            # Tied to the loop, ahead of which unstored elements would be drawn.
            u = xla.tie(direction, i) if direction.cached is None else direction
            value, _ = transform.evaluate(scalar, params, layout, u, distances[i])
            return found.at[number, i].set(value.astype(found.dtype))

        return lax.fori_loop(0, num_distances, at, found)

    widest = jax.dtypes.canonicalize_dtype(np.float64)
    found = jnp.zeros((_MOST[0], len(distances)), widest)
    return lax.fori_loop(0, num_directions, along, found)


_norm = jax.jit(trees.norm, static_argnums=1)


def root_mean_square(params: optax.Params) -> float:
    """The root mean square of the elements of all leaves."""
    total = float(_norm(params, trees.widest(params)))
    return total / max(trees.size(params), 1) ** 0.5
