"""Kills a run with a journal at random moments, and compares its end with another's.

python -m campaigns.killed_runs --kills 200
"""

import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click

from common import options

RUN = """
import sys
import numpy as np
import radazo_jax as zo

center = np.linspace(-1, 1, 50)

def fun(x):
    return float(np.sum((x - center) ** 2))

zo.minimize_black_box(
    fun, np.zeros(50, np.float32), zo.radazo(1e-2), zo.forward_difference(),
    num_steps=int(sys.argv[2]), key=0, journal=sys.argv[1], progress=False,
)
"""


def steps(path: Path) -> list[tuple[Any, ...]]:
    """The complete lines of steps, without what differs between runs."""
    if not path.exists():
        return []
    *complete, _ = path.read_bytes().split(b"\n")
    found = [json.loads(line) for line in complete[1:]]
    return [(line["step"], line["values"], line["params"]) for line in found]


def started(path: Path, total: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", RUN, str(path), str(total)])


def killed(path: Path, kills: int, steps_per_kill: int, rng: random.Random) -> int:
    """Kills a run again and again, and returns how often it was killed."""
    for done in range(kills):
        before = len(steps(path))
        process = started(path, kills * steps_per_kill)
        # The moment is random, between the start of rebuilding and the last step.
        wanted = before + rng.randrange(1, steps_per_kill)
        while process.poll() is None and len(steps(path)) < wanted:
            time.sleep(0.005)
        time.sleep(rng.random() * 0.01)
        process.kill()
        if process.wait() == 0:
            return done
    return kills


@options.command(__doc__)
@click.option("--kills", type=options.COUNT, default=200)
@click.option("--steps-per-kill", type=click.IntRange(min=2), default=40)
@click.option("--seed", type=int, default=0)
def main(kills: int, steps_per_kill: int, seed: int) -> None:
    total = kills * steps_per_kill
    with tempfile.TemporaryDirectory() as folder:
        path, whole = Path(folder, "killed.jsonl"), Path(folder, "whole.jsonl")
        done = killed(path, kills, steps_per_kill, random.Random(seed))
        if started(path, total).wait() or started(whole, total).wait():
            raise click.ClickException("a run that nobody killed failed")
        expected = steps(whole)
        equal = steps(path) == expected
    print(f"after {done} of {kills} kills, all {total} steps equal: {equal}")
    sys.exit(not equal or len(expected) != total)


if __name__ == "__main__":
    main()
