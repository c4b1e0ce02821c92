"""Compiles the shim, and says how to start a process with it."""

import os
import pathlib
import subprocess

SHIM = pathlib.Path(__file__).with_name("shim.c")


def environment(folder: pathlib.Path) -> dict[str, str]:
    """The environment of a process that can be disturbed; the shim goes to a folder."""
    library = folder / "shim.so"
    command = ["cc", "-O1", "-shared", "-fPIC", "-o", library, SHIM, "-ldl"]
    subprocess.run(command, check=True)
    return os.environ | {
        "LD_PRELOAD": str(library),
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(folder / "cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
