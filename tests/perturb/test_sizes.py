"""Arrays that a perturbed function never forms, and never draws."""

import functools

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import pytest
from jax import lax

import radazo_jax as zo
from radazo_jax._src.directions import generator
from tests.helpers.compare import Hashed
from tests.helpers.jaxprs import computed_sizes
from tests.helpers.tables import DISTRIBUTIONS, slow
from tests.perturb.zoo import normal


def of_nnx(make, *args):
    graph, params = nnx.split(make(rngs=nnx.Rngs(0)))
    return lambda params, *args: nnx.merge(graph, params)(*args), params, *args


def attend(params, h):
    return h @ params.T


def scan_stack(params, x):
    return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params)[0]


WIDE, TALL, X = normal(20, 30), normal(30, 20), normal(2, 20)
IDS = jnp.array([3, 4])
# The largest leaf of each is the matrix; all else in it is much smaller.
NEVER_FORMED = {
    "dense": (lambda w, x: x @ w, WIDE, X),
    "nnx.Linear": (functools.partial(nnx.Linear, 20, 30), X),
    "nnx.LinearGeneral out": (functools.partial(nnx.LinearGeneral, 20, (5, 6)), X),
    "nnx.LinearGeneral in": (
        functools.partial(nnx.LinearGeneral, (5, 6), 20, axis=(-2, -1)),
        normal(2, 5, 6),
    ),
    "nnx.Embed": (functools.partial(nnx.Embed, 30, 20), IDS),
    "look-up": (lambda w, i: w[i], TALL, jnp.array([3, -1])),
    "tied": (attend, TALL, X),
    "tied, looked up too": (lambda w, i: w[i] @ w.T, TALL, IDS),
    "einsum, weight right": (
        lambda w, x: jnp.einsum("bti,io->bto", x, w),
        WIDE,
        normal(1, 2, 20),
    ),
    "einsum, weight left": (lambda w, x: jnp.einsum("oi,bi->ob", w, x), TALL, X),
    "bfloat16": (
        lambda w, x: x @ w.astype(jnp.float32),
        normal(20, 30, dtype=jnp.bfloat16),
        X,
    ),
    "narrow compute": (
        lambda w, x: x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16),
        WIDE,
        X,
    ),
    "remat": (jax.checkpoint(lambda w, x: jnp.tanh(x @ w)), WIDE, X),
}


@pytest.mark.parametrize("name", NEVER_FORMED)
@pytest.mark.parametrize("num", [None, slow(2)], ids=["one", "vmap"])
def test_low_rank_never_forms_the_matrix(name, num):
    distribution = zo.low_rank(2)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        program = NEVER_FORMED[name]
        fun, params, *args = of_nnx(*program) if "nnx" in name else program
        full = max(leaf.size for leaf in jax.tree.leaves(params))
        sizes = computed_sizes(fun, distribution, params, *args, num=num, as_used=True)
    assert max(sizes)[0] < full, max(sizes)


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_a_scanned_stack_is_perturbed_slice_by_slice(distribution):
    # More elements than are drawn ahead of everything.
    params, x = normal(7, 100, 100), normal(2, 100)
    sizes = computed_sizes(scan_stack, DISTRIBUTIONS[distribution], params, x)
    # Of the factors of low rank, all may be drawn ahead; of a dense draw, no more than
    # the two words of each number of one matrix.
    bound = 7 * 100 * 2 if distribution.startswith("low_rank") else 2 * 100 * 100
    assert max(sizes)[0] <= bound, max(sizes)


def test_a_scanned_stack_of_low_rank_forms_no_slice():
    params, x = normal(3, 20, 20), normal(2, 20)
    sizes = computed_sizes(scan_stack, zo.low_rank(2), params, x)
    assert max(sizes)[0] < 400, max(sizes)


LOOK_UPS = {
    "default": lambda w, i: w[i],
    "clip": lambda w, i: w.at[i].get(mode="clip"),
    "fill": lambda w, i: w.at[i].get(mode="fill"),
    "fill with 0": lambda w, i: w.at[i].get(mode="fill", fill_value=0.0),
    "take": lambda w, i: jnp.take(w, i, axis=0),
    "transposed": lambda w, i: w.T[:, i],
    "cast": lambda w, i: w.astype(jnp.bfloat16)[i],
    "vmap": lambda w, i: jax.vmap(lambda i: w[i])(i),
    "map": lambda w, i: lax.map(lambda i: w[i], i),
    "cond": lambda w, i: lax.cond(i[0] > 0, lambda: w[i], lambda: w[i + 1]),
}


# By position, and by factors; the others draw in the same places.
@pytest.mark.parametrize(
    ("distribution", "name"),
    [
        *((distribution, "default") for distribution in ("sphere", "rademacher")),
        *(("gaussian", name) for name in LOOK_UPS),
        *(("low_rank", name) for name in LOOK_UPS),
    ],
)
def test_a_look_up_never_draws_the_table(distribution, name):
    # More elements than are drawn ahead of everything.
    params, ids = normal(300, 300), jnp.array([3, -4])
    sizes = computed_sizes(LOOK_UPS[name], DISTRIBUTIONS[distribution], params, ids)
    assert max(sizes)[0] <= 2 * 2 * 300, max(sizes)


class Counted(Hashed):
    """Counts how often it is traced."""

    draws = 0

    def draw(self, key, number, at):
        Counted.draws += 1
        return super().draw(key, number, at)


def unrolled(params, x, steps):
    """A network that reads vectors, matrices and elements at each step."""

    @jax.jit
    def gated(x, bias):
        return jnp.where(x > 0, x + bias, 0.0)

    for i in range(steps):
        x = jnp.tanh(params["w"].T @ x + params["b"][None, :][0])
        x = gated(x, params["c"].reshape(-1)) * params["table"][i]
        x = x.astype(jnp.float32) * params["half"].astype(jnp.float32)
        x = lax.fori_loop(0, 2, lambda _, x: x * params["b"], x)
    return x


def unrolled_params():
    return {
        "w": normal(6, 6),
        "b": normal(6),
        "c": normal(2, 3),
        "table": normal(9, 6),
        "half": normal(6, dtype=jnp.bfloat16),
    }


def test_small_leaves_are_drawn_once_however_often_they_are_read():
    def draws(steps):
        Counted.draws = 0
        fun = functools.partial(unrolled, steps=steps)
        computed_sizes(fun, Counted(), unrolled_params(), normal(6))
        return Counted.draws

    draws(1)  # The first draw of a distribution is checked by two more.
    assert draws(9) == draws(1) > 0


def test_an_estimate_of_low_rank_draws_as_much_however_often_leaves_are_read(
    monkeypatch,
):
    """Finding the matrices of the function, which traces it once more, too."""
    calls, normal_of = [], generator.fast_normal

    def counted(*args):
        calls.append(args)
        return normal_of(*args)

    monkeypatch.setattr(generator, "fast_normal", counted)
    estimator = zo.forward_difference(zo.low_rank())

    def draws(steps):
        calls.clear()
        fun = zo.value_and_grad(
            lambda p, x: unrolled(p, x, steps).sum(),
            estimator,
            evaluator=zo.vectorized(1),
        )
        jax.make_jaxpr(fun)(jax.random.key(0), unrolled_params(), normal(6))
        return len(calls)

    assert draws(9) == draws(1) > 0
