"""Programs whose memory is measured, and their record."""

import jax
import jax.numpy as jnp
import pytest

from research import memory
from research.common import RECORDS, read

CASES = {
    "forward": memory.Case("125m", "h100", "forward", "", ""),
    "zo_sgd": memory.Case("125m", "h100", "zo_sgd", "full", "gaussian"),
    "radazo": memory.Case("125m", "h100", "radazo", "lora", "rademacher"),
    "adam": memory.Case("125m", "h100", "adam, remat", "full", ""),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_the_programs_whose_memory_is_measured(name):
    fun, args = memory.program(CASES[name])
    with jax.numpy_dtype_promotion("standard"):  # Optax relies on it.
        out = jax.eval_shape(fun, *args)
    if name == "forward":
        assert (out.shape, out.dtype) == ((), jnp.float32)
        return
    state, value = out
    assert (value.shape, value.dtype) == ((), jnp.float32)
    kinds = [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(state)]
    assert kinds == [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(args[1])]
    moments = [x for x in jax.tree.leaves(state.opt_state) if x.ndim]
    expected = 0 if name == "zo_sgd" else 2 * len(jax.tree.leaves(state.params))
    assert len(moments) == expected
    assert all(x.dtype == jnp.float32 for x in moments)


def test_steps_take_the_memory_of_their_forward_pass():
    rows = read(RECORDS / "llm_memory_gpu.json")["rows"]
    assert [memory.Case.of(row) for row in rows] == memory.CASES
    for row in rows:
        if row["distribution"] and (row["method"], row["tuned"]) != ("radazo", "full"):
            assert row["fits"] and row["total/forward"] <= 1.06
