"""Flax NNX modules in, gradients out.

Examples:
  >>> import jax, jax.numpy as jnp
  >>> from flax import nnx
  >>> import radazo_jax as zo
  >>> import radazo_jax.nnx as zo_nnx
  >>> model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
  >>> optimizer = nnx.Optimizer(model, zo.radazo(1e-2), wrt=nnx.Param)
  >>> def loss_fn(model, x, y):
  ...     return jnp.mean((model(x) - y) ** 2)
  >>> value_and_grad = zo_nnx.value_and_grad(loss_fn, zo.forward_difference())
  >>> @nnx.jit
  ... def step(key, model, optimizer, x, y):
  ...     value, gradient = value_and_grad(key, model, x, y)
  ...     optimizer.update(model, gradient)
  ...     return value
  >>> value = step(
  ...     jax.random.key(0), model, optimizer, jnp.ones((4, 3)), jnp.ones((4, 1))
  ... )
"""

from collections.abc import Callable
from typing import Any

import jax
import optax
from flax import nnx

from radazo_jax._src.base import (
    Evaluator,
    GradientEstimator,
    check_estimator,
    check_evaluator,
)
from radazo_jax._src.estimators import gradients
from radazo_jax._src.evaluators.vectorized import vectorized

__all__ = ["value_and_grad", "value_fn"]


def value_and_grad(
    loss_fn: Callable[..., Any],
    estimator: GradientEstimator,
    evaluator: Evaluator = vectorized(),
    *,
    wrt: nnx.filterlib.Filter = nnx.Param,
    has_aux: bool = False,
) -> Callable[..., tuple[Any, nnx.State]]:
    """Estimates value and gradient of a module; replaces `nnx.value_and_grad`.

    All evaluations of a step start from the same model state: the same dropout mask,
    the same running statistics. The state that the first evaluation writes (counts of
    random streams, statistics, sown values) is kept. The forward difference
    evaluates θ first, and the central difference θ + μu₁.

    Args:
      loss_fn: `loss_fn(model, *args, **kwargs)` returns a real scalar, or
        `(scalar, aux)` with `has_aux`.
      estimator: An estimator without state, such as `forward_difference()`.
      evaluator: The evaluator of the points, as in `radazo_jax.value_and_grad`.
      wrt: A Flax filter for the variables to perturb; all others are fixed.
        `nnx.LoRAParam` selects the adapters of a frozen model.
      has_aux: Whether `loss_fn` returns a pair whose second element is auxiliary.

    Returns:
      A function `(key, model, *args, **kwargs) -> (value, gradient)`, with
      `(value, aux)` for the value if `has_aux`. It consumes its key and updates the
      model's state outside `wrt`. `gradient` is an `nnx.State`, as
      `nnx.Optimizer.update` takes it.

    Raises:
      TypeError: If `estimator` is not a `GradientEstimator`, or, when called, if
        the loss is not real or a variable of `wrt` is not floating-point.
      ValueError: If, when called, the loss is not a scalar, no variable of the model
        is in `wrt`, or the estimator has state.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> from flax import nnx
      >>> import radazo_jax as zo
      >>> import radazo_jax.nnx as zo_nnx
      >>> model = nnx.LoRA(
      ...     3, 2, 1, base_module=nnx.Linear(3, 1, rngs=nnx.Rngs(0)), rngs=nnx.Rngs(1)
      ... )
      >>> value_and_grad = zo_nnx.value_and_grad(
      ...     lambda model, x: jnp.mean(model(x) ** 2),
      ...     zo.central_difference(),
      ...     wrt=nnx.LoRAParam,
      ... )
      >>> value, gradient = value_and_grad(jax.random.key(0), model, jnp.ones((4, 3)))
      >>> jax.tree.map(jnp.shape, nnx.to_pure_dict(gradient))
      {'lora_a': (3, 2), 'lora_b': (2, 1)}

    References:
      Shu et al., Refining Adaptive Zeroth-Order Optimization at Ease, ICML 2025,
      eq. (2).
    """
    _check_loss_fn(loss_fn)

    def estimated(
        key: jax.typing.ArrayLike | None = None,
        model: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Any, nnx.State]:
        key = gradients.key_first(key, model, "model")
        graphdef, *arguments = *_split(model, wrt), args, kwargs

        def loss(
            params: nnx.State, rest: nnx.State, args: Any, kwargs: Any
        ) -> tuple[jax.Array, tuple[Any, nnx.State]]:
            evaluated = nnx.merge(graphdef, params, rest, copy=True)
            output = loss_fn(evaluated, *args, **kwargs)
            value, aux = output if has_aux else (output, None)
            return value, (aux, _written(evaluated, wrt, rest))

        if not has_aux and not _writes(loss, arguments):
            # Nothing but values to keep track of, which estimators make use of.
            estimate = gradients.value_and_grad(
                lambda *a: loss(*a)[0], estimator, evaluator
            )
            return estimate(key, *arguments)
        estimate = gradients.value_and_grad(loss, estimator, evaluator, has_aux=True)
        (value, (aux, written)), gradient = estimate(key, *arguments)
        nnx.update(model, written)
        return ((value, aux) if has_aux else value), gradient

    check_estimator(estimator)
    check_evaluator(evaluator)
    return estimated


def value_fn(
    loss_fn: Callable[[Any], Any],
    model: Any,
    wrt: nnx.filterlib.Filter = nnx.Param,
) -> Callable[[Any], jax.Array]:
    """The loss as a function of the parameters, as `estimate_gradient` takes it.

    The function always evaluates from the model state at the time of this call. The
    model itself is updated as by one evaluation at its own parameters, so that its next
    dropout mask differs. Under `jit` only what the new state depends on is computed:
    nothing, if only random streams advance.

    Args:
      loss_fn: `loss_fn(model)` returns a real scalar.
      model: The module. Its state outside `wrt` is updated.
      wrt: A Flax filter for the variables that the function takes.

    Returns:
      A function from the variables in `wrt`, an `nnx.State` or its pure tree, to the
      loss.

    Raises:
      TypeError: If `loss_fn` is not callable.
      ValueError: If no variable of the model is in `wrt`.

    Examples:
      >>> import jax, jax.numpy as jnp, optax
      >>> from flax import nnx
      >>> import radazo_jax as zo
      >>> import radazo_jax.nnx as zo_nnx
      >>> model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
      >>> estimate = zo.estimate_gradient(zo.forward_difference(), key=0)
      >>> tx = optax.chain(estimate, zo.radazo(1e-2))
      >>> optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
      >>> @nnx.jit
      ... def step(model, optimizer, x, y):
      ...     loss = zo_nnx.value_fn(lambda model: jnp.mean((model(x) - y) ** 2), model)
      ...     params = nnx.state(model, nnx.Param)
      ...     optimizer.update(model, params, value_fn=loss)
      >>> step(model, optimizer, jnp.ones((4, 3)), jnp.ones((4, 1)))

    References:
      `optax.GradientTransformationExtraArgs`, the argument `value_fn`.
    """
    _check_loss_fn(loss_fn)
    graphdef, params, rest = _split(model, wrt)
    evaluated = nnx.merge(graphdef, params, rest, copy=True)
    loss_fn(evaluated)
    nnx.update(model, _written(evaluated, wrt, rest))

    def loss(params: optax.Params) -> jax.Array:
        return loss_fn(nnx.merge(graphdef, params, rest, copy=True))

    return loss


def _check_loss_fn(loss_fn: Any) -> None:
    if not callable(loss_fn):
        raise TypeError(f"loss_fn must be a function of the model; got {loss_fn!r}.")


def _split(
    model: Any, wrt: nnx.filterlib.Filter
) -> tuple[nnx.GraphDef[Any], nnx.State, nnx.State]:
    graphdef, state = nnx.split(model)
    params, rest = nnx.split_state(state, wrt, ...)
    if not jax.tree.leaves(params):
        raise ValueError(
            f"wrt must match variables of the model; {wrt!r} matches none of "
            f"{type(model).__name__}."
        )
    # A copy, because the model continues to write to its own variables.
    return graphdef, params, jax.tree.map(lambda x: x, rest)


def _written(model: Any, wrt: nnx.filterlib.Filter, before: nnx.State) -> nnx.State:
    """Variables outside `wrt` that `loss_fn` replaced."""
    _, after = nnx.split_state(nnx.state(model), wrt, ...)
    old = dict(nnx.to_flat_state(before))
    return nnx.from_flat_state(
        (path, variable)
        for path, variable in nnx.to_flat_state(after)
        if path not in old or variable.get_raw_value() is not old[path].get_raw_value()
    )


def _writes(
    loss: Callable[..., tuple[jax.Array, tuple[Any, nnx.State]]], arguments: list[Any]
) -> bool:
    """Whether an evaluation changes the model."""
    changed: list[Any] = []

    def trace(params: nnx.State) -> None:
        _, (_, written) = gradients.of_params(loss, tuple(arguments[1:]), {}, params)
        changed.extend(jax.tree.map(jax.typeof, jax.tree.leaves(written)))

    jax.eval_shape(trace, arguments[0])
    return bool(changed)
