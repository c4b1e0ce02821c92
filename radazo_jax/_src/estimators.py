"""Estimators: function values in, value and gradient out."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import Partial

from radazo_jax._src import axes, checks, counter, fusion, parallel, sampling, trees
from radazo_jax._src import perturb as perturb_lib
from radazo_jax._src.directions import Direction, Law
from radazo_jax._src.kept import Kept
from radazo_jax._src.laws import sphere
from radazo_jax._src.parallel import AxisName


class EstimateFn(Protocol):
    """The `estimate` of a `GradientEstimator`."""

    def __call__(
        self,
        fun: Callable[[Any], Any],
        key: jax.typing.ArrayLike,
        params: Any,
        state: Any,
        *,
        has_aux: bool = False,
    ) -> tuple[tuple[Any, Any], Any]:
        """Returns `((value, gradient), state)`.

        With `has_aux`, `fun` returns `(loss, aux)` and `value` is
        `(value, aux)`.
        """
        ...


class GradientEstimator(NamedTuple):
    """A pair of pure functions that estimates gradients from function values.

    Attributes:
      init: `init(params) -> state`, the estimator's state; `()` where it has none.
      estimate: `estimate(fun, key, params, state) -> ((value, gradient), state)`;
        `fun(params)` returns a real scalar, `key` is consumed, `value` is
        float32 (float64 where the loss is), `gradient` is a tree like `params`.
    """

    init: Callable[[Any], Any]
    estimate: EstimateFn


def forward_difference(
    law: Law = sphere(),
    num_directions: int = 10,
    smoothing: float = 5e-3,
    batch_size: int | None = None,
    axis_name: AxisName | None = None,
) -> GradientEstimator:
    """The forward-difference estimator of the paper, of K + 1 evaluations.

        ∇̂f(θ; ξ) = c/K Σₖ (f(θ + μ uₖ; ξ) − f(θ; ξ)) / μ · uₖ

    with c the factor of the law, d for the sphere. It is an unbiased estimate of the
    gradient of the smoothed function, up to rounding. The value is f(θ; ξ).

    Args:
      law: The law of the directions u.
      num_directions: K, the number of directions per estimate.
      smoothing: μ, how far from θ along u the function is evaluated; a positive
        number in the units of the parameters.
      batch_size: How many directions are evaluated together, as in `jax.lax.map`.
        `None` evaluates all of them under one `vmap`; 1 evaluates one at a time, in the
        memory of a single evaluation. The estimate is the same up to rounding.
      axis_name: The mesh axis (or axes) over which the evaluations are spread, under
        `jax.set_mesh`. Each device evaluates its share of them, up to `batch_size`
        together. Only the losses are sent, and every device computes the same gradient
        from them. Parameters and minibatch may be sharded over other axes.

    Returns:
      The estimator. It has no state.

    Raises:
      TypeError, ValueError: If an argument is not as described.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> import radazo_jax as zo
      >>> estimator = zo.forward_difference(num_directions=1000, smoothing=1e-3)
      >>> params = jnp.array([1.0, -2.0])
      >>> (value, gradient), _ = estimator.estimate(
      ...     lambda p: jnp.sum(p**2), jax.random.key(0), params, estimator.init(params)
      ... )
      >>> float(value)
      5.0
      >>> bool(jnp.allclose(gradient, 2 * params, rtol=0.1))
      True

    References:
      Shu et al., Refining Adaptive Zeroth-Order Optimization at Ease, ICML 2025,
      eq. (2).
    """
    _check_options(law, num_directions, smoothing, batch_size, axis_name)

    def estimate(
        fun: Callable[[Any], Any],
        key: jax.typing.ArrayLike,
        params: Any,
        state: Any,
        *,
        has_aux: bool = False,
    ) -> tuple[tuple[Any, Any], Any]:
        params = checks.as_params(params)
        loss, sampled = _prepare(
            law, fun, has_aux, key, params, num_directions, batch_size
        )
        if axis_name is None:
            value, aux, values = _forward_values(
                loss, has_aux, params, sampled, smoothing, batch_size
            )
        else:
            # θ is one of the points, but where its aux is wanted on all devices.
            base = () if has_aux else (0,)
            indices = np.array([*base, *range(num_directions)])
            scales = jnp.full(len(indices), smoothing).at[: len(base)].set(0)
            values = parallel.spread(
                fun, has_aux, params, sampled, indices, scales, axis_name, batch_size
            )
            value, aux = loss(params) if has_aux else (values[0], None)
            values = values[len(base) :]
        differences = values - value
        coefficients = differences * (law.factor(params) / num_directions) / smoothing
        gradient = sampling.combine(coefficients, sampled, params)
        return ((value, aux) if has_aux else value, gradient), state

    return GradientEstimator(_no_state, estimate)


def central_difference(
    law: Law = sphere(),
    num_directions: int = 10,
    smoothing: float = 5e-3,
    batch_size: int | None = None,
    axis_name: AxisName | None = None,
) -> GradientEstimator:
    """The central-difference estimator, of 2K evaluations.

        ∇̂f(θ; ξ) = c/K Σₖ (f(θ + μ uₖ; ξ) − f(θ − μ uₖ; ξ)) / 2μ · uₖ

    with c the factor of the law, d for the sphere. Its expectation is that of the
    forward difference, and the curvature of f adds nothing to its variance. The value
    is the mean of the 2K evaluations, which differs from f(θ; ξ) by O(μ²); the
    auxiliary output, where there is one, is that at θ + μu₁.

    Args:
      law: The law of the directions u.
      num_directions: K, the number of directions per estimate.
      smoothing: μ, how far from θ along u and -u the function is evaluated; a positive
        number in the units of the parameters.
      batch_size: How many directions (two evaluations each) are evaluated together, as
        in `jax.lax.map`. `None` evaluates all of them under one `vmap`; 1 evaluates one
        at a time. The estimate is the same up to rounding.
      axis_name: The mesh axis (or axes) over which the 2K evaluations are spread, as
        in `forward_difference`.

    Returns:
      The estimator. It has no state.

    Raises:
      TypeError, ValueError: If an argument is not as described.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> import radazo_jax as zo
      >>> estimator = zo.central_difference(zo.coordinate(), num_directions=100)
      >>> params = jnp.array([1.0, -2.0])
      >>> (value, gradient), _ = estimator.estimate(
      ...     lambda p: jnp.sum(p**2), jax.random.key(0), params, estimator.init(params)
      ... )
      >>> bool(jnp.allclose(gradient, 2 * params, rtol=0.3))
      True

    References:
      Malladi et al., Fine-Tuning Language Models with Just Forward Passes, 2023,
      definition 1, with the law Gaussian, <https://arxiv.org/abs/2305.17333>.
    """
    _check_options(law, num_directions, smoothing, batch_size, axis_name)

    def estimate(
        fun: Callable[[Any], Any],
        key: jax.typing.ArrayLike,
        params: Any,
        state: Any,
        *,
        has_aux: bool = False,
    ) -> tuple[tuple[Any, Any], Any]:
        params = checks.as_params(params)
        loss, sampled = _prepare(
            law, fun, has_aux, key, params, num_directions, batch_size
        )
        if axis_name is None:
            above, below, aux = _central_values(
                loss, params, sampled, smoothing, batch_size
            )
        else:
            indices = np.tile(np.arange(num_directions), 2)
            scales = jnp.repeat(jnp.array([1.0, -1.0]), num_directions) * smoothing
            values = parallel.spread(
                fun,
                has_aux,
                params,
                sampled,
                indices,
                scales,
                axis_name,
                batch_size,
            )
            above, below = jnp.split(values, 2)
            if has_aux:  # Once more, on all devices, for that is where it is wanted.
                first = jax.tree.map(lambda x: x[0], sampled)
                aux = perturb_lib.perturb(loss)(params, first, smoothing)[1]
        value = (jnp.mean(above) + jnp.mean(below)) / 2
        coefficients = (above - below) * (law.factor(params) / num_directions)
        gradient = sampling.combine(coefficients / (2 * smoothing), sampled, params)
        return ((value, aux) if has_aux else value, gradient), state

    return GradientEstimator(_no_state, estimate)


def value_and_grad(
    fun: Callable[..., Any], estimator: GradientEstimator, has_aux: bool = False
) -> Callable[..., tuple[Any, Any]]:
    """Estimates value and gradient where `jax.value_and_grad` would differentiate.

    Args:
      fun: A function of the parameters, a tree of floating-point arrays, and of any
        other arguments; it returns a real scalar, or `(scalar, aux)` with
        `has_aux`. It need not be differentiable.
      estimator: An estimator without state, such as `forward_difference()`.
      has_aux: Whether `fun` returns a pair whose second element is auxiliary.

    Returns:
      A function `(key, params, *args, **kwargs) -> (value, gradient)`, with
      `(value, aux)` for the value if `has_aux`. It consumes its key. All
      evaluations get the same `args` and `kwargs`: the same minibatch, the same
      dropout key.

    Raises:
      TypeError: If `estimator` is not a `GradientEstimator`, or, when called, if
        the loss is not real or the parameters are not floating-point.
      ValueError: If, when called, the loss is not a scalar, the tree of parameters is
        empty, or the estimator has state (use its `estimate`).

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> import radazo_jax as zo
      >>> def loss(params, x, y):
      ...     return jnp.mean((x @ params - y) ** 2)
      >>> value_and_grad = zo.value_and_grad(loss, zo.forward_difference())
      >>> x, y = jnp.ones((4, 3)), jnp.zeros(4)
      >>> value, gradient = value_and_grad(jax.random.key(0), jnp.ones(3), x, y)
      >>> float(value), gradient.shape
      (9.0, (3,))

    References:
      Shu et al., Refining Adaptive Zeroth-Order Optimization at Ease, ICML 2025,
      eq. (2).
    """
    if not isinstance(estimator, GradientEstimator):
        raise TypeError(
            "estimator must be a GradientEstimator such as forward_difference(); got "
            f"{estimator!r}."
        )

    def estimated(
        key: jax.typing.ArrayLike, params: Any, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        state = estimator.init(params)
        if jax.tree.leaves(state):
            raise ValueError(
                "estimator has state, which value_and_grad would lose; call "
                "estimator.estimate(fun, key, params, state) and keep what it returns."
            )
        loss = Partial(_of_params, fun, args, kwargs)
        (value, gradient), _ = estimator.estimate(
            loss, key, params, state, has_aux=has_aux
        )
        return value, gradient

    return estimated


def _of_params(
    fun: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], params: Any
) -> Any:
    return fun(params, *args, **kwargs)


def _check_options(
    law: Any, num_directions: Any, smoothing: Any, batch_size: Any, axis_name: Any
) -> None:
    if not isinstance(law, Law):
        raise TypeError(f"law must be a Law such as sphere(); got {law!r}.")
    checks.check_int_at_least("num_directions", num_directions, 1)
    checks.check_positive("smoothing", smoothing)
    if batch_size is not None:
        checks.check_int_at_least("batch_size", batch_size, 1)
    if axis_name is not None:
        parallel.check_axis_name(axis_name)


def _no_state(params: Any) -> tuple[()]:
    del params
    return ()


def _prepare(
    law: Law,
    fun: Callable[[Any], Any],
    has_aux: bool,
    key: jax.typing.ArrayLike,
    params: Any,
    num_directions: int,
    batch_size: int | None,
) -> tuple[Callable[[Any], tuple[jax.Array, Any]], Direction | Kept]:
    """The loss that is evaluated, and the directions, stacked."""
    loss = checks.checked_loss(fun, has_aux)
    law = axes.specialize(law, lambda p: loss(p)[0], params)
    key = counter.as_key(key)
    return loss, sampling.sample(law, key, params, num_directions, batch_size)


def _forward_values(
    loss: Callable[[Any], tuple[jax.Array, Any]],
    has_aux: bool,
    params: Any,
    sampled: Direction | Kept,
    smoothing: float,
    batch_size: int | None,
) -> tuple[jax.Array, Any, jax.Array]:
    """f(θ), its aux, and all f(θ + μ uₖ)."""
    size = len(sampled.scale)

    def evaluate(u: Direction | Kept, scale: Any, *after: jax.Array) -> jax.Array:
        at, u = fusion.tie((params, u), *after)
        return perturb_lib.perturb(loss)(at, u, scale)[0]

    if not has_aux and sampling.shares_products(sampled, params, batch_size):
        # θ itself is the first of the batch, so that all read θ once.
        batch = jax.tree.map(lambda x: jnp.concatenate([x[:1], x]), sampled)
        scales = jnp.full(size + 1, smoothing).at[0].set(0)
        values = jax.vmap(evaluate)(batch, scales)
        return values[0], None, values[1:]
    value, aux = loss(params)
    # In turn, also with what of θ is the same for all, as rows looked up.
    after = () if sampling.together(size, batch_size) else (value,)
    values = sampling.batched_map(
        lambda u: evaluate(u, smoothing, *after), sampled, batch_size
    )
    return value, aux, values


def _central_values(
    loss: Callable[[Any], tuple[jax.Array, Any]],
    params: Any,
    sampled: Direction | Kept,
    smoothing: float,
    batch_size: int | None,
) -> tuple[jax.Array, jax.Array, Any]:
    """All f(θ + μ uₖ), all f(θ − μ uₖ), and the aux at θ + μ u₁."""
    static: list[trees.Static] = []

    def pair(direction: Direction | Kept) -> tuple[jax.Array, jax.Array, Any]:
        evaluate = functools.partial(perturb_lib.perturb(loss), params, direction)
        (above, aux), (below, _) = evaluate(smoothing), evaluate(-smoothing)
        arrays, rest = trees.partition(aux, jax.Array)
        static[:] = [rest]
        return above, below, arrays

    above, below, arrays = sampling.batched_map(pair, sampled, batch_size)
    return above, below, static[0].combine([array[0] for array in arrays])
