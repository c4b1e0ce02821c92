"""The page on training stacks: its blocks run, and go down as our own loop does."""

import os
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import radazo_jax as zo
import radazo_jax.nnx as zo_nnx

os.environ.setdefault("KERAS_BACKEND", "jax")

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "stacks.md"
# What a section imports that may not be there.
NEEDS = {
    "Equinox": "equinox",
    "Haiku": "haiku",
    "Keras": "keras",
    "Tunix": "tunix",
    "Qwix": "qwix",
}


def blocks():
    """The code of each section, and where it starts, for tracebacks."""
    text, found, section = PAGE.read_text(encoding="utf-8"), {}, ""
    for match in re.finditer(
        r"^## ([^\n]+)$|^```python\n(.*?)^```$", text, re.M | re.S
    ):
        if match[1]:
            section = match[1]
        else:
            line = text[: match.start(2)].count("\n")
            found[section] = "\n" * line + match[2]
    return found


BLOCKS = blocks()
DATA = BLOCKS.pop("")


@pytest.fixture(autouse=True)
def as_a_user_has_it():
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


def executed(section):
    if section in NEEDS:
        pytest.importorskip(NEEDS[section], reason='needs "radazo-jax[stacks]"')
    names = {"__name__": "stacks"}
    for source in (DATA, BLOCKS[section]):
        exec(compile(source, str(PAGE), "exec"), names)
    return names


def test_all_stacks_are_in_the_table():
    text = PAGE.read_text(encoding="utf-8")
    listed = re.findall(r"^\| \[(.+?)\]\(#", text, re.M)
    assert listed == list(BLOCKS)


# Third parties, at import or where they read their own variables with NumPy 2.4.
pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::UserWarning"
)


@pytest.mark.slow
@pytest.mark.parametrize("section", BLOCKS)
def test_the_block_of_a_stack_goes_down(section):
    losses = np.asarray(executed(section)["losses"], np.float64)
    assert np.isfinite(losses).all()
    assert losses[-1] < 0.5 * losses[0], losses[[0, -1]]


@pytest.mark.slow
def test_tunix_takes_the_steps_of_a_loop_of_our_own():
    names = executed("Tunix")
    model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, zo.radazo(1e-2), wrt=nnx.Param)
    estimate = zo_nnx.value_and_grad(names["loss_fn"], names["estimator"])

    @nnx.jit
    def step(i, model, optimizer):
        key = jax.random.fold_in(jax.random.key(0), i)
        _, gradient = estimate(key, model, names["x"], names["y"])
        optimizer.update(model, gradient)

    for i in range(100):
        step(jnp.uint32(i), model, optimizer)
    found, expected = (
        jax.tree.leaves(nnx.state(m, nnx.Param)) for m in (names["model"], model)
    )
    for a, b in zip(found, expected, strict=True):
        # Differences of values that agree to rounding, over a distance of 1e-3.
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
def test_an_equinox_module_of_mixed_leaves():
    """Activations, integers and frozen arrays stay as they are."""
    eqx = pytest.importorskip("equinox")
    model = eqx.nn.MLP(3, 1, 4, 1, key=jax.random.key(0))
    chosen = jax.tree.map(lambda _: False, model)
    chosen = eqx.tree_at(lambda m: m.layers[-1].bias, chosen, replace=True)
    params, static = eqx.partition(model, chosen)

    def loss_fn(params):
        return jnp.sum(eqx.combine(params, static)(jnp.ones(3)))

    estimator = zo.central_difference(zo.coordinate(replace=False))
    _, gradient = zo.value_and_grad(loss_fn, estimator)(jax.random.key(0), params)
    (leaf,) = jax.tree.leaves(gradient)
    # The loss is linear in the only coordinate.
    np.testing.assert_allclose(leaf, [1.0], rtol=1e-3)
    assert jax.tree.structure(gradient) == jax.tree.structure(params)
