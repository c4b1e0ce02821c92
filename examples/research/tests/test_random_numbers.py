"""The tests of normal numbers: they pass what is normal, and find what is not."""

import jax
import pytest

from campaigns import random_numbers

NUM, CHUNK = 2**18, 2**17


def suspicious(monkeypatch, change):
    """The tests that numbers fail if they are changed so."""
    plain = random_numbers.drawn
    monkeypatch.setattr(random_numbers, "drawn", lambda *args: change(plain(*args)))
    jax.clear_caches()
    return set(random_numbers.suspicious(random_numbers.run(NUM, CHUNK)))


def pairs(z):
    return z.reshape(-1, 2, random_numbers.PARTNER)


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda z: z, set()),
        (lambda z: z * 1.05, {"frequency", "radius and angle of partners"}),
        (
            lambda z: pairs(z)[:, [0, 0]].reshape(z.shape),
            {"serial, partners", "correlation, lag 16"},
        ),
        (
            lambda z: z.at[1::2].set(abs(z[1::2]) * jax.numpy.sign(z[::2])),
            {"serial, neighbors", "correlation, lag 1"},
        ),
    ],
    ids=["none", "variance", "partners", "signs"],
)
def test_what_is_not_normal_is_found(monkeypatch, change, found):
    tests = suspicious(monkeypatch, change)
    assert tests >= found if found else not tests
