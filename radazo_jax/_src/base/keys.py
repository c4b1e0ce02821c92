"""Keys: whatever users pass, made typed once, and the same in all processes."""

import operator

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from radazo_jax._src.base import shown
from radazo_jax._src.base.names import checks_names


def as_key(key: jax.typing.ArrayLike, name: str = "key") -> jax.Array:
    """Turns whatever JAX users call a key into a typed Threefry key.

    Args:
      key: A typed key, a raw `uint32[2]` key, or an integer seed.
      name: The name of the argument in error messages.

    Returns:
      A typed scalar key of the `threefry2x32` implementation.

    Raises:
      TypeError: If `key` is none of these.
      ValueError: If `key` is a batch of keys, or of another implementation:
        `rbg` keys draw other numbers under `vmap` than one by one, and a
        direction could not be drawn again.
    """
    if isinstance(key, bool) or not (
        isinstance(key, jax.Array | np.ndarray | np.generic)
        or hasattr(key, "__index__")
    ):
        raise TypeError(
            f"{name} must be a key such as jax.random.key(0), or an integer seed; "
            f"got {shown.tree(key)}."
        )
    if not isinstance(key, jax.Array | np.ndarray | np.generic):
        return jax.random.key(operator.index(key), impl="threefry2x32")
    if jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        impl = str(jax.random.key_impl(key))
        if "threefry" not in impl and impl != "fry":
            raise ValueError(_wrong_implementation(name, impl))
        _check_scalar(name, key.shape)
        return jnp.asarray(key)
    if key.dtype == jnp.uint32 and key.shape == (4,):
        raise ValueError(_wrong_implementation(name, "rbg (raw, uint32[4])"))
    if key.dtype == jnp.uint32 and key.ndim > 0 and key.shape[-1] == 2:
        _check_scalar(name, key.shape[:-1])
        return jax.random.wrap_key_data(jnp.asarray(key), impl="threefry2x32")
    if jnp.issubdtype(key.dtype, jnp.integer) and key.shape == ():
        return jax.random.key(key, impl="threefry2x32")
    raise TypeError(
        f"{name} must be a key such as jax.random.key(0), or an integer seed; got an "
        f"array of dtype {key.dtype} and shape {key.shape}."
    )


def _check_scalar(name: str, shape: tuple[int, ...]) -> None:
    if shape != ():
        raise ValueError(
            f"{name} must be a single key; got keys of shape {shape}. Use jax.vmap "
            "to work with several."
        )


def _wrong_implementation(name: str, impl: str) -> str:
    return (
        f"{name} must be a threefry2x32 key; got one of implementation {impl}, whose "
        "numbers change under jax.vmap, so that a direction cannot be drawn again. "
        "Use jax.random.key(seed, impl='threefry2x32')."
    )


@checks_names
def check_same_key(key: jax.typing.ArrayLike, name: str = "key") -> jax.Array:
    """Checks that all processes hold the same key, and returns it.

    Every process draws all directions itself. Processes with different keys would take
    different steps without an error. In a run of several processes all of them must
    call this function, as with any collective; with one process it does nothing.
    `train`, `minimize` and `estimate_gradient` call it.

    Args:
      key: A typed key, a raw `uint32[2]` key, or an integer seed. Not consumed. A
        traced key or a global array is returned unchecked.
      name: The name of the argument in error messages.

    Returns:
      The key, typed, shape ().

    Raises:
      TypeError: If `key` is no key.
      ValueError: If the processes hold different keys: the error names the first that
        differs from process 0.

    Examples:
      >>> import jax
      >>> import radazo_jax as zo
      >>> key = zo.random.check_same_key(jax.random.key(0))

    References:
      `jax.experimental.multihost_utils.assert_equal`, which does not name the leaf.
    """
    key = as_key(key, name)
    if isinstance(key, jax.core.Tracer) or not key.is_fully_addressable:
        return key
    if jax.process_count() > 1:
        mine = np.asarray(jax.random.key_data(key))
        of_all = np.asarray(multihost_utils.process_allgather(mine))
        for process, data in enumerate(of_all):
            if (data != of_all[0]).any():
                raise ValueError(
                    f"{name} must be the same in all processes; process {process} has "
                    f"{data.tolist()}, process 0 has {of_all[0].tolist()}."
                )
    return key
