"""Keras models on the JAX backend, trained without backpropagation by `fit`.

`import radazo_jax.keras` needs Keras with `KERAS_BACKEND=jax`.

Examples:
  >>> import keras, numpy as np
  >>> import radazo_jax as zo
  >>> import radazo_jax.keras as zo_keras
  >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
  >>> trainer = zo_keras.ZerothOrder(model, zo.forward_difference())
  >>> trainer.compile(optimizer=zo.radazo(1e-2), loss="mse")
  >>> history = trainer.fit(np.ones((8, 3)), np.ones((8, 1)), verbose=0)
  >>> model.predict(np.ones((8, 3)), verbose=0).shape
  (8, 1)
"""

import functools
from typing import Any

import jax
import optax

try:
    import keras
except ImportError as error:
    raise ImportError(
        "radazo_jax.keras needs Keras, which is not installed. Run pip install keras."
    ) from error

from radazo_jax._src.contracts import (
    Evaluator,
    GradientEstimator,
    check_estimator,
    check_evaluator,
)
from radazo_jax._src.estimators.value_and_grad import value_and_grad
from radazo_jax._src.evaluators.vectorized import vectorized
from radazo_jax._src.numbers import keys

if keras.backend.backend() != "jax":
    raise ImportError(
        "radazo_jax.keras needs Keras on the JAX backend (KERAS_BACKEND=jax); got "
        f"{keras.backend.backend()}."
    )

__all__ = ["ZerothOrder"]


class ZerothOrder(keras.Model):
    """A Keras model whose `fit` estimates the gradients it takes.

    Callbacks, metrics, `evaluate` and Keras' own optimizers work as with any model. All
    evaluations of a step start from the same state: the same dropout mask, the same
    running statistics. The state and the loss of the first evaluation are kept and
    shown. The wrapped model itself is trained, and can be used and saved without this
    one.

    Args:
      model: Any Keras model.
      estimator: An estimator without state, such as `forward_difference()`.
      evaluator: The evaluator of the points, as in `radazo_jax.value_and_grad`.
      key: A key, typed or raw, or an integer. Step i, by the optimizer's count,
        draws with `fold_in(key, i)`.

    Raises:
      TypeError: If `estimator` is not a `GradientEstimator`.

    Attributes:
      model: The model that is trained.

    Examples:
      >>> import keras, numpy as np
      >>> import radazo_jax as zo
      >>> import radazo_jax.keras as zo_keras
      >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
      >>> trainer = zo_keras.ZerothOrder(model, zo.forward_difference(), key=0)
      >>> trainer.compile(optimizer=keras.optimizers.Adam(1e-2), loss="mse")
      >>> history = trainer.fit(np.ones((8, 3)), np.ones((8, 1)), verbose=0)
    """

    def __init__(
        self,
        model: Any,
        estimator: GradientEstimator,
        evaluator: Evaluator = vectorized(),
        key: jax.typing.ArrayLike = 0,
    ) -> None:
        check_estimator(estimator)
        check_evaluator(evaluator)
        super().__init__()
        self.model = model
        # In a function, since Keras takes tuples apart that are attributes.
        self._estimated = functools.partial(
            _estimated, estimator, evaluator, keys.as_key(key)
        )

    def compile(self, optimizer: Any = "rmsprop", **kwargs: Any) -> None:
        """Compiles the model, as `keras.Model.compile` does.

        Args:
          optimizer: A Keras optimizer, or an Optax transformation such as
            `radazo(1e-2)`. Its updates are multiplied by the learning rate that
            callbacks of Keras set, which is 1 at first.
          **kwargs: As Keras takes them.

        """
        if isinstance(optimizer, optax.GradientTransformation):
            optimizer = _Optax(optimizer)
        super().compile(optimizer=optimizer, **kwargs)

    def call(self, inputs: Any, training: Any = None) -> Any:
        """Calls the model."""
        return self.model(inputs, training=training)

    def compute_loss_and_updates(
        self,
        trainable_variables: Any,
        *args: Any,
        training: bool = False,
        optimizer_variables: Any = None,
    ) -> Any:
        """The loss as Keras differentiates it; its derivative is an estimate."""
        compute = super().compute_loss_and_updates

        def loss(params: Any) -> Any:
            return compute(
                params,
                *args,
                training=training,
                optimizer_variables=optimizer_variables,
            )

        if not training:
            return loss(trainable_variables)
        count = optimizer_variables[_place_of_count(self.optimizer)]
        return self._estimated(loss, count)(trainable_variables)


def _place_of_count(optimizer: Any) -> int:
    """The place of the count of steps among the variables of an optimizer.

    It is the first variable of the optimizer that a `LossScaleOptimizer` may wrap. Its
    property `iterations` leaves out the steps between which gradients are accumulated.
    """
    inner = optimizer
    while hasattr(inner, "inner_optimizer"):
        inner = inner.inner_optimizer
    return [id(v) for v in optimizer.variables].index(id(inner.variables[0]))


def _estimated(
    estimator: GradientEstimator,
    evaluator: Evaluator,
    key: jax.Array,
    loss: Any,
    step: jax.Array,
) -> Any:
    """`loss`, with an estimate as its derivative."""
    estimate = value_and_grad(loss, estimator, evaluator=evaluator, has_aux=True)
    key = jax.random.fold_in(key, step.astype("uint32"))

    def forward(params: Any) -> tuple[Any, Any]:
        return estimate(key, params)

    def backward(gradient: Any, cotangents: Any) -> tuple[Any]:
        factor = cotangents[0]
        return (jax.tree.map(lambda g: (factor * g).astype(g.dtype), gradient),)

    differentiable = jax.custom_vjp(loss)
    differentiable.defvjp(forward, backward)
    return differentiable


class _Optax(keras.optimizers.Optimizer):
    """An Optax transformation as an optimizer of Keras.

    Its state lies in variables of Keras, so that it is saved with the model.
    """

    def __init__(self, transformation: optax.GradientTransformation) -> None:
        super().__init__(learning_rate=1.0, name="optax")
        self.transformation = transformation

    def build(self, variables: Any) -> None:
        if self.built:
            return
        super().build(variables)
        state = self.transformation.init([v.value for v in variables])
        leaves, self._structure = jax.tree.flatten(state)
        self._leaves = [
            self.add_variable(
                leaf.shape,
                initializer=lambda shape, dtype, leaf=leaf: leaf,
                dtype=str(leaf.dtype),
                name=f"state_{i}",
            )
            for i, leaf in enumerate(leaves)
        ]

    def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
        if trainable_variables is not None:
            self.build(list(trainable_variables))
        params = [v.value for v in self._trainable_variables]
        state = jax.tree.unflatten(self._structure, [v.value for v in self._leaves])
        updates, state = self.transformation.update(list(grads), state, params)
        # 1, unless a callback of Keras has set it.
        rate = jax.numpy.asarray(self.learning_rate)
        updates = [u * rate.astype(u.dtype) for u in updates]
        for variable, new in zip(
            [*self._trainable_variables, *self._leaves],
            [*optax.apply_updates(params, updates), *jax.tree.leaves(state)],
            strict=True,
        ):
            variable.assign(new)
        for variable in self._trainable_variables:
            if variable.constraint is not None:
                variable.assign(variable.constraint(variable))
        self.iterations.assign_add(1)
        return self.iterations
