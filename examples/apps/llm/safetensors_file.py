"""The safetensors file format, written one tensor after another.

    write(Path("model.safetensors"), of_arrays({"norm.weight": array}))

The writer of the library needs all tensors in memory at once, in the order of the file.
This one has one of them: a model is written without a second copy of it.
"""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

_NAMES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_ALIGNMENT = 8  # Of the first tensor, in bytes.


class Tensor(NamedTuple):
    """A tensor to write.

    Attributes:
      shape: Its shape.
      dtype: A floating-point data type.
      read: Returns its values, in any data type and memory layout.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    read: Callable[[], np.ndarray]


def of_arrays(arrays: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
    """Returns arrays, or views of arrays, as tensors to write."""

    def tensor(array: np.ndarray) -> Tensor:
        return Tensor(array.shape, array.dtype, lambda: array)

    return {name: tensor(array) for name, array in arrays.items()}


def write(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Writes tensors, each of which is read when its place in the file is reached.

    Args:
      path: The file. It has this name once it is complete.
      tensors: The tensors by name.
    """
    # As the library orders them: wide data types first, so that all are aligned.
    ordered = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in ordered:
        shape, dtype, _ = tensors[name]
        start, end = end, end + int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        header[name] = {
            "dtype": _NAMES[dtype.name],
            "shape": shape,
            "data_offsets": [start, end],
        }
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    partial = path.with_name(f"{path.name}.partial")
    with partial.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in ordered:
            file.write(_content(tensors[name]))
    os.replace(partial, path)


def _content(tensor: Tensor) -> memoryview:
    """The bytes of a tensor in a file."""
    values = np.ascontiguousarray(tensor.read(), tensor.dtype)
    return values.reshape(-1).view(np.uint8).data
