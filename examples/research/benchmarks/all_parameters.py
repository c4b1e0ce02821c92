"""The memory and the operations of a step that tunes all parameters.

Compiles, without running anything, the forward pass of a decoder and a step of each
method: ZO-SGD, and R-AdaZO with stored and with replayed moments. Each step takes a
forward difference along one direction of ``low_rank()`` for 4 × 1024 tokens in
bfloat16. The compilers need neither TPU nor GPU, but the extra ``tpu-aot`` or
``gpu-aot``, each in an environment of its own.

    python -m benchmarks.all_parameters --platform gpu

``--output`` is written after every program, and ``--resume`` continues a record.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import click
import jax
from jax.sharding import PartitionSpec

import radazo_jax as zo
from benchmarks import models
from benchmarks.hlo import facts
from benchmarks.programs import (
    alone,
    compiled_for,
    compiled_on,
    held,
    placed,
)
from common.campaign import Campaign, Case, campaign

SMOOTHING = 1e-3
LEARNING_RATE = 1e-6
FORWARD = "forward"
METHODS = {
    "ZO-SGD": zo.zo_sgd(LEARNING_RATE),
    "R-AdaZO, replayed": zo.radazo(LEARNING_RATE, moments="replayed"),
    "R-AdaZO, stored": zo.radazo(LEARNING_RATE),
}
MODELS: dict[str, Callable[[], models.Model]] = {
    "1.3B": models.decoder,
    "13B": functools.partial(models.decoder, num_layers=40, width=5120, num_heads=40),
}
# 13B parameters in bfloat16 do not fit into a v5e, nor their moments anywhere.
TARGETS = {
    "gpu": [("h100", "1.3B"), ("h100", "13B")],
    "tpu": [("v5e", "1.3B"), ("v5p", "1.3B"), ("v5p", "13B")],
}
# The most that a step with replayed moments may take, as multiples of the forward
# pass's memory and of the operations of ZO-SGD.
MAX_MEMORY, MAX_FLOPS = 1.06, 1.15


def compiled(target: str, size: str, method: str) -> Any:
    """The program of a forward pass or a step."""
    model = MODELS[size]()
    mesh, settings = alone(target)
    fun: Any = model.loss
    args: Any = model.params, model.batch
    donated: tuple[int, ...] = ()
    if method != FORWARD:
        estimator = zo.forward_difference(zo.low_rank(), 1, SMOOTHING)
        solver = zo.solver(
            model.loss, METHODS[method], estimator, evaluator=zo.vectorized(1)
        )
        key = jax.eval_shape(lambda: jax.random.key(0))
        args = jax.eval_shape(solver.init, model.params, key), model.batch
        fun, donated = solver.step, (0,)
    args = placed(args, mesh, lambda x: PartitionSpec())
    return compiled_on(mesh, fun, args, donated, settings)


def measured(target: str, size: str, method: str) -> dict[str, Any]:
    """The memory and the operations of a program."""
    program = compiled(target, size, method)
    found = facts(program)
    kept = {name: found[name] for name in ("peak_bytes", "product_flops")}
    return {"bytes": held(program.memory_analysis())} | kept


def cases(platform: str) -> Iterator[Case]:
    for target, size in TARGETS[platform]:
        for method in (FORWARD, *METHODS):
            if size == "13B" and method == "R-AdaZO, stored":
                continue
            case = {"device": target, "size": size, "method": method}
            yield case, functools.partial(measured, target, size, method)


def derived(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows, as multiples of the forward pass and of ZO-SGD."""
    found = {(row["device"], row["size"], row["method"]): row for row in rows}
    made = []
    for row in rows:
        device, size, method = list(row.values())[:3]
        forward = found[device, size, FORWARD]
        more: dict[str, Any] = {
            "GB": row["bytes"] / 1e9,
            "memory/forward": row["bytes"] / forward["bytes"],
            "Tflop": row["product_flops"] / 1e12,
        }
        base = found.get((device, size, "ZO-SGD"))
        if method in METHODS and base is not None:
            more["flops/ZO-SGD"] = row["product_flops"] / base["product_flops"]
        if method == "R-AdaZO, replayed":
            peak = row["peak_bytes"] / forward["peak_bytes"]
            memory = max(more["memory/forward"], peak)
            more["limits_met"] = memory <= MAX_MEMORY and (
                more["flops/ZO-SGD"] <= MAX_FLOPS
            )
        made.append(row | more)
    return made


@campaign(__doc__)
@click.option("--platform", type=click.Choice(list(TARGETS)), required=True)
def main(platform: str) -> Campaign:
    about = {"device": compiled_for(target for target, _ in TARGETS[platform])}
    return Campaign(cases(platform), derived, about)


if __name__ == "__main__":
    main()
