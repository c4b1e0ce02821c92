"""A model and examples so small that a test may make many of them."""

import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from radazo_llm.command import radazo_llm
from radazo_llm.examples.tokens import Batch
from radazo_llm.models.opt import OPT, Config
from radazo_llm.run import session
from radazo_llm.settings import Settings
from radazo_llm.tune.job import tuned

from . import tables

CONFIG = Config(
    vocab_size=287,
    hidden_size=16,
    ffn_dim=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    max_position_embeddings=32,
)
SETTINGS = Settings(
    smoothing=1e-2,  # Large relative to the rounding of a loss in float32.
    learning_rate=1e-3,
    batch_size=4,
    num_steps=12,
    eval_every=4,
    eval_batch_size=5,
    lora_rank=2,
)
GOLDEN = pathlib.Path(__file__).parent / "golden"
TOKENS = np.arange(20, dtype=np.int32).reshape(2, 10)


def model(dtype="float32", seed=0, remat=False):
    """A new one at each call, for runs consume it: as at the start, but of NumPy.

    Drawn by Flax, each array would be a program to compile.
    """
    graphdef, state = _abstract(dtype, remat)
    rng = np.random.default_rng(seed)

    def start(path, leaf):
        fixed = {"scale": np.ones, "bias": np.zeros}.get(path[-2].key)
        drawn = fixed(leaf.shape) if fixed else 0.02 * rng.standard_normal(leaf.shape)
        return jnp.asarray(drawn.astype(leaf.dtype))

    return nnx.merge(graphdef, jax.tree_util.tree_map_with_path(start, state))


@functools.cache
def _abstract(dtype, remat):
    def make():
        return OPT(CONFIG, dtype=dtype, remat=remat, rngs=nnx.Rngs(0))

    return nnx.split(nnx.eval_shape(make))


@tables.jit
def _logits(graphdef, state, tokens):
    return nnx.merge(graphdef, state)(tokens)


def logits(opt, tokens=TOKENS):
    """Compiled, once for all models of a shape."""
    return np.asarray(_logits(*nnx.split(opt), tokens))


def arrays(module):
    return {
        path: np.asarray(v[...]) for path, v in nnx.to_flat_state(nnx.state(module))
    }


def examples(number, sequences, seed=0):
    """Random examples with two candidates of one or, with `sequences` 2, two tokens."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(3, 20, (number, sequences, 8)).astype(np.int32)
    length = sequences  # Candidates of one token share a sequence.
    positions = np.sort(rng.integers(2, 7, (number, 2, length)), axis=-1)
    if sequences == 1:
        positions[:] = positions[:, :1]
    mask = np.ones((number, 2, length), np.float32)
    mask[::3, 1, 1:] = 0  # Some candidates are shorter.
    return Batch(
        tokens,
        positions.astype(np.int32),
        rng.integers(3, 20, (number, 2, length)).astype(np.int32),
        mask,
        rng.integers(0, 2, number).astype(np.int32),
    )


TRAIN, DEV = examples(20, 1), examples(20, 1, seed=1)
# With one candidate each, whose tokens are scored.
ONE = TRAIN._replace(
    **{name: getattr(TRAIN, name)[:, :1] for name in ("positions", "targets", "mask")},
    label=np.zeros_like(TRAIN.label),
)


def run(job, folder, settings=SETTINGS, splits=(TRAIN, DEV), start=None, **options):
    """Runs on the model in a folder, and returns the evaluations."""

    def prepare(loaded, stack):
        return tuned(
            settings, loaded, splits, frozen_folder=folder / "frozen", start=start
        )

    given = {"model": str(job), "path": job, "output": folder, "notes": {}, "to": {}}
    return session.execute(settings, prepare, **(given | options))


def contents(folder):
    """The files of a folder, and of those in it."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def metrics(folder):
    """The lines that a run wrote."""
    text = (folder / "metrics.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def command(*arguments):
    """Runs the command line, which must end well; otherwise, SystemExit is raised."""
    try:
        radazo_llm(list(map(str, arguments)))
    except SystemExit as end:
        if end.code:
            raise


def refused(capsys, *arguments, status=2):
    """The one line in which the command ends."""
    with pytest.raises(SystemExit) as error:
        command(*arguments)
    assert error.value.code == status
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1 or status == 1, lines  # Before, there may be a bar.
    return lines[-1]
