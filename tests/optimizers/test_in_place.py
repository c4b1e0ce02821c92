"""A chain in place computes what `optax.chain` does, or is refused."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import radazo_jax as zo
from tests.helpers.tables import every, jit

PARAMS = {"w": jnp.ones((4, 3)), "b": jnp.full(3, 0.5), "s": jnp.float32(1.0)}
FIRST = zo.scale_by_replayed_radazo(4, 0.3)
RATE = optax.scale_by_learning_rate(optax.linear_schedule(0.25, 0.0, 8))

ALIKE = {
    "a schedule": RATE,
    "a warm-up": optax.scale_by_learning_rate(optax.linear_schedule(0.0, 0.1, 4)),
    "weight decay": optax.add_decayed_weights(0.5),
    "a mask by shape": optax.add_decayed_weights(
        0.5, mask=lambda tree: jax.tree.map(lambda x: jnp.ndim(x) > 1, tree)
    ),
    "clipping of elements": optax.clip(0.1),
    "signs": optax.scale_by_sign(),
    "rounding": zo.stochastic_rounding(1),
}
OTHERS = {
    "add_noise": optax.add_noise(1.0, 0.0, jax.random.key(3)),
    "clip_by_global_norm": optax.clip_by_global_norm(1e9),
    "clip_by_block_rms": optax.clip_by_block_rms(1.0),
    "centralize": optax.centralize(),
    "scale_by_trust_ratio": optax.scale_by_trust_ratio(),
    "apply_if_finite": optax.apply_if_finite(optax.scale(-1.0), 3),
    "masked": optax.add_decayed_weights(0.5, mask={"w": True, "b": False, "s": False}),
    "chain": optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.scale_by_schedule(optax.linear_schedule(0.0, 1.0, 5)),
    ),
    "keep_params_in": zo.keep_params_in(
        lambda p: optax.projections.projection_l2_ball(p, 100.0)
    ),
}


def after(optimizer, params=PARAMS, steps=3):
    def loss(p):
        return sum(jnp.sum((x.astype(jnp.float32) - 3) ** 2) for x in p.values())

    init, step = zo.solver(
        loss, optimizer, zo.central_difference(zo.low_rank(), 2, 0.5)
    )
    state, step = init(params, 0), jit(step)
    for _ in range(steps):
        state, _ = step(state)
    return state


@pytest.mark.parametrize("kind", every(ALIKE, "weight decay", "rounding"))
def test_what_works_element_by_element_is_chained(kind):
    ends = [
        after(chain(FIRST, ALIKE[kind], RATE))
        for chain in (optax.chain, zo.chain_in_place)
    ]
    chex.assert_trees_all_close(ends[1].params, ends[0].params, rtol=1e-5)
    counts = [optax.tree.get_all_with_path(end, "count") for end in ends]
    chex.assert_trees_all_equal(*counts)


@pytest.mark.parametrize("name", OTHERS)
def test_what_does_not_is_refused_by_its_name(name):
    """Also after another one, and for parameters that are shapes."""
    chain = zo.chain_in_place(FIRST, *([RATE] * (name == "masked")), OTHERS[name])
    inits = [chain.init, lambda params: jax.eval_shape(chain.init, params)]
    for init in inits if name in ("add_noise", "masked") else inits[:1]:
        # Optax adds arrays of several dtypes.
        with (
            jax.numpy_dtype_promotion("standard"),
            pytest.raises(
                ValueError, match=f"element by element; got {name},"
            ) as error,
        ):
            init(PARAMS)
        assert "\n" not in str(error.value)


def test_what_cannot_be_compared_is_chained():
    """A transformation whose rate is traced, and one that takes unknown arguments."""

    def size(rate):
        chain = zo.chain_in_place(FIRST, optax.scale(rate))
        return chain.init(PARAMS)[0].count + 1

    assert jax.jit(size)(0.1) == 1

    def update(updates, state, params=None, *, temperature, **extra):
        return updates, state

    needs = optax.GradientTransformationExtraArgs(optax.init_empty_state, update)
    assert len(zo.chain_in_place(FIRST, needs).init(PARAMS)) == 2


@pytest.mark.parametrize(
    ("chain", "first"),
    [
        (zo.chain_in_place, FIRST),
        (optax.chain, FIRST),
        (optax.chain, zo.zo_signsgd(1.0)),
    ],
    ids=["in place", "as trees", "signs"],
)
def test_small_rates_reach_the_rounding_of_float16(chain, first):
    """Each element moves by the rate in the mean: 2e-8 is lost in float16."""
    size, rate, start = 2**20, 2e-8, 1e-3
    params = {"w": jnp.full((2**10, 2**10), start, jnp.float16)}
    optimizer = chain(
        first, optax.scale_by_sign(), optax.scale(-rate), zo.stochastic_rounding(1)
    )

    def loss(p):
        return jnp.sum(p["w"].astype(jnp.float32))

    init, step = zo.solver(loss, optimizer, zo.forward_difference(zo.rademacher(), 1))
    state, _ = jit(step)(init(params, 0))
    moved = np.float64(state.params["w"]) - np.float64(params["w"])
    # Of each sign there are half; a share of rate / spacing moves by a spacing.
    spacing = 2.0**-20
    error = np.sqrt(rate * spacing / size)
    assert abs(np.abs(moved).mean() - rate) < 5 * error
    assert abs(moved.mean()) < 5 * error
    assert set(np.unique(np.abs(moved))) == {0.0, spacing}
