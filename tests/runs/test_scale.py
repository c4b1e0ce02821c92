"""`scale`: a run of f in units S takes the steps of f(S z) from θ/S, bit for bit."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import radazo_jax as zo
from tests.helpers.short_runs import run as short
from tests.helpers.tables import slow

S = np.array([2.0**20, 1.0, 2.0**-17, 8.0])
CENTER = S * np.array([0.7, -0.3, 0.1, 1.5])
START = CENTER + S * np.array([1.0, -2.0, 0.5, 3.0])


def quartic(x):
    z = (x - CENTER) / S
    return float(np.sum(np.arange(1, 5) * z**2) + np.sum(z) ** 4)


def run(fun=quartic, start=START, **options):
    options = {"progress": False, "max_evaluations": 60} | options
    return zo.minimize_black_box(fun, start, **options)


@pytest.fixture(scope="module")
def scaled():
    return run(scale=S)


@pytest.mark.parametrize("bounds", [None, slow((CENTER - 4 * S, CENTER + 2 * S))])
def test_the_default_method_takes_the_steps_of_the_scaled_function(bounds, scaled):
    of_z = None if bounds is None else tuple(bound / S for bound in bounds)
    found = scaled if bounds is None else run(scale=S, bounds=bounds, start=START - S)
    start = START if bounds is None else START - S
    expected = run(lambda z: quartic(S * z), start / S, bounds=of_z)
    assert found.best.value == expected.best.value < 1e-3
    np.testing.assert_array_equal(found.best.params, S * expected.best.params)
    np.testing.assert_array_equal(found.params, S * expected.params)
    np.testing.assert_array_equal(found.state.params, S * expected.state.params)
    np.testing.assert_array_equal(found.values, expected.values)


def test_sizes_are_rounded_to_powers_of_two(scaled):
    again = run(scale=1.3 * S)
    np.testing.assert_array_equal(again.params, scaled.params)


def test_a_journal_resumes_and_rebuilds_a_run_in_its_units(scaled, tmp_path):
    path = tmp_path / "run.jsonl"
    run(scale=S, journal=path, num_steps=5)
    again = run(scale=S, journal=path)
    np.testing.assert_array_equal(again.params, scaled.params)
    state = zo.replay(path, START, scale=S)
    np.testing.assert_array_equal(state.params, scaled.state.params)
    with pytest.raises(ValueError, match="its scale is") as error:
        zo.replay(path, START)
    assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="its scale is"):
        run(scale=2 * S, journal=path)


def test_a_state_continues_in_its_units(scaled):
    first = run(scale=S, num_steps=6)
    rest = run(scale=S, max_evaluations=60 - first.num_evaluations, state=first.state)
    np.testing.assert_array_equal(rest.params, scaled.params)


def test_points_lie_in_units_around_the_parameters():
    """|sᵢ| = μ max(|θᵢ|, 0.1 Sᵢ), for parameters and sizes that NumPy compares."""
    method = zo.bfgs(), zo.full_difference(1e-3), zo.search.backtracking()
    points = zo.ask_tell(START, *method, scale=S).ask()
    moved = np.sum(abs(points[1:] - points[:1]), axis=0)
    expected = 1e-3 * np.maximum(abs(START), 0.1 * S)
    np.testing.assert_allclose(moved, expected, rtol=1e-5)


PARAMS = {
    "w": jnp.asarray(np.linspace(-1, 1, 12).reshape(4, 3), jnp.float32),
    "v": jnp.asarray([0.5, -1.0, 2.0], jnp.float32),
}
UNITS = {"w": 4.0, "v": np.array([0.5, 8.0, 1.0], np.float32)}
INPUTS = np.linspace(-1, 1, 8).reshape(2, 4).astype(np.float32)


def network(p):
    return jnp.sum((jnp.tanh(jnp.asarray(INPUTS) @ p["w"]) - p["v"][None]) ** 2)


ENDS = -16.0, 16.0


@pytest.mark.parametrize(
    "method, rounding",
    [
        ((zo.radazo(1e-2), zo.forward_difference(zo.low_rank(), 3)), 0),
        # The loss is rounded in another way, which 1/μ = 200 amplifies.
        slow((zo.radazo(1e-2, moments="replayed"), zo.forward_difference()), 5e-4),
        slow((optax.sgd(1.0), zo.estimators.cma()), 0),
        slow(
            (
                optax.sgd(1.0),
                zo.accelerated(zo.adaptive_difference(zo.orthonormal(), 3)),
                zo.search.parabolic(extra_evaluations=1),
            ),
            0,
        ),
    ],
    ids=["low_rank", "replayed", "cma", "accelerated"],
)
def test_named_methods_take_the_steps_of_the_scaled_function(method, rounding):
    options = {"num_steps": 4, "progress": False}
    found = zo.minimize(network, PARAMS, *method, scale=UNITS, bounds=ENDS, **options)
    of_z = [
        jax.tree.map(lambda p, s, end=end: jnp.zeros_like(p) + end / s, PARAMS, UNITS)
        for end in ENDS
    ]
    expected = zo.minimize(
        lambda z: network(jax.tree.map(lambda x, s: x * s, z, UNITS)),
        jax.tree.map(lambda p, s: p / s, PARAMS, UNITS),
        *method,
        bounds=tuple(of_z),
        **options,
    )
    for name, unit in UNITS.items():
        np.testing.assert_allclose(
            found.params[name], unit * expected.params[name], rtol=rounding, atol=0
        )
        assert np.any(found.params[name] != PARAMS[name])


def test_solver_takes_the_same_steps_in_units():
    method = zo.zo_sgd(1e-2), zo.central_difference(num_directions=2)
    init, step = zo.solver(network, *method, scale=UNITS)
    state, step = init(PARAMS, jax.random.key(0)), jax.jit(step)
    for _ in range(3):
        state, _ = step(state)
    found = zo.minimize(
        network, PARAMS, *method, scale=UNITS, num_steps=3, progress=False
    )
    for name in PARAMS:
        np.testing.assert_array_equal(found.params[name], state.params[name])


def test_the_unit_of_a_leaf_builds_no_leaf():
    """Temporary memory of three steps in a compiled loop, in bytes."""
    size = 256
    params = {"w": jax.ShapeDtypeStruct((size, size), jnp.float32)}

    def temporary(scale):
        init, step = zo.solver(
            lambda p: jnp.sum(jnp.tanh(jnp.ones((2, size)) @ p["w"])),
            zo.zo_sgd(1e-3),
            zo.forward_difference(zo.low_rank(), 2),
            scale=scale,
        )
        state = jax.eval_shape(init, params, jax.random.key(0))

        def steps(state):
            return jax.lax.fori_loop(0, 3, lambda _, state: step(state)[0], state)

        compiled = jax.jit(steps, donate_argnums=0).lower(state).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporary({"w": 4.0}) < temporary(None) + size**2


@pytest.mark.parametrize(
    "scale, got",
    [
        (0, "got 0.0 at scale."),
        (-1.0, "got -1.0 at scale."),
        (np.nan, "got nan at scale."),
        (np.inf, "got inf at scale."),
        ([1.0, 0.0, 1.0], r"got 0.0 at scale\[1\]"),
        ("one", "got 'one' at scale. Give known numbers"),
        (True, "got True at scale. Give known numbers"),
        ({"a": 1.0}, "tree like params of numbers or of arrays"),
        (np.ones(2), r"got one of the shapes \(2,\)"),
        (1e-300, "in whose units float32 can hold params"),
        (1e-38, "in whose units float32 can hold params"),
    ],
)
def test_a_wrong_scale_is_named_in_one_line(scale, got):
    start = np.full(3, 1e3, np.float32)
    with pytest.raises((TypeError, ValueError), match=got) as error:
        short(start=start, scale=scale)
    assert str(error.value).startswith("scale must be ")
    assert "\n" not in str(error.value)


def test_a_traced_scale_is_refused():
    def of(scale):
        method = zo.zo_sgd(1.0), zo.forward_difference()
        return zo.ask_tell(START, *method, scale=scale).params

    with pytest.raises(TypeError, match="Give known numbers"):
        jax.jit(of)(1.0)


def test_a_rate_is_not_measured_in_units():
    with pytest.raises(ValueError, match="scale must be None on minibatches"):
        zo.minimize(
            lambda x, noise: jnp.sum((x - noise) ** 2),
            jnp.ones(3),
            sample=lambda key: jax.random.normal(key, (3,)),
            scale=2.0,
            num_steps=2,
            progress=False,
        )
