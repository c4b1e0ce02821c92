"""The memory of fine-tuning on a TPU or GPU, as the compiler plans it.

Nothing is run and no weights are made: programs are compiled from shapes, for devices
that need not exist (`compilers.py`). A step is MeZO's for
SST-2: 16 sequences of 128 tokens, the cross-entropy over two candidates of one token
each; zeroth-order steps take a central difference along one direction.

    python -m research.memory --output research/records/llm_memory.json

The file is written after every program; ``--resume`` continues an interrupted run.
"""

import functools
import re
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

from radazo_llm.models.decoder import Config
from radazo_llm.models.opt import CONFIGS
from radazo_llm.tune import train
from radazo_llm.tune.data import Batch
from research import common, compilers
from research.common import Table, collect

BATCH_SIZE, LENGTH = 16, 128
GIB = 2**30
# What these steps may take, as a multiple of the forward pass.
BAR = 1.06
BARRED = (("1.3b", "zo_sgd", "full"), ("1.3b", "radazo", "lora"))
DISTRIBUTIONS = ("gaussian", "rademacher", "low_rank")


class Case(NamedTuple):
    """A program to compile."""

    size: str
    device: str  # A TPU's topology, or a name in `compilers.GPUS`.
    method: str  # "forward", "zo_sgd", "radazo", "adam" or "adam, remat".
    tuned: str  # "", "lora", "scales" or "full".
    distribution: str

    @classmethod
    def of(cls, row: dict[str, Any]) -> "Case":
        return cls(*(row[name] for name in cls._fields))


FORWARD = [("forward", "", "")]
ZO_SGD = [("zo_sgd", "full", distribution) for distribution in DISTRIBUTIONS]
LORA = [("radazo", "lora", distribution) for distribution in DISTRIBUTIONS]
SCALES = [("radazo", "scales", "low_rank")]
FULL = [("radazo", "full", distribution) for distribution in DISTRIBUTIONS]
ADAM = [
    (method, tuned, "")
    for tuned in ("lora", "full")
    for method in ("adam, remat", "adam")
]
CASES = [
    Case(size, device, *rest)
    for size, device, rows in (
        ("1.3b", "v5e:1x1", FORWARD + LORA + ZO_SGD + FULL + ADAM),
        ("13b", "v5e:1x1", FORWARD),
        ("13b", "v6e:1x1", FORWARD + LORA + ZO_SGD + ADAM[:2]),
        ("13b", "v5e:2x2", FORWARD + LORA),
        ("13b", "v5p:1x1x1", FORWARD + FULL[:1] + ADAM),
    )
    for rest in rows
]

# As their `config.json` has them.
LLAMA_2_13B = {
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 5120,
    "intermediate_size": 13824,
    "num_hidden_layers": 40,
    "num_attention_heads": 40,
    "max_position_embeddings": 4096,
}
GEMMA_2_27B = {
    "model_type": "gemma2",
    "vocab_size": 256000,
    "hidden_size": 4608,
    "intermediate_size": 36864,
    "num_hidden_layers": 46,
    "num_attention_heads": 32,
    "num_key_value_heads": 16,
    "head_dim": 128,
    "query_pre_attn_scalar": 144,
    "max_position_embeddings": 8192,
}
MODELS = {size: CONFIGS[f"facebook/opt-{size}"] for size in ("125m", "1.3b", "13b")} | {
    "llama-2-13b": Config.from_dict(LLAMA_2_13B),
    "gemma-2-27b": Config.from_dict(GEMMA_2_27B),
}
INT4 = "-int4"  # What the name of a model ends with whose matrices are int4.
INT4_CASES = [
    Case(size, device, *rest)
    for size, device, rows in (
        ("llama-2-13b", "v5e:1x1", FORWARD),
        (f"llama-2-13b{INT4}", "v5e:1x1", FORWARD + LORA + SCALES),
        (f"gemma-2-27b{INT4}", "v6e:1x1", FORWARD + LORA[:1]),
    )
    for rest in rows
]
GPU_CASES = [
    Case(size, device, *row)
    for size, device in (("1.3b", "h100"), ("13b", "h100"), ("1.3b", "rtx4090"))
    for row in FORWARD + LORA[2:] + ZO_SGD[2:] + FULL[2:] + [ADAM[0], ADAM[2]]
]


# --- What is compiled -------------------------------------------------------------


def abstract_batch() -> Batch:
    """Examples whose two candidates share a sequence, as in SST-2."""

    def of(*shape: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((BATCH_SIZE, *shape), dtype)

    return Batch(of(1, LENGTH), of(2, 1), of(2, 1), of(2, 1, dtype=jnp.float32), of())


def program(case: Case) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A function and its abstract arguments; a step donates the second."""
    method = case.method if case.distribution else "radazo"
    small = case.size.endswith(INT4)
    settings = train.Settings(
        method=method,
        tune=case.tuned or ("lora" if small else "full"),
        quantize="int4" if small else "no",
        distribution=case.distribution or DISTRIBUTIONS[0],
    )
    config = MODELS[case.size.removesuffix(INT4)]

    def start() -> tuple[train.Job, train.State]:
        model = config.build(remat="remat" in case.method, rngs=nnx.Rngs(0))
        return train.start(settings, model)

    job, state = jax.eval_shape(start)
    if case.method == "forward":
        return _loss, (job, state.params, abstract_batch())
    if case.distribution:
        return train.train_step, (job, state, abstract_batch())
    state = state._replace(opt_state=jax.eval_shape(adam(0.0).init, state.params))
    return _adam_step, (job, state, abstract_batch())


def _loss(job: train.Job, params: nnx.State, batch: Batch) -> jax.Array:
    return train.loss_fn(nnx.merge(job.graphdef, params, job.rest), batch)


def _adam_step(
    job: train.Job, state: train.State, batch: Batch
) -> tuple[train.State, jax.Array]:
    """Takes the step of `train.train_step` by backpropagation."""
    value, gradient = jax.value_and_grad(_loss, 1)(job, state.params, batch)
    optimizer = adam(job.learning_rate)
    updates, opt_state = optimizer.update(gradient, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    return train.State(params, opt_state, state.step + 1), value


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


def sharding(path: tuple[Any, ...], leaf: Any) -> PartitionSpec:
    """Divides the frozen matrices among the chips as one does for tensor parallelism.

    Attention by heads, the feed-forward network by its inner features, the embeddings
    by rows of the vocabulary. All else is on every chip.
    """
    names = {str(getattr(k, "key", "")) for k in path}
    if "layers" in names and len(leaf.shape) == 3 and "lora" not in names:
        by_row = {"out_proj", "fc2"} & names
        return PartitionSpec(None, *(("model", None) if by_row else (None, "model")))
    return PartitionSpec("model" if "embed_tokens" in names else None)


def compiled(case: Case) -> Any:
    mesh = Mesh(np.array(compilers.devices(case.device)), ("model",))

    def placed(path: tuple[Any, ...], leaf: Any) -> jax.ShapeDtypeStruct:
        to = NamedSharding(mesh, sharding(path, leaf) if leaf.ndim else PartitionSpec())
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=to)

    fun, args = program(case)
    args = jax.tree_util.tree_map_with_path(placed, args)
    donated = () if case.method == "forward" else (1,)
    return compilers.compiled_on(mesh, fun, args, donated)


# What is called temporaries there are the arguments too.
_TOO_LARGE = re.compile(r"required for HLO temporaries \(([\d.]+)G\) exceeds available")


def measured(case: Case) -> dict[str, Any]:
    """The peak of a chip's memory by kind, or its whole if it does not fit."""
    try:
        memory = compiled(case).memory_analysis()
    except jax.errors.JaxRuntimeError as error:
        needed = _TOO_LARGE.search(str(error))
        if needed is None:
            raise
        return {"fits": False, "total_GiB": float(needed[1])}
    total = compilers.held(memory)
    gpu = compilers.GPUS.get(case.device)
    return {
        # The GPU compiler has no limit. Some memory is CUDA's.
        "fits": gpu is None or total <= 0.95 * gpu.memory,
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
        ratios = {"total/forward": row["total_GiB"] / base["total_GiB"]}
        if "peak_GiB" in row and "peak_GiB" in base:
            ratios["peak/forward"] = row["peak_GiB"] / base["peak_GiB"]
        barred = case.size.endswith(INT4) and case.tuned == "lora"
        if barred or (case.size, case.method, case.tuned) in BARRED:
            ratios["bar_met"] = row["fits"] and max(ratios.values()) <= BAR
        made.append(row | ratios)
    return made


TUNED = {
    "forward pass": ("forward", ""),
    "adapters, R-AdaZO": ("radazo", "lora"),
    "adapters, Adam": ("adam, remat", "lora"),
    "all, ZO-SGD": ("zo_sgd", "full"),
    "all, R-AdaZO, stored": ("radazo", "full"),
    "all, Adam": ("adam, remat", "full"),
}


def tables(content: dict[str, Any]) -> list[Table]:
    """A table of the memory of each method on a GPU or v5e, as far as compiled."""
    cells: dict[tuple[str, str], dict[tuple[str, str], str]] = {}
    for row in content["rows"]:
        case, total = Case.of(row), row["total_GiB"]
        if case.device not in ("v5e:1x1", *compilers.GPUS):
            continue
        if case.distribution in ("", "low_rank"):
            text = f"{total:.1f}" if row["fits"] else f"**no**, {total:.0f}"
            found = cells.setdefault((case.device, case.size), {})
            found[case.method, case.tuned] = text
    rows = [
        [*which, *(found.get(method, "") for method in TUNED.values())]
        for which, found in cells.items()
    ]
    caption = "GiB; **no** if they do not fit"
    return [Table(caption, ["device", "model", *TUNED], rows)]


@click.command(help=__doc__)
@common.output
@common.resume
@click.option(
    "--kind",
    type=click.Choice(["tpu", "int4", "gpu"]),
    default="tpu",
    help="TPUs; models in 4 bits on TPUs; GPUs.",
)
def main(output: Path | None, resume: bool, kind: str) -> None:
    chosen = {"tpu": CASES, "int4": INT4_CASES, "gpu": GPU_CASES}[kind]
    if kind == "gpu":
        compilers.devices(chosen[0].device)  # Before JAX looks for devices.
    cases = [(case._asdict(), functools.partial(measured, case)) for case in chosen]
    target = f"compiled for {'GPUs' if kind == 'gpu' else 'TPUs'}"
    collect(output, resume, cases, derived, device=target)


if __name__ == "__main__":
    main()
