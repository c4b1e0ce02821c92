"""Messages between the driver of a run and its workers."""

import pickle
from typing import Any, NamedTuple

import numpy as np


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


def failed(problem: str) -> Reply:
    """The answer of a worker that cannot give another."""
    none = np.zeros((0, 0), np.float32)
    return Reply(0, 0, (0, 0, 0), 0.0, 0.0, none, none[0:0].ravel(), problem)


def encode(message: Request | Reply) -> bytes:
    """The message as bytes, so that Dask sends it in one piece."""
    return pickle.dumps(message)


def decode(message: bytes) -> Any:
    """The message of these bytes, which come from Dask's own connections."""
    return pickle.loads(message)
