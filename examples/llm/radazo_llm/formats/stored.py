"""Tensors in files, which are checked and read in parts into their places."""

import contextlib
import functools
import math
import operator
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

from radazo_llm.formats import gguf_file, gguf_model, names
from radazo_llm.formats.files import json_object, model_file
from radazo_llm.formats.gguf_model import Stored

_FLOATS = ("F16", "BF16", "F32", "F64")  # As safetensors names them.
_PART = 1 << 22  # Bytes of a tensor that are read at once.
_FILES, _INDEX = "model*.safetensors", "model.safetensors.index.json"
Tensors = dict[str, Stored]  # By name.


def of_model(folder: Path, files: contextlib.ExitStack) -> Tensors:
    """Returns the tensors of a folder or a GGUF file, by their names in safetensors."""
    if gguf_file.is_gguf(folder):
        return gguf_model.tensors(gguf_model.read(folder))
    index = model_file(folder, _INDEX)
    if index.is_file() and any(folder.glob(_FILES)):
        shards = json_object(index).get("weight_map")
        known = set(shards.values()) if isinstance(shards, dict) else set()
        missing = [
            x for x in known if not (isinstance(x, str) and (folder / x).exists())
        ]
        if missing:
            raise ValueError(
                f"{folder} must have all files that {_INDEX} names; got no "
                f"{min(map(str, missing)):.80}. Copy it."
            )
    return opened(folder, _FILES, files)


def opened(folder: Path, pattern: str, files: contextlib.ExitStack) -> Tensors:
    """Returns the tensors of a folder, by name with the prefix `model.`.

    The files themselves say what they hold.
    """
    stored: Tensors = {}
    for path in sorted(folder.glob(pattern)):
        model_file(folder, path.name)
        try:
            file = files.enter_context(safe_open(path, framework="numpy"))
        except SafetensorError as error:
            raise ValueError(
                f"{path} must be a complete safetensors file: {error}."
            ) from None
        for original in file.keys():  # noqa: SIM118  (It is no mapping.)
            name = names.of_text(original)
            if name is None:
                continue
            found = file.get_slice(original)
            stored[name] = Stored(
                found.get_dtype(),
                tuple(found.get_shape()),
                functools.partial(operator.getitem, found),
            )
    if not stored:
        raise FileNotFoundError(
            f"{folder} must have {pattern.replace('*', '')}, or shards of it; got "
            "neither. "
            "transformers makes one of a PyTorch checkpoint by from_pretrained and "
            "save_pretrained."
        )
    return stored


def shadow(shape: tuple[int, ...]) -> np.ndarray:
    """An array that takes no memory."""
    return np.broadcast_to(np.empty((), np.bool_), shape)


def check(views: dict[str, np.ndarray], stored: Tensors, folder: Path) -> None:
    """Raises if tensors are missing or do not fit their places."""
    for name, view in views.items():
        if name not in stored:
            raise ValueError(f"{folder} lacks the tensor {name}.")
        kind, got, *_ = stored[name]
        if got != view.shape or kind not in _FLOATS:
            raise ValueError(
                f"{folder}: tensor {name} must be of shape {view.shape} and floating "
                f"point ({', '.join(_FLOATS)}); got {got} and {kind}."
            )


def fill(views: dict[str, np.ndarray], stored: Tensors, folder: Path) -> None:
    """Reads tensors into their places, and removes them."""
    for name, view in views.items():
        found = stored.pop(name)
        for part in parts(len(view), 4 * math.prod(view.shape[1:])):
            view[part] = found.read(part)
            if not np.isfinite(view[part].astype(np.float32, copy=False)).all():
                raise ValueError(
                    f"{folder}: tensor {name} must be finite; got NaN or infinities. "
                    "Get the file again, or another dtype (--dtype)."
                )


def parts(length: int, num_bytes: int) -> Iterator[slice]:
    """Slices of an axis, of some MiB if an element has so many bytes."""
    step = max(1, _PART // max(num_bytes, 1))
    for start in range(0, length, step):
        yield slice(start, min(start + step, length))


def check_empty(stored: Tensors, folder: Path) -> None:
    """Raises if tensors are left."""
    if stored:
        raise ValueError(f"{folder} has the unexpected tensor {min(stored)!r:.200}.")
