"""Evaluations sharded over devices: the same numbers, and only scalars sent."""

import functools
import math
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import radazo_jax as zo
from tests.helpers.compare import Hashed
from tests.helpers.compiled import compilations, sent
from tests.helpers.tables import (
    DISTRIBUTIONS,
    ESTIMATORS,
    FAST,
    KINDS,
    assert_same_draws,
    each_distribution,
    every,
    jit,
    mesh_of,
    slow,
)

ALONG_K = zo.sharded("k")


def loss(params, x):
    hidden = jnp.tanh(x @ params["w"] + params["b"][None])
    return jnp.mean(hidden**2)


def problem(features=16, hidden=8):
    params = {
        "w": jax.random.normal(jax.random.key(1), (features, hidden)) / 4,
        "b": jnp.zeros(hidden),
    }
    return params, jax.random.normal(jax.random.key(2), (32, features))


def estimate_on(
    mesh,
    estimator,
    params,
    x,
    params_spec=None,
    batch_spec=None,
    jit=jit,
    evaluator=ALONG_K,
):
    """Value and gradient on a mesh, and the program's collectives."""
    key = jax.random.key(3)
    with jax.set_mesh(mesh):
        specs = {"w": params_spec or P(), "b": P()}
        params = jax.tree.map(jax.device_put, params, specs)
        x = jax.device_put(x, batch_spec or P())
        program = jit(zo.value_and_grad(loss, estimator, evaluator=evaluator))
        compiled = program.lower(key, params, x).compile()
        value, gradient = compiled(key, params, x)
    return jax.device_get((value, gradient)), sent(compiled)


@functools.cache
def on_one_device(name, distribution, batch_size=None):
    """The estimate along five directions."""
    estimator = ESTIMATORS[name](DISTRIBUTIONS[distribution], 5, 0.1)
    evaluator = zo.vectorized(batch_size)
    value_and_grad = jit(zo.value_and_grad(loss, estimator, evaluator=evaluator))
    return value_and_grad(jax.random.key(3), *problem())


def assert_close(gradient, expected):
    """Up to the rounding of losses whose differences are divided by μ."""

    def compare(got, expected):
        scale = np.linalg.norm(expected)
        np.testing.assert_allclose(got, expected, rtol=0, atol=2e-4 * scale)

    jax.tree.map(compare, gradient, expected)


@pytest.mark.parametrize(
    ("distribution", "name", "batch_size"),
    each_distribution(ESTIMATORS, (None, 1), fast=["sphere"], among=KINDS),
)
def test_estimates_what_one_device_does(distribution, name, batch_size):
    """K = 5, so that neither 6 points nor 10 divide by 4 devices."""
    value, gradient = on_one_device(name, distribution, batch_size)
    estimator = ESTIMATORS[name](DISTRIBUTIONS[distribution], 5, 0.1)
    evaluator = zo.sharded("k", batch_size)
    (sharded_value, sharded_gradient), found = estimate_on(
        mesh_of(4), estimator, *problem(), evaluator=evaluator
    )
    np.testing.assert_allclose(sharded_value, value, rtol=1e-6)
    assert_close(sharded_gradient, gradient)
    num_points = 6 if name == "forward" else 10
    assert found == [4 * 4 * -(-num_points // 4)], "one gather of the padded losses"


@pytest.mark.parametrize(
    ("distribution", "name"), [slow("sphere", "forward"), slow("low_rank", "central")]
)
def test_one_by_one_is_bit_equal_on_any_number_of_devices(distribution, name):
    estimator = ESTIMATORS[name](DISTRIBUTIONS[distribution], num_directions=5)
    options = {"jit": jax.jit, "evaluator": zo.sharded("k", batch_size=1)}
    results = [
        estimate_on(mesh_of(size), estimator, *problem(), **options)[0]
        for size in (1, 4)
    ]
    chex.assert_trees_all_equal(*results)


@pytest.mark.parametrize("distribution", every(KINDS, "sphere"))
def test_equal_losses_make_bit_equal_gradients_whatever_is_together(distribution):
    """Sums of small integers have no rounding, in whatever order."""

    def exact(params, x):
        del x
        return jnp.sum(jnp.round(64 * params["w"])) + jnp.sum(jnp.round(params["b"]))

    (params, x), key = problem(), jax.random.key(0)
    results = []
    for size in (1, 8):
        estimator = zo.forward_difference(DISTRIBUTIONS[distribution], 11, 1.0)
        with jax.set_mesh(mesh_of(size)):
            step = jax.jit(
                zo.value_and_grad(exact, estimator, evaluator=zo.sharded("k"))
            )
            results.append(jax.device_get(step(key, params, x)))
    chex.assert_trees_all_equal(*results)


@pytest.mark.parametrize(
    ("distribution", "name", "types"),
    each_distribution(
        ESTIMATORS, (AxisType.Auto, AxisType.Explicit), fast=["sphere"], among=KINDS
    ),
)
def test_replicated_parameters_send_scalars_alone(distribution, name, types):
    params, x = problem(features=64, hidden=32)
    estimator = ESTIMATORS[name](DISTRIBUTIONS[distribution], num_directions=7)
    mesh = mesh_of(4, 2, types=types)
    _, found = estimate_on(mesh, estimator, params, x, batch_spec=P("data"))
    num_values = 8 if name == "forward" else 14
    assert found and sum(found) <= 4 * (num_values + 1) + 64


@pytest.mark.parametrize("distribution", every(KINDS, *FAST))
def test_data_parallelism_alone_sends_scalars_alone(distribution):
    params, x = problem(features=64, hidden=32)
    estimator = zo.forward_difference(DISTRIBUTIONS[distribution], num_directions=7)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    options = {"batch_spec": P("data"), "evaluator": zo.vectorized()}
    _, found = estimate_on(mesh, estimator, params, x, **options)
    assert found and sum(found) <= 4 * 8 + 64


@pytest.mark.parametrize(
    ("distribution", "types"),
    each_distribution((AxisType.Auto, AxisType.Explicit), fast=["sphere"], among=KINDS),
)
def test_all_three_in_one_mesh(distribution, types):
    params, x = problem()
    estimator = zo.forward_difference(DISTRIBUTIONS[distribution], 5, 0.1)
    (value, gradient), _ = estimate_on(
        mesh_of(2, 2, 2, types=types), estimator, params, x, P(None, "model"), P("data")
    )
    expected_value, expected = on_one_device("forward", distribution)
    np.testing.assert_allclose(value, expected_value, rtol=1e-6)
    assert_close(gradient, expected)


SPECS = (P(None, ("data", "model")), P("k", "data"))


@pytest.mark.parametrize(
    ("name", "types"),
    each_distribution(
        (AxisType.Explicit, AxisType.Auto),
        fast=["sphere"],
        among=(*KINDS, "orthonormal", "coordinate in turn"),
    ),
)
def test_directions_are_the_same_where_the_parameters_are_sharded(name, types):
    params, _ = problem()
    distribution = DISTRIBUTIONS[name]

    def draw(key, params):
        return distribution.materialize(distribution.sample(key, params), params)

    # As an argument: of a constant key, XLA would compute a few numbers by itself.
    key = jax.random.key(5)
    expected = jax.device_get(jax.jit(draw)(key, params))
    with jax.set_mesh(mesh_of(2, 2, 2, types=types)):
        for spec in SPECS:
            specs = {"w": spec, "b": P("model")}
            placed = jax.tree.map(jax.device_put, params, specs)
            shardings = jax.tree.map(lambda p: p.sharding, placed)
            drawn = jax.jit(draw, out_shardings=shardings)(key, placed)
            assert_same_draws(name, jax.device_get(drawn), expected)


def test_gradients_and_steps_have_the_sharding_of_explicit_parameters():
    (params, x), key = problem(), jax.random.key(0)
    tx = zo.radazo(1e-2)
    value_and_grad = zo.value_and_grad(
        loss, zo.forward_difference(Hashed()), evaluator=zo.sharded("k")
    )
    with jax.set_mesh(mesh_of(2, 2, 2, types=AxisType.Explicit)):
        specs = {"w": P(None, "model"), "b": P("model")}
        params = jax.tree.map(jax.device_put, params, specs)
        x = jax.device_put(x, P("data"))

        @jax.jit
        def step(key, params, state, x):
            _, gradient = value_and_grad(key, params, x)
            assert jax.typeof(gradient["w"]).sharding.spec == specs["w"]
            updates, state = tx.update(gradient, state, params)
            return optax.apply_updates(params, updates), state

        after, _ = step(key, params, jax.jit(tx.init)(params), x)
        for name, spec in specs.items():
            assert after[name].sharding.spec == spec


@pytest.mark.parametrize("types", [slow(AxisType.Auto), slow(AxisType.Explicit)])
def test_replayed_moments_of_sharded_parameters(types):
    params, x = problem()
    optimizer = zo.radazo(1e-2, moments="replayed", window=3, b1=0.3)
    # Differences of large values are the same if sums are taken in another order.
    estimator = zo.central_difference(zo.low_rank(), 2, smoothing=0.5)
    init, step = zo.solver(loss, optimizer, estimator)

    def run(params, x):
        state = init(params, 0)
        step_of = jax.jit(step)
        for _ in range(3):
            state, _ = step_of(state, x)
        return state.params

    expected = run(params, x)
    specs = {"w": P(None, "model"), "b": P("model")}
    with jax.set_mesh(mesh_of(2, 2, 2, types=types)):
        placed = jax.tree.map(jax.device_put, params, specs)
        after = run(placed, x)
        for name, spec in specs.items():
            assert after[name].sharding.spec == spec
    chex.assert_trees_all_close(
        jax.device_get(after), jax.device_get(expected), rtol=1e-3, atol=1e-4
    )


@pytest.mark.parametrize("types", [AxisType.Auto, slow(AxisType.Explicit)], ids=str)
def test_a_call_outside_of_jit_is_a_program_for_each_sharding(types, caplog):
    """The parameters and the batch are sharded; operation by operation it was 100."""
    params, x = problem()
    mesh = mesh_of(1, 2, 2, types=types)
    estimator = ESTIMATORS["forward"](DISTRIBUTIONS["sphere"], 5, 0.1)
    value_and_grad = zo.value_and_grad(loss, estimator)
    expected_value, expected = on_one_device("forward", "sphere")
    for spec in (P(None, "model"), P("model")):
        w = jax.device_put(params["w"], jax.NamedSharding(mesh, spec))
        placed = params | {"w": w}
        batch = jax.device_put(x, jax.NamedSharding(mesh, P("data")))
        with compilations(caplog) as found:
            value, gradient = value_and_grad(jax.random.key(3), placed, batch)
        assert 0 < len(found) < 5
        assert gradient["w"].sharding.is_equivalent_to(w.sharding, w.ndim)
        np.testing.assert_allclose(value, expected_value, rtol=1e-6)
        assert_close(jax.device_get(gradient), expected)
        with compilations(caplog) as found:
            value_and_grad(jax.random.key(4), placed, batch)
        assert not found


@pytest.mark.parametrize("distribution", every(KINDS))
def test_explicit_parameters_without_a_mesh_around(distribution):
    """The mesh comes from the types of arrays, as in operations of JAX."""
    params, x = problem()
    mesh = mesh_of(1, 1, 2, types=AxisType.Explicit)
    params["w"] = jax.device_put(params["w"], jax.NamedSharding(mesh, P(None, "model")))
    estimator = ESTIMATORS["forward"](DISTRIBUTIONS[distribution], 5, 0.1)
    value_and_grad = jit(zo.value_and_grad(loss, estimator))
    value, gradient = value_and_grad(jax.random.key(3), params, x)
    expected_value, expected = on_one_device("forward", distribution)
    np.testing.assert_allclose(value, expected_value, rtol=1e-6)
    assert_close(gradient, expected)


@pytest.mark.slow
def test_evaluations_sharded_over_two_axes():
    given = (zo.forward_difference(zo.rademacher(), num_directions=7), *problem())
    over_two, over_one = zo.sharded(("k", "data"), 1), zo.sharded("k", 1)
    two, found = estimate_on(mesh_of(2, 4), *given, jit=jax.jit, evaluator=over_two)
    one, _ = estimate_on(mesh_of(8), *given, jit=jax.jit, evaluator=over_one)
    chex.assert_trees_all_equal(two, one)
    assert found == [4 * 8]


@pytest.mark.slow
def test_inside_a_shard_map_of_the_user():
    (params, x), key = problem(), jax.random.key(3)
    estimator = zo.forward_difference(zo.rademacher(), num_directions=7, smoothing=0.1)
    evaluator = zo.sharded("k", batch_size=1)
    value_and_grad = zo.value_and_grad(loss, estimator, evaluator=evaluator)
    with jax.set_mesh(mesh_of(8)):
        manual = jax.shard_map(
            value_and_grad, in_specs=P(), out_specs=P(), check_vma=False
        )
        inside = jax.device_get(jit(manual)(key, params, x))
    outside, _ = estimate_on(mesh_of(8), estimator, params, x, evaluator=evaluator)
    chex.assert_trees_all_close(inside, outside, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_a_custom_distribution_whose_first_draw_is_inside_a_shard_map():
    """On axes that no other test has: JAX keeps the eager program that fails."""

    class New(Hashed):
        """A distribution that has drawn nothing."""

    params, key = jnp.ones(5), jax.random.key(3)
    value_and_grad = zo.value_and_grad(
        lambda params: jnp.sum(params**2), zo.forward_difference(New(), 3)
    )
    mesh = jax.make_mesh((2,), ("new",), axis_types=(AxisType.Auto,))
    with jax.set_mesh(mesh):
        inside = jax.shard_map(
            value_and_grad, in_specs=P(), out_specs=P(), check_vma=False
        )
        value, _ = jit(inside)(key, params)
    assert value == 5


@pytest.mark.slow
@pytest.mark.parametrize("name", ESTIMATORS)
def test_aux_is_that_of_one_device(name):
    params, x = problem()

    def with_aux(params, x):
        return loss(params, x), {"mean": jnp.mean(x @ params["w"])}

    estimator = ESTIMATORS[name](Hashed(), num_directions=3)
    alone, sharded = (
        zo.value_and_grad(with_aux, estimator, evaluator=evaluator, has_aux=True)
        for evaluator in (zo.vectorized(1), zo.sharded("k", 1))
    )
    key = jax.random.key(0)
    (value, aux), gradient = alone(key, params, x)
    with jax.set_mesh(mesh_of(4)):
        (sharded_value, sharded_aux), sharded_gradient = sharded(key, params, x)
    np.testing.assert_allclose(sharded_aux["mean"], aux["mean"], rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(sharded_value, value, rtol=1e-6)
    np.testing.assert_allclose(sharded_gradient["w"], gradient["w"], atol=1e-3)


@pytest.mark.slow
def test_each_device_does_its_share_of_the_products():
    (params, x), key = problem(features=64, hidden=64), jax.random.key(0)

    def num_products(size):
        """Counts products of [32, 64] with [64, 64] in sequence."""
        estimator = zo.forward_difference(Hashed(), num_directions=7)
        with jax.set_mesh(mesh_of(size)):
            step = jax.jit(
                zo.value_and_grad(loss, estimator, evaluator=zo.sharded("k"))
            )
            hlo = step.lower(key, params, x).compile().as_text()
        products = re.findall(r"f32\[([\d,]+)\]\S* dot\(", hlo)
        elements = sum(math.prod(map(int, shape.split(","))) for shape in products)
        return elements / (32 * 64)

    assert [num_products(size) for size in (1, 4)] == [8, 2]


def test_bad_axes_are_named():
    params, x = problem()
    with pytest.raises(TypeError, match="axis_name must be the name of a mesh axis"):
        zo.sharded(3)
    with pytest.raises(TypeError, match="axis_name must be the name of a mesh axis"):
        zo.sharded(())
    with pytest.raises(ValueError, match=r"must name each axis once; got \('k', 'k'\)"):
        zo.sharded(("k", "k"))
    value_and_grad = zo.value_and_grad(
        loss, zo.forward_difference(Hashed()), evaluator=zo.sharded("k")
    )
    with pytest.raises(ValueError, match=r"there is no mesh.*jax.set_mesh"):
        value_and_grad(0, params, x)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    with (
        jax.set_mesh(mesh),
        pytest.raises(ValueError, match="got 'k', and it has 'data'"),
    ):
        value_and_grad(0, params, x)


@pytest.mark.parametrize("types", [slow(AxisType.Auto), AxisType.Explicit], ids=str)
def test_an_axis_that_is_in_use_is_named(types):
    params, x = problem()
    value_and_grad = zo.value_and_grad(
        loss, zo.forward_difference(Hashed()), evaluator=zo.sharded("k")
    )
    with jax.set_mesh(mesh_of(2, types=types)):
        sharded = params | {"w": jax.device_put(params["w"], P("k"))}
        with pytest.raises(ValueError, match=r"'k', over which params\['w'\] is"):
            value_and_grad(0, sharded, x)
        batch = jax.device_put(x, P("k"))
        with pytest.raises(ValueError, match="'k', over which the arguments of fun"):
            value_and_grad(0, params, batch)


def test_a_loss_that_divides_all_axes_is_referred_to_this_evaluator():
    def local(params, x):
        return jax.lax.pmean(loss(params, x), "data")

    def divided(params, x):
        return jax.shard_map(local, in_specs=(P(), P("data")), out_specs=P())(params, x)

    params, x = problem()
    estimator = ESTIMATORS["forward"](Hashed(), 5, 0.1)

    def value(evaluator):
        with jax.set_mesh(mesh_of(2, 2, types=AxisType.Auto)):
            estimate = zo.value_and_grad(divided, estimator, evaluator=evaluator)
            return estimate(0, params, x)[0]

    with pytest.raises(ValueError, match=r"Pass sharded\('k', batch_size=1\) to"):
        value(zo.sharded("k"))
    np.testing.assert_allclose(value(zo.sharded("k", 1)), loss(params, x), rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("distribution", "batch_size"), [("sphere", None), ("low_rank", 1)]
)
def test_estimates_of_their_own_inside_a_shard_map(distribution, batch_size):
    """Parameters and keys of each device, with the checks of `shard_map` on."""
    value_and_grad = zo.value_and_grad(
        loss,
        zo.forward_difference(DISTRIBUTIONS[distribution], 3),
        evaluator=zo.vectorized(batch_size),
    )
    keys = jax.random.split(jax.random.key(0), 4)
    params = {
        "w": jax.random.normal(jax.random.key(1), (4, 6, 5)),
        "b": jnp.zeros((4, 5)),
    }
    x = jnp.ones((3, 6))

    def of_device(key, params):
        params = jax.tree.map(lambda p: p[0], params)
        direction = DISTRIBUTIONS[distribution].sample(key[0], params)
        moved = zo.perturb(loss)(params, direction, 0.1, x)
        value, gradient = value_and_grad(key[0], params, x)
        return jax.tree.map(lambda y: y[None], (moved, value, gradient))

    split = jax.shard_map(of_device, mesh=mesh_of(4), in_specs=P("k"), out_specs=P("k"))
    got, alone = jit(split)(keys, params), jit(of_device)
    for i in range(4):
        mine = slice(i, i + 1)
        found, own = jax.tree.map(lambda x, mine=mine: x[mine], (got, params))
        chex.assert_trees_all_close(found, alone(keys[mine], own), rtol=2e-4, atol=2e-4)
