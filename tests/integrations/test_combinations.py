"""Which estimators work with what, as the page of methods says."""

import pathlib

import jax
import jax.numpy as jnp
import pytest

import radazo_jax as zo
from radazo_jax import contrib

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "methods.md"
START = jnp.zeros(8)
ESTIMATORS = {
    "forward_difference": zo.forward_difference(),
    "central_difference": zo.central_difference(),
    "spsa": zo.spsa(),
    "evolution_strategy": zo.evolution_strategy(),
} | {name: getattr(contrib, name)() for name in contrib.__all__ if name[0].islower()}
EACH = pytest.mark.parametrize("name", ESTIMATORS)


def loss(x):
    return jnp.sum((x - 1) ** 2)


def row(start):
    """The row of the table of combinations that starts so."""
    text = PAGE.read_text(encoding="utf-8").partition("### Combinations to avoid")[2]
    (found,) = [line for line in text.splitlines() if line.startswith(f"| {start}")]
    return found


def traced(optimizer, estimator):
    init, step = zo.solver(loss, optimizer, estimator)
    jax.eval_shape(step, jax.eval_shape(init, START, jax.random.key(0)))


@EACH
def test_replayed_moments_refuse_the_estimators_of_the_page(name):
    replayed = zo.radazo(1e-2, moments="replayed")
    if f"`{name}`" in row('`moments="replayed"`'):
        with pytest.raises(TypeError, match="Use stored moments with this estimator"):
            traced(replayed, ESTIMATORS[name])
    else:
        traced(replayed, ESTIMATORS[name])


@EACH
def test_an_estimator_with_memory_needs_a_run(name):
    estimator = ESTIMATORS[name]
    value_and_grad = zo.value_and_grad(loss, estimator)
    key = jax.random.key(0)
    if jax.tree.leaves(jax.eval_shape(estimator.init, START)):
        assert "`ValueError`" in row("`value_and_grad`")
        with pytest.raises(ValueError, match="estimator must have no state"):
            jax.eval_shape(value_and_grad, key, START)
    else:
        jax.eval_shape(value_and_grad, key, START)
