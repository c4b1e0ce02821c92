"""Messages between the driver of a run and its workers: numbers, and nothing else."""

import struct
from typing import Any, NamedTuple

import numpy as np

from radazo_jax._src.workers import signs

_REQUEST = struct.Struct("<IIIIIBB?")
_REPLY = struct.Struct("<BIIIIIffIIIB")
_VALUES, _DRIFTED, _FAILED = range(3)
_SIGNS = 1  # The item size of packed signs, which is less than a byte.


class Request(NamedTuple):
    """A message to a worker: steps to take, then members to evaluate.

    Attributes:
      run: A number that identifies the run.
      first: The number of the first of the steps to take.
      values: The values of these steps, [steps, n]; signs of pairs are packed.
      checksums: The checksums of the parameters before them: uint32, [steps].
      members: The numbers of the points to evaluate, of the dtype of
        `numbers_of_points`: [m].
      restarts: Whether the worker drops its state first.
    """

    run: int
    first: int
    values: np.ndarray
    checksums: np.ndarray
    members: np.ndarray
    restarts: bool = False

    def encode(self) -> bytes:
        """Returns the message as bytes."""
        steps, n = self.values.shape
        packed = signs.pack(self.values)
        itemsize = self.values.dtype.itemsize if packed is None else _SIGNS
        members = self.members
        sizes = (steps, n, len(members), itemsize, members.itemsize, self.restarts)
        return _REQUEST.pack(self.run, self.first, *sizes) + _joined(
            self.values if packed is None else packed, self.checksums, self.members
        )

    @classmethod
    def decode(cls, message: bytes) -> "Request":
        """Reads a message; raises a ValueError if it is not one."""
        run, first, steps, n, m, *sizes, restarts = _unpack(_REQUEST, message)
        itemsize, of_members = sizes
        packs = itemsize == _SIGNS
        packed = np.uint8, (steps, signs.size(n))
        values, checksums, members = _split(
            message[_REQUEST.size :],
            packed if packs else (_float(itemsize), (steps, n)),
            (np.uint32, (steps,)),
            (_unsigned(of_members), (m,)),
        )
        if packs:
            values = signs.unpack(values, n)
        return cls(run, first, values, checksums, members, restarts)


class Reply(NamedTuple):
    """The answer of a worker.

    Attributes:
      step: The number of steps that its state has taken.
      checksum: The checksum of its parameters.
      failures: The counts of `Failures`, in their order.
      seconds: Duration of the evaluations of a batch.
      seconds_per_step: Duration of a step without its evaluations.
      numbers: The numbers of the steps that it took for this answer, [steps, k].
      values: The values at the members, [m].
      problem: A text if the worker has failed, and the other fields have no meaning.
      drifted: Whether its parameters differed from the run's. It has dropped its
        state, and starts from the beginning.
    """

    step: int
    checksum: int
    failures: tuple[int, int, int]
    seconds: float
    seconds_per_step: float
    numbers: np.ndarray
    values: np.ndarray
    problem: str = ""
    drifted: bool = False

    def encode(self) -> bytes:
        """Returns the answer as bytes."""
        kind = _FAILED if self.problem else _DRIFTED if self.drifted else _VALUES
        steps, k = self.numbers.shape
        sizes = (steps, k, len(self.values), self.values.dtype.itemsize)
        header = _REPLY.pack(
            kind,
            self.step,
            self.checksum,
            *self.failures,
            self.seconds,
            self.seconds_per_step,
            *sizes,
        )
        text = self.problem.encode()
        return header + _joined(self.numbers, self.values) + text

    @classmethod
    def decode(cls, message: bytes) -> "Reply":
        """Reads an answer; raises a ValueError if it is not one."""
        kind, step, checksum, *rest = _unpack(_REPLY, message)
        *failures, seconds, per_step, steps, k, m, itemsize = rest
        body = message[_REPLY.size :]
        size = 4 * steps * k + itemsize * m
        problem = body[size:].decode()
        if bool(problem) != (kind == _FAILED):
            raise _wrong(message)
        numbers, values = _split(
            body[:size], (np.float32, (steps, k)), (_float(itemsize), (m,))
        )
        counts = (failures[0], failures[1], failures[2])
        return cls(
            *(step, checksum, counts, seconds, per_step, numbers, values, problem),
            kind == _DRIFTED,
        )


def failed(problem: str) -> Reply:
    """The answer of a worker that cannot give another."""
    none = np.zeros((0, 0), np.float32)
    return Reply(0, 0, (0, 0, 0), 0.0, 0.0, none, none[0:0].ravel(), problem)


def _unpack(header: struct.Struct, message: bytes) -> tuple[Any, ...]:
    if len(message) < header.size:
        raise _wrong(message)
    return header.unpack_from(message)


def _joined(*arrays: np.ndarray) -> bytes:
    return b"".join(np.ascontiguousarray(x).tobytes() for x in arrays)


def _split(body: bytes, *fields: tuple[Any, tuple[int, ...]]) -> list[np.ndarray]:
    """The arrays of a body, which has no more and no fewer bytes."""
    sizes = [np.dtype(dtype).itemsize * int(np.prod(shape)) for dtype, shape in fields]
    if sum(sizes) != len(body):
        raise _wrong(body)
    ends = np.cumsum([0, *sizes])
    return [
        np.frombuffer(body[start:end], dtype).reshape(shape)
        for (dtype, shape), start, end in zip(fields, ends[:-1], ends[1:], strict=True)
    ]


def _float(itemsize: int) -> Any:
    if itemsize not in (4, 8):
        raise ValueError(f"message must have floats of 4 or 8 bytes; got {itemsize}.")
    return np.dtype(f"f{itemsize}")


def numbers_of_points(num_points: int) -> Any:
    """The dtype of the numbers of points: as few bytes as they need, two or four."""
    return np.dtype(np.uint16 if num_points <= 2**16 else np.uint32)


def _unsigned(itemsize: int) -> Any:
    if itemsize not in (2, 4):
        raise ValueError(f"message must have members of 2 or 4 bytes; got {itemsize}.")
    return np.dtype(f"u{itemsize}")


def _wrong(message: bytes) -> ValueError:
    return ValueError(
        f"message must be of this version of radazo_jax; got {len(message)} bytes "
        f"{message[:20]!r}."
    )
