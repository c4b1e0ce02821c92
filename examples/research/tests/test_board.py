"""The board: data profiles, the counting of evaluations, and its record."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from board import __main__ as board
from board import (
    limit,
    methods,
    minibatches,
    ours,
    problems,
    profiles,
    relatives,
    report,
    robust,
)
from board.oracle import TARGETS, Oracle
from board.problems import Case
from common import RECORDS
from common.estimators import ESTIMATORS
from common.record import array, read

_RECORDS = RECORDS / "board"


@pytest.fixture(autouse=True)
def _settings_of_a_user():
    """evosax needs 64 bits, and mixes ranks and dtypes."""
    with (
        jax.enable_x64(True),
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
    ):
        yield


def test_profile_by_hand():
    """Eq. (2.9) of Moré and Wild: the share of problems with t ≤ κ (d + 1)."""
    evaluations = np.array([[10.0, 40.0], [99.0, np.inf], [5.0, 404.0]])
    found = profiles.profile(evaluations, np.array([9, 99, 100]), (0.1, 1, 4, 30))
    # In units of d + 1: 1 and 4, 0.98… and never, 0.0495… and 4.
    np.testing.assert_array_equal(found, np.array([1, 3, 5, 5]) / 6)


def test_median_ratio_by_hand():
    never = np.inf
    mine = np.array([10.0, 20.0, 5.0, never, never])
    other = np.array([20.0, 20.0, never, 7.0, never])
    # 1/2, 1, 0, ∞, and one that neither reaches.
    assert profiles.median_ratio(mine, other) == 0.75
    assert profiles.median_ratio(np.full(2, never), mine[:2]) == np.inf


def _sphere(dimension=20, noise=0.0):
    """Half the sum of squares, and a list of how many points were asked for."""
    asked = []

    def evaluate(points):
        asked.append(len(points))
        return 0.5 * np.sum(np.asarray(points, np.float64) ** 2, axis=1)

    start = np.linspace(0.5, 1.5, dimension)
    problem = problems.known(start, evaluate, 0.0, np.zeros(dimension))
    asked.clear()
    return dataclasses.replace(problem, noise=noise), asked


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow)
        if "not accelerated" in name
        else name
        for name, method in methods.METHODS.items()
        if not method.traced
    ],
)
def test_every_value_is_counted(name):
    method, (problem, asked), oracles = methods.METHODS[name], _sphere(), []
    if not method.takes("BBOB", problem.dimension):
        pytest.skip(f"{method.needs} is not installed")

    def make_oracle():
        oracles.append(Oracle(problem, 150))
        return oracles[-1]

    found = method.run(problem, make_oracle, 0)
    assert sum(asked) == sum(oracle.count for oracle in oracles)
    assert set(found) <= set(oracles)
    # The last step, or population, may end beyond the budget.
    assert all(0 < oracle.count <= 150 + 20 for oracle in oracles)
    assert all(np.isinf(o.reached).any() or o.gap <= TARGETS[-1] for o in oracles)


@pytest.mark.parametrize(
    ("name", "dimension", "at_the_end"),
    [
        ("radazo_jax, untuned", 20, 1),
        # K = 17, and the most.
        pytest.param("radazo_jax, untuned", 300, 1, marks=pytest.mark.slow),
        pytest.param("radazo_jax, untuned", 2000, 1, marks=pytest.mark.slow),
        pytest.param("R-AdaZO, parabolic step", 20, 1, marks=pytest.mark.slow),
    ],
)
def test_values_of_a_compiled_run_are_counted(name, dimension, at_the_end):
    """All values are counted, except for the one at the end of the last step."""
    asked = []

    def traced(theta):
        jax.debug.callback(asked.append, theta[0])
        return 0.5 * jnp.sum(theta**2)

    problem = dataclasses.replace(_sphere(dimension)[0], traced=traced)
    oracle = Oracle(problem, 150)
    methods.METHODS[name].run(problem, lambda: oracle, 0)
    jax.effects_barrier()
    assert oracle.count + at_the_end == len(asked)


def test_a_target_is_reached_where_the_gap_first_is_below():
    """A value counts without its noise."""
    problem, _ = _sphere(2, noise=1e-9)
    oracle = Oracle(problem, 6)
    start = problem.start
    oracle(np.array([start, start / 3, start / 4]))
    np.testing.assert_array_equal(oracle.reached, [2 + 1, np.inf, np.inf])
    oracle(np.array([start, start / 10]))
    np.testing.assert_array_equal(oracle.reached, [3, 5, np.inf])
    assert not oracle.finished
    oracle(np.array([start, 0 * start]))  # The seventh is beyond the budget.
    np.testing.assert_array_equal(oracle.reached, [3, 5, np.inf])
    assert oracle.finished and oracle.gap == pytest.approx(0.01)


def test_a_step_of_many_evaluations_begins_with_its_value():
    problem, _ = _sphere(2)
    oracle = Oracle(problem, 40)
    value = problem.evaluate(problem.start[None])[0]
    oracle.see(value * np.array([1.0, 0.05]), each=12)
    np.testing.assert_array_equal(oracle.reached, [12 + 1, np.inf, np.inf])
    oracle.see(value * np.array([0.05, 0.005]), each=12)
    np.testing.assert_array_equal(oracle.reached, [13, 3 * 12 + 1, np.inf])
    assert oracle.count == 48 and oracle.finished


def test_a_rotation_is_one():
    turn, back = problems.rotation(100)
    x = np.random.default_rng(0).normal(size=100)
    turned = turn(jnp.asarray(x))
    np.testing.assert_allclose(np.sum(turned**2), np.sum(x**2), rtol=1e-12)
    np.testing.assert_allclose(back(turned), x, rtol=1e-12, atol=1e-12)
    assert np.abs(turned - x).max() > 0.1


@pytest.fixture
def few(monkeypatch):
    """Two problems, and methods that compile little."""
    cases = [Case("BBOB", f"sphere {d}", d, lambda d=d: _sphere(d)[0]) for d in (5, 6)]
    monkeypatch.setattr(problems, "cases", lambda fast: cases)
    kept = ("SciPy L-BFGS-B", "radazo_jax, untuned")
    some = {name: methods.METHODS[name] for name in kept}
    monkeypatch.setattr(methods, "METHODS", some)


@pytest.mark.slow
def test_a_run_that_goes_on_gives_equal_rows(few, tmp_path, monkeypatch):
    def rows(folder):
        return [
            {name: value for name, value in row.items() if name != "compile_s"}
            for row in read(folder / "board.json")["rows"]
        ]

    whole, parts = tmp_path / "whole", tmp_path / "parts"
    board.main(["--output", str(whole)], standalone_mode=False)
    board.main(["--output", str(parts)], standalone_mode=False)
    content = read(parts / "board.json")
    content["rows"] = content["rows"][:1]
    (parts / "board.json").write_text(json.dumps(content))
    board.main(["--output", str(parts), "--resume"], standalone_mode=False)
    assert rows(parts) == rows(whole) and len(rows(whole)) == 4
    assert (whole / "board.png").read_bytes().startswith(b"\x89PNG")


def test_a_table_by_hand():
    """The column next to the last is of the problems on which the method was run."""

    def row(method, dimension, *evaluations):
        about = {"kind": "BBOB", "problem": "f1", "dimension": dimension}
        return about | {"method": method, "evaluations": evaluations}

    rows = [
        row(report.UNTUNED, 9, 10, 30, None),
        row(report.UNTUNED, 99, 100, 1000, 3000),
        row(report.REFERENCE, 9, 20, None, None),
        row(report.REFERENCE, 99, 100, 500, 3000),
        row("other", 9, 300, None, None),
    ]
    shown = report.tables({"rows": rows})[0].rows
    assert shown == [
        (report.UNTUNED, "2", "33%", "50%", "67%", "83%", "83%", "1.00"),
        (report.REFERENCE, "2", "17%", "33%", "50%", "67%", "83%", "1.00"),
        ("other", "1", "0%", "0%", "0%", "33%", "67%", "15.00"),
    ]


def test_what_is_wrong_with_the_curvature_is_a_factor_of_10000():
    shares, step = np.array([0.02, 0.9]), 1e-5
    for harm, expected in (
        (robust.steeper, [1e4, 1]),
        (robust.flatter, [1, 1e4]),
    ):
        rates = (harm(shares + step) - harm(shares - step)) / (2 * step)
        np.testing.assert_allclose(rates, expected, rtol=0.01)


def test_a_first_step_of_a_million_times_the_right_one_is_survived():
    problem, _ = _sphere()
    found = robust.run(problem, robust.Harm(step=1e6), "float64", 0)
    assert not found["diverged"] and found["last"] < 0.1


# What the page on the comparison of optimizers says.
_DETERMINISTIC = ("Synthetic", "Rotated", "CUTEst", "BBOB")
_OTHERS = ("SciPy L-BFGS-B", "NGOpt", "SNES", "Open_ES", "ZO-AdaMM, η = 0.001")


@pytest.fixture(scope="module")
def recorded():
    return read(_RECORDS / "board.json")


def test_the_record_says_how_it_came_about(recorded):
    assert recorded["command"].startswith("python -m board ")
    assert "--fast" not in recorded["command"]
    assert recorded["settings"]["budget"] == 30
    assert {"cma", "coco-experiment", "evosax", "nevergrad", "sif2jax"} <= set(
        recorded["versions"]
    )


@pytest.mark.parametrize("other", _OTHERS)
def test_untuned_is_first_of_what_is_not_tuned(recorded, other):
    """This compares the problems on which both were run; NGOpt is level at first."""
    every = report.runs(recorded["rows"], _DETERMINISTIC)
    ours, others = every[report.UNTUNED], every[other]
    both = ours.common(others)
    dimensions = np.array([d for _, _, d in both])
    budgets = np.arange(1, 30.25, 0.25)
    reached = [
        profiles.profile(found.at(both), dimensions, budgets)
        for found in (ours, others)
    ]
    ahead = np.rint(others.at(both).size * (reached[0] - reached[1]))
    level = (other == "NGOpt") & (budgets < 1.5)
    assert (ahead[level] == 0).all()
    assert (ahead[~level] > 0).all()


def test_momentum_costs_little_at_first_and_pays_later(recorded):
    every = report.runs(recorded["rows"], _DETERMINISTIC)
    ours, plain = every[report.UNTUNED], every["radazo_jax, not accelerated"]
    assert ours.names == plain.names
    first = np.arange(1, 5.75, 0.25)
    lost = plain.shares(first) - ours.shares(first)
    assert np.mean(lost > 0) > 0.6 and (lost < 0.02).all()
    later = np.arange(5.75, 30.25, 0.25)
    assert (ours.shares(later) > plain.shares(later)).all()
    # The numbers are percentages, as on the page.
    assert np.rint(100 * (ours.shares([30]) - plain.shares([30]))) == 5


def test_untuned_needs_less_than_half_of_tuned_zo_adamm(recorded):
    every = report.runs(recorded["rows"], _DETERMINISTIC)
    ours, others = every[report.UNTUNED], every[report.REFERENCE]
    both = ours.common(others)
    assert profiles.median_ratio(ours.at(both), others.at(both)) < 0.5
    longer = ours.at(both) > 1.2 * others.at(both)
    slow = {both[i][1] for i, _ in np.argwhere(longer)}
    assert slow == {"VARDIM", "SPIN2LS", "Levy"}


def test_radazo_without_a_rate_needs_less_than_tuned_zo_adamm(recorded):
    every = report.runs(recorded["rows"], _DETERMINISTIC)
    radazo = every["R-AdaZO, parabolic step"]
    for other, ratio in ((report.REFERENCE, 0.88), (report.UNTUNED, 1.7)):
        both = radazo.common(every[other])
        found = profiles.median_ratio(radazo.at(both), every[other].at(both))
        np.testing.assert_allclose(found, ratio, atol=0.05)
    at = next(i for i, name in enumerate(radazo.names) if name[1] == "VARDIM")
    np.testing.assert_array_equal(radazo.evaluations[at], [25, 37, 49])


def test_much_noise_is_where_cma_is_first(recorded):
    every = report.runs(recorded["rows"], ["Noisy"])
    assert np.isfinite(every[report.UNTUNED].evaluations).sum() == 7
    shares = {name: found.shares([30])[0] for name, found in every.items()}
    assert max(shares, key=shares.get).split(",")[0].endswith("CMA")


def test_under_little_noise_untuned_is_first_where_it_arrives(recorded):
    every = report.runs(recorded["rows"], ["Noisy"])
    ours = every.pop(report.UNTUNED)
    little = [name for name in ours.names if name[1].endswith(" 0.01%")]
    arrived = np.isfinite(ours.at(little))
    np.testing.assert_array_equal(arrived.sum(axis=0), [4, 2, 0])
    for others in every.values():
        assert (ours.at(little)[arrived] < others.at(little)[arrived]).all()


def test_under_much_noise_untuned_ends_at_a_sixth_but_on_levy(recorded):
    gaps = {
        row["problem"]: row["gap"]
        for row in recorded["rows"]
        if row["method"] == report.UNTUNED and row["problem"].endswith(" 1.00%")
    }
    assert len(gaps) == 5
    assert {name for name, gap in gaps.items() if gap >= 1 / 6} == {"Levy, 1.00%"}


def test_nothing_diverges():
    content = read(_RECORDS / "robust.json")
    assert {row["dtype"] for row in content["rows"]} == {"float32", "float64"}
    assert len(content["rows"]) == 576
    assert not any(row["diverged"] or row["error"] for row in content["rows"])
    up = [row["harm"] for row in content["rows"] if row["up"]]
    assert up == 2 * ["curvature × 10⁴ on the way"]
    highest = max(row["last"] for row in content["rows"] if not row["up"])
    assert 1.335 < highest < 1.345


# R-AdaZO's update with other estimators.
@pytest.fixture(scope="module")
def behind():
    """Estimator -> method -> its rows, problem by problem."""
    found = {}
    for row in read(_RECORDS / "relatives.json")["rows"]:
        found.setdefault(row["estimator"], {}).setdefault(row["method"], []).append(row)
    assert list(found) == list(ESTIMATORS)
    for methods_ in found.values():
        (names,) = {tuple(r["problem"] for r in rows) for rows in methods_.values()}
        assert len(names) == 52
    return found


def test_radazo_is_below_zo_adamm_behind_each_estimator_at_equal_rates(behind):
    for found in behind.values():
        ours, others = (
            array([row["gap"] for row in found[f"{name}, η = 0.001"]])
            for name in ("R-AdaZO", "ZO-AdaMM")
        )
        assert np.mean(ours < others) > 0.84


def test_at_the_best_rates_it_reaches_no_more(behind):
    reached = {
        estimator: {
            name: np.isfinite(array([row["evaluations"] for row in rows])).sum()
            for name, rows in found.items()
            if "best" in name
        }
        for estimator, found in behind.items()
    }
    for found in reached.values():
        assert found["R-AdaZO, best of 5"] <= found["ZO-AdaMM, best of 5"]
    least = min(reached.pop("gaussian_process").values())
    assert least > max(max(found.values()) for found in reached.values())


@pytest.mark.slow
def test_the_rules_behind_differences_are_those_of_the_board(
    few, tmp_path, monkeypatch
):
    name = "R-AdaZO, best of 5"
    one = {name: methods.swept(ours.FORWARD)[name]}
    monkeypatch.setattr(methods, "METHODS", one)
    some = {n: ESTIMATORS[n] for n in ("forward_difference", "residual_feedback")}
    monkeypatch.setattr(relatives, "ESTIMATORS", some)
    arguments = ["--output", str(tmp_path), "--budget", "8"]
    board.main([*arguments], standalone_mode=False)
    board.main([*arguments, "--relatives"], standalone_mode=False)
    of_board, of_relatives = (
        read(tmp_path / f"{file}.json")["rows"] for file in ("board", "relatives")
    )
    assert len(of_relatives) == len(some) * 2 * 6
    found = [
        row["gap"]
        for row in of_relatives
        if (row["estimator"], row["method"]) == ("forward_difference", name)
    ]
    assert found == [row["gap"] for row in of_board]
    assert all(row["gap"] < 1 for row in of_relatives if "best" in row["method"])


# Up to 20 parameters: what the table says.
@pytest.fixture(scope="module")
def shares():
    """The shares of targets of each method without bounds, by budget."""
    rows = [row for row in read(_RECORDS / "few.json")["rows"] if row["evaluations"]]
    found = report.runs(rows, ["CUTEst"])
    return {name: runs.shares([5, 10, 20, 50, 200]) for name, runs in found.items()}


def test_few_parameters_are_never_served_worst(shares):
    for name, of_ours in shares.items():
        if name.startswith("radazo_jax"):
            others = [s for n, s in shares.items() if not n.startswith("radazo_jax")]
            assert len(others) == 4 and (of_ours > np.min(others, axis=0)).all()


def test_few_parameters_reach_two_thirds_and_nine_tenths(shares):
    assert shares["radazo_jax"][2] >= 0.66 and shares["radazo_jax"][4] >= 0.9


def test_few_parameters_in_bounds_are_served_first_or_second():
    rows = [row for row in read(_RECORDS / "few.json")["rows"] if row["evaluations"]]
    found = report.runs(rows, ["Bounded"])
    shares = {name: runs.shares([10, 30, 100]) for name, runs in found.items()}
    ours = shares.pop("radazo_jax")
    shares.pop("radazo_jax, all points at once")
    assert (np.sum(np.array(list(shares.values())) > ours, axis=0) <= 1).all()


def test_the_limit_of_few_parameters_costs_a_tenth_of_the_targets_at_most():
    rows = read(_RECORDS / "limit.json")["rows"]
    groups = dict.fromkeys(map(limit._group, rows))
    assert len(groups) == 8
    for group in groups:
        of_group = [row for row in rows if limit._group(row) == group]
        found = report.runs(of_group, {row["kind"] for row in of_group})
        shares = {name: runs.shares([30])[0] for name, runs in found.items()}
        assert shares["parabolic_sgd"] >= 0.9 * shares["bfgs"]
        if group == "20 to 29":
            assert shares["bfgs"] >= 0.9 * shares["parabolic_sgd"]


def test_the_measured_rate_on_minibatches_is_as_the_page_says():
    """It loses little, also to the best rate in hindsight, and diverges nowhere."""
    rows = read(_RECORDS / "minibatches.json")["rows"]
    found = np.array([minibatches.lost(row)[minibatches.RULE] for row in rows])
    best = [minibatches.lost(row, "best")[minibatches.RULE] for row in rows]
    assert {row["problem"] for row in rows} == set(minibatches.PROBLEMS)
    assert np.mean(best) <= 0.1 and found.max() <= 0.75
    page = (_RECORDS / "README.md").read_text(encoding="utf-8")
    page = " ".join(page.partition("## Minibatches")[2].split())
    mean, worst = 100 * found.mean(), 100 * found.max()
    assert f"loses {mean:.0f} % of what a searched η gains" in page
    assert f"{worst:.0f} % in its worst run" in page
    guarded = [row["stopped"] for row in rows if row["stopped"]]
    assert not np.any([stopped["rule, guarded"] for stopped in guarded])
    # Of the runs at four times the rate, most are not stopped.
    assert np.mean([stopped["rule × 4, guarded"] for stopped in guarded]) <= 0.5


def test_the_searched_rate_loses_nothing():
    ends = {name: [3.0, 2.0] for name in minibatches.METHODS}
    ends |= {"searched": [1.0, 1.0], "rule × 4": [None, 2.0], "rule × 2": [0.0, 0.0]}
    found = minibatches.lost({"start": 5.0, "ends": ends})
    np.testing.assert_array_equal(found["searched"], [0, 0])
    np.testing.assert_array_equal(found["rule × 4"], [np.inf, 0.25])
    np.testing.assert_array_equal(found[minibatches.RULE], [0.5, 0.25])
    best = minibatches.lost({"start": 5.0, "ends": ends}, "best")
    np.testing.assert_array_equal(best[minibatches.RULE], [0.6, 0.4])


def test_a_guard_judges_by_the_mean_rise_and_its_error():
    """Two standard errors of 0, 2, … are 2 / √(n − 1)."""

    def lower(rises):
        sums = sum(minibatches._powers(jnp.float64(x)) for x in rises)
        return bool(minibatches._is_lower(sums))

    assert lower([0.0, 2.0, 0.0, 2.0]) and not lower([0.0, 2.0] * 3)
    assert lower([-1.0] * 8) and not lower([1.0] * 8)
    assert not lower([np.nan] * 8)
