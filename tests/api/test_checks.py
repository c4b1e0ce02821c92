"""Every check, with values that will do and values that will not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from radazo_jax._src import checks

NUMERIC_CHECKS = {
    checks.check_positive: "a finite number > 0",
    checks.check_non_negative: "a finite number ≥ 0",
    checks.check_unit_interval: "a number in [0, 1)",
}


@pytest.mark.parametrize("value", [1, 3, np.int8(3), np.uint64(7)])
def test_int_accepts(value):
    result = checks.check_int_at_least("rank", value, 1)
    assert type(result) is int
    assert result == value


@pytest.mark.parametrize("value", [0, -1, np.int32(-4)])
def test_int_out_of_range(value):
    with pytest.raises(ValueError, match=r"rank must be an int ≥ 1; got .*\d"):
        checks.check_int_at_least("rank", value, 1)


@pytest.mark.parametrize("value", [True, np.True_, 2.0, np.float32(2), "2", None, [2]])
def test_int_of_wrong_type(value):
    with pytest.raises(TypeError, match="rank must be an int ≥ 1; got") as error:
        checks.check_int_at_least("rank", value, 1)
    assert type(value).__name__ in str(error.value)


@pytest.mark.parametrize("value", [jnp.int32(3), np.array(3)])
def test_int_rejects_arrays_and_says_what_would_do(value):
    with pytest.raises(TypeError, match=r"static_args.*inject_hyperparams"):
        checks.check_int_at_least("rank", value, 1)


def test_int_rejects_tracers_and_says_what_would_do():
    with pytest.raises(TypeError, match=r"static_args.*inject_hyperparams"):
        jax.jit(lambda n: checks.check_int_at_least("rank", n, 1))(3)


@pytest.mark.parametrize("check", NUMERIC_CHECKS)
@pytest.mark.parametrize(
    "value",
    [
        0.5,
        np.float32(0.5),
        np.float64(0.5),
        np.array(0.5),
        jnp.float32(0.5),
        jnp.bfloat16(0.5),
    ],
)
def test_numbers_pass_unchanged(check, value):
    assert check("b", value) is value


@pytest.mark.parametrize(
    ("check", "value", "fits"),
    [
        (checks.check_positive, 2, True),
        (checks.check_positive, 1e-30, True),
        (checks.check_positive, 0, False),
        (checks.check_positive, -0.0, False),
        (checks.check_positive, jnp.float32(-1), False),
        (checks.check_positive, float("inf"), False),
        (checks.check_positive, float("nan"), False),
        (checks.check_non_negative, 0, True),
        (checks.check_non_negative, 0.0, True),
        (checks.check_non_negative, -1e-30, False),
        (checks.check_non_negative, float("inf"), False),
        (checks.check_non_negative, np.float32("nan"), False),
        (checks.check_unit_interval, 0, True),
        (checks.check_unit_interval, 0.999999, True),
        (checks.check_unit_interval, 1, False),
        (checks.check_unit_interval, 1.0, False),
        (checks.check_unit_interval, jnp.bfloat16(0.999), False),  # Rounds to 1.
        (checks.check_unit_interval, -0.1, False),
        (checks.check_unit_interval, float("nan"), False),
    ],
)
def test_ranges(check, value, fits):
    if fits:
        assert check("b", value) is value
    else:
        with pytest.raises(ValueError, match="b must be") as error:
            check("b", value)
        assert NUMERIC_CHECKS[check] in str(error.value)
        assert repr(value) in str(error.value)


@pytest.mark.parametrize("check", NUMERIC_CHECKS)
@pytest.mark.parametrize(
    "value", [True, np.True_, jnp.array(True), "0.5", None, 1j, [0.5]]
)
def test_what_is_no_real_number(check, value):
    with pytest.raises(TypeError, match="b must be") as error:
        check("b", value)
    assert NUMERIC_CHECKS[check] in str(error.value)


@pytest.mark.parametrize("check", NUMERIC_CHECKS)
def test_random_keys_are_no_numbers(check):
    with pytest.raises(TypeError, match="b must be"):
        check("b", jax.random.key(0))


@pytest.mark.parametrize("check", NUMERIC_CHECKS)
def test_schedules_are_pointed_to_inject_hyperparams(check):
    with pytest.raises(TypeError, match="inject_hyperparams"):
        check("b", lambda count: 0.5)


@pytest.mark.parametrize("check", NUMERIC_CHECKS)
def test_arrays_must_be_scalars(check):
    with pytest.raises(ValueError, match=r"shape \(2,\)"):
        check("b", np.array([0.5, 0.5]))
    with pytest.raises(ValueError, match=r"shape \(2,\)"):
        jax.jit(lambda b: check("b", b))(np.array([0.5, 0.5], np.float32))


@pytest.mark.parametrize("check", NUMERIC_CHECKS)
def test_unknown_numbers_pass(check):
    out_of_any_range = np.float32(-1.0)
    assert jax.jit(lambda b: check("b", b))(out_of_any_range) == -1.0
    abstract = jax.ShapeDtypeStruct((), jnp.float32)
    assert check("b", abstract) is abstract


@pytest.mark.parametrize("check", NUMERIC_CHECKS)
def test_unknown_bools_do_not(check):
    with pytest.raises(TypeError, match="b must be"):
        jax.jit(lambda b: check("b", b))(True)
