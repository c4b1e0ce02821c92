"""Files of both kinds of runs: damage, locks, other kinds, and other functions.

A method's run writes a line per evaluation, an optimizer's a line per step.
"""

import re
import tracemalloc
import warnings
from collections.abc import Callable
from concurrent.futures import BrokenExecutor, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest

import radazo_jax as zo
from radazo_jax._src.host.table import TableFile
from radazo_jax._src.runs.journal import Journal
from radazo_jax.runs import Evaluations, History
from tests.helpers import host_runs, short_runs
from tests.helpers.calls import square
from tests.helpers.doors import METHOD, assert_same, by_method, by_optimizer
from tests.helpers.journals import (
    DEEP,
    PICKLE,
    TWO,
    Simulator,
    full_disk,
    lines_of,
    with_checksums,
)
from tests.helpers.subprocesses import output_of
from tests.helpers.tables import slow


def continued(path, most=9, fun=square, **options):
    return by_method(fun, journal=path, max_evaluations=most, **options)


def continued_steps(path, most=3, fun=square, **options):
    return by_optimizer(fun, journal=path, num_steps=most, **options)


def replayed(path):
    return zo.replay(path, short_runs.START, *METHOD)


class Kind(NamedTuple):
    """A kind of files.

    Attributes:
      run: `run(path, most)` continues a run, up to so many lines.
      file: The class that reads and writes it.
      read: Reads a file without a run.
      known: The lines of a file without their seconds.
      most: The number of lines that a short run writes.
      row: A line that a run could have written.
    """

    run: Callable[..., Any]
    file: type
    read: Callable[..., Any]
    known: Callable[..., list[Any]]
    most: int
    row: bytes


ROW = b'{"number":0,"point":[1.0,2.0,3.0],"value":1.5,"seconds":1.0'
STEP = b'{"step":0,"values":[1,2,3,4,5],"params":"00000000","seconds":1'
EVALUATIONS = Kind(
    continued,
    TableFile,
    Evaluations.from_journal,
    lambda path: [
        (x.point, x.repeat, np.array(x.value).tobytes())
        for x in Evaluations.from_journal(path).rows
    ],
    9,
    ROW,
)
STEPS = Kind(
    continued_steps,
    Journal,
    History.from_journal,
    lambda path: [(x.values.tobytes(), x.params) for x in Journal(path).read().records],
    3,
    STEP,
)
EACH = pytest.mark.parametrize("kind", [EVALUATIONS, STEPS], ids=["method", "steps"])


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.jsonl"


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The bytes of a short run's file, by its kind."""
    path, found = tmp_path_factory.mktemp("written") / "run.jsonl", {}
    for kind in (EVALUATIONS, STEPS):
        kind.run(path)
        found[kind] = path.read_bytes()
        path.unlink()
    return found


def refused(read, path, match):
    """In a line of a reasonable length; and nothing of the file changes."""
    before = path.read_bytes() if path.stat().st_size < 2**30 else None
    with pytest.raises(ValueError, match=match) as caught:
        read(path)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 1000
    assert before is None or path.read_bytes() == before


# --- Damage -----------------------------------------------------------------------


ROWS = {
    "a number of 10^18": ROW.replace(b"0", b"1000000000000000000", 1),
    "a number that is text": ROW.replace(b"0", b'"0"', 1),
    "a long number": ROW.replace(b"0", b"9" * 5000, 1),
    "deep": b'{"number":' + DEEP,
    "no object": b"[1",
    "no value": b'{"number":0,"point":[1.0,2.0,3.0],"seconds":1.0',
    "no point": b'{"number":0,"value":1.5,"seconds":1.0',
    "a value that is text": ROW.replace(b"1.5", b'"x"'),
    "a value of no element": ROW.replace(b"1.5", b"[]"),
    "a value of two axes": ROW.replace(b"1.5", b"[[1.0]]"),
    "a value that failed without a text": ROW.replace(b"1.5", b'"nan"'),
    "a failure with a value": ROW + b',"failure":"OSError"',
    "a short point": ROW.replace(b"1.0,2", b"2"),
    "a point that is text": ROW.replace(b"[1.0,2.0,3.0]", b'"abc"'),
    "a point of texts": ROW.replace(b"[1.0,2.0", b'["a",2.0'),
    "seconds that are text": ROW.replace(b'"seconds":1.0', b'"seconds":"x"'),
    "a negative repetition": ROW + b',"repeat":-1',
    "a dtype of objects": ROW + b',"dtype":"object"',
    "another dtype": ROW + b',"dtype":"nonsense"',
}
STEP_ROWS = {
    "a step of 10^18": STEP.replace(b"0", b"1000000000000000000", 1),
    "a step that is text": STEP.replace(b"0", b'"0"', 1),
    "a long step": STEP.replace(b"0", b"9" * 5000, 1),
    "a deep step": b'{"a":' + DEEP,
    "no step": b"[1",
    "no values": b'{"step":0,"params":"0","seconds":1',
    "values that are none": STEP.replace(b"[1,2,3,4,5]", b"1"),
    "values that are text": STEP.replace(b"1,2", b'"x",2'),
    "too many values": STEP.replace(b"[1,", b"[1,1,"),
    "a checksum of numbers": STEP.replace(b'"00000000"', b"0"),
    "more than a step has": STEP + b',"more":1',
}
LINES = [
    *((EVALUATIONS, row) for row in ROWS.values()),
    *((STEPS, row) for row in STEP_ROWS.values()),
]


@pytest.mark.parametrize(("kind", "row"), LINES, ids=[*ROWS, *STEP_ROWS])
def test_lines_that_no_run_writes_are_refused(kind, row, written, path):
    """Although their checksums are right."""
    path.write_bytes(with_checksums([lines_of(written[kind])[0], row]))
    for read in (kind.run, kind.read):
        refused(read, path, "is damaged in line 2: it is not what a run writes")


KEYS = [
    (b'"key":[0,0]', b'"key":[0]'),
    (b'"key":[0,0]', b'"key":[0,99999999999999999999]'),
    (b'"key":[0,0]', b'"key":"ab"'),
    (b'"key":[0,0]', b'"none":0'),
]


@pytest.mark.parametrize(
    ("kind", "old", "new"),
    [
        *((kind, *key) for kind in (EVALUATIONS, STEPS) for key in KEYS),
        (EVALUATIONS, b'"dimension":3', b'"dimension":"3"'),
        (EVALUATIONS, b'"dimension":3', b'"dimension":0'),
        (EVALUATIONS, b'"start":', b'"none":'),
        (EVALUATIONS, b'"upper":', b'"none":'),
        (STEPS, b'"dtype":"float32"', b'"dtype":"object"'),
        (STEPS, b'"dtype":"float32"', b'"dtype":"nonsense"'),
        (STEPS, b'"points":', b'"none":'),
    ],
)
def test_first_lines_that_no_run_writes_are_refused(kind, old, new, written, path):
    head, *others = lines_of(written[kind])
    assert old in head
    path.write_bytes(with_checksums([head.replace(old, new), *others]))
    for read in (kind.run, kind.read):
        refused(read, path, "is damaged in line 1: it is not what a run writes")


TEXTS = b"the only copy", PICKLE, b"theta = 3\nsteps = 9\n", b"\0\n"


@EACH
@pytest.mark.parametrize("number", range(7))
def test_what_is_no_journal_is_not_overwritten(number, kind, written, path):
    """A line without an end was cut off, whatever it was."""
    after_a_run, match = b"", "must be a file that a run"
    texts = *TEXTS, kind.row + b"}\n", *TEXTS[:2]
    if number > 4:
        after_a_run, match = written[kind], "is not what a run writes"
    path.write_bytes(after_a_run + texts[number])
    for read in (kind.run, kind.read):
        refused(read, path, match)


@EACH
def test_a_line_that_does_not_end_takes_bounded_memory(kind, path):
    with path.open("wb") as file:
        file.truncate(2**36)  # The file is sparse, so it takes no space on the disk.
    tracemalloc.start()
    try:
        refused(kind.run, path, "must be a file that a run wrote")
        assert tracemalloc.get_traced_memory()[1] < 1 << 30
    finally:
        tracemalloc.stop()


@EACH
@pytest.mark.parametrize("every_nth", [37, slow(3)])
def test_a_changed_byte_never_gives_another_run(every_nth, kind, written, path):
    content = written[kind]
    path.write_bytes(content)
    whole = kind.known(path)
    for i in range(0, len(content), every_nth):
        changed = bytearray(content)
        changed[i] ^= 1 << (i % 8)
        path.write_bytes(changed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                found = kind.known(path)
            except ValueError as error:
                assert "journal" in str(error)
                continue
        # The end of the last line is its last byte: without it, the line is cut.
        assert i == len(content) - 1 and found == whole[:-1]


TORN = 25  # Bytes of a line that was begun.


@EACH
@pytest.mark.parametrize(("begun", "zeros"), [(TORN, 0), (TORN, 512), (0, 4096)])
def test_what_a_loss_of_power_left_is_cut(begun, zeros, kind, written, path):
    torn = kind.row.replace(b"0", b"%d" % kind.most, 1)[:begun]
    path.write_bytes(written[kind] + torn + bytes(zeros))
    with pytest.warns(UserWarning, match="was not complete, and is cut. The ") as found:
        parts = kind.run(path, 2 * kind.most)
    assert len(found) == 1
    assert_same(parts, kind.run(path.with_name("whole"), 2 * kind.most))
    assert path.read_bytes().count(b"\n") == 2 * kind.most + 1


def test_a_full_disk_ends_the_run_with_its_state(path):
    """Files are limited to 700 bytes: a line is cut, and taken back."""
    with full_disk(700), pytest.raises(zo.RunError, match="File too large") as caught:
        continued_steps(path, 9)
    done = int(caught.value.state.step)
    assert 0 < done < 9 and len(STEPS.known(path)) == done
    assert_same(continued_steps(path, 9), by_optimizer(num_steps=9))


# --- Two runs of a file, and files of another kind --------------------------------


@EACH
def test_a_journal_that_another_run_writes_is_refused(kind, path):
    """Also in the same process, until the run has ended."""

    def second(report):
        with pytest.raises(ValueError, match="must be written by one run at a time"):
            kind.run(path)
        called.append(report)

    called = []
    result = kind.run(path, callback=second)
    assert len(called) == len(result.values)
    assert_same(kind.run(path), result)
    assert len(kind.known(path)) == kind.most


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["method", "steps"])
def test_a_journal_that_another_process_writes_is_refused(kind, path):
    call, run = {
        "method": (
            "host_runs.run(host_runs.ripples, max_evaluations=9, **more)",
            lambda: host_runs.run(host_runs.ripples, max_evaluations=9),
        ),
        "steps": (
            "short_runs.run(num_steps=9, **more)",
            lambda: short_runs.run(num_steps=9),
        ),
    }[kind]
    code = TWO.replace("CALL", call)
    output = output_of(code, code, path, "first")
    said = ("first", "second")
    lines = [line for line in output.splitlines() if line.startswith(said)]
    assert "second refused" in lines[0] and str(path) in lines[0]
    assert lines[-1] == f"first ended {run().params.tolist()}"
    assert path.read_bytes().count(b"\n") == 10


@EACH
def test_a_call_that_writes_nothing_leaves_no_file(kind, path):
    with kind.file(path).opened():
        assert path.exists()
    assert not path.exists()
    with pytest.raises(ValueError, match="journal must be a file with a run"):
        kind.read(path)


@EACH
def test_files_of_the_other_kind_name_it(kind, written, path):
    (other,) = {EVALUATIONS, STEPS} - {kind}
    path.write_bytes(written[other])
    got = "the run of a method"
    if other is STEPS:
        got = "the steps of an optimizer, which train writes"
    refused(kind.run, path, f"got {got}")


@pytest.mark.parametrize(
    ("kind", "begin", "got"),
    [
        (EVALUATIONS, b'{"table":2', "of the format 2"),
        (EVALUATIONS, b'{"format":5,"points":null', "a journal of an earlier version"),
        (EVALUATIONS, b'{"fun":"a"', "a journal of an earlier version"),
        *(
            (STEPS, begin, "must have the format 5; got")
            for begin in (
                b'{"format":4',
                b'{"fun":"a","format":3',
                b'{"fun":"a"',
                b'{"format":6',
            )
        ),
    ],
)
def test_files_of_other_versions_are_refused(kind, begin, got, written, path):
    head, *others = lines_of(written[kind])
    own = b'{"table":1' if kind is EVALUATIONS else b'{"format":5'
    assert head.startswith(own)
    path.write_bytes(with_checksums([begin + head.removeprefix(own), *others]))
    if kind is EVALUATIONS:
        got = rf"must be a table .*of the format 1; got .*{got}"
    for read in (kind.run, kind.read):
        refused(read, path, got)


@EACH
def test_bounds_are_the_same_however_they_are_given(kind, path):
    kind.run(path, bounds=(-9.0, 9.0))
    kind.run(path, kind.most + 1, bounds=(np.full(3, -9.0), [9] * 3))
    assert len(kind.known(path)) == kind.most + 1


# --- Another function -------------------------------------------------------------


def in_double(level):
    return lambda x: level * square(x)


def in_single(level):
    return lambda x: np.float32(level * square(x))


def of_jax(level):
    return lambda x: jnp.float32(level) * jnp.sum(x**2)


def traced_steps(path, most=3, fun=None):
    return short_runs.traced(fun, num_steps=most, method=METHOD, journal=path)


@pytest.mark.parametrize(
    ("run", "make"),
    [
        (continued, in_double),
        (continued, in_single),
        (continued_steps, in_single),
        (traced_steps, of_jax),
    ],
)
def test_another_value_of_a_known_point_is_a_warning(run, make, path):
    """It shows both values, and the run continues; an equal one is none."""
    run(path, 9, make(1.0))
    run(path, 10, make(1.0))
    with pytest.warns(UserWarning, match="at which fun now returns") as caught:
        result = run(path, 12, make(2.0))
    (text,) = (str(warning.message) for warning in caught)
    assert path.read_bytes().count(b"\n") == 13 and "\n" not in text
    before = float(re.search(r"the value ([\d.]+\d)", text)[1])
    now = float(re.search(r"returns ([\d.]+\d)", text)[1])
    assert now == pytest.approx(2 * before, rel=1e-6)
    assert np.isfinite(result.best.value)


@EACH
def test_a_worker_that_dies_at_a_known_point_ends_the_run(kind, written, path):
    """The error has the result of the file."""

    class Dies(ThreadPoolExecutor):
        def submit(self, *args):
            raise BrokenExecutor("a worker died")

    path.write_bytes(written[kind])
    with Dies(1) as threads, pytest.raises(zo.RunError, match="evaluated again") as e:
        kind.run(path, 2 * kind.most, executor=threads)
    whole = kind.run(path.with_name("whole"))
    np.testing.assert_array_equal(e.value.result.values, whole.values)
    assert e.value.result.best.value == whole.best.value


@EACH
@pytest.mark.parametrize("is_same", [True, False])
def test_counters_caches_and_locks_do_not_prevent_continuing(is_same, kind, path):
    fun = Simulator()
    kind.run(path, fun=fun)
    found = kind.run(path, 2 * kind.most, fun=fun if is_same else Simulator())
    assert_same(found, kind.run(path.with_name("whole"), 2 * kind.most))


def crashing(x, calls):
    """A bug: an index that is out of range once the run has moved."""
    calls.append(x)
    return square(x) if len(calls) < 8 else calls[99]


def fixed(x):
    print("evaluated", end="")
    return square(x)  # The bug is gone.


@pytest.mark.parametrize(
    ("on_failure", "failed"), [("raise", [0, 3]), ("drop", [0, 3, 5, 5])]
)
def test_a_run_that_died_of_a_bug_is_resumed_once_the_bug_is_fixed(
    on_failure, failed, path
):
    """Warnings are errors here: its values must equal the journal's."""
    calls, options = [], {"on_failure": on_failure, "max_consecutive_failures": 2}
    with pytest.raises(zo.RunError, match="IndexError"):
        continued_steps(path, 9, lambda x: crashing(x, calls), **options)
    assert History.from_journal(path).failed.tolist() == failed
    resumed = continued_steps(path, 9, fixed, **options)
    assert resumed.history.failed.tolist() == failed + [0] * (9 - len(failed))
    # Steps in which values failed were taken without them.
    np.testing.assert_array_equal(replayed(path).params, resumed.params)
