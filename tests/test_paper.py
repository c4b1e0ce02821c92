"""The paper's experiments run, and say in one line what is wrong."""

import gzip
import json
import os
import pathlib
import re
import struct
import subprocess
import sys

import numpy as np
import pytest

from examples.paper import attack, digits, moments, network, synthetic, tuned

_ROOT = pathlib.Path(__file__).parents[1]
_SCRIPTS = (synthetic, digits, moments, attack, tuned)


def _run(script, *arguments):
    path = os.pathsep.join([str(_ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {
        "PYTHONPATH": path.rstrip(os.pathsep),
        # Small runs are nearly all compilation: the compiler need not try hard.
        "XLA_FLAGS": "--xla_backend_optimization_level=0",
    }
    command = [
        sys.executable,
        "-W",
        "error",
        f"{_ROOT}/examples/paper/{script}.py",
        *arguments,
    ]
    return subprocess.run(
        [str(part) for part in command],
        env=os.environ | environment,
        capture_output=True,
        encoding="utf-8",
    )


@pytest.mark.parametrize(
    "name",
    [
        "synthetic",
        pytest.param("digits", marks=pytest.mark.slow),
        pytest.param("moments", marks=pytest.mark.slow),
        pytest.param("attack", marks=pytest.mark.slow),
        pytest.param("tuned", marks=pytest.mark.slow),
    ],
)
def test_fast_run(name, tmp_path):
    """One test a script, not one a property: each takes a run."""
    output = tmp_path / "made"
    some = ("--functions", "Cubic") if name == "synthetic" else ()
    done = _run(name, "--fast", "--output", output, *some)
    assert done.returncode == 0, done.stderr

    assert f"Wrote {output / name}.json and {output / name}.png" in done.stdout
    assert re.search(r"^-+(  -+)+$", done.stdout, re.MULTILINE)  # A table.
    assert "100%" in done.stderr  # A progress bar.

    content = json.loads((output / f"{name}.json").read_text(encoding="utf-8"))
    assert f"{name}.py --fast --output {output}" in content["command"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", content["date"])
    assert {"python", "jax", "optax", "radazo_jax"} <= set(content["versions"])
    assert content["settings"]["seeds"] == 2

    image = (output / f"{name}.png").read_bytes()
    assert image.startswith(b"\x89PNG\r\n\x1a\n")
    assert int.from_bytes(image[16:20], "big") >= 200

    if name == "digits":
        runs, evaluations = content["runs"], content["evaluations"]
        assert evaluations == [0, 60 * 11, 120 * 11]  # K + 1 with K = 10.
        assert len(runs) == 5
        # Guessing costs log(10) = 2.3, and the start is about as good as guessing.
        for run in runs.values():
            assert all(0 < losses[-1] < 2.6 for losses in run["losses"])
        assert all(losses[-1] < 1.5 for losses in runs["R-AdaZO"]["losses"])
        assert min(runs["R-AdaZO"]["accuracies"]) > 0.5
        assert "chosen for R-AdaZO" in done.stdout
    if name == "synthetic":
        for gaps in content["gaps"].values():
            starts = {tuple(curve[0] for curve in seeds) for seeds in gaps.values()}
            assert len(starts) == 1  # All methods start alike.
            for method in ("R-AdaZO", "ZO-AdaMM", "ZO-RMSProp"):
                assert all(curve[-1] < curve[0] for curve in gaps[method])


@pytest.mark.parametrize("script", _SCRIPTS, ids=lambda script: script.__name__)
@pytest.mark.parametrize("value", ["0", "-3", "two"])
def test_counts_below_one_are_refused(script, value, refused):
    """In this process: it is argparse that refuses, before anything is compiled."""
    refused(
        script,
        "--seeds",
        value,
        says=f"argument --seeds: must be an integer of at least 1; got {value}",
    )
    refused(
        script,
        "--steps",
        value,
        says=f"argument --steps: must be an integer of at least 1; got {value}",
    )


@pytest.fixture
def refused(capsys):
    """Runs the `main` of a script here and checks the one line that it ends with."""

    def refused(script, *arguments, says):
        with pytest.raises(SystemExit) as stopped:
            script.main([str(argument) for argument in arguments])
        assert stopped.value.code == 2
        error = capsys.readouterr().err.strip().splitlines()
        assert len(error) == 1, error
        assert says in error[0]

    return refused


def _idx(array):
    array = np.asarray(array, np.uint8)
    head = struct.pack(">BBBB", 0, 0, 8, array.ndim)
    return head + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def _mnist(folder, images=12):
    """Four IDX files of noise: enough to be read."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    for part in ("train", "t10k"):
        pixels = rng.integers(0, 256, (images, 28, 28))
        (folder / f"{part}-images-idx3-ubyte").write_bytes(_idx(pixels))
        (folder / f"{part}-labels-idx1-ubyte").write_bytes(_idx(np.arange(images) % 10))
    return folder


def test_idx_files_are_read_gzipped_or_not(tmp_path):
    plain = network.load(_mnist(tmp_path / "plain" / "MNIST" / "raw"))
    folder = _mnist(tmp_path / "zipped")
    for path in sorted(folder.iterdir()):
        path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
    zipped = network.load(folder)
    assert plain.train_images.shape == (12, 28, 28, 1)
    assert plain.train_images.dtype == np.float32 and plain.test_images.max() <= 1
    np.testing.assert_array_equal(plain.test_labels, np.arange(12) % 10)
    for name in plain._fields[1:]:
        np.testing.assert_array_equal(getattr(plain, name), getattr(zipped, name))


def test_missing_folder_is_named(tmp_path, refused):
    missing = tmp_path / "nowhere"
    refused(
        attack,
        "--data",
        missing,
        says=f"--data must be a folder with IDX files; got {missing}",
    )


def test_missing_file_is_named(tmp_path, refused):
    folder = _mnist(tmp_path / "data")
    (folder / "t10k-labels-idx1-ubyte").unlink()
    refused(
        attack,
        "--data",
        folder,
        says=f"no t10k-labels-idx1-ubyte or t10k-labels-idx1-ubyte.gz under {folder}",
    )


_CORRUPT = {
    "cut off": (lambda b: b[:-100], "is corrupt: 9,308 bytes"),
    "too long": (lambda b: b + b"\0", "is corrupt: 9,409 bytes"),
    "cut off in its head": (lambda b: b[:9], "is not an IDX file of rank 3"),
    "of another type": (
        lambda b: b"\0\0\x0d\3" + b[4:],
        "is not an IDX file of rank 3",
    ),
    "empty": (lambda b: b"", "is not an IDX file of rank 3"),
    "of other images": (
        lambda b: _idx(np.zeros((12, 8, 8))),
        "holds images of 8×8 pixels, not 28×28",
    ),
    "of fewer images": (lambda b: _idx(np.zeros((11, 28, 28))), "holds 11 images and"),
}


@pytest.mark.parametrize("how", _CORRUPT)
def test_corrupt_file_is_named(how, tmp_path, refused):
    change, says = _CORRUPT[how]
    path = _mnist(tmp_path / "data") / "train-images-idx3-ubyte"
    path.write_bytes(change(path.read_bytes()))
    refused(attack, "--data", path.parent, says=f"{path} {says}")


@pytest.mark.parametrize(
    "content",
    [b"no gzip at all", gzip.compress(b"x" * 99, mtime=0)[:-9]],
    ids=["no gzip", "cut off"],
)
def test_corrupt_gzip_file_is_named(content, tmp_path, refused):
    folder = _mnist(tmp_path / "data")
    path = folder / "train-images-idx3-ubyte"
    path.unlink()
    path.with_name(f"{path.name}.gz").write_bytes(content)
    refused(attack, "--data", folder, says=f"{path}.gz cannot be read")


def test_label_above_nine_is_named(tmp_path, refused):
    folder = _mnist(tmp_path / "data")
    path = folder / "t10k-labels-idx1-ubyte"
    path.write_bytes(_idx([3] * 11 + [10]))
    refused(attack, "--data", folder, says=f"{path} holds the label 10, above 9")


@pytest.fixture
def read_digits(monkeypatch):
    """The digits, and what a network says they are: right but for test image 0."""
    data = network.digits()
    said = data.test_labels.copy()
    said[0] = (said[0] + 1) % 10
    monkeypatch.setattr(network, "train", lambda *arguments: None)
    monkeypatch.setattr(network, "predict", lambda *arguments: said)
    return data.test_labels


def test_misclassified_image_is_refused(read_digits, refused):
    label = read_digits[0]
    refused(
        attack,
        "--image",
        0,
        says="argument --image: the network already takes image "
        f"0, a {label}, for a {(label + 1) % 10}: choose another",
    )


def test_target_equal_to_the_label_is_refused(read_digits, refused):
    label = int(read_digits[1])
    refused(
        attack,
        "--image",
        1,
        "--target",
        label,
        says=f"argument --target: {label} is "
        "already the label of image 1: choose another digit",
    )


@pytest.mark.parametrize("index", [-1, 360])
def test_image_that_is_not_there_is_refused(index, read_digits, refused):
    refused(
        attack,
        "--image",
        index,
        says=f"argument --image: must be from 0 to 359; got {index}",
    )


def test_more_images_than_there_are_is_refused(read_digits, refused):
    refused(
        attack,
        "--images",
        360,
        says="argument --images: only 359 test images can be attacked; got 360",
    )


def test_target_that_is_no_digit_is_refused(refused):
    refused(attack, "--target", 10, says="argument --target: invalid choice")


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    folder = tmp_path_factory.mktemp("digits")
    done = _run("digits", "--output", folder)
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "digits.json").read_text(encoding="utf-8"))["runs"]


@pytest.mark.slow
def test_radazo_learns_the_digits(full):
    assert np.mean(full["R-AdaZO"]["accuracies"]) >= 0.96
    ends = {name: np.mean(run["losses"], axis=0)[-1] for name, run in full.items()}
    assert min(ends, key=ends.get) == "R-AdaZO"


@pytest.mark.slow
def test_directions_of_rank_one_learn_as_well(full, tmp_path):
    done = _run("digits", "--law", "low_rank", "--output", tmp_path)
    assert done.returncode == 0, done.stderr
    runs = json.loads((tmp_path / "digits.json").read_text(encoding="utf-8"))["runs"]
    ours, theirs = (np.mean(r["R-AdaZO"]["accuracies"]) for r in (runs, full))
    assert abs(ours - theirs) < 0.01
