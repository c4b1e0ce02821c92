"""Rotary positions, with the scalings of Llama 3 and Gemma 3."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from radazo_llm.models.model import positive

LLAMA_3 = ("factor", "low_freq_factor", "high_freq_factor")


def read(v: Mapping[str, Any], slides: bool) -> tuple[float, ...]:
    """θ and the numbers of a scaling, as old and new configurations have them."""
    local = slides and "rope_local_base_freq" in v
    theta = "rope_local_base_freq" if local else "rope_theta"
    found = {"rope_theta": v[theta]} | ({} if local else v["rope_scaling"] or {})
    if v.get("partial_rotary_factor") is not None:
        found["partial_rotary_factor"] = v["partial_rotary_factor"]
    new = v["rope_parameters"] or {}
    kind = "sliding_attention" if slides else "full_attention"
    if kind in new or "full_attention" in new:
        new = new.get(kind, {})
        if not isinstance(new, dict):
            raise ValueError(f"{kind} must be an object; got {new!r:.80}.")
    found |= new
    scaling = found.get("rope_type", found.get("type", "default"))
    numbers = {
        "default": (),
        "linear": LLAMA_3[:1],
        "llama3": (*LLAMA_3, "original_max_position_embeddings"),
    }
    part = found.get("partial_rotary_factor", 1)
    if part != 1:
        raise ValueError(
            f"partial_rotary_factor must be 1, of the whole head; got {part!r:.80}. "
            "Use another model."
        )
    if not isinstance(scaling, str) or scaling not in numbers:
        raise ValueError(
            f"rope_type must be one of {', '.join(numbers)}; got {scaling!r:.80}."
        )
    return tuple(positive(found, name) for name in ("rope_theta", *numbers[scaling]))


def frequencies(rope: Sequence[tuple[float, ...]], width: int) -> np.ndarray:
    """The rotation per position of pairs of coordinates, float32 [layers, width / 2].

    Args:
      rope: The results of `read`, by layer; empty if it rotates nothing.
      width: The width of a head.
    """
    exponents = np.arange(0, width, 2, dtype=np.float64) / width
    rows = []
    for numbers in rope:
        theta, *scaling = numbers or (math.inf,)
        turns = theta**-exponents if numbers else np.zeros_like(exponents)
        if len(scaling) == 1:
            turns = turns / scaling[0]
        elif scaling:  # Slow ones are made slower, and some lie between.
            factor, low, high, length = scaling
            rounds = length * turns / (2 * math.pi)
            part = np.clip((rounds - low) / (high - low), 0, 1)
            turns = part * turns + (1 - part) * turns / factor
        rows.append(turns)
    return np.array(rows, np.float32)


def rotated(x: jax.Array, positions: jax.Array, turns: jax.Array) -> jax.Array:
    """Heads [B, T, heads, width], each pair of coordinates turned by its angle."""
    rows = positions.reshape(-1, positions.shape[-1])  # Of all rows, or of each.
    angles = rows.astype(jnp.float32)[..., None] * turns[None, None]
    angles = angles[:, :, None]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
    return turned.astype(x.dtype)
