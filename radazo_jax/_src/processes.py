"""What must be the same in all processes of a distributed run."""

import jax
import numpy as np
from jax.experimental import multihost_utils

from radazo_jax._src import counter


def check_same_key(key: jax.typing.ArrayLike, name: str = "key") -> jax.Array:
    """Checks that all processes hold the same key, and returns it.

    Every process draws all directions itself. Processes with different keys would take
    different steps without an error. In a run of several processes all of them must
    call this function, as with any collective; with one process it does nothing.
    `minimize` and `estimate_gradient` call it.

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
      >>> key = zo.check_same_key(jax.random.key(0))

    References:
      `jax.experimental.multihost_utils.assert_equal`, which does not say where.
    """
    key = counter.as_key(key, name)
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
