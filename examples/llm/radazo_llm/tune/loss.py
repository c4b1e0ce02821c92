"""The loss of examples, and what an evaluation measures."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from radazo_llm.examples.tokens import Batch
from radazo_llm.models.model import LanguageModel

_BLOCK = 16  # Tokens of a candidate whose logits are in memory at once.


def loss_fn(
    model: LanguageModel, batch: Batch, objective: str = "classification"
) -> jax.Array:
    total, count = _loss_terms(model, batch, objective)
    return total / count


def _loss_terms(
    model: LanguageModel, batch: Batch, objective: str
) -> tuple[jax.Array, Any]:
    """A sum of losses and how many there are; the loss is their ratio.

    "classification" is the cross-entropy over the candidates, one loss an example;
    "accuracy" the share of examples whose best candidate is a wrong one, which has no
    gradient; "language_model" the loss of the tokens of the right candidate, one per
    token.
    """
    if objective == "language_model":
        right = _right_candidate(batch)
        found = _token_log_probabilities(model, right)
        return -(found * right.mask).sum(), right.mask.sum()
    of_candidates = scores(model, batch)
    if objective == "accuracy":
        wrong = of_candidates.argmax(axis=-1) != batch.label
        return jnp.float32(wrong).sum(), jnp.float32(wrong.size)
    losses = optax.softmax_cross_entropy_with_integer_labels(of_candidates, batch.label)
    return losses.sum(), jnp.float32(losses.size)


def scores(model: LanguageModel, batch: Batch) -> jax.Array:
    """The mean log-probability of each candidate's tokens, float32 [B, C].

    Up to a constant of the example if candidates are single tokens after one sequence:
    their probabilities have the same denominator, a sum over the wide vocabulary.
    """
    if batch.tokens.shape[1] == batch.targets.shape[2] == 1 < batch.targets.shape[1]:
        return model.logits_of(
            _at_positions(model, batch)[:, 0, 0], batch.targets[..., 0]
        )
    found = _token_log_probabilities(model, batch) * batch.mask
    return found.sum(axis=-1) / batch.mask.sum(axis=-1)


def _at_positions(model: LanguageModel, batch: Batch) -> jax.Array:
    """The states that predict the candidates' tokens, [B, 1 or C, L, width]."""
    examples, sequences, length = batch.tokens.shape[:3]
    hidden = model.hidden(batch.tokens.reshape(-1, *batch.tokens.shape[2:]))
    hidden = hidden.reshape(examples, sequences, length, -1)
    positions = batch.positions[:, :sequences, :, None]
    return jnp.take_along_axis(hidden, positions, axis=2)


def _token_log_probabilities(model: LanguageModel, batch: Batch) -> jax.Array:
    """The log-probabilities of each candidate's tokens, float32 [B, C, L].

    Logits of many tokens are as wide as the vocabulary, so they are made a few
    tokens of each candidate at a time.
    """
    states, length = _at_positions(model, batch), batch.targets.shape[2]
    if length <= _BLOCK:
        return _log_probabilities(model, states, batch.targets)
    padding = [(0, 0), (0, 0), (0, -length % _BLOCK)]

    def blocks(x: jax.Array) -> jax.Array:
        x = jnp.pad(x, padding + [(0, 0)] * (x.ndim - 3))
        x = x.reshape(*x.shape[:2], -1, _BLOCK, *x.shape[3:])
        return jnp.moveaxis(x, 2, 0)

    @jax.checkpoint
    def of_block(block: tuple[jax.Array, jax.Array]) -> jax.Array:
        return _log_probabilities(model, *block)

    found = jax.lax.map(of_block, (blocks(states), blocks(batch.targets)))
    found = jnp.moveaxis(found, 0, 2)
    return found.reshape(*found.shape[:2], -1)[..., :length]


def _log_probabilities(
    model: LanguageModel, states: jax.Array, targets: jax.Array
) -> jax.Array:
    rows = jax.nn.log_softmax(model.logits(states))  # [B, 1 or C, L, vocabulary]
    rows = jnp.broadcast_to(rows, (*targets.shape, rows.shape[-1]))
    return jnp.take_along_axis(rows, targets[..., None], axis=-1)[..., 0]


def _right_candidate(batch: Batch) -> Batch:
    """The batch with the right one for its only candidate."""
    if batch.targets.shape[1] == 1:
        return batch

    def pick(leaf: jax.Array) -> jax.Array:
        label = jnp.minimum(batch.label, leaf.shape[1] - 1)  # Tokens may be shared.
        return jnp.take_along_axis(leaf, label[:, None, None], axis=1)

    return Batch(*map(pick, batch[:-1]), label=jnp.zeros_like(batch.label))


class Measured(NamedTuple):
    """The loss and the scores of examples."""

    losses: jax.Array  # float32 [B]: sums of losses.
    counts: jax.Array  # float32 [B]: how many each sums up.
    scores: jax.Array  # float32 [B, C]: of the candidates.

    def loss(self) -> float:
        """Returns the mean loss."""
        return float(self.losses.sum() / self.counts.sum())

    def accuracy(self, label: np.ndarray) -> float:
        """Returns the share of examples whose best candidate is the right one."""
        return float((self.scores.argmax(axis=-1) == label).mean())

    def calibrated_accuracy(self, label: np.ndarray) -> float:
        """Returns the accuracy if the threshold is the median score.

        It needs no labels, and two candidates that are the same in all examples. A
        model that prefers one of the two words whatever the text gets rid of it.
        """
        difference = self.scores[:, 1] - self.scores[:, 0]
        return float(((difference > np.median(difference)) == label).mean())

    def largest_class(self, label: np.ndarray) -> float:
        """Returns the share of the largest class."""
        return float(np.bincount(label).max() / len(label))


@functools.partial(jax.jit, static_argnames=("graphdef", "objective", "batch_size"))
def evaluate(
    graphdef: Any,
    params: nnx.State,
    rest: nnx.State,
    data: Batch,
    *,
    objective: str,
    batch_size: int,
) -> Measured:
    """Loss and scores of all examples, a batch at a time."""

    def one(example: Batch) -> Measured:
        model = nnx.merge(graphdef, params, rest)
        example = jax.tree.map(lambda leaf: leaf[None], example)
        found = scores(model, example)[0]
        return Measured(*_loss_terms(model, example, objective), found)

    return jax.lax.map(one, data, batch_size=batch_size)
