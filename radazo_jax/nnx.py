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
import jax.numpy as jnp
import optax

from radazo_jax._src.base.trees import Tree

try:
    from flax import nnx
except ImportError as error:
    raise ImportError(
        "radazo_jax.nnx needs Flax, which is not installed. Run pip install flax."
    ) from error

from radazo_jax._src.base import shown
from radazo_jax._src.base.names import checks_names
from radazo_jax._src.estimates import gradients
from radazo_jax._src.estimates import value_and_grad as arrays
from radazo_jax._src.estimates.contracts import (
    Evaluator,
    GradientEstimator,
    Loss,
    Objective,
    check_estimator,
    check_evaluator,
)
from radazo_jax._src.estimates.vectorized import vectorized

__all__ = ["value_and_grad", "value_fn"]


@checks_names
def value_and_grad(
    loss_fn: Objective,
    estimator: GradientEstimator,
    argnums: int = 0,
    has_aux: bool = False,
    *,
    wrt: nnx.filterlib.Filter = nnx.Param,
    evaluator: Evaluator = vectorized(),
) -> Callable[..., tuple[Tree, nnx.State]]:
    """Estimates value and gradient of a module; replaces `nnx.value_and_grad`.

    All evaluations of a step start from the same model state: the same dropout mask,
    the same running statistics. The state that the first evaluation writes (counts of
    random streams, statistics, sown values) is kept. The forward difference
    evaluates θ first, and the central difference θ + μu₁.

    Args:
      loss_fn: `loss_fn(model, *args, **kwargs)` returns a real scalar, or
        `(scalar, aux)` with `has_aux`.
      estimator: An estimator without state, such as `forward_difference()`.
      argnums: The position of the model among the arguments of `loss_fn`.
      has_aux: Whether `loss_fn` returns a pair whose second element is auxiliary.
      wrt: A Flax filter for the variables to perturb; all others are fixed.
        `nnx.LoRAParam` selects the adapters of a frozen model.
      evaluator: The evaluator of the points, as in `radazo_jax.value_and_grad`.

    Returns:
      A function `(key, *args, **kwargs) -> (value, gradient)`, with
      `(value, aux)` for the value if `has_aux`. It consumes its key and updates the
      model's state outside `wrt`, and the other graph objects. `gradient` is an
      `nnx.State`, as `nnx.Optimizer.update` takes it.

    Raises:
      TypeError: If `estimator` is not a `GradientEstimator`, `argnums` is no integer,
        or, when called, if the loss is not real or a variable of `wrt` is not
        floating-point.
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
    if not isinstance(argnums, int):
        raise TypeError(
            f"argnums must be the position of the model; got {shown.given(argnums)}."
        )

    def estimated(
        key: jax.typing.ArrayLike | None = None, *args: Tree, **kwargs: Tree
    ) -> tuple[Tree, nnx.State]:
        model, args = arrays.split_arguments(args, argnums)
        key = gradients.key_first(key, model, "model")
        objects, others, treedef = _objects((args, kwargs))
        graphdef, params, rest = _split((model, objects), wrt)

        def loss(
            params: nnx.State, rest: nnx.State, others: list[Tree]
        ) -> tuple[jax.Array, tuple[Tree, nnx.State]]:
            evaluated = _merge(graphdef, params, rest)
            args, kwargs = _with_objects(treedef, others, evaluated[1])
            output = arrays.placed(loss_fn, argnums, evaluated[0], *args, **kwargs)
            value, aux = output if has_aux else (output, None)
            return value, (aux, _written(evaluated, wrt, rest))

        passed = [params, rest, others]
        if not has_aux and not _writes(loss, passed):
            # Nothing but values to keep track of, which estimators make use of.
            estimate = arrays.value_and_grad(
                lambda *a: loss(*a)[0], estimator, evaluator=evaluator
            )
            return estimate(key, *passed)
        estimate = arrays.value_and_grad(
            loss, estimator, evaluator=evaluator, has_aux=True
        )
        (value, (aux, written)), gradient = estimate(key, *passed)
        nnx.update((model, objects), written)
        return ((value, aux) if has_aux else value), gradient

    check_estimator(estimator)
    check_evaluator(evaluator)
    return estimated


@checks_names
def value_fn(
    loss_fn: Callable[..., jax.Array],
    model: nnx.Module,
    wrt: nnx.filterlib.Filter = nnx.Param,
    *,
    args: tuple[object, ...] = (),
) -> Loss:
    """Returns the loss as a function of parameters, as `estimate_gradient` takes it.

    The function always evaluates from the model state at the time of this call. The
    model itself is updated as by one evaluation at its own parameters, so that its next
    dropout mask differs. Under `jit` only what the new state depends on is computed:
    nothing, if only random streams advance.

    Args:
      loss_fn: `loss_fn(model, *args)` returns a real scalar.
      model: The module. Its state outside `wrt` is updated.
      wrt: A Flax filter for the variables that the function takes.
      args: Further arguments of `loss_fn`. Graph objects among them, such as an
        `nnx.Rngs`, are updated like the model; `loss_fn` must not write to graph
        objects that it closes over.

    Returns:
      A function from the variables in `wrt`, an `nnx.State` or its pure tree, to the
      loss.

    Raises:
      TypeError: If `loss_fn` is not callable, or a variable of `wrt` is not
        floating-point.
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
    objects, others, treedef = _objects(args)
    graphdef, params, rest = _split((model, objects), wrt)

    def evaluate(params: optax.Params) -> tuple[jax.Array, _Nodes]:
        evaluated = _merge(graphdef, params, rest)
        found = _with_objects(treedef, others, evaluated[1])
        return loss_fn(evaluated[0], *found), evaluated

    _, evaluated = evaluate(params)
    nnx.update((model, objects), _written(evaluated, wrt, rest))
    return lambda params: evaluate(params)[0]


def _check_loss_fn(loss_fn: object) -> None:
    if not callable(loss_fn):
        raise TypeError(
            f"loss_fn must be a function of the model; got {shown.given(loss_fn)}."
        )


def _objects(arguments: Tree) -> tuple[tuple[Tree, ...], list[Tree], Tree]:
    """Splits arguments into graph objects, all other leaves, and their places.

    JAX takes modules and streams of random numbers for trees, and copies them, so
    that a function would write to the copies.
    """
    leaves, treedef = jax.tree.flatten(arguments, is_leaf=nnx.graph.is_graph_node)
    is_object = [nnx.graph.is_graph_node(leaf) for leaf in leaves]
    objects = tuple(x for x, found in zip(leaves, is_object, strict=True) if found)
    others = [x for x, found in zip(leaves, is_object, strict=True) if not found]
    return objects, others, (treedef, is_object)


def _with_objects(places: Tree, others: list[Tree], objects: tuple[Tree, ...]) -> Tree:
    """Returns the arguments with these graph objects and these other leaves."""
    treedef, is_object = places
    found, left = iter(objects), iter(others)
    return treedef.unflatten([next(found if is_one else left) for is_one in is_object])


# A module, and the other graph objects that its loss takes. They are split together,
# because they may share variables.
_Nodes = tuple[Any, tuple[Any, ...]]


def _split(
    nodes: _Nodes, wrt: nnx.filterlib.Filter
) -> tuple[nnx.GraphDef[Any], nnx.State, nnx.State]:
    """Splits nodes into structure, variables of the module in `wrt`, and others."""
    graphdef, state = nnx.split(nodes)
    params, rest = _apart(state, wrt)
    if not jax.tree.leaves(params):
        raise ValueError(
            f"wrt must match variables of the model; {wrt!r} matches none of "
            f"{type(nodes[0]).__name__}."
        )
    for path, variable in nnx.to_flat_state(params):
        value = variable.get_raw_value()
        if not jnp.issubdtype(jnp.result_type(value), jnp.floating):
            raise TypeError(
                f"wrt must match floating-point variables; got {shown.tree(value)} at "
                f"{'.'.join(map(str, path))} of {type(nodes[0]).__name__}. Pass wrt="
                f"nnx.All(nnx.Param, nnx.Not(nnx.PathContains({path[-1]!r})))."
            )
    # A copy, because the model continues to write to its own variables.
    return graphdef, params, jax.tree.map(lambda x: x, rest)


def _merge(graphdef: Any, params: optax.Params, rest: nnx.State) -> _Nodes:
    return nnx.merge(graphdef, nnx.State({0: params}), rest, copy=True)


def _apart(state: nnx.State, wrt: nnx.filterlib.Filter) -> tuple[nnx.State, nnx.State]:
    """Splits variables into the module's in `wrt`, by their paths, and all others."""
    flat = nnx.to_flat_state(state)
    model = nnx.from_flat_state((path[1:], x) for path, x in flat if path[0] == 0)
    params, fixed = nnx.split_state(model, wrt, ...)
    others = [(path, x) for path, x in flat if path[0] != 0]
    others += [((0, *path), x) for path, x in nnx.to_flat_state(fixed)]
    return params, nnx.from_flat_state(others)


def _written(nodes: _Nodes, wrt: nnx.filterlib.Filter, before: nnx.State) -> nnx.State:
    """Returns variables outside `wrt` that `loss_fn` replaced."""
    _, after = _apart(nnx.state(nodes), wrt)
    old = dict(nnx.to_flat_state(before))
    return nnx.from_flat_state(
        (path, variable)
        for path, variable in nnx.to_flat_state(after)
        if path not in old or variable.get_raw_value() is not old[path].get_raw_value()
    )


def _writes(
    loss: Callable[..., tuple[jax.Array, tuple[Tree, nnx.State]]], arguments: list[Tree]
) -> bool:
    """Returns whether an evaluation changes a graph object."""
    changed: list[Any] = []

    def trace(params: nnx.State) -> None:
        _, (_, written) = gradients.of_params(loss, tuple(arguments[1:]), {}, params)
        changed.extend(jax.tree.map(jax.typeof, jax.tree.leaves(written)))

    jax.eval_shape(trace, arguments[0])
    return bool(changed)
