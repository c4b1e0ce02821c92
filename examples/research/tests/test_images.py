"""Files of images that somebody else has written are read right, or refused."""

import zipfile

import click
import numpy as np
import pytest

from paper import network


def refused(path, match):
    with pytest.raises(click.ClickException, match=match) as error:
        network.load(path)
    assert "\n" not in error.value.message
    assert len(error.value.message) < 1000


def test_arrays_of_objects_are_refused(tmp_path):
    arrays = {f"{a}_{b}": np.array([None]) for a in "xy" for b in ("train", "test")}
    np.savez(tmp_path / "mnist.npz", **arrays)
    refused(tmp_path / "mnist.npz", "allow_pickle=False")


def test_images_that_are_larger_than_memory_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(network, "_LARGEST", 4000)
    path = tmp_path / "mnist.npz"
    for count, length, match in (
        (10**15, 100, "Unable to allocate"),
        (10**7, 100, "cannot reshape|EOF"),
        (0, 1001, "it holds more than 4000 bytes"),
    ):
        array = {"descr": "|u1", "fortran_order": False, "shape": (count, 28, 28)}
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
            for name in ("x_train", "y_train", "x_test", "y_test"):
                with file.open(f"{name}.npy", "w") as stream:
                    np.lib.format.write_array_header_1_0(stream, array)
                    stream.write(bytes(length))
        refused(path, f"--data must be mnist.npz.*({match})")


def test_labels_that_are_none_are_refused(tmp_path):
    path, images = tmp_path / "mnist.npz", np.zeros((2, 28, 28), np.uint8)
    for labels in ([0, 10], [0, -1], [0], [[0, 1]], [0.5, 1]):
        np.savez(path, x_train=images, y_train=labels, x_test=images, y_test=[0, 1])
        refused(path, "a label from 0 to 9 for each image")
