"""Directions, gradients and runs, to hold the engine against when it is rebuilt.

    python tests/golden/engine/make_engine.py

writes engine.npz, of the version that is imported. Only public names are used.
"""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import radazo_jax as zo

FILE = Path(__file__).parent / "engine.npz"
DISTRIBUTIONS = {
    "sphere": zo.sphere(),
    "gaussian": zo.gaussian(),
    "rademacher": zo.rademacher(),
    "coordinate": zo.coordinate(),
    "low_rank": zo.low_rank(),
    "low_rank(2)": zo.low_rank(2),
}
ESTIMATORS = {"forward": zo.forward_difference, "central": zo.central_difference}
NUM_DIRECTIONS, STEPS = 9, 50


def params() -> dict[str, jax.Array]:
    key = jax.random.key(0)
    return {
        "w": jax.random.normal(key, (6, 5)),
        "b": jnp.zeros(5),
        "stack": jax.random.normal(key, (2, 5, 5)) / 3,
        "half": jnp.linspace(-1, 1, 7).astype(jnp.bfloat16),
    }


def loss(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    x = x @ params["w"] + params["b"][None]
    x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["stack"])
    return jnp.mean(x**2) + jnp.sum(params["half"].astype(jnp.float32) ** 2) / 50


def inputs() -> jax.Array:
    return jax.random.normal(jax.random.key(1), (8, 6))


def names() -> Iterator[tuple[str, str, str, Any]]:
    """What is recorded: ("run", distribution, estimator, batch size or "axis")."""
    for distribution in DISTRIBUTIONS:
        yield "directions", distribution, "", None
        for estimator, batch in itertools.product(ESTIMATORS, (None, 1, 4, "axis")):
            yield "gradient", distribution, estimator, batch
            if batch != 4:
                yield "run", distribution, estimator, batch


def compute(
    kind: str, distribution: str, estimator: str, batch: Any
) -> list[np.ndarray]:
    """The arrays that are recorded under this name."""
    if kind == "directions":
        return _leaves(
            [_direction(DISTRIBUTIONS[distribution], seed) for seed in range(3)]
        )
    made = ESTIMATORS[estimator](DISTRIBUTIONS[distribution], NUM_DIRECTIONS, 1e-2)
    evaluator = zo.sharded("k") if batch == "axis" else zo.vectorized(batch)
    mesh = jax.make_mesh((8,), ("k",), axis_types=(jax.sharding.AxisType.Auto,))
    with jax.set_mesh(mesh):
        x = inputs()
        if kind == "gradient":
            value_and_grad = jax.jit(zo.value_and_grad(loss, made, evaluator))
            return _leaves(value_and_grad(jax.random.key(3), params(), x))
        result = zo.minimize(
            lambda p: loss(p, x),
            params(),
            zo.radazo(1e-2),
            made,
            STEPS,
            4,
            evaluator=evaluator,
            progress=False,
        )
    return _leaves((result.params, result.values))


def _direction(distribution: zo.Distribution, seed: int) -> Any:
    return distribution.materialize(
        distribution.sample(jax.random.key(seed), params()), params()
    )


def _leaves(tree: Any) -> list[np.ndarray]:
    return [np.asarray(leaf, np.float32) for leaf in jax.tree.leaves(tree)]


def main() -> None:
    arrays = {
        f"{'/'.join(map(str, name))}/{i}": array
        for name in names()
        for i, array in enumerate(compute(*name))
    }
    np.savez_compressed(FILE, **arrays)


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    main()
