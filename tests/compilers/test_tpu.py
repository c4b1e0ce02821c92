"""Steps of a small network, compiled for TPUs that need not exist.

The limits hold for JAX 0.10.2 with libtpu 0.0.42.
"""

import importlib.util

import pytest

from tests.helpers.compiled import measured

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is None,
        reason='needs the TPU compiler: pip install "radazo-jax[tpu-aot]"',
    ),
]


def test_memory_is_that_of_the_forward_pass():
    """No noise is stored, and no layer is copied in the loops."""
    forward, *found = measured(
        "tpu",
        {"run": "forward"},
        *(
            {"run": "zo_sgd", "distribution": distribution, "num_directions": 2}
            for distribution in ("gaussian", "low_rank")
        ),
    )
    for facts in found:
        assert facts["host"] == [] and facts["sent"] == []
        assert facts["bytes"] <= 1.05 * forward["bytes"]


def test_devices_send_values_alone():
    case = {"run": "radazo", "num_directions": 7, "layers": 2}
    alone, *found = measured(
        "tpu",
        case | {"distribution": "low_rank"},
        *(
            case | {"distribution": distribution, "mesh": mesh}
            for distribution, mesh in (("low_rank", (8, 1, 1)), ("sphere", (2, 4, 1)))
        ),
    )
    assert alone["sent"] == []
    for facts in found:
        assert facts["host"] == []
        assert 0 < sum(facts["sent"]) <= 4 * 8 + 64
        assert facts["aliased"] >= 0.999 * alone["aliased"]


def test_a_sharded_leaf_is_gathered_as_the_forward_pass_gathers_it():
    case = {"mesh": (2, 2, 2), "layers": 2}
    forward, step = measured(
        "tpu",
        case | {"run": "forward"},
        case | {"run": "radazo", "distribution": "rademacher"},
    )
    assert step["sent"][-1] <= forward["sent"][-1] == 2 * 32000 * 2048
