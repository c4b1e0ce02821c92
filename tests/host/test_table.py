"""Files of runs of methods: what they hold, and other runs; damage is in `runs`."""

import json
import re

import numpy as np
import pytest

import radazo_jax as zo
from radazo_jax.runs import Evaluations
from tests.helpers.host_runs import (
    METHODS,
    START,
    assert_same,
    quiet,
    ripples,
    rows,
    run,
)
from tests.helpers.journals import lines_of, with_checksums

MOST = 9


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.jsonl"


def again(path, **options):
    options = {"max_evaluations": MOST, **options}
    return run(ripples, METHODS["custom"], journal=path, **options)


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


def test_versions_and_methods_are_no_other_run(path):
    again(path)
    head, *others = lines_of(path.read_bytes())
    head = re.sub(rb'"(optax|jaxlib|radazo_jax)":"', rb'"\1":"0.', head)
    head = re.sub(rb'"device":"[^"]*"', b'"device":"abacus"', head)
    path.write_bytes(with_checksums([head, *others]))
    whole = run(ripples, METHODS["custom"], max_evaluations=20)
    assert_same(again(path, max_evaluations=20), whole)
