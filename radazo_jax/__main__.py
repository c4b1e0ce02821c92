"""Versions and devices, for a report of a problem: `python -m radazo_jax`."""

import argparse
import platform
from importlib import metadata

import jax

import radazo_jax as zo

_PACKAGES = ("jax", "jaxlib", "optax", "numpy", "flax", "matplotlib", "tqdm")


def main() -> None:
    """Prints the versions of what is installed, and the devices of this machine."""
    parser = argparse.ArgumentParser(prog="python -m radazo_jax", description=__doc__)
    parser.parse_args()
    print(f"radazo_jax {zo.__version__}, Python {platform.python_version()}")
    for name in _PACKAGES:
        try:
            print(f"  {name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            print(f"  {name} is not installed")
    for device in jax.devices():
        print(f"  device {device.id}: {device.platform} {device.device_kind}")


if __name__ == "__main__":
    main()
