"""The paper's relatives against their equations in float64 NumPy, and in every run."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from compare import Hashed, assert_same
from tables import every, jit, slow

import radazo_jax as zo
from radazo_jax._src.estimate.prior import optimal_share

SLOPES = np.array([0.5, -1.0, 2.0, 1.5, -0.25, 1.0])
CURVATURES = np.array([1.0, 3.0, 0.5, 2.0, 4.0, 1.0])
PARAMS = {"a": jnp.array([[1.0, -2.0], [0.5, 0.25]]), "b": jnp.array([3.0, -1.0])}
DIMENSION = 6

# Each with few directions.
MAKERS = {
    "residual_feedback": (zo.residual_feedback, {"num_directions": 2}),
    "adaptive_difference": (zo.adaptive_difference, {"num_directions": 3}),
    "accelerated": (
        lambda **kwargs: zo.accelerated(zo.forward_difference(**kwargs)),
        {"num_directions": 2},
    ),
    "spsa": (zo.spsa, {}),
    "variance_reduced": (
        zo.variance_reduced,
        {"num_directions": 2, "period": 3, "anchor_steps": 1},
    ),
    "coordinate_wise": (zo.coordinate_wise, {"num_directions": 3}),
    "all_coordinates": (zo.coordinate_wise, {}),
    "prior_guided": (zo.prior_guided, {"num_directions": 2, "decay": 0.5}),
    "prior_guided(cosine)": (
        zo.prior_guided,
        {"num_directions": 2, "prior": lambda x: moved(x, 1.0), "mix": "cosine"},
    ),
    "query_reuse": (zo.query_reuse, {"num_directions": 2, "memory": 3}),
    "linear_interpolation": (
        zo.linear_interpolation,
        {"num_directions": 2, "radius": 0.1},
    ),
    "gaussian_process": (zo.gaussian_process, {"num_directions": 2, "memory": 8}),
    "random_features": (
        zo.gaussian_process,
        {
            "num_directions": 1,
            "memory": 8,
            "kernel": "squared_exponential",
            "num_features": 64,
        },
    ),
    "majority_vote": (zo.majority_vote, {"num_directions": 3}),
    "momentum_perturbation": (zo.momentum_perturbation, {}),
}
HASHED = Hashed()
WITH_LAW = set(MAKERS) - {"spsa", "coordinate_wise", "all_coordinates"}


def make(name, law=HASHED, **kwargs):
    """An estimator of the table, by a law that costs nothing to compile."""
    maker, arguments = MAKERS[name]
    laws = {"law": law} if name in WITH_LAW else {}
    return maker(**laws, **arguments, **kwargs)


# Those whose values show the derivative along the gradient exactly.
EXACT_SLOPES = set(MAKERS) - {
    "residual_feedback",
    "majority_vote",
    "gaussian_process",
    "random_features",
}


def flat(tree):
    """The leaves as one float64 vector, or those of stacked trees as rows."""
    leaves = [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(tree)]
    return np.concatenate([leaf.reshape(-1) for leaf in leaves])


def rows(trees):
    leaves = [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(trees)]
    return np.concatenate([leaf.reshape(len(leaf), -1) for leaf in leaves], 1)


def quadratic(x, level=0.0):
    """Of float64 vectors."""
    return level + x @ SLOPES + (x**2) @ CURVATURES / 2


def traced(params):
    """The same of trees, for JAX."""
    x = jnp.concatenate([leaf.reshape(-1) for leaf in jax.tree.leaves(params)])
    slopes, curvatures = (jnp.asarray(c, x.dtype) for c in (SLOPES, CURVATURES))
    return jnp.sum(slopes * x + curvatures * x**2 / 2)


def derivative(x):
    return SLOPES + CURVATURES * x


class Steps:
    """Steps of an estimator whose values come from NumPy, in float64."""

    def __init__(self, estimator, fun=quadratic):
        self.fun = fun
        self.state = estimator.init(PARAMS)

        @jit
        def ask(key, params, state):
            points = estimator.points(key, params, state)
            one = jax.vmap(lambda u: points.directions.law.materialize(u, params))
            return points, zo.candidates(points, params), one(points.directions)

        self.ask, self.reduce = ask, jit(estimator.reduce)

    def __call__(self, step, params=PARAMS, values=None, **kwargs):
        """The estimate, the points, their values, and the directions."""
        key = jax.random.key(step)
        points, at, us = self.ask(key, params, self.state)
        at = rows(at)
        found = self.fun(at, **kwargs) if values is None else values(at)
        given = jnp.asarray(found, jnp.float32)
        estimate, self.state = self.reduce(points, given, params, self.state)
        return estimate, at, found, rows(us)


def moved(params, by):
    return jax.tree.map(lambda p: p + by, params)


# --- In every run ------------------------------------------------------------------


@pytest.mark.parametrize("name", every(MAKERS, "accelerated"))
def test_runs_everywhere(name, tmp_path):
    """The same steps compiled, by ask and tell, spread, and rebuilt from a journal."""
    estimator, steps = make(name), 5
    optimizer, path = optax.sgd(1e-3), tmp_path / "run.jsonl"
    run = functools.partial(
        zo.minimize, traced, PARAMS, optimizer, num_steps=steps, key=3, progress=False
    )
    journaled = run(estimator=estimator, journal=path)
    replayed = zo.replay(path, PARAMS, optimizer, estimator)
    assert_same(replayed, journaled.state)
    assert not np.array_equal(flat(journaled.params), flat(PARAMS))

    init, ask, tell = zo.ask_tell(optimizer, estimator)
    told = init(PARAMS, 3)
    for _ in range(steps):
        candidates, told = ask(told)
        told = tell(told, quadratic(rows(candidates)))
    with jax.set_mesh(jax.make_mesh((8,), ("k",))):
        spread = run(estimator=make(name, axis_name="k"))
    for params in (told.run.params, spread.params):
        np.testing.assert_allclose(
            flat(params), flat(journaled.params), rtol=2e-3, atol=2e-4
        )

    # A step without a value changes nothing, and one without some of them is finite.
    before = told.run
    candidates, told = ask(told)
    told = tell(told, np.full(len(rows(candidates)), np.nan))
    assert_same(told.run.params, before.params)
    candidates, told = ask(told)
    values = quadratic(rows(candidates))
    values[-1] = np.inf
    told = tell(told, values)
    candidates, told = ask(told)
    told = tell(told, quadratic(rows(candidates)))
    assert np.isfinite(flat(told.run.params)).all()


def on_explicit_mesh():
    types = (jax.sharding.AxisType.Explicit,) * 2
    return jax.make_mesh((4, 2), ("k", "model"), axis_types=types)


@pytest.mark.parametrize("name", every(MAKERS, "linear_interpolation"))
@pytest.mark.parametrize(
    "kind", ["float64", "bfloat16", "sharded", slow("orthonormal")]
)
def test_dtypes_meshes_and_laws(name, kind):
    """Two steps: a state stays of its types, and a gradient has the parameters'."""
    estimator, params, mesh = (
        make(name),
        {"w": jnp.ones((4, 2)), "b": jnp.ones(3)},
        None,
    )
    if kind == "orthonormal":
        estimator = make(name, law=zo.orthonormal())
    with jax.enable_x64(kind == "float64"):
        if kind in ("float64", "bfloat16"):
            params = jax.tree.map(lambda p: p.astype(kind), params)
        if kind == "sharded":
            mesh = on_explicit_mesh()
            estimator = make(name, axis_name="k")
            specs = {"w": jax.P("model", None), "b": jax.P()}
            params = jax.tree.map(
                lambda p, spec: jax.device_put(p, jax.NamedSharding(mesh, spec)),
                params,
                specs,
            )

        def loss(params):
            return jnp.sum(params["w"] ** 2) + jnp.sum(params["b"] ** 2)

        @jit
        def two(params):
            first = estimator.init(params)
            _, state = estimator.estimate(loss, 0, params, first)
            (_, gradient), last = estimator.estimate(loss, 1, params, state)
            # Of a scalar that init made, the type names no mesh.
            kinds = [
                jax.tree.map(lambda x: (x.shape, x.dtype), state)
                for state in (first, state, last)
            ]
            assert kinds[0] == kinds[1] == kinds[2]
            assert jax.tree.map(jax.typeof, gradient) == jax.tree.map(
                jax.typeof, params
            )
            return gradient

        with jax.set_mesh(mesh) if mesh else contextlib.nullcontext():
            gradient = two(params)
        assert all(
            np.isfinite(np.asarray(g, np.float64)).all() for g in gradient.values()
        )


@pytest.mark.parametrize("name", sorted(EXACT_SLOPES))
def test_the_slope_is_that_along_the_gradient(name):
    """Exactly, in the first step, on a linear function."""
    estimate, *_ = Steps(make(name), lambda at: at @ SLOPES)(0)
    exact = flat(estimate.gradient) @ SLOPES
    np.testing.assert_allclose(estimate.slope, exact, rtol=5e-3)


# --- One point, and two ------------------------------------------------------------


def test_residual_feedback():
    mu, law = 0.5, Hashed()
    steps = Steps(zo.residual_feedback(law, 2, mu))
    before = None
    for i in range(3):
        params = moved(PARAMS, 0.1 * i)
        estimate, _, values, us = steps(i, params, level=7.0)
        before = np.mean(values) if before is None else before
        expected = ((values - before) / mu) @ us / 2
        np.testing.assert_allclose(flat(estimate.gradient), expected, rtol=1e-3)
        np.testing.assert_allclose(estimate.value, np.mean(values), rtol=1e-5)
        before = np.mean(values)
    # A failed step leaves the value of the one before.
    steps(3, values=lambda at: np.full(len(at), np.nan))
    np.testing.assert_allclose(steps.state.value, before, rtol=1e-6)


def test_residual_feedback_is_unbiased():
    estimator = zo.residual_feedback(zo.rademacher(), 1, 0.3)
    state = estimator.init(PARAMS)._replace(value=jnp.float32(4.0))

    @jit
    @jax.vmap
    def one(key):
        return estimator.estimate(traced, key, PARAMS, state)[0][1]

    got = rows(one(jax.random.split(jax.random.key(0), 4000)))
    error = got.std(0) / np.sqrt(len(got))
    assert (abs(got.mean(0) - derivative(flat(PARAMS))) < 4 * error).all()


def test_spsa():
    mu = 0.1
    steps = Steps(zo.spsa(3, mu))
    estimate, _, values, us = steps(0)
    above, below = values.reshape(3, 2).T
    expected = np.mean((above - below)[:, None] / (2 * mu * us), 0)
    np.testing.assert_allclose(flat(estimate.gradient), expected, rtol=1e-3)


# --- Variance reduction ------------------------------------------------------------


def test_variance_reduced():
    """Algorithm 2 with a mean over the first two steps of each period of four."""
    mu, size = 0.5, 3
    steps = Steps(zo.variance_reduced(Hashed(), size, mu, period=4, anchor_steps=2))
    anchor, mean = None, None
    for i in range(6):
        params, level = moved(PARAMS, 0.1 * i), float(i)
        estimate, _, _, us = steps(i, params, level=level)
        theta, us, phase = flat(params), us[:size], i % 4

        def f(x, level=level):
            return quadratic(x, level)

        if phase == 0:
            anchor, mean = theta, np.zeros(DIMENSION)
        if phase < 2:
            central = [(f(anchor + mu * u) - f(anchor - mu * u)) / (2 * mu) for u in us]
            mean = (phase * mean + np.array(central) @ us / size) / (phase + 1)
            expected = mean
        else:
            here = [(f(theta + mu * u) - f(theta)) / mu for u in us]
            there = [(f(anchor + mu * u) - f(anchor)) / mu for u in us]
            expected = (np.array(here) - there) @ us / size + mean
        np.testing.assert_allclose(
            flat(estimate.gradient), expected, rtol=1e-3, atol=1e-4
        )


def test_points_beside_the_parameters_in_turn():
    """One by one and all at once, with parameters of 16 bits too."""

    def narrow(params):
        return jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)

    def loss(params):
        return traced(jax.tree.map(lambda p: p.astype(jnp.float32), params))

    @jit
    def estimates(params, further):
        found = []
        for size in (None, 1):
            estimator = make("variance_reduced", smoothing=0.5, batch_size=size)
            state = estimator.init(params)
            _, state = estimator.estimate(loss, 0, params, state)
            found.append(estimator.estimate(loss, 1, further, state)[0][1])
        return found

    for dtype in (lambda params: params, narrow):
        found = estimates(dtype(PARAMS), dtype(moved(PARAMS, 1.0)))
        at_once, in_turn = (
            flat(jax.tree.map(lambda g: g.astype(jnp.float32), tree)) for tree in found
        )
        np.testing.assert_allclose(in_turn, at_once, rtol=0.02)
        assert (abs(at_once) > 0).all()


def test_at_the_anchor_nothing_is_noise():
    """There all estimates of a period are the anchor's, whatever the minibatch."""
    steps = Steps(zo.variance_reduced(num_directions=2, period=4, anchor_steps=1))

    def minibatch(at, seed):
        return at @ np.random.default_rng(seed).normal(size=DIMENSION)

    steps.fun = minibatch
    first, second, third = (flat(steps(i, seed=i)[0].gradient) for i in range(3))
    np.testing.assert_allclose(second, first, atol=2e-2)
    np.testing.assert_allclose(third, first, atol=2e-2)


# --- Coordinates -------------------------------------------------------------------


def test_all_coordinates_make_the_gradient():
    estimator = zo.coordinate_wise(smoothing=0.1)
    _, gradient = jit(zo.value_and_grad(traced, estimator))(0, PARAMS)
    np.testing.assert_allclose(flat(gradient), derivative(flat(PARAMS)), rtol=1e-4)


@pytest.mark.parametrize("uniform", [1.0, 0.25])
def test_coordinates_by_importance(uniform):
    """Mean and second moment, in closed form."""
    size, exact = 3, derivative(flat(PARAMS))
    estimator = zo.coordinate_wise(size, 0.1, uniform=uniform)
    scores = np.abs(exact)
    scores[1] = np.nan
    state = estimator.init(PARAMS)._replace(scores=jnp.asarray(scores, jnp.float32))

    @jit
    @jax.vmap
    def one(key):
        return estimator.estimate(traced, key, PARAMS, state)[0][1]

    got = rows(one(jax.random.split(jax.random.key(1), 8000)))
    error = got.std(0) / np.sqrt(len(got))
    assert (abs(got.mean(0) - exact) <= 4 * error + 1e-4).all()
    scores[1] = np.nanmean(scores)
    p = (1 - uniform) * scores / scores.sum() + uniform / DIMENSION
    second = np.sum(exact**2 / p) / size + (1 - 1 / size) * np.sum(exact**2)
    squares = np.sum(got**2, 1)
    error = squares.std() / np.sqrt(len(squares))
    assert abs(squares.mean() - second) < 4 * error


def test_scores_follow_what_is_seen():
    steps = Steps(zo.coordinate_wise(2, 0.1, decay=0.75))
    expected = np.full(DIMENSION, np.nan)
    for i in range(4):
        params = moved(PARAMS, 0.2 * i)
        _, _, _, us = steps(i, params)
        slopes = abs(derivative(flat(params)))
        for k in set(np.argmax(us, 1)):
            old = expected[k]
            new = 0.75 * old + 0.25 * slopes[k]
            expected[k] = slopes[k] if np.isnan(old) else new
    np.testing.assert_allclose(steps.state.scores, expected, rtol=1e-3)


# --- Priors ------------------------------------------------------------------------


def numpy_prgf(s, s_p, us, p, share):
    """P-RGF of Cheng et al. 2019 along vectors that are made orthogonal to p."""
    rest = us - np.outer(us @ p, p)
    norms = np.linalg.norm(rest, axis=1)
    xi = rest / norms[:, None]
    s_xi = (s - us @ p * s_p) / norms
    vs = np.sqrt(share) * p + np.sqrt(1 - share) * xi
    s_v = np.sqrt(share) * s_p + np.sqrt(1 - share) * s_xi
    return s_v @ vs / len(us), s_xi


def best_share(square, d, q):
    """The share that minimizes the error of the best multiple, by a grid."""
    shares = np.linspace(0, 1, 200_001)
    rest = (1 - shares) / (d - 1)
    once = shares * square + rest * (1 - square)
    twice = shares**2 * square + rest**2 * (1 - square)
    return shares[np.argmax(once**2 / ((1 - 1 / q) * twice + once / q))]


@pytest.mark.parametrize(("d", "q"), [(6, 3), (100, 10), (100, 1)])
def test_the_optimal_share(d, q):
    """The λ of Cheng et al. 2019 minimizes the error of their estimate."""
    n = d + 2 * q - 2
    squares = np.linspace(0.5 / n, 1.1 * (2 * q - 1) / n, 12)
    expected = [best_share(square, d, q) for square in squares]
    got = optimal_share(jnp.asarray(squares, jnp.float32), d, q)
    np.testing.assert_allclose(got, expected, atol=2e-3)


def test_prior_guided_by_the_cosine():
    mu, size = 1e-2, 3
    prior = np.array([1.0, 0.5, 0.0, 0.0, 0.5, 0.0])
    tree = {"a": jnp.asarray(prior[:4].reshape(2, 2)), "b": jnp.asarray(prior[4:])}
    tree = jax.tree.map(lambda x: x.astype(jnp.float32), tree)
    estimator = zo.prior_guided(
        zo.rademacher(), size, mu, prior=lambda x: tree, mix="cosine"
    )
    p = prior / np.linalg.norm(prior)
    shares = []
    # Gradients ever closer to the prior.
    for i, weight in enumerate([0.0, 0.9, 1.1, 8.0]):
        slopes = SLOPES + weight * prior
        steps = Steps(estimator, lambda at, slopes=slopes: at @ slopes)
        estimate, _, values, us = steps(i)
        us = us[:size]
        s = (values[1:] - values[0]) / mu
        _, s_xi = numpy_prgf(s[:-1], s[-1], us, p, 0.5)
        square = s[-1] ** 2 / (s[-1] ** 2 + (DIMENSION - 1) * np.mean(s_xi**2))
        shares.append(best_share(square, DIMENSION, size))
        expected, _ = numpy_prgf(s[:-1], s[-1], us, p, shares[-1])
        np.testing.assert_allclose(
            flat(estimate.gradient), expected, rtol=5e-3, atol=2e-2
        )
    assert shares[0] == 0 and shares[-1] == 1, shares


def test_history_prior_guided():
    """The projection on the span of the directions and the average of the past."""
    mu, size, decay = 1e-2, 2, 0.5
    steps = Steps(zo.prior_guided(zo.sphere(), size, mu, decay=decay))
    prior = np.zeros(DIMENSION)
    for i in range(3):
        params = moved(PARAMS, 0.1 * i)
        estimate, at, _, _ = steps(i, params)
        away = (at[1:] - at[0]) / mu
        span = away[: size + (i > 0)]
        expected = np.linalg.pinv(span) @ (span @ derivative(flat(params)))
        np.testing.assert_allclose(
            flat(estimate.gradient), expected, rtol=0.02, atol=0.06
        )
        if i:
            unit = prior / np.linalg.norm(prior)
            np.testing.assert_allclose(away[-1], unit, atol=1e-3)
        prior = decay * prior + (1 - decay) * flat(estimate.gradient)
    # A step without a value forgets nothing.
    before = steps.state
    steps(3, values=lambda at: np.full(len(at), np.nan))
    assert_same(steps.state, before)


def test_the_expected_cosine_of_the_projection():
    """As Cheng, Wu and Zhu 2021 have it."""
    size, slopes = 2, jnp.asarray(SLOPES, jnp.float32)
    prior = jnp.array([1.0, 0, 0, 0.5, 0, 0], jnp.float32)
    estimator = zo.prior_guided(zo.gaussian(), size, 1e-2, prior=lambda x: prior)

    @jit
    @jax.vmap
    def one(key):
        x = jnp.zeros(DIMENSION)
        return estimator.estimate(lambda x: slopes @ x, key, x, estimator.init(x))[0][1]

    got = np.asarray(one(jax.random.split(jax.random.key(0), 4000)), np.float64)
    squares = (got @ SLOPES) ** 2 / np.sum(got**2, 1) / np.sum(SLOPES**2)
    p = np.asarray(prior, np.float64) / np.linalg.norm(prior)
    alpha = (p @ SLOPES) ** 2 / np.sum(SLOPES**2)
    expected = alpha + size / (DIMENSION - 1) * (1 - alpha)
    error = squares.std() / np.sqrt(len(squares))
    assert abs(squares.mean() - expected) < 4 * error


# --- Past queries ------------------------------------------------------------------


@pytest.mark.parametrize("law", [Hashed(), zo.sphere(), slow(zo.orthonormal())])
def test_query_reuse(law):
    mu, size, memory = 0.5, 2, 3
    steps = Steps(zo.query_reuse(law, size, mu, memory))
    past_u, past_y = np.zeros((0, DIMENSION)), np.zeros(0)
    for i in range(5):
        estimate, _, values, us = steps(i, moved(PARAMS, 0.1 * i), level=3.0)
        past_u = np.concatenate([past_u, us])[-size * memory :]
        past_y = np.append(past_y, values)[-size * memory :]
        residuals = (past_y - past_y.mean()) / mu
        expected = law.factor(PARAMS) / (len(past_y) - 1) * residuals @ past_u
        np.testing.assert_allclose(
            flat(estimate.gradient), expected, rtol=1e-3, atol=1e-3
        )
    # What failed is not remembered, and where all did, nothing changes.
    before = steps.state
    steps(5, values=lambda at: np.full(len(at), np.nan))
    assert_same(steps.state._replace(numbering=()), before._replace(numbering=()))
    steps(6, values=lambda at: np.array([np.nan, 1.0]))
    assert np.isnan(np.asarray(steps.state.values)).sum() == 1


def test_query_reuse_is_unbiased_of_one_step():
    estimator = zo.query_reuse(zo.rademacher(), 2, 0.3, 2)

    @jit
    @jax.vmap
    def one(key):
        state = estimator.init(PARAMS)
        return estimator.estimate(traced, key, PARAMS, state)[0][1]

    got = rows(one(jax.random.split(jax.random.key(0), 8000)))
    error = got.std(0) / np.sqrt(len(got))
    assert (abs(got.mean(0) - derivative(flat(PARAMS))) <= 4 * error).all()


@pytest.mark.parametrize("maker", [zo.query_reuse, zo.linear_interpolation])
def test_a_query_takes_a_few_bytes(maker):
    """Whatever the number of parameters."""
    state = jax.eval_shape(maker(num_directions=5, memory=4).init, jnp.zeros(10**6))
    steps = 4 if maker is zo.query_reuse else 3
    buffer = state.buffer
    assert buffer.keys.size == buffer.numbers.size == buffer.scales.size == 5 * steps
    leaves = jax.tree.leaves((buffer.numbers, buffer.scales, state.values))
    assert sum(4 * leaf.size for leaf in leaves) <= 12 * 6 * steps


def test_linear_interpolation():
    """The shortest vector that interpolates what lies within the radius."""
    mu, size, radius = 0.3, 1, 0.62
    steps = Steps(zo.linear_interpolation(zo.sphere(), size, mu, 3, radius))
    past_x, past_y, reused = [], [], []
    for i in range(4):
        params = moved(PARAMS, 0.15 * i)
        estimate, at, values, _ = steps(i, params)
        x = np.concatenate([at[1:], *past_x[-2:]])
        y = np.concatenate([values[1:], *past_y[-2:]])
        past_x, past_y = [*past_x, at], [*past_y, values]
        away, changes = x - at[0], y - values[0]
        norms = np.linalg.norm(away, axis=1)
        near = (norms <= radius) | (np.arange(len(x)) < size)
        away, changes = away[near], changes[near]
        norms = norms[near]
        unit = away / norms[:, None]
        among = unit @ unit.T + 1e-4 * np.eye(len(unit))
        expected = unit.T @ np.linalg.solve(among, changes / norms)
        np.testing.assert_allclose(
            flat(estimate.gradient), expected, rtol=0.01, atol=0.02
        )
        reused.append(near.sum() - size)
        assert len(x) - size - reused[-1] > 0 or i < 2
    assert max(reused) > 0


def test_past_queries_complete_the_gradient_of_a_linear_function():
    estimator = zo.linear_interpolation(zo.rademacher(), 2, 0.1, 6, 1.0)
    steps = Steps(estimator, lambda at: at @ SLOPES)
    found = [flat(steps(i)[0].gradient) for i in range(6)]
    errors = [np.linalg.norm(g - SLOPES) for g in found]
    assert errors[0] > 0.5 * np.linalg.norm(SLOPES)
    assert errors[-1] < 1e-2


# --- Surrogates --------------------------------------------------------------------


def posterior(kernel, xs, ys, x, jitter):
    """The posterior mean at x, of values less their mean, in float64."""
    among = kernel(xs[:, None], xs[None]) + jitter * np.eye(len(xs))
    return kernel(x[None], xs) @ np.linalg.solve(among, ys - ys.mean())


def matern(scale, x, y):
    r = np.sqrt(5) * np.linalg.norm(x - y, axis=-1) / scale
    return (1 + r + r**2 / 3) * np.exp(-r)


def squared_exponential(scale, x, y):
    return np.exp(-np.sum((x - y) ** 2, -1) / (2 * scale**2))


def numerical_gradient(f, x, h=1e-5):
    steps = h * np.eye(len(x))
    return np.array([(f(x + e) - f(x - e)) / (2 * h) for e in steps])


@pytest.mark.parametrize("kernel", [matern, squared_exponential])
@pytest.mark.parametrize(("size", "lengthscale"), [(2, 0.9), (1, 0.9), (2, None)])
def test_gaussian_process(kernel, size, lengthscale):
    """The derivative of the posterior mean of the latest queries, by differences."""
    memory, jitter, mu = 7, 1e-2, 0.4
    steps = Steps(
        zo.gaussian_process(
            zo.sphere(), size, mu, memory, kernel.__name__, lengthscale, jitter
        )
    )
    xs, ys = np.zeros((0, DIMENSION)), np.zeros(0)
    for i in range(4):
        params = moved(PARAMS, 0.1 * i)
        estimate, at, values, _ = steps(i, params)
        xs, ys = np.concatenate([xs, at])[-memory:], np.append(ys, values)[-memory:]
        between = np.linalg.norm(xs[:, None] - xs[None], axis=-1)
        mean = between.sum() / max(len(xs) * (len(xs) - 1), 1)
        scale = lengthscale or 2 * mean or 1.0
        mean_at = functools.partial(
            posterior, functools.partial(kernel, scale), xs, ys, jitter=jitter
        )
        expected = numerical_gradient(mean_at, flat(params))
        np.testing.assert_allclose(
            flat(estimate.gradient), expected, rtol=2e-3, atol=2e-3
        )
        np.testing.assert_allclose(estimate.value, values[0], rtol=1e-6)
        assert int(estimate.num_values) == size + 1
    before = steps.state
    steps(4, values=lambda at: np.full(len(at), np.nan))
    assert_same(steps.state._replace(numbering=()), before._replace(numbering=()))


@pytest.mark.slow
def test_random_features_approach_their_kernel():
    """With an error that falls as one over the root of their number."""
    errors = []
    for num_features in (100, 10_000):
        found = []
        for size in (None, num_features):
            estimator = zo.gaussian_process(
                zo.sphere(), 4, 0.4, 8, "squared_exponential", 1.0, 1e-2, size
            )
            steps = Steps(estimator)
            found.append([flat(steps(i)[0].gradient) for i in range(2)][-1])
        errors.append(np.linalg.norm(found[1] - found[0]) / np.linalg.norm(found[0]))
    # A tenth, within the spread of single draws.
    assert errors[1] < 0.1
    assert errors[1] < 0.4 * errors[0]


@pytest.mark.parametrize("level", [0.0, 1e3])
def test_a_surrogate_of_queries_that_are_the_same_is_finite(level):
    """Where the matrix of the kernel is singular up to rounding, or not definite."""
    steps = Steps(
        zo.gaussian_process(zo.sphere(), 4, 1e-4, 40, lengthscale=10.0, jitter=1e-9)
    )
    for i in range(8):
        # Far points cost the distances of the near ones their digits.
        params = moved(PARAMS, level if i % 2 else 0.0)
        assert np.isfinite(flat(steps(i, params)[0].gradient)).all()


def test_a_surrogate_has_limits():
    estimator = zo.gaussian_process()
    message = r"params must have at most 10000 coordinates for a surrogate; got 10001"
    with pytest.raises(ValueError, match=message):
        estimator.init(jnp.zeros(10_001))
    with pytest.raises(ValueError, match=message):
        zo.minimize(jnp.sum, jnp.zeros(10_001), zo.radazo(0.1), estimator, 1)


# --- Votes, and perturbations with a momentum --------------------------------------


@pytest.mark.parametrize("law", [zo.gaussian(), zo.rademacher()])
def test_majority_vote(law):
    mu, size = 0.1, 5
    steps = Steps(zo.majority_vote(law, size, mu))
    estimate, _, values, us = steps(0)
    votes = np.sign((values[1:] - values[0])[:, None] * us)
    np.testing.assert_allclose(flat(estimate.gradient), votes.mean(0), atol=1e-6)
    # A failed worker has no vote.
    failed = np.append(values[:-1], np.inf)
    estimate, *_ = Steps(zo.majority_vote(law, size, mu))(0, values=lambda at: failed)
    np.testing.assert_allclose(flat(estimate.gradient), votes[:-1].mean(0), atol=1e-6)
    assert int(estimate.num_values) == size


def test_momentum_perturbation():
    """Algorithm 1 of ZO-AdaMU, with one draw for the sum of two."""
    mu, b1, alpha, law = 0.1, 0.4, 0.7, zo.sphere()
    steps = Steps(zo.momentum_perturbation(law, mu, b1, alpha))
    deviation = np.sqrt(b1**2 * alpha + (1 - b1) ** 2 * (1 - alpha))
    history = np.zeros(DIMENSION)
    for i in range(4):
        theta = flat(moved(PARAMS, 0.1 * i))
        estimate, at, values, us = steps(i, moved(PARAMS, 0.1 * i))
        m = (1 - b1) * history + deviation * np.sqrt(DIMENSION) * us[0]
        np.testing.assert_allclose(at[0] - theta, mu * m, atol=1e-5)
        np.testing.assert_allclose(at[1] - theta, -mu * m, atol=1e-5)
        slope = (values[0] - values[1]) / (2 * mu)
        np.testing.assert_allclose(
            flat(estimate.gradient), slope * m, rtol=1e-3, atol=1e-4
        )
        history = np.sign(slope) * m
    np.testing.assert_allclose(flat(steps.state.history), history, atol=1e-5)


def test_one_draw_has_the_variance_of_two():
    b1, alpha = 0.3, 0.6
    rng = np.random.default_rng(0)
    first = np.sqrt(alpha) * rng.normal(size=40_000)
    second = 1.5 + np.sqrt(1 - alpha) * rng.normal(size=40_000)
    both = b1 * first + (1 - b1) * second
    steps = Steps(zo.momentum_perturbation(zo.rademacher(), 1.0, b1, alpha))
    history = jax.tree.map(lambda p: jnp.full(p.shape, 1.5), PARAMS)
    steps.state = steps.state._replace(history=history)
    _, at, *_ = steps(0)
    m = at[0] - flat(PARAMS)
    # Of random signs, each |m − mean| is the deviation.
    np.testing.assert_allclose(abs(m - (1 - b1) * 1.5), both.std(), rtol=0.02)
    np.testing.assert_allclose((1 - b1) * 1.5, both.mean(), rtol=0.02)


# --- Bad input ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: zo.variance_reduced(period=1), "period must be an int ≥ 2; got 1"),
        (
            lambda: zo.variance_reduced(period=3, anchor_steps=3),
            "anchor_steps must be fewer than period, 3; got 3",
        ),
        (
            lambda: zo.coordinate_wise(uniform=1.5),
            r"uniform must be a number in \(0, 1\]; got 1.5",
        ),
        (
            lambda: zo.coordinate_wise(uniform=0.0),
            "uniform must be a finite number > 0",
        ),
        (lambda: zo.coordinate_wise(decay=1.0), "decay must be a number in"),
        (lambda: zo.query_reuse(memory=1), "memory must be an int ≥ 2; got 1"),
        (lambda: zo.linear_interpolation(memory=1), "memory must be an int ≥ 2; got"),
        (lambda: zo.linear_interpolation(radius=0.0), "radius must be a finite number"),
        (
            lambda: zo.momentum_perturbation(b1=1.5),
            r"b1 must be a number in \(0, 1\]; got 1.5",
        ),
        (
            lambda: zo.momentum_perturbation(b1=1.0, uncertainty=0.0),
            "uncertainty must be positive where b1 is 1; got 0.0",
        ),
        (lambda: zo.gaussian_process(memory=1), "memory must be an int ≥ 5; got 1"),
        (
            lambda: zo.gaussian_process(num_directions=1, memory=1),
            "memory must be an int ≥ 2; got 1",
        ),
        (
            lambda: zo.gaussian_process(memory=513),
            "memory must be an int ≤ 512; got 513",
        ),
        (
            lambda: zo.gaussian_process(kernel="linear"),
            r"kernel must be one of \['matern', 'squared_exponential'\]; got 'linear'",
        ),
        (
            lambda: zo.gaussian_process(num_features=10),
            "num_features must be None unless kernel is 'squared_exponential'; got 10",
        ),
        (lambda: zo.gaussian_process(jitter=0.0), "jitter must be a finite number > 0"),
        (lambda: zo.gaussian_process(lengthscale=0.0), "lengthscale must be a finite"),
        (
            lambda: zo.gaussian_process(num_directions=-1),
            "num_directions must be an int",
        ),
        (lambda: zo.prior_guided(decay=1.0), "decay must be a number in"),
        (
            lambda: zo.prior_guided(mix="mean"),
            "mix must be 'projection' or 'cosine'; got 'mean'",
        ),
        (
            lambda: zo.prior_guided(prior=lambda x: x["a"]).estimate(
                traced, 0, PARAMS, zo.PriorGuidedState((), ())
            ),
            r"prior must return a tree like params, .*; got \(2, 2\)",
        ),
    ],
)
def test_bad_arguments(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_prior_that_is_no_function():
    with pytest.raises(TypeError, match="prior must be a function of params; got "):
        zo.prior_guided(prior=PARAMS)


@pytest.mark.parametrize("name", MAKERS)
def test_bad_arguments_of_all(name):
    with pytest.raises(ValueError, match="smoothing must be a finite number > 0"):
        make(name, smoothing=0.0)
    with pytest.raises(ValueError, match="batch_size must be an int ≥ 1"):
        make(name, batch_size=0)
    with pytest.raises(TypeError, match="axis_name must be the name of a mesh axis"):
        make(name, axis_name=3)
