"""Estimators: function values in, value and gradient out."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from radazo_jax._src import axes, checks, counter, directions, fusion, kept
from radazo_jax._src import perturb as perturb_lib
from radazo_jax._src.directions import Direction, Factors, Law
from radazo_jax._src.kept import Kept
from radazo_jax._src.laws import sphere

# Up to this many directions taken in turn, the gradient is one expression, which
# fuses into whatever consumes it; beyond, a loop with one accumulator.
_MAX_UNROLLED = 8

# Directions that are alive together are kept from the evaluations to the gradient up
# to this many elements (64 MiB); beyond, they are drawn again.
_MAX_KEPT = 2**24

# Directions that take at most this fraction of the parameters are stored for the
# gradient, and from the evaluations on where they are all alive then.
_SMALL = 8


class EstimateFn(Protocol):
    """The ``estimate`` of a ``GradientEstimator``."""

    def __call__(
        self,
        fun: Callable[[Any], Any],
        key: jax.typing.ArrayLike,
        params: Any,
        state: Any,
        *,
        has_aux: bool = False,
    ) -> tuple[tuple[Any, Any], Any]:
        """Returns ``((value, gradient), state)``.

        With ``has_aux``, ``fun`` returns ``(loss, aux)`` and ``value`` is
        ``(value, aux)``.
        """
        ...


class GradientEstimator(NamedTuple):
    """A pair of pure functions that estimates gradients from function values.

    Attributes:
      init: ``init(params) -> state``, the estimator's state; ``()`` where it has none.
      estimate: ``estimate(fun, key, params, state) -> ((value, gradient), state)``;
        ``fun(params)`` returns a real scalar, ``key`` is consumed, ``value`` is
        float32 (float64 where the loss is), ``gradient`` is a tree like ``params``.
    """

    init: Callable[[Any], Any]
    estimate: EstimateFn


def forward_difference(
    law: Law = sphere(),
    num_directions: int = 10,
    smoothing: float = 5e-3,
    batch_size: int | None = None,
) -> GradientEstimator:
    """The forward-difference estimator of the paper, of K + 1 evaluations.

        ∇̂f(θ; ξ) = c/K Σₖ (f(θ + μ uₖ; ξ) − f(θ; ξ)) / μ · uₖ

    with c the factor of the law, d for the sphere. It is an unbiased estimate of the
    gradient of the smoothed function, up to rounding. The value is f(θ; ξ).

    Args:
      law: The law of the directions u.
      num_directions: K, how many directions an estimate takes.
      smoothing: μ, how far from θ along u the function is evaluated; a positive
        number in the units of the parameters.
      batch_size: How many directions are evaluated together, as in ``jax.lax.map``:
        ``None`` is all of them under one ``vmap``, 1 is one by one in the memory of a
        single evaluation. The estimate is the same up to rounding.

    Returns:
      The estimator. It has no state.

    Raises:
      TypeError, ValueError: If an argument is not as described.

    References:
      Shu et al., Refining Adaptive Zeroth-Order Optimization at Ease, ICML 2025,
      eq. (2).

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
    """
    _check_options(law, num_directions, smoothing, batch_size)

    def estimate(
        fun: Callable[[Any], Any],
        key: jax.typing.ArrayLike,
        params: Any,
        state: Any,
        *,
        has_aux: bool = False,
    ) -> tuple[tuple[Any, Any], Any]:
        loss, sampled = _prepare(
            law, fun, has_aux, key, params, num_directions, batch_size
        )

        def evaluate(u: Direction | Kept, scale: Any, *after: jax.Array) -> jax.Array:
            at, u = fusion.tie((params, u), *after)
            return perturb_lib.perturb(loss)(at, u, scale)[0]

        if not has_aux and _shares_products(sampled, params, batch_size):
            # θ itself is the first of the batch, so that all read θ once.
            batch = jax.tree.map(lambda x: jnp.concatenate([x[:1], x]), sampled)
            scales = jnp.full(num_directions + 1, smoothing).at[0].set(0)
            values = jax.vmap(evaluate)(batch, scales)
            value, aux, values = values[0], None, values[1:]
        else:
            value, aux = loss(params)
            # In turn, also with what of θ is the same for all, as rows looked up.
            after = () if _together(num_directions, batch_size) else (value,)
            values = _map(lambda u: evaluate(u, smoothing, *after), sampled, batch_size)
        differences = values - value
        coefficients = differences * (law.factor(params) / num_directions) / smoothing
        gradient = _combine(coefficients, sampled, params)
        return ((value, aux) if has_aux else value, gradient), state

    return GradientEstimator(_no_state, estimate)


def central_difference(
    law: Law = sphere(),
    num_directions: int = 10,
    smoothing: float = 5e-3,
    batch_size: int | None = None,
) -> GradientEstimator:
    """The central-difference estimator, of 2K evaluations.

        ∇̂f(θ; ξ) = c/K Σₖ (f(θ + μ uₖ; ξ) − f(θ − μ uₖ; ξ)) / 2μ · uₖ

    with c the factor of the law, d for the sphere. Its expectation is that of the
    forward difference, and the curvature of f adds nothing to its variance. The value
    is the mean of the 2K evaluations, which differs from f(θ; ξ) by O(μ²); the
    auxiliary output, where there is one, is that at θ + μu₁.

    Args:
      law: The law of the directions u.
      num_directions: K, how many directions an estimate takes.
      smoothing: μ, how far from θ along u and -u the function is evaluated; a positive
        number in the units of the parameters.
      batch_size: How many directions (two evaluations each) are evaluated together,
        as in ``jax.lax.map``: ``None`` is all of them under one ``vmap``, 1 is one by
        one. The estimate is the same up to rounding.

    Returns:
      The estimator. It has no state.

    Raises:
      TypeError, ValueError: If an argument is not as described.

    References:
      Malladi et al., `Fine-Tuning Language Models with Just Forward Passes
      <https://arxiv.org/abs/2305.17333>`_, 2023, definition 1, with the law Gaussian.

    >>> import jax, jax.numpy as jnp
    >>> import radazo_jax as zo
    >>> estimator = zo.central_difference(zo.coordinate(), num_directions=100)
    >>> params = jnp.array([1.0, -2.0])
    >>> (value, gradient), _ = estimator.estimate(
    ...     lambda p: jnp.sum(p**2), jax.random.key(0), params, estimator.init(params)
    ... )
    >>> bool(jnp.allclose(gradient, 2 * params, rtol=0.3))
    True
    """
    _check_options(law, num_directions, smoothing, batch_size)

    def estimate(
        fun: Callable[[Any], Any],
        key: jax.typing.ArrayLike,
        params: Any,
        state: Any,
        *,
        has_aux: bool = False,
    ) -> tuple[tuple[Any, Any], Any]:
        loss, sampled = _prepare(
            law, fun, has_aux, key, params, num_directions, batch_size
        )

        def pair(direction: Direction | Kept) -> tuple[jax.Array, jax.Array, Any]:
            evaluate = functools.partial(perturb_lib.perturb(loss), params, direction)
            (above, aux), (below, _) = evaluate(smoothing), evaluate(-smoothing)
            return above, below, aux

        above, below, aux = _map(pair, sampled, batch_size)
        value = (jnp.mean(above) + jnp.mean(below)) / 2
        coefficients = (above - below) * (law.factor(params) / num_directions)
        gradient = _combine(coefficients / (2 * smoothing), sampled, params)
        if has_aux:
            return ((value, jax.tree.map(lambda a: a[0], aux)), gradient), state
        return (value, gradient), state

    return GradientEstimator(_no_state, estimate)


def value_and_grad(
    fun: Callable[..., Any], estimator: GradientEstimator, has_aux: bool = False
) -> Callable[..., tuple[Any, Any]]:
    """Estimates value and gradient where ``jax.value_and_grad`` would differentiate.

    Args:
      fun: A function of the parameters, a tree of floating-point arrays, and of any
        other arguments; it returns a real scalar, or ``(scalar, aux)`` with
        ``has_aux``. It need not be differentiable.
      estimator: An estimator without state, such as ``forward_difference()``.
      has_aux: Whether ``fun`` returns a pair whose second element is auxiliary.

    Returns:
      A function ``(key, params, *args, **kwargs) -> (value, gradient)``, with
      ``(value, aux)`` for the value if ``has_aux``. It consumes its key. All
      evaluations get the same ``args`` and ``kwargs``: the same minibatch, the same
      dropout key.

    Raises:
      TypeError: If ``estimator`` is not a ``GradientEstimator``, or, when called, if
        the loss is not real or the parameters are not floating-point.
      ValueError: If, when called, the loss is not a scalar, the tree of parameters is
        empty, or the estimator has state (use its ``estimate``).

    References:
      Shu et al., Refining Adaptive Zeroth-Order Optimization at Ease, ICML 2025,
      eq. (2).

    >>> import jax, jax.numpy as jnp
    >>> import radazo_jax as zo
    >>> def loss(params, x, y):
    ...     return jnp.mean((x @ params - y) ** 2)
    >>> value_and_grad = zo.value_and_grad(loss, zo.forward_difference())
    >>> x, y = jnp.ones((4, 3)), jnp.zeros(4)
    >>> value, gradient = value_and_grad(jax.random.key(0), jnp.ones(3), x, y)
    >>> float(value), gradient.shape
    (9.0, (3,))
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
        (value, gradient), _ = estimator.estimate(
            lambda p: fun(p, *args, **kwargs), key, params, state, has_aux=has_aux
        )
        return value, gradient

    return estimated


def _check_options(
    law: Any, num_directions: Any, smoothing: Any, batch_size: Any
) -> None:
    if not isinstance(law, Law):
        raise TypeError(f"law must be a Law such as sphere(); got {law!r}.")
    checks.check_int_at_least("num_directions", num_directions, 1)
    checks.check_positive("smoothing", smoothing)
    if batch_size is not None:
        checks.check_int_at_least("batch_size", batch_size, 1)


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
    """The loss that is evaluated, and directions k = 0 … K-1, stacked.

    The k-th direction depends on the key and on k alone.
    """
    checks.check_params(params)
    loss = checks.checked_loss(fun, has_aux)
    law = axes.specialize(law, lambda p: loss(p)[0], params)
    keys = counter.fold_in(
        counter.as_key(key), jnp.arange(num_directions, dtype=jnp.uint32)
    )
    stored, few = _stored(law, num_directions, params)
    together = _together(num_directions, batch_size)
    # In turn, those of the others would be alive during every evaluation.
    few = few and (together or num_directions == 1)
    if few or (together and stored <= _MAX_KEPT):
        return loss, kept.keep(law, keys, params)
    return loss, _map(lambda k: law.sample(k, params), keys, batch_size)


def _stored(law: Law, num_directions: int, params: Any) -> tuple[int, bool]:
    """How many numbers make the directions, and whether those are few."""
    leaves = directions.layout(params)
    stored = num_directions * sum(law.num_stored(leaf) for leaf in leaves)
    return stored, stored * _SMALL <= directions.num_coordinates(leaves)


def _shares_products(
    sampled: Direction | Kept, params: Any, batch_size: int | None
) -> bool:
    """Whether all evaluations are products with the same parameters, but for a few."""
    if not isinstance(sampled, Kept) or not _together(len(sampled.scale), batch_size):
        return False
    sizes = [
        (jnp.size(p), d)
        for p, d in zip(jax.tree.leaves(params), sampled.draws, strict=True)
    ]
    dense = sum(size for size, draw in sizes if not isinstance(draw, Factors))
    return dense * _SMALL <= sum(size for size, _ in sizes)


def _together(num_directions: int, batch_size: int | None) -> bool:
    """Whether all directions are alive at the same time anyway."""
    return num_directions > 1 and (batch_size is None or batch_size >= num_directions)


def _map(fun: Callable[[Any], Any], xs: Any, batch_size: int | None) -> Any:
    """``jax.lax.map`` whose ``batch_size=None`` is all at once."""
    size = len(jax.tree.leaves(xs)[0])
    if _together(size, batch_size):
        return jax.vmap(fun)(xs)
    return lax.map(fun, xs, batch_size=None if batch_size in (None, 1) else batch_size)


def _combine(coefficients: jax.Array, sampled: Direction | Kept, params: Any) -> Any:
    """Σₖ coefficientsₖ uₖ, a tree like ``params``."""
    coefficients = coefficients.astype(jnp.float32)
    if isinstance(sampled, Kept):
        gradient = kept.combine(coefficients, sampled, params)
    else:
        gradient = _combine_in_turn(coefficients, sampled, params)
    return jax.tree.map(lambda g, p: g.astype(jnp.result_type(p)), gradient, params)


def _combine_in_turn(coefficients: jax.Array, sampled: Direction, params: Any) -> Any:
    # Drawn again rather than kept: without the barrier the compiler would see that it
    # has drawn these before, and keep them through the evaluations.
    coefficients, sampled = lax.optimization_barrier((coefficients, sampled))
    if _stored(sampled.law, len(coefficients), params)[1]:
        drawn = kept.keep(sampled.law, sampled.key, params)
        return kept.combine(coefficients, drawn, params)

    law, size = sampled.law, len(coefficients)
    leaves = directions.layout(params)

    def term(k: Any) -> Any:
        direction = jax.tree.map(lambda x: x[k], sampled)
        if size == 1:
            u = directions.elements(direction, params)
        else:
            # One by one: of the words of random signs, the CPU would hold all K.
            num = directions.num_coordinates(leaves)
            blocks = [
                law.block(direction, leaf, counter.block(leaf.shape), num)
                for leaf in leaves
            ]
            u = jax.tree.unflatten(jax.tree.structure(params), blocks)
        return jax.tree.map(lambda u: coefficients[k] * u, u)

    def add(k: Any, total: Any) -> Any:
        return jax.tree.map(jnp.add, total, term(k))

    total = term(0)
    if size <= _MAX_UNROLLED:
        return functools.reduce(lambda g, k: add(k, g), range(1, size), total)
    return lax.fori_loop(1, size, add, total)
