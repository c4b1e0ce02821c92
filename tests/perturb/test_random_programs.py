"""Programs that Hypothesis puts together from operations on a leaf."""

import functools
import math

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compare import LAWS, assert_equal, both, sample
from jax import lax
from tables import jit
from zoo import normal


def _permute(draw, shape):
    order = tuple(draw(st.permutations(range(len(shape)))))
    return lambda w: jnp.transpose(w, order)


def _merge(draw, shape):
    axis = draw(st.integers(0, max(len(shape) - 2, 0)))
    new = (*shape[:axis], math.prod(shape[axis : axis + 2]), *shape[axis + 2 :])
    return lambda w: w.reshape(new)


def _split(draw, shape):
    axis = draw(st.integers(0, len(shape) - 1))
    size = shape[axis]
    first = draw(st.sampled_from([n for n in range(1, size + 1) if size % n == 0]))
    new = (*shape[:axis], first, size // first, *shape[axis + 1 :])
    return lambda w: w.reshape(new)


def _slice(draw, shape):
    kept = []
    for size in shape:
        start = draw(st.integers(0, size - 1))
        stop = draw(st.integers(start + 1, size))
        kept.append(slice(start, stop, draw(st.integers(1, 2))))
    return lambda w: w[tuple(kept)]


def _flip(draw, shape):
    axes = draw(st.sets(st.integers(0, len(shape) - 1)))
    return lambda w: jnp.flip(w, tuple(axes))


def _expand(draw, shape):
    axis = draw(st.integers(0, len(shape)))
    return lambda w: jnp.expand_dims(w, axis)


def _squeeze(draw, shape):
    del draw
    if math.prod(shape) == 1:
        return lambda w: w
    return jnp.squeeze


def _take(draw, shape):
    axis = draw(st.integers(0, len(shape) - 1))
    mode = draw(st.sampled_from(["clip", "fill", "wrap", None]))
    size = shape[axis]
    indices = st.lists(st.integers(-size - 1, size + 1), min_size=1, max_size=3)
    ids = np.array(draw(indices), np.int32)
    ids = ids if mode else np.clip(ids, -size, size - 1)
    return lambda w: jnp.nan_to_num(jnp.take(w, jnp.asarray(ids), axis, mode=mode))


def _gather(draw, shape):
    axis = draw(st.integers(0, len(shape) - 1))
    mode = draw(st.sampled_from(["clip", "fill", "promise_in_bounds"]))
    size, width = shape[axis], draw(st.integers(1, shape[axis]))
    low, high = (0, size - width) if mode[0] == "p" else (-2 * size, 2 * size)
    ids = draw(st.lists(st.integers(low, high), min_size=1, max_size=3))
    numbers = lax.GatherDimensionNumbers(
        offset_dims=tuple(range(1, len(shape) + 1)),
        collapsed_slice_dims=(),
        start_index_map=(axis,),
    )
    sizes = (*shape[:axis], width, *shape[axis + 1 :])
    fill = draw(st.sampled_from([0.0, -2.5]))
    ids = np.array(ids, np.int32)[:, None]
    return lambda w: lax.gather(
        w, jnp.asarray(ids), numbers, sizes, mode=mode, fill_value=fill
    )


def _dynamic_slice(draw, shape):
    sizes = [draw(st.integers(1, size)) for size in shape]
    starts = [draw(st.integers(-2 * size - 1, 2 * size)) for size in shape]
    wraps = draw(st.booleans())
    return lambda w: lax.dynamic_slice(
        w, [jnp.int32(i) for i in starts], sizes, allow_negative_indices=wraps
    )


def _product(draw, shape):
    axis, left = draw(st.integers(0, len(shape) - 1)), draw(st.booleans())
    other = normal(2, shape[axis])
    if left:
        return lambda w: jnp.tensordot(other, w, ((1,), (axis,)))
    return lambda w: jnp.tensordot(w, other, ((axis,), (1,)))


def _batched_product(draw, shape):
    axis, batch = draw(st.integers(0, len(shape) - 1)), draw(st.integers(0, 4))
    batch %= len(shape)
    if batch == axis:
        return lambda w: w
    letters = "abcdefgh"[: len(shape)]
    out = letters.replace(letters[axis], "")
    other = normal(shape[batch], 2, shape[axis])
    spec = f"{letters[batch]}z{letters[axis]},{letters}->z{out}"
    return lambda w: jnp.einsum(spec, other, w)


def _scan(draw, shape):
    del shape
    reverse = draw(st.booleans())

    def scan(w):
        zeros = jnp.zeros(w.shape[1:])
        step = lambda c, x: (c + x, 2 * x)  # noqa: E731
        total, parts = lax.scan(step, zeros, w, reverse=reverse)
        return parts + total[None]

    return scan


def _sine(draw, shape):
    del draw, shape
    return jnp.sin


OPERATIONS = [
    _permute,
    _merge,
    _split,
    _slice,
    _flip,
    _expand,
    _squeeze,
    _take,
    _gather,
    _dynamic_slice,
    _product,
    _batched_product,
    _scan,
    _sine,
]


@hypothesis.settings(max_examples=15)
@hypothesis.given(data=st.data())
@pytest.mark.parametrize("law", ["hashed", "low_rank"])
def test_random_programs(law, data):
    shape = tuple(data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)))
    # A leaf before it, so that its positions do not start at 0.
    params, steps = {"a": normal(3), "w": normal(*shape)}, []
    for _ in range(data.draw(st.integers(1, 5))):
        if not shape or len(shape) > 6:
            break
        steps.append(data.draw(st.sampled_from(OPERATIONS))(data.draw, shape))
        shape = jax.eval_shape(
            steps[-1], jax.ShapeDtypeStruct(shape, jnp.float32)
        ).shape

    def fun(params):
        return functools.reduce(lambda w, step: step(w), steps, params["w"])

    law = LAWS[law]
    perturbed, definition = both(fun, law, params)
    got, expected = jit(lambda u: (perturbed(u), definition(u)))(sample(law, params))
    assert_equal(got, expected, 2e-5)
