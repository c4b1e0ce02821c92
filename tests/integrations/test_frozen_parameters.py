"""Parameters that stay in the tree and do not move."""

import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import radazo_jax as zo
from tests.helpers.compare import Hashed

DOCS = pathlib.Path(__file__).parents[2] / "docs"
PARAMS = {"adapter": jnp.zeros(8), "base": jnp.full(8, 0.5)}
LABELS = {"adapter": "trained", "base": "frozen"}
ESTIMATOR = zo.forward_difference(Hashed(), num_directions=4)


def loss(params):
    return jnp.mean((params["adapter"] + params["base"] - 1) ** 2)


def frozen(trained):
    return optax.partition({"trained": trained, "frozen": optax.set_to_zero()}, LABELS)


def test_the_recipe_of_the_page_freezes_and_trains():
    page = (DOCS / "api" / "estimation.md").read_text(encoding="utf-8")
    section = page.partition("## Freeze a part of the parameters")[2]
    (code,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    found = {"zo": zo, "optax": optax}
    exec(code, found)
    params, result = found["params"], found["result"]
    np.testing.assert_array_equal(result.params["base"], params["base"])
    assert found["loss"](result.params) < 0.05 * found["loss"](params)


@pytest.mark.slow
@pytest.mark.parametrize(
    "trained", [zo.zo_sgd(1e-2, 0.9), zo.radazo(1e-2)], ids=["zo_sgd", "radazo"]
)
def test_every_loop_keeps_frozen_parameters(trained):
    optimizer = frozen(trained)
    init, step = zo.solver(loss, optimizer, ESTIMATOR)
    state, step = init(PARAMS, 0), jax.jit(step)
    tx = optax.chain(zo.estimate_gradient(ESTIMATOR, key=0), optimizer)
    params, tx_state = PARAMS, tx.init(PARAMS)
    for _ in range(5):
        state, _ = step(state)
        updates, tx_state = tx.update(None, tx_state, params, value_fn=loss)
        params = optax.apply_updates(params, updates)
    for found in (state.params, params):
        np.testing.assert_array_equal(found["base"], PARAMS["base"])
        assert np.all(found["adapter"] != 0)


def test_masked_does_not_freeze():
    """The page says so: a change of Optax here is a change of the page."""
    optimizer = optax.masked(zo.radazo(1e-2), {"adapter": True, "base": False})
    tx = optax.chain(zo.estimate_gradient(ESTIMATOR, key=0), optimizer)
    update = jax.jit(lambda state: tx.update(None, state, PARAMS, value_fn=loss))
    updates, _ = update(tx.init(PARAMS))
    assert np.all(updates["base"] != 0)
    page = (DOCS / "api" / "estimation.md").read_text(encoding="utf-8")
    assert "`optax.masked` does not freeze parameters" in page
