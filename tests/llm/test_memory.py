"""The programs whose memory is measured, and what docs/llm.md says of it."""

import json
import pathlib

import jax
import jax.numpy as jnp
import pytest
from tables import slow

from examples.llm import memory

CASES = {
    "forward": memory.Case("125m", "v5e:1x1", "forward", "", ""),
    "zo_sgd": memory.Case("125m", "v5e:1x1", "zo_sgd", "full", "gaussian"),
    "radazo": memory.Case("125m", "v5e:1x1", "radazo", "lora", "rademacher"),
    "adam": memory.Case("125m", "v5e:1x1", "adam, remat", "full", ""),
    "int4": memory.Case("gemma-2-27b-int4", "v6e:1x1", "radazo", "lora", "low_rank"),
}


@pytest.mark.parametrize("name", [*list(CASES)[:-1], slow("int4")])
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


def recorded(name):
    path = pathlib.Path(__file__).parents[2] / "docs" / "evidence" / name
    return json.loads(path.read_text("utf-8"))["rows"]


def test_steps_in_four_bits_fit_on_one_chip():
    rows = recorded("llm_memory_int4.json")
    assert [memory.Case.of(row) for row in rows] == memory.INT4_CASES
    for row in rows:
        if row["size"] == "llama-2-13b":
            assert not row["fits"], "in bfloat16"
            continue
        assert row["fits"]
        assert row["total_GiB"] <= (9 if row["device"] == "v5e:1x1" else 32)


def test_steps_take_the_memory_of_their_forward_pass():
    rows = recorded("llm_memory.json")
    assert [memory.Case.of(row) for row in rows] == memory.CASES
    barred = [row for row in rows if "bar_met" in row]
    assert len(barred) == 6
    for row in barred:
        assert row["fits"] and row["total_GiB"] < 16
        assert row["total/forward"] <= 1.06 and row["peak/forward"] <= 1.06
