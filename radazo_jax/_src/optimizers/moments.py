"""R-AdaZO and related methods as Optax transformations."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike, DTypeLike

from radazo_jax._src.base import checks
from radazo_jax._src.base.trees import Tree, as_arrays, at_least_float32
from radazo_jax._src.estimates.contracts import GradientTransformationExtraArgs


class ScaleByRadazoState(NamedTuple):
    """State of `scale_by_radazo`.

    Attributes:
      count: The number of updates so far: int32, shape ().
      mu: The first moment m, a tree like the parameters.
      nu: The second moment v, a tree like the parameters: real, at least float32.
    """

    # `count` is the name that Optax's states have; it hides a method of tuple.
    count: jax.Array  # type: ignore[assignment]
    mu: optax.Updates
    nu: optax.Updates


class ScaleByZoAdammState(NamedTuple):
    """State of `scale_by_zo_adamm`.

    Attributes:
      count: The number of updates so far: int32, shape ().
      mu: The first moment m, a tree like the parameters.
      nu: The second moment v, a tree like the parameters: real, at least float32.
      nu_max: The running maximum of v, like it; `()` without `amsgrad`.
    """

    # `count` is the name that Optax's states have; it hides a method of tuple.
    count: jax.Array  # type: ignore[assignment]
    mu: optax.Updates
    nu: optax.Updates
    nu_max: optax.Updates = ()


@checks.checks_names
def scale_by_radazo(
    b1: ArrayLike = 0.9,
    b2: ArrayLike = 0.99,
    eps_root: ArrayLike = 1e-8,
    initial_accumulator_value: ArrayLike = 0.0,
    bias_correction: bool = False,
    mu_dtype: DTypeLike | None = None,
) -> GradientTransformationExtraArgs:
    """Rescales updates by R-AdaZO: a second moment of the *first moment*.

    A zeroth-order gradient is mostly noise, and the first moment averages much of it
    away. Adam scales by the size of the raw gradient g_t, and R-AdaZO by the size of
    this average:

        m_t ← β₁ m_{t−1} + (1 − β₁) g_t
        v_t ← β₂ v_{t−1} + (1 − β₂) m_t²
        u_t ← m_t / √(v_t + ζ)

    With `bias_correction=False` (the paper's form) and v₀ = 0 the first update is
    ±1/√(1−β₂) in every coordinate, ±10 at the defaults. A positive
    `initial_accumulator_value`, which the paper's proofs ask for, or
    `bias_correction=True` avoids that. The correction feeds the *debiased* first moment
    m̂_t = m_t/(1−β₁ᵗ) to the second and debiases that in turn, so that the first
    update is ±1. (Debiasing only the outputs, as Adam does, would make it ±1/(1−β₁),
    since v₁ would hold (1−β₁)² g².)

    Args:
      b1: Decay rate β₁ of the first moment, in [0, 1).
      b2: Decay rate β₂ of the second moment, in [0, 1).
      eps_root: The constant ζ ≥ 0, inside the root, in units of the
        squared gradient. With 0, a coordinate whose gradients were all zero is NaN.
      initial_accumulator_value: v₀ ≥ 0, the same for all coordinates.
      bias_correction: Whether to debias both moments.
      mu_dtype: Real floating dtype in which the first moment is *stored*; all
        arithmetic stays at least float32. None stores it as it is computed: in the
        parameters' dtype, float32 if that is narrower. The first moment of complex
        parameters always has their dtype. Name it by a string under
        `optax.inject_hyperparams`, which takes callables for schedules.

    Returns:
      An `optax.GradientTransformationExtraArgs`, whose updates have the shapes
      and dtypes of the incoming ones and whose state is a
      `ScaleByRadazoState`. Unknown extra arguments are ignored.

    Raises:
      ValueError: If a hyperparameter is out of its range; by the update, if the
        updates have another tree structure or other shapes than the parameters the
        state was initialized with.
      TypeError: If a hyperparameter is not a real number or `mu_dtype` not a real
        floating dtype.

    Examples:
      >>> import jax.numpy as jnp
      >>> import radazo_jax as zo
      >>> tx = zo.scale_by_radazo(eps_root=0.0)
      >>> params = jnp.array([1.0, 2.0])
      >>> state = tx.init(params)
      >>> updates, state = tx.update(jnp.array([0.3, -4.0]), state, params)
      >>> print([round(float(u), 3) for u in updates])
      [10.0, -10.0]

    References:
      Shu et al., Refining Adaptive Zeroth-Order Optimization at Ease, ICML 2025,
      algorithm 2.
    """
    given = Hyperparameters(
        b1, b2, eps_root, initial_accumulator_value, bias_correction
    )

    def update(
        g: optax.Updates, state: ScaleByRadazoState, count: jax.Array
    ) -> tuple[optax.Updates, ScaleByRadazoState]:
        m = averaged(g, state.mu, b1)
        m_hat = given.debiased(m, b1, count)
        v = averaged_squares(m_hat, state.nu, b2)
        v_hat = given.debiased(v, b2, count)
        return divided(m_hat, v_hat, eps_root), ScaleByRadazoState(count, m, v)

    return _transformation(ScaleByRadazoState, update, given, mu_dtype)


@checks.checks_names
def scale_by_zo_adamm(
    b1: ArrayLike = 0.9,
    b2: ArrayLike = 0.99,
    eps_root: ArrayLike = 1e-8,
    initial_accumulator_value: ArrayLike = 0.0,
    bias_correction: bool = False,
    mu_dtype: DTypeLike | None = None,
    amsgrad: bool = False,
) -> GradientTransformationExtraArgs:
    """Rescales updates by ZO-AdaMM, in the form R-AdaZO is compared with.

        m_t ← β₁ m_{t−1} + (1 − β₁) g_t
        v_t ← β₂ v_{t−1} + (1 − β₂) g_t²
        u_t ← m_t / √(v_t + ζ)

    This is Algorithm 1 of the R-AdaZO paper. The original ZO-AdaMM (Chen et al.,
    2019) divides by the running maximum of v_t, as AMSGrad does: with `amsgrad=True`.
    `keep_params_in` has its projected steps.

    Args:
      b1: Decay rate β₁ of the first moment, in [0, 1).
      b2: Decay rate β₂ of the second moment, in [0, 1).
      eps_root: The constant ζ ≥ 0, inside the root, in units of the
        squared gradient.
      initial_accumulator_value: v₀ ≥ 0, the same for all coordinates.
      bias_correction: Whether to debias both moments, as Adam does:
        m̂_t/√(v̂_t + ζ).
      mu_dtype: Real floating dtype in which the first moment is stored, as in
        `scale_by_radazo`.
      amsgrad: Whether to divide by the root of max(v_1, …, v_t) + ζ, of the debiased v
        with `bias_correction`. Its start is v₀. This takes the memory of one more
        moment.

    Returns:
      An `optax.GradientTransformationExtraArgs` with the state
      `ScaleByZoAdammState`, in all else like `scale_by_radazo`.

    Raises:
      ValueError: As `scale_by_radazo` does.
      TypeError: As `scale_by_radazo` does.

    Examples:
      >>> import jax.numpy as jnp
      >>> import radazo_jax as zo
      >>> tx = zo.scale_by_zo_adamm(eps_root=0.0)
      >>> params = jnp.array([1.0, 2.0])
      >>> state = tx.init(params)
      >>> updates, state = tx.update(jnp.array([0.3, -4.0]), state, params)
      >>> print([round(float(u), 3) for u in updates])
      [1.0, -1.0]

    References:
      Shu et al., Refining Adaptive Zeroth-Order Optimization at Ease, ICML 2025,
      algorithm 1.

      Chen et al., ZO-AdaMM: Zeroth-Order Adaptive Momentum Method for Black-Box
      Optimization, NeurIPS 2019.
    """
    given = Hyperparameters(
        b1, b2, eps_root, initial_accumulator_value, bias_correction
    )

    def update(
        g: optax.Updates, state: ScaleByZoAdammState, count: jax.Array
    ) -> tuple[optax.Updates, ScaleByZoAdammState]:
        m = averaged(g, state.mu, b1)
        m_hat = given.debiased(m, b1, count)
        v = averaged_squares(g, state.nu, b2)
        v_hat = given.debiased(v, b2, count)
        if not amsgrad:
            return divided(m_hat, v_hat, eps_root), ScaleByZoAdammState(count, m, v)
        largest = jax.tree.map(jnp.maximum, state.nu_max, v_hat)
        after = ScaleByZoAdammState(count, m, v, largest)
        return divided(m_hat, largest, eps_root), after

    second = ("nu", "nu_max") if amsgrad else ("nu",)
    return _transformation(ScaleByZoAdammState, update, given, mu_dtype, second)


class Hyperparameters(NamedTuple):
    """The hyperparameters of `scale_by_radazo`, of all optimizers with two moments."""

    b1: ArrayLike
    b2: ArrayLike
    eps_root: ArrayLike
    initial_accumulator_value: ArrayLike
    bias_correction: bool

    def check(self) -> None:
        """Raises if one is out of its range."""
        checks.check_unit_interval("b1", self.b1)
        checks.check_unit_interval("b2", self.b2)
        checks.check_non_negative("eps_root", self.eps_root)
        start = self.initial_accumulator_value
        checks.check_non_negative("initial_accumulator_value", start)

    def debiased(
        self, moments: optax.Updates, decay: ArrayLike, count: jax.Array
    ) -> optax.Updates:
        """Returns the moments, debiased if they should be."""
        return _debias(moments, decay, count) if self.bias_correction else moments


def averaged(
    xs: optax.Updates, moments: optax.Updates, decay: ArrayLike
) -> optax.Updates:
    """Returns the averages after another x, in its dtype."""

    def average(x: jax.Array, moment: jax.Array) -> jax.Array:
        moment = moment.astype(x.dtype)
        return optax.tree.update_moment(x, moment, scalar(decay, x.dtype), 1)

    return jax.tree.map(average, xs, moments)


def averaged_squares(
    xs: optax.Updates, moments: optax.Updates, decay: ArrayLike
) -> optax.Updates:
    """Returns the averages of |x|² after another x."""

    def average(x: jax.Array, moment: jax.Array) -> jax.Array:
        rate = scalar(decay, moment.dtype)
        return optax.tree.update_moment_per_elem_norm(x, moment, rate, 2)

    return jax.tree.map(average, xs, moments)


def divided(m: optax.Updates, v: optax.Updates, eps_root: ArrayLike) -> optax.Updates:
    """Returns m / √(v + ζ)."""

    def scaled(m: jax.Array, v: jax.Array) -> jax.Array:
        return jax.lax.rsqrt(v + scalar(eps_root, v.dtype)).astype(m.dtype) * m

    return jax.tree.map(scaled, m, v)


def _transformation(
    state_type: type,
    update: Callable[[Tree, Tree, jax.Array], tuple[Tree, Tree]],
    given: Hyperparameters,
    mu_dtype: DTypeLike | None,
    second: tuple[str, ...] = ("nu",),
) -> GradientTransformationExtraArgs:
    """Returns an Optax transformation whose arithmetic is at least float32.

    Args:
      state_type: The type of the states.
      update: `update(g, state, count)` returns the scaled updates and the state after
        gradients of at least the precision of v.
      given: The hyperparameters.
      mu_dtype: The dtype in which m is stored.
      second: The fields of the state that begin at v₀.
    """
    given.check()
    stored = _check_mu_dtype(mu_dtype)

    def init_fn(params: optax.Params) -> Tree:
        # Converted before it fills: filling with another dtype is a promotion.
        def init_nu(p: Tree) -> jax.Array:
            dtype = jnp.finfo(_moment_dtype(p)).dtype
            start = scalar(given.initial_accumulator_value, dtype)
            return jnp.full_like(p, start, dtype)

        def init_mu(p: Tree) -> jax.Array:
            return jnp.zeros_like(p, dtype=_stored_dtype(p, stored))

        return state_type(
            count=jnp.zeros([], jnp.int32),
            mu=jax.tree.map(init_mu, params),
            **{name: jax.tree.map(init_nu, params) for name in second},
        )

    def update_fn(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        **extra_args: Tree,
    ) -> tuple[optax.Updates, Tree]:
        # Neither is needed: the state knows the layout, and extra arguments are for
        # the other members of a chain.
        del params, extra_args
        _check_layout(updates, state.mu)
        g = jax.tree.map(_widen, updates, state.mu, state.nu)
        scaled, after = update(g, state, optax.safe_increment(state.count))
        after = jax.tree.map(_cast_like, after, state)
        return jax.tree.map(_cast_like, scaled, updates), after

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def with_float32_moments(
    inner: optax.GradientTransformation,
) -> GradientTransformationExtraArgs:
    """Wraps a transformation so that its moments are at least float32.

    Args:
      inner: A transformation whose state takes its dtypes from the parameters and
        whose arithmetic takes its dtype from the state and the updates.

    Returns:
      The transformation, initialized with and given float32 instead of narrower
      dtypes. Its updates have the dtypes of the incoming ones.
    """
    inner = optax.with_extra_args_support(inner)

    def init_fn(params: optax.Params) -> optax.OptState:
        return inner.init(
            jax.tree.map(lambda p: jnp.zeros_like(p, _moment_dtype(p)), params)
        )

    def update_fn(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        **extra_args: Tree,
    ) -> tuple[optax.Updates, optax.OptState]:
        _check_layout(jax.eval_shape(inner.init, updates), state)
        updates = as_arrays(updates)
        wide = jax.tree.map(lambda g: g.astype(_moment_dtype(g)), updates)
        scaled, state = inner.update(wide, state, params, **extra_args)
        scaled = jax.tree.map(lambda s, g: s.astype(g.dtype), scaled, updates)
        return scaled, state

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


@functools.partial(jax.jit, inline=True)
def _debias(
    moments: optax.Updates, decay: ArrayLike, count: jax.Array
) -> optax.Updates:
    """Divides moments that started from zero by the sum of their weights.

    As `optax.tree.bias_correction` does, but able to run under strict dtype
    promotion: that one leaves an integer and a float to be promoted. There is one
    weight for all leaves, as there, since XLA multiplies by the inverse of a shared
    divisor: only so are the two equal to the last bit.
    """
    decay = jnp.asarray(decay)
    weight = 1 - jax.lax.pow(decay.astype(_moment_dtype(decay)), count)
    return jax.tree.map(lambda moment: moment / weight.astype(moment.dtype), moments)


def _check_mu_dtype(mu_dtype: DTypeLike | None) -> np.dtype | None:
    """Returns the dtype asked for, canonical, or raises."""
    if mu_dtype is None:
        return None
    dtype = jax.dtypes.canonicalize_dtype(mu_dtype)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(
            "mu_dtype must be a real floating dtype or None, such as 'bfloat16'; "
            f"got {mu_dtype!r}."
        )
    return dtype


def _check_layout(updates: optax.Updates, mu: optax.Updates) -> None:
    """Raises if updates and state were laid out for different parameters."""
    got: Any = jax.tree.structure(updates)
    expected: Any = jax.tree.structure(mu)
    if got != expected:
        raise ValueError(
            "updates must have the tree structure of the parameters that the state "
            f"was initialized with, {expected}; got {got}. Call init again after "
            "changing the parameters."
        )
    leaves, moments = jax.tree_util.tree_leaves_with_path(updates), jax.tree.leaves(mu)
    for (path, leaf), m in zip(leaves, moments, strict=True):
        if jnp.shape(leaf) != jnp.shape(m):
            raise ValueError(
                f"updates{jax.tree_util.keystr(path)} must have the shape of the "
                f"parameter that the state was initialized with, {jnp.shape(m)}; got "
                f"{jnp.shape(leaf)}. Call init again after changing the parameters."
            )


def _moment_dtype(array: Tree) -> np.dtype:
    """Returns the dtype of a leaf's moments: its own, but at least float32."""
    dtype = jnp.dtype(
        array.dtype if hasattr(array, "dtype") else jnp.result_type(array)
    )
    if not jnp.issubdtype(dtype, jnp.inexact):
        return jnp.dtype(jnp.float32)
    return at_least_float32(dtype)


def _stored_dtype(array: Tree, mu_dtype: np.dtype | None) -> np.dtype:
    """Returns the dtype of a leaf's stored first moment."""
    dtype = _moment_dtype(array)
    if mu_dtype is None or jnp.issubdtype(dtype, jnp.complexfloating):
        return dtype
    return mu_dtype


def _widen(update: Tree, mu: jax.Array, nu: jax.Array) -> jax.Array:
    """Returns an update in the precision of nu, complex if mu or the update is."""
    update = jnp.asarray(update)
    if not (jnp.iscomplexobj(update) or jnp.iscomplexobj(mu)):
        return update.astype(nu.dtype)
    wide = jnp.complex128 if nu.dtype == jnp.float64 else jnp.complex64
    return update.astype(wide)


def _cast_like(array: jax.Array, other: Tree) -> jax.Array:
    """Returns an array in the dtype of another; of complex ones the real part."""
    dtype = jnp.asarray(other).dtype
    if not jnp.issubdtype(dtype, jnp.complexfloating):
        array = jnp.real(array)
    return array.astype(dtype)


def scalar(value: ArrayLike, dtype: np.dtype) -> jax.Array | float:
    """Returns a hyperparameter in the dtype of the arrays that it meets.

    Python numbers are left alone: JAX gives them the dtype of the array, after
    expressions such as `1 - b2` were evaluated in double precision.
    """
    if isinstance(value, (np.generic, np.ndarray)):
        return float(value)
    if isinstance(value, (int, float)):
        return value
    return jnp.asarray(value).astype(dtype)
