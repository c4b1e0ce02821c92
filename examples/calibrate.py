"""Calibrates a simulator with eight bounded parameters against data, in processes.

    python examples/calibrate.py

Prey and predators follow the equations of Rosenzweig and MacArthur. The simulation
fails if the predators die out, as they do in two fifths of the box. The method is the
default, without a setting.
"""

import argparse

import numpy as np
from scipy.integrate import solve_ivp

TIMES = np.linspace(0, 40, 41)
NOISE = 0.05  # Standard deviation of the logarithms of the data.

# Name, lower bound, true value, upper bound.
PARAMETERS = (
    ("growth", 0.3, 1.0, 3.0),
    ("capacity", 2.0, 6.0, 20.0),
    ("attack", 0.3, 1.2, 4.0),
    ("handling", 0.1, 0.35, 1.0),
    ("conversion", 0.1, 0.5, 1.0),
    ("death", 0.1, 0.6, 1.2),
    ("prey at first", 0.5, 3.0, 6.0),
    ("predators at first", 0.2, 1.0, 4.0),
)
LOWER, TRUTH, UPPER = np.log([row[1:] for row in PARAMETERS]).T
START = LOWER + 0.4 * (UPPER - LOWER)


def simulate(log_parameters: np.ndarray) -> np.ndarray:
    """The logarithms of prey and predators, [2, times]."""
    growth, capacity, attack, handling, conversion, death, *first = np.exp(
        log_parameters
    )

    def change(time: float, log_numbers: np.ndarray) -> np.ndarray:
        prey, predators = np.exp(np.clip(log_numbers, -50, 50))
        eaten = attack / (1 + attack * handling * prey)
        return np.array(
            [
                growth * (1 - prey / capacity) - eaten * predators,
                conversion * eaten * prey - death,
            ]
        )

    found = solve_ivp(
        change, TIMES[[0, -1]], np.log(first), t_eval=TIMES, rtol=1e-6, atol=1e-8
    )
    if not found.success:
        raise RuntimeError(found.message)
    if found.y[1].min() < np.log(1e-2):
        raise RuntimeError("the predators died out")
    return np.asarray(found.y)


def observed() -> np.ndarray:
    """The data, with noise that is the same in each process."""
    noise = np.random.default_rng(0).normal(size=(2, TIMES.size))
    return simulate(TRUTH) + NOISE * noise


def loss(log_parameters: np.ndarray) -> float:
    """The mean square of the residuals, in units of the noise."""
    return float(np.mean((simulate(log_parameters) - DATA) ** 2) / NOISE**2)


DATA = observed()


def main() -> None:
    import radazo_jax as zo  # The workers do not need it.

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--evaluations", type=int, default=800)
    parser.add_argument("--processes", type=int, default=0, help="by default, none")
    args = parser.parse_args()
    result = zo.minimize(
        loss,
        START,
        max_evaluations=args.evaluations,
        bounds=(LOWER, UPPER),
        workers=args.processes or None,
    )
    print(f"{'parameter':20}{'truth':>8}{'found':>8}")
    for (name, *_), truth, found in zip(
        PARAMETERS, np.exp(TRUTH), np.exp(result.best.params), strict=True
    ):
        print(f"{name:20}{truth:8.3f}{found:8.3f}")
    failed = int(result.history.failed.sum())
    print(f"loss: {result.best.value:.3f}, of {result.num_evaluations} evaluations")
    print(f"failed: {failed}")


if __name__ == "__main__":
    main()
