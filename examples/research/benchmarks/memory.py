"""Counts the bytes that a zeroth-order step needs beyond a forward pass.

Compiles, without running anything, a forward pass, an evaluation at a perturbed point
and whole optimization steps, and reads from the compiled programs what they allocate:
on the CPU the temporary buffers; on a TPU or GPU all of its main memory, that is
arguments, results that reuse no argument's memory, and temporary buffers. The
compilers need neither TPU nor GPU, but the extra ``tpu-aot`` or ``gpu-aot``, each in an
environment of its own. Models:

* ``decoder``: 1.3B parameters in bfloat16, scanned layers, a tied embedding;
* ``grouped_query_decoder``: 0.8B, of another shape, with all logits at once;
* ``unrolled`` and ``scanned``: twelve dense layers.

    python -m benchmarks.memory --output records/benchmarks/memory.json

``--output`` is written after every program, and ``--resume`` continues a stopped run.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import click
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

import radazo_jax as zo
from benchmarks import gpus, models
from benchmarks.programs import (
    alone,
    compiled_for,
    compiled_on,
    held,
    num_bytes,
    placed,
    step_of,
)
from common import options
from common.campaign import Campaign, Case, campaign
from common.distributions import DISTRIBUTIONS

SMOOTHING = 1e-3
LEARNING_RATE = 1e-6
OPTIMIZERS = {"zo_sgd": zo.zo_sgd(LEARNING_RATE), "radazo": zo.radazo(LEARNING_RATE)}
MODELS: dict[str, dict[str, Callable[[], models.Model]]] = {
    "tpu": {
        "decoder": models.decoder,
        "grouped_query_decoder": models.grouped_query_decoder,
        "unrolled": models.dense_layers,
    },
    "gpu": {
        "decoder": models.decoder,
        "grouped_query_decoder": models.grouped_query_decoder,
    },
    "cpu": {
        "scanned": lambda: models.dense_layers(12, 1024, 64, jnp.float32, True),
        "unrolled": lambda: models.dense_layers(12, 1024, 64, jnp.float32),
    },
}


def program(
    model: models.Model, run: str, distribution: str, num_directions: int | str
) -> tuple[Callable[..., Any], tuple[Any, ...], tuple[int, ...]]:
    """Returns the function to compile, its arguments, and the donated ones."""
    params, loss, batch = model.params, model.loss, model.batch
    if run == "forward":
        return loss, (params, batch), ()
    key = jax.eval_shape(lambda: jax.random.key(0))
    if run in OPTIMIZERS:
        estimator = zo.forward_difference(
            DISTRIBUTIONS[distribution], num_directions, SMOOTHING
        )
        state = jax.eval_shape(OPTIMIZERS[run].init, params)
        step = step_of(loss, estimator, OPTIMIZERS[run], zo.vectorized(1))
        return step, (params, state, key, batch), (0, 1)
    direction = jax.eval_shape(DISTRIBUTIONS[distribution].sample, key, params)
    scale = jax.ShapeDtypeStruct((), jnp.float32)

    def by_hand(params: Any, direction: Any, scale: Any, batch: Any) -> jax.Array:
        u = DISTRIBUTIONS[distribution].materialize(direction, params)
        moved = jax.tree.map(lambda p, v: (p + scale * v).astype(p.dtype), params, u)
        return loss(moved, batch)

    fun = by_hand if run == "naive" else zo.perturb(loss)
    return fun, (params, direction, scale, batch), ()


def measured(case: dict[str, Any]) -> dict[str, Any]:
    """Returns the bytes that a program allocates."""
    platform, name, *which = case.values()
    model = MODELS.get(platform, MODELS["gpu"])[name]()
    fun, args, donated = program(model, *which)
    mesh, settings = alone(platform)
    args = placed(args, mesh, lambda x: PartitionSpec())
    compiled = compiled_on(mesh, fun, args, donated, settings)
    memory = compiled.memory_analysis()
    # What the optimizer keeps: m and v in float32, for R-AdaZO; else next to none.
    keeps = case["run"] in OPTIMIZERS and platform != "cpu"
    state = jax.tree.leaves(args[1]) if keeps else []
    return {
        "bytes": memory.temp_size_in_bytes if platform == "cpu" else held(memory),
        # The TPU's peak counts parameters that are fetched ahead into its fast
        # on-chip memory a second time; the CPU's does not count all arguments.
        "peak_bytes": memory.peak_memory_in_bytes,
        "moments_bytes": num_bytes([x for x in state if x.ndim]),
        "layer_bytes": model.layer_bytes,
    }


def cases(
    platform: str, names: list[str], counts: list[int], runs: list[str]
) -> Iterator[Case]:
    for name in names:
        rows = [("forward", "", "")]
        for distribution in DISTRIBUTIONS:
            for run in runs:
                numbers = counts if run in OPTIMIZERS else [""]
                rows += [(run, distribution, k) for k in numbers]
        for run, distribution, k in rows:
            case = {
                "platform": platform,
                "model": name,
                "run": run,
                "distribution": distribution,
                "K": k,
            }
            yield case, functools.partial(measured, case)


def derived(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows with what is beyond the forward pass and the moments, and tables.

    A table for each model, and of the TPU's peak, has a row a distribution and a column
    a run: in percent of the forward pass for the decoders, in layers for the others.
    """
    tables: dict[tuple[str, str], dict[str, Any]] = {}
    forward = {
        (row["platform"], row["model"]): row for row in rows if row["run"] == "forward"
    }
    for row in rows:
        platform, model, run, distribution, k = list(row.values())[:5]
        base, layer = forward[platform, model], row["layer_bytes"]
        beyond, peak = (
            row[of] - base[of] - row["moments_bytes"] for of in ("bytes", "peak_bytes")
        )
        column = f"{run}_K={k}" if k else run.replace("naive", "by_hand")
        amounts = {"": ("bytes", beyond), "_peak": ("peak_bytes", peak)}
        for suffix, (of, amount) in amounts.items():
            if distribution and (platform == "tpu" or not suffix):
                name = f"{platform}_{model}{suffix}"
                unit = base[of] / 100 if model.endswith("decoder") else layer
                cells = tables.setdefault(
                    (name, distribution), {"table": name, "distribution": distribution}
                )
                cells[column] = amount / unit
    return [*rows, *tables.values()]


@campaign(__doc__)
@click.option("--platform", type=click.Choice(list(MODELS)), default="cpu")
@options.listed("--targets", of=gpus.GPUS, text="GPUs, of the platform gpu")
@options.listed(
    "--models", of=dict.fromkeys(n for of in MODELS.values() for n in of), text="Models"
)
@options.listed("--directions", text="Numbers of directions", default="1,8")
@options.listed("--runs", of=["naive", "perturb", *OPTIMIZERS], text="Programs")
def main(
    platform: str,
    targets: Sequence[str],
    models: Sequence[str],
    directions: Sequence[str],
    runs: Sequence[str],
) -> Campaign:
    names = [name for name in MODELS[platform] if name in models]
    counts = [int(number) for number in directions]
    chosen = targets if platform == "gpu" else [platform]
    programs = [
        case for target in chosen for case in cases(target, names, counts, runs)
    ]
    return Campaign(programs, derived, {"device": compiled_for(chosen)})


if __name__ == "__main__":
    main()
