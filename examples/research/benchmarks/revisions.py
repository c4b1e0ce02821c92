"""The library at another revision, from git."""

import io
import subprocess
import tarfile

import click

from common import ROOT


def extract(revision: str, folder: str) -> None:
    """Writes the package `radazo_jax` at a revision into a folder."""
    done = subprocess.run(
        ["git", "archive", revision, "radazo_jax"], capture_output=True, cwd=ROOT
    )
    if done.returncode:
        raise click.ClickException(
            f"revision must be one of git; got {revision}: {done.stderr.decode()}"
        )
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as files:
        files.extractall(folder, filter="data")
