"""Signs of antithetic pairs, five pairs to a byte: 1.6 bits per pair."""

from typing import Any

import numpy as np

_PAIRS = 5  # 3⁵ = 243 combinations of signs.
_POWERS = 3 ** np.arange(_PAIRS)


def signs_of(values: np.ndarray) -> np.ndarray:
    """Compares the two members of each pair: 1 for the higher value, −1 for the lower.

    Equal values are 0. If a value is not finite, it is NaN, and the other one is 0.

    Args:
      values: The values of 2k members, [2k]; members 2i and 2i + 1 are a pair.

    Returns:
      The signs, of the shape and dtype of the values.
    """
    pairs = values.reshape(-1, 2)
    finite = np.isfinite(pairs)
    known = finite.all(1)
    first, second = np.where(finite, pairs, 0).T
    signs = np.where(known, np.sign(first - second), 0)
    # Without the sign of a zero.
    found = np.stack([signs, -signs], 1) + 0.0
    return np.where(finite, found, np.nan).astype(values.dtype).reshape(values.shape)


def pack(values: np.ndarray) -> np.ndarray | None:
    """Packs the signs of steps, if the values are signs of pairs to the last bit.

    Args:
      values: The values of steps, [steps, n].

    Returns:
      Bytes, uint8 [steps, ⌈n / 10⌉]; `None` if the values are something else.
    """
    steps, n = values.shape
    if n % 2 or not values.size:
        return None
    # Anything but 0, 1 and 2 is found by unpacking.
    with np.errstate(invalid="ignore"):
        digits = (values[:, ::2] + 1).astype(np.uint8)
    padded = np.pad(digits, ((0, 0), (0, -digits.shape[1] % _PAIRS)))
    if (padded > 2).any():
        return None
    packed = (padded.reshape(steps, -1, _PAIRS) @ _POWERS).astype(np.uint8)
    same = unpack(packed, n, values.dtype).tobytes() == values.tobytes()
    return packed if same else None


def unpack(packed: np.ndarray, n: int, dtype: Any = np.float32) -> np.ndarray:
    """The inverse of `pack`: [steps, n].

    Args:
      packed: Bytes, uint8 [steps, ⌈n / 10⌉].
      n: The number of members.
      dtype: The dtype of the signs.
    """
    digits = packed[:, :, None] // _POWERS % 3
    first = digits.reshape(len(packed), -1)[:, : n // 2].astype(dtype) - 1
    found: np.ndarray = np.stack([first, -first], 2) + np.zeros((), dtype)
    return found.reshape(len(packed), n)


def size(n: int) -> int:
    """Returns the number of bytes of a step."""
    return -(-n // (2 * _PAIRS))
