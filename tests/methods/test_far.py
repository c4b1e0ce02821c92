"""Moves along the parameters, far starts and many minima, against known minima."""

import numpy as np
import pytest
from scipy.optimize import minimize

from radazo_jax._src.methods import far, policy
from radazo_jax._src.methods.contract import End
from radazo_jax._src.methods.points import Space
from tests.helpers.driver import completed, drive, started

UNTUNED = policy.untuned()


def stairs(x):
    return float(np.sum(np.floor(4 * abs(x - 1))))


def linear(x):
    return float(x @ np.linspace(1, -2, x.size))


MOVED = {
    "stairs": (stairs, np.full(3, -2.0), None, 0.0),
    "a corner": (linear, np.full(4, 0.5), (-1.0, 3.0), -10.0),
    "two regions without values": (
        lambda x: stairs(x) if abs(x[0] + 1) > 0.1 and x[1] < 1.1 else np.nan,
        np.full(2, -0.8),
        None,
        0.0,
    ),
    "nothing to move": (stairs, np.zeros(2), (0.0, 0.0), 8.0),
}


@pytest.mark.parametrize("name", MOVED)
def test_moves_cross_steps(name):
    fun, x, box, least = MOVED[name]
    start = started(x, box)
    part = far.moves(x, fun(x), np.ones(len(x)), Space.of(start, np.ones(len(x))))
    (end, value), points = completed(part, fun, start)
    assert value == fun(end) == least and len(points) < 400
    values = [fun(x), *map(fun, points)]
    assert value == np.nanmin(values)


@pytest.mark.parametrize(("distance", "idles"), [(5.0, False), (50.0, True)])
def test_steps_are_idle_on_a_plateau_far_away_only(distance, idles):
    def inner():
        yield np.array([[distance, 0.0]])
        for _ in range(70):
            yield np.array([[distance, 1.0]])
        return "ended"

    watch = far.Watch(End(np.zeros(2), 2.0, ""), np.zeros(2), np.ones(2))
    part = far.watched(inner(), watch)
    found, points = completed(part, lambda x: float(x[0] == 0), started(np.zeros(2)))
    assert (found is None, len(points) < 70) == (idles, idles)
    assert watch.best.value == 0 and not watch.fails


def atoms(x):
    """Seven atoms: the sum of Lennard-Jones potentials of all pairs."""
    points = x.reshape(7, 3)
    first, second = np.triu_indices(7, 1)
    apart = points[first] - points[second]
    sixth = np.einsum("ij,ij->i", apart, apart) ** -3
    return float(4 * sixth @ (sixth - 1))


# The lowest and the highest of the four minima (Hoare & McInnes, Faraday Discussions of
# the Chemical Society 1976; the lowest also Wales & Doye, J. Phys. Chem. A 1997).
CLUSTERS = -16.505384, -15.533060


@pytest.mark.parametrize("seed", [0, 1, 4])
def test_atoms_that_fly_apart_come_back(seed):
    """The forces at the start are so large that slopes end with single atoms."""
    start = np.random.default_rng([7, seed]).uniform(-2, 2, 21)
    value = drive(UNTUNED, atoms, start, most=5000).value
    assert CLUSTERS[0] - 1e-5 <= value <= CLUSTERS[1] + 1e-5


def quantized(seed):
    """The loss of a layer in four bits, of the logarithms of 40 scales."""
    rng = np.random.default_rng([15, seed])
    weights = 1.5 * rng.standard_t(3, size=(16, 80)) / np.sqrt(80)
    inputs, head = rng.normal(size=(96, 80)), 1.5 * rng.normal(size=(16, 6)) / 4
    exact = 3 * np.tanh(inputs @ weights.T) @ head
    labels = np.argmax(exact + 0.3 * rng.gumbel(size=exact.shape), 1)
    groups = weights.reshape(40, 32)

    def fun(x):
        scales = np.max(abs(groups), 1) / 7 * np.exp(np.clip(x, -20, 20))
        whole = np.clip(np.round(groups / scales[:, None]), -8, 7)
        layer = (whole * scales[:, None]).reshape(16, 80)
        logits = 3 * np.tanh(inputs @ layer.T) @ head
        logits -= np.max(logits, 1, keepdims=True)
        right = logits[np.arange(96), labels]
        return float(np.mean(np.log(np.sum(np.exp(logits), 1)) - right))

    return fun


@pytest.mark.slow
def test_scales_of_four_bits_are_those_of_line_searches():
    """Jumps and plateaus: slopes hold for the smallest moves only."""
    ours, known = [], []
    for seed in range(2):
        fun, most = quantized(seed), 2000
        ours.append(drive(UNTUNED, fun, np.zeros(40), most=most).value)
        options = {"maxfev": most, "maxiter": most}
        known.append(minimize(fun, np.zeros(40), method="Powell", options=options).fun)
    assert np.mean(ours) < 1.2 * np.mean(known)
