"""Records of numbers of directions, and the page that describes them."""

import json

import numpy as np
import pytest

from research import common, comparison, directions
from research.common import RECORDS

RECORD = RECORDS / "directions.json"


def made(difference, k, rate, seed, losses):
    return {
        "difference": difference,
        "num_directions": k,
        "learning_rate": rate,
        "seed": seed,
        "passes": [100 * i for i in range(len(losses))],
        "train_loss": losses,
    }


def test_choices_are_compared_at_equal_passes_and_at_equal_time():
    runs = [made("central", 1, 0.1, seed, [4.0, 3.0, 2.0]) for seed in range(2)]
    runs += [made("central", 1, 0.2, 0, [4.0, 0.0, 3.0])]
    runs += [made("central", 1, 0.2, 1, [None])]  # Diverged.
    for choice in directions.CHOICES[1:]:
        for rate, end in ((0.1, 3.0), (0.2, 1.0)):
            runs += [made(*choice, rate, s, [4.0, end, end + s]) for s in range(2)]
    content = {
        "passes": 200,
        "seeds": 2,
        "rates": [0.1, 0.2],
        "pass_ms": [20.0, 10.0, 10.0],
        "runs": runs,
    }
    in_passes, in_time, in_the_end = directions.tables(content)
    # 33, 66 and 200 passes; half of the loss at 200, and on the line from 4 to 1.
    assert in_passes.headers[1:4] == ["33", "66", "200"]
    assert in_passes.rows[0][3:] == ["2.000 ± 0.000 (1e-1)", "200"]
    assert in_passes.rows[1][3:] == ["1.500 ± 0.500 (2e-1)", "67"]
    # In the time of 200 fast passes, 100 slow ones.
    assert in_time.rows[0][3:] == ["3.000 ± 0.000 (1e-1)", "20.00"]
    assert in_the_end.rows[0][1:] == ["2.000 ± 0.000", "diverged"]


@pytest.mark.slow
def test_the_benchmark_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(common, "RUNS", tmp_path)
    output = str(tmp_path / "found.json")
    directions.main(["--fast", "--output", output], standalone_mode=False)
    content = json.loads((tmp_path / "found.json").read_text("utf-8"))
    assert len(content["runs"]) == 3 and len(content["pass_ms"]) == 3
    assert all(np.isfinite(run["train_loss"]).all() for run in content["runs"])


# What research/records/README.md says, held against its record.
@pytest.fixture(scope="module")
def content():
    return json.loads(RECORD.read_text("utf-8"))


def curves(content, choice):
    """Passes and the losses of all seeds, by rate."""
    return {rate: directions.group(content, choice, rate) for rate in content["rates"]}


@pytest.fixture(scope="module")
def in_the_end(content):
    """The mean final loss at each rate, by K."""
    return {
        choice[1]: [at[:, -1].mean() for _, at in curves(content, choice).values()]
        for choice in directions.CHOICES
    }


def test_the_best_rates_lie_inside_of_the_grid(content):
    assert content["seeds"] == 3 and "--fast" not in content["command"]
    for choice in directions.CHOICES:
        found = curves(content, choice).values()
        for part in directions.PARTS:
            budget = content["passes"] / part
            at = [np.interp(budget, p, losses.mean(axis=0)) for p, losses in found]
            assert 0 < np.argmin(at) < len(at) - 1


def test_more_directions_are_ahead_at_first_and_alike_in_the_end(content, in_the_end):
    half = {}
    for choice in directions.CHOICES:
        half[choice[1]] = min(
            np.mean([comparison.first_at(one[0] / 2, p, one) for one in losses])
            for p, losses in curves(content, choice).values()
        )
    for k in (4, 16):
        assert 0.87 < half[k] / half[1] < 0.95
    assert half[4] == pytest.approx(half[16], rel=0.05)
    best = {k: min(losses) for k, losses in in_the_end.items()}
    rate = content["rates"][np.argmin(in_the_end[1])]
    _, losses = directions.group(content, directions.CHOICES[0], rate)
    for k in (4, 16):
        assert 0 < best[1] - best[k] < losses[:, -1].std()


def test_sixteen_directions_are_less_sensitive_to_the_rate(content, in_the_end):
    at = {k: int(np.argmin(losses)) for k, losses in in_the_end.items()}
    assert [content["rates"][i] for i in at.values()] == [8e-4, 1.6e-3, 1.6e-3]
    lost = {k: in_the_end[k][at[k] + 1] - in_the_end[k][at[k]] for k in at}
    assert lost[16] < 0.02 and min(lost[1], lost[4]) > 0.2


def test_what_a_step_does_once_takes_longer_than_a_pass(content):
    one, four, sixteen = content["pass_ms"]
    steps = np.array([2 * one, 5 * four, 17 * sixteen])
    a_pass, once = np.polyfit([2, 5, 17], steps, 1)
    assert once > a_pass
