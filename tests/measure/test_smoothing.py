"""The smoothing of networks before a run, against the definition in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import radazo_jax as zo
from tests.helpers import tables

KEY = jax.random.key(0)
START = jnp.full(40, 0.5)
INPUTS = jax.random.normal(jax.random.key(1), (200, 40))
WIDTH = 1 / 8


def bowl(x):
    return jnp.mean((INPUTS @ x - INPUTS[:, 0]) ** 2)


def staircase(x):
    """Parameters are rounded to multiples of 1/8, as in a network of few bits."""
    return bowl(jnp.round(x / WIDTH) * WIDTH)


def per_element(found, distribution):
    return found.smoothing / np.sqrt(distribution.factor(START.size))


def agreement(ahead, back):
    """The formula of the documentation, element by element."""
    m = ahead.shape[1]
    odd, even = (ahead - back) / 2, (ahead + back) / 2
    found = np.zeros(m)
    for i in range(m):
        whole = np.sqrt(np.sum(odd[:, i] ** 2) + np.sum(even[:, i] ** 2))
        for j in range(m):
            length = np.linalg.norm(odd[:, j])
            if i != j and whole * length > 0:
                found[i] += (j + 1) ** 2 * (odd[:, i] @ odd[:, j]) / (length * whole)
        found[i] /= sum((j + 1) ** 2 for j in range(m) if j != i)
    return found


def test_the_agreements_are_those_of_the_points():
    """Points are recorded, and their values are computed again in float64."""
    points = []

    def record(x, value):
        points.append(np.asarray(x, np.float64))
        return value

    def fun(x):
        shape = jax.ShapeDtypeStruct((), jnp.float32)
        value = staircase(x)
        return jax.pure_callback(record, shape, x, value, vmap_method="sequential")

    found = zo.find_smoothing(fun, START, key=3)
    assert len(points) == found.num_evaluations == 220
    # Callbacks within a program may come in another order.
    moves = np.stack(points).reshape(20, 11, 40) - np.asarray(START, np.float64)
    longest = np.argmax(np.linalg.norm(moves, axis=-1), axis=1)
    along = np.einsum("nmd,nd->nm", moves, moves[np.arange(20), longest])
    order = np.argsort(along, axis=1)
    order = np.concatenate([order[:, 5:], order[:, 4::-1]], axis=1)
    x = np.take_along_axis(moves, order[..., None], 1) + np.asarray(START, np.float64)
    rounded = np.round(x / WIDTH) * WIDTH
    inputs = np.asarray(INPUTS, np.float64)
    values = np.mean((rounded @ inputs.T - inputs[:, 0]) ** 2, axis=-1)
    np.testing.assert_array_equal(x[:, 0], np.broadcast_to(START, (20, 40)))
    lengths = np.linalg.norm(x[:, 1:6] - np.asarray(START), axis=-1)
    expected = np.broadcast_to(found.distances, lengths.shape)
    np.testing.assert_allclose(lengths, expected, rtol=1e-3)
    np.testing.assert_allclose(x[:, 1:6] + x[:, 6:], 1.0, atol=1e-6)
    base = values[:, :1]
    by_hand = agreement(values[:, 1:6] - base, values[:, 6:] - base)
    np.testing.assert_allclose(found.agreements, by_hand, atol=1e-5)
    best = by_hand.max()
    last = np.flatnonzero(by_hand >= best - 0.3 * (1 - best**2))[-1]
    halved = 1 if by_hand[last] == best else 2
    assert found.smoothing == found.distances[last] / halved
    assert found.agreement == max(found.agreements)


@pytest.mark.slow
@pytest.mark.parametrize(
    "distribution", [zo.rademacher(), zo.sphere(), zo.orthonormal()], ids=repr
)
def test_a_staircase_needs_the_width_of_a_step(distribution):
    """Short differences are 0 or jumps; a smooth function has no need of long ones."""
    rough = zo.find_smoothing(staircase, START, distribution=distribution)
    smooth = zo.find_smoothing(bowl, START, distribution=distribution)
    assert WIDTH / 4 <= per_element(rough, distribution) <= 4 * WIDTH
    assert smooth.agreement > 0.99
    assert per_element(smooth, distribution) < per_element(rough, distribution)


@pytest.mark.slow
def test_the_gradient_at_the_measured_smoothing_is_the_one_of_the_bowl():
    """And the gradient at the default smoothing is not."""
    true = np.asarray(jax.grad(bowl)(START))

    def cosine(smoothing):
        estimator = zo.forward_difference(num_directions=200, smoothing=smoothing)
        gradient = zo.value_and_grad(staircase, estimator)(KEY, START)[1]
        return gradient @ true / jnp.linalg.norm(gradient) / np.linalg.norm(true)

    # Of 200 directions in 40 dimensions: √(200/(200 + 41)) = 0.91 at the most.
    assert cosine(zo.find_smoothing(staircase, START).smoothing) > 0.8
    assert cosine(5e-3) < 0.4


@pytest.mark.slow
def test_distances_share_a_minibatch():
    def noisy(x, noise):
        return bowl(x) + noise

    def sample(key):
        return 10 * jax.random.normal(key)

    found = zo.find_smoothing(noisy, START, sample=sample)
    plain = zo.find_smoothing(bowl, START)
    # A noise of 10 between distances would hide differences of less than 1.
    np.testing.assert_allclose(found.agreements, plain.agreements, atol=0.02)


@pytest.mark.slow
def test_narrow_parameters_and_losses_need_longer_distances():
    """In bfloat16, short distances are rounded away, and differences of the loss."""
    start = START.astype(jnp.bfloat16)
    wide = zo.find_smoothing(bowl, START, distribution=zo.rademacher())
    narrow = zo.find_smoothing(
        lambda x: bowl(x.astype(jnp.float32)).astype(jnp.bfloat16),
        start,
        distribution=zo.rademacher(),
    )
    assert narrow.smoothing >= 2**-9 and narrow.smoothing > wide.smoothing
    assert narrow.agreements[0] < 0.75 < 0.9 < narrow.agreement
    assert wide.agreements[0] > 0.98


@pytest.mark.slow
def test_a_loss_that_fails_far_away_has_a_shorter_smoothing():
    def fun(x):
        return jnp.where(jnp.max(jnp.abs(x - 0.5)) < 0.2, staircase(x), jnp.nan)

    found = zo.find_smoothing(fun, START, distribution=zo.rademacher())
    assert found.smoothing == 0.125 and np.isnan(found.agreements[-1])


def test_parameters_of_zero_have_distances_up_to_1():
    """A linear function agrees with itself, but for rounding."""
    found = zo.find_smoothing(jnp.sum, 0 * START, distribution=zo.rademacher())
    assert found.distances[-1] == 1.0 and 0.999 < found.agreement <= 1


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"distribution": "sphere"}, TypeError, "distribution must be a Distribution"),
        ({"evaluator": zo.external()}, TypeError, "functions that JAX traces"),
        tables.slow(
            {"fun": lambda x: 0 * x[0] + 3}, ValueError, "fun must change with"
        ),
        tables.slow({"fun": lambda x: x[0] * jnp.nan}, ValueError, "finite at params"),
        (
            {"fun": lambda x: jnp.where(jnp.all(x == 0.5), 1.0, jnp.nan)},
            ValueError,
            "fun must be finite around params",
        ),
    ],
)
def test_what_has_no_smoothing_is_named(arguments, error, message):
    defaults = {"fun": bowl, "params": START}
    with pytest.raises(error, match=message):
        zo.find_smoothing(**(defaults | arguments))


def batch_loss(x, rows):
    predicted = INPUTS[rows] @ (jnp.round(x / WIDTH) * WIDTH)
    return 1 + jnp.mean((predicted - INPUTS[rows, 0]) ** 2)


def rows_of(key):
    return jax.random.randint(key, (32,), 0, 200)


def run(estimator=None, optimizer=None, **options):
    given = dict(sample=rows_of, num_steps=20, key=5, progress=False)
    return zo.train(batch_loss, START, optimizer, estimator, **(given | options))


@pytest.mark.slow
def test_a_run_measures_the_smoothing_that_nobody_named():
    """It is the run at this smoothing, which a journal and a state keep."""
    found = run()
    rate = zo.find_learning_rate(
        batch_loss, START, 20, sample=rows_of, key=5, distribution=zo.orthonormal()
    )
    assert found.learning_rate == rate
    named = run(zo.forward_difference(zo.orthonormal(), smoothing=rate.smoothing))
    np.testing.assert_array_equal(named.params, found.params)
    assert named.learning_rate.num_evaluations == rate.num_evaluations - 220
    other = run(zo.forward_difference(zo.orthonormal()))
    np.testing.assert_array_equal(other.params, found.params)


@pytest.mark.slow
def test_a_run_that_continues_keeps_its_smoothing(tmp_path):
    path = tmp_path / "run.jsonl"
    whole = run(journal=path)
    part = run(callback=lambda report: report.step >= 8, chunk_size=8)
    assert len(part.values) == 8
    rest = run(num_steps=12, state=part.state)
    np.testing.assert_array_equal(rest.params, run().params)
    again = run(journal=path)
    np.testing.assert_array_equal(again.params, whole.params)
    state = zo.replay(path, START, fun=batch_loss, sample=rows_of)
    np.testing.assert_array_equal(state.params, whole.params)


@pytest.mark.slow
def test_a_named_optimizer_has_the_default_smoothing():
    named, unnamed = (
        run(estimator, zo.radazo(1e-3), num_steps=3)
        for estimator in (
            zo.central_difference(smoothing=5e-3),
            zo.central_difference(),
        )
    )
    np.testing.assert_array_equal(named.params, unnamed.params)
    assert repr(zo.spsa()) == repr(zo.spsa(smoothing=5e-3))
