"""Every check, with values that it accepts and values that it refuses."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import radazo_jax as zo
from radazo_jax._src.base import checks

NUMERIC_CHECKS = {
    checks.check_positive: "a finite number > 0",
    checks.check_non_negative: "a finite number ≥ 0",
    checks.check_unit_interval: "a number in [0, 1)",
}


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        *((value, ValueError, r"\d") for value in (0, -1, np.int32(-4))),
        *(
            (value, TypeError, type(value).__name__)
            for value in (True, np.True_, 2.0, np.float32(2), "2", None, [2])
        ),
        *(
            (value, TypeError, "static_args.*inject_hyperparams")
            for value in (jnp.int32(3), np.array(3))
        ),
    ],
)
def test_int_refuses(value, error, message):
    with pytest.raises(error, match=f"rank must be an int ≥ 1; got.*{message}"):
        checks.check_int_at_least("rank", value, 1)
    with pytest.raises(TypeError, match=r"static_args.*inject_hyperparams"):
        jax.jit(lambda n: checks.check_int_at_least("rank", n, 1))(3)


@pytest.mark.parametrize(
    ("check", "value", "fits"),
    [
        (checks.check_positive, 1e-30, True),
        (checks.check_positive, 0, False),
        (checks.check_positive, -0.0, False),
        (checks.check_positive, jnp.float32(-1), False),
        (checks.check_positive, float("inf"), False),
        (checks.check_positive, float("nan"), False),
        (checks.check_non_negative, 0.0, True),
        (checks.check_non_negative, -1e-30, False),
        (checks.check_non_negative, float("inf"), False),
        (checks.check_non_negative, np.float32("nan"), False),
        (checks.check_unit_interval, 0, True),
        (checks.check_unit_interval, 0.999999, True),
        (checks.check_unit_interval, 1, False),
        (checks.check_unit_interval, jnp.bfloat16(0.999), False),  # Rounds to 1.
        (checks.check_unit_interval, -0.1, False),
        (checks.check_unit_interval, float("nan"), False),
    ],
)
def test_ranges(check, value, fits):
    if fits:
        found = check("b", value)
        assert type(found) is float and found == value
    else:
        with pytest.raises(ValueError, match="b must be") as error:
            check("b", value)
        assert NUMERIC_CHECKS[check] in str(error.value)
        assert repr(value) in str(error.value)


def test_numeric_checks_refuse_other_types_and_shapes():
    for check, expected in NUMERIC_CHECKS.items():
        key = jax.random.key(0)
        for value in (True, np.True_, jnp.array(True), "0.5", None, 1j, [0.5], key):
            with pytest.raises(TypeError, match="b must be") as error:
                check("b", value)
            assert expected in str(error.value)
        with pytest.raises(TypeError, match="inject_hyperparams"):
            check("b", lambda count: 0.5)
        with pytest.raises(TypeError, match="b must be"):
            jax.jit(lambda b, check=check: check("b", b))(True)
        for call in (check, jax.jit(check, static_argnums=0)):
            with pytest.raises(ValueError, match=r"shape \(2,\)"):
                call("b", np.array([0.5, 0.5], np.float32))


def _of_a_torn_journal(path):
    path.write_bytes(b'{"format":')
    zo.train(
        np.sum,
        np.zeros(3, np.float32),
        zo.zo_sgd(0.1),
        zo.forward_difference(),
        evaluator=zo.external(),
        num_steps=1,
        progress=False,
        journal=path,
    )


WARNING_CALLS = {
    "a function": lambda _: zo.solver(
        jnp.sum, zo.zo_sgd(0.1), zo.forward_difference()
    ).init(np.zeros(3), 0),
    "a context": _of_a_torn_journal,
    "a constructor": lambda _: zo.radazo(0.1, moments="replayed", window=2),
    "Optax": lambda _: optax.inject_hyperparams(
        zo.scale_by_replayed_radazo, static_args=("window", "max_directions")
    )(window=2).init(jnp.zeros(3)),
}


@pytest.mark.parametrize("call", WARNING_CALLS.values(), ids=WARNING_CALLS)
def test_a_warning_names_the_line_of_the_user(call, tmp_path):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call(tmp_path / "journal")
    assert [warning.filename for warning in caught] == [__file__]
