"""Programs whose memory is measured, and the page that describes it."""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from research import memory
from research.common import RECORDS

from ..tables import slow

ROOT = pathlib.Path(__file__).parents[2]
CASES = {
    "forward": memory.Case("125m", "v5e:1x1", "forward", "", ""),
    "zo_sgd": memory.Case("125m", "v5e:1x1", "zo_sgd", "full", "gaussian"),
    "radazo": memory.Case("125m", "v5e:1x1", "radazo", "lora", "rademacher"),
    "adam": memory.Case("125m", "v5e:1x1", "adam, remat", "full", ""),
    "int4": memory.Case("gemma-2-27b-int4", "v6e:1x1", "radazo", "lora", "low_rank"),
}


@pytest.mark.slow
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


COMPILED = """
import json
from research import memory

cases = [case for case in memory.INT4_CASES if case.size == "llama-2-13b-int4"]
print(json.dumps([memory.measured(case) for case in cases[:2]]))
"""


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason='needs the TPU compiler: pip install "jax[tpu]"',
)
def test_a_step_keeps_no_other_form_of_matrices_in_four_bits():
    # The TPU compiler looks at its environment when JAX is imported.
    found = subprocess.run(
        [sys.executable, "-c", COMPILED],
        capture_output=True,
        text=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "TPU_LOG_DIR": "disabled"},
        cwd=ROOT,
    )
    assert found.returncode == 0, found.stderr
    forward, step = json.loads(found.stdout.splitlines()[-1])
    # In bfloat16, the scales take 0.19 GiB, and a layer's smallest matrix 40 times 12
    # MiB.
    assert step["temporary_GiB"] < forward["temporary_GiB"] + 0.1
    assert step["total_GiB"] <= 9


def recorded(name):
    path = RECORDS / name
    return json.loads(path.read_text("utf-8"))["rows"]


def test_steps_in_four_bits_fit_on_one_chip_beside_little_else():
    rows = recorded("llm_memory_int4.json")
    assert [memory.Case.of(row) for row in rows] == memory.INT4_CASES
    for row in rows:
        if row["size"] == "llama-2-13b":
            assert not row["fits"], "in bfloat16"
            continue
        assert row["fits"]
        assert row["total_GiB"] <= (9 if row["device"] == "v5e:1x1" else 32)
        if row["tuned"] == "lora":
            assert row["bar_met"]
            assert row["total/forward"] <= 1.06 and row["peak/forward"] <= 1.06


def test_steps_take_the_memory_of_their_forward_pass():
    rows = recorded("llm_memory.json")
    assert [memory.Case.of(row) for row in rows] == memory.CASES
    barred = [row for row in rows if "bar_met" in row]
    assert len(barred) == 6
    for row in barred:
        assert row["fits"] and row["total_GiB"] < 16
        assert row["total/forward"] <= 1.06 and row["peak/forward"] <= 1.06
