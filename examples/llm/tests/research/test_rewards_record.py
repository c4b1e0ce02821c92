"""The record of the runs on a reward, and the search that it has."""

import math

import numpy as np
import pytest

from radazo_llm.settings import REWARD, Settings
from research import rewards
from research.common import RECORDS, read

PATH = RECORDS / "rewards.json"


@pytest.fixture(scope="module")
def content():
    return read(PATH)


@pytest.fixture(scope="module")
def runs(content):
    return rewards.of_runs(content)


def gains(rows):
    return np.array([r["evaluations"][-1][1] - r["evaluations"][0][1] for r in rows])


def test_populations_gain_more_than_two_standard_errors(content, runs):
    assert content["num_weights"] >= 1e6
    assert set(runs) == {"radazo", "default", "zo_sgd", "grpo"}
    for rows in runs.values():
        assert [row["seed"] for row in rows] == [1, 2, 3]
        gain = gains(rows)
        assert gain.mean() > 2 * gain.std(ddof=1) / np.sqrt(3)
        # Held-out sums of a run: 1,000 of at most 1/4 variance.
        assert gain.min() > 2 * np.sqrt(0.5 / 1000)


def test_all_generate_as_many_tokens(runs):
    generated = [row["generated"] for rows in runs.values() for row in rows]
    assert max(generated) < 1.05 * min(generated)


def test_the_policy_gradient_ends_higher_and_takes_more_time(runs):
    ends = {name: np.mean(gains(rows)) for name, rows in runs.items()}
    assert ends["grpo"] > max(ends[name] for name in ("radazo", "default", "zo_sgd"))
    spent = {name: np.mean([r["cpu_s"] for r in rows]) for name, rows in runs.items()}
    for name in ("radazo", "default", "zo_sgd"):
        assert 2 < spent["grpo"] / spent[name] < 3


def test_the_warm_up_leaves_headroom(runs):
    firsts = [row["evaluations"][0][1] for rows in runs.values() for row in rows]
    assert min(firsts) > 0.2 and max(firsts) < 0.6


def test_each_has_as_many_settings_and_the_best_is_interior(content, runs):
    searched = [row for row in content["rows"] if not row["seed"]]
    numbers = set()
    for method in rewards.STARTS:
        numbers.add(sum(row["method"] == method for row in searched))
        assert rewards.is_interior(searched, method), method
        best = rewards.best(searched, method)
        assert all(row | best == row for row in runs[method])
    assert len(numbers) == 1 and len(searched) == len(rewards.STARTS) * numbers.pop()
    assert all(row | rewards.by_default() == row for row in runs["default"])


def test_the_untuned_run_is_the_program_without_options():
    given = Settings.of(REWARD)
    run = rewards.settings(**rewards.by_default(), num_steps=given.num_steps, seed=1)
    shared = {"eval_every": 0, "eval_examples": 0, "seed": 0}
    assert vars(run) | shared == vars(given) | shared


@pytest.mark.parametrize("method", rewards.STARTS)
def test_the_search_ends_inside_of_what_it_tried(method):
    """On a reward that falls from an optimum, one doubling away from the start."""
    rate, other = rewards.STARTS[method]
    rows = []
    for number in range(9):
        if rows:
            assert (number < 5) <= (not rewards.is_interior(rows, method))
        new = rewards.next_setting(rows, method)
        assert all(row | new != row for row in rows)
        i = math.log2(new["learning_rate"] / rate)
        j = math.log2(new["other"] / other)
        reward = -math.hypot(i - 1, j)
        rows.append({**new, "seed": 0, "evaluations": [[0, 0.0], [30, reward]]})
    assert rewards.best(rows, method) == {
        "method": method,
        "learning_rate": 2 * rate,
        "other": other,
    }
    assert rewards.is_interior(rows, method)
