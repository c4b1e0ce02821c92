"""The memory of fine-tuning on a GPU, as the compiler plans it.

Nothing is run and no weights are made: programs are compiled from shapes, for devices
that need not exist (`compilers.py`). A step is MeZO's for
SST-2: 16 sequences of 128 tokens, the cross-entropy over two candidates of one token
each; zeroth-order steps take a central difference along one direction.

    python -m research.memory --kind gpu --output research/records/llm_memory_gpu.json

The file is written after every program; ``--resume`` continues an interrupted run.
"""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import click
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import radazo_jax as zo
from radazo_llm.examples.tokens import Batch
from radazo_llm.models.opt import Config
from radazo_llm.settings import Settings
from radazo_llm.tune.job import Parts, parts_of
from radazo_llm.tune.loss import loss_fn
from research import common, compilers
from research.common import Table, collect

BATCH_SIZE, LENGTH = 16, 128
# The width, the layers and the heads of OPT's models.
SIZES = {"125m": (768, 12, 12), "1.3b": (2048, 24, 32), "13b": (5120, 40, 40)}
GIB = 2**30


class Case(NamedTuple):
    """A program to compile."""

    size: str
    device: str  # A name in `compilers.GPUS`.
    method: str  # "forward", "zo_sgd", "radazo", "adam" or "adam, remat".
    tuned: str  # "", "lora" or "full".
    distribution: str

    @classmethod
    def of(cls, row: dict[str, Any]) -> "Case":
        return cls(*(row[name] for name in cls._fields))


ROWS = [
    ("forward", "", ""),
    ("radazo", "lora", "low_rank"),
    ("zo_sgd", "full", "low_rank"),
    ("radazo", "full", "low_rank"),
    ("adam, remat", "lora", ""),
    ("adam, remat", "full", ""),
]
CASES = [
    Case(size, device, *row)
    for size, device in (("1.3b", "h100"), ("13b", "h100"), ("1.3b", "rtx4090"))
    for row in ROWS
]


# --- What is compiled -------------------------------------------------------------


class State(NamedTuple):
    """The tuned parameters and the optimizer's state, which a step changes."""

    params: Any
    opt_state: Any


def abstract_batch() -> Batch:
    """Examples whose two candidates share a sequence, as in SST-2."""

    def of(*shape: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((BATCH_SIZE, *shape), dtype)

    return Batch(of(1, LENGTH), of(2, 1), of(2, 1), of(2, 1, dtype=jnp.float32), of())


def program(case: Case) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A function and its abstract arguments; a step donates the second."""
    settings = Settings(
        method=case.method if case.distribution else "radazo",
        tune=case.tuned or "full",
        distribution=case.distribution or "gaussian",
        learning_rate=1e-3,
    )
    width, layers, heads = SIZES[case.size]
    config = Config(
        hidden_size=width,
        ffn_dim=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
    )
    optimizer = adam(1e-3)
    if case.distribution:
        optimizer = settings.optimizer(np.full(1, 1e-3, np.float32))

    def start() -> tuple[Parts, State]:
        model = config.build(remat="remat" in case.method, rngs=nnx.Rngs(0))
        parts = parts_of(settings, model)
        return parts, State(parts.params, optimizer.init(parts.params))

    parts, state = jax.eval_shape(start)
    parts = parts._replace(params=None)
    if case.method == "forward":
        return _loss, (parts, state.params, abstract_batch())
    estimator = settings.estimator() if case.distribution else None
    step = functools.partial(_step, optimizer, estimator)
    return step, (parts, state, abstract_batch())


def _loss(parts: Parts, params: nnx.State, batch: Batch) -> jax.Array:
    return loss_fn(parts.model(params), batch)


def _step(
    optimizer: Any, estimator: Any, parts: Parts, state: State, batch: Batch
) -> tuple[State, jax.Array]:
    """A step, by backpropagation without an estimator."""

    def loss(params: Any) -> jax.Array:
        return _loss(parts, params, batch)

    if estimator is None:
        value, gradient = jax.value_and_grad(loss)(state.params)
    else:
        one_by_one = zo.vectorized(batch_size=1)
        found = zo.value_and_grad(loss, estimator, evaluator=one_by_one)
        value, gradient = found(jax.random.key(0), state.params)
    updates, opt_state = optimizer.update(gradient, state.opt_state, state.params)
    return State(optax.apply_updates(state.params, updates), opt_state), value


def adam(learning_rate: Any) -> optax.GradientTransformation:
    """Optax's, with moments in float32 whatever the parameters have, as R-AdaZO's."""
    inner = optax.adam(learning_rate)

    def in_float32(tree: Any) -> Any:
        return jax.tree.map(lambda x: x.astype(jnp.float32), tree)

    return optax.GradientTransformation(
        lambda params: inner.init(in_float32(params)),
        lambda gradient, state, params: inner.update(in_float32(gradient), state),
    )


# --- What it takes ----------------------------------------------------------------


def measured(case: Case) -> dict[str, Any]:
    """The memory of a program, by kind."""
    mesh = Mesh(np.array(compilers.devices(case.device)), ("model",))
    replicated = NamedSharding(mesh, PartitionSpec())

    def placed(leaf: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=replicated)

    fun, args = program(case)
    donated = () if case.method == "forward" else (1,)
    args = jax.tree.map(placed, args)
    memory = compilers.compiled_on(mesh, fun, args, donated).memory_analysis()
    total = compilers.held(memory)
    return {
        # The GPU compiler has no limit. Some memory is CUDA's.
        "fits": total <= 0.95 * compilers.GPUS[case.device].memory,
        "total_GiB": total / GIB,
        "arguments_GiB": memory.argument_size_in_bytes / GIB,
        "temporary_GiB": memory.temp_size_in_bytes / GIB,
        # The compiler's own peak counts what is fetched ahead into fast memory twice.
        "peak_GiB": memory.peak_memory_in_bytes / GIB,
    }


def derived(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows with what they take as multiples of the forward pass."""
    forward, made = {}, []
    for row in rows:
        case = Case.of(row)
        base = forward.setdefault((case.size, case.device), row)
        ratios = {
            f"{name}/forward": row[f"{name}_GiB"] / base[f"{name}_GiB"]
            for name in ("total", "peak")
        }
        made.append(row | ratios)
    return made


def tables(content: dict[str, Any]) -> list[Table]:
    """A table of the memory of each method, as far as compiled."""
    rows = [
        [*Case.of(row)[:4], f"{row['total_GiB']:.1f}", "yes" if row["fits"] else "no"]
        for row in content["rows"]
    ]
    headers = ["model", "device", "method", "tuned", "GiB", "fits"]
    return [Table("Memory of a step", headers, rows)]


@click.command(help=__doc__)
@common.output
@common.resume
@click.option("--kind", type=click.Choice(["gpu"]), default="gpu")
def main(output: Path | None, resume: bool, kind: str) -> None:
    compilers.devices(CASES[0].device)  # Before JAX looks for devices.
    cases = [(case._asdict(), functools.partial(measured, case)) for case in CASES]
    collect(output, resume, cases, derived, device="compiled for GPUs")


if __name__ == "__main__":
    main()
