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

from radazo_jax._src.nnx import value_and_grad, value_fn

__all__ = ["value_and_grad", "value_fn"]
