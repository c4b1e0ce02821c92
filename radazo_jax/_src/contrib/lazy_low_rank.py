"""Perturbations of low rank in a subspace that is kept for some steps: LOZO."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import optax

from radazo_jax import checks, estimators
from radazo_jax._src.contrib._memory import along_tree


@dataclasses.dataclass(frozen=True, repr=False)
class LazyLowRank(estimators.GradientEstimator):
    """See `lazy_low_rank`."""

    _constructor = "lazy_low_rank"

    rank: int
    period: int
    smoothing: float

    def points(
        self, draw: estimators.Draw, params: optax.Params, state: tuple[()]
    ) -> tuple[estimators.Points, tuple[()]]:
        # V depends on the period alone, so that nothing has to be kept.
        epoch = jnp.asarray(draw.step).astype(jnp.uint32) // self.period
        # Steps have keys of the run too: this one is no step's.
        of_run = jax.random.fold_in(draw.run_key, 2**31)
        of_period = jax.random.fold_in(of_run, epoch)

        def perturbation(i: int, p: jax.Array) -> jax.Array:
            own = jax.random.fold_in(draw.key, i)
            if p.ndim < 2:
                return jax.random.normal(own, p.shape, jnp.float32)
            *stacked, rows, columns = p.shape
            u = jax.random.normal(own, (*stacked, rows, self.rank), jnp.float32)
            shape = (*stacked, columns, self.rank)
            v = jax.random.normal(jax.random.fold_in(of_period, i), shape, jnp.float32)
            return jnp.einsum("...ir,...jr->...ij", u, v) / math.sqrt(self.rank)

        leaves, treedef = jax.tree.flatten(params)
        z = jax.tree.unflatten(treedef, map(perturbation, range(len(leaves)), leaves))
        scales = [self.smoothing, -self.smoothing]
        return estimators.points_along(z, scales, params), state

    def reduce(
        self,
        points: estimators.Points,
        values: estimators.Values,
        params: optax.Params,
        state: tuple[()],
    ) -> tuple[estimators.Estimate, tuple[()]]:
        return along_tree(points, values, self.smoothing, points.shift), state


@checks.checks_names
def lazy_low_rank(
    rank: int = 2, period: int = 50, smoothing: float = 1e-3
) -> estimators.GradientEstimator:
    """LOZO: perturbations U Vᵀ of low rank, with V kept for some steps.

        Z = U Vᵀ / √r,  ∇̂f(θ) = (f(θ + μ Z) − f(θ − μ Z)) / 2μ · Z

    for each matrix, the last two axes of a leaf, with standard normal U and V. U is
    drawn in each step, and V every ν steps: for ν steps, the parameters move within a
    subspace. Leaves that are no matrices have a standard normal Z. Without the lazy V,
    this is `central_difference` along `low_rank`, which needs no memory for Z.

    The paper has Z without √r, and divides the gradient by r: its μ is 1/√r of this
    one.

    Args:
      rank: r, the rank of Z, a positive integer.
      period: ν, the number of steps for which V is kept, a positive integer.
      smoothing: μ, how far from θ along Z the function is evaluated.

    Returns:
      The estimator; it has no state, since V is drawn again in each step. Z takes the
      memory of the parameters. Its value is the mean of both evaluations. If one is not
      finite, the step is skipped.

    Raises:
      TypeError: If an argument is of another type.
      ValueError: If an argument is not positive.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> import radazo_jax as zo
      >>> estimator = zo.contrib.lazy_low_rank(rank=2)
      >>> _, gradient = zo.value_and_grad(lambda x: jnp.sum(x**2), estimator)(
      ...     jax.random.key(0), jnp.ones((8, 6))
      ... )
      >>> int(jnp.linalg.matrix_rank(gradient))
      2

    References:
      Chen et al., Enhancing Zeroth-Order Fine-Tuning for Language Models with Low-Rank
      Structures, ICLR 2025, algorithm 1, <https://arxiv.org/abs/2410.07698>.
    """
    return LazyLowRank(
        checks.check_int_at_least("rank", rank, 1),
        checks.check_int_at_least("period", period, 1),
        checks.check_positive("smoothing", smoothing),
    )
