"""Fits against NIST's certified values, SciPy's losses and errors, and closed forms."""

import numpy as np
import pytest
from scipy import optimize

import radazo_jax as zo
from radazo_jax._src.methods import least_squares
from radazo_jax._src.methods.contract import Ask, Box
from radazo_jax._src.methods.ends import Reason
from tests.helpers.driver import check, started

RNG = np.random.default_rng(0)
T = np.linspace(0, 4, 30)


def fitted(fun, x, method=None, most=2000, **start):
    """Runs the method: all `Ask`s, all points, and the end if it came in time."""
    method = method or zo.methods.least_squares()
    start = started(x, limited=most < 2000, **start)
    steps, asks, points, end = method(start), [], [], None
    asked = next(steps)
    while len(points) < most:
        asks.append(asked if isinstance(asked, Ask) else Ask(asked))
        check(asks[-1].points, start)
        points.extend(asks[-1].points)
        rows = np.array([np.atleast_1d(fun(x)) for x in asks[-1].points], np.float64)
        rows[~np.all(np.isfinite(rows), axis=1)] = np.nan
        try:
            asked = steps.send(rows)
        except StopIteration as stop:
            end = stop.value
            assert any(np.array_equal(point, end.params) for point in points)
            break
    return asks, np.array(points), end


def squares(fun, points):
    return np.array([np.sum(np.asarray(fun(x), np.float64) ** 2) for x in points])


def reached(fun, points, value):
    """The number of the first point with no higher value."""
    return int(np.flatnonzero(squares(fun, points) <= value)[0]) + 1


# Models, data, starts, certified parameters, their standard errors, and sums of squares
# of NIST's Statistical Reference Datasets.
NIST = {
    "Misra1a": (
        lambda b, x: b[0] * (1 - np.exp(-b[1] * x)),
        "77.6 114.9 141.1 190.8 239.9 289 332.8 378.4 434.8 477.3 536.8 593.1 689.1 "
        "760",
        "10.07 14.73 17.94 23.93 29.61 35.18 40.02 44.82 50.76 55.05 61.01 66.4 75.47 "
        "81.78",
        [500, 1e-4],
        [238.94212918, 5.5015643181e-4],
        [2.7070075241, 7.2668688436e-6],
        0.12455138894,
    ),
    "DanWood": (
        lambda b, x: b[0] * x ** b[1],
        "1.309 1.471 1.49 1.565 1.611 1.68",
        "2.138 3.421 3.597 4.34 4.882 5.66",
        [1, 5],
        [0.76886226176, 3.8604055871],
        [1.8281973860e-2, 5.1726610913e-2],
        4.3173084083e-3,
    ),
    "BoxBOD": (
        lambda b, x: b[0] * (1 - np.exp(-b[1] * x)),
        "1 2 3 5 7 10",
        "109 149 149 191 213 224",
        [1, 1],
        [213.80940889, 0.54723748542],
        [12.354515176, 0.10455993237],
        1168.0088766,
    ),
    # The first steps lead to a plateau.
    "Rat43": (
        lambda b, x: b[0] / (1 + np.exp(b[1] - b[2] * x)) ** (1 / b[3]),
        "1 2 3 4 5 6 7 8 9 10 11 12 13 14 15",
        "16.08 33.83 65.8 97.2 191.55 326.2 386.87 520.53 590.03 651.92 724.93 699.56 "
        "689.96 637.56 717.41",
        [100, 10, 1, 1],
        [699.6415127, 5.2771253025, 0.75962938329, 1.2792483859],
        [16.302297817, 2.0828735829, 0.19566123451, 0.68761936385],
        8786.404908,
    ),
}


@pytest.mark.parametrize("name", NIST)
def test_certified_values_of_nist(name):
    model, x, y, start, parameters, errors, value = NIST[name]
    x, y = (np.array(data.split(), float) for data in (x, y))
    with np.errstate(all="ignore"):
        _, points, end = fitted(lambda b: model(b, x) - y, start)
    assert end.reason == Reason.MINIMUM and len(points) < 60 * len(start)
    np.testing.assert_allclose(end.value, value, rtol=1e-6)
    np.testing.assert_allclose(end.params, parameters, rtol=1e-3)
    # The Jacobian is an estimate.
    np.testing.assert_allclose(end.fit.standard_errors, errors, rtol=0.05)


def quadratic_errors(prior, step):
    """The covariance of r and J after a step, with every element of H independent."""
    shift = np.eye(len(step) + 1)
    shift[1:, 0] = step
    of_r = np.kron(step, step) / 2
    of_j = np.kron(np.eye(len(step)), step)
    change = np.vstack([of_r, of_j])
    return shift.T @ prior @ shift + change @ change.T


def test_the_model_is_the_posterior_of_random_second_derivatives():
    d, m, noise = 3, 5, 1e-4
    model = least_squares.Model.begun(RNG.normal(size=m), d)
    first = model.mean[:, 0]
    steps = 0.1 * RNG.normal(size=(4, d))
    values = RNG.normal(size=(4, m))
    for step, value in zip(steps, values, strict=True):
        model = model.learned(step, value, noise)
    # Generalized least squares: an unknown J, and errors |s|⁴/4 and noise.
    weights = 1 / (np.sum(steps**2, axis=1) ** 2 / 4 + noise)
    precision = (steps.T * weights) @ steps + np.eye(d) / 1e6
    jacobian = np.linalg.solve(precision, (steps.T * weights) @ (values - first))
    np.testing.assert_allclose(model.jacobian, jacobian.T, rtol=1e-4)
    np.testing.assert_allclose(model.residuals, first)
    np.testing.assert_allclose(
        model.covariance[1:, 1:], np.linalg.inv(precision), rtol=1e-4, atol=1e-8
    )
    moved = model.moved(steps[0])
    np.testing.assert_allclose(moved.residuals, first + model.jacobian @ steps[0])
    np.testing.assert_allclose(
        moved.covariance, quadratic_errors(model.covariance, steps[0]), atol=1e-12
    )
    # Its prediction has the error that `missed` expects of the same step.
    expected, observed = model.missed(steps[0], moved.residuals)
    np.testing.assert_allclose(expected, moved.covariance[0, 0])
    assert observed < 1e-20


@pytest.mark.parametrize("loss", list(least_squares.LOSSES))
def test_losses_are_those_of_scipy(loss):
    matrix, data = RNG.normal(size=(20, 3)), 3 * RNG.normal(size=20)

    def fun(x):
        return matrix @ x - data

    x = RNG.normal(size=3)
    known = optimize.least_squares(
        fun, x, jac=lambda x: matrix, loss=loss, f_scale=0.7, max_nfev=1
    )
    method = zo.methods.least_squares(loss=loss, f_scale=0.7)
    values = method.value(np.stack([fun(x), np.full(20, np.nan)]))
    np.testing.assert_allclose(values, [2 * known.cost, np.nan])
    root, residuals = least_squares.Loss(loss, 0.7).weighted(fun(x))
    np.testing.assert_allclose(root[:, None] * matrix, known.jac)
    np.testing.assert_allclose((root[:, None] * matrix).T @ residuals, known.grad)


@pytest.mark.parametrize("loss", ["soft_l1", "huber", "cauchy"])
def test_robust_fits_are_those_of_scipy(loss):
    wrong = 5.0 * (np.arange(30) % 6 == 0)
    data = 2 * np.exp(-1.3 * T) + 0.5 + 0.02 * RNG.normal(size=30) + wrong

    def fun(x):
        return x[0] * np.exp(-x[1] * T) + x[2] - data

    method = zo.methods.least_squares(loss=loss, f_scale=0.05)
    _, points, end = fitted(fun, [2.5, 1.0, 0.3], method)
    known = optimize.least_squares(
        fun, end.params, loss=loss, f_scale=0.05, xtol=1e-12, ftol=1e-12
    )
    assert len(points) < 150
    np.testing.assert_allclose(end.value, 2 * known.cost, rtol=1e-5)
    np.testing.assert_allclose(end.params, [2, 1.3, 0.5], atol=0.15)
    scaled = 2 * known.cost / 27 * np.linalg.inv(known.jac.T @ known.jac)
    np.testing.assert_allclose(
        end.fit.standard_errors, np.sqrt(np.diag(scaled)), rtol=0.1
    )


def test_covariance_is_that_of_curve_fit():
    def model(t, a, b, c):
        return a * np.exp(-b * t) + c

    data = model(T, 2, 1.3, 0.5) + 0.05 * RNG.normal(size=30)
    best, covariance = optimize.curve_fit(model, T, data, [1, 1, 0], xtol=1e-12)
    residuals = model(T, *best) - data
    decay = np.exp(-best[1] * T)
    jacobian = np.stack([decay, -best[0] * T * decay, np.ones(30)], axis=1)
    value, every = np.sum(residuals**2), np.ones(3, bool)
    found = least_squares.Fit(residuals, jacobian, np.ones(30), value, every)
    np.testing.assert_allclose(found.covariance, covariance, rtol=1e-4)
    assert (found.rank, found.degrees_of_freedom) == (3, 27)
    # A parameter that cannot move counts for nothing.
    found = least_squares.Fit(
        residuals, jacobian, np.ones(30), value, np.array([1, 0, 1]) > 0
    )
    alone = value / 28 * np.linalg.inv(jacobian[:, ::2].T @ jacobian[:, ::2])
    np.testing.assert_allclose(found.covariance[::2, ::2], alone, rtol=1e-9)
    assert found.standard_errors[1] == 0 and found.rank == 2


def test_parameters_without_an_effect_have_no_standard_error():
    data = 1 + 2 * T + 0.1 * RNG.normal(size=30)
    _, _, end = fitted(lambda x: x[0] + x[1] + x[2] * T - data, [0.5, 0.0, 1.0])
    assert end.reason == Reason.MINIMUM and end.fit.rank == 2
    with pytest.warns(UserWarning, match=r"3 parameters has rank 2.*parameters \[0, 1"):
        errors = end.fit.standard_errors
    line = np.stack([np.ones(30), T], axis=1)
    known = np.linalg.lstsq(line, data)[1] / 27 * np.linalg.inv(line.T @ line)[1, 1]
    assert np.all(np.isinf(errors[:2]))
    np.testing.assert_allclose(errors[2] ** 2, known, rtol=1e-3)
    # As many parameters as residuals leave no degree of freedom.
    exact = least_squares.Fit(np.zeros(2), np.eye(2), np.ones(2), 0.0, np.ones(2, bool))
    assert np.all(np.isnan(exact.standard_errors))


def rosenbrock(x):
    return np.array([10 * (x[1] - x[0] ** 2), 1 - x[0]])


def broyden(x):
    ends = np.concatenate([[0], x, [0]])
    return (3 - 2 * x) * x - ends[:-2] - 2 * ends[2:] + 1


MATRIX = RNG.normal(size=(10_000, 4))


@pytest.mark.parametrize(
    ("fun", "x", "most"),
    [
        (lambda x: MATRIX[:9] @ (x - 1), np.zeros(4), 8),  # Linear: d + 1 and a step.
        (lambda x: np.tanh(MATRIX @ (x - 0.1)), np.zeros(4), 30),
        (rosenbrock, [-1.2, 1.0], 60),
        (broyden, -np.ones(30), 60),
        (lambda x: x[0] ** 3 - 8, [5.0], 30),  # One parameter, and a number.
        (lambda x: np.array([x @ x - 1, x[0] - x[3]]), np.ones(4), 40),  # m < d.
        (lambda x: np.array([x[0] - 1e5, 0.1]), [1.0], 30),  # A far minimum.
        (lambda x: broyden(x / np.logspace(-6, 6, 5)), -np.logspace(-6, 6, 5), 60),
    ],
)
def test_it_converges(fun, x, most):
    _, points, end = fitted(fun, x)
    values = squares(fun, points)
    least = optimize.least_squares(fun, end.params, xtol=1e-14).cost * 2
    assert reached(fun, points, least + 1e-8 * values[0]) <= most
    assert end.value == values.min() and len(points) < 4 * most


@pytest.mark.parametrize("seed", range(3))
def test_bounded_fits_are_those_of_scipy(seed):
    rng = np.random.default_rng(seed)
    center = rng.normal(size=5)
    box = Box(center - rng.uniform(0.1, 1, 5), center + rng.uniform(0.1, 1, 5))
    box.lower[0] = box.upper[0] = center[0]
    box.upper[1] = np.inf
    matrix = rng.normal(size=(12, 5))
    data = np.tanh(matrix @ (center + rng.normal(size=5)))

    def fun(x):
        return np.tanh(matrix @ x) - data

    _, _, end = fitted(fun, center, box=box)
    bounds = np.stack(box)
    bounds[:, 0] += [-1e-12, 1e-12]
    known = optimize.least_squares(fun, end.params, bounds=bounds, xtol=1e-12)
    assert end.value <= 2 * known.cost * (1 + 1e-6)
    assert end.fit.standard_errors[0] == 0


def hidden(fun, size):
    """Adds noise to residuals that depends on the point alone."""

    def noisy(x):
        draw = np.random.default_rng(np.asarray(x).view(np.uint32))
        return fun(x) + size * draw.normal(size=len(fun(x)))

    return noisy


def gompertz(x):
    return x[0] * np.exp(-x[1] * np.exp(-x[2] * T)) - 5 * np.exp(-4 * np.exp(-0.7 * T))


@pytest.mark.parametrize("size", [1e-6, 1e-3])
def test_noise_is_seen_and_averaged(size):
    start = np.array([3, 2, 0.3])
    fun = hidden(gompertz, size * np.sqrt(np.mean(gompertz(start) ** 2)))
    asks, points, end = fitted(fun, start, most=400)
    assert end is None and len(points) >= 400
    assert asks[-1].center is not None
    gap = squares(gompertz, [asks[-1].center])[0] / squares(gompertz, [start])[0]
    # Less than the noise of a single set of residuals.
    assert gap < size**2 / 3
    lengths = abs(np.diff(points[-100:], axis=0)).max(axis=1)
    assert np.median(lengths) > np.sqrt(size) / 30
    # Without a limit the run ends.
    assert fitted(fun, start)[2].reason == Reason.MINIMUM


def test_exact_residuals_have_no_noise():
    asks, points, end = fitted(gompertz, [3, 2, 0.3])
    assert end.value < 1e-15 and all(asked.center is None for asked in asks)
    assert len(points) < 60


@pytest.mark.parametrize("inputs", [np.float32, np.float64])
def test_residuals_of_float32(inputs):
    def fun(x):
        return np.asarray(gompertz(np.asarray(x, np.float32)), np.float32)

    _, points, end = fitted(fun, [3, 2, 0.3], dtype=inputs)
    assert end.reason is not None and len(points) < 400
    assert end.value < 1e-9


def test_failures_are_left_out():
    def fun(x):
        return gompertz(x) if x[0] + x[1] < 9.05 else np.full(30, np.nan)

    _, points, end = fitted(fun, [3, 2, 0.3])
    assert end.value < 1e-9 and len(points) < 150
    start = np.array([3, 2, 0.3])
    _, points, end = fitted(
        lambda x: gompertz(x) if np.array_equal(x, start) else np.full(30, np.nan),
        start,
    )
    assert end.reason == Reason.NEIGHBORHOOD and len(points) < 100
    _, points, end = fitted(lambda x: np.array([np.nan, 1.0]), start)
    assert (end.reason, len(points), end.fit) == (Reason.FAILED, 1, None)


def test_a_plateau_is_left_by_long_steps():
    def fun(x):
        return x[0] * np.exp(-0.5 * ((T - x[1]) / 0.05) ** 2) - np.exp(-T)

    # The peak is beyond the data: no short step changes a residual.
    asks, _, end = fitted(fun, [1.0, 5.5])
    assert end.value < squares(fun, [[1.0, 5.5]])[0] - 1e-3
    lengths = [abs(asked.points - [1.0, 5.5]).max() for asked in asks]
    assert max(lengths) > 1
    constant = fitted(lambda x: np.array([1.0, 2.0]), [1.0, 1.0])
    assert constant[2].reason == Reason.FLAT and len(constant[1]) < 25


def test_a_plateau_is_left_on_the_way_back():
    x, data = np.array([1.0, 2, 3, 5, 7, 10]), [109, 149, 149, 191, 213, 224]

    def fun(b):
        return b[0] * (1 - np.exp(-b[1] * x)) - data

    # The first steps lead to rates above 10, which have no effect.
    with np.errstate(all="ignore"):
        asks, _, end = fitted(fun, [1.07, 1.3])
    assert max(asked.points[0, 1] for asked in asks) > 10
    np.testing.assert_allclose(end.params, [213.80940889, 0.54723748542], rtol=1e-3)


def test_every_ask_has_the_fit_so_far():
    asks, points, end = fitted(rosenbrock, [-1.2, 1.0])
    known = 1
    for asked in asks[1:]:
        assert asked.fit.value == squares(rosenbrock, points[:known]).min()
        known += len(asked.points)
    exact = [[-20 * end.params[0], 10], [-1, 0]]
    np.testing.assert_allclose(end.fit.jacobian, exact, atol=0.2)
    np.testing.assert_allclose(end.fit.residuals, rosenbrock(end.params))


def test_nothing_can_move():
    _, points, end = fitted(rosenbrock, [1.0, 2.0], box=(np.r_[1, 2], np.r_[1, 2]))
    assert (end.reason, len(points)) == (Reason.FIXED, 1)
    assert end.fit.degrees_of_freedom == 2 and np.all(end.fit.standard_errors == 0)


def test_sizes_of_parameters():
    box = Box(np.array([-np.inf, 0, 0]), np.array([np.inf, 8, np.inf]))
    start = started(np.array([-300.0, 7.0, 0.0]), box=box)
    np.testing.assert_array_equal(least_squares.sizes_of_fit(start, None), [300, 2, 1])
    # `scale` means what it means for other methods.
    assert least_squares.sizes_of_fit(started(np.zeros(2)), 5.0).tolist() == [5, 5]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"loss": "l1"}, r"loss must be one of linear, .*; got 'l1'"),
        ({"tolerance": 0.0}, "tolerance must be a finite number > 0; got 0"),
        ({"f_scale": -1.0}, "f_scale must be a finite number > 0; got -1"),
    ],
)
def test_settings_are_checked(arguments, message):
    with pytest.raises(ValueError, match=message):
        zo.methods.least_squares(**arguments)


def test_starts_are_checked():
    method = zo.methods.least_squares(scale=-1.0)
    with pytest.raises(ValueError, match="scale must be positive"):
        next(method(started(np.zeros(2))))
    whole = started(np.zeros(2))._replace(step=np.ones(2))
    with pytest.raises(ValueError, match=r"with least_squares\(\)"):
        next(zo.methods.least_squares()(whole))
    assert zo.methods.least_squares().residuals is True


def test_differences_below_the_rounding_end_a_run():
    # Near 10⁵, numbers of float32 are 0.008 apart, and the size is 1.
    def fun(x):
        return np.array([x[0] - 123456.789, 1e-3 * x[1], np.sin(x[1]) - 0.3])

    _, points, end = fitted(fun, [1.0, 1.0], dtype=np.float32)
    assert end is not None and len(points) < 200
    assert abs(end.params[0] - 123456.789) < 0.02


def test_residuals_may_be_a_tree_of_arrays_of_any_lengths():
    def fun(x):
        return [np.array([x[0] - 1, x[1]]), {"c": np.array([x[0] * x[1] - 2])}]

    def joined(x):
        return np.array([x[0] - 1, x[1], x[0] * x[1] - 2])

    found, expected = (
        zo.minimize(
            f,
            np.zeros(2),
            zo.methods.least_squares(),
            max_evaluations=20,
            progress=False,
        )
        for f in (fun, joined)
    )
    np.testing.assert_array_equal(found.evaluations.values, expected.evaluations.values)
