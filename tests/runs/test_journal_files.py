"""Files of journals: written by two processes, or cut by the loss of power."""

import warnings
import zlib

import numpy as np
import pytest

import radazo_jax as zo
from radazo_jax._src.runs.journal import Journal
from tests.helpers.journals import TWO
from tests.helpers.short_runs import run
from tests.helpers.subprocesses import output_of
from tests.helpers.tables import slow


@pytest.mark.slow
def test_a_journal_that_another_process_writes_is_refused(tmp_path):
    path = tmp_path / "run.jsonl"
    code = TWO.replace("CALL", "short_runs.run(num_steps=4, **more)")
    output = output_of(code, code, path, "first")
    said = ("first", "second")
    lines = [line for line in output.splitlines() if line.startswith(said)]
    assert "second refused" in lines[0] and str(path) in lines[0]
    assert lines[-1] == f"first ended {run(num_steps=4).params.tolist()}"
    numbers = [line.split(b",")[0] for line in path.read_bytes().splitlines()]
    assert numbers[1:] == [b'{"step":%d' % i for i in range(4)]


def test_a_journal_that_another_run_writes_is_refused(tmp_path):
    """Also in the same process, until the run has ended."""

    def second(report):
        with pytest.raises(ValueError, match="must be written by one run at a time"):
            run(num_steps=4, journal=path)
        called.append(report)

    path, called = tmp_path / "run.jsonl", []
    result = run(num_steps=2, journal=path, callback=second)
    assert len(called) == 2 and len(result.values) == 2
    assert len(run(num_steps=4, journal=path).values) == 4


def test_a_call_that_writes_nothing_leaves_no_file(tmp_path):
    path = tmp_path / "run.jsonl"
    with Journal(path).opened():
        assert path.exists()
    assert not path.exists()


@pytest.mark.parametrize(
    "begin",
    [b'{"format":4,', b'{"fun":"a","format":3,', b'{"fun":"a",', b'{"format":6,'],
    ids=["4", "older", "none", "later"],
)
@pytest.mark.parametrize(
    "read", [lambda path: run(journal=path), zo.runs.History.from_journal]
)
def test_a_journal_of_another_format_is_refused(read, begin, tmp_path):
    path = tmp_path / "run.jsonl"
    run(num_steps=1, journal=path)
    head = path.read_bytes().splitlines()[0].rpartition(b',"crc":"')[0]
    head = begin + head.removeprefix(b'{"format":5,')
    content = head + b',"crc":"%08x"}\n' % zlib.crc32(head)
    path.write_bytes(content)
    with pytest.raises(ValueError, match="must have the format 5; got") as caught:
        read(path)
    assert "\n" not in str(caught.value) and path.read_bytes() == content


TORN = b'{"step":2,"values":[2.9'


@pytest.mark.parametrize(
    "end",
    [slow(TORN), TORN + bytes(512), bytes(4096)],
    ids=["torn line", "torn line and zeros", "zeros"],
)
def test_what_a_loss_of_power_left_is_cut(end, tmp_path):
    path = tmp_path / "run.jsonl"
    run(num_steps=2, journal=path)
    path.write_bytes(path.read_bytes() + end)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        parts = run(num_steps=4, journal=path)
    assert ["is cut" in str(warning.message) for warning in found] == [True]
    np.testing.assert_array_equal(parts.params, run(num_steps=4).params)
