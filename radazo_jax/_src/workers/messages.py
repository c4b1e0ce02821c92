"""Messages between the driver of a run and its workers."""

import json
import math
import operator
from typing import Any, NamedTuple

import numpy as np

_KINDS = "biuf"  # Of the arrays: numbers.

NO_NUMBERS, NO_VALUES = np.zeros((0, 0), np.float32), np.zeros(0, np.float32)


class Request(NamedTuple):
    """A message to a worker: steps to take, then members to evaluate.

    Attributes:
      run: A number that identifies the run.
      first: The number of the first of the steps to take.
      values: The values of these steps, [steps, n].
      checksums: The checksums of the parameters before them: uint32, [steps].
      members: The numbers of the points to evaluate: [m].
      restarts: Whether the worker drops its state first.
    """

    run: int
    first: int
    values: np.ndarray
    checksums: np.ndarray
    members: np.ndarray
    restarts: bool = False


class Reply(NamedTuple):
    """The answer of a worker.

    Attributes:
      step: The number of steps that its state has taken.
      checksum: The checksum of its parameters.
      failures: The counts of `Failures`, in their order.
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
    seconds_per_step: float
    numbers: np.ndarray
    values: np.ndarray
    problem: str = ""
    drifted: bool = False


def failed(problem: str) -> Reply:
    """The answer of a worker that cannot give another."""
    return Reply(0, 0, (0, 0, 0), 0.0, NO_NUMBERS, NO_VALUES, problem)


def encode(message: Request | Reply) -> bytes:
    """The message as bytes: a line of JSON, followed by its arrays."""
    fields: dict[str, Any] = {}
    arrays: list[bytes] = []
    for name, value in message._asdict().items():
        if isinstance(value, np.ndarray):
            arrays.append(value.tobytes())
            value = {"dtype": value.dtype.str, "shape": value.shape}
        fields[name] = value
    described = type(message).__name__, fields
    line = json.dumps(described, default=operator.methodcaller("item"))
    return b"".join([line.encode(), b"\n", *arrays])


def decode(message: bytes) -> Any:
    """The message of these bytes.

    Raises:
      ValueError: If the bytes are no message.
    """
    line, _, rest = bytes(message).partition(b"\n")
    try:
        kind, fields = json.loads(line)
        arrays = {name: x for name, x in fields.items() if isinstance(x, dict)}
        for name, described in arrays.items():
            fields[name], rest = _array(rest, **described)
        if kind == "Reply":
            fields["failures"] = tuple(fields["failures"])
        found = {"Request": Request, "Reply": Reply}[kind](**fields)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"message must be a request or a reply; got {message[:80]!r} ({error!r}). "
            "Give all workers the same version of radazo_jax."
        ) from error
    if rest:
        raise ValueError(f"message must end with its arrays; got {len(rest)} bytes.")
    return found


def _array(message: bytes, dtype: str, shape: list[int]) -> tuple[np.ndarray, bytes]:
    """The first array of these bytes, and the bytes after it."""
    described, count = np.dtype(dtype), math.prod(shape)
    if described.kind not in _KINDS:
        raise ValueError(f"dtype {dtype!r}")
    found = np.frombuffer(message, described, count).reshape(shape).copy()
    return found, message[found.nbytes :]
