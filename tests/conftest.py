"""Makes the test process stricter than a user's."""

import gc
import os
import pathlib
import sys

os.environ["MPLBACKEND"] = "Agg"

import jax
import pytest

# Modules live to the end, so that searching them for garbage is lost time.
gc.disable()

# Eight devices, so that what is spread over devices is tested wherever tests run.
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# For programs that run once. Without optimization, LLVM makes one instruction of a
# product and a sum in some places only, so equal expressions have other bits. AVX has
# no such instruction. XLA ends the process at a flag that it does not know, and the
# last two are not documented: one halves the time of a compilation, and the other saves
# a quarter of the rest, since a small program is not split among threads.
QUICK = "--xla_backend_optimization_level=0 --xla_cpu_max_isa=AVX"
if jax.__version_info__ < (0, 11):
    QUICK += (
        " --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
    )


def pytest_collection_finish():
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
    gc.enable()


def pytest_runtest_teardown(item, nextitem):
    """Forgets figures, and compiled programs between modules if there are many.

    Linux allows a process 65,530 mappings and a program takes dozens of them, so XLA
    ends the process after about 2,000 programs.
    """
    if "matplotlib.pyplot" in sys.modules:
        sys.modules["matplotlib.pyplot"].close("all")
    if nextitem is not None and nextitem.path == item.path:
        return
    maps = pathlib.Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > 20_000:
        jax.clear_caches()
        gc.collect()


@pytest.fixture
def as_flax_needs_it():
    """Flax adds a bias to a batch, and counts in uint32."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture(scope="session")
def compiled_once(tmp_path_factory):
    """Processes that are started compile equal programs once.

    This process has read its settings before.
    """
    folder = tmp_path_factory.mktemp("compiled")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_COMPILATION_CACHE_DIR", str(folder))
        patch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
        yield


def pytest_configure(config):
    """The fast run compiles with little optimization, the slow one as users do."""
    if config.getoption("markexpr") == "not slow":
        os.environ.setdefault("XLA_FLAGS", QUICK)
