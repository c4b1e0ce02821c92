"""What a step sends and computes on 1 to 256 chips, read from the compiled programs.

Compiles, without running anything, whole R-AdaZO steps of a decoder for meshes of TPU
chips and of simulated CPU devices, with the evaluations spread over the axis ``k``, the
minibatch over ``data`` and ``model``, and the parameters over ``model``; and beside
them the gradient that backpropagation makes on the same mesh. The TPU compiler needs
no TPU, only libtpu (``pip install "radazo-jax[tpu-aot]"``).

    python examples/benchmarks/scaling.py --platform tpu --output scaling_tpu.json

``--output`` is written after every program, and ``--resume`` goes on where a run was
stopped. ``--plot`` draws the rows.
"""

import math
import pathlib
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from jax import lax
from jax.experimental import mesh_utils
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from tabulate import tabulate

import radazo_jax as zo
from examples.benchmarks import models
from examples.benchmarks.hlo import facts
from examples.benchmarks.programs import (
    compiled_on,
    placed,
    step_of,
    tpu_topology,
    without_tpu,
)
from examples.common import cli
from examples.common.record import record, resumed, write

AXES = ("k", "data", "model")
SMOOTHING = 1e-3
LEARNING_RATE = 1e-6
LAWS = {
    "sphere": zo.sphere(),
    "gaussian": zo.gaussian(),
    "rademacher": zo.rademacher(),
    "low_rank": zo.low_rank(),
}
TOPOLOGIES = {
    1: ("v5e:1x1", (1, 1, 1)),
    8: ("v5e:2x4", (2, 4, 1)),
    16: ("v5e:4x4", None),
    64: ("v5e:8x8", None),
    256: ("v5e:16x16", None),
}
# What may be sent beyond the losses, whatever the size of the model.
ALLOWED_BYTES = 64


class Spread(NamedTuple):
    """How a step is spread: the sizes of the mesh's axes."""

    k: int = 1
    data: int = 1
    model: int = 1

    @property
    def num_devices(self) -> int:
        return math.prod(self)

    def __str__(self) -> str:
        return "x".join(map(str, self))


class Case(NamedTuple):
    """One program.

    Attributes:
      kind: ``strong`` (the same work for all), ``weak`` (the same work a chip),
        ``indivisible`` (one evaluation more), ``forward`` (one loss) or ``gradient``
        (by backpropagation).
      spread: The sizes of the mesh's axes.
      law: The name of a law, empty where there is none.
      num_directions: K.
      num_sequences: The size of the minibatch.
    """

    kind: str
    spread: Spread
    law: str
    num_directions: int
    num_sequences: int


def mesh_for(platform: str, spread: Spread) -> Mesh:
    if platform == "cpu":
        devices = jax.devices()[: spread.num_devices]
        return Mesh(np.array(devices).reshape(spread), AXES)
    name, bounds = TOPOLOGIES[spread.num_devices]
    devices = mesh_utils.create_device_mesh(
        spread, tpu_topology(name, bounds), allow_split_physical_axes=True
    )
    return Mesh(devices, AXES)


def decoder(platform: str, spread: Spread, num_sequences: int) -> models.Model:
    """1.3B parameters for the TPU, 0.5M for the CPU, spread as is customary.

    A layer's weights are gathered where they are used, its activations stay where
    their sequences are.
    """
    apart = spread.data * spread.model > 1
    options: dict[str, Any] = {"batch_size": num_sequences, "one_by_one": not apart}
    if platform == "cpu":
        options |= {"num_layers": 2, "width": 128, "num_heads": 4, "vocabulary": 1024}
        options |= {"length": 64, "dtype": jnp.float32}
    if spread.model > 1:
        options["weights"] = lambda tree: lax.with_sharding_constraint(tree, P())
    if apart:
        options["activations"] = lambda x: lax.with_sharding_constraint(x, BATCH)
    return models.decoder(**options)


BATCH = P(("data", "model"))


def parameter_spec(leaf: Any) -> P:
    """The last axis of all but vectors is sharded over ``model``."""
    return P() if leaf.ndim < 2 else P(*[None] * (leaf.ndim - 1), "model")


def compiled_case(platform: str, case: Case) -> Any:
    """The program of a case, compiled for its mesh."""
    mesh = mesh_for(platform, case.spread)
    model = decoder(platform, case.spread, case.num_sequences)
    params = placed(model.params, mesh, parameter_spec)
    batch = placed(model.batch, mesh, lambda x: BATCH)
    if case.kind == "forward":
        return compiled_on(mesh, model.loss, (params, batch))
    if case.kind == "gradient":
        return compiled_on(mesh, jax.value_and_grad(model.loss), (params, batch))
    estimator = zo.forward_difference(
        LAWS[case.law], case.num_directions, SMOOTHING, batch_size=1, axis_name="k"
    )
    optimizer = zo.radazo(LEARNING_RATE)
    key = placed(jax.eval_shape(lambda: jax.random.key(0)), mesh, lambda x: P())
    state = placed(jax.eval_shape(optimizer.init, model.params), mesh, parameter_spec)
    step = step_of(model.loss, estimator, optimizer)
    return compiled_on(mesh, step, (params, state, key, batch), (0, 1))


def zeroth_order(case: Case) -> bool:
    return case.kind not in ("forward", "gradient")


def described(platform: str, case: Case) -> dict[str, Any]:
    """What tells a row from all others."""
    return {
        "platform": platform,
        "kind": case.kind,
        "mesh": str(case.spread),
        "law": case.law,
        "K+1": case.num_directions + 1 if zeroth_order(case) else None,
    }


def measured(platform: str, case: Case) -> dict[str, Any]:
    """A row of the record."""
    start = time.perf_counter()
    found = facts(compiled_case(platform, case))
    seconds = time.perf_counter() - start
    of_scalars = zeroth_order(case) and case.spread.model == 1
    update = update_flops(platform, case)
    return {
        **described(platform, case),
        "sequences": case.num_sequences,
        "chips": case.spread.num_devices,
        "allowed_bytes": (
            4 * (case.num_directions + 1) + ALLOWED_BYTES if of_scalars else None
        ),
        "evaluation_flops": found["product_flops"] - update,
        "update_flops": update,
        "compile_s": seconds,
        **found,
    }


def update_flops(platform: str, case: Case) -> int:
    """The products of an update by many factors; every chip makes its shard of it."""
    if case.law != "low_rank" or case.num_directions <= 16:
        return 0
    params = decoder(platform, case.spread, case.num_sequences).params
    matrices = [x for x in jax.tree.leaves(params) if x.ndim > 1]
    # Stacked vectors are drawn dense.
    size = sum(x.size for x in matrices if min(x.shape[-2:]) > 24)
    return 2 * case.num_directions * size // case.spread.model


def cases(platform: str, laws: list[str]) -> Iterator[Case]:
    """For chips that divide the evaluations, but for one case."""
    some = (1, 8, 16) if platform == "tpu" else (1, 2, 4, 8)
    many = (64, 256) if platform == "tpu" else ()
    side = 16 if platform == "tpu" else 2
    most = max(*some, *many)
    for law in laws:
        for n in some:
            # The same evaluations whatever the number of chips; then one a chip.
            yield Case("strong", Spread(k=n), law, max(some) - 1, 4)
        for n in many:
            yield Case("weak", Spread(k=n), law, n - 1, 4)
        for n in (8, *many):
            yield Case("weak", Spread(data=n), law, 7, n)
        spread = Spread(k=side, data=most // side)
        yield Case("weak", spread, law, side - 1, spread.data)
        for spread in sharded(platform):
            num_sequences = spread.data * spread.model
            yield Case("weak", spread, law, spread.k - 1, num_sequences)
        yield Case("indivisible", Spread(k=8), law, max(some), 4)
    for n in (8, *many):
        yield Case("gradient", Spread(data=n), "", 0, n)
    for spread in sharded(platform):
        num_sequences = spread.data * spread.model
        yield Case("forward", spread, "", 0, num_sequences)
        yield Case("gradient", spread, "", 0, num_sequences)


def sharded(platform: str) -> list[Spread]:
    """Meshes over whose last axis the parameters are sharded."""
    return [Spread(2, 2, 2), *([Spread(4, 8, 8)] if platform == "tpu" else [])]


def with_ratios(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows, with what they are compared with where it is among them."""

    def find(kind: str, **wanted: Any) -> dict[str, Any] | None:
        for row in rows:
            if row["kind"] == kind and all(row[k] == v for k, v in wanted.items()):
                return row
        return None

    made = []
    for row in rows:
        row = row | {
            "table": "steps" if row["law"] else "other",
            "replicated": row["mesh"].endswith("x1"),
            "evaluations_spread": row["law"] != "" and row["mesh"].endswith("x1x1"),
            "Tflop": row["evaluation_flops"] / 1e12,
            "Gop": row["elementwise"] / 1e9,
            "sent_MB": row["sent_bytes"] / 1e6,
            "largest_MB": row["largest_bytes"] / 1e6,
            "peak_GB": row["peak_bytes"] / 1e9,
        }
        same = {"platform": row["platform"]}
        if row["allowed_bytes"] is not None:
            row["scalars_alone"] = row["sent_bytes"] <= row["allowed_bytes"]
        alone = find("strong", chips=1, law=row["law"], **same)
        if row["mesh"] == f"{row['chips']}x1x1" and row["law"] and alone is not None:
            one = alone["evaluation_flops"] / alone["K+1"]
            ideal = one * row["K+1"] / row["chips"]
            row["flops/ideal"] = row["evaluation_flops"] / ideal
            row["evaluations"] = row["evaluation_flops"] / one
            row["elementwise/alone"] = row["elementwise"] / alone["elementwise"]
        first_order = find("gradient", mesh=row["mesh"], **same)
        if row["law"] and first_order is not None:
            row["backprop_MB"] = first_order["sent_bytes"] / 1e6
        forward = find("forward", mesh=row["mesh"], **same)
        if row["law"] and forward is not None:
            row["forward_MB"] = forward["sent_bytes"] / 1e6
            row["forward_largest_MB"] = forward["largest_bytes"] / 1e6
            row["none_larger"] = row["largest_bytes"] <= forward["largest_bytes"]
        made.append(row)
    return made


def network_rows(num_parameters: float = 13e9) -> Iterator[dict[str, Any]]:
    """The time to send what a step sends, by arithmetic.

    A gather or sum over N workers takes ⌈log₂ N⌉ rounds at best, each of one latency;
    2 (N − 1) / N times the gradient passes each worker, bfloat16.
    """
    links = {
        "between TPU chips": (1600.0, 1e-3),
        "datacenter": (100.0, 0.05),
        "office network": (1.0, 1.0),
        "internet": (1.0, 50.0),
        "internet, slow": (0.1, 100.0),
    }
    for link, (gigabits, milliseconds) in links.items():
        for n in (8, 64, 1024, 4096):
            rounds = math.ceil(math.log2(n))
            latency = rounds * milliseconds / 1e3
            losses = 4 * n
            gradient = 2 * (n - 1) / n * 2 * num_parameters
            yield {
                "table": "network",
                "link": link,
                "Gbit/s": gigabits,
                "latency_ms": milliseconds,
                "workers": n,
                "losses_bytes": losses,
                "losses_ms": 1e3 * latency + losses * 8 / (gigabits * 1e6),
                "gradient_GB": gradient / 1e9,
                "gradient_s": 2 * latency + gradient * 8 / (gigabits * 1e9),
            }


def plot(rows: list[dict[str, Any]], path: pathlib.Path) -> None:
    """Bytes sent and operations a chip, against the number of chips."""
    figure, axes = plt.subplots(1, 3, figsize=(13, 3.8), layout="constrained")
    sent = {
        "perturbations, K + 1 = chips": ("weak", lambda r: r["mesh"].endswith("x1x1")),
        "minibatch, K + 1 = 8": ("weak", lambda r: r["mesh"].startswith("1x")),
        "backpropagation, minibatch": ("gradient", lambda r: r["mesh"][-2:] == "x1"),
    }
    for label, (kind, chosen) in sent.items():
        found = [
            r for r in rows if r["kind"] == kind and chosen(r) and r["mesh"][-1] == "1"
        ]
        found = [r for r in found if r["law"] in ("", "low_rank")]
        chips = [r["chips"] for r in found]
        axes[0].plot(chips, [r["sent_bytes"] for r in found], "o-", label=label)
        axes[0].set(yscale="log", ylabel="bytes received a step and chip")
    for i, law in enumerate(LAWS):
        found = [r for r in rows if r["kind"] == "strong" and r["law"] == law]
        found = [r for r in found if r["K+1"] % r["chips"] == 0]
        chips = [r["chips"] for r in found]
        flops = [r["evaluation_flops"] for r in found]
        axes[1].plot(chips, flops, "osx^"[i] + "-", label=law, color=f"C{i}", alpha=0.7)
        others = [r["elementwise"] for r in found]
        axes[2].plot(chips, others, "osx^"[i] + "-", label=law, color=f"C{i}")
    axes[1].set(yscale="log", ylabel="flops of products a chip (evaluations)")
    axes[2].set(yscale="log", ylabel="other operations a chip (draws, update)")
    for axis in axes:
        axis.set(xscale="log", xlabel="chips")
        axis.set_xticks(ticks := sorted({r["chips"] for r in rows}), map(str, ticks))
        axis.minorticks_off()
        axis.grid(alpha=0.3)
        axis.legend(fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = cli.parser(__doc__)
    add = parser.add_argument
    add("--platform", choices=["cpu", "tpu"], default="cpu")
    add("--laws", choices=LAWS, nargs="+", default=list(LAWS))
    add("--output", type=pathlib.Path)
    add("--plot", type=pathlib.Path, help="where to put a figure")
    add("--resume", action="store_true", help="take the rows that --output has")
    args = parser.parse_args()
    without_tpu()
    jax.config.update("jax_num_cpu_devices", 8)

    # In the order of the cases, those of other laws of an earlier run included.
    every = [described(args.platform, case) for case in cases(args.platform, [*LAWS])]
    found = resumed(args.output, args.resume, tuple(every[0]))
    for case in cases(args.platform, args.laws):
        wanted = tuple(described(args.platform, case).values())
        if wanted not in found:
            found[wanted] = measured(args.platform, case)
        print(*found[wanted].values(), flush=True)
        ordered = [found[key] for one in every if (key := tuple(one.values())) in found]
        rows = with_ratios(ordered)
        if args.output:
            kind = mesh_for(args.platform, Spread()).devices.flat[0].device_kind
            content = record([*rows, *network_rows()])
            write(args.output, content | {"device": f"compiled for {kind}"})
    print(tabulate(rows, headers="keys"))
    if args.plot:
        plot(rows, args.plot)


if __name__ == "__main__":
    main()
