"""The board of classes: its minima, its seeds, its counting, and its record."""

import re
from pathlib import Path

import click
import numpy as np
import pytest

from board import class_methods, class_problems, class_rough, class_table, classes
from board.class_methods import Count
from board.class_problems import Function
from board.class_table import CLASSES, cases
from common import RECORDS
from common.record import read

# Those with noise are families of the others.
_EXACT = [name for name in CLASSES if name not in classes.NOISY]


def _smallest(kind, name, seed):
    """A problem at its smallest number of parameters above 2."""
    family, dimensions = CLASSES[kind].problems[name]
    dimension = min((d for d in dimensions if d > 2), default=2)
    return class_table.Case(kind, name, seed, dimension, family).make()


@pytest.mark.parametrize("kind", _EXACT)
def test_no_point_is_below_the_minimum(kind):
    for name in CLASSES[kind].problems:
        found, draw = _smallest(kind, name, 1), np.random.default_rng(0)
        assert found.gap > 0 and np.isfinite(found.gap), name
        # A hash can fail at the minimum itself, as at any point.
        if not kind.startswith("nan"):
            assert found.fun(found.best) == found.least, name
        sizes = np.abs(found.best) + 1e-9 if kind.startswith("scales") else 1.0
        for power in np.linspace(-6, 0, 100):
            near = found.best + 10**power * sizes * draw.normal(size=found.dimension)
            if found.bounds is not None:
                near = np.clip(near, *found.bounds)
            assert not found.fun(near) < found.least - 1e-9 * found.gap, name


@pytest.mark.parametrize("name", CLASSES["free"].problems)
def test_slopes_vanish_at_the_minimum_of_a_smooth_function(name):
    found = _smallest("free", name, 2)

    def slope(x):
        steps = 1e-5 * np.eye(x.size)
        return np.array([found.fun(x + s) - found.fun(x - s) for s in steps])

    least, first = (np.linalg.norm(slope(x)) for x in (found.best, found.start))
    assert least < 1e-7 * first


@pytest.mark.parametrize("name", CLASSES["boxes"].problems)
def test_a_box_cuts_a_minimum_off(name):
    found = _smallest("boxes", name, 0)
    lower, upper = found.bounds
    assert (lower < upper).all()
    for point in (found.start, found.best):
        assert ((lower <= point) & (point <= upper)).all()
    assert ((found.best == lower) | (found.best == upper)).any()


def test_the_minima_of_atoms_are_those_of_the_literature():
    draw = np.random.default_rng(0)
    assert class_rough.atoms(draw, 12).least == pytest.approx(-6, abs=1e-9)


def test_seeds_are_other_functions():
    """Each of development and of evaluation; the same seed is the same function."""
    for kind in set(_EXACT) - {"boxes", "middle"}:  # Which have families of "free".
        for name, problems in CLASSES[kind].problems.items():
            d = min(problems.dimensions)
            built = [
                class_table.Case(kind, name, seed, d, problems.family).make()
                for seed in (0, 0, 100)
            ]
            values = [(one.gap, *one.start, *one.best) for one in built]
            assert values[0] == values[1] and values[0] != values[2], name


def test_seeds_of_evaluation_have_other_numbers_of_parameters():
    chosen, others = cases(["free"], [0, 1, 2]), cases(["free"], [100, 101, 102])
    changed = sum(
        a.dimension != b.dimension for a, b in zip(chosen, others, strict=True)
    )
    assert changed > len(chosen) / 2
    for kind in _EXACT:
        assert len(CLASSES[kind].problems) >= 5


def test_nan_is_at_a_share_of_the_points_and_never_at_the_start():
    for seed in range(5):
        found = _smallest("nan-20", "quadratic", seed)
        draw = np.random.default_rng(0)
        values = [found.fun(x) for x in draw.normal(size=(2000, found.dimension))]
        assert 0.17 < np.mean(np.isnan(values)) < 0.23
        assert np.isfinite(found.fun(found.start))


def _line(noise=0.0, relative=0.0):
    """|x| from 10 to 0, whose value is the share of the gap, times ten."""
    start, best = np.array([10.0]), np.zeros(1)

    def fun(x):
        return float(abs(x[0]))

    return Function(fun, start, 0.0, best, noise=noise, relative=relative)


def test_targets_of_a_history_by_hand():
    count = Count(_line(), budget=7)
    # A gap of a tenth, then NaN, then two targets at once, then higher again.
    for x in (10, 1, np.nan, 0.01, 5):
        count.value(np.array([x], np.float64))
    assert count.reached == [2, 4, 4, None]
    assert count.gap == pytest.approx(1e-3) and not count.finished
    for x in (3, 2, 0):  # The last one is beyond the budget.
        count.value(np.array([x], np.float64))
    assert count.reached == [2, 4, 4, None] and count.finished


def test_noise_does_not_reach_the_targets():
    draws = [Count(_line(*noise), 10**6) for noise in ((0.1, 0.0), (0.0, 0.1))]
    at = np.array([2.0])
    added, relative = (np.std([c.value(at) for _ in range(4000)]) for c in draws)
    # A tenth of the gap, 10, and a tenth of the value, 2.
    assert added == pytest.approx(1.0, rel=0.1)
    assert relative == pytest.approx(0.2, rel=0.1)
    assert [count.gap for count in draws] == [0.2, 0.2]


def test_wilson_by_hand():
    np.testing.assert_allclose(classes.wilson(0.5, 10), (0.2366, 0.7634), atol=1e-4)
    np.testing.assert_allclose(classes.wilson(0.0, 10), (0.0, 0.2775), atol=1e-4)


def _row(kind, *evaluations, method="default", seed=100):
    about = {"kind": kind, "problem": "chain", "seed": seed, "dimension": 9}
    about |= {"method": method, "evaluations": list(evaluations), "gap": 0.5}
    return about | {"returned": 0.25}


def test_tables_by_hand():
    rows = [
        _row("free", 10, 100, 101, None),
        _row("free", 50, 300, 301, 1000, seed=101),
        _row("free", None, None, None, None, method="cma"),
        _row("large", 100, 200, 300, 900),
        _row("additive-1e-1", None, None, None, None),
    ]
    shares, intervals, stuck, noise = classes.tables({"rows": rows})
    # Within 100: 3 of 8; 300: 5; 1000: 7. The limit of large problems is 300.
    assert shares.rows[0] == ("Free, d ≤ 20", "2", "38/62/88", "0/0/0")
    assert shares.rows[1] == ("d = 200–1000", "1", "25/75", "–")
    assert intervals.rows[1][2].startswith("1–88, ")
    assert stuck.rows[0][2:] == ("0", "0")
    assert noise.rows == [("Additive noise 1e-1", "1", "0.25")]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name == "default" else ())
        for name in class_methods.METHODS
    ],
)
def test_a_method_reaches_all_targets_and_stays_in_its_box(name):
    method = class_methods.METHODS[name]
    if not method.takes(2):
        pytest.skip(f"{method.needs} is not installed")
    seen = []

    def fun(x):
        seen.append(np.array(x))
        return float(np.sum((x - 2) ** 2 * [1, 3]))

    box = np.array([-1.0, -1.0]), np.array([1.0, 4.0])
    bounded = Function(fun, np.zeros(2), 1.0, np.array([1.0, 2.0]), box)
    for function in (class_problems.quadratic(np.random.default_rng(0), 2), bounded):
        found = class_methods.measured(function, 300, method.run, seed=0)
        # Powell's default tolerance ends its runs early; samplers are not precise.
        count = {"powell": 2, "differential": 3, "optuna": 2}
        assert None not in found["evaluations"][: count.get(name, 4)]
        reached = [one for one in found["evaluations"] if one is not None]
        assert reached == sorted(reached)
    assert all(((box[0] <= x) & (x <= box[1])).all() for x in seen)


def test_with_noise_the_returned_point_is_measured():
    """Without noise, and if a tool fails, the lowest value that it got."""
    for ends, returned in ((None, 0.0), (ValueError, 1.0)):

        def run(count, seed, ends=ends):
            count.value(count.function.start)
            if ends is not None:
                raise ends
            return count.function.best

        found = class_methods.measured(_line(noise=0.1), 10, run, 0)
        assert found == {"evaluations": [None] * 4, "gap": 1, "returned": returned}
        assert "returned" not in class_methods.measured(_line(), 10, run, 0)


@pytest.mark.parametrize(
    ("option", "value"), [("--classes", "free,step"), ("--seeds", "0,-1")]
)
def test_a_wrong_name_is_told_in_one_line(option, value):
    with pytest.raises(click.BadParameter, match=r"must be .*; got '(step|-1)'"):
        classes.main([option, value], standalone_mode=False)


def test_the_record_is_of_evaluation_and_no_run_is_below_the_minimum():
    rows = read(RECORDS / "board" / "classes.json")["rows"]
    done = {(row["kind"], row["method"]) for row in rows}
    expected = {
        (case.kind, case.name, case.seed, case.dimension, method)
        for kind, method in done
        for case in (
            classes.chosen([kind], 50)
            if kind in ("everyday", "guessed", "jitter", "nonsmooth")
            else cases([kind], [100, 101, 102])
        )
        if case.dimension <= class_methods.METHODS[method].most
    }
    names = ("kind", "problem", "seed", "dimension", "method")
    assert {tuple(map(row.get, names)) for row in rows} == expected
    assert len(rows) == len(expected)
    assert all(row["gap"] >= -1e-7 for row in rows)


def _first_of(rows, budget):
    """In how many classes without noise the default is first, and near it, of all."""
    shares, *_ = classes.tables({"rows": rows})
    exact, margins = {CLASSES[name].text for name in _EXACT}, []
    for kind, _, *cells in shares.rows:
        found = [cell.split("/") for cell in cells if cell != "–"]
        if kind in exact and budget < len(found[0]):
            own, *others = (int(shown[budget]) for shown in found)
            margins.append(own - max(others))
    first = sum(margin >= 0 for margin in margins)
    return first, sum(-3 < margin < 0 for margin in margins), len(margins)


def test_pages_say_in_how_many_classes_the_default_is_first():
    rows = read(RECORDS / "board" / "classes.json")["rows"]
    root = Path(__file__).parents[3]
    page = (root / "docs" / "research" / "optimizers.md").read_text("utf-8")
    for number, budget in enumerate((10, 30, 100)):
        first, near, count = _first_of(rows, number)
        begin = rf"Within {budget} \(d \+ 1\)[^*]* first in {first} of {count} classes"
        end = rf"\*\*[^.]* within\s+3 points of the first in {near} more\."
        assert re.search(begin + end, page), (budget, first, near, count)
        if budget == 30:  # The picture of the home.
            for name in ("README.md", "docs/index.md"):
                text = " ".join((root / name).read_text("utf-8").split())
                assert f"is first in {first} of {count} classes without noise" in text
