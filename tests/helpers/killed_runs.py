"""Kills a run with a journal at random moments, and compares its end with another's.

python tests/helpers/killed_runs.py --kills 200
"""

import argparse
import json
import pathlib
import random
import subprocess
import sys
import tempfile
import time

RUN = """
import sys
import numpy as np
import radazo_jax as zo

center = np.linspace(-1, 1, 50)

def fun(x):
    return float(np.sum((x - center) ** 2))

zo.minimize_black_box(
    fun, np.zeros(50, np.float32), zo.radazo(1e-2), zo.forward_difference(),
    int(sys.argv[2]), 0, journal=sys.argv[1], progress=False,
)
"""


def steps(path):
    """The complete lines of steps, without what differs between runs."""
    if not path.exists():
        return []
    *complete, _ = path.read_bytes().split(b"\n")
    found = [json.loads(line) for line in complete[1:]]
    return [(line["step"], line["values"], line["params"]) for line in found]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--steps-per-kill", type=int, default=40)
    parser.add_argument("--folder", type=pathlib.Path)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    folder = args.folder or pathlib.Path(tempfile.mkdtemp())
    path, whole = folder / "killed.jsonl", folder / "whole.jsonl"
    total = args.kills * args.steps_per_kill
    rng = random.Random(args.seed)

    def start(path):
        return subprocess.Popen([sys.executable, "-c", RUN, str(path), str(total)])

    kills = 0
    while kills < args.kills:
        before = len(steps(path))
        process = start(path)
        # The moment is random, between the start of rebuilding and the last step.
        wanted = before + rng.randrange(1, args.steps_per_kill)
        while process.poll() is None and len(steps(path)) < wanted:
            time.sleep(0.005)
        time.sleep(rng.random() * 0.01)
        process.kill()
        if process.wait() == 0:
            break
        kills += 1
    assert start(path).wait() == 0
    assert start(whole).wait() == 0
    equal = steps(path) == steps(whole)
    assert len(steps(whole)) == total
    print(f"after {kills} of {args.kills} kills, all {total} steps equal: {equal}")
    sys.exit(not equal)


if __name__ == "__main__":
    main()
