"""Targets of the GPU compiler that it does not have."""

import importlib.metadata

import click
import jax
import pytest

from benchmarks import gpus


def test_a_target_that_is_no_gpu_is_named():
    with pytest.raises(
        click.ClickException, match=r"must be a GPU, one of .*; got 'v5e'\.$"
    ):
        gpus.devices("v5e")


@pytest.mark.parametrize("found", ["0.9.2", None])
def test_a_plugin_of_another_version_is_named(monkeypatch, found):
    def version(name):
        if found is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return found

    monkeypatch.setattr(importlib.metadata, "version", version)
    expected = rf"must be of JAX's version, {jax.__version__}; got {found or 'none'}\."
    with pytest.raises(click.ClickException, match=expected) as error:
        gpus.devices("h100")
    assert "\n" not in str(error.value)
