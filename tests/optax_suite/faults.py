"""Faults of the library, which Optax's tests must find."""

import jax
import jax.numpy as jnp
import optax

from radazo_jax._src.transforms import moments


def plant(fault):
    """Breaks the library in one way."""
    sound = moments._scale_by_moments

    def broken(*args, **kwargs):
        tx = sound(*args, **kwargs)

        def flipped_sign(updates, state, params=None, **extra_args):
            updates, state = tx.update(updates, state, params, **extra_args)
            return jax.tree.map(jnp.negative, updates), state

        def float_counter(updates, state, params=None, **extra_args):
            updates, state = tx.update(updates, state, params, **extra_args)
            return updates, state._replace(count=state.count + 0.0)

        def dropped_extra_args(updates, state, params=None):
            return tx.update(updates, state, params)

        update = {f.__name__: f for f in (flipped_sign, float_counter)}.get(
            fault, dropped_extra_args
        )
        return optax.GradientTransformationExtraArgs(tx.init, update)

    moments._scale_by_moments = broken


FAULTS = ("flipped_sign", "float_counter", "dropped_extra_args")
