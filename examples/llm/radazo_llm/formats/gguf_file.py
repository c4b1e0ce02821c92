"""The GGUF file format: metadata and tensors, read in bounded memory.

    file = read(Path("model.gguf"))
    file.metadata["general.architecture"], file.tensors["token_embd.weight"].shape

Only the header is parsed. Data of tensors is mapped, and read when it is used. Every
size is compared with the length of the file before memory is allocated for it.

`gguf.GGUFReader` does not compare them: a file of 44 bytes whose array has 2⁴⁰ elements
takes memory until none is left, and a text that the file cuts is accepted. It reads
lists element by element. For SmolLM2 it takes 5 s and 167 MiB; this reader takes 0.5 s
and 11 MiB.
"""

import math
import mmap
import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

_MOST = 1 << 20  # Tensors, or entries of the metadata.
_MOST_ELEMENTS = 1 << 23  # Elements of an array of the metadata.
_MOST_BYTES = 1 << 24  # Bytes of a text.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?"}
_SCALARS |= {10: "Q", 11: "q", 12: "d"}
_TEXT, _ARRAY = 8, 9
_LENGTH = struct.Struct("<Q")  # Of a text.


class Tensor(NamedTuple):
    """A tensor of a file.

    Attributes:
      kind: Name of the data type, such as `"Q4_1"`.
      shape: Rows first, as in NumPy.
      data: Its bytes, uint8 [rows, bytes of a row], mapped.
    """

    kind: str
    shape: tuple[int, ...]
    data: np.ndarray


class File(NamedTuple):
    """The contents of a GGUF file."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, Tensor]


def is_gguf(path: Path) -> bool:
    """Returns whether a path has the suffix of GGUF files."""
    return path.suffix.lower() == ".gguf"


def read(path: Path) -> File:
    """Reads the header of a file.

    Args:
      path: A whole GGUF file of version 2 or 3. Files split into parts are refused.

    Raises:
      ValueError: If the file is truncated, or a size or a data type is not possible.
    """
    try:
        return _read(path)
    except (ValueError, struct.error) as error:
        raise ValueError(f"{path} must be a complete GGUF file: {error}.") from None


def values(kind: str, data: np.ndarray) -> np.ndarray:
    """Returns the numbers in rows of bytes, float32 or as stored.

    Args:
      kind: The `kind` of a tensor.
      data: Some of its rows, uint8 [rows, bytes of a row].
    """
    import gguf  # Here, since few runs need it.

    return gguf.dequantize(data, gguf.GGMLQuantizationType[kind])


def let_go(data: np.ndarray) -> None:
    """Lets the system have the memory of a mapped file's pages that were read."""
    base: Any = data
    while isinstance(base, np.ndarray):
        base = base.base
    if isinstance(base, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
        base.madvise(mmap.MADV_DONTNEED)


# --- The header -------------------------------------------------------------------


class _Cursor:
    """A position in a file, which does not pass its end."""

    def __init__(self, data: np.ndarray) -> None:
        self.data, self.at = memoryview(data), 0

    def take(self, size: int, what: str) -> memoryview:
        if size > len(self.data) - self.at:
            raise ValueError(f"it ends within {what}")
        self.at += size
        return self.data[self.at - size : self.at]

    def number(self, code: str, what: str) -> Any:
        raw = self.take(struct.calcsize(f"<{code}"), what)
        return struct.unpack(f"<{code}", raw)[0]

    def count(self, most: int, what: str, code: str = "Q") -> int:
        number = self.number(code, what)
        if number > most:
            raise ValueError(f"{what} must be at most {most}; got {number}")
        return number

    def text(self, what: str) -> str:
        return self.texts(1, what)[0]

    def texts(self, count: int, what: str) -> list[str]:
        data, at, end = self.data, self.at, len(self.data)
        found = []
        for _ in range(count):  # Half a million of them, so nothing is called twice.
            if at + _LENGTH.size > end:
                raise ValueError(f"it ends within {what}")
            (size,) = _LENGTH.unpack_from(data, at)
            at += _LENGTH.size
            if size > _MOST_BYTES:
                raise ValueError(
                    f"the length of {what} must be at most {_MOST_BYTES}; got {size}"
                )
            if size > end - at:
                raise ValueError(f"it ends within {what}")
            # A UnicodeDecodeError is a ValueError.
            found.append(str(data[at : at + size], "utf-8"))
            at += size
        self.at = at
        return found

    def value(self, what: str) -> Any:
        kind = self.number("I", what)
        if kind != _ARRAY:
            return self.element(kind, what)
        kind = self.number("I", what)
        count = self.count(_MOST_ELEMENTS, f"the length of {what}")
        if kind in _SCALARS:
            dtype = np.dtype(f"<{_SCALARS[kind]}")
            return np.frombuffer(self.take(count * dtype.itemsize, what), dtype)
        if kind == _TEXT:
            return self.texts(count, what)
        return [self.element(kind, what) for _ in range(count)]

    def element(self, kind: int, what: str) -> Any:
        if kind == _TEXT:
            return self.text(what)
        if kind not in _SCALARS:
            raise ValueError(f"{what} has the unknown type {kind}")
        return self.number(_SCALARS[kind], what)


def _read(path: Path) -> File:
    if not path.stat().st_size:
        raise ValueError("it is empty")
    data = np.memmap(path, np.uint8, mode="r")
    cursor = _Cursor(data)
    if bytes(cursor.take(4, "the header")) != b"GGUF":
        raise ValueError("it does not begin with GGUF")
    version = cursor.number("I", "the header")
    if version not in (2, 3):
        raise ValueError(f"its version must be 2 or 3; got {version}")
    number = cursor.count(_MOST, "the number of tensors")
    metadata: dict[str, Any] = {}
    for _ in range(cursor.count(_MOST, "the number of entries")):
        name = cursor.text("the metadata")
        metadata[name] = cursor.value(f"{name:.80}")
    if metadata.get("split.count", 1) > 1:
        raise ValueError("it is one part of several; join them with llama-gguf-split")
    found = [_tensor_info(cursor) for _ in range(number)]
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 0 < alignment <= 1 << 20:
        raise ValueError(f"general.alignment must be positive; got {alignment!r:.80}")
    start = -(-cursor.at // alignment) * alignment
    tensors = {
        name: _tensor(data, name, kind, shape, start + offset)
        for name, kind, shape, offset in found
    }
    if len(tensors) != number:
        raise ValueError("two of its tensors have the same name")
    return File(path, metadata, tensors)


def _tensor_info(cursor: _Cursor) -> tuple[str, int, tuple[int, ...], int]:
    what = "the list of tensors"
    name = cursor.text(what)
    dimensions = cursor.count(4, f"the number of dimensions of {name:.80}", "I")
    shape = tuple(cursor.number("Q", what) for _ in range(dimensions))
    return name, cursor.number("I", what), shape[::-1], cursor.number("Q", what)


def _tensor(
    data: np.ndarray, name: str, number: int, shape: tuple[int, ...], start: int
) -> Tensor:
    import gguf

    try:
        kind = gguf.GGMLQuantizationType(number)
    except ValueError:
        raise ValueError(f"{name:.80} has the unknown quantization {number}") from None
    block, size = gguf.GGML_QUANT_SIZES[kind]
    if not shape or shape[-1] % block:
        raise ValueError(f"{name:.80} must have rows of {block} values; got {shape}")
    row, rows = shape[-1] // block * size, math.prod(shape[:-1])
    if start + row * rows > len(data):
        raise ValueError(f"{name:.80} of shape {shape} does not end within the file")
    return Tensor(kind.name, shape, data[start : start + row * rows].reshape(rows, row))
