"""Steps of a small network, compiled for GPUs that need not exist.

The limits hold for JAX 0.10.2 with its plugin for CUDA 13.
"""

import importlib.util

import pytest

from tests.helpers.compiled import measured

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("jax_cuda13_plugin") is None,
        reason='needs the GPU compiler: pip install "radazo-jax[gpu-aot]"',
    ),
]
SMALL = {"layers": 2, "width": 512, "hidden": 2048, "vocabulary": 2**16}


def test_memory_is_that_of_the_forward_pass():
    """Built as a whole, the perturbed embedding would take a sixth more."""
    forward, *found = measured(
        "gpu",
        SMALL | {"run": "forward"},
        *(
            SMALL | {"run": "zo_sgd", "distribution": distribution}
            for distribution in ("sphere", "low_rank")
        ),
    )
    for facts in found:
        assert facts["bytes"] <= 1.05 * forward["bytes"]


def test_devices_send_values_alone_or_a_leaf_in_its_dtype():
    small = SMALL | {"batch": 512, "vocabulary": 8192}
    sharded = small | {"mesh": (2, 2, 2)}
    apart, forward, step = measured(
        "gpu",
        small
        | {"run": "radazo", "distribution": "low_rank"}
        | {"num_directions": 7, "mesh": (8, 1, 1)},
        sharded | {"run": "forward"},
        sharded | {"run": "radazo", "distribution": "rademacher"},
    )
    assert apart["host"] == [] and 0 < sum(apart["sent"]) <= 4 * 8 + 64
    # The compiler sends the embedding together with layers.
    assert 2 * 8192 * 512 <= forward["sent"][-1] < 4 * 8192 * 512
    assert step["sent"][-1] <= forward["sent"][-1]
