"""How many bytes a zeroth-order step needs beyond a forward pass.

Compiles, without running anything, a forward pass, an evaluation at a perturbed point
and whole optimization steps, and reads from the compiled programs what they allocate:
on the CPU the temporary buffers; on the TPU all of its main memory, that is arguments,
results that take no argument's place, and temporary buffers. The TPU compiler needs no
TPU, only libtpu (``pip install "radazo-jax[tpu-aot]"``). Models:

* ``decoder``: 1.3B parameters in bfloat16, scanned layers, a tied embedding;
* ``grouped_query_decoder``: 0.8B, of another shape, with all logits at once;
* ``unrolled`` and ``scanned``: twelve dense layers.

    python examples/benchmarks/memory.py --output docs/benchmarks/memory.json

``--output`` is written after every program, and ``--resume`` goes on where a run was
stopped. ``--plot`` draws the rows.
"""

import importlib.util
import pathlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from matplotlib.ticker import NullFormatter
from tabulate import tabulate

import radazo_jax as zo
from examples.benchmarks import models
from examples.benchmarks.programs import compiled_on, placed, step_of, tpu_topology
from examples.common import cli
from examples.common.record import record, resumed, write

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
        "grouped_query_decoder": models.grouped_query_decoder,
        "small_decoder": lambda: models.decoder(2, 512, 8, 4096, 256),
        "unrolled": models.dense_layers,
    },
    "cpu": {
        "scanned": lambda: models.dense_layers(12, 1024, 64, jnp.float32, True),
        "unrolled": lambda: models.dense_layers(12, 1024, 64, jnp.float32),
    },
}
# What may be allocated beyond the forward pass and the moments, as fractions of the
# forward pass's allocation and of a layer.
BARS = {
    ("tpu", "decoder", "perturb"): (0.005, 0.0),
    ("tpu", "decoder", "zo_sgd"): (0.02, 0.0),
    ("tpu", "decoder", "radazo"): (0.01, 0.0),
    ("tpu", "unrolled", "perturb"): (0.0, 0.5),
    ("tpu", "unrolled", "zo_sgd"): (0.0, 0.5),
    ("tpu", "unrolled", "radazo"): (0.0, 0.5),
    ("cpu", "scanned", "perturb"): (0.0, 1.5),
    ("cpu", "scanned", "zo_sgd"): (0.0, 1.5),
    ("cpu", "scanned", "radazo"): (0.0, 1.5),
}
# The columns that tell a row from the others.
NAMES = ("platform", "model", "run", "law", "K")
DEFAULT = {
    "tpu": ("decoder", "grouped_query_decoder", "unrolled"),
    "cpu": ("scanned", "unrolled"),
}


def device(platform: str) -> Any:
    """A device to compile for, which need not be there."""
    if platform == "cpu":
        return jax.devices("cpu")[0]
    return tpu_topology("v5e:1x1", (1, 1, 1))[0]


def naive_evaluation(loss: Callable[..., Any], law: zo.Law) -> Callable[..., Any]:
    """A perturbed evaluation as one writes it by hand, with ``tree_map``."""

    def evaluate(params: Any, direction: Any, scale: Any, batch: Any) -> jax.Array:
        u = law.materialize(direction, params)
        moved = jax.tree.map(lambda p, v: (p + scale * v).astype(p.dtype), params, u)
        return loss(moved, batch)

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
                step = step_of(loss, estimator, OPTIMIZERS[optimizer])
                row = {"run": optimizer, "law": name, "K": k}
                yield row, step, (params, state, key, batch), (0, 1)


def state_bytes(args: tuple[Any, ...]) -> int:
    """What the optimizer keeps: m and v in float32, for R-AdaZO; else next to none."""
    leaves = jax.tree.leaves(args[1])
    return sum(x.size * x.dtype.itemsize for x in leaves if x.ndim)


def measured(platform: str, compiled: Any, moments: int) -> dict[str, Any]:
    """What a program allocates."""
    memory = compiled.memory_analysis()
    held = memory.argument_size_in_bytes + memory.output_size_in_bytes
    held -= memory.alias_size_in_bytes
    temp = memory.temp_size_in_bytes
    return {
        "bytes": temp if platform == "cpu" else held + temp,
        # The TPU's peak counts parameters that are fetched ahead into its fast
        # on-chip memory a second time; the CPU's does not count all arguments.
        "peak_bytes": memory.peak_memory_in_bytes,
        "moments_bytes": moments,
    }


def with_ratios(
    row: dict[str, Any], forward: dict[str, Any], layer_bytes: int
) -> dict[str, Any]:
    """The row with what is beyond the forward pass and the moments."""
    beyond, peak = (
        row[name] - forward[name] - row["moments_bytes"]
        for name in ("bytes", "peak_bytes")
    )
    bar = BARS.get((row["platform"], row["model"], row["run"]))
    allowed = bar and bar[0] * forward["bytes"] + bar[1] * layer_bytes
    return row | {
        "beyond/forward": beyond / forward["bytes"] if forward["bytes"] else None,
        "beyond/layer": beyond / layer_bytes,
        "bar_met": None if bar is None else beyond <= allowed,
        "peak_beyond/layer": None if row["platform"] == "cpu" else peak / layer_bytes,
        "layer_bytes": layer_bytes,
    }


def measure(
    platform: str,
    name: str,
    laws: list[str],
    counts: list[int],
    runs: list[str],
    known: dict[tuple[Any, ...], dict[str, Any]],
) -> Iterator[dict[str, Any]]:
    """The rows of one model on one platform, as they come, but for the known ones."""
    model, forward = MODELS[platform][name](), None
    mesh = Mesh(np.array([device(platform)]), ("one",))
    for row, fun, args, donated in programs(model, laws, counts, runs):
        row = {"platform": platform, "model": name, "run": "", "law": "", "K": ""} | row
        found = known.get(tuple(row.values()))
        if found is None:
            args = placed(args, mesh, lambda x: PartitionSpec())
            start = time.perf_counter()
            compiled = compiled_on(mesh, fun, args, donated)
            seconds = time.perf_counter() - start
            moments = state_bytes(args) if donated and platform != "cpu" else 0
            found = row | measured(platform, compiled, moments) | {"compile_s": seconds}
        forward = forward or found
        found = with_ratios(found, forward, model.layer_bytes)
        print(*found.values(), flush=True)
        yield found


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A table for each model, and of the TPU's peak: a row a law, a column a run.

    In percent of the forward pass for the decoder, in layers for the others.
    """
    tables: dict[tuple[str, str], dict[str, Any]] = {}
    forward = {(r["platform"], r["model"]): r for r in rows if r["run"] == "forward"}
    for row in rows:
        if not row["law"]:
            continue
        base = forward[row["platform"], row["model"]]
        run = "by_hand" if row["run"] == "naive" else row["run"]
        column = f"{run} K={row['K']}".replace(" ", "_") if row["K"] else run
        for of, suffix in (("bytes", ""), ("peak_bytes", "_peak")):
            beyond = row[of] - base[of] - row["moments_bytes"]
            percent = row["model"].endswith("decoder")
            unit = base[of] / 100 if percent else row["layer_bytes"]
            if suffix and row["platform"] == "cpu":
                continue
            name = f"{row['platform']}_{row['model']}{suffix}"
            cells = tables.setdefault((name, row["law"]), {"table": name})
            cells |= {"law": row["law"], column: beyond / unit}
    return list(tables.values())


def plot(rows: list[dict[str, Any]], path: pathlib.Path) -> None:
    """What each run allocates beyond the forward pass, a panel for each model."""
    panels = list(dict.fromkeys((row["platform"], row["model"]) for row in rows))
    runs = list(dict.fromkeys((row["run"], row["K"]) for row in rows if row["law"]))
    size = (1.5 + 3.4 * len(panels), 3.2)
    figure, all_axes = plt.subplots(
        1, len(panels), figsize=size, sharey=True, squeeze=False, layout="constrained"
    )
    for axes, panel in zip(all_axes[0], panels, strict=True):
        for i, (run, k) in enumerate(runs):
            wanted = (*panel, run, k)
            names = ("platform", "model", "run", "K")
            found = [r for r in rows if r["law"] and tuple(map(r.get, names)) == wanted]
            label = "copies by tree_map" if run == "naive" else run
            axes.scatter(
                [max(row["beyond/layer"], 1e-3) for row in found],
                [list(LAWS).index(row["law"]) + (i - 2.5) / 9 for row in found],
                marker="xo^^ss"[i % 6],
                color=f"C{i}",
                label=f"{label}, K={k}" if k else label,
                s=22,
            )
        axes.set(title=" ".join(panel), xscale="log", yticks=range(len(LAWS)))
        axes.set(yticklabels=list(LAWS), xlabel="layers beyond forward (+ moments)")
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.grid(axis="x", alpha=0.3)
    all_axes[0][0].invert_yaxis()
    handles, labels = all_axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = cli.parser(__doc__)
    add = parser.add_argument
    add("--platform", choices=["cpu", "tpu"], nargs="+")
    add("--models", nargs="+", help="by default all large ones")
    add("--laws", choices=LAWS, nargs="+", default=list(LAWS))
    add("--directions", type=cli.at_least_one, nargs="+", default=[1, 8])
    add("--runs", nargs="+", default=["naive", "perturb", *OPTIMIZERS])
    add("--output", type=pathlib.Path)
    add("--plot", type=pathlib.Path, help="where to put a figure")
    add("--resume", action="store_true", help="take the rows that --output has")
    args = parser.parse_args()

    platforms = args.platform or ["cpu"]
    if not args.platform and importlib.util.find_spec("libtpu"):
        platforms.append("tpu")
    known = resumed(args.output, args.resume, NAMES)
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    kinds = ", ".join(device(platform).device_kind for platform in platforms)
    options = (args.laws, args.directions, args.runs, known)
    for platform in platforms:
        for name in args.models or DEFAULT[platform]:
            if name not in MODELS[platform]:
                continue
            for row in measure(platform, name, *options):
                found[tuple(row[column] for column in NAMES)] = row
                rows = list(
                    (found | {k: known[k] for k in known.keys() - found}).values()
                )
                if args.output:
                    content = record([*rows, *summary(rows)])
                    write(args.output, content | {"device": f"compiled for {kinds}"})
    print(tabulate(list(found.values()), headers="keys", floatfmt=".4f"))
    if args.plot:
        plot(rows, args.plot)


if __name__ == "__main__":
    main()
