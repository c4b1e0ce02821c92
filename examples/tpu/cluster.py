"""Processes, devices and the mesh: what a run needs before it can begin."""

import math
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import click
import jax
import numpy as np
from jax.experimental import multihost_utils

AXES = ("perturbation", "data", "model")

# A process that says nothing for so long is taken for dead, and the others end. Those
# that are done wait for one another for at most as long.
_HEARTBEAT_SECONDS = 20
_SHUTDOWN_SECONDS = 20
# The exit code of a process that lost another.
LOST = 3
_CHILD = "RADAZO_TPU_SUPERVISED"
# From the first of these lines on, what a child says waits until it has ended.
_ERROR = re.compile(r"[WEF]\d{4} [\d:.]+ |ERROR:|Traceback |\S+: error: ")
# How JAX's health check and its collectives say that a process is missing.
_SILENT = re.compile(r"stopped sending heartbeats\):\n(.*?)\nThe tasks", re.DOTALL)
_TIMEOUT = re.compile(r"Task (?:\S+task:)?(\d+) heartbeat timeout")
_LEADER = "Failed to send RPC to coordination service"
_CONNECTION = re.compile(r"Connection (?:reset|closed) by peer|Socket closed")
_SHOWN = 1000  # Bytes of a value that are compared.


def mesh_shape(text: str) -> dict[str, int]:
    """The argument of `--mesh`, as `data=2,model=4`; other axes have one device."""
    found = re.findall(r"(\w+)=([1-9]\d*)", text)
    shape = {name: int(size) for name, size in found}
    valid = text == ",".join(f"{name}={size}" for name, size in found)
    if not valid or not len(shape) == len(found) == len(shape.keys() & {*AXES}):
        raise click.BadParameter(
            f"must give axes ({', '.join(AXES)}) their numbers of devices, as "
            f"data=2,model=4; got {text}"
        )
    return {name: shape.get(name, 1) for name in AXES}


def address(text: str) -> str:
    """The argument of `--coordinator`."""
    if not re.fullmatch(r".+:\d+", text):
        raise click.BadParameter(
            f"must be address:port, as 10.0.0.1:1234; got {text!r}"
        )
    return text


def supervise(command: Sequence[str], resume: str) -> int:
    """Runs one process of several as a child, and says in one line whom it lost.

    JAX ends a process that has lost another in C++, with a stack trace. A parent can
    tell what happened; nothing in the process itself can.

    Args:
      command: The command of the child.
      resume: Instructions to resume, part of the message.

    Returns:
      The exit code of the child, or `LOST`.
    """
    held: list[str] = []
    with subprocess.Popen(
        command,
        env=os.environ | {_CHILD: "1"},
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        errors="replace",
    ) as child:
        for line in child.stderr:
            if held or _ERROR.match(line):
                held.append(line)
            else:
                sys.stderr.write(line)
    code = child.returncode
    lost = missing("".join(held)) if code not in (0, 2) else ""
    if lost:
        print(f"train.py: error: {lost}; {resume}", file=sys.stderr)
        return LOST
    sys.stderr.writelines(held)
    if code < 0:
        print(f"train.py: error: ended by signal {-code}; {resume}", file=sys.stderr)
    return code if code >= 0 else 128 - code


def missing(text: str) -> str:
    """Who is missing, from what JAX said, or nothing if nobody is."""
    listed = [name for lines in _SILENT.findall(text) for name in lines.split()]
    found = {int(re.findall(r"\d+", name)[-1]) for name in listed}
    found |= {int(name) for name in _TIMEOUT.findall(text)}
    if not found and _LEADER in text:
        found = {0}
    if found:
        names = ", ".join(str(process) for process in sorted(found))
        return f"process {names} has ended or says nothing"
    return "another process has ended" if _CONNECTION.search(text) else ""


def is_supervised() -> bool:
    """Whether this process is the child of `supervise`, with which it then ends."""
    if _CHILD not in os.environ:
        return False
    del os.environ[_CHILD]

    def end_with_parent() -> None:
        os.read(sys.stdin.fileno(), 1)  # Returns when the parent is dead.
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
    return True


def wait_for_health_check() -> None:
    """Waits until JAX has ended this process, if it is one that lost another."""
    if jax.process_count() > 1:
        time.sleep(2 * _HEARTBEAT_SECONDS)


def start(args: SimpleNamespace) -> None:
    """Joins the other processes, if there are any."""
    timeouts = {
        "heartbeat_timeout_seconds": _HEARTBEAT_SECONDS,
        "shutdown_timeout_seconds": _SHUTDOWN_SECONDS,
    }
    if args.pod:
        try:
            jax.distributed.initialize(**timeouts)
        except ValueError as error:
            raise click.ClickException(
                f"--pod finds no other processes: {error}"
            ) from None
    elif args.coordinator:
        jax.distributed.initialize(
            args.coordinator, args.num_processes, args.process_id, **timeouts
        )


def make_mesh(
    shape: dict[str, int] | None,
    explicit: bool,
    devices: Sequence[jax.Device] | None = None,
) -> jax.sharding.Mesh:
    """A mesh of all devices; they all lie along `perturbation` if no shape is given."""
    devices = devices or jax.devices()
    num_devices = len(devices)
    shape = shape or dict.fromkeys(AXES, 1) | {"perturbation": num_devices}
    if math.prod(shape.values()) != num_devices:
        asked = " × ".join(f"{name}={size}" for name, size in shape.items())
        raise click.ClickException(
            f"--mesh must hold all devices: {asked} are {math.prod(shape.values())}, "
            f"and there are {num_devices} in {jax.process_count()} process(es)"
        )
    kind = jax.sharding.AxisType.Explicit if explicit else jax.sharding.AxisType.Auto
    kinds = (kind,) * len(AXES)
    return jax.make_mesh(tuple(shape.values()), AXES, kinds, devices=devices)


def check_same_in_all_processes(name: str, value: Any) -> None:
    """Raises in every process if the value differs in one from that in the first.

    Args:
      name: Name of the value, part of the error.
      value: Anything that `repr` tells apart.
    """
    text = repr(value).encode()[:_SHOWN].ljust(_SHOWN)
    texts = multihost_utils.process_allgather(np.frombuffer(text, np.uint8))
    shown = [row.tobytes().decode(errors="replace").rstrip() for row in texts]
    for process, other in enumerate(shown):
        if other != shown[0]:
            raise click.ClickException(
                f"{name} must be the same in all processes; got {shown[0]} in process "
                f"0 and {other} in process {process}"
            )
