"""Versions, devices and a self-test: `python -m radazo_jax`.

The self-test takes a few seconds. It compares with closed forms what the library
computes on the devices of this machine, and ends with status 1 if one is missed.
"""

import platform
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import radazo_jax as zo

_PACKAGES = ("jax", "jaxlib", "optax", "numpy", "flax", "matplotlib", "tqdm")
_SCALES = np.array([1.0, 2.0, 3.0, 4.0], np.float32)


def _bowl(x: jax.Array) -> jax.Array:
    return jnp.sum(_SCALES * (x - 1) ** 2)


def _gradient() -> None:
    """Central differences of all coordinates are the gradient of a quadratic."""
    estimator = zo.central_difference(
        zo.coordinate(replace=False), num_directions=4, smoothing=0.25
    )
    _, found = jax.jit(zo.value_and_grad(_bowl, estimator))(0, jnp.zeros(4))
    np.testing.assert_allclose(found, -2 * _SCALES, rtol=1e-5)


def _perturbation() -> None:
    """A function is perturbed as its parameters would be."""
    params, direction = jnp.ones((8, 4)), zo.low_rank()
    u = direction.sample(jax.random.key(0), params)
    dense = params + 0.5 * direction.materialize(u, params)
    x = jnp.arange(24, dtype=jnp.float32).reshape(3, 8)
    found = jax.jit(zo.perturb(lambda w: x @ w))(params, u, 0.5)
    np.testing.assert_allclose(found, x @ dense, rtol=1e-4)


def _run() -> None:
    """A compiled run reaches the minimum without a learning rate."""
    result = zo.minimize(_bowl, jnp.zeros(4), num_steps=300, progress=False)
    np.testing.assert_allclose(result.params, np.ones(4), atol=1e-2)


def _journal() -> None:
    """A run is rebuilt from its journal to the last bit."""
    optimizer, estimator = zo.radazo(1e-2), zo.forward_difference()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.jsonl"
        result = zo.minimize_black_box(
            lambda x: float(np.sum(_SCALES * (x - 1) ** 2)),
            np.zeros(4, np.float32),
            optimizer,
            estimator,
            20,
            journal=path,
            progress=False,
        )
        state = zo.replay(path, np.zeros(4, np.float32), optimizer, estimator)
    np.testing.assert_array_equal(state.params, result.params)


def _devices() -> None:
    """All devices compute the gradient that one does."""
    mesh = jax.make_mesh((jax.device_count(),), ("perturbation",))
    found = []
    estimator = zo.forward_difference(num_directions=7)
    for evaluator in (zo.vectorized(), zo.sharded("perturbation")):
        with jax.set_mesh(mesh):
            estimate = jax.jit(zo.value_and_grad(_bowl, estimator, evaluator))
            found.append(estimate(jax.random.key(0), jnp.zeros(4))[1])
    # One rounding of a value, divided by the distance of a difference, is about 1e-3.
    np.testing.assert_allclose(found[1], found[0], rtol=0, atol=2e-2)


_TESTS = (_gradient, _perturbation, _run, _journal, _devices)


def main() -> int:
    """Prints the report; returns the number of tests that failed."""
    print(f"radazo_jax {zo.__version__}, Python {platform.python_version()}")
    for name in _PACKAGES:
        try:
            print(f"  {name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            print(f"  {name} is not installed")
    for device in jax.devices():
        print(f"  device {device.id}: {device.platform} {device.device_kind}")
    failed = 0
    for test in _TESTS:
        start = time.perf_counter()
        try:
            test()
        except Exception as error:
            failed += 1
            said = f"FAILED: {type(error).__name__}: {error}"
        else:
            said = f"ok, {time.perf_counter() - start:.1f} s"
        print(f"  {test.__doc__} {said}", flush=True)
    print(f"{failed} of {len(_TESTS)} tests failed" if failed else "all tests passed")
    return failed


if __name__ == "__main__":
    sys.exit(main() > 0)
