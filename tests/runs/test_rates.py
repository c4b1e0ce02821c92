"""R-AdaZO at a rate that its state holds, against R-AdaZO at a schedule."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import radazo_jax as zo
from radazo_jax._src.runs import rates
from radazo_jax._src.runs.learning_rate import DecayedRate
from tests.helpers.compare import Hashed
from tests.helpers.tables import jit, slow

PARAMS = {"w": jnp.linspace(-1.0, 1.0, 12).reshape(4, 3), "b": jnp.ones(5)}
SCHEDULES = {
    20: optax.linear_schedule(0.1, 0.0, 20),
    None: lambda count: 0.1 / jnp.sqrt(1 + count / 100),
}


def squares(params):
    return sum(jnp.sum(x**2) for x in jax.tree.leaves(params))


@pytest.mark.parametrize(
    ("num_steps", "moments"),
    [
        (20, "stored"),
        (None, "replayed"),
        slow(None, "stored"),
        slow(20, "replayed"),
    ],
)
def test_the_steps_are_radazo_at_a_schedule(num_steps, moments):
    held = DecayedRate.of(0.1, num_steps)
    optimizers = (
        (rates.radazo(moments == "replayed", 64), (held,)),
        (zo.radazo(SCHEDULES[num_steps], bias_correction=True, moments=moments), ()),
    )
    found = []
    for optimizer, last in optimizers:
        init, step = zo.solver(squares, optimizer, zo.forward_difference(Hashed()))
        state, step = init(PARAMS, 0), jit(step)
        kept = state.optimizer_state[: len(state.optimizer_state) - len(last)]
        state = state._replace(optimizer_state=(*kept, *last))
        for _ in range(8):
            state, _ = step(state)
        found.append(state.params)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5), *found)


def test_the_rate_ends_at_zero():
    optimizer = rates.radazo(False, 64)
    state, found = (*optimizer.init(PARAMS)[:-1], DecayedRate.of(0.5, 4)), []
    for _ in range(6):
        _, state = optimizer.update(PARAMS, state, PARAMS)
        found.append(float(state[-1].learning_rate))
    assert found == [0.5, 0.375, 0.25, 0.125, 0.0, 0.0]
