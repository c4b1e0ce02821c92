"""Processes, devices and the mesh: what a run needs before it can begin."""

import argparse
import hashlib
import math
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

AXES = ("perturbation", "data", "model")

# A process that says nothing for so long is taken for dead, and the others end. Those
# that are done wait for one another for at most as long.
_HEARTBEAT_SECONDS = 20
_SHUTDOWN_SECONDS = 20
_SHOWN = 200  # Bytes of a value that errors show.


class UserError(Exception):
    """What the user can mend; the message is one line."""


def mesh_shape(text: str) -> dict[str, int]:
    """The argument of `--mesh`, as `data=2,model=4`; other axes have one device."""
    shape: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = part.partition("=")
        if name not in AXES:
            raise argparse.ArgumentTypeError(
                f"has the axes {', '.join(AXES)}; got {name!r} in {text!r}"
            )
        if name in shape:
            raise argparse.ArgumentTypeError(
                f"must name each axis once; got {name!r} twice in {text!r}"
            )
        if not size.isascii() or not size.isdigit() or int(size) < 1:
            raise argparse.ArgumentTypeError(
                f"must give each axis a number of devices, as {name}=2; got {part!r}"
            )
        shape[name] = int(size)
    return {name: shape.get(name, 1) for name in AXES}


def address(text: str) -> str:
    """The argument of `--coordinator`."""
    host, _, port = text.rpartition(":")
    if not host or not port.isascii() or not port.isdigit():
        raise argparse.ArgumentTypeError(
            f"must be address:port, as 10.0.0.1:1234; got {text!r}"
        )
    return text


def start(args: argparse.Namespace) -> None:
    """Joins the other processes, where there are some."""
    timeouts = {
        "heartbeat_timeout_seconds": _HEARTBEAT_SECONDS,
        "shutdown_timeout_seconds": _SHUTDOWN_SECONDS,
    }
    if args.pod:
        try:
            jax.distributed.initialize(**timeouts)
        except ValueError as error:
            raise UserError(f"--pod finds no other processes: {error}") from None
    elif args.coordinator:
        jax.distributed.initialize(
            args.coordinator, args.num_processes, args.process_id, **timeouts
        )


def make_mesh(shape: dict[str, int] | None, explicit: bool) -> jax.sharding.Mesh:
    """A mesh of all devices; they all lie along `perturbation` if no shape is given."""
    num_devices = jax.device_count()
    shape = shape or dict.fromkeys(AXES, 1) | {"perturbation": num_devices}
    if math.prod(shape.values()) != num_devices:
        asked = " × ".join(f"{name}={size}" for name, size in shape.items())
        raise UserError(
            f"--mesh must hold all devices: {asked} are {math.prod(shape.values())}, "
            f"and there are {num_devices} in {jax.process_count()} process(es)"
        )
    kind = jax.sharding.AxisType.Explicit if explicit else jax.sharding.AxisType.Auto
    return jax.make_mesh(tuple(shape.values()), AXES, (kind,) * len(AXES))


def check_same_in_all_processes(name: str, value: Any) -> None:
    """Raises in every process if the value differs in one from that in the first.

    Args:
      name: How the value is called in the error.
      value: Anything that `repr` tells apart.
    """
    text = repr(value).encode()
    shown = np.zeros(_SHOWN, np.uint8)
    shown[: len(text)] = np.frombuffer(text[:_SHOWN], np.uint8)
    digest = np.frombuffer(hashlib.sha256(text).digest(), np.uint8)
    rows = multihost_utils.process_allgather(np.concatenate([shown, digest]))
    different = np.flatnonzero((rows[:, _SHOWN:] != rows[0, _SHOWN:]).any(axis=1))
    if len(different):
        first, other = (
            rows[i, :_SHOWN].tobytes().rstrip(b"\0").decode(errors="replace")
            for i in (0, different[0])
        )
        raise UserError(
            f"{name} must be the same in all processes; got {first} in process 0 and "
            f"{other} in process {different[0]}"
        )
