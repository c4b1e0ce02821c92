"""The plugin that the GPU compiler needs."""

import importlib.metadata

import click
import jax
import pytest

from benchmarks import gpus


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
