"""Adapters rebuilt from a journal and the weights of the base model."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import radazo_jax as zo
from radazo_llm.models import lora
from radazo_llm.tune import train

from .. import tiny


@pytest.mark.slow
def test_adapters_are_rebuilt_from_a_journal_and_the_base_weights(tmp_path):
    data = jax.tree.map(jnp.asarray, tiny.examples(12, 1))

    def adapted():
        """A base model, and adapters as they are at the start."""
        model = tiny.model()
        lora.add_lora(model, rank=2, alpha=4.0, rngs=nnx.Rngs(7))
        return nnx.split(model, nnx.LoRAParam, ...)

    def loss_of(graphdef, rest):
        def loss(params, rows):
            batch = jax.tree.map(lambda x: x[rows], data)
            return train.loss_fn(nnx.merge(graphdef, params, rest), batch)

        return loss

    def minibatch(key):
        return jax.random.choice(key, 12, (4,), replace=False)

    optimizer = zo.radazo(1e-3)
    estimator = zo.central_difference(zo.low_rank(), num_directions=2)
    evaluator = zo.vectorized(batch_size=1)
    path = tmp_path / "run.jsonl"
    graphdef, params, rest = adapted()
    result = zo.minimize(
        loss_of(graphdef, rest),
        params,
        optimizer,
        estimator,
        num_steps=20,
        key=0,
        sample=minibatch,
        evaluator=evaluator,
        progress=False,
        journal=path,
    )
    graphdef, params, rest = adapted()
    state = zo.replay(
        *(path, params, optimizer, estimator),
        evaluator=evaluator,
        fun=loss_of(graphdef, rest),
        sample=minibatch,
    )
    chex.assert_trees_all_equal(
        (state.params, state.optimizer_state),
        (result.params, result.state.optimizer_state),
    )
    assert any(np.any(a) for a in jax.tree.leaves(state.params))
    assert path.stat().st_size < 1000 + 20 * 200
