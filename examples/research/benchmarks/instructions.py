"""Counts the instructions that a GPU executes for each element of a perturbed matrix.

Compiles, without running anything, θ + s·u for a matrix of 2²² elements in bfloat16,
for an H100, and disassembles its kernels. It also counts the operations of XLA before
they become kernels. The norm of a direction is given, so it is not counted.
``--before`` compiles the package at another revision too. The compiler needs no GPU,
but the extra ``gpu-aot``, in an environment of its own.

    python -m benchmarks.instructions --before ccb01cb^
"""

import json
import os
import pathlib
import re
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

import click
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from tabulate import tabulate

import radazo_jax as zo
from benchmarks import gpus
from benchmarks.hlo import Program
from benchmarks.programs import compiled_on, placed
from benchmarks.revisions import extract
from common import RESEARCH, options
from common.distributions import DISTRIBUTIONS
from common.record import record, write

GPU, ARCHITECTURE = "h100", "sm_90a"
SHAPE = (2**11, 2**11)
TOOLS = pathlib.Path(sysconfig.get_path("purelib"), "nvidia", "cu13", "bin")
# An instruction of a disassembled kernel: its address, its predicate, and its name.
_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)")
_STORED = re.compile(r"STG\.E(?:\.\w+)*?(?:\.(U8|S8|U16|S16|64|128))?$")
_BYTES = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, None: 4, "64": 8, "128": 16}


def kernels(code: str) -> dict[str, list[str]]:
    """The instructions of each kernel of a disassembly, without padding."""
    found: dict[str, list[str]] = {}
    inside: list[str] = []
    for line in code.splitlines():
        if line.startswith(".text."):
            inside = found.setdefault(line.removeprefix(".text.").rstrip(":"), [])
        elif (match := _INSTRUCTION.match(line)) and match[1] != "NOP":
            inside.append(match[1])
    return found


def stored_bytes(instructions: list[str]) -> int:
    """The bytes that a thread writes, each store once."""
    stores = (_STORED.match(name) for name in instructions)
    return sum(_BYTES[store[1]] for store in stores if store)


def disassembled(folder: pathlib.Path) -> dict[str, list[str]]:
    """The instructions of all kernels that the compiler left in a folder."""
    found: dict[str, list[str]] = {}
    # The file of constants is empty.
    for path in (p for p in folder.glob("*.ptx") if p.stat().st_size > 1):
        binary = path.with_suffix(".cubin")
        assembler = (TOOLS / "ptxas", f"-arch={ARCHITECTURE}", path, "-o", binary)
        subprocess.run(assembler, check=True)
        command = (TOOLS / "nvdisasm", "-c", binary)
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        found |= kernels(done.stdout)
    return found


def counted(distribution: str) -> dict[str, Any]:
    """The instructions and the operations for an element of a perturbed matrix."""
    mesh = Mesh(np.array(gpus.devices(GPU)), ("one",))
    params = jax.ShapeDtypeStruct(SHAPE, jnp.bfloat16)
    key = jax.eval_shape(lambda: jax.random.key(0))
    direction = jax.eval_shape(DISTRIBUTIONS[distribution].sample, key, params)
    args: Any = (params, direction, jax.ShapeDtypeStruct((), jnp.float32))
    args = placed(args, mesh, lambda x: jax.P())
    with tempfile.TemporaryDirectory() as folder:
        options: dict[str, Any] = gpus.options(GPU) | {"xla_dump_to": folder}
        fun = zo.perturb(lambda matrix: matrix)
        program = Program(compiled_on(mesh, fun, args, (), options).as_text())
        found = disassembled(pathlib.Path(folder))
    size = np.prod(SHAPE).item()
    executed = 0.0
    for _, instruction, times in program.walk():
        if instruction.opcode == "fusion":
            code = found[instruction.name.replace(".", "_").replace("-", "_")]
            written = sum(array.num_bytes for array in instruction.results)
            executed += times * len(code) * written / stored_bytes(code)
    return {
        "instructions": executed / size,
        "operations": program.elementwise_operations() / size,
    }


def rows() -> list[dict[str, Any]]:
    return [{"distribution": name} | counted(name) for name in DISTRIBUTIONS]


def rows_at(revision: str) -> list[dict[str, Any]]:
    """The rows of the package at another revision."""
    with tempfile.TemporaryDirectory() as folder:
        extract(revision, folder)
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.instructions", "--print"],
            env=os.environ | {"PYTHONPATH": folder},
            cwd=RESEARCH,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    return json.loads(done.stdout.splitlines()[-1])


@options.command(__doc__)
@click.option("--before", metavar="REVISION", help="A revision in git.")
@click.option("--print", "printed", is_flag=True, hidden=True)
@options.output
def main(before: str | None, printed: bool, output: Path | None) -> None:
    kind = gpus.devices(GPU)[0].device_kind
    if not (TOOLS / "nvdisasm").exists():
        raise click.ClickException(
            "nvdisasm must be installed. Install the extra gpu-aot of this project."
        )
    found = rows()
    if printed:
        print(json.dumps(found))
        return
    if before:
        for row, then in zip(found, rows_at(before), strict=True):
            row |= {f"{name}_before": then[name] for name in list(row)[1:]}
    print(tabulate(found, headers="keys", floatfmt=".1f"))
    if output:
        write(output, record(found) | {"device": f"compiled for {kind}"})


if __name__ == "__main__":
    main()
