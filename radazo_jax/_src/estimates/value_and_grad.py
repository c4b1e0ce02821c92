"""`value_and_grad`, which compiles a program of its own outside of `jax.jit`."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.tree_util import Partial

from radazo_jax._src.base import checks, programs, shown, trees
from radazo_jax._src.base.trees import Tree
from radazo_jax._src.estimates import gradients
from radazo_jax._src.estimates.contracts import (
    Draw,
    Evaluator,
    GradientEstimator,
    Objective,
    Points,
    Values,
    check_estimator,
    check_evaluator,
)
from radazo_jax._src.estimates.points import candidates
from radazo_jax._src.estimates.sharded import Sharded
from radazo_jax._src.estimates.vectorized import vectorized


@checks.checks_names
def value_and_grad(
    fun: Objective,
    estimator: GradientEstimator,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    evaluator: Evaluator = vectorized(),
) -> Callable[..., tuple[Tree, Tree]]:
    """Estimates value and gradient of a function; replaces `jax.value_and_grad`.

    A call compiles a program, or finds it. Within another transformation, it is a part
    of that program: write `jax.jit(jax.vmap(...))`, because a `jax.vmap` without `jit`
    runs its operations one by one, which takes seconds.

    Args:
      fun: A function of the parameters, a tree of floating-point arrays, and of any
        other arguments; it returns a real scalar, or `(scalar, aux)` with
        `has_aux`. It need not be differentiable.
      estimator: An estimator without state, such as `forward_difference()`. Under a
        distribution that is `sequential`, the directions of each call are numbered from
        0.
      argnums: The position of the parameters among the arguments of `fun`, or several
        positions. With several, the gradient is a tuple.
      has_aux: Whether `fun` returns a pair whose second element is auxiliary.
      evaluator: The evaluator of the points: `vectorized(batch_size)`, or
        `sharded(axis_name)` to evaluate them on the devices along a mesh axis.

    Returns:
      A function `(key, *args, **kwargs) -> (value, gradient)`, with `(value, aux)` for
      the value if `has_aux`. `args` and `kwargs` go to `fun`. It consumes its
      key. All evaluations get the same other arguments: the same minibatch, the same
      dropout key.

    Raises:
      TypeError: If `estimator` is not a `GradientEstimator`, `argnums` are no integers,
        or, when called, if the first argument is no key, the loss is not real or the
        parameters are not floating-point.
      ValueError: If, when called, there is no argument at `argnums`, the loss is not a
        scalar, the tree of parameters is empty, or the estimator has state (use
        `solver`).

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
    check_estimator(estimator)
    check_evaluator(evaluator)
    check_argnums(argnums)

    def estimated(
        key: jax.typing.ArrayLike | None = None, *args: Tree, **kwargs: Tree
    ) -> tuple[Tree, Tree]:
        params, others = split_arguments(args, argnums)
        key = gradients.key_first(key, params, "params")
        if jax.tree.leaves(estimator.init(params)):
            raise ValueError(
                "estimator must have no state, which value_and_grad would lose; got "
                "one with state. Use solver(fun, optimizer, estimator) instead."
            )
        at = fun if argnums == 0 else partial(placed, fun, argnums)
        loss = Partial(gradients.of_params, at, others, kwargs)
        made = _Estimator(loss, estimator, evaluator, has_aux)
        return _estimated(made, key, checks.as_params(params))

    return estimated


class _Estimator(NamedTuple):
    """The parts of an estimate.

    Attributes:
      loss: The loss; in a program it is `Traced`.
      estimator: As in `value_and_grad`, like the others.
      evaluator: As in `value_and_grad`.
      has_aux: As in `value_and_grad`.
      shardings: The shardings of the parameters, which the gradient gets: one for each
        leaf, `None` if it does not lie on several devices in parts.
    """

    loss: Callable[..., Any]
    estimator: GradientEstimator
    evaluator: Evaluator
    has_aux: bool
    shardings: tuple[Any, ...] = ()

    def estimate(
        self, loss: Callable[[Tree], Tree], key: jax.Array, params: optax.Params
    ) -> tuple[Tree, Tree]:
        """Estimates value and gradient of a loss that may get its arrays otherwise."""
        found, _ = gradients.estimate(
            self.estimator,
            loss,
            key,
            params,
            self.estimator.init(params),
            evaluator=self.evaluator,
            has_aux=self.has_aux,
        )
        return found


def _estimated(
    made: _Estimator, key: jax.Array, params: optax.Params
) -> tuple[Tree, Tree]:
    """Estimates value and gradient, by a program if all arguments are known."""
    known = not trees.is_traced((key, params, made.loss))
    if programs.are_disabled() or not known:
        return made.estimate(made.loss, key, params)
    if isinstance(made.evaluator, Sharded):
        # A program does not know how its arguments are sharded.
        made.evaluator.check_free(params, made.loss)
    leaves = jax.tree.leaves(params)
    held = tuple(x.sharding if trees.is_sharded(x) else None for x in leaves)
    made = made._replace(shardings=held)
    # What JAX would change is no input of the program. Some losses need all of their
    # arguments as they are: masks, shapes.
    for is_input in (trees.is_kept, lambda _: False):
        found, static = trees.partition_by(is_input, made.loss)
        arrays = [jnp.asarray(x) for x in found]
        numbers = any(map(programs.is_number, static.others))
        at = partial(_merged, static)
        try:
            traced = programs.trace(at, arrays, params, shares_numbers=numbers)
        except programs.RefError:
            raise
        except Exception:  # The loss raises it again below, if it is its own.
            continue
        return _compiled_estimate(made._replace(loss=traced), key, params, arrays)
    return _estimate_in_turn(made, key, params)


def _merged(static: trees.Static, arrays: list[Tree], params: optax.Params) -> Tree:
    return static.merge(arrays)(params)


def _compiled_estimate(
    made: _Estimator, key: jax.Array, params: optax.Params, arrays: list[Tree]
) -> tuple[Tree, Tree]:
    """Estimates by a program, as if `value_and_grad` was under `jax.jit`."""
    compiled = programs.of(_in_program, made, key, params, arrays)
    value, aux, gradient = compiled(key, params, arrays)
    if not made.has_aux:
        return value, gradient
    loss: Any = made.loss
    output = loss.output[1]
    _, others = trees.partition(output, jax.core.ShapedArray)
    return (value, others.merge(aux)), gradient


def _in_program(
    made: _Estimator, key: jax.Array, params: optax.Params, arrays: list[Tree]
) -> tuple[Tree, list[Tree], Tree]:
    """Returns value, the arrays of aux, and gradient."""
    value, gradient = made.estimate(Partial(_at, made.loss, arrays), key, params)
    # No compiler knows that each device needs its part of the gradient alone.
    leaves, treedef = jax.tree.flatten(gradient)
    pairs = zip(leaves, made.shardings, strict=True)
    gradient = jax.tree.unflatten(treedef, [_placed(x, s) for x, s in pairs])
    value, aux = value if made.has_aux else (value, None)
    return value, trees.partition(aux, jax.Array)[0], gradient


def _placed(x: jax.Array, sharding: jax.sharding.NamedSharding | None) -> jax.Array:
    """Places an array on several devices in parts, unless it has no sharding."""
    if sharding is None:
        return x
    if getattr(sharding, "mesh", None) and sharding.mesh.explicit_axes:
        return jax.sharding.reshard(x, sharding)
    return lax.with_sharding_constraint(x, sharding)


def _at(
    loss: programs.TracedFunction, arrays: list[Tree], params: optax.Params
) -> Tree:
    return loss(arrays, params)


def _estimate_in_turn(
    made: _Estimator, key: jax.Array, params: optax.Params
) -> tuple[Tree, Tree]:
    """Estimates value and gradient of a loss that needs arrays that are known.

    It is evaluated at one point after another, as `jax.value_and_grad` would do it: no
    operation on known arrays is traced.
    """
    draw, state = Draw.once(key), made.estimator.init(params)
    asked = gradients.points_of(made.estimator, made.evaluator, draw, params, state)
    values, aux = _values_in_turn(made, params, asked[0])
    estimate, _ = gradients.reduced(made.estimator, asked[0], values, params, asked[1])
    gradient = estimate.gradient.materialize(params)
    return ((estimate.value, aux) if made.has_aux else estimate.value), gradient


def _values_in_turn(
    made: _Estimator, params: optax.Params, points: Points
) -> tuple[Values, Tree]:
    """Returns the values at the points, and aux at the first."""
    loss = checks.checked_loss(made.loss, made.has_aux, points.vector_valued)
    rows, values, auxes = candidates(points, params), [], []

    def one(row: optax.Params) -> tuple[jax.Array, list[Tree]]:
        value, aux = loss(row)
        arrays, static = trees.partition(aux, jax.Array)
        auxes.append(static)
        return value, arrays

    for i in range(points.num_points):
        found = jax.vmap(one)(jax.tree.map(lambda x, i=i: x[i : i + 1], rows))
        value, arrays = jax.tree.map(lambda x: x[0], found)
        auxes[i] = auxes[i].merge(arrays)
        values.append(value)
    return points.split(jnp.stack(values)), auxes[0]


def check_argnums(argnums: object) -> None:
    """Raises unless these are a position, or several."""
    each: Sequence[object] = [argnums]
    if isinstance(argnums, Sequence) and not isinstance(argnums, str) and argnums:
        each = argnums
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in each):
        raise TypeError(
            "argnums must be the position of the parameters among the arguments of "
            f"fun, or a tuple of positions; got {shown.given(argnums)}."
        )


def split_arguments(
    args: tuple[Tree, ...], argnums: int | Sequence[int]
) -> tuple[Tree, tuple[Tree, ...]]:
    """Returns the parameters, a tuple if there are several, and the other arguments."""
    if not args:
        return None, ()
    places = _places(argnums, len(args))
    others = tuple(x for i, x in enumerate(args) if i not in places)
    chosen = tuple(args[i] for i in places)
    return (chosen[0] if isinstance(argnums, int) else chosen), others


def _places(argnums: int | Sequence[int], size: int) -> list[int]:
    """Returns the positions of the parameters among so many arguments, from 0."""
    each = [argnums] if isinstance(argnums, int) else list(argnums)
    if any(not -size <= i < size for i in each):
        raise ValueError(
            f"argnums must be positions of the {size} arguments of fun; got "
            f"{argnums!r}."
        )
    return [i % size for i in each]


def placed(
    fun: Callable[..., Tree],
    argnums: int | Sequence[int],
    params: optax.Params,
    *others: Tree,
    **kwargs: Tree,
) -> Tree:
    """Calls `fun` with the parameters at their positions."""
    chosen = [params] if isinstance(argnums, int) else list(params)
    places, args = _places(argnums, len(chosen) + len(others)), list(others)
    for i in np.argsort(places):
        args.insert(places[i], chosen[i])
    return fun(*args, **kwargs)
