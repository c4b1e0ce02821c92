"""The low-rank distribution: its distribution, its axes, and its place in the
estimators."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import radazo_jax as zo
from radazo_jax._src.directions import generator, storage
from radazo_jax._src.directions.distribution import sample_directions
from radazo_jax._src.directions.layout import layout_of
from radazo_jax._src.directions.storage import Use
from radazo_jax._src.perturb import transform
from tests.helpers.jaxprs import equations
from tests.helpers.tables import jit

KEY = jax.random.key(0)


def drawn(distribution, params):
    def draw(key):
        return distribution.materialize(distribution.sample(key, params), params)

    return jit(draw)(KEY)


def test_rank_and_stacks():
    params = {"w": jnp.zeros((5, 8, 6)), "v": jnp.zeros(7), "thin": jnp.zeros((9, 2))}
    u = drawn(zo.low_rank(2), params)
    assert np.linalg.matrix_rank(u["w"]).tolist() == [2] * 5
    assert abs(np.corrcoef(u["w"][0].ravel(), u["w"][1].ravel())[0, 1]) < 0.9
    assert np.linalg.matrix_rank(u["thin"]) == 2  # Drawn dense: a side of 2 is full.
    assert len(np.unique(np.concatenate([x.ravel() for x in u.values()]))) == 265


def test_factors_of_many_directions_are_normals_by_position():
    rows, columns, many = 1100, 5, 512
    params = {"b": jnp.zeros(columns), "w": jnp.zeros((rows, columns))}
    layout = layout_of(params)
    numbers = jnp.arange(many, dtype=jnp.uint32)

    def factors():
        directions = sample_directions(zo.low_rank(), KEY, numbers, layout)
        dense, matrix = storage.cache(directions, layout, Use.TOGETHER).cached
        return dense.array, matrix.a, matrix.b

    program = jax.jit(factors).lower().compile()
    memory = program.memory_analysis()
    # Pairs of numbers, before they are split into the factors.
    assert memory.temp_size_in_bytes < 1.1 * memory.output_size_in_bytes
    dense, a, b = program()
    # The vector has the room of two factors too.
    total = 2 * columns + rows + columns
    keys = jax.vmap(jax.random.fold_in, (None, 0))(KEY, numbers)
    at = zo.random.positions((total,))
    expected = jit(jax.vmap(lambda key: generator.fast_normal(key, at)))(keys)
    expected = np.split(expected, [columns, 2 * columns, 2 * columns + rows], axis=1)
    found = [x.reshape(many, -1) for x in (dense, a, b)]
    chex.assert_trees_all_equal(found, [expected[0], *expected[2:]])


def test_factors_of_large_matrices_are_not_drawn_as_one():
    """An array of all of them would be held with the factors that are split from it."""
    rows, many = 2**17, 32
    params = {name: jax.ShapeDtypeStruct((rows, 8), jnp.bfloat16) for name in "abc"}
    layout = layout_of(params)

    def factors(numbers):
        directions = sample_directions(zo.low_rank(), KEY, numbers, layout)
        return storage.cache(directions, layout, Use.TOGETHER).cached

    jaxpr = jax.make_jaxpr(factors)(jnp.arange(many, dtype=jnp.uint32))
    made = [v.aval.size for e in equations(jaxpr.jaxpr) for v in e.outvars]
    assert many * rows <= max(made) <= 2**23


def annotated(distribution, fun, params):
    """The axes that a function's use of its leaves gives them, by path."""
    layout = transform.layout_for(distribution, fun, params)
    return {leaf.path: leaf.axes for leaf in layout.leaves}


def test_axes_are_taken_from_the_use():
    params = {
        "right": jnp.ones((4, 5)),
        "left": jnp.ones((6, 4)),
        "query": jnp.ones((4, 2, 3)),
        "output": jnp.ones((2, 3, 4)),
        "conv": jnp.ones((3, 3, 2, 5)),
        "layers": {"w": jnp.ones((7, 4, 4)), "scale": jnp.ones((7, 4))},
        "positions": jnp.ones((8, 4)),
        "embed": jnp.ones((9, 4)),
        "unused": jnp.ones((2, 4, 6)),
    }

    def fun(p):
        x = p["embed"][jnp.arange(8)] + p["positions"]

        def layer(x, leaf):
            return jnp.tanh(x @ leaf["w"]) * leaf["scale"][None, :], None

        x, _ = jax.lax.scan(layer, x, p["layers"])
        heads = jnp.einsum("td,dhk->thk", x, p["query"])
        x = jnp.einsum("thk,hkd->td", heads, p["output"])
        image = jnp.ones((1, 6, 6, 2))
        out = jax.lax.conv_general_dilated(
            image, p["conv"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        return jnp.sum(x @ p["right"]) + jnp.sum(p["left"] @ x.T) + jnp.sum(out)

    assert annotated(zo.low_rank(), fun, params) == {
        "['right']": ((0,), (1,)),
        "['left']": ((1,), (0,)),
        "['query']": ((0,), (1, 2)),
        "['output']": ((0, 1), (2,)),
        "['conv']": ((0, 1, 2), (3,)),
        "['layers']['w']": ((1,), (2,)),
        "['layers']['scale']": None,
        "['positions']": ((0,), (1,)),
        "['embed']": ((0,), (1,)),
        "['unused']": ((1,), (2,)),
    }


@pytest.mark.parametrize("as_function", [True, False])
def test_dimension_numbers_override_what_is_inferred(as_function):
    params = {"w": jnp.ones((4, 6, 5)), "v": jnp.ones((4, 6))}
    numbers = {"w": zo.distributions.MatrixAxes((0, 1), (2,)), "v": None}
    distribution = zo.low_rank(
        1, dimension_numbers=(lambda p: numbers) if as_function else numbers
    )
    found = annotated(distribution, lambda p: jnp.sum(p["w"]), params)
    assert found == {"['w']": numbers["w"], "['v']": None}
    u = drawn(distribution, params)
    assert np.linalg.matrix_rank(u["w"].reshape(24, 5)) == 1
    assert np.linalg.matrix_rank(u["v"]) == 4


def test_nothing_is_rounded_into_bfloat16_matrices():
    """A perturbation far below the weights' resolution still has its effect."""
    w = jnp.ones((64, 64), jnp.bfloat16)
    x = jnp.expand_dims(jnp.where(jnp.arange(64) % 2, 1, -1), 0).astype(jnp.bfloat16)

    def loss(w):
        return jnp.sum(jnp.dot(x, w, preferred_element_type=jnp.float32))

    direction = zo.low_rank().sample(KEY, w)
    u = np.asarray(
        zo.low_rank().materialize(direction, w.astype(jnp.float32)), np.float64
    )
    scale = 1e-4
    got = float(zo.perturb(loss)(w, direction, scale)) - float(loss(w))
    np.testing.assert_allclose(
        got, scale * np.sum(np.asarray(x, np.float64) @ u), rtol=1e-3
    )
    assert (w + jnp.asarray(scale * u, jnp.bfloat16) == w).all()


def test_bad_arguments():
    with pytest.raises(ValueError, match=r"rank.*0"):
        zo.low_rank(0)
    with pytest.raises(TypeError, match=r"MatrixAxes or None; got 3 at \['w'\]"):
        zo.low_rank(dimension_numbers={"w": 3})


@pytest.mark.slow
@pytest.mark.parametrize("includes_params", [True, False])
def test_factors_of_candidates(includes_params):
    """Their products are the candidates, with rows and columns in any order."""
    params = {
        "layers": jnp.ones((3, 6, 5)),
        "left": jnp.ones((7, 6)),
        "heads": jnp.ones((6, 2, 4)),
    }

    def fun(p):
        x, _ = jax.lax.scan(
            lambda x, w: (x @ w @ jnp.ones((5, 6)), None), jnp.ones((2, 6)), p["layers"]
        )
        heads = jnp.einsum("td,dhk->thk", x, p["heads"])
        return jnp.sum(p["left"] @ x.T) + jnp.sum(heads)

    difference = zo.forward_difference if includes_params else zo.central_difference
    estimator = difference(zo.low_rank(2), 2, 0.5)

    def found(key):
        draw = zo.estimators.Draw.once(key)._replace(fun=fun)
        points, _ = estimator.points(draw, params, ())
        factors = zo.estimators.candidate_factors(points)
        return zo.estimators.candidates(points, params), factors

    candidates, (a, b) = jit(found)(KEY)
    assert a["left"].shape[1:] == (6, 2) and b["left"].shape[1:] == (7, 2)
    moved = {name: np.einsum("...ir,...jr->...ij", a[name], b[name]) for name in params}
    moved["left"] = moved["left"].swapaxes(1, 2)
    for name, leaf in params.items():
        expected = np.asarray(candidates[name], np.float64)
        got = leaf[None] + moved[name].reshape(expected.shape)
        np.testing.assert_allclose(got, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("distribution", "error", "text"),
    [
        (zo.gaussian(), TypeError, "must be along directions of low_rank; got"),
        (zo.low_rank(2), ValueError, r"alone; got the leaf \['thin'\] of shape \(9, 2"),
    ],
)
def test_factors_of_other_points_are_refused(distribution, error, text):
    params = {"thin": jnp.zeros((9, 2)), "w": jnp.zeros((8, 6))}
    points = zo.estimators.sample_points(
        distribution, zo.estimators.Draw.once(KEY), 1, [0.1], params
    )
    with pytest.raises(error, match=text):
        zo.estimators.candidate_factors(points)
