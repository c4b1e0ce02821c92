"""The frame of campaigns: rows, resumption, and a status."""

import pytest
from click.testing import CliRunner

from common.campaign import Campaign, campaign
from common.record import read


@pytest.fixture
def run(tmp_path):
    """Runs a campaign of these numbers: its result, its record, what it measured."""
    path, measured = tmp_path / "record.json", []

    def measure(number):
        measured.append(number)
        rows = [{"square": number**2, "power": 2}, {"square": number**3, "power": 3}]
        return rows if number == 2 else rows[0]

    def run(*numbers, more=(), keeps=False):
        @campaign("A campaign.")
        def main():
            return Campaign(
                (({"number": n}, lambda n=n: measure(n)) for n in numbers),
                lambda rows: [*rows, {"sum": sum(row["square"] for row in rows)}],
                {"device": "none"},
                lambda rows: ["too large"] if rows[-1]["sum"] > 100 else [],
                keeps=keeps,
            )

        done = CliRunner().invoke(main, ["--output", str(path), *more])
        return done, read(path), measured

    return run


def test_cases_are_rows_of_a_record(run):
    done, content, _ = run(1, 2)
    assert done.exit_code == 0 and "square" in done.output
    assert content["device"] == "none"
    assert [tuple(row.values()) for row in content["rows"]] == [
        (1, 1, 2),
        (2, 4, 2),
        (2, 8, 3),
        (13,),
    ]


def test_rows_that_are_there_are_not_measured_again(run):
    run(1, 2)
    _, content, measured = run(1, 2, 3, more=["--resume"])
    assert measured == [1, 2, 3]
    assert content["rows"][-1] == {"sum": 22}


def test_rows_of_other_cases_are_kept_if_the_campaign_says_so(run):
    run(1, 2)
    _, content, measured = run(3, more=["--resume"], keeps=True)
    assert measured == [1, 2, 3]
    assert [row.get("number") for row in content["rows"]] == [1, 2, 2, 3, None]
    _, content, _ = run(3, more=["--resume"])
    assert [row.get("number") for row in content["rows"]] == [3, None]


def test_what_failed_is_told_after_the_record_is_written(run):
    done, content, _ = run(20)
    assert done.exit_code == 1 and "too large" in done.output
    assert content["rows"][-1] == {"sum": 400}
