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
import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

# Values of one inner dimension that share a scale, and their size in bytes.
BLOCK_SIZE = 32
_MOST = 1 << 20  # Tensors, or entries of the metadata.
_MOST_ELEMENTS = 1 << 23  # Elements of an array of the metadata.
_MOST_BYTES = 1 << 24  # Bytes of a text.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?"}
_SCALARS |= {10: "Q", 11: "q", 12: "d"}
_TEXT, _ARRAY = 8, 9


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


class Blocks(NamedTuple):
    """Rows in blocks of 32: value = scale · step + minimum.

    Attributes:
      steps: int8 [rows, inputs]: within ±8 of Q4_0, 0 to 15 of Q4_1, ±128 of Q8_0.
      scale: float16 [rows, inputs / 32].
      minimum: As `scale`, or None if it is zero.
    """

    steps: np.ndarray
    scale: np.ndarray
    minimum: np.ndarray | None


BLOCK_KINDS = ("Q4_0", "Q4_1", "Q8_0")


def blocks(kind: str, data: np.ndarray) -> Blocks:
    """Returns the integers and scales in rows of bytes, of one of `BLOCK_KINDS`."""
    rows = len(data)
    head = 4 if kind == "Q4_1" else 2
    size = head + (BLOCK_SIZE if kind == "Q8_0" else BLOCK_SIZE // 2)
    parts = data.reshape(rows, -1, size)
    floats = np.ascontiguousarray(parts[..., :head]).view("<f2")
    scale = floats[..., 0]
    if kind == "Q8_0":
        steps = np.ascontiguousarray(parts[..., head:]).view(np.int8)
    else:
        packed = parts[..., head:]
        # The low halves of the bytes are the first 16 values, the high halves follow.
        steps = np.concatenate([packed & 15, packed >> 4], axis=-1).astype(np.int8)
        steps = steps - np.int8(8 if kind == "Q4_0" else 0)
    minimum = floats[..., 1] if kind == "Q4_1" else None
    return Blocks(steps.reshape(rows, -1), scale, minimum)


# --- The header -------------------------------------------------------------------


class _Cursor:
    """A position in a file, which does not pass its end."""

    def __init__(self, data: np.ndarray) -> None:
        self.data, self.at = data, 0

    def take(self, size: int, what: str) -> memoryview:
        if size > len(self.data) - self.at:
            raise ValueError(f"it ends within {what}")
        self.at += size
        return memoryview(self.data[self.at - size : self.at])

    def number(self, code: str, what: str) -> Any:
        raw = self.take(struct.calcsize(f"<{code}"), what)
        return struct.unpack(f"<{code}", raw)[0]

    def count(self, most: int, what: str, code: str = "Q") -> int:
        number = self.number(code, what)
        if number > most:
            raise ValueError(f"{what} must be at most {most}; got {number}")
        return number

    def text(self, what: str) -> str:
        raw = self.take(self.count(_MOST_BYTES, f"the length of {what}"), what)
        return bytes(raw).decode()  # A UnicodeDecodeError is a ValueError.

    def value(self, what: str) -> Any:
        kind = self.number("I", what)
        if kind != _ARRAY:
            return self.element(kind, what)
        kind = self.number("I", what)
        count = self.count(_MOST_ELEMENTS, f"the length of {what}")
        if kind in _SCALARS:
            dtype = np.dtype(f"<{_SCALARS[kind]}")
            return np.frombuffer(self.take(count * dtype.itemsize, what), dtype)
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
