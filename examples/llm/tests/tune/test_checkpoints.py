"""Checkpoints that were changed."""

import pathlib

import numpy as np
import pytest

from radazo_llm.tune import checkpoint
from research.readers import targets

from ..refusals import refused


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The files of a checkpoint of step 7."""
    folder = tmp_path_factory.mktemp("checkpoints")
    targets.write_checkpoint(folder)
    return folder


def changed(path, before, after):
    content = path.read_bytes()
    assert content.count(before) == 1
    path.write_bytes(content.replace(before, after))


def test_a_state_comes_back_with_its_notes(written):
    state, notes = targets.read_checkpoint(written)
    assert targets.equal(state, targets.placed())
    assert notes == [{"step": 1, "loss": 0.25}]


def test_notes_that_were_changed_are_found(tmp_path):
    targets.write_checkpoint(tmp_path)
    changed(tmp_path / "7" / "about" / "metadata", b"0.25", b"0.75")
    match = "7 is damaged; move it away .*the settings have another checksum"
    refused(targets.read_checkpoint, tmp_path, match=match)


def test_flipped_bits_of_arrays_are_found(tmp_path, capfd):
    """And nothing but the error is said. Orbax does not need all of its files."""
    targets.write_checkpoint(tmp_path)
    right, found = targets.read_checkpoint(tmp_path), []
    paths = [p for p in (tmp_path / "7" / "state").rglob("*") if p.stat().st_size]
    for path in filter(pathlib.Path.is_file, paths):
        content = path.read_bytes()
        flipped = bytearray(content)
        flipped[len(content) // 2] ^= 1
        path.write_bytes(flipped)
        try:
            found.append(targets.equal(targets.read_checkpoint(tmp_path), right))
        except ValueError as error:
            assert "7 is damaged; move it away" in str(error)
            assert "\n" not in str(error)
            found.append("refused")
        path.write_bytes(content)
    assert set(found) == {True, "refused"}
    assert capfd.readouterr().err == ""


def test_another_run_is_refused(written):
    for settings, match in (
        (targets.SETTINGS | {"seed": 1}, "seed must be 0, as in the checkpoint"),
        (targets.SETTINGS | {"more": 1}, "more must be None, as in the checkpoint"),
    ):
        with checkpoint.opened(written, create=False) as source:
            refused(checkpoint.restore, source, {}, settings, match=match)
            found = checkpoint.restore(source, {}, settings, free=("seed", "more"))
            assert found == ({}, [{"step": 1, "loss": 0.25}])


def test_arrays_of_another_shape_are_refused(written):
    state = targets.placed() | {"w": np.zeros((4, 51), np.float32)}
    with checkpoint.opened(written, create=False) as source:
        match = r"w has the shape \(4, 50\)"
        refused(checkpoint.restore, source, state, targets.SETTINGS, match=match)


def test_a_folder_takes_one_run(tmp_path):
    match = "run is in use by another run"
    with checkpoint.locked(tmp_path / "run"), pytest.raises(ValueError, match=match):
        checkpoint.locked(tmp_path / "run").__enter__()
    with checkpoint.locked(tmp_path / "run"):
        pass
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="file must be a folder"):
        checkpoint.locked(tmp_path / "file").__enter__()
