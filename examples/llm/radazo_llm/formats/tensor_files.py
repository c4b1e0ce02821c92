"""Writes a configuration and files of safetensors, as transformers and peft do.

A large model is written in several files, and only the tensors of one are in memory.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors.numpy import save_file

# A model is saved in files of at most so many bytes, or of one larger tensor. Saving
# takes the memory of a file.
_MAX_SHARD = 2**27


class Tensor(NamedTuple):
    """A tensor to write: its size, and a function that returns it."""

    num_bytes: int
    read: Callable[[], np.ndarray]


def write_model(
    folder: Path,
    config_file: str,
    config: dict[str, Any],
    tensors: Mapping[str, Tensor],
) -> None:
    """Writes a checkpoint, and removes the tensors of one that is there."""
    for path in folder.glob("model*.safetensors*"):
        path.unlink()
    _write_config(folder / config_file, config)
    shards = _shards(tensors)
    files = ["model.safetensors"]
    if len(shards) > 1:
        numbers = range(1, len(shards) + 1)
        files = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in numbers]
        index = {
            "metadata": {"total_size": sum(x.num_bytes for x in tensors.values())},
            "weight_map": {
                name: file
                for file, names in zip(files, shards, strict=True)
                for name in names
            },
        }
        _write_config(folder / "model.safetensors.index.json", index)
    for file, names in zip(files, shards, strict=True):
        # A name for the arrays would keep them until the next file's are read.
        _write_tensors(
            folder / file,
            {name: tensors[name].read() for name in names},
            folder / config_file,
        )


def _shards(tensors: Mapping[str, Tensor]) -> list[list[str]]:
    """The names of the tensors of each file."""
    shards: list[list[str]] = [[]]
    size = 0
    for name, tensor in tensors.items():
        if shards[-1] and size + tensor.num_bytes > _MAX_SHARD:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += tensor.num_bytes
    return shards


def write(
    folder: Path,
    config_file: str,
    config: dict[str, Any],
    tensors_file: str,
    tensors: Mapping[str, np.ndarray],
) -> None:
    """Writes a configuration, and tensors to one file."""
    _write_config(folder / config_file, config)
    _write_tensors(folder / tensors_file, tensors, folder / config_file)


def _write_config(path: Path, config: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _write_tensors(path: Path, tensors: Mapping[str, np.ndarray], config: Path) -> None:
    tensors = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
    save_file(tensors, path, metadata={"format": "pt"})
    shutil.copymode(config, path)  # The library's own lets nobody else read the file.
