"""Journals that no run writes."""

import tracemalloc

import numpy as np
import pytest

import radazo_jax as zo
from tests.helpers.black_boxes import ESTIMATOR, OPTIMIZER, START, run
from tests.helpers.journals import DEEP, PICKLE, lines_of, with_checksums


def write_journal(folder):
    run(lambda x: float(np.sum((x - 1) ** 2)), steps=6, journal=folder / "run.jsonl")


def replay(folder):
    return zo.replay(folder / "run.jsonl", START, OPTIMIZER, ESTIMATOR).params


def refused(read, *arguments, match):
    with pytest.raises(ValueError, match=match) as error:
        read(*arguments)
    assert len(str(error.value).splitlines()) == 1
    assert len(str(error.value)) < 1000


STEP = b'{"step":0,"values":[1,2,3,4],"params":"00000000","seconds":1'
JOURNALS = {
    "a step of 10^18": [STEP.replace(b"0", b"1000000000000000000", 1)],
    "a step that is text": [STEP.replace(b"0", b'"0"', 1)],
    "a long number": [STEP.replace(b"0", b"9" * 5000, 1)],
    "deep": [b'{"a":' + DEEP],
    "no object": [b"[1"],
    "no values": [b'{"step":0,"params":"0","seconds":1'],
    "values that are none": [STEP.replace(b"[1,2,3,4]", b"1")],
    "values that are text": [STEP.replace(b"1,2", b'"x",2')],
    "too many values": [STEP.replace(b"[1,", b"[1,1,")],
    "a checksum of numbers": [STEP.replace(b'"00000000"', b"0")],
    "more than a step has": [STEP + b',"more":1'],
}


@pytest.fixture(scope="module")
def journal(tmp_path_factory):
    folder = tmp_path_factory.mktemp("journal")
    write_journal(folder)
    return folder / "run.jsonl"


@pytest.mark.parametrize("steps", JOURNALS.values(), ids=JOURNALS)
def test_steps_that_no_run_writes_are_refused(steps, journal, tmp_path):
    """It is refused although its checksums are right."""
    head, *_ = lines_of(journal.read_bytes())
    (tmp_path / "run.jsonl").write_bytes(with_checksums([head, *steps]))
    match = "is damaged in line 2: it is not what a run writes"
    refused(replay, tmp_path, match=match)


@pytest.mark.parametrize(
    "change",
    [
        (b'"key":[0,0]', b'"key":[0]'),
        (b'"key":[0,0]', b'"key":[0,99999999999999999999]'),
        (b'"key":[0,0]', b'"key":"ab"'),
        (b'"key":[0,0]', b'"none":0'),
        (b'"float32"', b'"object"'),
        (b'"float32"', b'"nonsense"'),
        (b'"points":', b'"none":'),
    ],
    ids=lambda change: change[1].decode(),
)
def test_runs_that_cannot_be_are_refused(change, journal, tmp_path):
    head, *steps = lines_of(journal.read_bytes())
    first, _, last = head.rpartition(change[0])
    assert first
    (tmp_path / "run.jsonl").write_bytes(
        with_checksums([first + change[1] + last, *steps])
    )
    match = "is damaged in line 1: it is not what a run writes"
    refused(replay, tmp_path, match=match)


TEXTS = b"the only copy", PICKLE, b"theta = 3\nsteps = 9\n", b'{"step":0}\n', b"\0\n"


@pytest.mark.parametrize(
    ("after_a_run", "content"),
    [*((False, text) for text in TEXTS), *((True, text) for text in TEXTS[:2])],
)
def test_what_is_no_journal_is_not_overwritten(after_a_run, content, journal, tmp_path):
    """A line without an end was cut off, whatever it was."""
    path = tmp_path / "run.jsonl"
    before = journal.read_bytes() if after_a_run else b""
    match = "is not what a run writes" if after_a_run else "must be a file that a run"
    path.write_bytes(before + content)
    for read in (write_journal, lambda _: zo.runs.History.from_journal(path)):
        refused(read, tmp_path, match=match)
    assert path.read_bytes() == before + content


def test_a_line_that_does_not_end_takes_bounded_memory(tmp_path):
    path = tmp_path / "run.jsonl"
    with path.open("wb") as file:
        file.truncate(2**36)  # The file is sparse, so it takes no space on the disk.
    tracemalloc.start()
    try:
        refused(replay, tmp_path, match="must be a file that a run wrote")
        assert tracemalloc.get_traced_memory()[1] < 1 << 30
    finally:
        tracemalloc.stop()
