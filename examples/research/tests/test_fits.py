"""Fits of the board: their residuals, their minima, and what tools reach."""

import numpy as np
import pytest

from board import class_methods, fits
from board.fit_problems import GROUPS, NIST

FAMILIES = {name: family for group in GROUPS.values() for name, family in group.items()}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_function_is_the_mean_square_of_its_residuals(name):
    found = FAMILIES[name](np.random.default_rng(3))
    residuals = found.residuals(found.start)
    np.testing.assert_allclose(found.fun(found.start), np.mean(residuals**2))
    assert found.gap > 0 and found.fun(found.best) == found.least
    other = FAMILIES[name](np.random.default_rng(4))
    assert not np.array_equal(other.start, found.start)


def test_certified_parameters_are_near_the_minima():
    for name in ("Chwirut2", "Misra1a", "Gauss1"):
        best = FAMILIES[name](np.random.default_rng(0)).best
        np.testing.assert_allclose(best, NIST[name].truth, rtol=0.02)


@pytest.mark.parametrize("tool", ["least_squares", "leastsq", "trf"])
def test_a_tool_reaches_all_targets_of_an_easy_fit(tool):
    fit = FAMILIES["Chwirut2"](np.random.default_rng(0))
    found = class_methods.measured(fit, 400, fits.TOOLS[tool], 0)
    assert None not in found["evaluations"] and found["gap"] < 1e-5
    assert found["evaluations"] == sorted(found["evaluations"])


def test_tables_by_hand():
    about = {"group": "jobs", "problem": "doses", "seed": 100, "dimension": 9}
    rows = [
        about | {"tool": "least_squares", "evaluations": [10, 100, 301, None]},
        about | {"tool": "trf", "evaluations": [None] * 4},
    ]
    (table,) = fits.tables({"rows": rows})
    assert table.rows == [("jobs", "1", "50/50/75", "0/0/0")]
