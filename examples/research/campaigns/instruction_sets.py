"""Parameters after steps on given values, to compare instruction sets.

python -m campaigns.instruction_sets FILE
"""

from pathlib import Path

import click
import numpy as np
import optax

import radazo_jax as zo
from common import options

DISTRIBUTIONS = {
    "rademacher": zo.rademacher(),
    "orthonormal": zo.orthonormal(),
    "gaussian": zo.gaussian(),
}
OPTIMIZERS = {"zo_sgd": zo.zo_sgd(1e-3), "radazo": zo.radazo(1e-3)}
STEPS, DIRECTIONS, DIMENSION = 30, 8, 1000


def stepped(
    distribution: zo.Distribution, optimizer: optax.GradientTransformation
) -> np.ndarray:
    """The parameters after steps on given values."""
    estimator = zo.forward_difference(distribution, DIRECTIONS)
    start = np.linspace(-1, 1, DIMENSION, dtype=np.float32)
    run = zo.ask_tell(start, optimizer, estimator)
    shape = (STEPS, DIRECTIONS + 1)
    for values in np.random.default_rng(0).normal(size=shape).astype(np.float32):
        run.ask()
        run.tell(values)
    return np.asarray(run.params)


def computed() -> dict[str, np.ndarray]:
    cases = [("rademacher", "radazo"), *((name, "zo_sgd") for name in DISTRIBUTIONS)]
    return {
        f"{name} {optimizer}": stepped(DISTRIBUTIONS[name], OPTIMIZERS[optimizer])
        for name, optimizer in cases
    }


@options.command(__doc__)
@click.argument("file", type=click.Path(path_type=Path))
def main(file: Path) -> None:
    np.savez(file, **computed())


if __name__ == "__main__":
    main()
