"""Checkpoints that were changed, or lie elsewhere."""

import os
import shutil

import pytest

from research.readers import targets

from ..refusals import refused


@pytest.mark.slow
@pytest.mark.parametrize("relative", [True, False])
def test_parts_of_a_checkpoint_lie_in_it(relative, tmp_path):
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    targets.write_checkpoint(folder)
    targets.read_checkpoint(folder)
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert len(files) > 5
    for i, path in enumerate(files):
        outside = tmp_path / str(i)
        shutil.move(path, outside)
        to = os.path.relpath(outside, path.parent) if relative else outside
        path.symlink_to(to)
        refused(targets.read_checkpoint, folder, match="must not be a link to another")
        path.unlink()
        shutil.move(outside, path)
    targets.read_checkpoint(folder)


@pytest.mark.slow
def test_notes_that_were_changed_are_found(tmp_path):
    targets.write_checkpoint(tmp_path)
    path = tmp_path / "7" / "about" / "metadata"
    content = path.read_text("utf-8")
    assert content.count("0.25") == 1
    path.write_text(content.replace("0.25", "0.75"), "utf-8")
    match = "the checksum of its settings is another one"
    refused(targets.read_checkpoint, tmp_path, match=match)
