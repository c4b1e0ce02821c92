"""GPUs that programs can be compiled for, by their published properties.

The compiler takes a description of a GPU from the driver or, without one, from a text.
It reads the properties below from it. They decide how kernels are divided, and which
instructions there are; the memory that a program holds hardly depends on them.

The compiler needs no GPU, but JAX's plugin and NVIDIA's assembler (the extra
``gpu-aot``, in an environment of its own: with the plugin installed, JAX looks for a
GPU and for cuDNN at every start, and reports what it does not find).

The sources are NVIDIA's data sheets (multiprocessors, clock, memory, bandwidth, cache)
and the table of compute capabilities in its CUDA C++ programming guide.
"""

import importlib.metadata
from typing import Any, NamedTuple

import click
import jax
from jax.experimental import topologies

_KIB, _MIB, _GIB = 2**10, 2**20, 2**30


class Gpu(NamedTuple):
    """Properties of a GPU.

    Attributes:
      name: The name that records show.
      capability: The compute capability, major and minor.
      multiprocessors: Number of streaming multiprocessors.
      clock_ghz: The boost clock.
      memory: Bytes of main memory.
      bandwidth: Bytes per second from main memory.
      cache: Bytes of the L2 cache.
      threads: The most threads of a multiprocessor.
      shared_memory: Bytes of shared memory of a multiprocessor. A block can have all
        but 1 KiB.
    """

    name: str
    capability: tuple[int, int]
    multiprocessors: int
    clock_ghz: float
    memory: int
    bandwidth: int
    cache: int
    threads: int
    shared_memory: int

    def target_config(self) -> str:
        """The text from which `jax.experimental.topologies` makes a topology."""
        major, minor = self.capability
        return f"""
        gpu_device_info {{
          cuda_compute_capability {{ major: {major} minor: {minor} }}
          core_count: {self.multiprocessors}
          fpus_per_core: 128
          clock_rate_ghz: {self.clock_ghz}
          device_memory_size: {self.memory}
          memory_bandwidth: {self.bandwidth}
          l2_cache_size: {self.cache}
          threads_per_warp: 32
          threads_per_block_limit: 1024
          threads_per_core_limit: {self.threads}
          registers_per_block_limit: 65536
          registers_per_core_limit: 65536
          shared_memory_per_block: {48 * _KIB}
          shared_memory_per_block_optin: {self.shared_memory - _KIB}
          shared_memory_per_core: {self.shared_memory}
          block_dim_limit_x: {2**31 - 1}
          block_dim_limit_y: {2**16 - 1}
          block_dim_limit_z: {2**16 - 1}
        }}
        platform_name: "CUDA"
        dnn_version_info {{ major: 9 }}
        device_description_str: "{self.name}"
        """


GPUS = {
    "h100": Gpu(
        name="NVIDIA H100 80 GB",
        capability=(9, 0),
        multiprocessors=132,
        clock_ghz=1.98,
        memory=80 * _GIB,
        bandwidth=3_350_000_000_000,
        cache=50 * _MIB,
        threads=2048,
        shared_memory=228 * _KIB,
    ),
    "rtx4090": Gpu(
        name="NVIDIA GeForce RTX 4090",
        capability=(8, 9),
        multiprocessors=128,
        clock_ghz=2.52,
        memory=24 * _GIB,
        bandwidth=1_008_000_000_000,
        cache=72 * _MIB,
        threads=1536,
        shared_memory=100 * _KIB,
    ),
}

# Products are cuBLAS's.
OPTIONS = {"xla_gpu_enable_triton_gemm": False}
_PLUGIN, _ASSEMBLER = "jax-cuda13-plugin", "nvidia-cuda-nvcc>=13,<14"


def devices(target: str, shape: str = "1x1x1") -> list[Any]:
    """The devices of a target, which need not exist.

    Args:
      target: A name in `GPUS`.
      shape: Numbers of slices, of hosts per slice, and of GPUs per host.

    Raises:
      click.ClickException: If JAX's plugin is missing or of another version.
    """
    _check_plugin()
    jax.config.update("jax_platforms", "cpu")
    gpu = GPUS[target]
    return topologies.get_topology_desc(
        platform="cuda", target_config=gpu.target_config(), topology=shape
    ).devices


def _check_plugin() -> None:
    try:
        version = importlib.metadata.version(_PLUGIN)
    except importlib.metadata.PackageNotFoundError:
        version = "none"
    if version != jax.__version__:
        raise click.ClickException(
            f"{_PLUGIN} must be of JAX's version, {jax.__version__}; got {version}. "
            f'Run: pip install "{_PLUGIN}=={jax.__version__}" "{_ASSEMBLER}"'
        )
