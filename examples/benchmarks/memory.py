"""How many bytes a zeroth-order step needs beyond a forward pass.

Compiles, without running anything, a forward pass, an evaluation at a perturbed point
and whole optimization steps, and reads from the compiled programs what they allocate:
on the CPU the temporary buffers; on the TPU all of its main memory, that is arguments,
results that take no argument's place, and temporary buffers. The TPU compiler needs no
TPU, only libtpu (``pip install "radazo-jax[tpu-aot]"``). Models:

* ``decoder``: 1.3B parameters in bfloat16, scanned layers, a tied embedding;
* ``unrolled`` and ``scanned``: twelve dense layers.

    python examples/benchmarks/memory.py --output docs/benchmarks/memory.json
"""

import argparse
import importlib.util
import os
import pathlib
import time
from collections.abc import Callable, Iterator
from typing import Any

# Before JAX is imported: the TPU compiler is not to look for a TPU.
os.environ |= {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_LOG_DIR": "disabled",
}

import jax
import jax.numpy as jnp
import models
import optax
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding
from tabulate import tabulate
from timing import record, write

import radazo_jax as zo

SMOOTHING = 1e-3
LEARNING_RATE = 1e-6
LAWS = {
    "sphere": zo.sphere(),
    "gaussian": zo.gaussian(),
    "rademacher": zo.rademacher(),
    "coordinate": zo.coordinate(),
    "low_rank": zo.low_rank(),
}
OPTIMIZERS = {"zo_sgd": zo.zo_sgd(LEARNING_RATE), "radazo": zo.radazo(LEARNING_RATE)}
MODELS: dict[str, dict[str, Callable[[], models.Model]]] = {
    "tpu": {
        "decoder": models.decoder,
        "small_decoder": lambda: models.decoder(2, 512, 8, 4096, 256),
        "unrolled": models.dense_layers,
    },
    "cpu": {
        "scanned": lambda: models.dense_layers(12, 1024, 64, jnp.float32, True),
        "unrolled": lambda: models.dense_layers(12, 1024, 64, jnp.float32),
    },
}
DEFAULT = {"tpu": ("decoder", "unrolled"), "cpu": ("scanned", "unrolled")}


def device(platform: str) -> Any:
    """A device to compile for, which need not be there."""
    if platform == "cpu":
        return jax.devices("cpu")[0]
    topology = topologies.get_topology_desc(
        platform="tpu", topology_name="v5e:1x1", chips_per_host_bounds=(1, 1, 1)
    )
    return topology.devices[0]


def compiled_for(
    fun: Callable[..., Any],
    args: tuple[Any, ...],
    to: Any,
    donate_argnums: tuple[int, ...] = (),
) -> Any:
    """``fun`` compiled at abstract arguments for the device ``to``."""
    sharding = SingleDeviceSharding(to)
    placed = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), args
    )
    jitted = jax.jit(fun, out_shardings=sharding, donate_argnums=donate_argnums)
    compiled = jitted.lower(*placed).compile()
    for output in jax.tree.leaves(compiled.output_shardings):
        # Without every sharding given, JAX compiles for the CPU and does not say so.
        assert output.device_set == {to}, output
    return compiled


def our_step(
    loss: Callable[..., Any],
    estimator: zo.GradientEstimator,
    optimizer: optax.GradientTransformationExtraArgs,
) -> Callable[..., Any]:
    value_and_grad = zo.value_and_grad(loss, estimator)

    def step(params: Any, state: Any, key: jax.Array, batch: Any) -> Any:
        value, gradient = value_and_grad(key, params, batch)
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, value

    return step


def naive_evaluation(loss: Callable[..., Any], law: zo.Law) -> Callable[..., Any]:
    """A perturbed evaluation as one writes it by hand, with ``tree_map``."""

    def evaluate(params: Any, direction: Any, scale: Any, batch: Any) -> jax.Array:
        u = law.materialize(direction, params)
        move = lambda p, v: (p + scale * v).astype(p.dtype)  # noqa: E731
        return loss(jax.tree.map(move, params, u), batch)

    return evaluate


def programs(
    model: models.Model, laws: list[str], num_directions: list[int], runs: list[str]
) -> Iterator[tuple[dict[str, Any], Callable[..., Any], Any, tuple[int, ...]]]:
    """Rows to be filled, with what to compile, its arguments and those donated."""
    key = jax.eval_shape(lambda: jax.random.key(0))
    scale = jax.ShapeDtypeStruct((), jnp.float32)
    params, loss, batch = model.params, model.loss, model.batch
    yield {"run": "forward"}, loss, (params, batch), ()
    for name in laws:
        law = LAWS[name]
        direction = jax.eval_shape(law.sample, key, params)
        args = (params, direction, scale, batch)
        if "naive" in runs:
            yield {"run": "naive", "law": name}, naive_evaluation(loss, law), args, ()
        if "perturb" in runs:
            yield {"run": "perturb", "law": name}, zo.perturb(loss), args, ()
        for optimizer in (o for o in OPTIMIZERS if o in runs):
            state = jax.eval_shape(OPTIMIZERS[optimizer].init, params)
            for k in num_directions:
                estimator = zo.forward_difference(law, k, SMOOTHING, batch_size=1)
                step = our_step(loss, estimator, OPTIMIZERS[optimizer])
                row = {"run": optimizer, "law": name, "K": k}
                yield row, step, (params, state, key, batch), (0, 1)


def state_bytes(args: tuple[Any, ...]) -> int:
    """What the optimizer keeps: m and v in float32, for R-AdaZO; else next to none."""
    leaves = jax.tree.leaves(args[1])
    return sum(x.size * x.dtype.itemsize for x in leaves if x.ndim)


def measure(
    platform: str,
    name: str,
    laws: list[str],
    counts: list[int],
    runs: list[str],
    dump: pathlib.Path | None = None,
) -> list[dict[str, Any]]:
    """The rows of one model on one platform."""
    model, to = MODELS[platform][name](), device(platform)
    rows: list[dict[str, Any]] = []
    forward: int | None = None
    for row, fun, args, donated in programs(model, laws, counts, runs):
        start = time.perf_counter()
        compiled = compiled_for(fun, args, to, donated)
        memory = compiled.memory_analysis()
        cpu = platform == "cpu"
        held = memory.argument_size_in_bytes + memory.output_size_in_bytes
        held -= memory.alias_size_in_bytes
        temp = memory.temp_size_in_bytes
        size = temp if cpu else held + temp
        forward = size if forward is None else forward
        moments = state_bytes(args) if donated and not cpu else 0
        row = {"platform": platform, "model": name, "run": "", "law": "", "K": ""} | row
        row |= {
            "bytes": size,
            "/(forward+moments)": size / (forward + moments) if forward else None,
            "beyond/layer": (size - forward - moments) / model.layer_bytes,
            "temp_bytes": temp,
            # The TPU's peak counts parameters that are fetched ahead into its fast
            # on-chip memory a second time.
            "peak_bytes": memory.peak_memory_in_bytes,
            "moments_bytes": moments,
            "compile_s": time.perf_counter() - start,
        }
        print(*row.values(), flush=True)
        if dump is not None:
            name_of = "-".join(str(value) for value in list(row.values())[:5] if value)
            dump.mkdir(parents=True, exist_ok=True)
            (dump / f"{name_of}.hlo").write_text(compiled.as_text())
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--platform", choices=["cpu", "tpu"], nargs="+")
    parser.add_argument("--models", nargs="+", help="by default all large ones")
    parser.add_argument("--laws", choices=LAWS, nargs="+", default=list(LAWS))
    parser.add_argument("--directions", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--runs", nargs="+", default=["naive", "perturb", *OPTIMIZERS])
    parser.add_argument("--dump", type=pathlib.Path, help="where to put the programs")
    parser.add_argument("--output", type=pathlib.Path)
    arguments = parser.parse_args()

    platforms = arguments.platform or ["cpu"]
    if not arguments.platform and importlib.util.find_spec("libtpu"):
        platforms.append("tpu")
    tables: list[dict[str, Any]] = []
    for platform in platforms:
        for name in arguments.models or DEFAULT[platform]:
            if name not in MODELS[platform]:
                continue
            rows = measure(
                platform,
                name,
                arguments.laws,
                arguments.directions,
                arguments.runs,
                arguments.dump,
            )
            print(tabulate(rows, headers="keys", floatfmt=".4f"), end="\n\n")
            tables += rows
    if arguments.output:
        write(arguments.output, record(tables))


if __name__ == "__main__":
    main()
