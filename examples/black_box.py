"""Fits a NumPy simulator to what was observed, in processes.

python examples/black_box.py
"""

import numpy as np

import radazo_jax as zo


def simulate(log_rates):
    """Numbers of prey and predators over time, by the Lotka-Volterra equations."""
    birth, eaten, fed, death = np.exp(log_rates).tolist()
    prey, predators, numbers = 1.0, 0.5, []
    for _ in range(1000):
        prey += 0.01 * prey * (birth - eaten * predators)
        predators += 0.01 * predators * (fed * prey - death)
        numbers.append((prey, predators))
    return np.log(numbers)


def loss(log_rates):
    return np.mean((simulate(log_rates) - simulate(np.log([1.1, 0.8, 0.6, 0.9]))) ** 2)


if __name__ == "__main__":
    optimizer = zo.radazo(2e-2)  # A guess: the logarithms of rates change by 2 %.
    estimator = zo.central_difference(zo.coordinate(), num_directions=4, smoothing=1e-3)
    result = zo.train(
        loss,
        np.zeros(4, np.float32),
        optimizer,
        estimator,
        evaluator=zo.external(workers=2),
        num_steps=200,
        key=0,
    )
    print("rates:", np.exp(result.best.params), "loss:", result.best.value)
