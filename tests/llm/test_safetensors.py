"""The files of safetensors that are written one tensor after another.

The authority is the library.
"""

import tracemalloc

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from examples.apps.llm import safetensors_file
from examples.apps.llm.safetensors_file import Tensor, of_arrays

MATRIX = np.arange(12).reshape(3, 4)
CASES = {
    "names": {"b": MATRIX, "a": MATRIX.T, "é": MATRIX[1:, 1:]},
    "shapes": {"scalar": np.array(3), "empty": np.zeros((2, 0)), "line": MATRIX[0]},
    "none": {},
}


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("case", CASES)
def test_the_file_is_what_the_library_writes(case, dtype, tmp_path):
    arrays = {name: x.astype(jnp.dtype(dtype)) for name, x in CASES[case].items()}
    contiguous = {name: np.array(x, order="C") for name, x in arrays.items()}
    save_file(contiguous, tmp_path / "expected", metadata={"format": "pt"})
    safetensors_file.write(tmp_path / "found", of_arrays(arrays))
    found, expected = (tmp_path / name for name in ("found", "expected"))
    assert found.read_bytes() == expected.read_bytes()
    assert {path.name for path in tmp_path.iterdir()} == {"found", "expected"}


def test_the_library_reads_several_data_types(tmp_path):
    arrays = {
        "a": MATRIX.astype(np.float16),
        "b": MATRIX.astype(np.float32),
        "c": MATRIX[:, :1].astype(jnp.bfloat16),
    }
    safetensors_file.write(tmp_path / "file", of_arrays(arrays))
    found = load_file(tmp_path / "file")
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(found[name], array, strict=True)


def test_one_tensor_is_in_memory_at_a_time(tmp_path):
    shape, dtype = (256, 1024), np.dtype("float32")
    size = 2**20  # Bytes of a tensor.

    def read():
        return np.ones(shape[::-1], dtype).T

    tensors = {str(i): Tensor(shape, dtype, read) for i in range(8)}
    tracemalloc.start()
    try:
        safetensors_file.write(tmp_path / "file", tensors)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (tmp_path / "file").stat().st_size > 8 * size
    assert peak < 2.1 * size  # A tensor, and its values in the order of the file.
