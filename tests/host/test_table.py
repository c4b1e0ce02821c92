"""Files of runs of methods: what they hold, damage, locks, and other runs' files."""

import json
import pickle
import re
import threading
import tracemalloc
import warnings
import zlib
from concurrent.futures import BrokenExecutor, ThreadPoolExecutor

import numpy as np
import pytest

import radazo_jax as zo
from radazo_jax._src.host.table import TableFile
from radazo_jax.runs import Evaluations
from tests.helpers import short_runs
from tests.helpers.host_runs import (
    METHODS,
    START,
    assert_same,
    bowl,
    quiet,
    ripples,
    rows,
    run,
)
from tests.helpers.subprocesses import output_of
from tests.helpers.tables import slow

MOST = 9


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The bytes of a file of nine evaluations."""
    path = tmp_path_factory.mktemp("written") / "run.jsonl"
    run(ripples, METHODS["custom"], journal=path, max_evaluations=MOST)
    return path.read_bytes()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.jsonl"


def again(path, **options):
    options = {"max_evaluations": MOST, **options}
    return run(ripples, METHODS["custom"], journal=path, **options)


READ = [again, Evaluations.from_journal]


def refused(read, path, match):
    """In a line of a reasonable length; and nothing of the file changes."""
    before = path.read_bytes() if path.stat().st_size < 2**30 else None
    with pytest.raises(ValueError, match=match) as caught:
        read(path)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 1000
    assert before is None or path.read_bytes() == before


def bodies(content):
    return [line.rpartition(b',"crc":"')[0] for line in content.splitlines()]


def with_checksums(lines):
    checksum, content = 0, b""
    for line in lines:
        checksum = zlib.crc32(line, checksum)
        content += line + b',"crc":"%08x"}\n' % checksum
    return content


# --- What a file holds ------------------------------------------------------------


def test_a_file_is_lines_of_json(path):
    """Failures have their text, and numbers that JSON has not are texts."""

    def fun(x):
        return {2: np.inf, 3: np.nan}.get(next(count), ripples(x))

    count = iter(range(99))
    result = quiet(run, fun, METHODS["custom"], journal=path, max_evaluations=MOST)
    head, *lines = [json.loads(line) for line in path.read_bytes().splitlines()]
    assert (head["start"], head["key"], head["dimension"]) == (0.0, [0, 0], 3)
    assert [line["number"] for line in lines] == list(range(MOST))
    found = result.evaluations
    np.testing.assert_array_equal([line["point"] for line in lines], found.points)
    values = [float(line["value"]) for line in lines]
    np.testing.assert_array_equal(np.where(np.isfinite(values), values, np.nan), [
        x if np.isfinite(x) else np.nan for x in found.values
    ])  # fmt: skip
    assert [line.get("failure", "") for line in lines] == found.failures.tolist()
    read = Evaluations.from_journal(path)
    assert rows(read, used=False) == rows(found, used=False)
    np.testing.assert_array_equal(read.seconds, [line["seconds"] for line in lines])
    pandas = pytest.importorskip("pandas")
    assert pandas.read_json(path, lines=True)["number"].count() == MOST


@pytest.mark.parametrize("d", [150, 1200])
def test_long_points_are_shortened_and_continue(d, path):
    """Beyond 1,000 parameters a point has a checksum, and is known once asked for."""

    def fun(x):
        return float(np.sum((x - 1) ** 2))

    options = {"method": zo.methods.many(), "start": np.zeros(d), "journal": path}
    run(fun, **options, max_evaluations=30)
    found = run(fun, **options, max_evaluations=60)
    whole = run(fun, **options | {"journal": None}, max_evaluations=60)
    assert_same(found, whole)
    assert (found.evaluations.points is None) == (d > 1000)
    assert fun(found.best.params) == found.best.value
    assert max(map(len, path.read_bytes().splitlines()[1:])) < 12 * d + 400


# --- Damage -----------------------------------------------------------------------

DEEP = b"[" * 10**5 + b"]" * 10**5
ROW = b'{"number":0,"point":[1.0,2.0,3.0],"value":1.5,"seconds":1.0'
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


@pytest.mark.parametrize("read", READ)
@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_rows_that_no_run_writes_are_refused(row, read, written, path):
    """Although their checksums are right."""
    path.write_bytes(with_checksums([bodies(written)[0], row]))
    refused(read, path, "is damaged in line 2: it is not what a run writes")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"key":[0,0]', b'"key":[0]'),
        (b'"key":[0,0]', b'"key":[0,99999999999999999999]'),
        (b'"key":[0,0]', b'"key":"ab"'),
        (b'"key":[0,0]', b'"none":0'),
        (b'"dimension":3', b'"dimension":"3"'),
        (b'"dimension":3', b'"dimension":0'),
        (b'"start":', b'"none":'),
        (b'"upper":', b'"none":'),
    ],
    ids=str,
)
def test_first_lines_that_no_run_writes_are_refused(old, new, written, path):
    head, *others = bodies(written)
    assert old in head
    path.write_bytes(with_checksums([head.replace(old, new), *others]))
    refused(again, path, "is damaged in line 1: it is not what a run writes")


class Planted:
    """If a pickle of it is ever read, the reading process ends."""

    def __reduce__(self):
        return exit, ("a pickle was read",)


TEXTS = (
    b"the only copy",
    pickle.dumps(Planted()),
    b"theta = 3\nsteps = 9\n",
    b'{"number":0}\n',
    b"\0\n",
)


@pytest.mark.parametrize("read", READ)
@pytest.mark.parametrize(
    ("after_a_run", "content"),
    [*((False, text) for text in TEXTS), *((True, text) for text in TEXTS[:2])],
)
def test_what_is_no_journal_is_not_overwritten(
    after_a_run, content, read, written, path
):
    """A line without an end was cut off, whatever it was."""
    path.write_bytes((written if after_a_run else b"") + content)
    match = "is not what a run writes" if after_a_run else "must be a file that a run"
    refused(read, path, match)


def test_a_line_that_does_not_end_takes_bounded_memory(path):
    with path.open("wb") as file:
        file.truncate(2**36)  # The file is sparse, so it takes no space on the disk.
    tracemalloc.start()
    try:
        refused(again, path, "must be a file that a run wrote")
        assert tracemalloc.get_traced_memory()[1] < 1 << 30
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("every_nth", [37, slow(3)])
def test_a_changed_byte_never_gives_another_run(every_nth, written, path):
    path.write_bytes(written)
    whole = rows(Evaluations.from_journal(path), used=False)
    for i in range(0, len(written), every_nth):
        changed = bytearray(written)
        changed[i] ^= 1 << (i % 8)
        path.write_bytes(changed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                found = Evaluations.from_journal(path)
            except ValueError as error:
                assert "journal" in str(error)
                continue
        # The end of the last line is its last byte: without it, the line is cut.
        assert i == len(written) - 1 and set(rows(found, used=False)) < set(whole)


TORN = b'{"number":9,"point":[0.25'


@pytest.mark.parametrize("end", [TORN, TORN + bytes(512), bytes(4096)], ids=len)
def test_what_a_loss_of_power_left_is_cut(end, written, path):
    path.write_bytes(written + end)
    with pytest.warns(UserWarning, match="was not complete, and is cut. The eval") as w:
        found = again(path, max_evaluations=20)
    assert len(w) == 1
    assert_same(found, run(ripples, METHODS["custom"], max_evaluations=20))
    assert path.read_bytes().count(b"\n") == 21


# --- Two runs of a file, and files of another kind --------------------------------


def test_a_journal_that_another_run_writes_is_refused(path):
    """Also in the same process, until the run has ended."""

    def second(report):
        with pytest.raises(ValueError, match="must be written by one run at a time"):
            again(path)
        called.append(report)

    called = []
    result = again(path, callback=second)
    assert len(called) == len(result.values)
    assert_same(again(path, max_evaluations=30).evaluations and again(path), result)


# The first process starts the second while it writes, and waits for its end.
TWO = """
import subprocess, sys
from tests.helpers.host_runs import ripples, run

code, path, which = sys.argv[1:]

def start_second(report):
    if not started:
        started.append(True)
        command = [sys.executable, "-c", code, code, path, "second"]
        print(subprocess.run(command, capture_output=True, text=True).stdout)

started = [] if which == "first" else [True]
try:
    result = run(ripples, max_evaluations=9, journal=path, callback=start_second)
    print(which, "ended", result.params.tolist())
except Exception as error:
    print(which, "refused", type(error).__name__, error)
"""


@pytest.mark.slow
def test_a_journal_that_another_process_writes_is_refused(path):
    output = output_of(TWO, TWO, path, "first")
    said = ("first", "second")
    lines = [line for line in output.splitlines() if line.startswith(said)]
    assert "second refused" in lines[0] and str(path) in lines[0]
    params = run(ripples, max_evaluations=9).params.tolist()
    assert lines[-1] == f"first ended {params}"
    assert len(Evaluations.from_journal(path)) == 9


def test_a_call_that_writes_nothing_leaves_no_file(path):
    with TableFile(path).opened():
        assert path.exists()
    assert not path.exists()
    with pytest.raises(ValueError, match="journal must be a file with a run"):
        Evaluations.from_journal(path)


def test_files_of_other_kinds_name_theirs(written, path):
    short_runs.run(num_steps=1, journal=path)
    refused(again, path, "got the steps of an optimizer, which train writes")
    path.write_bytes(written)
    refused(lambda path: short_runs.run(journal=path), path, "got the run of a method")
    head, *others = bodies(written)
    for begin, got in (
        (b'{"table":2', "of the format 2"),
        (b'{"format":5,"points":null', "a journal of an earlier version"),
        (b'{"fun":"a"', "a journal of an earlier version"),
    ):
        changed = head.replace(b'{"table":1', begin)
        path.write_bytes(with_checksums([changed, *others]))
        for read in READ:
            refused(read, path, rf"must be a table .*of the format 1; got .*{got}")


# --- Another run ------------------------------------------------------------------

FAR = np.zeros(40)
OTHERS = [
    ({"start": START + 1}, {}, r"the start was 0\.0 there, and is 1\.0 now"),
    (
        {"start": FAR + (np.arange(40) == 33)},
        {"start": FAR},
        r"element 33 of the start was 0\.0 there, and is 1\.0 now",
    ),
    ({"start": np.ones(2)}, {}, r"params was float64\[3\] there, .* float64\[2\] now"),
    ({"start": START.astype("f4")}, {}, r"was float64\[3\] there, .* float32\[3\] now"),
    ({"key": 1}, {}, r"element 1 of the key was 0 there, and is 1 now"),
    ({"bounds": (-9, 9)}, {}, r"the lower bound was -inf there, and is -9\.0 now"),
    (
        {"bounds": (-9, [9.0, 8.0, 9.0])},
        {"bounds": (-9, 9)},
        r"element 1 of the upper bound was 9\.0 there, and is 8\.0 now",
    ),
    ({"step": 0.5}, {}, r"the step was 0\.0 there, and is 0\.5 now"),
]


@pytest.mark.parametrize("memory", ["journal", "evaluations"])
@pytest.mark.parametrize(("change", "first", "message"), OTHERS)
def test_another_run_is_refused_in_words_with_the_values(
    change, first, message, memory, path
):
    options = {"max_evaluations": MOST, "method": zo.methods.evolution()}
    found = run(bowl_of_all, **options, **{"journal": path} | first)
    before = path.read_bytes()
    given = {"journal": path} if memory == "journal" else {}
    if not given:
        given = {"evaluations": found.evaluations}
    with pytest.raises(ValueError, match=message) as caught:
        run(bowl_of_all, **options, **{**first, **change}, **given)
    text = str(caught.value)
    assert text.startswith(f"journal {path}" if "journal" in given else "evaluations")
    assert "\n" not in text and path.read_bytes() == before
    if memory == "evaluations":
        options = {**first, **change}
        with pytest.raises(ValueError, match=message):
            zo.ask_tell(options.pop("start", START), **options, **given)


def bowl_of_all(x):
    return float(np.sum((x - 0.5) ** 2))


def test_versions_and_methods_are_no_other_run(written, path):
    head, *others = bodies(written)
    head = re.sub(rb'"(optax|jaxlib|radazo_jax)":"', rb'"\1":"0.', head)
    head = re.sub(rb'"device":"[^"]*"', b'"device":"abacus"', head)
    path.write_bytes(with_checksums([head, *others]))
    whole = run(ripples, METHODS["custom"], max_evaluations=20)
    assert_same(again(path, max_evaluations=20), whole)
    bounded = path.with_name("bounds.jsonl")
    again(bounded, bounds=(-9.0, 9.0))
    bounds = np.full(3, -9.0), [9] * 3
    assert again(bounded, bounds=bounds, max_evaluations=12).num_evaluations == 12


# --- Another function -------------------------------------------------------------


@pytest.mark.parametrize("dtype", [float, np.float32])
def test_another_value_of_a_known_point_is_a_warning(dtype, path):
    """It shows both values, and the run continues; an equal one is none."""

    def fun(x, level=1.0):
        return dtype(level * ripples(x))

    first = run(fun, METHODS["custom"], journal=path, max_evaluations=9)
    run(fun, METHODS["custom"], journal=path, max_evaluations=10)
    with pytest.warns(UserWarning, match="at which fun now returns") as caught:
        result = run(
            lambda x: fun(x, 2.0), METHODS["custom"], journal=path, max_evaluations=12
        )
    (text,) = (str(warning.message) for warning in caught)
    assert result.num_evaluations == 12 and "\n" not in text
    before = float(re.search(r"the value ([\d.]+\d)", text)[1])
    now = float(re.search(r"returns ([\d.]+\d)", text)[1])
    assert now == pytest.approx(2 * before, rel=1e-6)
    assert np.isclose(first.evaluations.values, before, rtol=1e-6).any()


def test_a_worker_that_dies_at_a_known_point_ends_the_run(written, path):
    """The error has the result of the file."""

    class Dies(ThreadPoolExecutor):
        def submit(self, *args):
            raise BrokenExecutor("a worker died")

    path.write_bytes(written)
    with Dies(1) as threads, pytest.raises(zo.RunError, match="evaluated again") as e:
        again(path, max_evaluations=20, executor=threads)
    # A step has four points.
    whole = run(ripples, METHODS["custom"], max_evaluations=MOST // 4 * 4)
    assert len(e.value.result.evaluations) == MOST
    assert rows(e.value.result.evaluations) == rows(whole.evaluations)
    assert e.value.result.best.value == whole.best.value


class Simulator:
    """A function with what changes between calls, and changes no value."""

    def __init__(self):
        self.calls, self.known, self.lock = 0, {}, threading.Lock()

    def __call__(self, x):
        with self.lock:
            self.calls += 1
            return self.known.setdefault(x.tobytes(), bowl(x))


@pytest.mark.parametrize("same", [True, False])
def test_counters_caches_and_locks_do_not_prevent_continuing(same, path):
    fun = Simulator()
    run(fun, journal=path, max_evaluations=9)
    parts = run(fun if same else Simulator(), journal=path, max_evaluations=20)
    assert_same(parts, run(max_evaluations=20))
